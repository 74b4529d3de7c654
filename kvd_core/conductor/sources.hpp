// The registrations of a conductor, their holders, and the ranks that these count as.
//
//   add_source ─> source "a" ── holder ─> rank 5 of the index     owners_[5] = the source
//
//   link, instance "a" to worker 7          rank 5 of the index counts as
//     holder with rank 0                      rank 0 of worker 7, made if there is none
//     holder without a rank                   each rank of worker 7
//   no worker of that id                      nothing: only queries of the conductor count it
//
//   instance "*" has no row and no worker     every worker's rank, with a rank or without
//
// Invariants
//   1. `owners_[id]` is the source whose holder has the id, null for all other ranks;
//   2. an instance's `rows` and `shared` are made anew when a source or holder comes, goes or gets
//      another id; the aliases of its holders, with every new holder and link; those without a
//      rank also count as each rank that the worker gets in between (`Index::join_aliases`);
//   3. a rank that an instance's worker has only for the instance's holders is in the `rows`.
//
// Costs: O(holders of the instance), times the worker's ranks for those without a rank; finding an
// existing holder O(log holders of the source). `Index::sweep` frees the blocks of a removed
// source. Ending a rank that the worker had for holders alone: O(ranks of the index).
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "conductor/conductor.hpp"

namespace kvd {

inline Source* Conductor::add_source(const std::string& key, uint64_t home, uint64_t adapter,
                                     uint32_t dp_rank, bool store) {
  if (guard_ == kNone) prepare();
  Instance* instance = find(key);
  if (instance == nullptr) {
    instances_.push_back(std::make_unique<Instance>());
    instance = instances_.back().get();
    instance->key = key;
    by_key_[key] = instance;
    if (key == kCommonKey) common_ = instance;
  }
  sources_.push_back(std::make_unique<Source>(
      Source{instance, 0, 0, instance->asked, home, adapter, dp_rank, store, {}}));
  instance->sources.push_back(sources_.back().get());
  list_rows(*instance);
  return sources_.back().get();
}

inline void Conductor::remove_source(Source* source) {
  for (const Holder& holder : source->holders) {
    owners_[holder.id] = nullptr;
    index_.retire_rank(holder.id);
  }
  Instance* instance = source->instance;
  drop(instance->sources, source);
  list_rows(*instance);
  give_back(*instance);
  if (instance->sources.empty()) {
    link(instance, nullptr);
    by_key_.erase(instance->key);
    if (instance == common_) common_ = nullptr;
    drop_owned(instances_, instance);
  }
  drop_owned(sources_, source);
}

inline void Conductor::link(Instance* instance, Worker* worker) {
  if (instance->worker != nullptr) instance->worker->shared = false;
  if (instance->worker != nullptr && instance->worker != worker) {
    instance->rows.clear();
    give_back(*instance);
    list_rows(*instance);
  }
  instance->worker = worker;
  if (worker != nullptr) {
    worker->shared = true;
    for (const Source* source : instance->sources) worker->alias_rank(index_, source->dp_rank);
  }
  show(*instance);
}

// Ends the ranks that the instance's worker has only for its holders, except those with a row.
inline void Conductor::give_back(const Instance& instance) {
  if (instance.worker == nullptr) return;
  std::vector<uint32_t> ended;
  for (const auto& [dp_rank, id] : instance.worker->ranks) {
    if (index_.rank(id).alias_only && !has_row(instance, dp_rank)) ended.push_back(dp_rank);
  }
  for (const uint32_t dp_rank : ended) instance.worker->retire(index_, dp_rank);
}

inline bool Conductor::has_row(const Instance& instance, uint32_t dp_rank) {
  return std::binary_search(instance.rows.begin(), instance.rows.end(),
                            Instance::InstanceRank{dp_rank, {}},
                            [](const Instance::InstanceRank& a, const Instance::InstanceRank& b) {
                              return a.dp_rank < b.dp_rank;
                            });
}

inline RankId Conductor::holder(Source* source, uint32_t backend, bool ranked, uint32_t dp_rank) {
  const Holder wanted{backend, ranked, ranked ? dp_rank : 0, kNone};
  std::vector<Holder>& holders = source->holders;
  const auto at = std::lower_bound(holders.begin(), holders.end(), wanted, before);
  if (at != holders.end() && at->order() == wanted.order()) return at->id;
  if (holders.size() == kMaxHolders) {
    drop_idle(source);
    return holders.size() == kMaxHolders ? kNone : holder(source, backend, ranked, dp_rank);
  }
  const RankId id = index_.add_rank(wanted.dp_rank);
  Rank& rank = index_.ranks_[id];
  rank.settling = rank.offloads = rank.salted = rank.hidden = rank.published = true;
  const auto made = holders.insert(at, wanted);
  made->id = id;
  own(id, source);
  show(*source->instance);
  list_rows(*source->instance);
  return id;
}

inline void Conductor::drop_idle(Source* source) {
  const auto is_idle = [&](const Holder& holder) { return index_.lies_within(holder.id, 0); };
  std::vector<Holder>& holders = source->holders;
  const auto idle = std::stable_partition(holders.begin(), holders.end(),
                                          [&](const Holder& holder) { return !is_idle(holder); });
  for (auto it = idle; it != holders.end(); ++it) {
    owners_[it->id] = nullptr;
    index_.retire_rank(it->id);
  }
  holders.erase(idle, holders.end());
  list_rows(*source->instance);
  give_back(*source->instance);
}

inline LayerId Conductor::medium(const std::string& name, const std::string& key) {
  if (name == "DP") return kNone;  // every row has another member of that name
  static const char* const kTiers[] = {"GPU", "CPU", "DISK", "EXTERNAL"};
  for (LayerId tier = 0; tier < kTierLayers; ++tier) {
    if (name == kTiers[tier]) return tier;
  }
  const auto at = std::find_if(media_.begin(), media_.end(),
                               [&](const Medium& each) { return each.name == name; });
  const uint32_t number = kFirstMedium + static_cast<uint32_t>(at - media_.begin());
  const LayerId layer = index_.group_layer(number, 0);
  if (layer != kNone && at == media_.end()) media_.push_back({name, key});
  return layer;
}

// Prepares the first source. Makes the sequence hashes of a small index at once.
inline void Conductor::prepare() {
  sequence(kSequencedAtOnce);
  index_.max_parked_ = kMaxWaiting;
  guard_ = index_.add_rank(0);
  index_.set_alias(guard_, kNone);
}

inline bool Conductor::before(const Holder& a, const Holder& b) { return a.order() < b.order(); }

template <class T>
inline void Conductor::drop(std::vector<T*>& list, const T* item) {
  list.erase(std::find(list.begin(), list.end(), item));
}

template <class T>
inline void Conductor::drop_owned(std::vector<std::unique_ptr<T>>& list, const T* item) {
  list.erase(
      std::find_if(list.begin(), list.end(), [&](const auto& each) { return each.get() == item; }));
}

inline void Conductor::own(RankId id, Source* source) {
  if (owners_.size() <= id) owners_.resize(id + 1, nullptr);
  owners_[id] = source;
}

// Makes the instance's holders count as ranks of its worker: without a rank, as each of them.
inline void Conductor::show(const Instance& instance) {
  std::vector<std::pair<uint32_t, RankId>> ranks;
  for (const bool ranked : {true, false}) {
    if (!ranked && instance.worker != nullptr) ranks = instance.worker->ranks;
    for (const Source* source : instance.sources) {
      for (const Holder& holder : source->holders) {
        if (holder.ranked == ranked) show(instance, holder, ranks);
      }
    }
  }
  // Ranks that only publishers have named: their events say which blocks are salted.
  for (const auto& rank : ranks) {
    if (!index_.rank(rank.second).listed) index_.rank(rank.second).salted = true;
  }
}

inline void Conductor::show(const Instance& instance, const Holder& holder,
                            const std::vector<std::pair<uint32_t, RankId>>& ranks) {
  if (&instance == common_) {
    index_.set_alias(holder.id, kAll);
  } else if (instance.worker == nullptr) {
    index_.set_alias(holder.id, kNone);
  } else if (holder.ranked) {
    index_.set_alias(holder.id, instance.worker->alias_rank(index_, holder.dp_rank));
  } else {
    std::vector<RankId> ids;
    for (const auto& rank : ranks) ids.push_back(rank.second);
    index_.set_aliases(holder.id, std::move(ids));
  }
}

inline Instance::InstanceRank& Conductor::row(Instance& instance, uint32_t dp_rank) {
  auto& rows = instance.rows;
  const auto at =
      std::lower_bound(rows.begin(), rows.end(), dp_rank,
                       [](const Instance::InstanceRank& a, uint32_t b) { return a.dp_rank < b; });
  if (at != rows.end() && at->dp_rank == dp_rank) return *at;
  return *rows.insert(at, {dp_rank, {}});
}

inline void Conductor::list_rows(Instance& instance) {
  instance.rows.clear();
  instance.shared.clear();
  for (const Source* source : instance.sources) {
    row(instance, source->dp_rank);
    for (const Holder& holder : source->holders) {
      if (holder.ranked) {
        row(instance, holder.dp_rank).ids.push_back(holder.id);
      } else {
        instance.shared.push_back(holder.id);
      }
    }
  }
}

}  // namespace kvd
