// ways: prototypes of a server that answers /query with more than one core. They use the core's own
// scanner, hashes, index and answers; their HTTP is the least that kvbench needs.
//
//   one      [loop: HTTP, scan and hash, match, events]        several of it on one port are
//                                                              processes with an index each
//   helper   [loop: HTTP, match, events] <=> [thread: scan and hash]
//
//   readers  [loop: HTTP, scan and hash, match, events] --+-- one index: questions share its lock,
//            [loop: HTTP, scan and hash, match] ----------+   events take it alone
//
//   shards   [front: HTTP, scan and hash, merge] <=> [shard: match, events of half of the engines]
//                                                <=> [shard: match, events of the other half]
//
//   usage: ways WAY PORT...
//
// Each [] is a thread with the name of its role, which shows in /proc/PID/task/TID/comm. Loop and
// helper pass connections through queues; front and shards send messages over Unix sockets, as if
// they were processes. All ports share their addresses with other processes (SO_REUSEPORT).
//
// A client must wait for its answer. Processes run until they are killed.
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/uio.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "index/answer.hpp"
#include "index/match.hpp"
#include "index/stream.hpp"
#include "json/scan.hpp"
#include "loadgen/http.hpp"
#include "zmq/sub_socket.hpp"

namespace {

using kvbench::fail_errno;
using Hashes = std::vector<uint64_t>;

constexpr uint32_t kBlockSize = 16;  // tokens
constexpr size_t kThreads = 2;       // that read one index, or shards

// ---- loops

class Readable {
 public:
  virtual ~Readable() = default;
  virtual void ready() = 0;  // the descriptor can be read
};

class Poll {
 public:
  // May be called by any thread.
  void add(int fd, Readable& source) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = &source;
    if (epoll_ctl(fd_, EPOLL_CTL_ADD, fd, &event)) fail_errno("epoll_ctl");
  }

  [[noreturn]] void run() {
    epoll_event events[64];
    for (;;) {
      const int ready = epoll_wait(fd_, events, 64, -1);
      for (int i = 0; i < ready; i++) static_cast<Readable*>(events[i].data.ptr)->ready();
    }
  }

 private:
  int fd_ = epoll_create1(0);
};

void run_thread(Poll& poll, const char* role) {
  std::thread([&poll, role] {
    pthread_setname_np(pthread_self(), role);
    poll.run();
  }).detach();
}

// ---- an index

// An index, and the engines whose events it applies in the thread of `poll`. If it is locked, any
// thread may match.
class Holdings {
 public:
  Holdings(Poll& poll, bool is_locked) : poll_(poll), is_locked_(is_locked) {}

  // Subscribes to a further engine, at a port of 127.0.0.1.
  void subscribe(uint64_t worker, uint64_t port) {
    const auto held = guard<std::unique_lock<std::shared_mutex>>();
    engines_.push_back(std::make_unique<Engine>(*this, std::to_string(worker), port));
    workers_.push_back(&engines_.back()->worker);
    poll_.add(engines_.back()->socket.fd(), *engines_.back());
  }

  const kvd::Index& index() const { return index_; }
  const std::vector<const kvd::Worker*>& workers() const { return workers_; }

  // Calls `use(match)` while nothing changes.
  template <class Use>
  void match(const Hashes& hashes, Use&& use) {
    thread_local kvd::Match match;
    const auto held = guard<std::shared_lock<std::shared_mutex>>();
    match.reset(index_);
    match.add(index_, hashes.data(), hashes.size(), kvd::Match::SaltFilter::kAll);
    use(match);
  }

 private:
  struct Engine final : Readable {
    Engine(Holdings& at, const std::string& number, uint64_t port)
        : holdings(at),
          socket(kvbench::connect_to("127.0.0.1:" + std::to_string(port)), 1 << 26, {""}),
          stream(at.index_, worker, 0, at.stats_) {
      worker.key = '"' + number + '"';
      worker.number = number;
      at.index_.rank(worker.rank(at.index_, 0)).listed = true;
      socket.shake();
    }

    void ready() override {
      if (!socket.joined()) return socket.shake();
      socket.begin();
      while (socket.next() == kvd::ReceiveOutcome::event) {
        const auto held = holdings.guard<std::unique_lock<std::shared_mutex>>();
        const auto* payload = reinterpret_cast<const uint8_t*>(socket.payload());
        uint32_t outcome = stream.apply(payload, socket.size(), UINT32_MAX);
        while (outcome == kvd::kUnfinished) outcome = stream.advance(UINT32_MAX);
      }
      socket.park();
      if (socket.fault() != nullptr) socket.hang_up();  // the engines have ended
    }

    Holdings& holdings;
    kvd::Worker worker;
    kvd::SubSocket socket;
    kvd::Stream stream;
  };

  template <class Lock>
  Lock guard() {
    return is_locked_ ? Lock(lock_) : Lock();
  }

  Poll& poll_;
  const bool is_locked_;
  std::shared_mutex lock_;
  kvd::Index index_{kBlockSize};
  kvd::IngestStats stats_;
  std::vector<std::unique_ptr<Engine>> engines_;
  std::vector<const kvd::Worker*> workers_;
};

// ---- HTTP

class Connection;

// What a way does with requests.
struct Handlers {
  std::function<void(Connection&)> ask;  // answers a question with `reply`, now or later
  std::function<void(uint64_t worker, uint64_t port)> subscribe;  // of an engine
};

class Connection final : public Readable {
 public:
  Connection(int fd, const Handlers& handlers) : fd_(fd), handlers_(handlers), in_(1 << 14) {}
  ~Connection() override { close(fd_); }

  void ready() override {
    const ssize_t got = recv(fd_, in_.data() + have_, in_.size() - have_, MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) return delete this;
    have_ += size_t(got);
    if (head_ == 0 && !read_head()) return;
    if (have_ == head_ + length_) handle();
  }

  std::string_view body() const { return {in_.data() + head_, length_}; }

  void reply(std::string_view body) {
    char head[128];
    const int size = std::snprintf(head, sizeof head,
                                   "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                                   "content-length: %zu\r\n\r\n",
                                   body.size());
    iovec parts[] = {{head, size_t(size)}, {const_cast<char*>(body.data()), body.size()}};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    have_ = head_ = length_ = 0;  // before the client may send again
    if (sendmsg(fd_, &message, MSG_NOSIGNAL) < 0) fail_errno("sending an answer");
  }

  Hashes hashes;  // of the question's blocks

 private:
  bool read_head() {
    const std::string_view all(in_.data(), have_);
    const size_t end = all.find("\r\n\r\n");
    if (end == all.npos) return false;
    constexpr std::string_view kLength = "\r\nContent-Length: ";  // in kvbench's spelling
    const size_t at = all.substr(0, end).find(kLength);
    head_ = end + 4;
    length_ = at == all.npos ? 0 : std::strtoull(&in_[at + kLength.size()], nullptr, 10);
    in_.resize(std::max(in_.size(), head_ + length_ + 1));
    return true;
  }

  void handle() {
    const std::string_view all(in_.data(), have_);
    if (all.substr(0, 12) == "POST /query ") return handlers_.ask(*this);
    if (all.substr(0, 15) == "POST /register ")
      handlers_.subscribe(number_behind("\"instance_id\":"), number_behind("tcp://127.0.0.1:"));
    reply("{}");
  }

  uint64_t number_behind(std::string_view text) const {
    return std::strtoull(body().data() + body().find(text) + text.size(), nullptr, 10);
  }

  const int fd_;
  const Handlers& handlers_;
  std::vector<char> in_;
  size_t have_ = 0, head_ = 0, length_ = 0;  // bytes received, of the head, of the body
};

// Accepts connections, for one loop after the other.
class Listener final : public Readable {
 public:
  Listener(int fd, std::vector<Poll>& polls, const Handlers& handlers)
      : fd_(fd), polls_(polls), handlers_(handlers) {
    polls_[0].add(fd, *this);
  }

  void ready() override {
    const int client = accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC), on = 1;
    if (client < 0) fail_errno("accept");
    setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    polls_[next_++ % polls_.size()].add(client, *new Connection(client, handlers_));
  }

 private:
  const int fd_;
  std::vector<Poll>& polls_;
  const Handlers& handlers_;
  size_t next_ = 0;
};

// Scans a question and hashes its blocks, in any thread.
void prepare(Connection& asked) {
  thread_local kvd::scanning::BodyScan scan = [] {
    kvd::scanning::BodyScan made;
    made.add_array("token_ids", kvd::scanning::Element::u32);
    return made;
  }();
  const std::string_view body = asked.body();
  scan.scan(reinterpret_cast<const uint8_t*>(body.data()), body.size());
  asked.hashes.resize(scan.narrow(0).size() / kBlockSize);
  kvd::local_hashes(scan.narrow(0).data(), asked.hashes.size(), kBlockSize, kvd::kBaseSeed,
                    asked.hashes.data());
}

// Matches a prepared question and answers it.
void answer(Connection& asked, Holdings& holdings) {
  thread_local std::string memory;
  std::string_view text;
  holdings.match(asked.hashes, [&](const kvd::Match& match) {
    text = kvd::Answer(holdings.index(), match).render(holdings.workers(), memory);
  });
  asked.reply(text);
}

// ---- helper: hands questions from thread to thread

class Queue final : public Readable {
 public:
  Queue(Poll& to, std::function<void(Connection&)> handle) : handle_(std::move(handle)) {
    to.add(fd_, *this);
  }

  void push(Connection& asked) {
    const std::lock_guard<std::mutex> held(lock_);
    waiting_.push_back(&asked);
    if (waiting_.size() == 1) eventfd_write(fd_, 1);
  }

  void ready() override {
    eventfd_t count;
    eventfd_read(fd_, &count);
    {
      const std::lock_guard<std::mutex> held(lock_);
      taken_.swap(waiting_);
    }
    for (Connection* asked : taken_) handle_(*asked);
    taken_.clear();
  }

 private:
  const int fd_ = eventfd(0, 0);
  const std::function<void(Connection&)> handle_;
  std::mutex lock_;
  std::vector<Connection*> waiting_, taken_;
};

// ---- shards: processes in all but name, one half of the engines each

// A message to a shard: the connection that asks, and hashes; or 0, a worker and its engine's port.
// Its answer: the connection, and a row for each of its workers. Answers are so short that all that
// are on their way fit into the socket: a shard never waits for the front, which may wait for it.
using Words = std::vector<uint64_t>;
constexpr size_t kRow = 4;              // worker, and its depths on device, host and disk
constexpr size_t kMostWords = 1 << 15;  // of a message

void send_words(int fd, const Words& words) {
  if (send(fd, words.data(), words.size() * sizeof words[0], MSG_NOSIGNAL) < 0)
    fail_errno("between front and shard");
}

void receive_words(int fd, Words& words) {
  thread_local uint64_t memory[kMostWords];
  const ssize_t got = recv(fd, memory, sizeof memory, 0);
  if (got <= 0) fail_errno("between front and shard");
  words.assign(memory, memory + size_t(got) / sizeof memory[0]);
}

class Shard final : public Readable {
 public:
  explicit Shard(int fd) : fd_(fd), holdings_(poll_, false) {
    poll_.add(fd, *this);
    run_thread(poll_, "shard");
  }

  void ready() override {
    receive_words(fd_, message_);
    if (message_[0] == 0) return holdings_.subscribe(message_[1], message_[2]);
    hashes_.assign(message_.begin() + 1, message_.end());
    message_.resize(1);
    holdings_.match(hashes_, [&](const kvd::Match& match) {
      for (const kvd::Worker* worker : holdings_.workers()) {
        const auto depth = match.depth(worker->ranks[0].second);
        const uint64_t number = std::stoull(worker->number);
        message_.insert(message_.end(), {number, depth.device, depth.host, depth.disk});
      }
    });
    send_words(fd_, message_);
  }

 private:
  const int fd_;
  Poll poll_;
  Holdings holdings_;
  Hashes hashes_;
  Words message_;
};

class Front {
 public:
  explicit Front(Poll& poll) {
    for (size_t i = 0; i < kThreads; i++) {
      int ends[2];
      if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends)) fail_errno("socketpair");
      links_.push_back(std::make_unique<Link>(*this, ends[0]));
      poll.add(ends[0], *links_.back());
      shards_.push_back(std::make_unique<Shard>(ends[1]));
    }
  }

  void subscribe(uint64_t worker, uint64_t port) {
    send_words(links_[worker % kThreads]->fd, {0, worker, port});
  }

  void ask(Connection& asked) {
    prepare(asked);
    message_.assign(1, reinterpret_cast<uint64_t>(&asked));
    message_.insert(message_.end(), asked.hashes.begin(), asked.hashes.end());
    for (const auto& link : links_) send_words(link->fd, message_);
  }

 private:
  struct Link final : Readable {
    Link(Front& of, int end) : front(of), fd(end) {}
    void ready() override { front.receive(fd); }

    Front& front;
    const int fd;
  };

  struct Merge {
    Words rows;
    size_t answers = 0;
  };

  void receive(int fd) {
    receive_words(fd, message_);
    Merge& merge = merges_[message_[0]];
    merge.rows.insert(merge.rows.end(), message_.begin() + 1, message_.end());
    if (++merge.answers < kThreads) return;
    reinterpret_cast<Connection*>(message_[0])->reply(render(merge.rows));
    merge = Merge();
  }

  // As kvd::Answer does it, for workers of one rank that hold no block without those before it.
  std::string_view render(const Words& rows) {
    const auto tokens = [&rows](size_t at) { return rows[at] * kBlockSize; };
    Words holders;  // of each block
    for (size_t i = 0; i < rows.size(); i += kRow) {
      const uint64_t depth = rows[i + 1];
      if (holders.size() < depth) holders.resize(depth);
      if (depth) holders[depth - 1]++;
    }
    for (size_t at = holders.size(); at > 1; at--) holders[at - 2] += holders[at - 1];
    const size_t room = 64 + rows.size() * 64 + holders.size() * (kvd::kMaxDigits + 1);
    if (memory_.size() < room) memory_.resize(room);
    char* to = memory_.data();
    const auto put = [&to](auto... pieces) { ((to = kvd::put(to, pieces)), ...); };
    put("{\"scores\":{");
    for (size_t i = 0; i < rows.size(); i += kRow)
      put(i ? ",\"" : "\"", rows[i], "\":{\"0\":", tokens(i + 1), "}");
    put("},\"frequencies\":[");
    for (size_t block = 0; block < holders.size(); block++) put(block ? "," : "", holders[block]);
    put("],\"instances\":{");
    for (size_t i = 0; i < rows.size(); i += kRow)
      put(i ? ",\"" : "\"", rows[i], "\":{\"longest_matched\":", tokens(i + 3),
          ",\"gpu\":", tokens(i + 1), ",\"dp\":{\"0\":", tokens(i + 1), "},\"cpu\":", tokens(i + 2),
          ",\"disk\":", tokens(i + 3), "}");
    put("}}");
    return {memory_.data(), size_t(to - memory_.data())};
  }

  std::vector<std::unique_ptr<Shard>> shards_;
  std::vector<std::unique_ptr<Link>> links_;
  std::unordered_map<uint64_t, Merge> merges_;
  Words message_;
  std::string memory_;  // of the answer
};

// ---- the ways

// Serves the ports in loops that share the handlers; the first runs in this thread.
[[noreturn]] void serve(std::vector<Poll>& loops, const Handlers& handlers,
                        const std::vector<long>& ports) {
  for (const long port : ports)
    new Listener(kvbench::listen_on(port, 0, true), loops, handlers);  // for ever
  for (size_t i = 1; i < loops.size(); i++) run_thread(loops[i], "loop");
  loops[0].run();
}

[[noreturn]] void run(const std::string& way, const std::vector<long>& ports) {
  std::vector<Poll> loops(way == "readers" ? kThreads : 1);
  if (way == "shards") {
    pthread_setname_np(pthread_self(), "front");
    Front front(loops[0]);
    serve(loops,
          {[&](Connection& asked) { front.ask(asked); },
           [&](uint64_t worker, uint64_t port) { front.subscribe(worker, port); }},
          ports);
  }
  pthread_setname_np(pthread_self(), "loop");
  Holdings holdings(loops[0], way == "readers");
  Handlers handlers{[&](Connection& asked) {
                      prepare(asked);
                      answer(asked, holdings);
                    },
                    [&](uint64_t worker, uint64_t port) { holdings.subscribe(worker, port); }};
  if (way != "helper") serve(loops, handlers, ports);
  Poll beside;
  Queue prepared(loops[0], [&](Connection& asked) { answer(asked, holdings); });
  Queue waiting(beside, [&](Connection& asked) {
    prepare(asked);
    prepared.push(asked);
  });
  run_thread(beside, "helper");
  handlers.ask = [&](Connection& asked) { waiting.push(asked); };
  serve(loops, handlers, ports);
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> ways = {"one", "helper", "readers", "shards"};
  if (argc < 3 || std::find(ways.begin(), ways.end(), argv[1]) == ways.end()) {
    std::fprintf(stderr, "usage: ways one|helper|readers|shards PORT...\n");
    return 2;
  }
  std::vector<long> ports;
  for (int i = 2; i < argc; i++) ports.push_back(std::atol(argv[i]));
  try {
    run(argv[1], ports);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ways %s: %s\n", argv[1], error.what());
    return 1;
  }
}
