// Mode `notice`: the shortest time from publishing an event until an answer shows it. The server is
// a process of its own that understands nothing but where a ZMQ message ends:
//
//   engine (XPUB), client ── event ──> server: counts messages
//                         <── count ── of both, each on a TCP connection
#pragma once

#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "engines.hpp"
#include "http.hpp"
#include "measure.hpp"
#include "options.hpp"

namespace kvbench {

// A subscriber that only counts: ZMTP 3.0 without security.
class MessageCounter {
 public:
  explicit MessageCounter(const std::string& endpoint)
      : fd_(connect_to(endpoint.substr(endpoint.rfind('/') + 1))) {
    std::string greeting("\xff\0\0\0\0\0\0\0\0\x7f\3\0NULL", 16);
    greeting.resize(kGreeting);
    send_bytes(greeting);
    send_bytes(std::string("\4\x19\5READY\xbSocket-Type\0\0\0\3SUB", 27));
    while (bytes_.size() < kGreeting) receive();
    bytes_.erase(0, kGreeting);
    while (frame_end(0) > bytes_.size()) receive();  // the engine's own READY
    send_bytes(std::string("\0\1\1", 3));            // subscribes to everything
  }

  int fd() const { return fd_; }
  long messages() const { return messages_; }

  // Counts the messages that end in what has arrived.
  void read() {
    receive();
    size_t at = 0;
    for (size_t end; (end = frame_end(at)) <= bytes_.size(); at = end) {
      constexpr int kMore = 1, kCommand = 4;
      if (!(bytes_[at] & (kMore | kCommand))) messages_++;
    }
    bytes_.erase(0, at);
  }

 private:
  static constexpr size_t kGreeting = 64;

  void send_bytes(const std::string& bytes) {
    if (send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL) < 0) fail_errno("greeting an engine");
  }

  // Returns where a frame ends: a byte of flags, one of length, as events here are short.
  size_t frame_end(size_t at) const {
    return at + 2 > bytes_.size() ? at + 2 : at + 2 + size_t(uint8_t(bytes_[at + 1]));
  }

  void receive() {
    char piece[4096];
    const ssize_t got = recv(fd_, piece, sizeof piece, 0);
    if (got <= 0) throw std::runtime_error("the engine has gone");
    bytes_.append(piece, size_t(got));
  }

  int fd_;
  long messages_ = 0;
  std::string bytes_;
};

// Answers each receive with the number of messages so far, until the client leaves.
inline void answer_counts(int client, MessageCounter& counter, bool awake) {
  char request[4096];
  pollfd readable[] = {{client, POLLIN, 0}, {counter.fd(), POLLIN, 0}};
  for (;;) {
    while (poll(readable, 2, awake ? 0 : -1) == 0) continue;
    if (readable[1].revents) counter.read();
    if (!readable[0].revents) continue;
    if (recv(client, request, sizeof request, 0) <= 0) return;
    const std::string count = std::to_string(counter.messages());
    const std::string answer =
        "HTTP/1.1 200 OK\r\ncontent-length: " + std::to_string(count.size()) + "\r\n\r\n" + count;
    if (send(client, answer.data(), answer.size(), MSG_NOSIGNAL) < 0) return;
  }
}

// Starts the server for one client and one engine, which it connects to once the client has.
inline void fork_server(int listener, const int (&endpoints)[2], bool awake) {
  if (fork()) return;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  char endpoint[128];
  const ssize_t length = read(endpoints[0], endpoint, sizeof endpoint);
  MessageCounter counter(std::string(endpoint, size_t(length)));
  answer_counts(accept(listener, nullptr, nullptr), counter, awake);
  _exit(0);
}

inline int run_notice(const Options& options) {
  constexpr double kApart = 0.003;  // seconds, after which all have gone back to sleep
  const int listener = listen_on(0, 0);
  sockaddr_in address{};
  socklen_t size = sizeof address;
  int endpoints[2];
  if (getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) || pipe(endpoints))
    fail_errno("starting a server");
  fork_server(listener, endpoints, options.integer("awake", 0) != 0);
  Engines engine(1);  // not before the fork, as libzmq has threads
  const std::string& endpoint = engine.endpoint(0);
  if (write(endpoints[1], endpoint.data(), endpoint.size()) < 0) fail_errno("naming an engine");
  engine.wait_subscribed(1);
  {
    Caller server("127.0.0.1:" + std::to_string(ntohs(address.sin_port)));
    const std::string event(80, 'e');  // as long as one of a single block
    std::vector<float> micros;
    const long samples = options.integer("samples", 1);
    for (long i = 1; i <= samples; i++) {
      sleep_seconds(kApart);
      const double start = now();
      engine.publish(0, event);
      while (server.call(get_request("/")) != std::to_string(i)) continue;
      micros.push_back(float((now() - start) * 1e6));
    }
    JsonLine line;
    line.text("mode", "notice").count("samples", size_t(samples));
    line.number("p50_us", quantile(micros, 0.50)).number("p99_us", quantile(micros, 0.99)).print();
  }
  wait(nullptr);
  return 0;
}

}  // namespace kvbench
