// The path of a prompt through the tree: the chains on its way, and who holds what of them.
//
//   prompt   h0 h1 h2 h3 h4 h5 h6        steps: node 4 from 0 on: 4 blocks; node 9 from 4 on: 2
//   DEVICE   {1,2}: h0-h4   {2}: h5      node 4: {1,2} to 4; node 9: {1,2} to 1, {2} to 2
//
// Costs: find O(blocks), compared as plain arrays; each_run O(runs on the path up to those of the
// layer).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "index/tree.hpp"

namespace kvd {

class Path {
 public:
  // Finds the path of a prompt by its local hashes.
  void find(const Tree& tree, const uint64_t* locals, size_t n) {
    steps_.clear();
    tree.descend(Tree::kRoot, locals, n, Append{steps_});
  }

  // The same with the `next` and `equal` of Chains::descend.
  template <class Next, class Equal>
  void find(const Tree& tree, size_t n, Next&& next, Equal&& equal) {
    steps_.clear();
    tree.descend(Tree::kRoot, n, next, equal, Append{steps_});
  }

  // The number of the prompt's blocks that are in the tree.
  size_t met() const { return steps_.empty() ? 0 : steps_.back().start + steps_.back().count; }

  // The last block met, or kNone.
  BlockId last(const Tree& tree) const {
    if (steps_.empty()) return kNone;
    return tree.node(steps_.back().node).chain.block()[steps_.back().count - 1];
  }

  // The block at a position below met().
  BlockId block(const Tree& tree, uint32_t at) const {
    const auto behind =
        std::upper_bound(steps_.begin(), steps_.end(), at,
                         [](uint32_t n, const MatchedChain& s) { return n < s.start; });
    const MatchedChain& step = *(behind - 1);
    return tree.node(step.node).chain.block()[at - step.start];
  }

  // Calls visit(set, from, to) for the runs of a layer, in prompt positions. Neighbouring runs of
  // equal sets come as one. Stops early when `visit` returns false.
  template <class Visit>
  void each_run(const Tree& tree, LayerId layer, Visit&& visit) const {
    SetId set = RankSets::kEmptySet;
    uint32_t from = 0, to = 0;
    for (const MatchedChain& step : steps_) {
      uint32_t start = 0;
      for (const Run& run : tree.node(step.node).runs) {
        if (run.layer > layer || start >= step.count) break;
        if (run.layer < layer) continue;
        const uint32_t end = std::min(run.end, step.count);
        if (run.set == set && step.start + start == to) {
          to = step.start + end;
        } else {
          if (set != RankSets::kEmptySet && !visit(set, from, to)) return;
          set = run.set;
          from = step.start + start;
          to = step.start + end;
        }
        start = end;
      }
    }
    if (set != RankSets::kEmptySet) visit(set, from, to);
  }

 private:
  struct MatchedChain {
    NodeId node;
    uint32_t start;  // blocks of the prompt before this chain
    uint32_t count;  // blocks matched in this chain
  };

  struct Append {
    std::vector<MatchedChain>& steps;
    void operator()(NodeId node, size_t start, size_t met) const {
      steps.push_back({node, static_cast<uint32_t>(start), static_cast<uint32_t>(met)});
    }
  };

  std::vector<MatchedChain> steps_;
};

}  // namespace kvd
