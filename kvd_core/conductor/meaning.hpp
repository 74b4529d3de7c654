// Which block an announced hash means.
//
//   announced hash ── own names ── the source's ── the instance's ── all others', if they agree
//                  └─ else: the sequence hash itself, if the tree has a block of it
//                  └─ else: parked under its name (conductor/waiting.hpp)
//
// A hash means a block of its own namespace only. A holder's names table has the hash as it is in
// the namespace of the registration, and mixed with the namespace in any other:
//
//   home 0       hash 501 in 0  ─> name 501      in 7 ─> name 501 ^ mix64(7 ^ 0)
//   an engine's  hash 501       ─> name 501      in any: its names mean the same in all
//
// Except for an engine's own events, a name counts as the hash only if its block is of the
// namespace: a mixed name may happen to equal another hash.
//
// Costs: one or two names probes for each holder of the instance; one or two for each rank of the
// index if no holder of the instance knows the hash. Nothing changes except `tables_asked_`, which
// counts these ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "conductor/conductor.hpp"

namespace kvd {

inline uint64_t Conductor::name_of(const Source& source, uint64_t hash, uint64_t space,
                                   bool by_engine) {
  return by_engine || space == source.home ? hash : hash ^ mix64(space ^ source.home);
}

inline bool Conductor::knows(const Rank& rank, uint64_t name) const {
  return rank.names.find(name, keys()) != Names::kAbsent ||
         (rank.parked() != 0 && rank.rare->parked.find(name, index_.parked_blocks_) != kNone);
}

inline bool Conductor::has(const Rank& rank, uint64_t name, LayerId layer) const {
  const uint32_t slot = rank.names.find(name, keys());
  if (slot != Names::kAbsent) return (keys().layers(rank.names.value(slot)) >> layer & 1) != 0;
  if (rank.parked() == 0) return false;
  const uint32_t at = rank.rare->parked.find(name, index_.parked_blocks_);
  return at != kNone && (index_.parked_blocks_[at].layers >> layer & 1) != 0;
}

// The slot of what a rank calls `hash`. With `any_space`, an engine's own, in whatever namespace.
inline uint32_t Conductor::slot_in(uint64_t home, RankId id, uint64_t hash, uint64_t space,
                                   bool any_space) const {
  const Names& names = index_.ranks_[id].names;
  const auto fits = [&](uint32_t slot) {
    return slot != Names::kAbsent &&
           (any_space || sequences().space_of(keys().block(names.value(slot))) == space);
  };
  const uint32_t as_named = names.find(hash, keys());
  if (fits(as_named)) return as_named;
  if (space == home) return Names::kAbsent;
  const uint32_t mixed = names.find(hash ^ mix64(space ^ home), keys());
  return fits(mixed) ? mixed : Names::kAbsent;
}

inline BlockId Conductor::block_in(uint64_t home, RankId id, uint64_t hash, uint64_t space,
                                   bool any_space) const {
  const uint32_t slot = slot_in(home, id, hash, space, any_space);
  return slot == Names::kAbsent ? kNone : keys().block(index_.ranks_[id].names.value(slot));
}

// The block that `hash` means to a holder: by its own names, its source's, its instance's, or those
// of all others where they agree.
inline BlockId Conductor::meaning(const Source& source, RankId id, uint64_t hash, uint64_t space,
                                  bool any_space) const {
  const BlockId found = nearer(source, id, hash, space, any_space);
  return found != kNone ? found : elsewhere(*source.instance, hash, space, any_space);
}

// The same, but a block of that sequence hash, which is found sooner, precedes the others' names.
inline BlockId Conductor::meaning_or_standard(const Source& source, RankId id, uint64_t hash,
                                              uint64_t space, bool any_space) const {
  BlockId found = nearer(source, id, hash, space, any_space);
  if (found == kNone) found = sequences().find(sequences().key(space, hash));
  return found != kNone ? found : elsewhere(*source.instance, hash, space, any_space);
}

inline BlockId Conductor::nearer(const Source& source, RankId id, uint64_t hash, uint64_t space,
                                 bool any_space) const {
  BlockId found = block_in(source.home, id, hash, space, any_space);
  if (found != kNone) return found;
  found = among(source, id, hash, space, any_space);
  for (const Source* other : source.instance->sources) {
    if (found != kNone) return found;
    if (other != &source) found = among(*other, id, hash, space, any_space);
  }
  return found;
}

inline BlockId Conductor::among(const Source& source, RankId asks, uint64_t hash, uint64_t space,
                                bool any_space) const {
  for (const Holder& holder : source.holders) {
    if (holder.id == asks) continue;
    const BlockId found = block_in(source.home, holder.id, hash, space, any_space);
    if (found != kNone) return found;
  }
  return kNone;
}

// Returns the number of tables searched since its last call; each takes a step.
inline size_t Conductor::tables_asked() { return std::exchange(tables_asked_, 0); }

// The block that `hash` means to all other instances, where they agree. A store that serves every
// instance has its engines among them, so their names mean the same in any namespace; for any other
// instance, the engines of others do not name its blocks.
inline BlockId Conductor::elsewhere(const Instance& instance, uint64_t hash, uint64_t space,
                                    bool any_space) const {
  BlockId found = kNone;
  const bool in_any = any_space && &instance == common_;
  tables_asked_ += index_.rank_end();
  for (RankId id = 0; id < index_.rank_end(); ++id) {
    if (!index_.ranks_[id].live || index_.ranks_[id].names.size() == 0) continue;
    const Source* source = owner(id);
    if (source != nullptr && source->instance == &instance) continue;
    const BlockId here = block_in(source == nullptr ? 0 : source->home, id, hash, space, in_any);
    if (here == kNone || here == found) continue;
    if (found != kNone) return kNone;
    found = here;
  }
  return found;
}

// The sequence hash of a parent that no name leads to, 0 unknown: the hash itself where the event
// follows the standard, else that of a parked block.
inline uint64_t Conductor::standard_parent(const Source& source, RankId id, const StoredBlocks& e,
                                           uint64_t space) const {
  if (sequences().next(e.parent, plain_[0]) == e.hashes[0]) return e.parent;
  return parked_sequence(source, id, e.parent, space);
}

// The sequence hash of parked blocks called `hash`: of its own instance, else what all others agree
// on.
inline uint64_t Conductor::parked_sequence(const Source& source, RankId id, uint64_t hash,
                                           uint64_t space) const {
  uint64_t found = 0;
  bool clear = true;
  const uint64_t key = sequences().key(space, hash);
  for (uint32_t at = waiters_.newest(key); at != kNone; at = waiters_.older(at)) {
    const Parked* parked = parked_of(waiters_[at]);
    if (parked == nullptr || parked->hash != hash || parked->sequence == 0) continue;
    if (parked->rank == id) return parked->sequence;
    const Source* other = owner(parked->rank);
    if (other != nullptr && other->instance == source.instance) return parked->sequence;
    clear = clear && (found == 0 || found == parked->sequence);
    found = parked->sequence;
  }
  return clear ? found : 0;
}

}  // namespace kvd
