// A removal: a name loses a layer, and with its last layer what it means.
//
//   name 0xa1   held on the layer? ── no: parked, or unknown and counted
//               event says n left? ── n copies are kept
//               further copies?    ── one less, and nothing else happens
//               other layers left? ── it loses this one
//                             none ── it is erased, or becomes a ghost if its rank offloads
//   block 12    further names?     ── one less
//                             none ── its rank leaves the layer; what nobody holds is trimmed
//
//   ghosts [ 0xa1 | 0x5c | .. ]      at most kMaxGhosts a rank, the oldest is forgotten first
//
// Invariants
//   1. first the name goes, then the presence, then the block: a name's key may be read back from
//      its block (index/names.hpp), so a block that a slot still means is never trimmed;
//   2. `copies` and `shared` have no entry for a name without the layer (2 and 1 of
//      index/index.hpp).
//
// Costs: one names probe; one run edit, O(runs of the chain + members of the set changed); blocks
// freed; perhaps a merge, O(kMaxChain). Forgetting a name: the same for each layer it has.
#pragma once

#include <cstdint>

#include "index/index.hpp"

namespace kvd {

inline void Index::remove(RankId id, uint64_t name, LayerId layer) {
  const uint32_t slot = ranks_[id].names.find(name, keys());
  const uint32_t value = slot == Names::kAbsent ? Names::kAbsent : ranks_[id].names.value(slot);
  if (value == Names::kAbsent || (keys().layers(value) >> layer & 1) == 0) {
    if (!unpark(id, name, layer)) ++stats_.removed_unknown;
    return;
  }
  if (take_copy(id, name, layer)) {
    ++stats_.removed_copies;
    return;
  }
  const BlockId block = keys().block(value);
  const LayerMask left = keys().layers(value) & ~(1u << layer);
  if (left != 0) {
    ranks_[id].names.set_layers(slot, left, keys(), records_);
  } else if (ranks_[id].offloads && records_.live() < max_blocks_ && budget_->ample()) {
    keep_ghost(id, slot, name, block);
  } else {
    erase_name(id, slot);
    ranks_[id].names.shrink(keys());
  }
  lose(id, block, layer);
  trim(tree_.block(block).node);
  if (ranks_[id].ghosts() > kMaxGhosts) forget_oldest_ghost(id);
}

inline void Index::remove(RankId id, uint64_t name, LayerId layer, uint32_t left) {
  if (left == 0) {
    if (ranks_[id].has_copies()) ranks_[id].rare->copies.set(name, layer, 0, counts_);
    return remove(id, name, layer);
  }
  const uint32_t slot = ranks_[id].names.find(name, keys());
  if (slot == Names::kAbsent || (keys().layers(ranks_[id].names.value(slot)) >> layer & 1) == 0) {
    return;  // the name stays parked, or unknown
  }
  ranks_[id].rare_state().copies.set(name, layer, left - 1, counts_);
  ++stats_.removed_copies;
}

// Erases a name on all its layers.
inline void Index::forget_name(RankId id, uint32_t slot) {
  const uint32_t value = ranks_[id].names.value(slot);
  const uint64_t name = keys().name(value);
  const BlockId block = keys().block(value);
  const LayerMask layers = keys().layers(value);
  erase_name(id, slot);
  for (LayerId layer = 0; layer < kMaxLayers; ++layer) {
    if ((layers >> layer & 1) == 0) continue;
    if (ranks_[id].has_copies()) ranks_[id].rare->copies.set(name, layer, 0, counts_);
    lose(id, block, layer);
  }
  trim(tree_.block(block).node);
}

// Takes the rank off a block. Where further names of the rank mean it, only their count changes:
//
//   rank 7 loses b of [a b c]      shared {b, DEVICE}: 1, {2,7} to 3   =>   0: erased, {2,7} to 3
//   and again                      {2,7} to 3                          =>   {2,7} to 1, {2} to 2,
//                                                                           {2,7} to 3
inline void Index::lose(RankId id, BlockId block, LayerId layer) {
  Rank& rank = ranks_[id];
  if (rank.has_shared() && rank.rare->shared.take(block, layer, counts_)) return;
  const Block b = tree_.block(block);
  if (predicted_ != nullptr && layer == kDeviceLayer) {
    predicted_->evict(id, tree_.node(b.node).chain.local()[b.offset]);
  }
  if (chronicle_ != nullptr) {  // fetch what the note will read while the block is released
    const uint64_t* local = tree_.node(b.node).chain.local();
    __builtin_prefetch(local + b.offset);
    __builtin_prefetch(local + (b.offset < kWindow ? 0 : b.offset + 1 - kWindow));
    chronicle_->prefetch();
  }
  tree_.release(b.node, layer, b.offset, b.offset + 1, id);
  note(id, Change::kRemoved, layer, b.node, b.offset, b.offset + 1);
  --rank.held[counter(layer)];
  if (layer < kTierLayers) --held_[layer];
  if (layer != kGhostLayer) ++stats_.removed;
}

inline bool Index::take_copy(RankId id, uint64_t name, LayerId layer) {
  return ranks_[id].has_copies() && ranks_[id].rare->copies.take(name, layer, counts_);
}

// Frees what nobody holds any more at the end of a path (`Tree::trim` has the pictures), with all
// that is kept of a freed block outside the tree.
inline void Index::trim(NodeId node) {
  tree_.trim(node, [&](BlockId block) {
    --budget_->blocks;
    terms_.erase(block);
    if (sequences_ != nullptr) sequences_->erase(block);
  });
}

// ---- ghosts: names remembered after their last layer went

inline void Index::keep_ghost(RankId id, uint32_t slot, uint64_t name, BlockId block) {
  ranks_[id].names.set_layers(slot, 1u << kGhostLayer, keys(), records_);
  const Block b = tree_.block(block);
  hold(id, b.node, kGhostLayer, b.offset, b.offset + 1);
  ranks_[id].rare_state().ghosts.push_back(name);
}

inline void Index::forget_oldest_ghost(RankId id) {
  const uint64_t name = ranks_[id].rare->ghosts.front();
  ranks_[id].rare->ghosts.pop_front();
  const uint32_t slot = ranks_[id].names.find(name, keys());
  if (slot == Names::kAbsent) return;
  if (keys().layers(ranks_[id].names.value(slot)) != 1u << kGhostLayer) return;
  forget_name(id, slot);
}

}  // namespace kvd
