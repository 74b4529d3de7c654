// A descriptor connected to a publisher: reads its messages, and sends the replies that ZMTP needs.
//
//   kernel ── recv ──> scratch, one a thread ── ZmtpSubscriber ──> messages, in place
//                        ^ part of a message      │
//                        └── held, its own <── park
//
// A connection at rest holds no memory; one that has read a part of a message holds these bytes.
// Only a message larger than half the scratch is read into memory of its own, which grows as the
// bytes come.
//
// Invariants
//   1. Never waits. After ReceiveOutcome::empty all whole messages that were read have been taken,
//      so that the descriptor becomes readable with more; after ReceiveOutcome::later whole
//      messages may be left here.
//   2. payload() is valid until the next call of any socket of this thread.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "zmq/drain.hpp"
#include "zmq/zmtp.hpp"

namespace kvd {

class SubSocket final : public MessageSource {
 public:
  static constexpr size_t kScratch = 128 * 1024;
  static constexpr size_t kMaxRead = 64 * 1024;  // bytes of one read
  static constexpr int kMaxReads = 16;           // of one turn, 1 MiB

  SubSocket(int fd, size_t max_frame, std::vector<std::string> topics)
      : fd_(fd), speech_(max_frame, std::move(topics)) {}
  ~SubSocket() {
    free(held_);
    hang_up();
  }
  SubSocket(const SubSocket&) = delete;
  SubSocket& operator=(const SubSocket&) = delete;

  int fd() const { return fd_; }
  bool joined() const { return speech_.joined(); }
  bool answers_pings() const { return speech_.answers_pings(); }
  const char* fault() const { return speech_.fault(); }
  uint64_t reads() const { return reads_; }
  bool has_unsent() { return !speech_.unsent().empty(); }

  bool has_unread() const {
    char byte;
    return fd_ >= 0 && recv(fd_, &byte, 1, MSG_DONTWAIT | MSG_PEEK) > 0;
  }
  void hang_up() {
    if (fd_ >= 0) close(std::exchange(fd_, -1));
  }

  // Begins a turn; park() ends it.
  void begin() {
    view_ = held_, size_ = held_size_;
    reads_left_ = kMaxReads;
    is_drained_ = false;
  }

  // Continues the handshake, as far as bytes have come.
  void shake() {
    begin();
    send();
    while (!joined()) {
      const auto step = speech_.next(view_, size_);
      send();
      if (step == ZmtpSubscriber::Step::broken) break;
      if (step == ZmtpSubscriber::Step::more && read() != ReceiveOutcome::event) break;
    }
    park();
  }

  ReceiveOutcome next() override {
    ReceiveOutcome got = message();
    if (got != ReceiveOutcome::event) return got;
    int count = 0;
    speech_.each_frame(view_, [&](const uint8_t* data, size_t size) {
      if (count < EVENT_FRAMES) frames_[count] = {data, size};
      ++count;
    });
    return checked(count);
  }

  ReceiveOutcome next_of_any_shape(int most, std::string& packed) override {
    ReceiveOutcome got = message();
    if (got != ReceiveOutcome::event) return got;
    packed.clear();
    int count = 0;
    speech_.each_frame(view_, [&](const uint8_t* data, size_t size) {
      if (++count <= most + 1) pack(packed, data, size);
    });
    return count > most ? ReceiveOutcome::bad_frame_count : ReceiveOutcome::event;
  }

  const uint8_t* second() override { return frames_[1].first; }
  size_t second_size() override { return frames_[1].second; }
  const char* payload() override { return reinterpret_cast<const char*>(frames_[2].first); }
  size_t size() override { return frames_[2].second; }

  void ping() { speech_.ping(), send(); }
  void unsubscribe() { speech_.unsubscribe(), send(); }

  // Sends the unsent bytes, as far as the kernel takes them.
  void send() {
    std::string& unsent = speech_.unsent();
    while (!unsent.empty()) {
      const ssize_t sent = ::send(fd_, unsent.data(), unsent.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0 && errno == EAGAIN) return;
      if (sent < 0) break;  // reading will find the end, after the messages that came before it
      unsent.erase(0, size_t(sent));
    }
    std::string().swap(unsent);
  }

  // Keeps the unused bytes, as other sockets use the scratch next. Without memory for them the
  // connection is lost: the next one shows what is missing.
  void park() {
    const size_t unused = size_ - speech_.unused_from();
    const uint8_t* from = view_ + speech_.unused_from();
    uint8_t* kept = nullptr;
    if (unused && fault() == nullptr) {
      kept = view_ == held_ && speech_.unused_from() == 0 ? held_
                                                          : static_cast<uint8_t*>(malloc(unused));
      if (!kept) speech_.lost();
      else if (kept != held_) memcpy(kept, from, unused);
    }
    speech_.moved();
    if (kept != held_) {
      free(held_);
      held_ = kept;
      capacity_ = kept ? unused : 0;
    }
    held_size_ = kept ? unused : 0;
    view_ = nullptr, size_ = 0;
  }

 private:
  // Moves on to the next whole message: ReceiveOutcome::event, empty or later.
  ReceiveOutcome message() {
    for (;;) {
      const auto step = speech_.next(view_, size_);
      if (step == ZmtpSubscriber::Step::message) return ReceiveOutcome::event;
      send();
      if (step == ZmtpSubscriber::Step::broken) return ReceiveOutcome::empty;
      const ReceiveOutcome got = read();
      if (got != ReceiveOutcome::event) return got;
    }
  }

  // Reads once, behind the unused bytes; returns `event` if there are more, else empty or later.
  ReceiveOutcome read() {
    if (is_drained_) return ReceiveOutcome::empty;
    if (reads_left_-- == 0) return ReceiveOutcome::later;
    make_room();
    uint8_t* room = const_cast<uint8_t*>(view_) + size_;
    ssize_t got;
    do got = recv(fd_, room, kMaxRead, MSG_DONTWAIT);
    while (got < 0 && errno == EINTR);
    if (got < 0 && errno == EAGAIN) return is_drained_ = true, ReceiveOutcome::empty;
    if (got <= 0) return speech_.lost(), ReceiveOutcome::empty;
    ++reads_;
    size_ += size_t(got);
    is_drained_ = size_t(got) < kMaxRead;
    return ReceiveOutcome::event;
  }

  // Makes room for kMaxRead bytes behind the unused ones, which become the view.
  void make_room() {
    const size_t begin = speech_.unused_from(), unused = size_ - begin;
    if (unused <= kScratch - kMaxRead) {
      uint8_t* scratch = scratch_of_thread();
      if (unused) memmove(scratch, view_ + begin, unused);
      view_ = scratch;
    } else if (view_ != held_ || begin || capacity_ < unused + kMaxRead) {
      const size_t needed = unused + kMaxRead;
      const size_t grown = needed > 2 * capacity_ ? needed : 2 * capacity_;
      auto* larger = static_cast<uint8_t*>(malloc(grown));
      if (!larger) throw std::bad_alloc();
      memcpy(larger, view_ + begin, unused);
      free(held_);
      held_ = larger, capacity_ = grown;
      view_ = held_;
    }
    speech_.moved();
    size_ = unused;
  }

  static uint8_t* scratch_of_thread() {
    alignas(64) static thread_local uint8_t scratch[kScratch];
    return scratch;
  }

  int fd_;
  ZmtpSubscriber speech_;
  uint8_t* held_ = nullptr;
  size_t held_size_ = 0;
  size_t capacity_ = 0;
  const uint8_t* view_ = nullptr;
  size_t size_ = 0;
  uint64_t reads_ = 0;
  int reads_left_ = 0;
  bool is_drained_ = false;
  std::pair<const uint8_t*, size_t> frames_[EVENT_FRAMES] = {};
};

}  // namespace kvd
