// A store: gives each block a place in the tree and a name of its rank, and makes the rank hold it.
//
//   room for it?    no: refused
//   parent known?   no: parked (index/parked.hpp)
//   affordable?     no: refused, by the budget
//   place           walk     a b │ c d         as far as the tree goes
//                   forget   12 meant x        it loses that, and the walk is repeated
//                   grow     c d behind b      ids_     [ 30 31 40 41 ]
//                   name     11 12 13 14       gained_  [  0  1  1  1 ]     11 has it already
//                   hold     31 │ 40 41        one edit of runs for the gained blocks of a chain
//   parked below?   placed by `resolve_waiting`
//
// The rules of index/index.hpp tell a re-announcement from a second copy. `make_room` comes before
// all else, because it may move chains.
//
// Invariants
//   1. from the last walk until the runs are edited, nothing is trimmed or merged: a block that
//      only a ghost keeps alive survives until the store holds it;
//   2. names that mean other content lose it, even where the budget refuses the store.
//
// Costs of n blocks: walk O(n), with one names probe a block; one run edit a chain, O(runs of the
// chain + members of the sets changed); a split O(kMaxChain) at a branch. When the budget is used
// up: one more names probe a block, and a sweep for as long as the store would take.
#pragma once

#include <algorithm>
#include <cstdint>

#include "index/index.hpp"

namespace kvd {

inline bool Index::store(RankId id, const Store& s) {
  if (s.n == 0) return true;
  if (!has_room(id, s.n)) return false;
  make_room(id, s.n);
  if (refers_to_itself(s)) {
    ++stats_.self_references;
    return true;
  }
  Position at = Tree::root();
  if (s.has_parent) {
    const uint32_t slot = ranks_[id].names.find(s.parent, keys());
    if (slot == Names::kAbsent) {
      if (!budget_->fits(s.n)) return refuse(s.n);
      park_run(id, s);
      return true;
    }
    at = tree_.after(keys().block(ranks_[id].names.value(slot)));
  }
  if (!affords(id, s, at)) return refuse(s.n);
  place(id, s, at);
  for (uint32_t i = 0; i < s.n && ranks_[id].parked() != 0; ++i) {
    gain_parked_layers(id, s.names[i]);
    if (is_awaited(id, s.names[i])) placed_.emplace_back(id, s.names[i]);
  }
  return true;
}

inline bool Index::store_named(RankId id, const uint64_t* names, uint32_t n, LayerId layer,
                               bool has_parent, uint32_t still, Origin origin) {
  if (!has_room(id, n + still)) return false;
  const bool copy = is_copy(id, n, has_parent, origin);
  uint32_t refused = 0;
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t slot = ranks_[id].names.find(names[i], keys());
    if (slot == Names::kAbsent && !budget_->fits(1)) {
      ++refused;
    } else if (slot == Names::kAbsent) {
      park(id, names[i], layer, nullptr);
    } else if ((keys().layers(ranks_[id].names.value(slot)) >> layer & 1) == 0) {
      gain_name(id, slot, layer);
    } else if (copy) {
      add_copy(id, names[i], layer);
    } else {
      ++stats_.refreshed;
    }
  }
  return refused == 0 || refuse(refused);
}

// ---- room

// Whether the budget has room for what a run behind `at` would add; re-announced blocks add
// nothing. If it has none, names that meant other blocks still lose them: those blocks are gone.
inline bool Index::affords(RankId id, const Store& s, Position at) {
  if (budget_->fits(s.n)) return true;
  ids_.resize(s.n);
  const size_t met = tree_.walk(at, s.locals, s.n, ids_.data());
  uint64_t fresh = 0;
  for (uint32_t i = 0; i < s.n; ++i) {
    fresh += ranks_[id].names.find(s.names[i], keys()) == Names::kAbsent;
  }
  if (budget_->fits(s.n - met, fresh)) return true;
  forget_other_content(id, s, met);
  return false;
}

inline bool Index::refuse(uint32_t n) {
  budget_->refused += n;
  if (budget_->fits(n)) budget_->crowded += n;  // then the bound on waiting blocks has refused them
  return false;
}

// Makes room for n blocks, rather than refuse them, for as long as storing them would take: forgets
// ghosts of the rank, and frees now what retired ranks hold, which counts until it is freed. May
// move chains.
inline void Index::make_room(RankId id, uint32_t n) {
  if (budget_->fits(n)) return;
  Steps steps(kStepsAStore + int64_t{n} * 2);
  for (; ranks_[id].ghosts() != 0 && !budget_->fits(n) && steps.left(); steps.take(1)) {
    forget_oldest_ghost(id);
  }
  sweep_retired(steps);
}

// ---- place

inline bool Index::refers_to_itself(const Store& s) {
  if (s.n == 1) return s.has_parent && s.names[0] == s.parent;
  sorted_.assign(s.names, s.names + s.n);
  if (s.has_parent) sorted_.push_back(s.parent);
  std::sort(sorted_.begin(), sorted_.end());
  return std::adjacent_find(sorted_.begin(), sorted_.end()) != sorted_.end();
}

// Stores a run whose place is known: behind `at`. The conductor passes the block there as `below`.
//
//   rank 7 stores 11 12 13 with content a b x; so far rank 2 alone holds [a b c]
//
//   before   root ── [a b c]  {2} to 3
//   grow     root ── [a b]  {2} to 2 ──┬─ [c]  {2} to 1     a split gives both sides their runs
//                                      └─ [x]  nobody
//   hold     root ── [a b]  {2,7} to 2 ┬─ [c]  {2} to 1     one edit a chain
//                                      └─ [x]  {7} to 1
inline void Index::place(RankId id, const Store& s, Position at, BlockId below) {
  ids_.resize(s.n);
  Position tip = at;
  size_t met = tree_.walk(tip, s.locals, s.n, ids_.data());
  if (forget_other_content(id, s, met)) {
    // Forgetting may have freed blocks of the path below `at`. The parent is held, so the block
    // before `at` is alive, but its chain may have moved.
    if (below == kNone && s.has_parent) below = block_of(id, s.parent);
    tip = below != kNone ? tree_.after(below) : Tree::root();
    met = tree_.walk(tip, s.locals, s.n, ids_.data());
  }
  tree_.grow(tip, s.locals + met, s.names + met, s.n - met, ids_.data() + met);
  budget_->blocks += s.n - met;
  name_blocks(id, s);
  if (sequences_ != nullptr) sequence_blocks(s);
}

inline void Index::sequence_blocks(const Store& s) {
  const bool has_plain = s.plain != nullptr;
  BlockId above = tree_.parent_of(ids_[0]);
  uint32_t known = 0;
  if (s.sequences != nullptr)
    known = sequences_->recall(above, ids_.data(), s.sequences, s.n, s.space);
  if (known != 0) above = ids_[known - 1];
  if (has_plain || sequences_->seed() == kBaseSeed) {
    sequences_->chain(above, ids_.data() + known, (has_plain ? s.plain : s.locals) + known,
                      s.n - known, s.space, has_plain);
  }
  if (placements_ != nullptr) placements_->placed(s, ids_.data());
}

// Takes from the store's names what they meant until now, where that is another block.
inline bool Index::forget_other_content(RankId id, const Store& s, size_t met) {
  bool any = false;
  for (uint32_t i = 0; i < s.n; ++i) {
    const uint32_t slot = ranks_[id].names.find(s.names[i], keys());
    if (slot == Names::kAbsent) continue;
    const uint32_t value = ranks_[id].names.value(slot);
    if (i < met && keys().block(value) == ids_[i]) continue;
    ++stats_.rebound;
    forget_name(id, slot);
    any = true;
  }
  return any;
}

// ---- names and presence

// Inserts the names of placed blocks and makes the rank their holder on the store's layer.
inline void Index::name_blocks(RankId id, const Store& s) {
  Rank& rank = ranks_[id];
  gained_.assign(s.n, 0);
  uint32_t gained = 0;
  for (uint32_t i = 0; i < s.n; ++i) {
    if (s.term != 0) terms_.set(ids_[i], s.term);
    const uint32_t slot = rank.names.find(s.names[i], keys());
    if (slot == Names::kAbsent) {
      insert_name(id, s.names[i], ids_[i], 1u << s.layer);
    } else if ((keys().layers(rank.names.value(slot)) >> s.layer & 1) == 0) {
      add_layer(id, slot, s.layer);
    } else {
      continue;
    }
    gained_[i] = 1;
    ++gained;
  }
  const bool is_known = gained == 0 || s.origin != Origin::UNKNOWN;
  const bool copies = is_known ? is_copy(id, s.n, s.has_parent, s.origin) : !ranks_[id].settling;
  if (!copies) {
    stats_.refreshed += s.n - gained;
  } else {
    for (uint32_t i = 0; i < s.n; ++i) {
      if (gained_[i] == 0) add_copy(id, s.names[i], s.layer);
    }
  }
  hold_gained(id, s);
}

// Whether a Stored of blocks that are all held already means second copies. Blocks that came with a
// dump are announced again by the events that the dump was made from; counted twice, they would
// outlive their removal.
inline bool Index::is_copy(RankId id, uint32_t n, bool has_parent, Origin origin) const {
  if (ranks_[id].settling) return false;
  if (origin != Origin::UNKNOWN) return origin == Origin::NEW;
  return (n == 1 && has_parent) || !ranks_[id].windows.empty();
}

// Gained blocks that are neighbours in one chain change its runs in one edit:
//
//   ids_      [ 30 31 | 40 41 42 ]      30 31 in one chain, 40 41 42 in the next
//   gained_   [  0  1 |  1  0  1 ]
//   edits           1    2     3
inline void Index::hold_gained(RankId id, const Store& s) {
  uint32_t i = 0;
  while (i < s.n) {
    if (gained_[i] == 0) {
      ++i;
      continue;
    }
    const Block first = tree_.block(ids_[i]);
    uint32_t j = i + 1;
    while (j < s.n && gained_[j] != 0 && tree_.block(ids_[j]).node == first.node) ++j;
    hold(id, first.node, s.layer, first.offset, first.offset + (j - i));
    i = j;
  }
}

inline void Index::hold(RankId id, NodeId node, LayerId layer, uint32_t from, uint32_t to) {
  const uint32_t gained = tree_.hold(node, layer, from, to, id, [&](uint32_t offset) {
    ranks_[id].rare_state().shared.add(tree_.node(node).chain.block()[offset], layer, counts_);
  });
  ranks_[id].held[counter(layer)] += gained;
  if (layer < kTierLayers) held_[layer] += gained;
  if (layer != kGhostLayer) stats_.stored += gained;
  if (gained != 0) note(id, Change::kStored, layer, node, from, to);
}

// Notes a change of blocks [from, to) of a chain on a tier; changes on other layers are not noted.
inline void Index::note(RankId id, Change::Kind kind, LayerId layer, NodeId node, uint32_t from,
                        uint32_t to) {
  Rank& rank = ranks_[id];
  if (rank.owner == kNone || layer >= kTierLayers) return;
  ++rank.noted;
  const uint64_t key = key_in(tree_, node, from);
  const uint64_t last = to - from == 1 ? key : key_in(tree_, node, to - 1);
  chronicle_->note({key, chronicle_->now(), rank.owner, tree_.node(node).depth + from,
                    static_cast<uint32_t>(last), static_cast<uint16_t>(to - from), kind,
                    static_cast<uint8_t>(layer)});
}

// Adds a layer to a known name. A ghost that is held again stops being a ghost.
inline void Index::add_layer(RankId id, uint32_t slot, LayerId layer) {
  const uint32_t value = ranks_[id].names.value(slot);
  LayerMask layers = keys().layers(value) | 1u << layer;
  if ((layers >> kGhostLayer & 1) != 0) {
    layers &= ~(1u << kGhostLayer);
    lose(id, keys().block(value), kGhostLayer);
  }
  ranks_[id].names.set_layers(slot, layers, keys(), records_);
}

inline void Index::gain_name(RankId id, uint32_t slot, LayerId layer) {
  const BlockId block = keys().block(ranks_[id].names.value(slot));
  add_layer(id, slot, layer);
  const Block b = tree_.block(block);
  hold(id, b.node, layer, b.offset, b.offset + 1);
}

inline void Index::add_copy(RankId id, uint64_t name, LayerId layer) {
  ranks_[id].rare_state().copies.add(name, layer, counts_);
  ++stats_.copies;
}

}  // namespace kvd
