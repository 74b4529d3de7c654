// A descriptor connected to a publisher: reads its messages, and sends the replies that ZMTP needs.
//
//   kernel ── recv ──> scratch, one a thread ── ZmtpSubscriber ──> messages, in place
//                        ^ part of a message      │
//                        └── held, its own <── park
//
// A connection at rest holds no memory; one that has read a part of a message holds these bytes.
// Only a message larger than half the scratch is read into memory of its own, which grows as the
// bytes come. From kApart bytes on that is a mapping: it grows without being copied, and the inbox
// takes it over (`hand_over`) with the message in it.
//
// Invariants
//   1. Never waits. After ReceiveOutcome::empty all whole messages that were read have been taken,
//      so that the descriptor becomes readable with more; after ReceiveOutcome::later whole
//      messages may be left here.
//   2. payload() is valid until the next call of any socket of this thread.
#pragma once

#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "base/pages.hpp"
#include "zmq/drain.hpp"
#include "zmq/inbox.hpp"
#include "zmq/zmtp.hpp"

namespace kvd {

class SubSocket final : public MessageSource {
 public:
  static constexpr size_t kScratch = 128 * 1024;
  static constexpr size_t kMaxRead = 64 * 1024;  // bytes of one read
  static constexpr int kMaxReads = 16;           // of one turn, 1 MiB
  static constexpr size_t kApart = 1024 * 1024;  // bytes of the smallest mapping for a message

  SubSocket(int fd, size_t max_frame, std::vector<std::string> topics)
      : fd_(fd), speech_(max_frame, std::move(topics)) {}
  ~SubSocket() {
    free_held();
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

  bool hand_over(Inbox& inbox) override {
    const size_t payload = size_t(frames_[2].first - view_), end = speech_.unused_from();
    const size_t unused = size_ - end;
    if (view_ != held_ || !is_apart() || payload > kMaxRead || unused > kMaxRead) return false;
    uint8_t* scratch = scratch_of_thread();
    memcpy(scratch, view_ + end, unused);
    uint8_t* const mapping = held_ - kAround;
    if (!inbox.adopt(seq(), publisher(), frames_[2].second, mapping, mapped(capacity_),
                     kAround + payload)) {
      return true;
    }
    held_ = nullptr, capacity_ = 0;
    view_ = scratch, size_ = unused;
    speech_.moved();
    return true;
  }

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
      // Behind a message that was taken is one read at most: less than kApart, so on the heap.
      kept = view_ == held_ && speech_.unused_from() == 0 ? held_
                                                          : static_cast<uint8_t*>(malloc(unused));
      if (!kept) speech_.lost();
      else if (kept != held_) memcpy(kept, from, unused);
    }
    speech_.moved();
    if (kept != held_) {
      free_held();
      held_ = kept;
      capacity_ = kept ? unused : 0;
    }
    held_size_ = kept ? unused : 0;
    view_ = nullptr, size_ = 0;
  }

 private:
  // Moves on to the next whole message: ReceiveOutcome::event, empty, later or too_large.
  ReceiveOutcome message() {
    if (fault() != nullptr) return ReceiveOutcome::empty;
    for (;;) {
      const auto step = speech_.next(view_, size_);
      if (step == ZmtpSubscriber::Step::message) return ReceiveOutcome::event;
      send();
      if (step == ZmtpSubscriber::Step::broken)
        return speech_.is_too_large() ? ReceiveOutcome::too_large : ReceiveOutcome::empty;
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
      grow(begin, unused);
    }
    speech_.moved();
    size_ = unused;
  }

  void grow(size_t begin, size_t unused) {
    const size_t grown = std::max(unused + kMaxRead, 2 * capacity_);
    if (is_apart() && view_ == held_ && begin == 0) {
      void* moved = mremap(held_ - kAround, mapped(capacity_), mapped(grown), MREMAP_MAYMOVE);
      if (moved == MAP_FAILED) throw std::bad_alloc();
      held_ = static_cast<uint8_t*>(moved) + kAround;
    } else {
      uint8_t* larger = grown < kApart ? static_cast<uint8_t*>(take_heap(grown))
                                       : static_cast<uint8_t*>(map_pages(mapped(grown))) + kAround;
      memcpy(larger, view_ + begin, unused);
      free_held();
      held_ = larger;
    }
    capacity_ = grown;
    view_ = held_;
  }

  // Whether the held bytes are in a mapping.
  bool is_apart() const { return capacity_ >= kApart; }

  static constexpr size_t kAround = Inbox::kAround;  // bytes that the inbox needs at either end
  static size_t mapped(size_t capacity) { return kAround + capacity + kAround; }

  void free_held() {
    if (is_apart()) unmap_pages(held_ - kAround, mapped(capacity_));
    else free(held_);
    held_ = nullptr, capacity_ = 0;
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
