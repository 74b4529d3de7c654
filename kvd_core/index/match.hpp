// How much of a prompt every rank can reuse: one walk, then one pass over the runs of each tier.
//
//   prompt   h0 h1 h2 h3 h4 h5 h6        path: node 4 [h0 h1 h2 h3], node 9 [h4 h5]
//   DEVICE   {1,2,7}: h0-h2   {2}: h3-h5          depth of 1, 7: 3   of 2: 6
//   HOST     {1}: h3-h4                           1 continues from 3 to 5
//
// A rank's depth on a tier is its depth on the tiers above plus the unbroken run that it holds from
// there on. The tiers are taken in the order device, host, disk, external. Runs are met in path
// order, so one comparison for each (run, member) decides: the rank stands inside the run, or not.
//
// Some engines load chunks of several blocks from lower tiers. Their ranks cannot use a chunk of
// which the prompt has only a part, so such a depth ends with a chunk, or where the tier above
// ends.
//
// A rank with window groups (hybrid models) can reuse a prefix only if each group still holds the
// last blocks of it: its device depth is the deepest that satisfies all of them.
//
// A query with a cache salt makes two passes: one by the salted hashes, for ranks whose streams
// announce salts, and one by the plain hashes for the others. Publishers always announce salts, so
// a worker's rank may get something from both: its own stream's blocks, and those of the
// publishers' ranks that count as it. Each pass starts from nothing, and then each tier has the
// larger of the two depths.
//
// A conductor's rank with window groups that counts as a worker's is first matched by itself. The
// worker's rank then gets the larger of the two device depths.
//
// Costs: path O(blocks), compared as plain arrays; then O(runs on the path x their members). A
// match changes nothing in the index, not even a counter, with one exception: blocks known by
// sequence hash alone get their places in the tree when a prompt shows them
// (Index::place_by_prompt).
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "index/index.hpp"
#include "index/path.hpp"

namespace kvd {

class Match {
 public:
  // Which ranks a pass may credit (a query with a cache salt makes two passes).
  enum class SaltFilter { kAll, kSalted, kUnsalted };

  // Depths in blocks; device <= host <= disk, and disk includes the external tier.
  struct Depth {
    uint32_t device = 0;
    uint32_t host = 0;
    uint32_t disk = 0;
  };

  void reset(const Index& index) {
    for (const RankId id : touched_) depth_[id] = Entry();
    touched_.clear();
    before_.clear();
    counted_.clear();
    frequencies_.clear();
    any_external_ = false;
    if (depth_.size() < index.rank_end()) depth_.resize(index.rank_end());
  }

  void add(const Index& index, const uint64_t* locals, size_t n, SaltFilter filter) {
    const Tree& tree = index.tree();
    path_.find(tree, locals, n);
    if (index.place_by_prompt(path_.last(tree), locals, path_.met(), n))
      path_.find(tree, locals, n);
    put_pass_aside();
    match_device(index, filter);
    apply_windows(index, filter);
    match_below(index, filter);
    take_larger_depths();
  }

  Depth depth(RankId id) const { return depth_[id].depth; }
  // Depth::disk without what the external tier adds.
  uint32_t before_external(RankId id) const {
    const Entry& entry = depth_[id];
    return any_external_ ? std::min(entry.before_external, entry.depth.disk) : entry.depth.disk;
  }
  const std::vector<RankId>& touched() const { return touched_; }
  // For every block of the longest device match, the number of ranks that hold it on the device.
  const std::vector<uint32_t>& frequencies() const { return frequencies_; }

 private:
  struct Entry {
    Depth depth;
    uint32_t before_external = 0;  // blocks; set if some rank holds blocks on the external tier
    bool touched = false;
  };

  // A rank counted as a holder of the blocks from `from` to before `to`, by its publishers.
  struct Counted {
    RankId id;
    uint32_t from, to;
  };

  static bool counts(const Rank& rank, SaltFilter filter) {
    return rank.live && !rank.hidden &&
           (filter == SaltFilter::kAll || rank.salted == (filter == SaltFilter::kSalted));
  }

  static bool is_workers(const Rank& rank) { return rank.live && !rank.published && !rank.hidden; }

  // Calls each(rank) for the ranks that a member of a set counts as: usually for itself.
  template <class Each>
  static void each_seen(const Index& index, RankId member, const Rank& rank, Each&& each) {
    if (rank.alias_of == kNone) {
      each(member);
    } else if (rank.alias_of == kMany) {
      for (const RankId id : index.aliases_of(member)) each(id);
    } else if (rank.alias_of == kAll) {
      for (RankId id = 0; id < index.rank_end(); ++id) {
        if (is_workers(index.rank(id))) each(id);
      }
    } else {
      each(rank.alias_of);
    }
  }

  void put_pass_aside() {
    for (const RankId id : touched_) {
      before_.push_back({id, depth_[id]});
      depth_[id] = Entry();
    }
    touched_.clear();
  }

  void take_larger_depths() {
    for (const auto& [id, before] : before_) {
      Entry& entry = touch(id);
      entry.depth.device = std::max(entry.depth.device, before.depth.device);
      entry.depth.host = std::max(entry.depth.host, before.depth.host);
      entry.depth.disk = std::max(entry.depth.disk, before.depth.disk);
      entry.before_external = std::max(entry.before_external, before.before_external);
    }
    before_.clear();
  }

  Entry& touch(RankId id) {
    Entry& entry = depth_[id];
    if (!entry.touched) {
      entry.touched = true;
      touched_.push_back(id);
    }
    return entry;
  }

  void match_device(const Index& index, SaltFilter filter) {
    path_.each_run(index.tree(), kDeviceLayer, [&](SetId set, uint32_t from, uint32_t to) {
      uint32_t holders = 0;
      bool moved = false;
      const size_t counted = counted_.size();
      for (const RankId member : index.tree().sets().members(set)) {
        const Rank& rank = index.rank(member);
        if (!counts(rank, filter)) continue;
        if (rank.alias_of == kNone) {
          ++holders;
          moved |= move(member, from, to);
          continue;
        }
        each_seen(index, member, rank, [&](RankId id) {
          if (is_first(index, set, member, id)) {
            ++holders;
            if (filter == SaltFilter::kSalted && counts(index.rank(id), SaltFilter::kUnsalted))
              counted_.push_back({id, from, to});
          }
          if (!is_met_alone(rank)) moved |= move(id, from, to);
        });
        if (is_met_alone(rank)) moved |= move(member, from, to);
      }
      // Nobody stands at `from`, so nobody can continue behind it either.
      if (!moved) return counted_.resize(counted), false;
      if (frequencies_.size() < to) frequencies_.resize(to, 0);
      // Captured by value: by reference, `holders` would be read anew for each block.
      std::for_each(frequencies_.begin() + from, frequencies_.begin() + to,
                    [holders](uint32_t& of_block) { of_block += holders; });
      if (filter == SaltFilter::kUnsalted) count_once(index, set, from, to);
      return true;
    });
  }

  // Takes back from a run's holders those that the salted pass has counted.
  void count_once(const Index& index, SetId set, uint32_t from, uint32_t to) {
    for (const Counted& before : counted_) {
      const uint32_t first = std::max(from, before.from), end = std::min(to, before.to);
      if (first >= end || !index.tree().sets().contains(set, before.id)) continue;
      for (uint32_t at = first; at < end; ++at) --frequencies_[at];
    }
  }

  static bool is_met_alone(const Rank& rank) {
    return rank.alias_of != kNone && !rank.windows.empty();
  }

  bool move(RankId id, uint32_t from, uint32_t to) {
    if (from != 0 && depth_[id].depth.device != from) return false;
    touch(id).depth.device = to;
    return true;
  }

  // Whether `member` is the first of a set that counts as `id`.
  static bool is_first(const Index& index, SetId set, RankId member, RankId id) {
    if (index.tree().sets().contains(set, id)) return false;
    for (const RankId other : index.tree().sets().members(set)) {
      if (other == member) return true;
      const Rank& rank = index.rank(other);
      if (!rank.live || rank.hidden || rank.alias_of == kNone) continue;
      bool same = false;
      each_seen(index, other, rank, [&](RankId as) { same = same || as == id; });
      if (same) return false;
    }
    return true;
  }

  void match_below(const Index& index, SaltFilter filter) {
    static constexpr LayerId kHost = 1, kDisk = 2, kExternal = 3;
    start_from(&Depth::device, &Depth::host);
    extend(index, kHost, filter, &Depth::host);
    end_with_chunks(index, &Depth::device, &Depth::host);
    start_from(&Depth::host, &Depth::disk);
    extend(index, kDisk, filter, &Depth::disk);
    if (index.held(kExternal) != 0) {
      stand_before_external();
      extend(index, kExternal, filter, &Depth::disk);
    }
    end_with_chunks(index, &Depth::host, &Depth::disk);
  }

  void end_with_chunks(const Index& index, uint32_t Depth::* above, uint32_t Depth::* here) {
    if (!index.chunked()) return;
    for (const RankId id : touched_) {
      const Rank& rank = index.rank(id);
      if (rank.chunk <= 1) continue;
      Depth& depth = depth_[id].depth;
      depth.*here = std::max(depth.*above, depth.*here - depth.*here % rank.chunk);
    }
  }

  // A tier starts where the rank stands on the tier above.
  void start_from(uint32_t Depth::* above, uint32_t Depth::* here) {
    for (const RankId id : touched_) depth_[id].depth.*here = depth_[id].depth.*above;
  }

  void stand_before_external() {
    any_external_ = true;
    for (const RankId id : touched_) depth_[id].before_external = depth_[id].depth.disk;
  }

  void extend(const Index& index, LayerId layer, SaltFilter filter, uint32_t Depth::* field) {
    if (index.held(layer) == 0) return;
    path_.each_run(index.tree(), layer, [&](SetId set, uint32_t from, uint32_t to) {
      for (const RankId member : index.tree().sets().members(set)) {
        const Rank& rank = index.rank(member);
        if (!counts(rank, filter)) continue;
        each_seen(index, member, rank, [&](RankId id) {
          const uint32_t at = depth_[id].depth.*field;
          if (from <= at && at < to) touch(id).depth.*field = to;
        });
      }
      return true;
    });
  }

  void apply_windows(const Index& index, SaltFilter filter) {
    if (!index.windowed()) return;
    for (size_t i = 0; i < touched_.size(); ++i) {
      const RankId id = touched_[i];
      const Rank& rank = index.rank(id);
      if (rank.windows.empty() || !counts(rank, filter)) continue;
      Depth& depth = depth_[id].depth;
      uint32_t before;
      do {  // a smaller depth for one group may break the condition of another
        before = depth.device;
        for (const Window& window : rank.windows) {
          depth.device = deepest(index, id, window, depth.device);
        }
      } while (depth.device != before);
    }
    for (size_t i = 0; i < touched_.size(); ++i) {
      const RankId met = touched_[i];
      const Rank& rank = index.rank(met);
      if (!is_met_alone(rank) || !counts(rank, filter)) continue;
      const uint32_t device = depth_[met].depth.device;
      each_seen(index, met, rank, [&](RankId id) {
        Depth& depth = touch(id).depth;
        depth.device = std::max(depth.device, device);
      });
    }
  }

  // The deepest prefix length <= `limit` whose last window.blocks blocks the group holds.
  uint32_t deepest(const Index& index, RankId id, const Window& window, uint32_t limit) const {
    uint32_t best = 0, start = 0, end = 0;
    const auto close = [&] {
      const uint32_t length = std::min(end, limit);
      if (length > start && (start == 0 || length - start >= window.blocks)) {
        best = std::max(best, length);
      }
    };
    path_.each_run(index.tree(), window.layer, [&](SetId set, uint32_t from, uint32_t to) {
      if (!index.tree().sets().contains(set, id)) return true;
      if (from != end) {
        close();
        start = from;
      }
      end = to;
      return from < limit;
    });
    close();
    return best;
  }

  Path path_;
  std::vector<Entry> depth_;
  std::vector<RankId> touched_;                   // in this pass; after it, in both
  std::vector<std::pair<RankId, Entry>> before_;  // depths of the pass before
  std::vector<Counted> counted_;  // by the salted pass, and perhaps again by the plain one
  std::vector<uint32_t> frequencies_;
  bool any_external_ = false;
};

}  // namespace kvd
