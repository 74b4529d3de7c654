// The latest changes: which rank gained or lost which blocks, and whose cache was cleared. They are
// in a ring of a fixed size that several indexes share.
//
//   oldest ──────────────────────────────────> newest, which overwrites the oldest
//   stored rank 7, device, blocks 0 to 31    removed rank 7, device, block 31    cleared rank 9, ..
//
// A block that is gone cannot be pointed to, so a change names it by a key, made of its depth (the
// number of blocks before it) and the content of the last kWindow blocks up to it. Two blocks with
// equal keys differ only in what lies further before them. For a stored run the change has the key
// of its first block and the low half of the key of its last.
//
// A rank is named by its owner: a number that no other rank of the process has had, and that
// outlives clears. Ranks of publishers have no owner, and their changes are not noted.
//
// Times are ticks, as of the last `set_time`: the chronicle's user tells it the time.
//
// Invariants
//   1. changes are numbered from 0 in the order they were noted; those from `first()` up to
//      `next()` are there;
//   2. a rank counts its noted changes: a reader that finds as many knows that none is overwritten.
//
// Costs: note O(1), 10 ns, mostly for the keys; 32 bytes a change, taken as they are written.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "base/arena.hpp"
#include "index/tree.hpp"

namespace kvd {

struct Change {
  enum Kind : uint8_t { kStored, kRemoved, kCleared, kRestarted };

  uint64_t key;     // of the block, or of the run's first block; 0 where all of a rank is meant
  uint32_t at;      // ticks
  uint32_t owner;   // of the rank
  uint32_t depth;   // of that block
  uint32_t last;    // low half of the key of the run's last block
  uint16_t blocks;  // of the run
  Kind kind;
  uint8_t tiers;  // the tier; or tiers as bits, where all of a rank is meant
};
static_assert(sizeof(Change) == 32);
static_assert(Tree::kMaxChain <= UINT16_MAX);

// ---- keys

constexpr uint32_t kWindow = 8;  // blocks in a key: a cache line of local hashes

// Local hashes are random enough to be mixed by odd factors, a different one for each position.
constexpr uint64_t kFactors[kWindow] = {
    0x9E3779B97F4A7C15ull, 0xC2B2AE3D27D4EB4Full, 0x165667B19E3779F9ull, 0x27D4EB2F165667C5ull,
    0xD6E8FEB86659FD93ull, 0xA0761D6478BD642Full, 0xE7037ED1A0B428DBull, 0x8EBC6AF09C88C6E3ull};
constexpr uint64_t kDepthFactor = 0x589965CC75374CC3ull;

// The key of block `at` of a prompt.
inline uint64_t key_of(const uint64_t* locals, uint32_t at) {
  const uint32_t before = std::min(at, kWindow - 1);
  uint64_t key = at * kDepthFactor;
  for (uint32_t k = 0; k <= before; ++k) key += locals[at - k] * kFactors[k];
  return key;
}

// The key of a block of the tree.
inline uint64_t key_in(const Tree& tree, NodeId id, uint32_t offset) {
  const Node* node = &tree.node(id);
  uint64_t key = (node->depth + offset) * kDepthFactor;
  const uint64_t* locals = node->chain.local();
  for (uint32_t k = 0; k < kWindow; ++k) {
    key += locals[offset] * kFactors[k];
    if (offset != 0) {
      --offset;
      continue;
    }
    if (node->parent == Tree::kRoot) break;
    node = &tree.node(node->parent);
    locals = node->chain.local();
    offset = node->chain.len() - 1;
  }
  return key;
}

// ---- the ring

class Chronicle {
 public:
  static constexpr uint32_t kTicksASecond = 100;

  // `capacity` is in changes, at least one; `now` is in seconds.
  Chronicle(uint32_t capacity, double now) : capacity_(capacity), began_(now) {
    // The system backs these pages with memory only when they are written.
    changes_.reset(static_cast<Change*>(std::calloc(capacity, sizeof(Change))));
    if (changes_ == nullptr) throw std::bad_alloc();
  }

  // `now` is in seconds.
  void set_time(double now) {
    now_ = static_cast<uint32_t>(std::max(now - began_, 0.0) * kTicksASecond);
  }
  double seconds(uint32_t ticks) const { return began_ + ticks / double{kTicksASecond}; }
  uint32_t now() const { return now_; }
  double reach() const { return seconds(next_ == 0 ? now_ : (*this)[first()].at); }

  // A new number for a rank.
  uint32_t new_owner() { return owners_++; }

  // Prefetches the entry that the next change is written to.
  void prefetch() const { __builtin_prefetch(changes_.get() + at_, 1); }

  void note(const Change& change) {
    changes_[at_] = change;
    if (++at_ == capacity_) at_ = 0;
    ++next_;
  }

  uint32_t capacity() const { return capacity_; }
  uint64_t first() const { return next_ - std::min<uint64_t>(next_, capacity_); }
  uint64_t next() const { return next_; }
  const Change& operator[](uint64_t number) const { return changes_[number % capacity_]; }

 private:
  struct Free {
    void operator()(Change* changes) const { std::free(changes); }
  };

  uint32_t capacity_;
  uint32_t at_ = 0;  // next_ modulo the capacity
  uint32_t now_ = 0;
  uint32_t owners_ = 0;
  uint64_t next_ = 0;
  double began_;  // seconds
  std::unique_ptr<Change[], Free> changes_;
};

}  // namespace kvd
