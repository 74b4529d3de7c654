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
//   resolve_waiting  ── collect_waiting    the blocks that wait for a key ─> waiting_
//                    └─ try_place          each of these: try_credit, try_behind_parent ─> announce
//
// Waiting blocks are in the tables of index/parked.hpp, by holder and name; `waiters_` finds them
// by what they wait for.
//
// Invariants: 1 of conductor/conductor.hpp, which `verify` checks; children wait under
// `behind(key)`, all others under the key itself.
//
// Costs: one look-up a key while anything waits; for an engine's own hash, one more for each other
// namespace that its instance is registered in; to place a block, what the index takes to store it.
// `resolve_waiting` goes in slices, kStepsAWaiter for each block tried. A waiting block takes 300
// bytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <utility>
#include <vector>

#include "conductor/conductor.hpp"

namespace kvd {

template <class Visit>
inline void Conductor::each_credit(uint64_t key, Visit&& visit) const {
  const auto range = waiters_.equal_range(key);
  for (auto it = range.first; it != range.second; ++it) {
    if (it->second.kind != WaitsFor::CREDIT) continue;
    if (const Parked* parked = parked_of(it->second)) visit(it->second.rank, parked->layers);
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
  require(is_spread(waiters_), "conductor: keys of what waits are spread over the buckets");
  for (RankId id = 0; id < index_.rank_end(); ++id) {
    const Rank& rank = index_.rank(id);
    if (!rank.live || id >= owners_.size() || owners_[id] == nullptr) continue;
    if (rank.rare == nullptr) continue;
    for (const auto& [name, p] : rank.rare->parked) {
      const uint64_t key = sequences().key(p.space, p.has_content ? p.parent : p.hash);
      require(has_entry(id, name, p.has_content ? behind(key) : key),
              "conductor 1: what is parked waits for something");
    }
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
  Parked* before = parked_at(id, name);
  const bool had_content = before != nullptr && before->has_content;
  if (sequence == 0 && before != nullptr && before->certain) sequence = before->sequence;
  index_.park(id, name, one.layer, &one);
  Parked* parked = parked_at(id, name);
  if (parked == nullptr || had_content) return;
  parked->stamp = ++index_.stamp_;  // outdates the entries made while it had no content
  index_.order_.push({name, parked->stamp, id});
  parked->hash = hash;
  parked->by_engine = by_engine;
  parked->sequence = sequence;
  const uint64_t stamp = parked->stamp, space = one.space;
  enter(behind(sequences().key(space, one.parent)), {id, name, stamp, WaitsFor::CHILD});
  enter(sequences().key(space, hash), {id, name, stamp, WaitsFor::ALIAS});
  if (sequence != 0) {
    enter(sequences().key(space, sequence), {id, name, stamp, WaitsFor::CREDIT});
    announce(source, space, hash, by_engine);
  }
}

// A name that has been placed takes over the layers of the block that was parked under it.
inline void Conductor::take_over_parked(RankId id, uint64_t name) {
  if (index_.ranks_[id].parked() == 0) return;
  const auto it = index_.ranks_[id].rare->parked.find(name);
  if (it == index_.ranks_[id].rare->parked.end()) return;
  const LayerMask layers = it->second.layers;
  index_.forget_parked(id, it);
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

inline void Conductor::enter(uint64_t key, const Waiter& waiter) {
  waiters_.emplace(key, waiter);
  if (waiters_.size() != kGrowsTo) return;
  waiters_.max_load_factor(kWaitersABlock);
  waiters_.reserve(kWaitersABlock * kMaxWaiting);
}

inline void Conductor::await(uint64_t key) {
  for (const uint64_t each : {key, behind(key)}) {
    if (waiters_.find(each) != waiters_.end()) work_.push_back(each);
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

inline Parked* Conductor::parked_at(RankId id, uint64_t name) const {
  const Rank& rank = index_.ranks_[id];
  if (!rank.live || rank.parked() == 0) return nullptr;
  const auto it = rank.rare->parked.find(name);
  return it == rank.rare->parked.end() ? nullptr : &it->second;
}

inline const Parked* Conductor::parked_of(const Waiter& waiter) const {
  const Parked* parked = parked_at(waiter.rank, waiter.name);
  return parked != nullptr && parked->stamp == waiter.stamp ? parked : nullptr;
}

inline bool Conductor::has_entry(RankId id, uint64_t name, uint64_t key) const {
  const auto range = waiters_.equal_range(key);
  return std::any_of(range.first, range.second, [&](const auto& entry) {
    return entry.second.rank == id && entry.second.name == name &&
           parked_of(entry.second) != nullptr;
  });
}

// ---- placing

// Lists the blocks that wait for a key in `waiting_`: they may have a place now.
inline void Conductor::collect_waiting(uint64_t key) {
  waiting_.clear();
  tried_ = 0;
  const auto range = waiters_.equal_range(key);
  for (auto it = range.first; it != range.second; ++it) {
    if (parked_of(it->second) != nullptr) waiting_.push_back(it->second);
  }
  // Erased all at once: erasing one of many equal keys walks over those before it.
  waiters_.erase(range.first, range.second);
  for (const Waiter& each : waiting_) enter(key, each);
}

inline void Conductor::try_place(const Waiter& waiter) {
  const Parked* parked = parked_of(waiter);
  Source* source = waiter.rank < owners_.size() ? owners_[waiter.rank] : nullptr;
  if (parked == nullptr || source == nullptr) return;
  if (waiter.kind == WaitsFor::CHILD) {
    try_behind_parent(*source, waiter, *parked);
  } else if (waiter.kind == WaitsFor::CREDIT) {
    try_credit(*source, waiter, *parked);
  }
}

inline void Conductor::try_credit(Source& source, const Waiter& waiter, const Parked& parked) {
  BlockId block = kNone;
  if (!parked.has_content)
    block = meaning(source, waiter.rank, parked.hash, parked.space, parked.by_engine);
  if (block == kNone) block = sequences().find(sequences().key(parked.space, parked.sequence));
  if (block == kNone) return;
  const Parked was = parked;
  take_out(waiter);
  if (index_.ranks_[waiter.rank].names.find(waiter.name, keys()) == Names::kAbsent) {
    adopt(waiter.rank, waiter.name, block, was.layers);
  }
  announce(source, was.space, was.hash, was.by_engine);
}

inline void Conductor::try_behind_parent(Source& source, const Waiter& waiter,
                                         const Parked& parked) {
  BlockId below = meaning(source, waiter.rank, parked.parent, parked.space, parked.by_engine);
  uint64_t above = 0;
  if (below == kNone) {
    above = sequences().next(parked.parent, parked.plain) == parked.hash
                ? parked.parent
                : parked_sequence(source, waiter.rank, parked.parent, parked.space);
    if (above != 0) below = sequences().find(sequences().key(parked.space, above));
  }
  if (below != kNone) {
    const Parked was = parked;
    take_out(waiter);
    index_.ranks_[waiter.rank].settling = true;  // a block that has waited is no second copy
    if (sequences().space_of(below) != was.space) ++index_.stats_.parked_unsalted;
    for (LayerId layer = 0; layer < kMaxLayers; ++layer) {
      if ((was.layers >> layer & 1) == 0) continue;
      put(waiter.rank, {&waiter.name, &was.local, 1, true, 0, layer, 0, &was.plain, was.space},
          below);
    }
    announce(source, was.space, was.hash, was.by_engine);
  } else if (above != 0 && parked.sequence == 0) {
    Parked* known = parked_at(waiter.rank, waiter.name);
    known->sequence = sequences().next(above, known->plain);
    const uint64_t space = known->space, own = known->hash;
    const bool by_engine = known->by_engine;
    enter(sequences().key(space, known->sequence),
          {waiter.rank, waiter.name, waiter.stamp, WaitsFor::CREDIT});
    await(sequences().key(space, known->sequence));
    announce(source, space, own, by_engine);
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
  const auto range = waiters_.equal_range(key);
  for (auto it = range.first; it != range.second; ++it) {
    const Waiter waiter = it->second;
    const Parked* parked = parked_of(waiter);
    const Source* source = owner(waiter.rank);
    if (waiter.kind != WaitsFor::CREDIT || parked == nullptr || source == nullptr) continue;
    const Parked was = *parked;
    take_out(waiter);
    index_.ranks_[waiter.rank].settling = true;  // a block that has waited is no second copy
    for (LayerId layer = 0; layer < kMaxLayers; ++layer) {
      if ((was.layers >> layer & 1) == 0) continue;
      put(waiter.rank, {&waiter.name, &local, 1, true, 0, layer, 0, &plain, space}, below);
    }
    announce(*source, was.space, was.hash, was.by_engine);
    return true;
  }
  return false;
}

inline void Conductor::take_out(const Waiter& waiter) {
  index_.forget_parked(waiter.rank, index_.ranks_[waiter.rank].rare->parked.find(waiter.name));
  ++index_.stats_.unparked;
}

// Drops stale entries while they are the most of `waiters_`; the sweep calls this, too.
inline void Conductor::prune(Steps& steps) {
  for (; waiters_.size() > kWaitersABlock * index_.parked_ + 256 && steps.left();
       steps.take(1 + stale_.size())) {
    prune_at_ = prune_at_ + 1 < waiters_.bucket_count() ? prune_at_ + 1 : 0;
    stale_.clear();
    for (auto it = waiters_.begin(prune_at_); it != waiters_.end(prune_at_); ++it) {
      if (parked_of(it->second) == nullptr) stale_.push_back(it->first);
    }
    for (const uint64_t key : stale_) drop_stale(key);
  }
}

inline void Conductor::drop_stale(uint64_t key) {
  const auto range = waiters_.equal_range(key);
  for (auto it = range.first; it != range.second;) {
    it = parked_of(it->second) == nullptr ? waiters_.erase(it) : std::next(it);
  }
}

}  // namespace kvd
