// Blocks that publishers have announced without a place in the tree, and how they get one.
//
//   waiters_   key of hash 501   CREDIT  rank 6, name 501   without tokens: counts as the
//                                                           block of sequence hash 501 until that
//                                                           block is known
//              key of hash 77    CHILD   rank 5, name 78    78 is the block behind 77
//              key of hash 78    ALIAS   rank 5, name 78    the parked block is called 78
//
// When any event places a block, the keys of its sequence hash and of its announced hash are looked
// up here, and the blocks that waited for them go into the tree:
//
//   placed, announce ── await ─> work_     keys that something waits for
//   a query's tokens ── place_by_prompt    the blocks that waiting sequence hashes stand for
//   resolve_waiting  ── try_place          each block that waits for such a key: try_credit,
//                                          try_behind_parent ─> announce
//
// Waiting blocks are in the tables of index/parked_blocks.hpp, by holder and name; `waiters_` finds
// them by what they wait for.
//
// Invariants: 1 of conductor/conductor.hpp, which `verify` checks; children wait under
// `behind(key)`, all others under the key itself.
//
// Costs: one look-up a key while anything waits; for an engine's own hash, one more for each other
// namespace that its instance is registered in; to place a block, what the index takes to store it.
// `resolve_waiting` goes in slices, kStepsAWaiter for each block tried. A waiting block takes 250
// bytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "conductor/conductor.hpp"

namespace kvd {

template <class Visit>
inline void Conductor::each_credit(uint64_t key, Visit&& visit) const {
  for (uint32_t at = waiters_.newest(key); at != kNone; at = waiters_.older(at)) {
    if (waiters_[at].kind != WaitsFor::CREDIT) continue;
    if (const Parked* parked = parked_of(waiters_[at])) visit(parked->rank, parked->layers);
  }
}

template <class Require>
inline void Conductor::verify(Require&& require) const {
  for (const auto& instance : instances_) {
    if (instance->worker == nullptr) continue;
    for (const auto& [dp_rank, id] : instance->worker->ranks) {
      require(!index_.rank(id).alias_only || has_row(*instance, dp_rank),
              "sources 3: a rank made for holders has some");
    }
  }
  require(waiters_.is_spread(), "conductor: keys of what waits are near their homes");
  for (RankId id = 0; id < index_.rank_end(); ++id) {
    const Rank& rank = index_.rank(id);
    if (!rank.live || id >= owners_.size() || owners_[id] == nullptr) continue;
    if (rank.rare == nullptr) continue;
    rank.rare->parked.each(index_.parked_blocks_, [&](const Parked& p) {
      const uint64_t key = sequences().key(p.space, p.has_content ? p.parent : p.hash);
      require(has_entry(p.has_content ? behind(key) : key, p),
              "conductor 1: what is parked waits for something");
    });
  }
}

// ---- setting aside

// Whether n more blocks may wait. Those that came first stay: they are the beginnings of prompts,
// without which nothing behind them counts.
inline bool Conductor::can_wait(uint32_t n) const {
  return index_.budget_->fits(n) && index_.parked_ + n <= index_.max_parked_;
}

// Parks a run whose parent is unknown; `above` is the parent's sequence hash, 0 unknown.
inline void Conductor::park_run(Source& source, RankId id, const StoredBlocks& e, const Store& s,
                                uint64_t above) {
  for (uint32_t i = 0; i < s.n; ++i) {
    const uint32_t slot = index_.ranks_[id].names.find(s.names[i], keys());
    if (slot != Names::kAbsent) {
      // An unknown parent does not contradict a known block, and what follows has a parent now.
      const uint32_t value = index_.ranks_[id].names.value(slot);
      const BlockId below = keys().block(value);
      if ((keys().layers(value) >> s.layer & 1) == 0) index_.gain_name(id, slot, s.layer);
      if (i + 1 == s.n) return;
      const Store rest{s.names + i + 1, s.locals + i + 1, s.n - i - 1, true, s.names[i], s.layer, 0,
                       s.plain + i + 1, s.space};
      put(id, rest, below);
      for (uint32_t j = i + 1; j < s.n; ++j) {
        take_over_parked(id, s.names[j]);
        announce(source, s.space, e.hashes[j], e.by_engine);
      }
      return;
    }
    if (above != 0) above = sequences().next(above, s.plain[i]);
    Store one{s.names + i, s.locals + i, 1,      true, i == 0 ? e.parent : e.hashes[i - 1], s.layer,
              0,           s.plain + i,  s.space};
    set_aside(source, id, e.hashes[i], one, above, e.by_engine);
    // Another publisher may have announced the block before, under the same hash.
    if (i != 0) await(sequences().key(s.space, one.parent));
  }
}

inline void Conductor::set_aside(Source& source, RankId id, uint64_t hash, const Store& one,
                                 uint64_t sequence, bool by_engine) {
  const uint64_t name = one.names[0];
  const uint32_t before = index_.parked_at(id, name);
  bool had_content = false;
  if (before != kNone) {
    const Parked& known = index_.parked_blocks_[before];
    had_content = known.has_content;
    if (sequence == 0 && known.certain) sequence = known.sequence;
  }
  index_.park(id, name, one.layer, &one);
  const uint32_t at = index_.parked_at(id, name);
  if (at == kNone || had_content) return;
  Parked& parked = index_.parked_blocks_[at];
  parked.stamp = ++index_.stamp_;  // outdates the entries made while it had no content
  index_.order_.push({parked.stamp, at});
  parked.hash = hash;
  parked.by_engine = by_engine;
  parked.sequence = sequence;
  enter(behind(sequences().key(one.space, one.parent)), at, WaitsFor::CHILD);
  enter(sequences().key(one.space, hash), at, WaitsFor::ALIAS);
  if (sequence != 0) {
    enter(sequences().key(one.space, sequence), at, WaitsFor::CREDIT);
    announce(source, one.space, hash, by_engine);
  }
}

// A name that has been placed takes over the layers of the block that was parked under it.
inline void Conductor::take_over_parked(RankId id, uint64_t name) {
  const uint32_t at = index_.parked_at(id, name);
  if (at == kNone) return;
  const LayerMask layers = index_.parked_blocks_[at].layers;
  index_.forget_parked(at);
  ++index_.stats_.unparked;
  for (LayerId layer = 0; layer < kMaxLayers; ++layer) {
    if ((layers >> layer & 1) == 0 || has(index_.ranks_[id], name, layer)) continue;
    index_.gain_name(id, index_.ranks_[id].names.find(name, keys()), layer);
  }
}

// ---- entries by what a block waits for

// The key under which the children of a key's block wait. There may be thousands, behind a prompt's
// beginning that was never announced. So they have a key of their own, and no search for the
// meaning of a hash passes over them.
inline uint64_t Conductor::behind(uint64_t key) const { return hash_(key); }

inline void Conductor::enter(uint64_t key, uint32_t parked, WaitsFor kind) {
  waiters_.add(key, {index_.parked_blocks_[parked].stamp, parked, kind});
}

inline void Conductor::await(uint64_t key) {
  for (const uint64_t each : {key, behind(key)}) {
    if (waiters_.newest(each) != kNone) work_.push_back(each);
  }
}

// A hash has a meaning now: queues its key if anything waits for it. An engine's own hash may also
// be awaited by publishers of its instance, or of every instance, that announced it by the hash
// alone: such blocks wait in the namespace of that registration.
inline void Conductor::announce(const Source& source, uint64_t space, uint64_t hash,
                                bool by_engine) {
  if (waiters_.empty()) return;
  await(sequences().key(space, hash));
  if (!by_engine) return;
  uint64_t last = space;
  for (const Instance* instance : {source.instance, common_}) {
    if (instance == nullptr) continue;
    for (const Source* each : instance->sources) {
      if (each->home != last && each->home != space) await(sequences().key(each->home, hash));
      last = each->home;
    }
  }
}

inline const Parked* Conductor::parked_of(const Waiter& waiter) const {
  return index_.is_parked(waiter.block, waiter.stamp) ? &index_.parked_blocks_[waiter.block]
                                                      : nullptr;
}

inline bool Conductor::has_entry(uint64_t key, const Parked& parked) const {
  uint32_t at = waiters_.newest(key);
  while (at != kNone && parked_of(waiters_[at]) != &parked) at = waiters_.older(at);
  return at != kNone;
}

// ---- placing

// Tries the waiter at `at_`, and drops it once its block is parked no longer. New ones come before
// it in the list, and know what their key means.
inline void Conductor::try_next() {
  const uint32_t at = std::exchange(at_, waiters_.older(at_));
  try_place(waiters_[at]);
  if (parked_of(waiters_[at]) == nullptr) waiters_.drop(at);
}

inline void Conductor::try_place(const Waiter& waiter) {
  const Parked* parked = parked_of(waiter);
  if (parked == nullptr || owner(parked->rank) == nullptr) return;
  Source* source = owners_[parked->rank];
  if (waiter.kind == WaitsFor::CHILD) {
    try_behind_parent(*source, waiter, *parked);
  } else if (waiter.kind == WaitsFor::CREDIT) {
    try_credit(*source, waiter, *parked);
  }
}

inline void Conductor::try_credit(Source& source, const Waiter& waiter, const Parked& parked) {
  BlockId block = kNone;
  if (!parked.has_content)
    block = meaning(source, parked.rank, parked.hash, parked.space, parked.by_engine);
  if (block == kNone) block = sequences().find(sequences().key(parked.space, parked.sequence));
  if (block == kNone) return;
  const Parked was = parked;
  take_out(waiter);
  if (index_.ranks_[was.rank].names.find(was.name, keys()) == Names::kAbsent) {
    adopt(was.rank, was.name, block, was.layers);
  }
  announce(source, was.space, was.hash, was.by_engine);
}

inline void Conductor::try_behind_parent(Source& source, const Waiter& waiter,
                                         const Parked& parked) {
  BlockId below = meaning(source, parked.rank, parked.parent, parked.space, parked.by_engine);
  uint64_t above = 0;
  if (below == kNone) {
    above = sequences().next(parked.parent, parked.plain) == parked.hash
                ? parked.parent
                : parked_sequence(source, parked.rank, parked.parent, parked.space);
    if (above != 0) below = sequences().find(sequences().key(parked.space, above));
  }
  if (below != kNone) {
    const Parked was = parked;
    take_out(waiter);
    index_.ranks_[was.rank].settling = true;  // a block that has waited is no second copy
    if (sequences().space_of(below) != was.space) ++index_.stats_.parked_unsalted;
    for (LayerId layer = 0; layer < kMaxLayers; ++layer) {
      if ((was.layers >> layer & 1) == 0) continue;
      put(was.rank, {&was.name, &was.local, 1, true, 0, layer, 0, &was.plain, was.space}, below);
    }
    announce(source, was.space, was.hash, was.by_engine);
  } else if (above != 0 && parked.sequence == 0) {
    Parked& known = index_.parked_blocks_[waiter.block];
    known.sequence = sequences().next(above, known.plain);
    const uint64_t key = sequences().key(known.space, known.sequence);
    enter(key, waiter.block, WaitsFor::CREDIT);
    await(key);
    announce(source, known.space, known.hash, known.by_engine);
  }
}

inline bool Conductor::place_by_prompt(BlockId last, const uint64_t* locals, const uint64_t* plain,
                                       size_t from, size_t n, uint64_t space) {
  uint64_t sequence = 0;
  if (last != kNone) {
    sequence = sequences().sequence_of(last);
    if (sequence == 0 || sequences().space_of(last) != space) return false;
  }
  size_t i = from;
  for (; i < n && i - from < kExplainedAtOnce; ++i) {
    sequence = last == kNone ? plain[i] : sequences().next(sequence, plain[i]);
    const uint64_t key = sequences().key(space, sequence);
    if (!place(key, locals[i], plain[i], space, last)) break;
    last = sequences().find(key);
  }
  if (i == from) return false;
  Steps some{kStepsExplained};
  resolve_waiting(some);
  return true;
}

// Places the first block that waits under the key of its sequence hash; the others then follow it,
// as they follow any placed block.
inline bool Conductor::place(uint64_t key, uint64_t local, uint64_t plain, uint64_t space,
                             BlockId below) {
  for (uint32_t at = waiters_.newest(key); at != kNone; at = waiters_.older(at)) {
    const Waiter& waiter = waiters_[at];
    const Parked* parked = parked_of(waiter);
    const Source* source = parked == nullptr ? nullptr : owner(parked->rank);
    if (waiter.kind != WaitsFor::CREDIT || source == nullptr) continue;
    const Parked was = *parked;
    take_out(waiter);
    index_.ranks_[was.rank].settling = true;  // a block that has waited is no second copy
    for (LayerId layer = 0; layer < kMaxLayers; ++layer) {
      if ((was.layers >> layer & 1) == 0) continue;
      put(was.rank, {&was.name, &local, 1, true, 0, layer, 0, &plain, space}, below);
    }
    announce(*source, was.space, was.hash, was.by_engine);
    return true;
  }
  return false;
}

inline void Conductor::take_out(const Waiter& waiter) {
  index_.forget_parked(waiter.block);
  ++index_.stats_.unparked;
}

// Drops stale entries while they are the most of `waiters_`, and all once nothing waits; frees
// spare memory. The sweep calls this, too.
inline void Conductor::prune(Steps& steps) {
  const size_t most = index_.parked_ == 0 ? 0 : kWaitersABlock * index_.parked_ + 256;
  for (; waiters_.size() > most && steps.left(); steps.take(1)) {
    prune_at_ = prune_at_ + 1 < waiters_.end() ? prune_at_ + 1 : 0;
    const Waiter& waiter = waiters_[prune_at_];
    if (waiter.stamp != 0 && parked_of(waiter) == nullptr) waiters_.drop(prune_at_);
  }
  while (steps.left() && waiters_.shrink()) steps.take(Index::kStepsASegment);
}

}  // namespace kvd
