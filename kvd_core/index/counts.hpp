// What few of a rank's names or blocks have: a count on a layer. The entries of all ranks are in
// one arena of the index.
//
//   rank 7   copies   slots [ . 3 . 0 ]          name, layer -> entry
//            shared   slots [ 2 . . . ]          block, layer -> entry
//   arena    [ {0xa1 DEVICE 1} | {0x5c HOST 2} | {12 DEVICE 1} | {0xa7 DEVICE 1} | .. ]
//
// Invariants
//   1. the entries of one table are distinct, and none counts 0;
//   2. the arena has the entries of the tables, and no others.
//
// Costs: get, set, add, take O(1), clear O(entries); 16 bytes an entry and 5 to 10 in the slots.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/arena.hpp"
#include "base/keyed.hpp"
#include "base/steps.hpp"
#include "index/tree.hpp"

namespace kvd {

struct Count {
  uint64_t id;
  LayerId layer;
  uint32_t count;

  uint32_t& free_link() { return count; }
};

struct CountArena : Arena<Count> {
  KeyedHash hash;

  uint64_t hash_of(uint32_t at) const { return hash((*this)[at].id, (*this)[at].layer); }
};

class Counts {
 public:
  bool empty() const { return size() == 0; }
  size_t size() const { return table_.size(); }
  size_t bytes() const { return table_.bytes(); }

  uint32_t get(uint64_t id, LayerId layer, const CountArena& arena) const {
    const uint32_t slot = find(id, layer, arena);
    return slot == ProbeTable::kEmpty ? 0 : arena[table_.at(slot)].count;
  }

  void set(uint64_t id, LayerId layer, uint32_t count, CountArena& arena) {
    const uint32_t slot = find(id, layer, arena);
    if (slot == ProbeTable::kEmpty) {
      if (count != 0) insert({id, layer, count}, arena);
    } else if (count != 0) {
      arena[table_.at(slot)].count = count;
    } else {
      erase(slot, arena);
      table_.shrink(arena);
    }
  }

  void add(uint64_t id, LayerId layer, CountArena& arena) {
    set(id, layer, get(id, layer, arena) + 1, arena);
  }

  // Counts one less; false if nothing was counted.
  bool take(uint64_t id, LayerId layer, CountArena& arena) {
    const uint32_t count = get(id, layer, arena);
    if (count != 0) set(id, layer, count - 1, arena);
    return count != 0;
  }

  // Forgets what is counted on some layers.
  void clear(LayerMask mask, CountArena& arena) {
    for (uint32_t slot = 0; slot < table_.capacity(); ++slot) {
      const uint32_t at = table_.at(slot);
      if (at == ProbeTable::kEmpty || (mask >> arena[at].layer & 1) == 0) continue;
      erase(slot, arena);
      --slot;  // another entry may have moved here (unsigned wrap at 0 is undone by ++)
    }
    table_.shrink(arena);
  }

  // Gives the entries back in slices; nothing else may be called from the first slice on. True when
  // all are.
  bool sweep(CountArena& arena, Steps& steps) {
    for (; swept_ < table_.capacity() && steps.left(); ++swept_) {
      if (swept_ % kSlotsAStep == 0) steps.take(1);
      const uint32_t at = table_.at(swept_);
      if (at == ProbeTable::kEmpty) continue;
      arena.give(at);
      steps.take(1);
    }
    return swept_ == table_.capacity();
  }

  // Entries that have not been swept.
  template <class Visit>
  void each(const CountArena& arena, Visit&& visit) const {
    for (uint32_t slot = swept_; slot < table_.capacity(); ++slot) {
      if (const uint32_t at = table_.at(slot); at != ProbeTable::kEmpty) visit(arena[at]);
    }
  }

  bool is_spread(const CountArena& arena) const { return table_.is_spread(arena); }

 private:
  static constexpr uint32_t kSlotsAStep = 16;

  uint32_t find(uint64_t id, LayerId layer, const CountArena& arena) const {
    return table_.find(arena.hash(id, layer),
                       [&](uint32_t at) { return arena[at].id == id && arena[at].layer == layer; });
  }

  void insert(const Count& count, CountArena& arena) {
    table_.make_room();
    const uint32_t at = arena.take();
    arena[at] = count;
    table_.insert(arena.hash_of(at), at, arena);
  }

  void erase(uint32_t slot, CountArena& arena) {
    const uint32_t at = table_.at(slot);
    table_.erase(slot, arena);
    arena.give(at);
  }

  ProbeTable table_;
  uint32_t swept_ = 0;
};

}  // namespace kvd
