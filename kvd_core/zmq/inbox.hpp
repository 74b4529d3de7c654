// Messages that were taken off a socket and wait until they can be applied.
//
//   Inbox, one a stream                                   InboxSpace, one a process
//   head                              tail                 bytes, messages: of all inboxes
//   +----------+    +----------+    +----------+           spare: blocks that are empty now
//   | E E E E  | -> | E E E E  | -> | E E .    |
//   +----------+    +----------+    +----------+
//     ^ read                            ^ write            E = seq, size, bytes of the message
//
// libzmq would keep waiting messages in the 8 KB buffers that it received them into, one for each
// message where they come one by one, in an arena of its I/O thread that never shrinks. Here a
// message takes its bytes and 16 more, in blocks with mappings of their own, which are unmapped as
// they empty. A large message brings its own mapping, which becomes a block (`adopt`):
//
//   | InboxBlock | E | unused ... | bytes of the message |
//
// Invariants
//   1. Waiting messages are within the bounds of their inbox and of the space, in number and bytes.
//   2. A message without room replaces the newest waiting one, if it fits there. So the kept
//      messages are a beginning without gaps and the latest one, whose number shows what is
//      missing. Only messages that arrived since the last `seal` can be replaced.
//   3. If it does not fit even there, `has_hole` is true until the next message is kept.
//   4. `popped() + messages() == pushed()`; these are positions in the order of arrival. A position
//      never changes, so that callers can note it.
//
// Costs: push and pop a memcpy each, 30 to 60 ns for 250 bytes; only blocks are allocated, and the
// one block that an almost empty inbox needs comes from the spare ones.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/pages.hpp"
#include "events/publisher.hpp"

namespace kvd {

// Bounds of waiting messages; 0 is no bound.
struct InboxBounds {
  uint64_t messages = 0;
  uint64_t bytes = 0;

  bool admits(uint64_t some_messages, uint64_t some_bytes) const {
    return (messages == 0 || some_messages <= messages) && (bytes == 0 || some_bytes <= bytes);
  }
};

struct InboxBlock {
  InboxBlock* before;
  InboxBlock* next;
  size_t mapped;  // bytes, this head included
  size_t read;    // offsets: entries lie between read and write
  size_t write;

  unsigned char* at(size_t offset) { return reinterpret_cast<unsigned char*>(this) + offset; }
};

// The part that all inboxes of a process share: bounds for all together, and empty blocks.
class InboxSpace {
 public:
  static constexpr size_t kBlock = 64 * 1024;
  // Empty blocks that are kept, 1 MiB: about as many inboxes are in use at one moment.
  static constexpr size_t kSpare = 16;

  explicit InboxSpace(InboxBounds bounds) : bounds_(bounds) { spare_.reserve(kSpare); }
  ~InboxSpace() {
    for (InboxBlock* block : spare_) unmap_pages(block, block->mapped);
  }
  InboxSpace(const InboxSpace&) = delete;
  InboxSpace& operator=(const InboxSpace&) = delete;

  uint64_t messages() const { return messages_; }
  uint64_t bytes() const { return bytes_; }

  bool admits(uint64_t messages, uint64_t bytes) const {
    return bounds_.admits(messages_ + messages, bytes_ + bytes);
  }
  void add(uint64_t bytes) { ++messages_, bytes_ += bytes; }
  void remove(uint64_t bytes) { --messages_, bytes_ -= bytes; }

  // Returns an empty block with room for an entry of so many bytes.
  InboxBlock* take(size_t bytes) {
    const size_t needed = sizeof(InboxBlock) + bytes;
    if (needed <= kBlock && !spare_.empty()) {
      InboxBlock* block = spare_.back();
      spare_.pop_back();
      return block_of(block, kBlock);
    }
    const size_t mapped = needed <= kBlock ? kBlock : needed;
    return block_of(map_pages(mapped), mapped);
  }

  // Makes a block of a mapping.
  static InboxBlock* block_of(void* mapping, size_t mapped) {
    auto* block = static_cast<InboxBlock*>(mapping);
    *block = {nullptr, nullptr, mapped, sizeof(InboxBlock), sizeof(InboxBlock)};
    return block;
  }

  void give(InboxBlock* block) {
    if (block->mapped == kBlock && spare_.size() < kSpare) spare_.push_back(block);
    else unmap_pages(block, block->mapped);
  }

 private:
  InboxBounds bounds_;
  uint64_t messages_ = 0;
  uint64_t bytes_ = 0;
  std::vector<InboxBlock*> spare_;
};

// The messages of one stream, first come first served; the space must outlive it.
class Inbox {
  struct Entry {
    uint64_t seq;
    uint64_t size : 40;  // of the bytes that follow
    uint64_t skip : 23;  // of these, bytes before the message
    uint64_t named : 1;  // they begin with the publisher's id
  };

 public:
  // Bytes that `adopt` needs at either end of a mapping.
  static constexpr size_t kAround = sizeof(InboxBlock) + sizeof(Entry) + kPublisherBytes;

  Inbox(InboxSpace& space, InboxBounds bounds) : space_(space), bounds_(bounds) {}
  ~Inbox() { clear(); }
  Inbox(const Inbox&) = delete;
  Inbox& operator=(const Inbox&) = delete;

  uint64_t pushed() const { return pushed_; }
  uint64_t popped() const { return popped_; }
  uint64_t messages() const { return pushed_ - popped_; }
  uint64_t bytes() const { return bytes_; }
  uint64_t dropped() const { return dropped_; }
  bool empty() const { return pushed_ == popped_; }
  bool has_hole() const { return hole_; }

  // Protects the waiting messages from being replaced.
  void seal() { newest_ = nullptr; }

  // The lowest position of a message pushed since `begin`; `pushed()` without one.
  void begin() { first_ = pushed_; }
  uint64_t first() const { return first_; }

  // Keeps a message of `size` bytes if there is room, with its publisher's id unless that is null.
  // Returns where the caller has to write the bytes, or null without room.
  unsigned char* push(uint64_t seq, const uint8_t* publisher, size_t size) {
    const size_t skip = publisher ? kPublisherBytes : 0;
    const size_t needed = bytes_of(skip + size);
    if (!make_room(needed)) return nullptr;
    if (!tail_ || tail_->mapped - tail_->write < needed) append_block(space_.take(needed));
    return append(seq, publisher, skip, size);
  }

  // Keeps a message whose bytes lie at `offset` of a mapping, kAround bytes or more from its ends.
  // Returns false without room; otherwise the mapping is the inbox's. `publisher` may lie there as
  // well, behind the first kAround bytes.
  bool adopt(uint64_t seq, const uint8_t* publisher, size_t size, void* mapping, size_t mapped,
             size_t offset) {
    const size_t skip = offset - sizeof(InboxBlock) - sizeof(Entry);
    const size_t needed = bytes_of(skip + size);
    if (!make_room(needed)) return false;
    // Later messages do not go behind it: they would keep its memory, of which no bound knows.
    const size_t left = shrink_pages(mapping, mapped, sizeof(InboxBlock) + needed);
    append_block(InboxSpace::block_of(mapping, left));
    append(seq, publisher, skip, size);
    return true;
  }

  // seq(), publisher(), size() and data() of the oldest message, while there is one.
  uint64_t seq() { return front()->seq; }
  const uint8_t* publisher() {
    return front()->named ? reinterpret_cast<const uint8_t*>(front() + 1) : nullptr;
  }
  size_t size() { return front()->size - front()->skip; }
  const char* data() { return reinterpret_cast<const char*>(front() + 1) + front()->skip; }

  // Gives back the memory of the first `bytes` of the oldest message, as far as it has whole pages:
  // they have been copied. So `pop` has less to give back at once.
  void discard(size_t bytes) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(data());
    const uintptr_t begin = (at + kPage - 1) & ~(kPage - 1), end = (at + bytes) & ~(kPage - 1);
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
  }

  void pop() {
    Entry* entry = front();
    if (entry == newest_) newest_ = nullptr;
    const size_t bytes = bytes_of(entry->size);
    head_->read += bytes;
    ++popped_;
    bytes_ -= bytes;
    space_.remove(bytes);
    if (head_->read == head_->write) remove_block(head_);
  }

  void clear() {
    while (!empty()) pop();
  }

 private:
  static constexpr uintptr_t kPage = 4096;

  static size_t bytes_of(size_t size) { return sizeof(Entry) + ((size + 7) & ~size_t{7}); }

  Entry* front() { return reinterpret_cast<Entry*>(head_->at(head_->read)); }

  bool admits(size_t needed) const {
    return bounds_.admits(messages() + 1, bytes_ + needed) && space_.admits(1, needed);
  }

  // Has the inbox admit a message, at the cost of the newest one if need be; false without room.
  bool make_room(size_t needed) {
    if (admits(needed)) return true;
    ++dropped_;
    if (!newest_ || !can_replace_newest(needed)) {
      hole_ = true;
      return false;
    }
    drop_newest();
    return true;
  }

  // Appends an entry to the last block; returns where its message is.
  unsigned char* append(uint64_t seq, const uint8_t* publisher, size_t skip, size_t size) {
    Entry* entry = newest_ = reinterpret_cast<Entry*>(tail_->at(tail_->write));
    entry->seq = seq;
    entry->size = skip + size;
    entry->skip = skip;
    entry->named = publisher != nullptr;
    auto* bytes = reinterpret_cast<unsigned char*>(entry + 1);
    if (publisher) std::memcpy(bytes, publisher, kPublisherBytes);
    const size_t needed = bytes_of(skip + size);
    tail_->write += needed;
    ++pushed_;
    bytes_ += needed;
    space_.add(needed);
    hole_ = false;
    return bytes + skip;
  }

  bool can_replace_newest(size_t needed) const {
    const size_t freed = bytes_of(newest_->size);
    return needed <= freed || (bounds_.admits(messages(), bytes_ - freed + needed) &&
                               space_.admits(0, needed - freed));
  }

  void drop_newest() {
    const size_t bytes = bytes_of(newest_->size);
    newest_ = nullptr;
    tail_->write -= bytes;
    if (--pushed_ < first_) first_ = pushed_;
    bytes_ -= bytes;
    space_.remove(bytes);
    if (tail_->read == tail_->write) remove_block(tail_);
  }

  void append_block(InboxBlock* block) {
    block->before = tail_;
    (tail_ ? tail_->next : head_) = block;
    tail_ = block;
  }

  void remove_block(InboxBlock* block) {
    (block->before ? block->before->next : head_) = block->next;
    (block->next ? block->next->before : tail_) = block->before;
    space_.give(block);
  }

  InboxSpace& space_;
  InboxBounds bounds_;
  InboxBlock* head_ = nullptr;
  InboxBlock* tail_ = nullptr;
  Entry* newest_ = nullptr;  // the message pushed last, while it may be replaced
  uint64_t pushed_ = 0;
  uint64_t popped_ = 0;
  uint64_t first_ = 0;
  uint64_t bytes_ = 0;
  uint64_t dropped_ = 0;
  bool hole_ = false;
};

}  // namespace kvd
