// What a publisher's event does: stores below a parent or by hash alone, removals, clears.
//
//   stored, with tokens    no parent, or the parent means a block ─> put behind it        PLACED
//                          else the tree has a block of the parent's sequence hash ─> the same
//                          else ─> park_run                                               PARKED
//   stored, hash alone     a name of the holder ─> gained, a copy, or nothing new
//                          else the hash means a block, or is its sequence hash ─> adopted
//                          else ─> parked
//   removed                the holder's name for the hash loses the layers
//   cleared                all of a holder: as in the index; one namespace of several: name by name
//
// Each meaning that becomes known is announced. The caller then calls `resolve_waiting`, which
// places the blocks that waited for it.
//
// Invariant: the guard holds a block only within `put`. It keeps the parent alive, on the ghost
// layer, while names lose what they meant before, which may be all that has kept the parent.
//
// Costs of n blocks: n XXH3, n more in a namespace; what the index takes to store or remove them;
// one look-up a block while anything waits. Hashes alone are taken in slices, kStepsACredit steps a
// hash and one for each names table searched. Clearing one of several namespaces: O(names of the
// holder).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "conductor/conductor.hpp"

namespace kvd {

inline Conductor::StoreOutcome Conductor::store(Source* source, RankId id, StoredBlocks& e,
                                                uint32_t most_parked) {
  if (!index_.has_room(id, e.n)) return StoreOutcome::FULL;
  index_.make_room(id, e.n);
  index_.ranks_[id].settling = !e.by_engine || index_.ranks_[id].restored;
  const auto [below, space, above] = parent_of(*source, id, e);
  const bool placed = !e.has_parent || below != kNone;
  // A last part of one block would be a lone block below a parent, which means a second copy.
  if (!placed && e.n > most_parked && e.n - most_parked > 1) e.n = most_parked;
  note(*source, id, space);
  hash_tokens(e, space);
  names_.resize(e.n);
  for (uint32_t i = 0; i < e.n; ++i) names_[i] = name_of(*source, e.hashes[i], space, e.by_engine);
  const bool recalled = e.by_engine && e.layer != kDeviceLayer &&
                        index_.recall_content(id, names_.data(), e.n, locals_.data());
  Store s{names_.data(),
          locals_.data(),
          e.n,
          e.has_parent,
          name_of(*source, e.parent, space, e.by_engine),
          e.layer,
          0,
          recalled ? nullptr : plain_.data(),
          space};
  if (e.n == 0) return StoreOutcome::PLACED;
  if (index_.refers_to_itself(s)) {
    ++index_.stats_.self_references;
    return StoreOutcome::REFUSED;
  }
  if (placed ? !affords(id, s, below) : !can_wait(e.n)) {
    index_.refuse(e.n);
    return StoreOutcome::FULL;
  }
  if (placed) {
    put(id, s, below);
    for (uint32_t i = 0; i < e.n; ++i) {
      take_over_parked(id, names_[i]);
      announce(*source, space, e.hashes[i], e.by_engine);
    }
  } else {
    park_run(*source, id, e, s, above);
  }
  return placed ? StoreOutcome::PLACED : StoreOutcome::PARKED;
}

inline uint32_t Conductor::store_named(Source* source, RankId id, const uint64_t* hashes,
                                       uint32_t from, uint32_t n, LayerId layer, uint64_t space,
                                       bool by_engine, bool has_parent, Steps& steps) {
  if (!index_.has_room(id, n - from)) return kNone;
  index_.ranks_[id].settling = !by_engine || index_.ranks_[id].restored;
  const bool copy = index_.is_copy(id, n, has_parent);
  note(*source, id, space);
  if (from == n) return n;
  uint32_t refused = 0;
  do {
    refused += !credit(*source, id, hashes[from], layer, space, by_engine, copy);
    steps.take(kStepsACredit + tables_asked());
  } while (++from != n && steps.left());
  if (refused == 0) return from;
  index_.refuse(refused);
  return kNone;
}

inline void Conductor::remove(Source* source, RankId id, uint64_t hash, LayerMask mask,
                              uint64_t space, bool by_engine) {
  const Rank& rank = index_.ranks_[id];
  uint64_t name = name_of(*source, hash, space, by_engine);
  if (!knows(rank, name)) {
    const uint32_t slot = slot_in(source->home, id, hash, space, by_engine);
    if (slot == Names::kAbsent) {
      ++index_.stats_.removed_unknown;
      return;
    }
    name = keys().name(rank.names.value(slot));
  }
  for (LayerId layer = 0; layer < kMaxLayers; ++layer) {
    if ((mask >> layer & 1) == 0 || layer == kGhostLayer) continue;
    if (mask != 1u << layer && !has(index_.ranks_[id], name, layer)) continue;
    if (!by_engine && rank.has_copies())
      index_.ranks_[id].rare->copies.set(name, layer, 0, index_.counts_);
    index_.remove(id, name, layer);
  }
}

inline void Conductor::clear(Source* source, RankId id, LayerMask mask, uint64_t space, bool all) {
  Holder& holder = holder_of(*source, id);
  for (LayerId tier = 0; tier < kTierLayers; ++tier) {
    if ((mask >> tier & 1) != 0) mask |= index_.tier_mask(tier);
  }
  if (!holder.used || (!all && !holder.several && holder.space != space)) return;
  if (!all && holder.several) return clear_space(id, mask, space);
  const RankId now = index_.clear(id, mask);
  if (mask == kAllLayers) holder.used = holder.several = false;
  if (now == id) return;
  holder.id = now;
  owners_[id] = nullptr;
  own(now, source);
  list_rows(*source->instance);
}

// ---- placing

inline Conductor::Parent Conductor::parent_of(const Source& source, RankId id,
                                              const StoredBlocks& e) {
  Parent parent{kNone, e.space, 0};
  if (e.n == 0) return parent;
  if (!e.has_parent) {
    // A block that is offloaded is of the namespace that it was announced in before.
    const uint32_t slot = e.by_engine && e.inherits && e.layer != kDeviceLayer
                              ? index_.ranks_[id].names.find(e.hashes[0], keys())
                              : Names::kAbsent;
    if (slot != Names::kAbsent)
      parent.space = sequences().space_of(keys().block(index_.ranks_[id].names.value(slot)));
    return parent;
  }
  parent.block = meaning(source, id, e.parent, e.space, e.by_engine);
  if (parent.block != kNone) {
    if (e.inherits) parent.space = sequences().space_of(parent.block);
    return parent;
  }
  StoredBlocks first = e;
  first.n = 1;
  hash_tokens(first, e.space);
  parent.sequence = standard_parent(source, id, e, e.space);
  if (parent.sequence != 0) {
    parent.block = sequences().find(sequences().key(e.space, parent.sequence));
  }
  return parent;
}

inline void Conductor::hash_tokens(const StoredBlocks& e, uint64_t space) {
  const size_t size = index_.block_size();
  const uint64_t seed = kBaseSeed + space, own = sequences().seed();
  locals_.resize(e.n);
  plain_.resize(e.n);
  local_hashes(e.tokens, e.n, size, seed, locals_.data());
  if (own == seed) {
    plain_ = locals_;
  } else {
    local_hashes(e.tokens, e.n, size, own, plain_.data());
  }
  for (uint32_t i = 0; e.mm_begin != nullptr && i < e.n; ++i) {
    const uint32_t from = e.mm_begin[i], to = e.mm_begin[i + 1];
    if (from == to) continue;
    locals_[i] = local_hash_mm(e.tokens + i * size, size, e.mm + from, to - from, seed);
    plain_[i] = local_hash_mm(e.tokens + i * size, size, e.mm + from, to - from, own);
  }
}

inline bool Conductor::affords(RankId id, const Store& s, BlockId below) {
  return index_.affords(id, s, below == kNone ? Tree::root() : index_.tree_.after(below));
}

// Stores a run behind `below`; kNone: at the root.
inline void Conductor::put(RankId id, const Store& s, BlockId below) {
  Store run = s;
  if (below == kNone) {
    run.has_parent = false;
    index_.place(id, run, Tree::root());
    return;
  }
  // Whether names had other meanings before, which may have been all that kept the parent.
  const Names& names = index_.ranks_[id].names;
  const bool rebinds = std::any_of(run.names, run.names + run.n, [&](uint64_t name) {
    return names.find(name, keys()) != Names::kAbsent;
  });
  Tree& tree = index_.tree_;
  if (rebinds) {
    const Block b = tree.block(below);
    tree.hold(b.node, kGhostLayer, b.offset, b.offset + 1, guard_, [](uint32_t) {});
  }
  index_.place(id, run, tree.after(below), below);
  if (rebinds) {
    const Block b = tree.block(below);
    tree.release(b.node, kGhostLayer, b.offset, b.offset + 1, guard_);
    index_.trim(b.node);
  }
}

// Makes the holder hold a block under a name that it does not have yet.
inline void Conductor::adopt(RankId id, uint64_t name, BlockId block, LayerMask layers) {
  index_.insert_name(id, name, block, layers);
  for (LayerId layer = 0; layer < kMaxLayers; ++layer) {
    if ((layers >> layer & 1) == 0) continue;
    const Block b = index_.tree_.block(block);
    index_.hold(id, b.node, layer, b.offset, b.offset + 1);
  }
}

// Makes the holder hold the block of a hash alone. With `copy`, a block that it holds already gets
// a second copy. False when there is no room.
inline bool Conductor::credit(Source& source, RankId id, uint64_t hash, LayerId layer,
                              uint64_t space, bool by_engine, bool copy) {
  const uint64_t name = name_of(source, hash, space, by_engine);
  uint32_t slot = slot_in(source.home, id, hash, space, by_engine);
  // A holder's own name takes precedence, even if it was announced in another namespace.
  if (slot == Names::kAbsent) slot = index_.ranks_[id].names.find(name, keys());
  if (slot != Names::kAbsent) {
    const uint32_t value = index_.ranks_[id].names.value(slot);
    if ((keys().layers(value) >> layer & 1) == 0) {
      index_.gain_name(id, slot, layer);
    } else if (copy) {
      index_.add_copy(id, keys().name(value), layer);
    } else {
      ++index_.stats_.refreshed;
    }
    return true;
  }
  if (!index_.budget_->fits(1)) return false;
  // A parked name may be announced a thousand times: its meaning is searched for only once.
  const bool known = knows(index_.ranks_[id], name);
  const BlockId block = known ? kNone : meaning_or_standard(source, id, hash, space, by_engine);
  if (block != kNone) {
    adopt(id, name, block, 1u << layer);
    announce(source, space, hash, by_engine);
    return true;
  }
  if (!known && !can_wait(1)) return false;
  index_.park(id, name, layer, nullptr);
  if (known) return true;
  const uint32_t at = index_.parked_at(id, name);
  if (at == kNone) return true;
  Parked& parked = index_.parked_blocks_[at];
  parked.hash = parked.sequence = hash;
  parked.space = space;
  parked.by_engine = by_engine;
  enter(sequences().key(space, hash), at, WaitsFor::CREDIT);
  announce(source, space, hash, by_engine);
  return true;
}

inline void Conductor::clear_space(RankId id, LayerMask mask, uint64_t space) {
  const Rank& rank = index_.ranks_[id];
  std::vector<uint64_t> names;
  for (uint32_t slot = 0; slot < rank.names.capacity(); ++slot) {
    const uint32_t value = rank.names.value(slot);
    if (value == Names::kAbsent || sequences().space_of(keys().block(value)) != space) continue;
    names.push_back(keys().name(value));
  }
  if (rank.parked() != 0) {
    rank.rare->parked.each(index_.parked_blocks_, [&](const Parked& parked) {
      if (parked.space == space) names.push_back(parked.name);
    });
  }
  for (const uint64_t name : names) {
    for (LayerId layer = 0; layer < kMaxLayers; ++layer) {
      if ((mask >> layer & 1) == 0 || layer == kGhostLayer) continue;
      while (has(index_.ranks_[id], name, layer)) index_.remove(id, name, layer);  // copies, too
    }
  }
}

}  // namespace kvd
