// Blocks that have no place yet, in an arena of the index, and how they are found by rank, by name,
// by parent and by age.
//
//   rank 7   by name     slots [ . 3 . 0 . 5 ]       name -> block
//            by parent   slots [ . 5 ]               parent -> the newest block that waits for it
//   arena    0 {12 parent 11}  1 ..  2 ..  3 {31}  4 ..  5 {15 parent 11}        5 ─older─> 0
//   queue    [ 0 | 5 | .. | 3 ]                      oldest first, among stale ones
//
// Whoever refers to a block from outside does so by its number in the arena and by its stamp, which
// no other block ever has: where it is free, its stamp is 0.
//
// Invariants
//   1. the blocks of one rank have distinct names; those in the list of their parent `wait`;
//   2. the arena has the blocks of the tables, and no others.
//
// Costs: O(1) each, but `drop` O(blocks of the rank); 96 bytes a block, 5 to 10 in the slots of
// each table that it is in, 16 in the queue. `ParkedQueue::compact` passes at most
// `kCompactedAtOnce` entries.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>

#include "base/arena.hpp"
#include "base/keyed.hpp"
#include "base/steps.hpp"
#include "index/ranksets.hpp"
#include "index/tree.hpp"

namespace kvd {

struct Parked {
  uint64_t stamp = 0;
  uint64_t name = 0;  // its own
  RankId rank = 0;
  LayerMask layers = 0;
  bool has_content = false;  // false: only the name is known; `parent`, `local`, `term` say nothing
  bool waits = false;        // is in the list of its parent
  // For the conductor only (conductor/conductor.hpp).
  bool by_engine = false;  // an engine's own event has announced it
  bool certain = false;    // it had a place with its sequence hash, in another process
  uint64_t parent = 0;
  uint64_t local = 0;
  uint64_t term = 0;
  // For the conductor only; 0 in other ranks.
  uint64_t hash = 0;      // as the publisher announced it
  uint64_t space = 0;     // namespace
  uint64_t plain = 0;     // local hash by the seed of sequence hashes
  uint64_t sequence = 0;  // sequence hash, 0 unknown
  // Neighbours in the list of its parent.
  uint32_t newer = kNone;
  uint32_t older = kNone;

  uint32_t& free_link() { return older; }
};

// A segment takes 3.5 KB: a partition where few blocks wait has no more.
struct ParkedArena : Arena<Parked, 5> {
  KeyedHash hash;

  uint64_t hash_of(uint32_t at) const { return hash((*this)[at].name); }
};

// Those of one rank.
class ParkedBlocks {
 public:
  uint32_t size() const { return by_name_.size(); }
  size_t bytes() const { return by_name_.bytes() + by_parent_.bytes(); }

  // The block of a name, kNone without one.
  uint32_t find(uint64_t name, const ParkedArena& arena) const {
    return in(by_name_, slot_of(name, arena));
  }

  // The newest block that waits for a parent, kNone without one.
  uint32_t newest(uint64_t parent, const ParkedArena& arena) const {
    return in(by_parent_, slot_of_parent(parent, arena));
  }

  // Whether all blocks have, and have had since there were last fewer than two, no layers but those
  // of `mask`. O(1).
  bool lies_within(LayerMask mask) const { return size() == 0 || (layers_ & ~mask) == 0; }

  // Gives a block a layer.
  void add_layer(uint32_t at, LayerId layer, ParkedArena& arena) {
    layers_ = (size() == 1 ? arena[at].layers : layers_) | 1u << layer;
    arena[at].layers |= 1u << layer;
  }

  // Adds a block of a name that has none.
  uint32_t add(RankId rank, uint64_t name, uint64_t stamp, ParkedArena& arena) {
    by_name_.make_room();
    const uint32_t at = arena.take();
    arena[at] = Parked{};
    arena[at].stamp = stamp;
    arena[at].name = name;
    arena[at].rank = rank;
    by_name_.insert(arena.hash_of(at), at, arena);
    return at;
  }

  // Makes a block wait for its parent.
  void wait(uint32_t at, ParkedArena& arena) {
    Parked& p = arena[at];
    const uint32_t slot = slot_of_parent(p.parent, arena);
    p.older = in(by_parent_, slot);
    if (p.older == kNone) {
      by_parent_.insert(arena.hash(p.parent), at, Parents{arena});
    } else {
      by_parent_.set(slot, at);
      arena[p.older].newer = at;
    }
    p.newer = kNone;
    p.waits = true;
  }

  void erase(uint32_t at, ParkedArena& arena) {
    remove(by_name_.index_of(arena.hash_of(at), at), at, arena);
    shrink(arena);
  }

  // Takes layers from all blocks, and erases those that have none left.
  void drop(LayerMask mask, ParkedArena& arena) {
    for (uint32_t slot = 0; slot < by_name_.capacity(); ++slot) {
      const uint32_t at = by_name_.at(slot);
      if (at == ProbeTable::kEmpty || (arena[at].layers &= ~mask) != 0) continue;
      remove(slot, at, arena);
      --slot;  // another entry may have moved here (unsigned wrap at 0 is undone by ++)
    }
    shrink(arena);
  }

  // Gives the blocks back in slices; nothing else may be called from the first slice on. True when
  // all are.
  bool sweep(ParkedArena& arena, Steps& steps) {
    for (; swept_ < by_name_.capacity() && steps.left(); ++swept_) {
      if (swept_ % kSlotsAStep == 0) steps.take(1);
      const uint32_t at = by_name_.at(swept_);
      if (at == ProbeTable::kEmpty) continue;
      give(at, arena);
      steps.take(1);
    }
    return swept_ == by_name_.capacity();
  }

  // Calls visit for each block that has not been swept.
  template <class Visit>
  void each(const ParkedArena& arena, Visit&& visit) const {
    for (uint32_t slot = swept_; slot < by_name_.capacity(); ++slot) {
      if (const uint32_t at = by_name_.at(slot); at != ProbeTable::kEmpty) visit(arena[at]);
    }
  }

  // Calls visit for the newest block of each parent.
  template <class Visit>
  void each_newest(const ParkedArena& arena, Visit&& visit) const {
    for (uint32_t slot = 0; slot < by_parent_.capacity(); ++slot) {
      if (const uint32_t at = by_parent_.at(slot); at != ProbeTable::kEmpty) visit(arena[at]);
    }
  }

  bool is_spread(const ParkedArena& arena) const {
    return by_name_.is_spread(arena) && by_parent_.is_spread(Parents{arena});
  }

 private:
  static constexpr uint32_t kSlotsAStep = 16;

  struct Parents {
    const ParkedArena& arena;

    uint64_t hash_of(uint32_t at) const { return arena.hash(arena[at].parent); }
  };

  static uint32_t in(const ProbeTable& table, uint32_t slot) {
    return slot == ProbeTable::kEmpty ? kNone : table.at(slot);
  }

  uint32_t slot_of(uint64_t name, const ParkedArena& arena) const {
    return by_name_.find(arena.hash(name), [&](uint32_t at) { return arena[at].name == name; });
  }

  uint32_t slot_of_parent(uint64_t parent, const ParkedArena& arena) const {
    return by_parent_.find(arena.hash(parent),
                           [&](uint32_t at) { return arena[at].parent == parent; });
  }

  void remove(uint32_t slot, uint32_t at, ParkedArena& arena) {
    if (arena[at].waits) leave_parent(at, arena);
    by_name_.erase(slot, arena);
    give(at, arena);
  }

  void leave_parent(uint32_t at, ParkedArena& arena) {
    const Parked& p = arena[at];
    if (p.older != kNone) arena[p.older].newer = p.newer;
    if (p.newer != kNone) {
      arena[p.newer].older = p.older;
      return;
    }
    const uint32_t slot = slot_of_parent(p.parent, arena);
    if (p.older != kNone) {
      by_parent_.set(slot, p.older);
    } else {
      by_parent_.erase(slot, Parents{arena});
    }
  }

  static void give(uint32_t at, ParkedArena& arena) {
    arena[at].stamp = 0;
    arena.give(at);
  }

  void shrink(const ParkedArena& arena) {
    by_name_.shrink(arena);
    by_parent_.shrink(Parents{arena});
  }

  ProbeTable by_name_, by_parent_;
  LayerMask layers_ = 0;  // at least those of all blocks
  uint32_t swept_ = 0;
};

// The parked blocks of all ranks, oldest first, among stale entries of blocks that are parked no
// longer. `compact` drops the stale ones bit by bit: `kept_` has those that passed its check, and
// comes before `rest_`.
class ParkedQueue {
 public:
  struct Entry {
    uint64_t stamp;
    uint32_t at;  // in the arena
  };

  size_t size() const { return kept_.size() + rest_.size(); }
  void push(const Entry& entry) { rest_.push_back(entry); }

  Entry pop() {
    std::deque<Entry>& from = kept_.empty() ? rest_ : kept_;
    const Entry oldest = from.front();
    from.pop_front();
    return oldest;
  }

  template <class Wanted>
  void compact(Wanted&& wanted) {
    for (size_t n = 0; n < kCompactedAtOnce && !rest_.empty(); ++n) {
      if (wanted(rest_.front())) kept_.push_back(rest_.front());
      rest_.pop_front();
    }
    if (rest_.empty()) rest_.swap(kept_);
  }

  template <class Visit>
  void each(Visit&& visit) const {
    for (const std::deque<Entry>* part : {&kept_, &rest_}) {
      for (const Entry& entry : *part) visit(entry);
    }
  }

 private:
  static constexpr size_t kCompactedAtOnce = 64;  // entries checked for each block that is parked

  std::deque<Entry> kept_, rest_;
};

}  // namespace kvd
