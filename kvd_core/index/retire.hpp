// Clears of caches, ranks that leave, and the sweep of what they held.
//
// A rank that leaves, or whose cache is cleared, is retired: it stops counting, and the sweep takes
// it apart bit by bit. Its names are then only hints to where its blocks may be. The first name
// that leads to a chain takes the rank off the whole chain. So the other names of that chain find
// nothing to do, and it does not matter that the block they mean may have been freed or reused:
//
//   retired 7   names [ 17 | .. | R3 | .. | 902 | 18 | .. ]      18 is in the chain of 17
//                       ─────────>│ sweep_at                     and finds nothing left to do
//
// A cache of a few names, or only some tiers of a cache, is cleared at once: name by name, then
// chain by chain.
//
// Invariants: 6 of index/index.hpp; a rank's id is reused only when nothing is left of the rank.
//
// Costs: retire, and clear all, O(1), but O(ranks) where ranks count as others; clear a part
// O(names of the rank), with one edit of its runs for each chain that the rank leaves. A step of
// the sweep is 16 slots of names, 8 blocks freed, 64 members of a set copied, a record, or an
// exception; a chain takes 16 steps besides. A step takes at most 0.1 us.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "index/index.hpp"

namespace kvd {

inline void Index::retire_rank(RankId id) {
  Rank& rank = ranks_[id];
  if (linked_) pass_on(id, kNone);
  if (rank.alias_of == kMany) aliases_.erase(id);
  for (LayerId tier = 0; tier < kTierLayers; ++tier) held_[tier] -= rank.held[tier];
  parked_ -= rank.parked();
  budget_->names -= rank.names.size();
  rank.live = false;
  if (predicted_ != nullptr) predicted_->forget(id);
  retired_.push_back(id);
}

inline RankId Index::renew_rank(RankId id) {
  const RankId fresh = add_rank(ranks_[id].dp_rank);
  static_cast<RankTraits&>(ranks_[fresh]) = ranks_[id];
  if (linked_) pass_on(id, fresh);
  if (ranks_[id].alias_of == kMany) aliases_[fresh] = aliases_[id];
  retire_rank(id);
  return fresh;
}

// Ranks that count as `from` count as `to` from now on.
inline void Index::pass_on(RankId from, RankId to) {
  for (Rank& rank : ranks_) {
    if (rank.alias_of != from) continue;
    rank.alias_of = to;
    rank.hidden = to == kNone;
  }
  for (auto& entry : aliases_) {
    std::vector<RankId>& ranks = entry.second;
    const auto at = std::find(ranks.begin(), ranks.end(), from);
    if (at == ranks.end()) continue;
    if (to == kNone) {
      ranks.erase(at);
    } else {
      *at = to;
    }
  }
}

// ---- clearing

inline RankId Index::clear(RankId id, LayerMask mask) {
  note_emptied(id, mask & ((1u << kTierLayers) - 1), Change::kCleared);
  if (predicted_ != nullptr && (mask & 1u << kDeviceLayer) != 0) predicted_->forget(id);
  const bool all = mask == kAllLayers || lies_within(id, mask);
  if (all && ranks_[id].names.size() + ranks_[id].parked() > kClearAtOnce) return renew_rank(id);
  drop_parked(id, mask);
  // A name that loses its last layer to a clear is forgotten: nothing may refer to it later.
  clear_names(id, mask | 1u << kGhostLayer);
  return id;
}

// Whether the rank holds and awaits nothing except ghosts outside `mask`, which has all layers of
// some tiers, and nothing on media that are no tiers.
inline bool Index::lies_within(RankId id, LayerMask mask) const {
  const Rank& rank = ranks_[id];
  if (rank.parked() != 0 && !rank.rare->parked.lies_within(mask)) return false;
  for (LayerId tier = 0; tier < kTierLayers; ++tier) {
    if ((mask >> tier & 1) != 0) continue;
    if (rank.held[tier] != 0 || rank.held[kFirstGroupLayer + tier] != 0) return false;
  }
  return rank.held[Rank::kCounters - 1] == 0;
}

// Takes the layers of `mask` from every name, then the rank off these layers, chain by chain.
inline void Index::clear_names(RankId id, LayerMask mask) {
  Rank& rank = ranks_[id];
  if (rank.rare != nullptr) clear_rare_state(*rank.rare, mask);
  touched_.clear();
  for (uint32_t slot = 0; slot < rank.names.capacity(); ++slot) {
    const uint32_t value = rank.names.value(slot);
    if (value == Names::kAbsent) continue;
    const LayerMask layers = keys().layers(value);
    if ((layers & mask) == 0) continue;
    const NodeId node = tree_.block(keys().block(value)).node;
    if (touched_.empty() || touched_.back() != node) touched_.push_back(node);
    if ((layers & ~mask) != 0) {
      rank.names.set_layers(slot, layers & ~mask, keys(), records_);
    } else {
      erase_name(id, slot);
      --slot;  // another entry may have moved here (unsigned wrap at 0 is undone by ++)
    }
  }
  for (const NodeId node : touched_) leave_chain(id, node, mask);
  rank.names.shrink(keys());
  // Trimming may free chains of this list, or merge them into others of it. It makes no nodes, so
  // no id is reused meanwhile.
  for (const NodeId node : touched_) {
    if (tree_.alive(node)) trim(node);
  }
}

inline void Index::clear_rare_state(RareState& rare, LayerMask mask) {
  rare.copies.clear(mask, counts_);
  rare.shared.clear(mask, counts_);
  rare.ghosts.clear();
}

// Takes the rank off a whole chain. Returns the number of members of the sets that changed.
//
//   before   [a b c d e]   DEVICE {2,7} to 2, {7} to 5     rank 7 holds 5
//   after    [a b c d e]   DEVICE {2} to 2                 rank 7 holds none; the caller trims
//                                                          c d e
inline size_t Index::leave_chain(RankId id, NodeId node, LayerMask mask) {
  Rank& rank = ranks_[id];
  size_t copied = 0;
  tree_.release_chain(node, mask, id, [&](LayerId layer, uint32_t blocks, size_t members) {
    copied += members;
    rank.held[counter(layer)] -= blocks;
    if (rank.live && layer < kTierLayers) held_[layer] -= blocks;
    if (layer != kGhostLayer) stats_.removed += blocks;
  });
  return copied;
}

// ---- sweeping retired ranks

inline bool Index::sweep(uint32_t budget) {
  Steps steps{budget};
  if (!resolve_waiting(steps)) return true;
  sweep_retired(steps);
  make_sequences(steps);
  while (steps.left() &&
         (tree_.shrink() || records_.shrink() || counts_.shrink() || parked_blocks_.shrink())) {
    steps.take(kStepsASegment);
  }
  return !steps.left();
}

inline void Index::sweep_retired(Steps& steps) {
  while (!retired_.empty() && steps.left()) {
    const RankId id = retired_.back();
    if (!sweep_rare_state(id, steps) || !sweep_names(id, steps)) continue;
    retired_.pop_back();
    ranks_[id] = Rank();
    free_ranks_.push_back(id);
  }
}

inline bool Index::sweep_rare_state(RankId id, Steps& steps) {
  if (ranks_[id].rare == nullptr) return true;
  RareState& rare = *ranks_[id].rare;
  return rare.copies.sweep(counts_, steps) && rare.shared.sweep(counts_, steps) &&
         rare.parked.sweep(parked_blocks_, steps);
}

// True when the rank holds nothing any more and all its records are freed.
inline bool Index::sweep_names(RankId id, Steps& steps) {
  Rank& rank = ranks_[id];
  bool present = rank.presence() != 0;
  for (; rank.sweep_at < rank.names.capacity() && steps.left(); ++rank.sweep_at) {
    if (rank.sweep_at % kSlotsAStep == 0) steps.take(1);
    const uint32_t value = rank.names.value(rank.sweep_at);
    if (value == Names::kAbsent) continue;
    const BlockId block = keys().block(value);
    if ((value & NameKeys::kRecordBit) != 0) {
      records_.give(value & ~NameKeys::kRecordBit);
      steps.take(1);
    }
    if (!present) continue;
    sweep_chain(id, tree_.node_of(block), steps);
    present = rank.presence() != 0;
  }
  return rank.sweep_at == rank.names.capacity();
}

inline void Index::sweep_chain(RankId id, NodeId node, Steps& steps) {
  steps.take(1);
  if (node == kNone) return;
  const uint32_t before = tree_.block_count();
  const size_t copied = leave_chain(id, node, kAllLayers);
  if (copied == 0) return;
  trim(node);
  const size_t freed = before - tree_.block_count();
  steps.take(kStepsAChain + freed / kFreedAStep + copied / kMembersAStep);
}

}  // namespace kvd
