// The tree, a level at a time, for people who browse it: the chains below a block, and who holds
// how much of each.
//
//   below P      9 ── [d e f] ──┬─ ..      DEVICE  rank 2: 3 blocks, rank 7: 1
//                │              └─ ..      HOST    rank 2: 1
//                5 ── [g]                  DEVICE  rank 2: 1
//
// Siblings come newest first, a page at a time; the next page begins behind the last chain of the
// one before. The tree may change between two pages: a chain is named by its node and its first
// hash, and is not found if it is gone or has moved.
//
// Costs: a chain O(runs + members of their sets), of which at most kMost are counted; a page O(its
// chains), fewer when kPageMost members have been counted. Nothing in the index changes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

#include "index/index.hpp"

namespace kvd {

struct Holding {
  uint32_t tier;
  RankId rank;      // kNone: a publisher's blocks that count for no worker
  uint32_t blocks;  // of the chain
};

struct Branch {
  NodeId node = kNone;
  uint64_t first = 0;            // the local hash of its first block
  uint32_t blocks = 0;           // of the chain
  uint32_t children = 0;         // chains below it
  bool whole = true;             // whether all its holders have been counted
  std::vector<Holding> holders;  // by tier, those of most blocks first
};

// Blocks of the main cache group that a rank holds on a tier.
inline uint64_t held_on(const Index& index, RankId rank, uint32_t tier) {
  return index.rank(rank).held[tier];
}

class Branches {
 public:
  // Members of rank sets counted for one chain: 20 µs.
  static constexpr size_t kMost = 2048;
  // The same for a page: under 1 ms.
  static constexpr size_t kPageMost = 65536;

  explicit Branches(const Index& index) : index_(index) {}

  bool has(NodeId node, uint64_t first) const {
    const Tree& tree = index_.tree();
    return tree.alive(node) && node != Tree::kRoot && tree.node(node).first_hash() == first;
  }

  bool is_child(NodeId node, NodeId at) const { return index_.tree().node(node).parent == at; }

  // Lists children of `at` behind the sibling `after`, or from the first one if that is kNone. Both
  // must exist. Returns whether there are more.
  bool list(NodeId at, NodeId after, size_t limit, std::vector<Branch>& out) {
    const Tree& tree = index_.tree();
    NodeId next = after == kNone ? tree.node(at).first_child : tree.node(after).next;
    for (seen_ = 0; next != kNone && out.size() < limit && seen_ < kPageMost;
         next = tree.node(next).next)
      out.push_back(branch(next));
    return next != kNone;
  }

 private:
  Branch branch(NodeId id) {
    const Node& node = index_.tree().node(id);
    Branch found;
    found.node = id;
    found.first = node.first_hash();
    found.blocks = node.chain.len();
    found.children = node.children;
    held_.clear();
    size_t left = kMost;
    for (size_t i = 0; i < node.runs.size(); ++i) {
      const Run& run = node.runs[i];
      if (run.layer >= kTierLayers) continue;
      const uint32_t from = start_of(node.runs, i);
      const auto& members = index_.tree().sets().members(run.set);
      const size_t noted = std::min(left, members.size());
      for (size_t k = 0; k < noted; ++k) note(run.layer, members[k], run.end - from);
      left -= noted;
      found.whole = found.whole && noted == members.size();
    }
    seen_ += kMost - left;
    gather(found.holders);
    return found;
  }

  void note(LayerId layer, RankId id, uint32_t blocks) {
    const Rank& rank = index_.rank(id);
    if (!rank.live || rank.hidden) return;
    RankId shown = id;
    if (rank.alias_of != kNone) shown = rank.alias_of < kAll ? rank.alias_of : kNone;
    if (rank.alias_of == kNone && rank.published) shown = kNone;
    held_.push_back({layer, shown, blocks});
  }

  // Adds up the holdings of the same rank and tier.
  void gather(std::vector<Holding>& out) {
    const auto order = [](const Holding& h) { return std::make_pair(h.tier, h.rank); };
    std::sort(held_.begin(), held_.end(),
              [&](const Holding& a, const Holding& b) { return order(a) < order(b); });
    for (const Holding& held : held_) {
      if (!out.empty() && order(out.back()) == order(held)) out.back().blocks += held.blocks;
      else out.push_back(held);
    }
    std::sort(out.begin(), out.end(), [](const Holding& a, const Holding& b) {
      return std::make_tuple(a.tier, ~a.blocks, a.rank) <
             std::make_tuple(b.tier, ~b.blocks, b.rank);
    });
  }

  const Index& index_;
  size_t seen_ = 0;
  std::vector<Holding> held_;
};

}  // namespace kvd
