// A tree of chains of blocks: the skeleton of the tree of cached blocks (index/tree.hpp) and of the
// trie of live prompts (ledger/trie.hpp).
//
//   root ──┬─ node 4 [a b c] ──┬─ node 9 [d e]      after c a prompt continues with d or with f
//          │                   └─ node 5 [f]
//          └─ node 6 [x]
//
//   children_   (root, a) -> 4   (root, x) -> 6   (4, d) -> 9   (4, f) -> 5
//
// A node is a chain of consecutive blocks; a block is identified by the path to it. All else is the
// owner's: which ranks hold the blocks or which requests pass through, how siblings are listed,
// when two chains are merged. The owner derives from `Chains` and supplies
//
//   Node: parent, first_hash(), chain_hashes(), chain_len()
//   link(parent, id)       makes a node a child of another
//   replace_child(old, id) puts a node in another's place among its siblings
//
// Invariants
//   1. siblings differ in their first hash;
//   2. `children_` has every node but a pinned root, under (parent, first hash).
//
// Costs: child O(1), one probe; descend O(blocks matched), over plain arrays, and one probe a node;
// split and merge two to three table entries, besides the owner's work.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/arena.hpp"
#include "base/keyed.hpp"

namespace kvd {

using NodeId = uint32_t;

constexpr uint32_t kNone = 0xffffffffu;

// The length of the common prefix of `n` hashes. Compares eight at a time, because a loop that may
// end at each element is not vectorised.
inline size_t equal_length(const uint64_t* a, const uint64_t* b, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    uint64_t differ = 0;
    for (size_t k = i; k < i + 8; ++k) differ |= a[k] ^ b[k];
    if (differ != 0) break;
  }
  while (i < n && a[i] == b[i]) ++i;
  return i;
}

template <class Owner, class Node>
class Chains {
 public:
  const Node& node(NodeId id) const { return nodes_[id]; }

  NodeId child(NodeId parent, uint64_t first) const {
    const uint32_t at = children_.find(child_hash(parent, first), [&](NodeId id) {
      return nodes_[id].parent == parent && nodes_[id].first_hash() == first;
    });
    return at == ProbeTable::kEmpty ? kNone : children_.at(at);
  }

  // Descends from `above` for at most n blocks. Calls visit(node, start, met) for each chain on the
  // path: `start` blocks of the prompt come before it, and `met` of its blocks match. Returns how
  // many blocks match in all. next(above, start) returns the child that begins with block `start`,
  // or kNone; equal(node, start, most) returns how many of the chain's first `most` blocks match
  // the prompt from `start` on, which is one at least.
  //
  //   a b c f y   visits   4: start 0, met 3      5: start 3, met 1; it has no child y
  //   a b z                4: start 0, met 2      ends inside the chain
  template <class Next, class Equal, class Visit>
  size_t descend(NodeId above, size_t n, Next&& next, Equal&& equal, Visit&& visit) const {
    size_t start = 0;
    while (start < n) {
      above = next(above, start);
      if (above == kNone) break;
      const Node& node = nodes_[above];
      const size_t most = std::min<size_t>(node.chain_len(), n - start);
      const size_t met = equal(node, start, most);
      visit(above, start, met);
      start += met;
      if (met < node.chain_len()) break;
    }
    return start;
  }

  // Descends by comparing the prompt's hashes with those of the chains.
  template <class Visit>
  size_t descend(NodeId above, const uint64_t* hashes, size_t n, Visit&& visit) const {
    return descend(
        above, n, [&](NodeId parent, size_t start) { return child(parent, hashes[start]); },
        [&](const Node& node, size_t start, size_t most) {
          return equal_length(node.chain_hashes(), hashes + start, most);
        },
        visit);
  }

  bool is_spread() const { return children_.is_spread(*this); }

  // The hash of a node's key; `children_` calls it.
  uint64_t hash_of(NodeId id) const {
    return child_hash(nodes_[id].parent, nodes_[id].first_hash());
  }

 protected:
  explicit Chains(uint32_t pinned) : nodes_(pinned) {}

  void insert_child(NodeId id) { children_.insert(hash_of(id), id, *this); }

  void erase_child(NodeId id) {
    const uint32_t at = children_.index_of(hash_of(id), id);
    children_.erase(at, *this);
  }

  // Splits a node in two: `head`, a new node, becomes its parent. `divide` divides the chain.
  //
  //   P ── id [a b c d e] ── kids   =>   P ── head [a b] ──── id [c d e] ── kids
  //
  // The tail keeps the id, so neither its children nor references to its end need to change.
  template <class Divide>
  void split_node(NodeId id, NodeId head, Divide&& divide) {
    erase_child(id);
    owner().replace_child(id, head);
    divide();
    owner().link(head, id);
    insert_child(head);
    insert_child(id);
  }

  // Merges a node with its only child, which keeps its id; the caller frees the node. `join` gives
  // the child both chains.
  //
  //   P ── id [a b] ──── below [c d e] ── kids   =>   P ── below [a b c d e] ── kids
  template <class Join>
  void merge_nodes(NodeId id, NodeId below, Join&& join) {
    erase_child(id);
    erase_child(below);
    join();
    owner().replace_child(id, below);
    insert_child(below);
  }

  Arena<Node> nodes_;
  ProbeTable children_;  // (parent, first hash) -> node

 private:
  Owner& owner() { return static_cast<Owner&>(*this); }
  uint64_t child_hash(NodeId parent, uint64_t first) const { return hash_(first, parent); }

  KeyedHash hash_;
};

}  // namespace kvd
