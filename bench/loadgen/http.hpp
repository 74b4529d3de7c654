// Sockets, and HTTP/1.1 as a client: requests, an incremental response reader, a blocking caller.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <strings.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace kvbench {

[[noreturn]] inline void fail_errno(const std::string& what) {
  throw std::runtime_error(what + ": " + std::strerror(errno));
}

constexpr int kSocketTimeout = 60;  // seconds that a blocking call waits for the server

inline int connect_unix(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) throw std::runtime_error("socket path too long");
  std::strcpy(address.sun_path, path.c_str());
  const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address))
    fail_errno("connect to " + path);
  return fd;
}

inline int connect_tcp(const std::string& url) {
  const size_t colon = url.rfind(':');
  sockaddr_in address{};
  address.sin_family = AF_INET;
  if (colon == std::string::npos ||
      inet_pton(AF_INET, url.substr(0, colon).c_str(), &address.sin_addr) != 1)
    throw std::runtime_error("--url must be IPV4:PORT or unix:/path, not " + url);
  address.sin_port = htons(uint16_t(std::atoi(url.c_str() + colon + 1)));
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address))
    fail_errno("connect to " + url);
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  return fd;
}

// Returns a connected, blocking socket to HOST:PORT or unix:/path.
inline int connect_to(const std::string& url) {
  const std::string scheme = "unix:";
  const bool local = url.rfind(scheme, 0) == 0;
  const int fd = local ? connect_unix(url.substr(scheme.size())) : connect_tcp(url);
  const timeval limit{kSocketTimeout, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  return fd;
}

// Returns a socket that listens on 127.0.0.1; `flags` are added to its type. Several `shared` ones
// may have one port: each gets a part of its connections.
inline int listen_on(long port, int flags, bool shared = false) {
  const int fd = socket(AF_INET, SOCK_STREAM | flags, 0), on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (shared) setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &on, sizeof on);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(uint16_t(port));
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) || listen(fd, 4096))
    fail_errno("listen on port " + std::to_string(port));
  return fd;
}

inline std::string get_request(const std::string& path) {
  return "GET " + path + " HTTP/1.1\r\nHost: localhost\r\n\r\n";
}

inline std::string bodiless_request(const std::string& method, const std::string& path) {
  return method + " " + path + " HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n";
}

inline std::string post_request(const std::string& path, const std::string& body) {
  return "POST " + path + " HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" +
         "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}

// Reads one response from pieces of a byte stream. Knows Content-Length and chunked bodies; a
// response must end before the next one starts, since this client never pipelines.
class ResponseReader {
 public:
  // Takes bytes; returns whether the response is complete.
  bool feed(const char* bytes, size_t count) {
    raw_.append(bytes, count);
    if (!have_head_ && !read_head()) return false;
    return chunked_ ? read_chunks() : read_sized();
  }

  int status() const { return status_; }
  const std::string& body() const { return body_; }

  void reset() {
    raw_.clear();
    body_.clear();
    have_head_ = chunked_ = false;
    status_ = 0;
    at_ = length_ = 0;
  }

 private:
  bool read_head() {
    const size_t end = raw_.find("\r\n\r\n");
    if (end == std::string::npos) return false;
    if (raw_.compare(0, 7, "HTTP/1.") != 0) throw std::runtime_error("not an HTTP/1 response");
    status_ = std::atoi(raw_.c_str() + 9);
    for (size_t line = raw_.find("\r\n"); line < end; line = raw_.find("\r\n", line + 2))
      read_header(raw_.c_str() + line + 2);
    at_ = end + 4;
    have_head_ = true;
    return true;
  }

  void read_header(const char* line) {
    static const std::string length = "content-length:", coding = "transfer-encoding: chunked";
    if (!strncasecmp(line, length.c_str(), length.size()))
      length_ = std::strtoull(line + length.size(), nullptr, 10);
    if (!strncasecmp(line, coding.c_str(), coding.size())) chunked_ = true;
  }

  bool read_sized() {
    if (raw_.size() < at_ + length_) return false;
    body_ = raw_.substr(at_, length_);
    return true;
  }

  bool read_chunks() {
    while (true) {
      const size_t line_end = raw_.find("\r\n", at_);
      if (line_end == std::string::npos) return false;
      const size_t size = std::strtoull(raw_.c_str() + at_, nullptr, 16);
      const size_t data = line_end + 2;
      if (raw_.size() < data + size + 2) return false;
      body_.append(raw_, data, size);
      at_ = data + size + 2;
      if (!size) return true;
    }
  }

  std::string raw_, body_;
  bool have_head_ = false, chunked_ = false;
  int status_ = 0;
  size_t at_ = 0;      // offset in raw_ of the body, then of the next chunk
  size_t length_ = 0;  // Content-Length; 0 without one (servers here send one, or chunks)
};

// A keep-alive connection for one call at a time.
class Caller {
 public:
  explicit Caller(const std::string& url) : url_(url), fd_(connect_to(url)) {}
  ~Caller() { close(fd_); }
  Caller(const Caller&) = delete;

  // Connects anew, as a server may have closed a connection that was idle for long.
  void reconnect() {
    close(fd_);
    fd_ = connect_to(url_);
  }

  // Sends a rendered request and returns the body; throws unless the status is 2xx.
  const std::string& call(const std::string& request) {
    send_all(request);
    reader_.reset();
    char piece[1 << 16];
    ssize_t got;
    do {
      got = recv(fd_, piece, sizeof piece, 0);
      if (got < 0) fail_errno("waiting for a response");
      if (got == 0) throw std::runtime_error("server closed the connection");
    } while (!reader_.feed(piece, size_t(got)));
    if (reader_.status() / 100 != 2) throw std::runtime_error(describe(request));
    return reader_.body();
  }

 private:
  void send_all(const std::string& request) {
    for (size_t sent = 0; sent < request.size();) {
      const ssize_t more = send(fd_, request.data() + sent, request.size() - sent, MSG_NOSIGNAL);
      if (more < 0) fail_errno("sending a request");
      sent += size_t(more);
    }
  }

  std::string describe(const std::string& request) const {
    return request.substr(0, request.find(" HTTP/")) + " answered " +
           std::to_string(reader_.status()) + " " + reader_.body().substr(0, 300);
  }

  std::string url_;
  int fd_;
  ResponseReader reader_;
};

}  // namespace kvbench
