// Modes `http`, closed-loop load over keep-alive connections in one epoll loop, and `bodies`, which
// prints the bodies that this load would send.
#pragma once

#include <fcntl.h>
#include <sys/epoll.h>

#include <memory>
#include <vector>

#include "http.hpp"
#include "kinds.hpp"
#include "measure.hpp"

namespace kvbench {

inline int run_bodies(const Options& options) {
  for (const Script& script : make_scripts(options, options.integer("count", 1)))
    for (const Post& post : script)
      if (!post.body.empty()) std::printf("%s\n", post.body.c_str());
  return 0;
}

// A connection with at most one request under way.
class Connection {
 public:
  Connection(const std::string& url, size_t first_script)
      : script(first_script), fd_(connect_to(url)) {
    fcntl(fd_, F_SETFL, O_NONBLOCK);
  }
  ~Connection() { close(fd_); }
  Connection(const Connection&) = delete;

  int fd() const { return fd_; }
  bool busy() const { return unsent_ != nullptr; }
  const ResponseReader& response() const { return reader_; }
  double seconds_since_start() const { return now() - started_; }

  void start(const std::string& bytes) {
    unsent_ = &bytes;
    sent_ = 0;
    reader_.reset();
    started_ = now();
    send_more();
  }

  // Sends what the socket takes; the loop calls again when it takes more.
  void send_more() {
    while (unsent_ && sent_ < unsent_->size()) {
      const ssize_t more =
          send(fd_, unsent_->data() + sent_, unsent_->size() - sent_, MSG_NOSIGNAL);
      if (more < 0 && errno == EAGAIN) return;
      if (more < 0) fail_errno("sending a request");
      sent_ += size_t(more);
    }
  }

  // Reads all available bytes; returns whether they completed the response.
  bool receive() {
    static char piece[1 << 18];
    bool complete = false;
    while (true) {
      const ssize_t got = recv(fd_, piece, sizeof piece, 0);
      if (got < 0 && errno == EAGAIN) break;
      if (got < 0) fail_errno("waiting for a response");
      if (got == 0) throw std::runtime_error("server closed a connection under load");
      complete = reader_.feed(piece, size_t(got));
      // A short read has emptied the socket; later bytes raise a new edge.
      if (size_t(got) < sizeof piece) break;
    }
    if (complete) unsent_ = nullptr;
    return complete;
  }

  size_t script;    // index of its current script
  size_t step = 0;  // position in the script of the request it sends next; 0 begins a script

 private:
  int fd_;
  const std::string* unsent_ = nullptr;  // request under way; null: none
  size_t sent_ = 0;
  ResponseReader reader_;
  double started_ = 0;
};

// Closed loop: every connection sends its next request as soon as it has its response.
class Load {
 public:
  Load(const Options& options, std::vector<Requests> scripts)
      : scripts_(std::move(scripts)),
        server_(options.integer("pid", 0)),
        warm_(options.number("warm")),
        seconds_(options.number("secs")),
        epoll_(epoll_create1(0)) {
    const long count = options.integer("conns", 1);
    for (long i = 0; i < count; i++) add_connection(options.text("url"), size_t(i));
    latencies_.reserve(1 << 20);  // no reallocation while the clock runs
  }
  ~Load() { close(epoll_); }

  void run() {
    for (auto& connection : connections_) begin(*connection);
    run_for(warm_);
    latencies_.clear();
    const Usage before = server_.usage();
    const double own_before = own_cpu_seconds(), start = now();
    run_for(seconds_);
    elapsed_ = now() - start;
    const Usage after = server_.usage();
    own_cpu_ = own_cpu_seconds() - own_before;
    user_ = after.user_s - before.user_s;
    system_ = after.system_s - before.system_s;
    rss_ = after.rss_bytes;
    finish();
  }

  void print(const Options& options) {
    const double requests = double(latencies_.size()), per = requests ? 1e6 / requests : 0;
    JsonLine line;
    line.text("mode", "http").text("kind", options.text("kind"));
    line.count("conns", connections_.size()).count("request_bytes", scripts_[0][0].size());
    line.count("requests", latencies_.size()).number("rps", requests / elapsed_);
    line.number("p50_us", quantile(latencies_, 0.50));
    line.number("p99_us", quantile(latencies_, 0.99));
    line.number("p999_us", quantile(latencies_, 0.999));
    line.number("max_us", quantile(latencies_, 1.0));
    line.number("client_cpu_us", own_cpu_ * per);
    if (server_.known()) {
      line.number("cpu_us", (user_ + system_) * per);
      line.number("user_us", user_ * per).number("system_us", system_ * per);
      line.number("rss_mib", double(rss_) / (1 << 20));
    }
    line.print();
  }

 private:
  static constexpr double kStall = 60;  // seconds without any response after which a run fails

  void add_connection(const std::string& url, size_t number) {
    connections_.push_back(std::make_unique<Connection>(url, number % scripts_.size()));
    epoll_event event{};
    // Edge-triggered, so that long requests get EPOLLOUT when needed, without calls to turn it on.
    event.events = EPOLLIN | EPOLLOUT | EPOLLET;
    event.data.ptr = connections_.back().get();
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, connections_.back()->fd(), &event))
      fail_errno("epoll_ctl");
  }

  void begin(Connection& connection) {
    const Requests& script = scripts_[connection.script];
    connection.start(script[connection.step]);
    connection.step = (connection.step + 1) % script.size();
    if (connection.step) return;
    // Connections stride through the scripts so that they do not all send the same one.
    connection.script = (connection.script + connections_.size()) % scripts_.size();
  }

  void run_for(double seconds) {
    const double end = now() + seconds;
    while (now() < end) turn(true);
  }

  // Completes the scripts under way, so that they leave no bookings and no load for the next run.
  void finish() {
    const auto busy = [](const auto& connection) { return connection->busy(); };
    while (std::any_of(connections_.begin(), connections_.end(), busy)) turn(false);
  }

  // Does one epoll round. If `measured`, its responses count, and connections go on with the next
  // script.
  void turn(bool measured) {
    epoll_event events[64];
    const int ready = epoll_wait(epoll_, events, 64, int(kStall * 1000));
    if (ready < 0) fail_errno("epoll_wait");
    if (ready == 0) throw std::runtime_error("server stalled");
    for (int i = 0; i < ready; i++) {
      auto& connection = *static_cast<Connection*>(events[i].data.ptr);
      connection.send_more();
      if (!(events[i].events & ~uint32_t(EPOLLOUT)) || !connection.receive()) continue;
      // Responses after the end of a run are not counted: the run did not wait for them.
      if (measured) latencies_.push_back(float(connection.seconds_since_start() * 1e6));
      check(connection.response());
      if (measured || connection.step) begin(connection);
    }
  }

  static void check(const ResponseReader& response) {
    if (response.status() / 100 == 2) return;
    throw std::runtime_error("status " + std::to_string(response.status()) +
                             " under load: " + response.body().substr(0, 300));
  }

  std::vector<Requests> scripts_;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::vector<float> latencies_;  // microseconds
  ServerProcess server_;
  double warm_, seconds_;
  int epoll_;
  double elapsed_ = 0, own_cpu_ = 0, user_ = 0, system_ = 0;
  long rss_ = 0;
};

inline int run_http(const Options& options) {
  Load load(options, make_requests(options));
  load.run();
  load.print(options);
  return 0;
}

}  // namespace kvbench
