// Why a prompt is cached on a rank as far as it is and no further, and what has happened to its
// blocks.
//
//   prompt   h0 h1 h2 h3 h4 h5          rank 7   device h0 h1      ends before h2: removed 3 s ago
//                                                host   h2 h3      ends before h4: never stored
//   chronicle ──> each change of a block of the prompt, by its key
//
// A tier ends before the first block that is not reused from it. For that block, and for the one
// before which all tiers end, the trace follows the rank's changes from the oldest on:
//
//   not yet ──stored──> held ──removed──> evicted ──stored──> held ──cleared──> cleared
//
// If a block ends as "not yet", it was never stored, provided that no change of the rank was
// overwritten; else this is not known. A stored run is recognised as the prompt's by its first
// block and, if the prompt reaches it, its last. Where the prompt leaves a run in its middle, or
// ends there, it is not known how much of the run was the same. Then it is not known either what a
// clear means for a block in between.
//
// A trace changes nothing, and sees only changes from before it was made, unless later ones
// overwrite them.
//
// Costs: making it O(blocks of the prompt), and for each rank a walk over the runs of some chains;
// then O(changes), 10 to 20 ns each.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "index/chronicle.hpp"
#include "index/index.hpp"
#include "index/match.hpp"
#include "index/path.hpp"

namespace kvd {

// Parts of an index that only a trace asks for.
inline const Chronicle* chronicle_of(const Index& index) { return index.chronicle(); }
inline const Seeds& seeds_of(const Index& index) { return index.seeds(); }

// The local hashes of a prompt that is known by its sequence hashes, as far as the tree has it.
//
// Where chains branch, at most kMostSiblings of them are tried: 0.1 ms.
inline std::vector<uint64_t> locals_of(const Tree& tree, const uint64_t* sequences, size_t n) {
  constexpr size_t kMostSiblings = 4096;
  const auto follows = [&](size_t at, uint64_t local) {
    const uint64_t pair[2] = {at == 0 ? 0 : sequences[at - 1], local};
    return (at == 0 ? local : xxh3(pair, sizeof pair, kBaseSeed)) == sequences[at];
  };
  std::vector<uint64_t> locals;
  NodeId next = n == 0 ? kNone : tree.child(Tree::kRoot, sequences[0]);
  while (next != kNone) {
    const Chain& chain = tree.node(next).chain;
    for (uint32_t i = 0; i < chain.len(); ++i) {
      if (locals.size() == n || !follows(locals.size(), chain.local()[i])) return locals;
      locals.push_back(chain.local()[i]);
    }
    if (locals.size() == n) return locals;
    next = tree.node(next).first_child;
    for (size_t left = kMostSiblings; next != kNone; next = tree.node(next).next) {
      if (left-- == 0) return locals;
      if (follows(locals.size(), tree.node(next).first_hash())) break;
    }
  }
  return locals;
}

class Trace {
 public:
  enum EndReason : uint8_t {
    kEndOfPrompt,
    kEvicted,
    kCleared,
    kRestarted,
    kNeverStored,
    kNotReusable,  // the rank holds the block, but not all that it needs to reuse it
    kUnknown,
  };

  // Why a tier, or all of them, end before a block.
  struct End {
    uint32_t depth = 0;  // blocks before it
    uint32_t at = 0;     // ticks, when it was evicted, cleared or restarted
    EndReason why = kUnknown;
    uint8_t tier = 0;  // the tier that lost it last
  };

  struct RankHistory {
    RankId rank;
    std::array<End, kTierLayers> tiers;
    End all;

    const End& tier(size_t at) const { return tiers[at]; }
  };

  // A change of the prompt's blocks [from, to).
  struct TracedChange {
    uint32_t at;  // ticks
    RankId rank;
    uint32_t from, to;
    Change::Kind kind;
    uint8_t tiers;  // as of a Change
  };

  // `plain` and `salted` are the prompt's local hashes without and with its salt; the latter are
  // for ranks whose streams announce salts, null without a salt. Keeps the newest `most_steps`
  // steps.
  Trace(const Index& index, const uint64_t* plain, const uint64_t* salted, uint32_t n,
        size_t most_steps)
      : index_(index), n_(n), most_steps_(most_steps), is_salted_(salted != nullptr) {
    match_.reset(index);
    if (is_salted_) match_.add(index, salted, n, Match::SaltFilter::kSalted);
    match_.add(index, plain, n,
               is_salted_ ? Match::SaltFilter::kUnsalted : Match::SaltFilter::kAll);
    chains_[0].take(index.tree(), plain, n);
    if (is_salted_) chains_[1].take(index.tree(), salted, n);
    find_shared();
    if (index.chronicle() == nullptr) return;
    at_ = index.chronicle()->first();
    end_ = index.chronicle()->next();
  }

  // Adds a rank of a worker.
  void add(RankId id) {
    const Rank& rank = index_.rank(id);
    const Match::Depth depth = match_.depth(id);
    const uint32_t ends[kTierLayers] = {depth.device, depth.host, match_.before_external(id),
                                        depth.disk};
    RankHistory row{id, {}, {}};
    row.all.depth = depth.disk;
    const Chained& chain = chains_[is_salted_ && rank.salted ? 1 : 0];
    Followed followed{static_cast<uint32_t>(rows_.size()), &chain, rank.noted, 0, {}};
    for (uint8_t tier = 0; tier < kTierLayers; ++tier) {
      row.tiers[tier].depth = ends[tier];
      followed.histories.push_back(begin(id, chain, ends[tier], tier));
      if (ends[tier] == depth.disk) continue;
      followed.histories.push_back(begin(id, chain, depth.disk, tier));
    }
    rows_.push_back(row);
    if (rank.owner != kNone) by_owner_.emplace(rank.owner, static_cast<uint32_t>(ranks_.size()));
    ranks_.push_back(std::move(followed));
  }

  // Continues for this many changes; false when all are seen and the rows are complete.
  bool advance(uint64_t changes) {
    if (const Chronicle* chronicle = index_.chronicle(); chronicle != nullptr) {
      at_ = std::max(at_, chronicle->first());
      for (; changes > 0 && at_ < end_; --changes, ++at_) see((*chronicle)[at_]);
      if (at_ < end_) return true;
    }
    for (const Followed& each : ranks_) conclude(each);
    return false;
  }

  const std::vector<RankHistory>& rows() const { return rows_; }
  // The steps that are kept, as a ring: `oldest()` is the index of the first.
  const std::vector<TracedChange>& steps() const { return steps_; }
  size_t oldest() const { return all_steps_ > most_steps_ ? all_steps_ % most_steps_ : 0; }
  uint64_t all_steps() const { return all_steps_; }

 private:
  // A prompt by its local hashes, with or without its salt.
  struct Chained {
    std::vector<uint64_t> locals;
    std::vector<uint64_t> keys;
    Path path;

    void take(const Tree& tree, const uint64_t* hashes, uint32_t n) {
      locals.assign(hashes, hashes + n);
      keys.resize(n);
      for (uint32_t i = 0; i < n; ++i) keys[i] = key_of(hashes, i);
      path.find(tree, hashes, n);
    }
  };

  enum BlockState : uint8_t { kNotYet, kHeld, kWasEvicted, kWasCleared, kWasRestarted };

  // What has happened to a block on a tier, as far as that is known.
  struct BlockHistory {
    uint32_t depth;  // blocks before it
    uint8_t tier;
    bool holds;  // the rank holds it now
    BlockState state = kNotYet;
    bool perhaps = false;   // it may have been stored with a run that the prompt leaves
    bool doubtful = false;  // if so, it was cleared since
    uint32_t at = 0;        // ticks
    uint64_t number = 0;    // of the change
  };

  struct Followed {
    uint32_t row;
    const Chained* chain;
    uint64_t noted;  // the rank's changes ever noted
    uint64_t seen;   // those that this trace has found
    std::vector<BlockHistory> histories;
  };

  BlockHistory begin(RankId id, const Chained& chain, uint32_t depth, uint8_t tier) const {
    const Tree& tree = index_.tree();
    const bool holds =
        depth < chain.path.met() && tree.held(chain.path.block(tree, depth), tier, id);
    return {depth, tier, holds};
  }

  // Marks ranks for which publishers hold blocks as well: no chronicle has the changes of those.
  void find_shared() {
    shared_.assign(index_.rank_end(), false);
    for (RankId id = 0; id < index_.rank_end(); ++id) {
      const Rank& rank = index_.rank(id);
      if (!rank.live || rank.alias_of == kNone) continue;
      if (rank.alias_of == kAll) shared_.assign(index_.rank_end(), true);
      if (rank.alias_of < kAll) shared_[rank.alias_of] = true;
      if (rank.alias_of != kMany) continue;
      for (const RankId as : index_.aliases_of(id)) shared_[as] = true;
    }
  }

  void see(const Change& change) {
    const auto it = by_owner_.find(change.owner);
    if (it == by_owner_.end()) return;
    Followed& rank = ranks_[it->second];
    ++rank.seen;
    if (change.kind == Change::kCleared || change.kind == Change::kRestarted) {
      for (BlockHistory& history : rank.histories) empty(history, change);
      return keep(rank, change, 0, 0);
    }
    const std::vector<uint64_t>& keys = rank.chain->keys;
    if (change.depth >= n_ || keys[change.depth] != change.key) return;
    const uint32_t end = change.depth + change.blocks;
    const bool leaves = end <= n_ && static_cast<uint32_t>(keys[end - 1]) != change.last;
    for (BlockHistory& history : rank.histories) {
      if (history.tier != change.tiers || history.depth < change.depth || history.depth >= end)
        continue;
      const bool sure = history.depth == change.depth || (end <= n_ && !leaves);
      if (sure) {
        set_state(history, change.kind == Change::kStored ? kHeld : kWasEvicted, change);
      } else {
        history.perhaps = true;
      }
    }
    keep(rank, change, change.depth, leaves ? change.depth + 1 : std::min(end, n_));
  }

  void empty(BlockHistory& history, const Change& change) const {
    if ((change.tiers >> history.tier & 1) == 0) return;
    const bool perhaps = history.perhaps || history.doubtful;
    if (history.state == kHeld) {
      set_state(history, change.kind == Change::kCleared ? kWasCleared : kWasRestarted, change);
    } else {
      history.doubtful = perhaps;
      history.perhaps = false;
    }
  }

  void set_state(BlockHistory& history, BlockState state, const Change& change) const {
    history.state = state;
    history.perhaps = history.doubtful = false;
    history.at = change.at;
    history.number = at_;
  }

  void keep(const Followed& rank, const Change& change, uint32_t from, uint32_t to) {
    const TracedChange step{change.at, rows_[rank.row].rank, from, to, change.kind, change.tiers};
    if (steps_.size() < most_steps_) {
      steps_.push_back(step);
    } else {
      steps_[all_steps_ % most_steps_] = step;
    }
    ++all_steps_;
  }

  // ---- conclusions

  void conclude(const Followed& rank) {
    RankHistory& row = rows_[rank.row];
    const bool complete =
        rank.seen == rank.noted && !shared_[row.rank] && index_.chronicle() != nullptr;
    int strongest = -1;
    uint64_t latest = 0;
    for (const BlockHistory& history : rank.histories) {
      const End end = end_of(history, complete);
      if (history.depth == row.tiers[history.tier].depth) row.tiers[history.tier] = end;
      const int strong = strength(end.why);
      if (history.depth != row.all.depth || strong < strongest) continue;
      if (strong == strongest && history.number <= latest) continue;
      strongest = strong;
      latest = history.number;
      row.all = end;
    }
  }

  // Ranks the reasons of the tiers; among equals, the latest loss is the reason of all tiers.
  static int strength(EndReason why) {
    switch (why) {
      case kEndOfPrompt:
      case kNotReusable:
        return 3;
      case kEvicted:
      case kCleared:
      case kRestarted:
        return 2;
      case kUnknown:
        return 1;
      default:
        return 0;
    }
  }

  // `complete`: no change of the rank is missing.
  End end_of(const BlockHistory& history, bool complete) const {
    return {history.depth, history.at, reason_of(history, complete), history.tier};
  }

  EndReason reason_of(const BlockHistory& history, bool complete) const {
    if (history.depth == n_) return kEndOfPrompt;
    if (history.holds) return kNotReusable;
    switch (history.state) {
      case kWasEvicted:
        return history.doubtful ? kUnknown : kEvicted;
      case kWasCleared:
        return history.doubtful ? kUnknown : kCleared;
      case kWasRestarted:
        return history.doubtful ? kUnknown : kRestarted;
      case kNotYet:
        return complete && !history.doubtful ? kNeverStored : kUnknown;
      default:
        return kUnknown;
    }
  }

  const Index& index_;
  uint32_t n_;
  size_t most_steps_;
  bool is_salted_;
  Chained chains_[2];
  Match match_;
  uint64_t at_ = 0, end_ = 0;  // changes
  std::vector<RankHistory> rows_;
  std::vector<Followed> ranks_;  // one a row
  std::vector<bool> shared_;
  std::unordered_map<uint32_t, uint32_t> by_owner_;
  std::vector<TracedChange> steps_;
  uint64_t all_steps_ = 0;
};

}  // namespace kvd
