// Checks every numbered invariant of the trie of live prompts, against the requests that it should
// hold. For tests and debug builds: O(everything).
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#include "ledger/trie.hpp"

namespace kvd::ledger {

class TrieVerifier {
 public:
  // For a rank: the blocks of the nodes that it passes through, and the sum of their weights.
  struct Held {
    uint64_t blocks = 0;
    double weight = 0;
  };

  explicit TrieVerifier(const Trie& trie) : trie_(trie) {}

  // Takes a live request into account: the last node of its prompt, its rank, its blocks. Throws as
  // `run` does.
  void note(NodeId end, LoadedRankId rank, uint32_t blocks) {
    uint64_t found = 0;
    if (end != kRoot) ++ends_[end];
    for (NodeId id = end; id != kRoot; id = trie_.node(id).parent) {
      found += trie_.node(id).len;
      ++passing_[{id, rank}];
      require(found <= blocks, "a path leads to the root");
    }
    require(found == blocks, "a request covers whole nodes");
  }

  // Throws std::logic_error with the first violation.
  void run() {
    uint64_t nodes = 0, blocks = 0, rank_refs = 0;
    size_t heap = 0;
    trie_.each([&](NodeId id) {
      const TrieNode& node = trie_.node(id);
      ++nodes;
      blocks += node.len;
      rank_refs += node.ranks.size();
      heap += node.ranks.bytes();
      require(node.len >= 1 && node.len <= Trie::kMaxChain, "2: chains are bounded");
      require(node.first == node.hashes[0], "the first hash is at hand");
      require(trie_.child(node.parent, node.first) == id, "1: children are found");
      require(node.ends == ends_[id], "ends are counted");
      ++children_[node.parent];
      children_xor_[node.parent] ^= id;
      check_rank_refs(id, node);
    });
    require(trie_.is_spread(), "children are near their homes");
    require(nodes == trie_.node_count(), "nodes are counted");
    require(blocks == trie_.block_count(), "blocks are counted");
    require(rank_refs == trie_.rank_ref_count() && rank_refs == passing_.size(),
            "3: every reference is some request's");
    require(heap == trie_.heap_, "memory of references is counted");
    trie_.each([&](NodeId id) { check_shape(id, trie_.node(id)); });
  }

  // To be called after `run`.
  Held held(LoadedRankId rank) const {
    const auto at = held_.find(rank);
    return at == held_.end() ? Held() : at->second;
  }

 private:
  static void require(bool holds, const char* what) {
    if (!holds) throw std::logic_error(std::string("trie ") + what);
  }

  void check_rank_refs(NodeId id, const TrieNode& node) {
    require(node.ranks.size() >= 1, "2: some request passes through a node");
    require(node.ranks.size() > 1 || node.ranks.bytes() == 0, "refs: one needs no buffer");
    const RankRef* last = nullptr;
    for (const RankRef& ref : node.ranks) {
      require(last == nullptr || last->rank < ref.rank, "refs: ranks ascend");
      require(ref.weight >= 0 && ref.weight <= 1, "refs: weights are fractions");
      const auto counted = passing_.find({id, ref.rank});
      require(counted != passing_.end() && counted->second == ref.requests,
              "3: requests that pass are counted");
      Held& held = held_[ref.rank];
      held.blocks += node.len;
      held.weight += node.len * ref.weight;
      last = &ref;
    }
  }

  void check_shape(NodeId id, const TrieNode& node) {
    require(node.children == children_[id] && node.child_xor == children_xor_[id],
            "5: children are counted");
    if (node.children != 1 || node.ends != 0 || trie_.has_fragments()) return;
    const TrieNode& child = trie_.node(node.child_xor);
    require(node.len + child.len > Trie::kMaxChain || !node.ranks.weighs_like(child.ranks),
            "4: an only child is merged");
  }

  const Trie& trie_;
  std::map<NodeId, uint32_t> ends_;
  std::map<NodeId, uint32_t> children_;
  std::map<NodeId, NodeId> children_xor_;
  std::map<std::pair<NodeId, LoadedRankId>, uint32_t> passing_;
  std::map<LoadedRankId, Held> held_;
};

}  // namespace kvd::ledger
