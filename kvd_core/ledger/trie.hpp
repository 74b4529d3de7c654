// A compressed trie of live prompts, keyed by sequence hashes, with the ranks that pass through.
//
//   root ──┬─ node 4  hashes [ a1.. | 77.. | 03.. ]         3 blocks
//          │          ranks   rank 2: 2 requests, rank 5: 1
//          │          ├─ node 9  [ 91.. | c4.. ]            rank 2: 1     one request ends here
//          │          └─ node 5  [ 5e.. ]                   rank 2: 1, rank 5: 1   two end here
//          └─ node 6  ...
//
// A node is a chain (base/chains.hpp) in one buffer of exactly its size. Nodes are split where
// prompts branch and where a request ends, so a request covers whole nodes and only needs to know
// the last of them. A block is the path to it: [1,1,1] are three blocks, and the 3 below [1,2] is
// not the 3 below [9,2], whatever lineage the hashes claim.
//
// When a node is split, the tail keeps its id; when two nodes are merged, the child does. So
// neither the requests that end in it nor its children's table entries need to change.
//
// Invariants
//   1. those of base/chains.hpp;
//   2. a node has 1 to kMaxChain blocks and at least one rank;
//   3. a RankRef counts the live requests of its rank that end in the node or below, so the ranks
//      of a node include those of its children;
//   4. if no request ends in a node with one child, the two could not be merged: some rank has
//      different weights in them, or they exceed kMaxChain together. So churn leaves no fragments,
//      except where a merge has found no memory, which `has_fragments` says;
//   5. `child_xor` is the xor of the ids of the children: for an only child, its id.
//
// Costs (blocks n asked for, nodes m on the way, ranks p of a node): find O(n) as plain arrays and
// one table probe a node; insert, erase O(m log p), O(p) a node where a rank comes or goes,
// O(blocks gained); split and merge O(kMaxChain + p). The root is no node, and has no ranks.
//
// Without memory, insert throws std::bad_alloc and leaves the prompts as they were. Erase and weigh
// never throw.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#include "base/arena.hpp"
#include "base/chains.hpp"
#include "ledger/rank_refs.hpp"

namespace kvd::ledger {

using kvd::kNone;
using kvd::NodeId;

constexpr NodeId kRoot = kNone;

struct TrieNode {
  uint64_t* hashes;  // `len` of them
  uint64_t first;    // hashes[0], which a probe reads without following the pointer
  uint32_t len;      // blocks
  NodeId parent;
  uint32_t ends;  // live requests that end here
  uint32_t children;
  NodeId child_xor;
  RankRefs ranks;  // the ranks that pass through

  uint64_t first_hash() const { return first; }
  const uint64_t* chain_hashes() const { return hashes; }
  uint32_t chain_len() const { return len; }

  uint32_t& free_link() { return len; }
};

class Trie : public Chains<Trie, TrieNode> {
 public:
  // Blocks of a node: bounds what a split or a merge copies (32 KB, about 2 us), whatever the
  // length of prompts.
  static constexpr uint32_t kMaxChain = 4096;

  // How far the trie has a prompt.
  struct PathPosition {
    NodeId node = kRoot;  // the deepest node that has some of it
    uint32_t inside = 0;  // how many of that node's blocks are the prompt's
    size_t depth = 0;     // all blocks of the prompt that the trie has
    size_t nodes = 0;     // nodes on the way
  };

  Trie() : Chains(0) {}
  Trie(const Trie&) = delete;
  Trie& operator=(const Trie&) = delete;
  ~Trie() {
    each([&](NodeId id) { std::free(nodes_[id].hashes); });
  }

  uint32_t node_count() const { return nodes_.live(); }
  uint64_t block_count() const { return blocks_; }
  uint64_t rank_ref_count() const { return rank_refs_; }
  bool has_fragments() const { return has_fragments_; }
  size_t bytes() const {
    return nodes_.bytes() + children_.bytes() + blocks_ * sizeof(uint64_t) + heap_;
  }

  PathPosition find(const uint64_t* hashes, size_t n) const {
    PathPosition at;
    at.depth = descend(kRoot, hashes, n, [&](NodeId id, size_t, size_t met) {
      at.node = id;
      at.inside = static_cast<uint32_t>(met);
      ++at.nodes;
    });
    return at;
  }

  // Writes the hashes of a prompt of `n` blocks that ends in a node: 8 bytes each, native order.
  void copy_path(NodeId end, size_t n, char* to) const {
    for (NodeId id = end; id != kRoot; id = nodes_[id].parent) {
      const TrieNode& node = nodes_[id];
      n -= node.len;
      std::memcpy(to + n * sizeof(uint64_t), node.hashes, node.len * sizeof(uint64_t));
    }
  }

  // The most rank references that `insert` can add at a position.
  uint64_t rank_refs_needed(const PathPosition& at, size_t n) const {
    const bool splits = at.node != kRoot && at.inside < nodes_[at.node].len;
    const uint64_t copied = splits ? nodes_[at.node].ranks.size() : 0;
    return at.nodes + copied + (n - at.depth) / kMaxChain + 2;
  }

  // Adds a request of the rank with a prompt that was found at `at`. Returns the node in which it
  // ends and sets `gained` to the number of blocks that are new for the rank.
  //
  //   rank 5 asks for a b x y; `find` has met a b
  //
  //   before   root ── 9 [a b c d]  rank 2            ends 1
  //   split    root ── 4 [a b]      rank 2            ends 0 ──── 9 [c d]  rank 2  ends 1
  //   after    root ── 4 [a b]      rank 2, rank 5    ends 0 ──┬─ 9 [c d]  rank 2  ends 1
  //                                                            └─ 6 [x y]  rank 5  ends 1, gained 4
  NodeId insert(const PathPosition& at, const uint64_t* hashes, size_t n, LoadedRankId rank,
                size_t& gained) {
    NodeId end = at.node;
    if (end != kRoot && at.inside < nodes_[end].len) end = split(end, at.inside);
    NodeId without = end;  // from here on upwards the rank has not been inserted
    gained = 0;
    try {
      for (; without != kRoot; without = nodes_[without].parent) {
        TrieNode& node = nodes_[without];
        if (!node.ranks.insert(rank, heap_)) continue;
        gained += node.len;
        ++rank_refs_;
      }
      for (size_t from = at.depth; from < n;) {
        const size_t len = std::min<size_t>(n - from, kMaxChain);
        end = grow(end, hashes + from, static_cast<uint32_t>(len), rank);
        gained += len;
        from += len;
      }
    } catch (const std::bad_alloc&) {
      withdraw(end, without, rank, [](uint32_t, double) {});
      if (without != kRoot) merge_with_only_child(without);
      throw;
    }
    if (end != kRoot) ++nodes_[end].ends;
    return end;
  }

  // Takes a request of the rank off the path to `end`. Calls lost(blocks, weight), from the end
  // upwards, for the nodes that no other request of the rank passes through.
  //
  //   the request of rank 5 that ends in 6
  //
  //   before   root ── 4 [a b]      rank 2, rank 5    ends 0 ──┬─ 9 [c d]  rank 2  ends 1
  //                                                            └─ 6 [x y]  rank 5  ends 1
  //   6        no rank is left: removed, lost(2, 1)
  //   4        rank 5 is gone, lost(2, 1); its only child has the same ranks: merged with it
  //   after    root ── 9 [a b c d]  rank 2            ends 1
  template <class Lost>
  void erase(NodeId end, LoadedRankId rank, Lost&& lost) {
    if (end != kRoot) --nodes_[end].ends;
    withdraw(end, kRoot, rank, lost);
  }

  // Gives a weight to the blocks at the end of a request that no other request of the rank passes
  // through. Calls changed(blocks, old weight) for them, from the end upwards.
  //
  //   rank 5 gives its request that ends in 6 the weight 0.5
  //
  //   before   root ── 4 [a b]  rank 5: 2 requests, 1 ──┬─ 9 [c d]  rank 5: 1 request, 1
  //                                                     └─ 6 [x y]  rank 5: 1 request, 1
  //   after    4 and 9 as before, 6 [x y]  rank 5: 1 request, 0.5: changed(2, 1); in 4 another
  //            request of the rank continues to 9
  template <class Changed>
  void weigh(NodeId end, LoadedRankId rank, double weight, Changed&& changed) {
    for (NodeId id = end, parent; id != kRoot; id = parent) {
      TrieNode& node = nodes_[id];
      parent = node.parent;
      RankRef* ref = node.ranks.find(rank);
      if (ref->requests != 1) return;
      changed(node.len, ref->weight);
      ref->weight = weight;
      merge_with_only_child(id);
    }
  }

  // Calls visit(id) for every node, in no order.
  template <class Visit>
  void each(Visit&& visit) const {
    for (uint32_t at = 0; at < children_.capacity(); ++at) {
      if (children_.at(at) != ProbeTable::kEmpty) visit(children_.at(at));
    }
  }

 private:
  friend class Chains<Trie, TrieNode>;
  friend class TrieVerifier;

  // Takes one request of the rank off the nodes from `end` upwards, up to but without `stop`.
  template <class Lost>
  void withdraw(NodeId end, NodeId stop, LoadedRankId rank, Lost&& lost) {
    for (NodeId id = end, parent; id != stop; id = parent) {
      TrieNode& node = nodes_[id];
      parent = node.parent;
      RankRef* ref = node.ranks.find(rank);
      const double weight = ref->weight;
      if (node.ranks.erase(ref, heap_)) {
        --rank_refs_;
        lost(node.len, weight);
      }
      if (node.ranks.size() == 0) {
        remove(id);
      } else {
        merge_with_only_child(id);
      }
    }
    if (nodes_.live() == 0) give_back();
  }

  // The hashes of one chain followed by those of another; null if there is no memory.
  static uint64_t* joined(const uint64_t* head, uint32_t head_len, const uint64_t* tail,
                          uint32_t tail_len) {
    auto* hashes = static_cast<uint64_t*>(try_heap((head_len + tail_len) * sizeof(uint64_t)));
    if (hashes == nullptr) return nullptr;
    std::memcpy(hashes, head, head_len * sizeof(uint64_t));
    if (tail_len != 0) std::memcpy(hashes + head_len, tail, tail_len * sizeof(uint64_t));
    return hashes;
  }

  static void set_hashes(TrieNode& node, uint64_t* hashes, uint32_t len) {
    std::free(node.hashes);
    node.hashes = hashes;
    node.first = hashes[0];
    node.len = len;
  }

  // A new node, with room made for it in the table of children. Without memory it throws and
  // changes nothing.
  NodeId take(const uint64_t* hashes, uint32_t len) {
    children_.make_room();
    nodes_.make_room();
    uint64_t* own = joined(hashes, len, nullptr, 0);
    if (own == nullptr) throw std::bad_alloc();
    const NodeId id = nodes_.take();
    TrieNode& node = nodes_[id];
    node.hashes = nullptr;
    node.ends = node.children = node.child_xor = 0;
    set_hashes(node, own, len);
    return id;
  }

  // A node knows how many children it has and the xor of their ids:
  //
  //   4: 9, 6            2 children, 9 ^ 6
  //   link(4, 5)         3 children, 9 ^ 6 ^ 5
  //   unlink(6)          2 children, 9 ^ 5
  //   replace_child(9, 7)   2 children, 7 ^ 5         the caller links 9 anew, or frees it
  void link(NodeId parent, NodeId id) {
    nodes_[id].parent = parent;
    if (parent == kRoot) return;
    ++nodes_[parent].children;
    nodes_[parent].child_xor ^= id;
  }

  void unlink(NodeId id) {
    const NodeId parent = nodes_[id].parent;
    if (parent == kRoot) return;
    --nodes_[parent].children;
    nodes_[parent].child_xor ^= id;
  }

  void replace_child(NodeId old, NodeId id) {
    const NodeId parent = nodes_[old].parent;
    nodes_[id].parent = parent;
    if (parent != kRoot) nodes_[parent].child_xor ^= old ^ id;
  }

  NodeId grow(NodeId parent, const uint64_t* hashes, uint32_t len, LoadedRankId rank) {
    const NodeId id = take(hashes, len);
    nodes_[id].ranks.insert(rank, heap_);
    ++rank_refs_;
    blocks_ += len;
    link(parent, id);
    insert_child(id);
    return id;
  }

  // Splits a node behind its first `at` blocks and returns the head, a new node. All requests of
  // the tail pass through the head, so both have the same ranks. No request ends in the head.
  //
  //   P ── 9 [a b c d] ── kids        P ── 4 [a b] ──── 9 [c d] ── kids
  //      rank 2, 5  ends 1       =>      rank 2, 5         rank 2, 5
  //                                      ends 0            ends 1
  NodeId split(NodeId id, uint32_t at) {
    const NodeId parent = nodes_[id].parent;
    const NodeId head = take(nodes_[id].hashes, at);
    TrieNode& tail = nodes_[id];
    const uint32_t rest = tail.len - at;
    uint64_t* const hashes = joined(tail.hashes + at, rest, nullptr, 0);
    try {
      if (hashes == nullptr) throw std::bad_alloc();
      nodes_[head].ranks.copy(tail.ranks, heap_);
    } catch (const std::bad_alloc&) {
      std::free(hashes);
      give(head);
      throw;
    }
    rank_refs_ += tail.ranks.size();
    split_node(id, head, [&] { set_hashes(tail, hashes, rest); });
    // The two parts are shorter: they may fit together with nodes that the whole was too long for.
    merge_with_only_child(id);
    if (parent != kRoot) merge_with_only_child(parent);
    return head;
  }

  // Merges a node with its only child if possible: the child keeps its id.
  //
  //   P ── 4 [a b] ──── 9 [c d] ── kids        P ── 9 [a b c d] ── kids
  //      rank 2, 5         rank 2, 5      =>      rank 2, 5
  //      ends 0            ends 1                 ends 1
  //
  // Not where a request ends in 4, where 4 has further children, where a rank has weight 1 in 4 and
  // 0.5 in 9, or where the two together exceed kMaxChain.
  void merge_with_only_child(NodeId id) {
    TrieNode& head = nodes_[id];
    if (head.children != 1 || head.ends != 0) return;
    const NodeId below = head.child_xor;
    TrieNode& tail = nodes_[below];
    // All requests of the head pass on to the child, so both have the same ranks.
    if (head.len + tail.len > kMaxChain || !head.ranks.weighs_like(tail.ranks)) return;
    uint64_t* const hashes = joined(head.hashes, head.len, tail.hashes, tail.len);
    if (hashes == nullptr) {
      has_fragments_ = true;
      return;
    }
    merge_nodes(id, below, [&] { set_hashes(tail, hashes, head.len + tail.len); });
    rank_refs_ -= head.ranks.size();
    give(id);
  }

  void remove(NodeId id) {
    erase_child(id);
    unlink(id);
    blocks_ -= nodes_[id].len;
    give(id);
  }

  void give(NodeId id) {
    TrieNode& node = nodes_[id];
    std::free(node.hashes);
    node.ranks.clear(heap_);
    nodes_.give(id);
    children_.shrink(*this);
  }

  void give_back() {
    has_fragments_ = false;
    children_.shrink(*this);
    while (nodes_.shrink()) {}
  }

  uint64_t blocks_ = 0;
  uint64_t rank_refs_ = 0;
  size_t heap_ = 0;  // bytes of the buffers of all `ranks`
  bool has_fragments_ = false;
};

}  // namespace kvd::ledger
