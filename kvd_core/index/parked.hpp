// Blocks that have no place yet: their parent is unknown, or only their name is known.
//
//   rank 7   parked    12 { content b, parent 11 }  15 { content c, parent 11 }  31 { named only }
//            waiting   11 ─> 15 ─> 12                    blocks of one parent, the newest first
//   index    order_    [ 12 | 15 | .. | 31 ]             oldest first, among stale entries
//
//   31 arrives ─> its layers are added to the block that has just been placed
//   11 arrives ─> placed_ [ 11 ] ─> 15 placed below it ─> placed_ [ 11 15 ] if blocks wait for 15
//                                   `place_parked` goes on in slices, and 12 comes last
//
// Publishers' blocks are parked in the same tables, but are in no list of `waiting`:
// conductor/waiting.hpp has what they wait for.
//
// Invariants (4 of index/index.hpp, in parts)
//   1. a parked block with content is in the list of its parent, one without content is in none;
//      if the parent is known, the parent is in `placed_`;
//   2. a parked block has one entry in `order_` with its stamp; `parked_` counts the parked blocks
//      of live ranks, at most `max_parked_`.
//
// Costs: park, unpark O(1); place_parked a store of one block for each block placed;
// dropping layers O(parked blocks of the rank); some 200 bytes a block (kParkedBytes).
#pragma once

#include <cstdint>
#include <unordered_map>

#include "index/index.hpp"

namespace kvd {

// Parks a run whose parent is unknown, up to the first block that is known: that one keeps its
// place (an unknown parent cannot contradict it), and what follows it has a known parent after all.
inline void Index::park_run(RankId id, const Store& s) {
  Store one = s;
  for (uint32_t i = 0; i < s.n; ++i) {
    one.names = s.names + i;
    one.locals = s.locals + i;
    if (s.plain != nullptr) one.plain = s.plain + i;
    one.parent = i == 0 ? s.parent : s.names[i - 1];
    if (ranks_[id].names.find(s.names[i], keys()) != Names::kAbsent) {
      store_named(id, s.names + i, 1, s.layer, false, 0, s.origin);
      store(id, {s.names + i + 1, s.locals + i + 1, s.n - i - 1, true, s.names[i], s.layer, s.term,
                 s.plain == nullptr ? nullptr : s.plain + i + 1, s.space, s.origin});
      return;
    }
    park(id, s.names[i], s.layer, &one);
  }
}

// `content` is null when only the name is known.
inline void Index::park(RankId id, uint64_t name, LayerId layer, const Store* content) {
  RareState& rare = ranks_[id].rare_state();
  auto it = rare.parked.find(name);
  if (it == rare.parked.end()) {
    it = rare.parked.emplace(name, Parked{false, 0, 0, 0, 0, ++stamp_}).first;
    it->second.name = name;
    order_.push({name, stamp_, id});
    ++parked_;
    ++stats_.parked;
    // The table may grow to the whole bound, and growing is not done in slices: reserve it all now.
    if (rare.parked.size() == kGrowsTo && max_parked_ > kMaxParked)
      rare.parked.reserve(max_parked_);
  }
  Parked& p = it->second;
  p.layers |= 1u << layer;
  if (content != nullptr && !p.has_content) {
    p.has_content = true;
    p.parent = content->parent;
    p.local = content->locals[0];
    p.term = content->term;
    p.plain = content->plain == nullptr ? 0 : content->plain[0];
    p.space = content->space;
    if (!ranks_[id].published) wait_for_parent(rare, p);
  }
  bound_parked();
}

inline void Index::wait_for_parent(RareState& rare, Parked& p) {
  Parked*& newest = rare.waiting[p.parent];
  p.older = newest;
  if (newest != nullptr) newest->newer = &p;
  newest = &p;
}

inline void Index::wait_no_more(RareState& rare, Parked& p) {
  if (p.older != nullptr) p.older->newer = p.newer;
  if (p.newer != nullptr) {
    p.newer->older = p.older;
  } else if (p.older != nullptr) {
    rare.waiting[p.parent] = p.older;
  } else {
    rare.waiting.erase(p.parent);
  }
}

inline void Index::bound_parked() {
  while (parked_ > max_parked_) {
    const ParkedQueue::Entry oldest = order_.pop();
    if (!is_parked(oldest)) continue;
    forget_parked(oldest.rank, ranks_[oldest.rank].rare->parked.find(oldest.name));
    ++stats_.parked_dropped;
  }
  // Drops stale entries before they outnumber the parked blocks.
  if (order_.size() > 2 * parked_ + 64) {
    order_.compact([&](const ParkedQueue::Entry& entry) { return is_parked(entry); });
  }
}

inline bool Index::is_parked(const ParkedQueue::Entry& entry) const {
  const Rank& rank = ranks_[entry.rank];
  if (!rank.live || rank.parked() == 0) return false;
  const auto it = rank.rare->parked.find(entry.name);
  return it != rank.rare->parked.end() && it->second.stamp == entry.stamp;
}

inline void Index::forget_parked(RankId id,
                                 std::unordered_map<uint64_t, Parked, KeyedHash>::iterator it) {
  RareState& rare = *ranks_[id].rare;
  if (it->second.has_content && !ranks_[id].published) wait_no_more(rare, it->second);
  --parked_;
  rare.parked.erase(it);
}

inline bool Index::unpark(RankId id, uint64_t name, LayerId layer) {
  if (ranks_[id].parked() == 0) return false;
  const auto it = ranks_[id].rare->parked.find(name);
  if (it == ranks_[id].rare->parked.end() || (it->second.layers >> layer & 1) == 0) return false;
  it->second.layers &= ~(1u << layer);
  if (it->second.layers == 0) forget_parked(id, it);
  return true;
}

inline void Index::drop_parked(RankId id, LayerMask mask) {
  if (ranks_[id].parked() == 0) return;
  auto& parked = ranks_[id].rare->parked;
  for (auto it = parked.begin(); it != parked.end();) {
    const auto here = it++;
    here->second.layers &= ~mask;
    if (here->second.layers == 0) forget_parked(id, here);
  }
}

// ---- placing them

// Goes on placing the blocks that waited for those in `placed_`, and those that waited for these in
// turn; false while there are more. Other batches may be applied between two calls.
inline bool Index::place_parked(Steps& steps) {
  while (!placed_.empty()) {
    if (!steps.left()) return false;
    const auto [id, parent] = placed_.back();
    placed_.pop_back();
    steps.take(kStepsAParked);
    const Rank& rank = ranks_[id];
    if (!rank.live || !is_awaited(id, parent) ||
        rank.names.find(parent, keys()) == Names::kAbsent) {
      continue;
    }
    const uint64_t name = rank.rare->waiting.find(parent)->second->name;
    place_parked_child(id, parent, name);
    if (is_awaited(id, parent)) placed_.emplace_back(id, parent);
    if (is_awaited(id, name)) placed_.emplace_back(id, name);
  }
  return true;
}

// Whether parked blocks of the rank wait for a name.
inline bool Index::is_awaited(RankId id, uint64_t name) const {
  const Rank& rank = ranks_[id];
  return rank.parked() != 0 && rank.rare->waiting.count(name) != 0;
}

// Another event has placed the name of a parked block: the block only adds its layers.
inline void Index::gain_parked_layers(RankId id, uint64_t name) {
  const auto it = ranks_[id].rare->parked.find(name);
  if (it == ranks_[id].rare->parked.end()) return;
  const LayerMask layers = it->second.layers;
  forget_parked(id, it);
  ++stats_.unparked;
  for (LayerId layer = 0; layer < kMaxLayers; ++layer) {
    if ((layers >> layer & 1) == 0) continue;
    const uint32_t slot = ranks_[id].names.find(name, keys());
    if ((keys().layers(ranks_[id].names.value(slot)) >> layer & 1) == 0) gain_name(id, slot, layer);
  }
}

inline void Index::place_parked_child(RankId id, uint64_t parent, uint64_t name) {
  const auto it = ranks_[id].rare->parked.find(name);
  const Parked p = it->second;
  forget_parked(id, it);
  ++stats_.unparked;
  // No query finds a block that was hashed without its prompt's term. It is placed all the same:
  // removals name it, and the blocks below it inherit the term.
  const uint64_t above = term_at(block_of(id, parent));
  const uint64_t term = above != 0 ? above : p.term;
  if (term != p.term) ++stats_.parked_unsalted;
  for (LayerId layer = 0; layer < kMaxLayers; ++layer) {
    if ((p.layers >> layer & 1) == 0) continue;
    const Store s{&name,  &p.local, 1, true, parent, layer, term, p.plain == 0 ? nullptr : &p.plain,
                  p.space};
    place(id, s, tree_.after(block_of(id, parent)));
  }
}

}  // namespace kvd
