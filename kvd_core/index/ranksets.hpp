// Interned sets of ranks: equal sets are one object, so a run of blocks stores a 4-byte id.
//
//   id 0  {}            the empty set, never freed
//   id 7  {2}           refs 1
//   id 9  {2, 5, 811}   refs 3    three runs somewhere in the tree have exactly these holders
//
// A thousand ranks that share a system prompt cost one set of a thousand entries, however long the
// prompt. The table finds a set's neighbour (one rank more or less) by an order-independent hash,
// the xor of its members' hashes, and compares member by member, so equality is exact.
//
// Invariants
//   1. members are strictly ascending; no two live sets are equal;
//   2. refs = number of runs that name the set; `unref` frees a set that no run names any more;
//   3. hash = xor of the members' keyed hashes.
//
// Costs: with/without O(size), contains O(log size), ref/unref O(1).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/arena.hpp"
#include "base/keyed.hpp"

namespace kvd {

using RankId = uint32_t;
using SetId = uint32_t;

class RankSets {
 public:
  static constexpr SetId kEmptySet = 0;

  RankSets() : sets_(1) { sets_.take(); }

  const std::vector<RankId>& members(SetId id) const { return sets_[id].ranks; }

  bool contains(SetId id, RankId rank) const {
    const auto& ranks = sets_[id].ranks;
    if (ranks.size() == 1) return ranks[0] == rank;
    return std::binary_search(ranks.begin(), ranks.end(), rank);
  }

  // The set plus `rank`, which must not be in it. The caller refs the result.
  SetId with(SetId id, RankId rank) {
    return intern(sets_[id].hash ^ hash_(rank), [&](std::vector<RankId>& out) {
      const auto& ranks = sets_[id].ranks;
      const auto at = std::lower_bound(ranks.begin(), ranks.end(), rank);
      out.assign(ranks.begin(), at);
      out.push_back(rank);
      out.insert(out.end(), at, ranks.end());
    });
  }

  // The set less `rank`, which must be in it. The caller refs the result.
  SetId without(SetId id, RankId rank) {
    if (sets_[id].ranks.size() == 1) return kEmptySet;
    return intern(sets_[id].hash ^ hash_(rank), [&](std::vector<RankId>& out) {
      out.clear();
      for (const RankId member : sets_[id].ranks) {
        if (member != rank) out.push_back(member);
      }
    });
  }

  void ref(SetId id) {
    if (id != kEmptySet) ++sets_[id].refs;
  }

  void unref(SetId id) {
    if (id == kEmptySet || --sets_[id].refs != 0) return;
    const uint32_t at = table_.index_of(sets_[id].hash, id);
    table_.erase(at, *this);
    members_ -= sets_[id].ranks.size();
    std::vector<RankId>().swap(sets_[id].ranks);
    sets_.give(id);
    table_.shrink(*this);
  }

  bool shrink() { return sets_.shrink(); }

  bool is_spread() const { return table_.is_spread(*this); }
  uint64_t hash_of(SetId id) const { return sets_[id].hash; }
  uint32_t refs(SetId id) const { return sets_[id].refs; }
  uint32_t count() const { return sets_.live() - 1; }  // the empty set is not counted
  uint32_t end() const { return sets_.end(); }
  size_t bytes() const { return sets_.bytes() + table_.bytes() + members_ * sizeof(RankId); }

 private:
  struct Set {
    std::vector<RankId> ranks;
    uint64_t hash = 0;
    uint32_t refs = 0;

    uint32_t& free_link() { return refs; }
  };

  template <class Fill>
  SetId intern(uint64_t hash, Fill&& fill) {
    fill(scratch_);
    const uint32_t at = table_.find(
        hash, [&](uint32_t v) { return sets_[v].hash == hash && sets_[v].ranks == scratch_; });
    if (at != ProbeTable::kEmpty) return table_.at(at);
    const SetId id = sets_.take();
    sets_[id].ranks = scratch_;
    sets_[id].hash = hash;
    sets_[id].refs = 0;
    members_ += scratch_.size();
    table_.insert(hash, id, *this);
    return id;
  }

  Arena<Set> sets_;
  ProbeTable table_;
  KeyedHash hash_;  // of a rank
  std::vector<RankId> scratch_;
  size_t members_ = 0;
};

}  // namespace kvd
