// Carries requests to engines and their answers to clients, without a line of Python per chunk.
//
//              head, body as given                     one Exchange per request
//   client ──────────────────────────────────────────────> engine
//          <── head, frames ── held, then forwarded <────── recv, decode
//
//   connecting ─> sending ─> head ─> holding ─> ready ──(forward)──> forwarding ─> draining ─> END
//        └───────────┴─────────┴────────┴─────────┴──── END: the engine failed, the client left,
//                                                        it took too long
//
// Nothing reaches the client before Python has seen how the answer begins: the head, with the first
// event of a stream, or the whole of any other answer up to `hold` bytes. So an engine that dies
// after its head, or whose first event says that it is overloaded, costs the client nothing: Python
// drops the exchange and begins one with another engine. A compressed stream, in which no event can
// be found, is held until its first byte. From `forward` on, bytes pass from socket to socket: one
// receive, one send, with the frames between chunks made anew.
//
// A client that does not read stops its engine: when kWindow bytes wait for the client, the relay
// stops reading the engine's socket until the client has taken them. A client that ends its stream
// counts as gone.
//
// A body without a length or chunks ends with its connection. For a stream of events that proves
// little: an engine that dies ends it just like one that has said all. So Python gets kClosed and
// judges by the last event. A reset connection has not ended its body, unless the engine answered
// before it had taken the whole request; nor has one that a tunnel to an engine behind TLS cuts. A
// stream that is marked has a last event, [DONE]; where it ends without, as behind a proxy whose
// engine has died, Python gets kClosed as well.
//
// Engine connections are kept for the next request to the same engine, for at most `idle_ns`. They
// stay in the epoll set, so a request need not add them; an event on a connection that nobody uses
// means that it has ended. If a kept connection ends before it answers a byte, the engine had
// closed it while the request was on its way: the request is then sent again once, on a new
// connection, without Python's knowledge.
//
// Invariants
//   1. an exchange owns its engine's descriptor and only borrows the client's: the caller of
//      `begin` keeps the client's socket open until END or `drop`;
//   2. after END nothing is read or written for an exchange, and its engine's descriptor is closed
//      or kept for others; the exchange stays until `drop`, so that Python can read its outcome;
//   3. a notice is given at most once per kind: READY, then END;
//   4. a connection is kept only for the address that it was made to;
//   5. an engine's connection has a line while it is open, in use or kept; the line's number tells
//      it from connections that had its descriptor before, even in events that were fetched before
//      those closed;
//   6. nothing that the client has taken is kept, except the end of its payload (`tail`).
//
// Costs: begin 3 system calls on a kept connection, 9 on a new one; a receive of payload 2, plus
// its share of an epoll_wait; memory about 500 B an exchange, up to `hold` until it is forwarded,
// then kMaxTail, and up to kWindow for a client that does not keep up.
#pragma once

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "relay/framing.hpp"
#include "relay/tail.hpp"

namespace kvd::relay {

constexpr size_t kReceive = 64 * 1024;  // bytes of one receive
constexpr size_t kWindow = 256 * 1024;  // bytes that may wait for a client
constexpr size_t kMaxHead = 64 * 1024;  // bytes of an answer's head, with the 1xx heads before it
constexpr size_t kMaxIdle = 1024;       // kept connections of one engine
constexpr int kNoSocket = -1;

using ExchangeId = uint64_t;  // generation << 32 | slot
using EngineId = uint32_t;

enum class ExchangePhase : uint8_t {
  kFree,
  kConnecting,
  kSending,
  kHead,
  kHolding,
  kReady,
  kForwarding,
  kDraining,
  kEnded
};

// How an exchange has ended.
enum class ExchangeOutcome : uint8_t {
  kUnderWay,
  kComplete,
  kUnreachable,    // no connection
  kNoAnswer,       // the engine's connection ended before a byte of the answer
  kBroken,         // it ended within the answer
  kMalformed,      // the bytes are not an answer
  kClientGone,     // the client ended its stream or reset it
  kConnectTime,    // connecting took too long
  kSilence,        // the engine sent nothing for too long
  kClientStalled,  // the client took nothing for too long
  kNoRoom,         // no descriptor, port or memory is left here for a connection
  kClosed          // the connection has ended, and with it a stream that had no other end mark, or
                   // a marked one without its last event: the forwarded bytes show whether it was
                   // whole
};

enum class Framing : uint8_t { kAsIs, kChunks };

struct Limits {
  int64_t connect_ns = 2'000'000'000;
  int64_t silence_ns = 600'000'000'000;  // without a byte from the engine, its head included
  int64_t client_ns = 60'000'000'000;    // without a byte taken by the client
  int64_t idle_ns = 3'000'000'000;       // of a kept connection; engines close after 5 s
  int64_t gone_ns = 60'000'000'000;      // without a sign of life of the engine's host
};

struct Stats {
  uint64_t begun = 0;
  uint64_t connected = 0;      // new connections to engines
  uint64_t reused = 0;         // requests sent on a kept connection
  uint64_t sent_again = 0;     // requests whose kept connection had ended without a byte
  uint64_t receives = 0;       // of payload that was forwarded
  uint64_t payload_bytes = 0;  // forwarded
  uint64_t pauses = 0;         // times that an engine was not read because of its client
  uint64_t fillers = 0;        // sent to clients while their engines were silent
};

enum class Served : uint8_t { kNothing, kAll, kSome };  // kSome: more may be waiting

struct Notice {
  ExchangeId id;
  bool ready;  // else it has ended
};

struct Exchange {
  uint32_t generation = 0;
  ExchangePhase phase = ExchangePhase::kFree;
  ExchangeOutcome outcome = ExchangeOutcome::kUnderWay;
  Framing framing = Framing::kAsIs;
  bool was_kept = false;  // the connection has served another request
  bool client_watched = false;
  bool completes = false;  // all of the payload has arrived
  bool is_marked = false;  // its stream has a last event
  bool is_early = false;   // the answer began before the engine had taken the whole request
  int engine_fd = kNoSocket;
  int client_fd = kNoSocket;
  uint32_t client_events = 0;
  EngineId engine = 0;
  uint64_t era = 0;  // of the engine's address, see Engine
  size_t hold = 0;
  std::string request;         // its head
  const char* body = nullptr;  // the caller's memory, until `forward`, END or `drop`
  size_t body_size = 0;
  size_t sent = 0;       // bytes of both that have been sent
  std::string received;  // the head as far as it has come; later the complete head alone
  size_t interim = 0;    // bytes of 1xx heads before it
  std::string held;      // payload before `forward`
  AnswerHead head;
  Body decoder;
  std::string unsent;  // frames that wait for the client, from `unsent_at` on
  size_t unsent_at = 0;
  Tail tail;  // of the payload that was forwarded
  uint64_t receives = 0;
  int64_t touched_ns = 0;  // the time of the last progress
  std::string filler;      // sent to the client when nothing else was for `filler_ns`; 0: never
  int64_t filler_ns = 0;
  int64_t filled_ns = 0;  // the time of the last filler
};

inline int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * INT64_C(1'000'000'000) + now.tv_nsec;
}

// Has the kernel send small pieces at once, and end the connection of a host that has given no sign
// of life for `gone_ns`. Without power a host is as silent as an engine with a long prompt, but its
// kernel answers no probes.
inline void tune(int fd, int64_t gone_ns) {
  const auto set = [fd](int level, int option, int value) {
    setsockopt(fd, level, option, &value, sizeof value);
  };
  const int gone_ms = static_cast<int>(gone_ns / 1'000'000);
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, std::max(1, gone_ms / 2000));
  set(IPPROTO_TCP, TCP_KEEPINTVL, std::max(1, gone_ms / 6000));
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, gone_ms);  // also while bytes wait to be acknowledged
}

class Relay {
 public:
  Relay() : buffer_(new char[kReceive]), epoll_(epoll_create1(EPOLL_CLOEXEC)) {
    if (epoll_ < 0) throw std::system_error(errno, std::generic_category());
  }
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;
  ~Relay() {
    for (auto& each : exchanges_) {
      if (each->engine_fd != kNoSocket) ::close(each->engine_fd);
    }
    for (EngineId id = 0; id < engines_.size(); ++id) forget_idle(id);
    ::close(epoll_);
  }

  Limits limits;
  Stats stats;

  int fd() const { return epoll_; }
  size_t live() const { return live_; }
  const std::vector<Notice>& notices() const { return notices_; }
  void clear_notices() { notices_.clear(); }

  // Adds an engine by its address: an IP address and a port, or a Unix socket and 0. A Unix socket
  // is given by its path, or as @NAME if it is abstract. Throws std::invalid_argument for any other
  // text.
  EngineId add_engine(const char* host, uint16_t port) {
    EngineId id = 0;
    while (id < engines_.size() && engines_[id].size != 0) ++id;
    if (id == engines_.size()) engines_.emplace_back();
    move_engine(id, host, port);
    return id;
  }

  // Lets the next connections go to another address.
  void move_engine(EngineId id, const char* host, uint16_t port) {
    Engine& engine = engines_[id];
    sockaddr_storage address{};
    const socklen_t size = read_address(host, port, address);
    if (size == 0) throw std::invalid_argument("not an address");
    forget_idle(id);
    ++engine.era;
    engine.address = address;
    engine.size = size;
  }

  // Removes an engine. Exchanges under way with it continue.
  void remove_engine(EngineId id) {
    forget_idle(id);
    ++engines_[id].era;
    engines_[id].size = 0;
  }

  void forget_idle(EngineId id) {
    for (const Idle& each : engines_[id].idle) close_line(each.fd);
    engines_[id].idle.clear();
  }

  size_t idle(EngineId id) const { return engines_[id].idle.size(); }

  // Sends a request to an engine. The answer is held up to `hold` bytes. Without a client
  // (kNoSocket) it is never forwarded, and even a stream is held to its end. `body` is read until
  // `forward`, END or `drop`.
  ExchangeId begin(EngineId engine, int client_fd, const char* head, size_t head_size,
                   const char* body, size_t body_size, size_t hold) {
    const ExchangeId id = take();
    try {
      start(id, engine, client_fd, head, head_size, body, body_size, hold);
    } catch (...) {
      drop(id);
      throw;
    }
    return id;
  }

  bool knows(ExchangeId id) const {
    const uint32_t slot = static_cast<uint32_t>(id);
    return slot < exchanges_.size() && exchanges_[slot]->generation == id >> 32 &&
           exchanges_[slot]->phase != ExchangePhase::kFree;
  }
  const Exchange& exchange(ExchangeId id) const { return *exchanges_[static_cast<uint32_t>(id)]; }

  // Sends the answer of a ready exchange to the client, behind this head; true if the client has
  // already taken all of it. The stream of a `marked` one ends with [DONE], or is not whole.
  bool forward(ExchangeId id, const char* head, size_t head_size, Framing framing, bool marked) {
    Exchange& x = at(id);
    x.is_marked = marked;
    now_ = now_ns();
    x.touched_ns = now_;
    x.framing = framing;
    x.phase = ExchangePhase::kForwarding;
    x.unsent.assign(head, head_size);
    x.unsent_at = 0;
    note_payload(x, x.held.data(), x.held.size());
    frame(x.unsent, x.held.data(), x.held.size(), framing);
    for (std::string* used : {&x.held, &x.request, &x.received}) give_back(*used);
    if (x.completes) {
      complete(id);
    } else {
      flush(id);
      if (x.phase == ExchangePhase::kForwarding) watch_engine(id, EPOLLIN);
    }
    return x.phase == ExchangePhase::kEnded;
  }

  // Lets `filler` be sent between two events of a stream whenever nothing came for `pause_ns`.
  void fill(ExchangeId id, const char* filler, size_t size, int64_t pause_ns) {
    at(id).filler.assign(filler, size);
    at(id).filler_ns = pause_ns;
  }

  // Forgets an exchange in any phase. If the engine has not answered in full, its connection is
  // closed, which aborts the request there.
  void drop(ExchangeId id) {
    Exchange& x = at(id);
    leave(x);
    const uint32_t generation = x.generation;
    x = Exchange();
    x.generation = generation + 1;
    free_.push_back(static_cast<uint32_t>(id));
    --live_;
  }

  // Serves pending events, for at most about `budget_ns` nanoseconds.
  Served turn(int64_t budget_ns) {
    epoll_event events[kEvents];
    const int64_t end = now_ns() + budget_ns;
    for (Served served = Served::kNothing;; served = Served::kAll) {
      const int count = epoll_wait(epoll_, events, kEvents, 0);
      if (count <= 0) return served;
      now_ = now_ns();
      for (int i = 0; i < count; ++i) {
        const uint64_t tag = events[i].data.u64;
        if (tag & kClientSide) {
          const ExchangeId id = tag & ~kClientSide;
          if (knows(id)) on_client(id, events[i].events);  // else from a `begin` that failed
        } else {
          on_line(tag, events[i].events);
        }
      }
      if (now_ns() >= end) return Served::kSome;
    }
  }

  // Ends exchanges that have taken too long, and closes connections that were kept for too long.
  void sweep() {
    now_ = now_ns();
    for (uint32_t slot = 0; slot < exchanges_.size(); ++slot) {
      Exchange& x = *exchanges_[slot];
      const int64_t waited = now_ - x.touched_ns;
      const ExchangeId id = id_of(slot);
      if (x.phase == ExchangePhase::kConnecting && waited > limits.connect_ns) {
        end(id, ExchangeOutcome::kConnectTime);
      } else if (x.unsent_at < x.unsent.size()) {
        if (waited > limits.client_ns && x.phase != ExchangePhase::kEnded) {
          end(id, ExchangeOutcome::kClientStalled);
        }
      } else if (waits_for_engine(x.phase) && waited > limits.silence_ns) {
        end(id, ExchangeOutcome::kSilence);
      } else if (x.filler_ns != 0 && x.phase == ExchangePhase::kForwarding &&
                 waited > x.filler_ns && now_ - x.filled_ns > x.filler_ns &&
                 is_between_events(x.tail)) {
        x.filled_ns = now_;
        ++stats.fillers;
        send_frame(id, x.filler.data(), x.filler.size());
      }
    }
    for (Engine& engine : engines_) {
      size_t stale = 0;  // the oldest come first
      while (stale < engine.idle.size() && now_ - engine.idle[stale].since_ns > limits.idle_ns) {
        close_line(engine.idle[stale++].fd);
      }
      engine.idle.erase(engine.idle.begin(), engine.idle.begin() + static_cast<long>(stale));
    }
  }

 private:
  static constexpr int kEvents = 256;        // fetched from the epoll set at once
  static constexpr int kReceivesInARow = 4;  // from one engine, before others have their turn
  static constexpr uint64_t kClientSide = UINT64_C(1) << 63;
  static constexpr uint32_t kMaxLine = UINT32_C(1) << 30;  // a tag's last bit says which side

  static constexpr ExchangeId kNoExchange = ~UINT64_C(0);

  struct Idle {
    int fd;
    int64_t since_ns;
  };
  // A connection to an engine.
  struct Line {
    uint32_t number = 0;  // unique among all lines so far; 0: closed
    uint32_t events = 0;
    bool watched = false;  // its descriptor is in the epoll set
    EngineId engine = 0;
    ExchangeId exchange = kNoExchange;  // kNoExchange: kept for the next exchange
  };
  struct Engine {
    sockaddr_storage address{};
    socklen_t size = 0;  // 0: there is no such engine
    uint64_t era = 0;    // number of addresses that the id has stood for
    std::vector<Idle> idle;
  };

  // Empties a text and frees its memory, which `clear` would keep for as long as the stream lasts.
  static void give_back(std::string& text) { std::string().swap(text); }

  // Returns the size of the address, 0 if the text is not one.
  static socklen_t read_address(const char* host, uint16_t port, sockaddr_storage& address) {
    auto* v4 = reinterpret_cast<sockaddr_in*>(&address);
    if (inet_pton(AF_INET, host, &v4->sin_addr) == 1) {
      v4->sin_family = AF_INET;
      v4->sin_port = htons(port);
      return sizeof *v4;
    }
    auto* v6 = reinterpret_cast<sockaddr_in6*>(&address);
    if (inet_pton(AF_INET6, host, &v6->sin6_addr) == 1) {
      v6->sin6_family = AF_INET6;
      v6->sin6_port = htons(port);
      return sizeof *v6;
    }
    auto* path = reinterpret_cast<sockaddr_un*>(&address);
    const size_t length = std::strlen(host);
    if ((*host != '/' && *host != '@') || length >= sizeof path->sun_path) return 0;
    path->sun_family = AF_UNIX;
    std::strcpy(path->sun_path, host);
    if (*host == '/') return sizeof *path;
    path->sun_path[0] = '\0';  // each byte of an abstract name counts
    return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + length);
  }

  static bool is_between_events(const Tail& sent) {
    return sent.ends_with("\n\n") || sent.ends_with("\r\n\r\n") || sent.ends_with("\r\r");
  }

  static bool waits_for_engine(ExchangePhase phase) {
    return phase == ExchangePhase::kSending || phase == ExchangePhase::kHead ||
           phase == ExchangePhase::kHolding || phase == ExchangePhase::kForwarding;
  }

  Exchange& at(ExchangeId id) { return *exchanges_[static_cast<uint32_t>(id)]; }
  ExchangeId id_of(uint32_t slot) const {
    return static_cast<uint64_t>(exchanges_[slot]->generation) << 32 | slot;
  }

  ExchangeId take() {
    if (free_.empty()) {
      free_.reserve(exchanges_.size() + 1);  // so that `drop` never allocates
      exchanges_.push_back(std::make_unique<Exchange>());
      free_.push_back(static_cast<uint32_t>(exchanges_.size() - 1));
    }
    const uint32_t slot = free_.back();
    free_.pop_back();
    exchanges_[slot]->generation &= 0x7fffffff;  // a tag's last bit says which side
    ++live_;
    return id_of(slot);
  }

  // ---- the engine's side

  int take_idle(EngineId id) {
    std::vector<Idle>& idle = engines_[id].idle;
    const int64_t now = now_ns();
    while (!idle.empty()) {
      const Idle last = idle.back();
      idle.pop_back();
      char byte;
      const ssize_t got = recv(last.fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
      if (got < 0 && errno == EAGAIN && now - last.since_ns <= limits.idle_ns) return last.fd;
      close_line(last.fd);
    }
    return kNoSocket;
  }

  void start(ExchangeId id, EngineId engine, int client_fd, const char* head, size_t head_size,
             const char* body, size_t body_size, size_t hold) {
    Exchange& x = at(id);
    x.engine = engine;
    x.era = engines_[engine].era;
    x.client_fd = client_fd;
    x.request.assign(head, head_size);
    x.body = body;
    x.body_size = body_size;
    x.hold = hold;
    now_ = now_ns();
    x.touched_ns = now_;
    ++stats.begun;
    if (client_fd != kNoSocket) watch_client(id, EPOLLRDHUP);
    x.engine_fd = take_idle(engine);
    x.was_kept = x.engine_fd != kNoSocket;
    if (x.was_kept) {
      ++stats.reused;
      line_of(x).exchange = id;
      x.phase = ExchangePhase::kSending;
      send_request(id);
    } else {
      connect(id);
    }
  }

  void connect(ExchangeId id) {
    Exchange& x = at(id);
    const Engine& engine = engines_[x.engine];
    x.phase = ExchangePhase::kConnecting;
    x.touched_ns = now_;
    x.sent = x.interim = 0;
    x.was_kept = false;
    const int fd = socket(engine.address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) return end(id, ExchangeOutcome::kNoRoom);
    open_line(id, fd);
    if (engine.address.ss_family != AF_UNIX) tune(fd, limits.gone_ns);
    const auto* address = reinterpret_cast<const sockaddr*>(&engine.address);
    if (::connect(x.engine_fd, address, engine.size) == 0) {
      on_connected(id);
    } else if (errno == EINPROGRESS) {
      watch_engine(id, EPOLLOUT);
    } else {
      end(id, lacks_room(errno) ? ExchangeOutcome::kNoRoom : ExchangeOutcome::kUnreachable);
    }
  }

  // Whether a connection has failed for want of something on this side, which says nothing about
  // the engine. EAGAIN is the full queue of a Unix socket: the engine's, but it shows that the
  // engine is there.
  static bool lacks_room(int error) {
    return error == EADDRNOTAVAIL || error == EAGAIN || error == ENOBUFS || error == ENOMEM;
  }

  void on_connected(ExchangeId id) {
    ++stats.connected;
    at(id).phase = ExchangePhase::kSending;
    send_request(id);
  }

  void send_request(ExchangeId id) {
    Exchange& x = at(id);
    const size_t total = x.request.size() + x.body_size;
    while (x.sent < total) {
      iovec parts[2];
      int n = 0;
      if (x.sent < x.request.size()) {
        parts[n++] = {x.request.data() + x.sent, x.request.size() - x.sent};
      }
      const size_t of_body = x.sent > x.request.size() ? x.sent - x.request.size() : 0;
      if (of_body < x.body_size) {
        parts[n++] = {const_cast<char*>(x.body) + of_body, x.body_size - of_body};
      }
      const ssize_t put = send_parts(x.engine_fd, parts, n);
      if (put < 0 && errno == EAGAIN) return watch_engine(id, EPOLLOUT | EPOLLIN);
      // What the engine sent before it stopped reading is still to be received, or else its end.
      if (put < 0) return watch_engine(id, EPOLLIN);
      x.sent += static_cast<size_t>(put);
      x.touched_ns = now_;
    }
    x.phase = ExchangePhase::kHead;
    watch_engine(id, EPOLLIN);
  }

  void on_line(uint64_t tag, uint32_t events) {
    const int fd = static_cast<int>(tag & 0xffffffff);
    const Line line = lines_[static_cast<size_t>(fd)];
    if (line.number != tag >> 32) return;  // closed by an event of the same batch
    if (line.exchange != kNoExchange) return on_engine(line.exchange, events);
    std::vector<Idle>& idle = engines_[line.engine].idle;
    size_t at = 0;
    while (idle[at].fd != fd) ++at;
    idle.erase(idle.begin() + static_cast<long>(at));
    close_line(fd);
  }

  void on_engine(ExchangeId id, uint32_t events) {
    Exchange& x = at(id);
    if (x.phase == ExchangePhase::kConnecting) {
      int error = 0;
      socklen_t size = sizeof error;
      getsockopt(x.engine_fd, SOL_SOCKET, SO_ERROR, &error, &size);
      if (error != 0) return end(id, ExchangeOutcome::kUnreachable);
      x.touched_ns = now_;
      return on_connected(id);
    }
    if (x.phase == ExchangePhase::kSending && (events & EPOLLOUT)) send_request(id);
    if (x.phase == ExchangePhase::kReady || x.phase == ExchangePhase::kDraining)
      return watch_engine(id, 0);
    if (!(events & (EPOLLIN | EPOLLHUP | EPOLLERR))) return;
    for (int i = 0; i < kReceivesInARow; ++i) {
      const ssize_t got = recv(x.engine_fd, buffer_.get(), kReceive, MSG_DONTWAIT);
      if (got < 0 && errno == EAGAIN) return;
      if (got <= 0) return on_engine_gone(id, got < 0);
      x.touched_ns = now_;
      on_received(id, static_cast<size_t>(got));
      if (got < static_cast<ssize_t>(kReceive) || !is_watched(x)) return;
      if (!waits_for_engine(x.phase)) return;
    }
  }

  void on_received(ExchangeId id, size_t got) {
    Exchange& x = at(id);
    if (x.phase == ExchangePhase::kHead || x.phase == ExchangePhase::kSending)
      return on_head(id, got);
    size_t payload = 0, used = 0;
    if (!x.decoder.decode(buffer_.get(), got, payload, used))
      return end(id, ExchangeOutcome::kMalformed);
    if (used < got) x.head.persists = false;  // bytes that nobody asked for
    on_payload(id, buffer_.get(), payload);
  }

  void on_head(ExchangeId id, size_t got) {
    Exchange& x = at(id);
    x.received.append(buffer_.get(), got);
    size_t size = 0;
    for (;;) {
      const Parsed parsed = parse_head(x.received.data(), x.received.size(), x.head, size);
      if (parsed == Parsed::kWrong) return end(id, ExchangeOutcome::kMalformed);
      if (parsed == Parsed::kPart) {
        if (x.interim + x.received.size() > kMaxHead) end(id, ExchangeOutcome::kMalformed);
        return;
      }
      if (x.head.status == 101) return end(id, ExchangeOutcome::kMalformed);
      if (x.head.status >= 200) break;
      x.received.erase(0, size);  // an interim (1xx) head: the final one is still to come
      x.interim += size;
    }
    if (x.phase == ExchangePhase::kSending) {  // the engine does not want the rest of the request
      x.head.persists = false;
      x.is_early = true;
      watch_engine(id, EPOLLIN);
    }
    x.decoder.begin(x.head);
    x.phase = ExchangePhase::kHolding;
    std::string rest = x.received.substr(size);
    x.received.resize(size);
    size_t payload = 0, used = 0;
    if (!x.decoder.decode(rest.data(), rest.size(), payload, used)) {
      return end(id, ExchangeOutcome::kMalformed);
    }
    if (used < rest.size()) x.head.persists = false;
    on_payload(id, rest.data(), payload);
  }

  void on_payload(ExchangeId id, const char* data, size_t n) {
    Exchange& x = at(id);
    x.completes = x.decoder.complete();
    if (x.phase == ExchangePhase::kHolding) {
      x.held.append(data, n);
      const bool forwarded = x.client_fd != kNoSocket;  // else the first event is of no use
      const bool begun =
          forwarded && ((x.head.events && first_event(x.held.data(), x.held.size()) != 0) ||
                        (x.head.opaque && !x.held.empty()));
      if (x.completes || begun || x.held.size() >= x.hold) make_ready(id);
      return;
    }
    if (n != 0) {
      ++x.receives;
      ++stats.receives;
      note_payload(x, data, n);
      send_frame(id, data, n);
    }
    if (x.completes && x.phase == ExchangePhase::kForwarding) complete(id);
  }

  void make_ready(ExchangeId id) {
    Exchange& x = at(id);
    x.phase = ExchangePhase::kReady;
    if (x.completes) release_engine(x);
    notices_.push_back({id, true});
  }

  void on_engine_gone(ExchangeId id, bool is_reset) {
    Exchange& x = at(id);
    const bool silent = x.phase <= ExchangePhase::kHead && x.received.empty() && x.interim == 0;
    if (silent && x.was_kept && x.era == engines_[x.engine].era) {
      ++stats.sent_again;
      close_engine(x);
      return connect(id);
    }
    if (silent) return end(id, ExchangeOutcome::kNoAnswer);
    if (x.phase <= ExchangePhase::kHead || !x.decoder.ends_by_close() || is_cut(x) ||
        (is_reset && !x.is_early)) {
      return end(id, ExchangeOutcome::kBroken);
    }
    if (x.head.events && x.client_fd != kNoSocket) {
      return end(id, x.phase == ExchangePhase::kHolding ? ExchangeOutcome::kBroken
                                                        : ExchangeOutcome::kClosed);
    }
    x.completes = true;
    close_engine(x);
    if (x.phase == ExchangePhase::kHolding) {
      make_ready(id);
    } else {
      complete(id);
    }
  }

  // Whether the other end of a Unix socket, which has no reset, was closed without being shut down
  // before: so a tunnel to an engine behind TLS shows that the engine's bytes were cut. Then
  // nothing can be sent any more, not even no byte.
  static bool is_cut(const Exchange& x) {
    sockaddr_storage address{};
    socklen_t size = sizeof address;
    getsockname(x.engine_fd, reinterpret_cast<sockaddr*>(&address), &size);
    return address.ss_family == AF_UNIX && send(x.engine_fd, "", 0, MSG_NOSIGNAL) < 0;
  }

  // Keeps the engine's connection for the next request, or closes it.
  void release_engine(Exchange& x) {
    if (x.engine_fd == kNoSocket) return;
    Engine& engine = engines_[x.engine];
    if (!x.head.persists || engine.era != x.era || engine.idle.size() >= kMaxIdle) {
      return close_engine(x);
    }
    watch_engine(x, EPOLLIN);
    line_of(x).exchange = kNoExchange;
    engine.idle.push_back({x.engine_fd, now_});
    x.engine_fd = kNoSocket;
  }

  void close_engine(Exchange& x) {
    if (x.engine_fd == kNoSocket) return;
    close_line(x.engine_fd);
    x.engine_fd = kNoSocket;
  }

  void open_line(ExchangeId id, int fd) {
    const size_t at_least = static_cast<size_t>(fd) + 1;
    try {
      if (lines_.size() < at_least) lines_.resize(at_least);
    } catch (...) {
      ::close(fd);
      throw;
    }
    last_line_ = (last_line_ & (kMaxLine - 1)) + 1;
    lines_[static_cast<size_t>(fd)] = {last_line_, 0, false, at(id).engine, id};
    at(id).engine_fd = fd;
  }

  void close_line(int fd) {
    lines_[static_cast<size_t>(fd)].number = 0;
    ::close(fd);  // this also removes it from the epoll set
  }

  Line& line_of(const Exchange& x) { return lines_[static_cast<size_t>(x.engine_fd)]; }

  bool is_watched(const Exchange& x) { return x.engine_fd != kNoSocket && line_of(x).watched; }

  // ---- the client's side

  void on_client(ExchangeId id, uint32_t events) {
    Exchange& x = at(id);
    if (x.phase == ExchangePhase::kEnded) return;
    if (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) return end(id, ExchangeOutcome::kClientGone);
    if (events & EPOLLOUT) flush(id);
  }

  static void frame(std::string& out, const char* data, size_t n, Framing framing) {
    if (n == 0) return;
    if (framing == Framing::kAsIs) {
      out.append(data, n);
      return;
    }
    char line[kChunkLine];
    out.append(line, chunk_line(line, n));
    out.append(data, n);
    out.append("\r\n", 2);
  }

  static constexpr size_t kChunkLine = 20;
  static size_t chunk_line(char* line, size_t n) {
    return static_cast<size_t>(std::snprintf(line, kChunkLine, "%zx\r\n", n));
  }

  // Sends payload to the client, and keeps what it does not take.
  void send_frame(ExchangeId id, const char* data, size_t n) {
    Exchange& x = at(id);
    if (x.unsent_at < x.unsent.size()) {
      frame(x.unsent, data, n, x.framing);
    } else {
      char line[kChunkLine];
      iovec parts[3];
      int count = 0;
      size_t total = n;
      if (x.framing == Framing::kChunks) {
        const size_t size = chunk_line(line, n);
        parts[count++] = {line, size};
        total += size + 2;
      }
      parts[count++] = {const_cast<char*>(data), n};
      if (x.framing == Framing::kChunks) parts[count++] = {const_cast<char*>("\r\n"), 2};
      const ssize_t put = send_parts(x.client_fd, parts, count);
      if (put < 0 && errno != EAGAIN) return end(id, ExchangeOutcome::kClientGone);
      const size_t taken = put < 0 ? 0 : static_cast<size_t>(put);
      if (taken == total) return;
      x.unsent.clear();
      x.unsent_at = 0;
      size_t skip = taken;
      for (int i = 0; i < count; ++i) {
        const size_t over = skip < parts[i].iov_len ? skip : parts[i].iov_len;
        x.unsent.append(static_cast<const char*>(parts[i].iov_base) + over,
                        parts[i].iov_len - over);
        skip -= over;
      }
      watch_client(id, EPOLLOUT | EPOLLRDHUP);
    }
    pause_if_full(id);
  }

  void pause_if_full(ExchangeId id) {
    Exchange& x = at(id);
    if (x.unsent.size() - x.unsent_at <= kWindow || !is_watched(x)) return;
    ++stats.pauses;
    watch_engine(id, 0);
  }

  // Sends the bytes that wait for the client.
  void flush(ExchangeId id) {
    Exchange& x = at(id);
    while (x.unsent_at < x.unsent.size()) {
      iovec part = {x.unsent.data() + x.unsent_at, x.unsent.size() - x.unsent_at};
      const ssize_t put = send_parts(x.client_fd, &part, 1);
      if (put < 0 && errno == EAGAIN) {
        watch_client(id, EPOLLOUT | EPOLLRDHUP);
        break;
      }
      if (put < 0) return end(id, ExchangeOutcome::kClientGone);
      x.unsent_at += static_cast<size_t>(put);
      x.touched_ns = now_;
    }
    if (x.unsent_at == x.unsent.size()) {
      give_back(x.unsent);
      x.unsent_at = 0;
      if (x.phase == ExchangePhase::kDraining) return end(id, x.outcome);
      watch_client(id, EPOLLRDHUP);
    } else if (x.unsent_at >= kWindow) {
      x.unsent.erase(0, x.unsent_at);
      x.unsent_at = 0;
    }
    const bool room = x.unsent.size() - x.unsent_at <= kWindow / 2;
    if (x.phase == ExchangePhase::kForwarding && room) watch_engine(id, EPOLLIN);
  }

  void note_payload(Exchange& x, const char* data, size_t n) {
    stats.payload_bytes += n;
    x.tail.add(data, n);
  }

  // Ends the answer: all of its payload has arrived.
  void complete(ExchangeId id) {
    Exchange& x = at(id);
    release_engine(x);
    const bool is_whole = !x.is_marked || x.tail.ends_with_line("[DONE]");
    if (is_whole && x.framing == Framing::kChunks) x.unsent.append("0\r\n\r\n", 5);
    x.outcome = is_whole ? ExchangeOutcome::kComplete : ExchangeOutcome::kClosed;
    x.phase = ExchangePhase::kDraining;
    flush(id);
  }

  // ---- ends

  void end(ExchangeId id, ExchangeOutcome outcome) {
    Exchange& x = at(id);
    // The client learns of a broken answer's end only behind everything that was forwarded before.
    const bool drains_first =
        outcome == ExchangeOutcome::kBroken || outcome == ExchangeOutcome::kMalformed ||
        outcome == ExchangeOutcome::kSilence || outcome == ExchangeOutcome::kClosed;
    if (drains_first && x.phase == ExchangePhase::kForwarding && x.unsent_at < x.unsent.size()) {
      close_engine(x);
      x.outcome = outcome;
      x.phase = ExchangePhase::kDraining;
      return;
    }
    leave(x);
    x.outcome = outcome;
    x.phase = ExchangePhase::kEnded;
    notices_.push_back({id, false});
  }

  // Closes or releases both sockets.
  void leave(Exchange& x) {
    close_engine(x);
    if (x.client_fd == kNoSocket) return;
    unwatch(x.client_fd, x.client_watched, x.client_events);
    x.client_fd = kNoSocket;
  }

  // ---- the epoll set

  void watch_engine(ExchangeId id, uint32_t events) { watch_engine(at(id), events); }

  void watch_engine(Exchange& x, uint32_t events) {
    Line& line = line_of(x);
    const uint64_t tag =
        static_cast<uint64_t>(line.number) << 32 | static_cast<uint32_t>(x.engine_fd);
    watch(x.engine_fd, tag, events, line.watched, line.events);
  }

  void watch_client(ExchangeId id, uint32_t events) {
    Exchange& x = at(id);
    watch(x.client_fd, id | kClientSide, events, x.client_watched, x.client_events);
  }

  // Without events, a descriptor leaves the set: otherwise its hangup would be reported repeatedly.
  void watch(int fd, uint64_t tag, uint32_t events, bool& watched, uint32_t& current) {
    if (events == 0) return unwatch(fd, watched, current);
    if (watched && current == events) return;
    epoll_event event{};
    event.events = events;
    event.data.u64 = tag;
    if (epoll_ctl(epoll_, watched ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, &event) < 0) {
      throw std::system_error(errno, std::generic_category(), "epoll_ctl");
    }
    watched = true;
    current = events;
  }

  void unwatch(int fd, bool& watched, uint32_t& current) {
    if (watched) epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr);
    watched = false;
    current = 0;
  }

  static ssize_t send_parts(int fd, iovec* parts, int n) {
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = static_cast<size_t>(n);
    return sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  }

  std::unique_ptr<char[]> buffer_;
  int epoll_;
  int64_t now_ = now_ns();
  size_t live_ = 0;
  std::vector<std::unique_ptr<Exchange>> exchanges_;
  std::vector<uint32_t> free_;
  std::vector<Engine> engines_;
  std::vector<Line> lines_;  // by descriptor
  uint32_t last_line_ = 0;
  std::vector<Notice> notices_;
};

}  // namespace kvd::relay
