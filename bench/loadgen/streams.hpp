// Modes `streams` and `rounds`: clients of a gateway that read streams of events, on one epoll
// loop.
//
//   streams   next turns of known conversations, in a closed loop or at a rate
//   rounds    every turn of every conversation once (chats.hpp)
//
// Answers are read in place: the head, then the sizes of chunks. Counted are the time of the first
// data and the number of frames by the bytes of data, however a proxy has cut these into chunks.
#pragma once

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>

#include <memory>
#include <vector>

#include "chats.hpp"
#include "http.hpp"
#include "measure.hpp"
#include "sim_engine.hpp"

namespace kvbench {

// Finds the payload and the end of an answer, by chunks or a length, in pieces of a byte stream.
class StreamReader {
 public:
  void reset() { *this = StreamReader(); }

  // Takes bytes; throws if they do not begin an answer with status 200 and a stream of events.
  void feed(const char* data, size_t n) {
    if (!in_body_) {
      head_.append(data, n);
      const size_t end = head_.find("\r\n\r\n");
      if (end == std::string::npos) return;
      read_head(end);
      const std::string rest = head_.substr(end + 4);
      return feed_body(rest.data(), rest.size());
    }
    feed_body(data, n);
  }

  bool whole() const { return whole_; }
  uint64_t payload() const { return payload_; }  // bytes

 private:
  void read_head(size_t end) {
    if (head_.compare(0, 12, "HTTP/1.1 200") != 0)
      throw std::runtime_error("an answer: " + head_.substr(0, 600));
    in_body_ = true;
    for (size_t line = head_.find('\n'); line < end; line = head_.find('\n', line + 1))
      read_header(head_.c_str() + line + 1);
  }

  void read_header(const char* line) {
    static const std::string length = "content-length:", coding = "transfer-encoding: chunked";
    if (!strncasecmp(line, length.c_str(), length.size())) {
      left_ = std::strtoull(line + length.size(), nullptr, 10);
      last_ = true;
    }
    if (!strncasecmp(line, coding.c_str(), coding.size())) chunked_ = true;
  }

  void feed_body(const char* at, size_t n) {
    const char* const end = at + n;
    while (at < end && !whole_) {
      if (left_ > 0) {
        const uint64_t piece = std::min(left_, uint64_t(end - at));
        if (payload_ == 0 && std::memcmp(at, "data:", std::min<size_t>(5, piece)) != 0)
          throw std::runtime_error("no event: " + std::string(at, piece));
        payload_ += piece;
        left_ -= piece;
        at += piece;
        if (left_ > 0) continue;
        if (chunked_) skip_ = 2;
        else whole_ = true;
      } else if (skip_ > 0) {
        const size_t piece = std::min(skip_, size_t(end - at));
        skip_ -= piece;
        at += piece;
        whole_ = last_ && skip_ == 0;
      } else if (!chunked_) {
        throw std::runtime_error("an answer without a length: " + head_.substr(0, 600));
      } else {
        const char c = *at++;
        if (c != '\n') {
          if (c != '\r') size_ = size_ * 16 + uint64_t(c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10);
          continue;
        }
        left_ = size_;
        last_ = size_ == 0;
        if (last_) skip_ = 2;
        size_ = 0;
      }
    }
  }

  std::string head_;
  bool in_body_ = false, chunked_ = false, last_ = false, whole_ = false;
  // Bytes: the size that a chunk's line gives, those left of the chunk or body, all payload.
  uint64_t size_ = 0, left_ = 0, payload_ = 0;
  size_t skip_ = 0;
};

class StreamLoad {
 public:
  StreamLoad(const Options& options, Questions& questions)
      : questions_(questions),
        server_(options.integer("pid", 0)),
        rate_(options.number("rate")),
        epoll_(epoll_create1(0)) {
    const std::vector<std::string> urls = options.list("url");
    for (long i = 0; i < options.integer("conns", 1); i++) {
      connections_.push_back(std::make_unique<Connection>());
      connections_.back()->url = urls[size_t(i) % urls.size()];
      connect_anew(*connections_.back());
      idle_.push_back(connections_.back().get());
    }
    first_us_.reserve(1 << 20);
  }
  ~StreamLoad() {
    for (auto& each : connections_) close(each->fd);
    close(epoll_);
  }

  // Sends requests until `done()`, as fast as answers come.
  template <class Done>
  void run_until(Done done) {
    while (!done()) {
      ask_all();
      turn();
    }
  }

  // Sends requests for `seconds`, at the rate if there is one.
  void run_for(double seconds) {
    const double end = now() + seconds;
    if (rate_ > 0 && timer_ < 0) start_timer();
    while (now() < end) {
      if (rate_ == 0) ask_all();
      turn();
    }
  }

  void measure(double seconds) {
    first_us_.clear();
    requests_ = payload_ = missed_ = 0;
    const Usage before = server_.usage();
    const double own_before = own_cpu_seconds(), start = now();
    run_for(seconds);
    elapsed_ = now() - start;
    const Usage after = server_.usage();
    cpu_ = after.cpu_s() - before.cpu_s();
    user_ = after.user_s - before.user_s;
    rss_ = after.rss_bytes;
    own_cpu_ = own_cpu_seconds() - own_before;
  }

  void print() {
    const double frames = double(payload_) / double(kFrameBytes);
    JsonLine line;
    line.text("mode", "streams").count("conns", connections_.size());
    line.count("requests", requests_).number("rps", double(requests_) / elapsed_);
    line.count("asked", first_us_.size()).count("missed", missed_);
    line.count("open", connections_.size() - idle_.size());
    line.number("first_us", quantile(first_us_, 0.5))
        .number("first_p99_us", quantile(first_us_, 0.99));
    line.number("frames", frames).number("frames_per_s", frames / elapsed_);
    line.number("own_cpu_share", own_cpu_ / elapsed_);
    if (server_.known()) {
      if (requests_) line.number("cpu_us", cpu_ * 1e6 / double(requests_));
      if (requests_) line.number("user_us", user_ * 1e6 / double(requests_));
      if (frames > 0) line.number("frame_cpu_us", cpu_ * 1e6 / frames);
      line.number("cpu_share", cpu_ / elapsed_);
      line.number("rss_mb", double(rss_) / 1e6);
    }
    line.print();
  }

 private:
  static constexpr double kStall = 60;  // seconds without an answer after which a run fails

  struct Connection {
    std::string url;
    int fd = -1;
    std::string request;
    size_t sent = 0;
    bool busy = false;
    double started = 0;
    StreamReader reader;
  };

  void connect_anew(Connection& connection) {
    if (connection.fd >= 0) close(connection.fd);
    connection.fd = connect_to(connection.url);
    fcntl(connection.fd, F_SETFL, O_NONBLOCK);
    epoll_event event{};
    event.events = EPOLLIN | EPOLLOUT | EPOLLET;
    event.data.ptr = &connection;
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, connection.fd, &event)) fail_errno("epoll_ctl");
  }

  void start_timer() {
    timer_ = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    itimerspec times{};
    times.it_interval.tv_sec = long(1 / rate_);
    times.it_interval.tv_nsec = long(1e9 / rate_) % 1000000000;
    times.it_value = times.it_interval;
    timerfd_settime(timer_, 0, &times, nullptr);
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = nullptr;
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, timer_, &event)) fail_errno("epoll_ctl");
  }

  void ask_all() {
    while (!idle_.empty() && ask()) continue;
  }

  bool ask() {
    if (idle_.empty()) {
      missed_++;
      return false;
    }
    if (!questions_.next(body_)) return false;
    Connection& connection = *idle_.back();
    idle_.pop_back();
    connection.request =
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\naccept: application/json\r\n"
        "content-type: application/json\r\nuser-agent: kvbench\r\nauthorization: Bearer none\r\n"
        "content-length: " +
        std::to_string(body_.size()) + "\r\n\r\n" + body_;
    connection.sent = 0;
    connection.busy = true;
    connection.reader.reset();
    connection.started = now();
    send_more(connection);
    return true;
  }

  void send_more(Connection& connection) {
    while (connection.sent < connection.request.size()) {
      const ssize_t more = send(connection.fd, connection.request.data() + connection.sent,
                                connection.request.size() - connection.sent, MSG_NOSIGNAL);
      if (more < 0 && errno == EAGAIN) return;
      if (more < 0) fail_errno("sending a request");
      connection.sent += size_t(more);
    }
  }

  void turn() {
    epoll_event events[64];
    const int ready = epoll_wait(epoll_, events, 64, int(kStall * 1000));
    if (ready < 0) fail_errno("epoll_wait");
    if (ready == 0) throw std::runtime_error("the server has stalled");
    for (int i = 0; i < ready; i++) {
      if (events[i].data.ptr == nullptr) {
        on_timer();
        continue;
      }
      auto& connection = *static_cast<Connection*>(events[i].data.ptr);
      if (connection.busy) send_more(connection);
      if (events[i].events & ~uint32_t(EPOLLOUT)) receive(connection);
    }
  }

  void on_timer() {
    uint64_t times = 0;
    if (read(timer_, &times, sizeof times) != sizeof times) return;
    while (times-- > 0 && ask()) continue;
  }

  void receive(Connection& connection) {
    static char piece[1 << 18];
    for (;;) {
      const ssize_t got = recv(connection.fd, piece, sizeof piece, 0);
      if (got < 0 && errno == EAGAIN) return;
      if (got <= 0) {
        if (connection.busy) throw std::runtime_error("the server has closed a stream");
        return connect_anew(connection);
      }
      const uint64_t before = connection.reader.payload();
      connection.reader.feed(piece, size_t(got));
      const uint64_t after = connection.reader.payload();
      payload_ += after - before;
      if (before == 0 && after > 0) first_us_.push_back(float((now() - connection.started) * 1e6));
      if (connection.reader.whole()) {
        connection.busy = false;
        idle_.push_back(&connection);
        requests_++;
        questions_.answered();
      }
      if (size_t(got) < sizeof piece) return;
    }
  }

  std::string body_;
  Questions& questions_;
  ServerProcess server_;
  double rate_;
  int epoll_, timer_ = -1;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::vector<Connection*> idle_;
  std::vector<float> first_us_;  // microseconds from the first byte sent to the first data
  uint64_t requests_ = 0, payload_ = 0, missed_ = 0;  // missed: no connection was idle for one
  double elapsed_ = 0, cpu_ = 0, user_ = 0, own_cpu_ = 0;
  long rss_ = 0;
};

inline int run_streams(const Options& options) {
  FollowUps questions(options);
  StreamLoad load(options, questions);
  load.run_until([&] { return questions.introduced(); });
  load.run_for(options.number("warm"));
  load.measure(options.number("secs"));
  load.print();
  return 0;
}

inline int run_rounds(const Options& options) {
  Rounds questions(options);
  StreamLoad load(options, questions);
  load.run_until([&] { return questions.ended(); });
  JsonLine().text("mode", "rounds").print();
  return 0;
}

}  // namespace kvbench
