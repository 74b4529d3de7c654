// Blocks by sequence hash: an index over the tree's blocks, kept from the first query by such a
// hash on.
//
//   key      namespace ? sequence hash ^ keyed hash of the namespace : sequence hash
//   keys     [ 0x91c0.. | 0x7ad2.. | 0 | .. ]     by block id, 0 unknown
//   spaces   [ 0 | 0x33e1.. | 0 | .. ]            by block id, 0 the base model
//   slots    [ 17 | .. | 902 | 18 | .. ]          key -> block; keys are read back from `keys`
//
// A namespace is what adapter and salt add to the seed of local hashes; 0 is the base model without
// a salt. Sequence hashes cover the text alone, so equal tokens have equal ones in all namespaces.
//
// Invariants
//   1. keys[b] != 0 exactly when b is in the slots, under that key;
//   2. `spaces_` has the namespaces of blocks in the slots, and of no others;
//   3. the blocks before a block in the slots are in the slots, in the same namespace.
//
// Costs: find, set, erase O(1); 8 bytes a block id and 5 to 10 a block, 8 more in a namespace. No
// call takes a time that grows with the number of blocks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/arena.hpp"
#include "base/hash.hpp"
#include "base/keyed.hpp"
#include "base/numbers.hpp"
#include "index/tree.hpp"

namespace kvd {

class Sequences {
 public:
  explicit Sequences(uint64_t seed) : seed_(seed) {}

  uint64_t seed() const { return seed_; }

  // Makes room for a tree's blocks, while empty: so no slots have to grow.
  void reserve(uint32_t blocks) { slots_.reserve(blocks); }

  uint64_t key(uint64_t space, uint64_t sequence) const {
    return space == 0 ? sequence : sequence ^ hash_(space);
  }

  // The sequence hash of the block behind one whose hash is `above`.
  uint64_t next(uint64_t above, uint64_t plain) const {
    const uint64_t pair[2] = {above, plain};
    return xxh3(pair, sizeof pair, seed_);
  }

  // Key of a block, 0 unknown.
  uint64_t key_of(BlockId block) const { return keys_[block]; }

  uint64_t space_of(BlockId block) const { return spaces_[block]; }

  // Sequence hash of a block, 0 unknown.
  uint64_t sequence_of(BlockId block) const {
    const uint64_t own = key_of(block);
    return own == 0 ? 0 : key(space_of(block), own);
  }

  BlockId find(uint64_t key) const {
    const uint32_t at =
        slots_.find(hash_(key), [&](uint32_t block) { return keys_.at(block) == key; });
    return at == ProbeTable::kEmpty ? kNone : slots_.at(at);
  }

  // Computes the sequence hashes of consecutive blocks behind `above` (kNone: the root) from their
  // local hashes. A known sequence hash stays, unless `overrules`: it may come from another seed.
  void chain(BlockId above, const BlockId* blocks, const uint64_t* plain, uint32_t n,
             uint64_t space, bool overrules) {
    uint64_t last = above == kNone ? 0 : sequence_of(above);
    // A block below one of another namespace: no prompt leads there.
    if (above != kNone && (last == 0 || space_of(above) != space)) return;
    for (uint32_t i = 0; i < n; ++i) {
      const bool first = above == kNone && i == 0;
      const uint64_t known = key_of(blocks[i]);
      if (known != 0 && !overrules) {
        if (space_of(blocks[i]) != space) return;
        last = sequence_of(blocks[i]);
        continue;
      }
      last = first ? plain[i] : next(last, plain[i]);
      set(blocks[i], space, last);
    }
  }

  // Sets sequence hashes of consecutive blocks behind `above` that another process knew (0: it did
  // not). Returns how many it has set.
  uint32_t recall(BlockId above, const BlockId* blocks, const uint64_t* sequences, uint32_t n,
                  uint64_t space) {
    if (above != kNone && (sequence_of(above) == 0 || space_of(above) != space)) return 0;
    for (uint32_t i = 0; i < n; ++i) {
      if (sequences[i] == 0) return i;
      set(blocks[i], space, sequences[i]);
      if (key_of(blocks[i]) != key(space, sequences[i])) return i;
    }
    return n;
  }

  void erase(BlockId block) {
    const uint64_t known = key_of(block);
    if (known == 0) return;
    slots_.erase(slots_.index_of(hash_(known), block), *this);
    keys_.erase(block);
    spaces_.erase(block);
    slots_.shrink(*this);
  }

  bool is_spread() const { return slots_.is_spread(*this); }
  uint64_t hash_of(uint32_t block) const { return hash_(keys_.at(block)); }
  uint32_t size() const { return slots_.size(); }

  size_t bytes() const { return keys_.bytes() + spaces_.bytes() + slots_.bytes(); }

 private:
  void set(BlockId block, uint64_t space, uint64_t sequence) {
    const uint64_t wanted = key(space, sequence);
    if (key_of(block) == wanted || wanted == 0) return;
    erase(block);
    if (find(wanted) != kNone) return;  // another path of mixed namespaces has the same text
    keys_.set(block, wanted);
    if (space != 0) spaces_.set(block, space);
    slots_.insert(hash_(wanted), block, *this);
  }

  uint64_t seed_;
  Numbers keys_, spaces_;
  ProbeTable slots_;
  KeyedHash hash_;
};

}  // namespace kvd
