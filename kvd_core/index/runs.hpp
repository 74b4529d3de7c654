// Who holds the blocks of a chain: for each layer a list of runs that covers the chain from its
// start. Nobody holds what lies behind the last run of a layer.
//
//   [a b c d e]   DEVICE ──── {1,2,7} ──│── {2} ──│     ends 3, 5
//                 HOST   ── {} ──│── {2} ──│            ends 1, 3
//
// Invariants
//   1. runs are ordered by (layer, end), and no end exceeds the chain's length;
//   2. neighbours of one layer have different sets, and its last set is not empty;
//   3. each run holds one reference to its set.
//
// Costs: O(runs of the list) each; a set is changed in the time that RankSets says.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/arena.hpp"
#include "index/ranksets.hpp"

namespace kvd {

using LayerId = uint32_t;
using LayerMask = uint32_t;  // bit l: layer l

struct Run {
  uint32_t end;  // offset behind the run's last block
  SetId set;
  LayerId layer;
};

using Runs = std::vector<Run>;  // of one chain, ordered by (layer, end)

inline bool starts_layer(const Runs& runs, size_t i) {
  return i == 0 || runs[i - 1].layer != runs[i].layer;
}

// The offset of a run's first block.
inline uint32_t start_of(const Runs& runs, size_t i) {
  return starts_layer(runs, i) ? 0 : runs[i - 1].end;
}

// The runs of all chains of a tree, which share their sets of ranks.
class RunLists {
 public:
  RankSets& sets() { return sets_; }
  const RankSets& sets() const { return sets_; }

  static SetId set_at(const Runs& runs, LayerId layer, uint32_t offset) {
    for (const Run& run : runs) {
      if (run.layer == layer && run.end > offset) return run.set;
    }
    return RankSets::kEmptySet;
  }

  // The number of blocks up to the last one that a rank holds.
  static uint32_t held_length(const Runs& runs) {
    uint32_t keep = 0;
    for (const Run& run : runs) keep = run.end > keep ? run.end : keep;
    return keep;
  }

  // Adds `rank` to the holders of blocks [from, to) of a chain. For a block that it already holds,
  // calls `already(offset)` instead. Returns the number of blocks gained.
  template <class Already>
  uint32_t hold(Runs& runs, LayerId layer, uint32_t from, uint32_t to, RankId rank,
                Already&& already) {
    uint32_t gained = 0;
    edit(runs, layer, from, to, [&](SetId set, uint32_t a, uint32_t b) {
      if (sets_.contains(set, rank)) {
        for (uint32_t offset = a; offset < b; ++offset) already(offset);
        return set;
      }
      gained += b - a;
      return sets_.with(set, rank);
    });
    return gained;
  }

  // Takes `rank` out of the holders of blocks [from, to), all of which it holds.
  void release(Runs& runs, LayerId layer, uint32_t from, uint32_t to, RankId rank) {
    edit(runs, layer, from, to,
         [&](SetId set, uint32_t, uint32_t) { return sets_.without(set, rank); });
  }

  // Takes `rank` out of the holders of a whole chain on the layers of `mask`; it need not hold all
  // of it. Calls lost(layer, blocks, members of the set) for each run.
  //
  //   [a b c d e]  without rank 7
  //   DEVICE  {1,7} to 2, {7} to 4, {1} to 5   =>   {1} to 2, {} to 4, {1} to 5
  //   HOST    {7} to 3                         =>   none: {} at the end is dropped
  template <class Lost>
  void release_all(Runs& runs, LayerMask mask, RankId rank, Lost&& lost) {
    const auto holds = [&](const Run& run) {
      return (mask >> run.layer & 1) != 0 && sets_.contains(run.set, rank);
    };
    if (std::none_of(runs.begin(), runs.end(), holds)) return;
    edited_.clear();
    for (size_t i = 0; i < runs.size(); ++i) {
      const Run& run = runs[i];
      if (starts_layer(runs, i)) drop_empty_end(edited_);
      if (holds(run)) {
        lost(run.layer, run.end - start_of(runs, i), sets_.members(run.set).size());
        put(run.end, sets_.without(run.set, rank), run.layer);
      } else {
        put(run.end, run.set, run.layer);
      }
    }
    drop_empty_end(edited_);
    replace(runs, 0, runs.size());
  }

  // Empties the runs of a chain that is about to be freed.
  void clear(Runs& runs) {
    for (const Run& run : runs) sets_.unref(run.set);
    Runs().swap(runs);
  }

  // Each run goes to the side where its blocks are; a run across the cut goes to both sides:
  //
  //   [a b c d e]  cut behind b           head [a b]           tail [c d e]
  //   DEVICE  {1,2} to 3, {2} to 5   =>   {1,2} to 2           {1,2} to 1, {2} to 3
  //   HOST    {} to 2, {2} to 4           none, without {}     {2} to 2
  void split(Runs& tail, Runs& head, uint32_t at) {
    Runs rest;
    for (size_t i = 0; i < tail.size(); ++i) {
      const Run& run = tail[i];
      const uint32_t start = start_of(tail, i);
      if (start < at) {
        if (starts_layer(tail, i)) drop_empty_end(head);
        head.push_back({run.end < at ? run.end : at, run.set, run.layer});
        sets_.ref(run.set);
      }
      if (run.end > at) {
        rest.push_back({run.end - at, run.set, run.layer});
        sets_.ref(run.set);
      }
    }
    drop_empty_end(head);
    for (const Run& run : tail) sets_.unref(run.set);
    tail = rest;
  }

  // The tail's runs move `shift` blocks back, behind the head's. At the seam, two runs of equal
  // sets become one. Where the head's runs end before the seam, a run of {} fills the rest:
  //
  //   head [a b]         tail [c d e]                    [a b c d e]
  //   DEVICE {1,2} to 2  {1,2} to 1, {2} to 3       =>   {1,2} to 3, {2} to 5
  //   HOST   none        {2} to 2                        {} to 2, {2} to 4
  //
  // The references of both lists pass to the merged one, except where two runs become one.
  void merge(Runs& head, Runs& tail, uint32_t shift) {
    Runs merged;
    size_t h = 0, t = 0;
    while (h < head.size() || t < tail.size()) {
      const LayerId of_head = h < head.size() ? head[h].layer : kNone;
      const LayerId of_tail = t < tail.size() ? tail[t].layer : kNone;
      const LayerId layer = of_head < of_tail ? of_head : of_tail;
      uint32_t end = 0;
      for (; h < head.size() && head[h].layer == layer; ++h) {
        merged.push_back(head[h]);
        end = head[h].end;
      }
      bool seam = true;
      for (; t < tail.size() && tail[t].layer == layer; ++t) {
        const Run run{tail[t].end + shift, tail[t].set, layer};
        if (seam && end < shift && run.set != RankSets::kEmptySet) {
          merged.push_back({shift, RankSets::kEmptySet, layer});
        } else if (seam && end == shift && end != 0 && merged.back().set == run.set) {
          sets_.unref(run.set);
          merged.back().end = run.end;
          seam = false;
          continue;
        }
        seam = false;
        merged.push_back(run);
      }
    }
    head.clear();
    tail.swap(merged);
  }

 private:
  // Replaces the set of every block in [from, to) of one layer by change(set, a, b), called once
  // for each stretch [a, b) of equal sets. The layer's new runs are built in `edited_`, with equal
  // neighbours joined, and then replace the old ones:
  //
  //   7 comes to [1, 3)   {1} to 2, {2} to 5   =>   {1} to 1, {1,7} to 2, {2,7} to 3, {2} to 5
  //   1 leaves [2, 4)     {1} to 5             =>   {1} to 2, {} to 4, {1} to 5
  //   7 comes to [3, 4)   {1} to 2             =>   {1} to 2, {} to 3, {7} to 4
  //   7 comes to [2, 3)   {7} to 2             =>   {7} to 3
  template <class Change>
  void edit(Runs& runs, LayerId layer, uint32_t from, uint32_t to, Change&& change) {
    size_t lo = 0;
    while (lo < runs.size() && runs[lo].layer < layer) ++lo;
    size_t hi = lo;
    edited_.clear();
    uint32_t start = 0;
    for (; hi < runs.size() && runs[hi].layer == layer; ++hi) {
      const Run& run = runs[hi];
      if (start < from) put(run.end < from ? run.end : from, run.set, layer);
      const uint32_t a = start > from ? start : from;
      const uint32_t b = run.end < to ? run.end : to;
      if (a < b) put(b, change(run.set, a, b), layer);
      if (run.end > to) put(run.end, run.set, layer);
      start = run.end;
    }
    if (start < from) put(from, RankSets::kEmptySet, layer);
    if (start < to) {
      const uint32_t a = start > from ? start : from;
      put(to, change(RankSets::kEmptySet, a, to), layer);
    }
    drop_empty_end(edited_);
    replace(runs, lo, hi);
  }

  void put(uint32_t end, SetId set, LayerId layer) {
    if (!edited_.empty() && edited_.back().set == set && edited_.back().layer == layer) {
      edited_.back().end = end;
    } else {
      edited_.push_back({end, set, layer});
    }
  }

  // Replaces runs [lo, hi) by `edited_`, and their references by those of the new ones.
  void replace(Runs& runs, size_t lo, size_t hi) {
    for (const Run& run : edited_) sets_.ref(run.set);
    for (size_t i = lo; i < hi; ++i) sets_.unref(runs[i].set);
    const size_t common = hi - lo < edited_.size() ? hi - lo : edited_.size();
    for (size_t i = 0; i < common; ++i) runs[lo + i] = edited_[i];
    const auto at = runs.begin() + static_cast<std::ptrdiff_t>(lo + common);
    if (edited_.size() > common) {
      runs.insert(at, edited_.begin() + static_cast<std::ptrdiff_t>(common), edited_.end());
    } else {
      runs.erase(at, runs.begin() + static_cast<std::ptrdiff_t>(hi));
    }
  }

  static void drop_empty_end(Runs& runs) {
    if (!runs.empty() && runs.back().set == RankSets::kEmptySet) runs.pop_back();
  }

  RankSets sets_;
  Runs edited_;  // scratch
};

}  // namespace kvd
