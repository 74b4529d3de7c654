// Blocks that have no place yet: their parent is unknown, or only their name is known.
//
//   rank 7   by name     12 { content b, parent 11 }  15 { content c, parent 11 }  31 { name only }
//            by parent   11 ─> 15 ─> 12                  blocks of one parent, the newest first
//   index    order_      [ 12 | 15 | .. | 31 ]           oldest first, among stale entries
//
//   31 arrives ─> its layers are added to the block that has just been placed
//   11 arrives ─> placed_ [ 11 ] ─> 15 placed below it ─> placed_ [ 11 15 ] if blocks wait for 15
//                                   `place_parked` goes on in slices, and 12 comes last
//
// Publishers' blocks are parked in the same tables (index/parked_blocks.hpp), but are in no list of
// a parent: conductor/waiting.hpp has what they wait for.
//
// Invariants (4 of index/index.hpp, in parts)
//   1. a parked block with content is in the list of its parent, one without content is in none;
//      if the parent is known, the parent is in `placed_`;
//   2. a parked block has one entry in `order_` with its stamp; `parked_` counts the parked blocks
//      of live ranks, at most `max_parked_`.
//
// Costs: park, unpark O(1); place_parked a store of one block for each block placed;
// dropping layers O(parked blocks of the rank).
#pragma once

#include <cstdint>

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
  ParkedBlocks& parked = ranks_[id].rare_state().parked;
  uint32_t at = parked.find(name, parked_blocks_);
  if (at == kNone) {
    at = parked.add(id, name, ++stamp_, parked_blocks_);
    order_.push({stamp_, at});
    ++parked_;
    ++stats_.parked;
  }
  parked.add_layer(at, layer, parked_blocks_);
  Parked& p = parked_blocks_[at];
  if (content != nullptr && !p.has_content) {
    p.has_content = true;
    p.parent = content->parent;
    p.local = content->locals[0];
    p.term = content->term;
    p.plain = content->plain == nullptr ? 0 : content->plain[0];
    p.space = content->space;
    if (!ranks_[id].published) parked.wait(at, parked_blocks_);
  }
  bound_parked();
}

inline void Index::bound_parked() {
  while (parked_ > max_parked_) {
    const ParkedQueue::Entry oldest = order_.pop();
    if (!is_parked(oldest.at, oldest.stamp)) continue;
    forget_parked(oldest.at);
    ++stats_.parked_dropped;
  }
  // Drops stale entries before they outnumber the parked blocks.
  if (order_.size() > 2 * parked_ + 64) {
    order_.compact([&](const ParkedQueue::Entry& each) { return is_parked(each.at, each.stamp); });
  }
}

// Whether a block of a live rank with that stamp is still parked.
inline bool Index::is_parked(uint32_t at, uint64_t stamp) const {
  return at < parked_blocks_.end() && parked_blocks_[at].stamp == stamp &&
         ranks_[parked_blocks_[at].rank].live;
}

// The parked block of a name, kNone without one.
inline uint32_t Index::parked_at(RankId id, uint64_t name) const {
  const Rank& rank = ranks_[id];
  return rank.parked() == 0 ? kNone : rank.rare->parked.find(name, parked_blocks_);
}

inline void Index::forget_parked(uint32_t at) {
  ranks_[parked_blocks_[at].rank].rare->parked.erase(at, parked_blocks_);
  --parked_;
}

inline bool Index::unpark(RankId id, uint64_t name, LayerId layer) {
  const uint32_t at = parked_at(id, name);
  if (at == kNone || (parked_blocks_[at].layers >> layer & 1) == 0) return false;
  parked_blocks_[at].layers &= ~(1u << layer);
  if (parked_blocks_[at].layers == 0) forget_parked(at);
  return true;
}

inline void Index::drop_parked(RankId id, LayerMask mask) {
  if (ranks_[id].parked() == 0) return;
  parked_ -= ranks_[id].parked();
  ranks_[id].rare->parked.drop(mask, parked_blocks_);
  parked_ += ranks_[id].parked();
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
    const uint32_t newest = rank.rare->parked.newest(parent, parked_blocks_);
    const uint64_t name = parked_blocks_[newest].name;
    place_parked_child(id, parent, newest);
    if (is_awaited(id, parent)) placed_.emplace_back(id, parent);
    if (is_awaited(id, name)) placed_.emplace_back(id, name);
  }
  return true;
}

// Whether parked blocks of the rank wait for a name.
inline bool Index::is_awaited(RankId id, uint64_t name) const {
  const Rank& rank = ranks_[id];
  return rank.parked() != 0 && rank.rare->parked.newest(name, parked_blocks_) != kNone;
}

// Another event has placed the name of a parked block: the block only adds its layers.
inline void Index::gain_parked_layers(RankId id, uint64_t name) {
  const uint32_t at = parked_at(id, name);
  if (at == kNone) return;
  const LayerMask layers = parked_blocks_[at].layers;
  forget_parked(at);
  ++stats_.unparked;
  for (LayerId layer = 0; layer < kMaxLayers; ++layer) {
    if ((layers >> layer & 1) == 0) continue;
    const uint32_t slot = ranks_[id].names.find(name, keys());
    if ((keys().layers(ranks_[id].names.value(slot)) >> layer & 1) == 0) gain_name(id, slot, layer);
  }
}

inline void Index::place_parked_child(RankId id, uint64_t parent, uint32_t at) {
  const Parked p = parked_blocks_[at];
  forget_parked(at);
  ++stats_.unparked;
  // No query finds a block that was hashed without its prompt's term. It is placed all the same:
  // removals name it, and the blocks below it inherit the term.
  const uint64_t above = term_at(block_of(id, parent));
  const uint64_t term = above != 0 ? above : p.term;
  if (term != p.term) ++stats_.parked_unsalted;
  for (LayerId layer = 0; layer < kMaxLayers; ++layer) {
    if ((p.layers >> layer & 1) == 0) continue;
    const Store s{&p.name, &p.local, 1,    true,
                  parent,  layer,    term, p.plain == 0 ? nullptr : &p.plain,
                  p.space};
    place(id, s, tree_.after(block_of(id, parent)));
  }
}

}  // namespace kvd
