// What parked blocks wait for: lists of them by key.
//
//   table    key of hash 501 -> 4    key of hash 78 -> 9
//   arena    4 {CREDIT, block 7}    9 {CHILD, block 2} ─older─> 3 {ALIAS, block 5}
//
// A waiter names its block by number and stamp (index/parked_blocks.hpp), so one whose block is
// parked no longer is recognised. It stays until it is dropped.
//
// Costs: O(1) each; 32 bytes a waiter, and 5 to 10 a key.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/arena.hpp"
#include "base/keyed.hpp"
#include "index/tree.hpp"

namespace kvd {

enum class WaitsFor : uint8_t { CREDIT, ALIAS, CHILD };

struct Waiter {
  uint64_t stamp;  // of the block; 0 where there is no waiter
  uint32_t block;  // in the arena of parked blocks
  WaitsFor kind;
};

class Waiters {
 public:
  bool empty() const { return arena_.live() == 0; }
  size_t size() const { return arena_.live(); }
  size_t bytes() const { return arena_.bytes() + table_.bytes(); }
  uint32_t end() const { return arena_.end(); }  // numbers of waiters are below it

  const Waiter& operator[](uint32_t at) const { return arena_[at]; }
  uint32_t older(uint32_t at) const { return arena_[at].older; }

  // The newest waiter of a key, kNone without one.
  uint32_t newest(uint64_t key) const {
    const uint32_t slot = slot_of(key);
    return slot == ProbeTable::kEmpty ? kNone : table_.at(slot);
  }

  void add(uint64_t key, const Waiter& waiter) {
    table_.make_room();
    const uint32_t at = arena_.take(), slot = slot_of(key);
    const uint32_t older = slot == ProbeTable::kEmpty ? kNone : table_.at(slot);
    static_cast<Waiter&>(arena_[at]) = waiter;
    arena_[at].key = key;
    arena_[at].older = older;
    arena_[at].newer = kNone;
    if (older == kNone) {
      table_.insert(arena_.hash_of(at), at, arena_);
    } else {
      table_.set(slot, at);
      arena_[older].newer = at;
    }
  }

  void drop(uint32_t at) {
    Entry& entry = arena_[at];
    if (entry.older != kNone) arena_[entry.older].newer = entry.newer;
    if (entry.newer != kNone) {
      arena_[entry.newer].older = entry.older;
    } else if (entry.older != kNone) {
      table_.set(slot_of(entry.key), entry.older);
    } else {
      table_.erase(slot_of(entry.key), arena_);
      table_.shrink(arena_);
    }
    entry.stamp = 0;
    arena_.give(at);
  }

  // Frees spare memory, a piece at a time; false when there is none.
  bool shrink() { return arena_.shrink(); }

  bool is_spread() const { return table_.is_spread(arena_); }

 private:
  struct Entry : Waiter {
    uint64_t key;
    uint32_t newer, older;

    uint32_t& free_link() { return older; }
  };

  struct WaiterArena : Arena<Entry> {
    KeyedHash hash;

    uint64_t hash_of(uint32_t at) const { return hash((*this)[at].key); }
  };

  uint32_t slot_of(uint64_t key) const {
    return table_.find(arena_.hash(key), [&](uint32_t at) { return arena_[at].key == key; });
  }

  WaiterArena arena_;
  ProbeTable table_;
};

}  // namespace kvd
