// A worker and its data-parallel ranks, as one partition knows them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "index/index.hpp"

namespace kvd {

// Ranks one worker may have. Engines run at most some hundred data-parallel ranks; the bound
// keeps a mad publisher from making one index entry per random number.
constexpr size_t kMaxRanksPerWorker = 4096;

struct Worker {
  std::string key;     // the worker's id as a JSON member name, quotes included
  std::string number;  // the worker's id as a JSON value
  std::vector<std::pair<uint32_t, RankId>> ranks;  // ascending by dp rank
  bool shared = false;  // a conductor's instance has the same id; answers show it

  RankId find(uint32_t dp_rank) const {
    const auto it = at(dp_rank);
    return it != ranks.end() && it->first == dp_rank ? it->second : kNone;
  }

  // The rank, made when it is new; kNone when the worker has too many. From then on the rank is the
  // worker's own.
  RankId rank(Index& index, uint32_t dp_rank) {
    const RankId id = alias_rank(index, dp_rank);
    if (id != kNone) index.rank(id).alias_only = false;
    return id;
  }

  // The rank for a conductor's rank to count as (`Index::set_alias`), made when it is new. A new
  // one exists for that alone, until `rank` asks for it.
  RankId alias_rank(Index& index, uint32_t dp_rank) {
    const RankId known = find(dp_rank);
    if (known != kNone || ranks.size() == kMaxRanksPerWorker) return known;
    const RankId id = index.add_rank(dp_rank);
    if (!ranks.empty()) index.join_aliases(id, ranks.front().second);
    ranks.insert(at(dp_rank), {dp_rank, id});
    index.rank(id).alias_only = true;
    index.chronicle_rank(id);
    return id;
  }

  // Removes a rank, and the ranks that only its stream has named: nobody speaks for them any more.
  void retire(Index& index, uint32_t dp_rank) {
    const auto goes = [&](const std::pair<uint32_t, RankId>& entry) {
      const RankTraits& rank = index.rank(entry.second);
      if (entry.first != dp_rank && (rank.listed || rank.heard_from != dp_rank)) return false;
      index.retire_rank(entry.second);
      return true;
    };
    ranks.erase(std::remove_if(ranks.begin(), ranks.end(), goes), ranks.end());
  }

  // Gives the rank, if there is one, a fresh start without blocks and traits. The old blocks are
  // invisible at once, whatever their number, and `Index::sweep` frees them.
  void renew(Index& index, uint32_t dp_rank) {
    const RankId old = find(dp_rank);
    if (old == kNone) return;
    index.note_emptied(old, (1u << kTierLayers) - 1, Change::kRestarted);
    const RankId id = set(dp_rank, index.renew_rank(old));
    RankTraits fresh;
    fresh.dp_rank = dp_rank;
    fresh.listed = index.rank(id).listed;
    fresh.owner = index.rank(id).owner;
    fresh.noted = index.rank(id).noted;
    static_cast<RankTraits&>(index.rank(id)) = fresh;
  }

  // Drops what a rank holds on the layers of `mask`; returns the rank's id from now on.
  RankId clear(Index& index, uint32_t dp_rank, LayerMask mask) {
    return set(dp_rank, index.clear(find(dp_rank), mask));
  }

  void retire_all(Index& index) {
    for (const auto& entry : ranks) index.retire_rank(entry.second);
    ranks.clear();
  }

 private:
  RankId set(uint32_t dp_rank, RankId id) {
    ranks[static_cast<size_t>(at(dp_rank) - ranks.begin())].second = id;
    return id;
  }

  std::vector<std::pair<uint32_t, RankId>>::const_iterator at(uint32_t dp_rank) const {
    return std::lower_bound(ranks.begin(), ranks.end(), std::make_pair(dp_rank, RankId{0}));
  }
};

}  // namespace kvd
