// A compressed radix tree over blocks, with the holders of every block.
//
// A node is a chain of consecutive blocks (base/chains.hpp), stored once:
//
//   root ──┬─ node 4  local  [ 91c0.. | 7ad2.. | 03fe.. | 55aa.. ]     4 blocks
//          │          block  [   12   |   13   |   14   |   15   ]
//          │          runs   DEVICE ──── {1,2,7} ──────│── {2} ──│     ends 3, 4
//          │                 HOST   ── {} ──│── {2} ──│                ends 1, 3
//          │             ├─ node 9   ...                               two ways to continue
//          │             └─ node 5   ...
//          └─ node 6  ...
//
// The path from the root is the prompt. Content alone (local hashes) decides the shape, so the
// index needs to know no engine's hash function. The runs (index/runs.hpp), not the shape, say who
// holds what, for each layer: a tier, or a window group of a tier.
//
// A block keeps its id for life, however splits and merges move it between chains; `blocks[id]`
// says where it is now. So the ranks' name tables never need rewriting.
//
// Invariants
//   1. blocks[n.block[i]] == (n, i) for every node n and i < n.len;
//   2. those of base/chains.hpp; a node other than the root has len >= 1;
//   3. a non-root node with exactly one child satisfies len + child.len > kMaxChain (else the two
//      would be one node), so churn cannot leave a trail of fragments;
//   4. the last block of a leaf is held on some layer (else it is trimmed);
//   5. those of index/runs.hpp;
//   6. a node's depth is the number of blocks before its chain, 0 below the root.
//
// Costs (blocks b in the chain, runs r of the node): child O(1); split, merge O(b), bounded by
// kMaxChain; edit of a range O(r); trim O(blocks freed).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/arena.hpp"
#include "base/chains.hpp"
#include "index/chain.hpp"
#include "index/ranksets.hpp"
#include "index/runs.hpp"

namespace kvd {

struct Block {
  uint64_t name;    // the engine hash under which it was first stored
  NodeId node;      // the node whose chain it is in
  uint32_t offset;  // its offset in that chain

  uint32_t& free_link() { return offset; }
};

struct Node {
  Chain chain;
  Runs runs;  // who holds its blocks
  NodeId parent = kNone;
  NodeId first_child = kNone;
  NodeId next = kNone;  // sibling
  NodeId prev = kNone;
  uint32_t children = 0;
  uint32_t depth = 0;  // blocks before the chain

  uint64_t first_hash() const { return chain.local()[0]; }
  const uint64_t* chain_hashes() const { return chain.local(); }
  uint32_t chain_len() const { return chain.len(); }

  uint32_t& free_link() { return next; }
};

// A position in the tree: the block before `offset` of `node` is the last one matched.
struct Position {
  NodeId node;
  uint32_t offset;
};

// Keeps a traversal valid through mutations (see `Tree::watch`).
struct Watcher {
  NodeId next = kNone;  // the node to visit next, in preorder
  uint64_t moves = 0;   // how often a mutation has changed `next`
};

class Tree : public Chains<Tree, Node> {
 public:
  static constexpr NodeId kRoot = 0;
  // Longest chain, in blocks: bounds the cost of a split or a merge to some microseconds while one
  // node's overhead (~150 bytes) stays below one byte a block.
  static constexpr uint32_t kMaxChain = 1024;
  // Blocks of a partition, at least 40 GB. The names tables use one bit of a block id for
  // themselves, and a probe table of this many entries still has a 32-bit number of slots.
  static constexpr uint32_t kMaxBlocks = 1u << 30;

  Tree() : Chains(1), blocks_(0, kMaxBlocks) { nodes_.take(); }

  const Block& block(BlockId id) const { return blocks_[id]; }
  RankSets& sets() { return runs_.sets(); }
  const RankSets& sets() const { return runs_.sets(); }
  uint32_t node_count() const { return nodes_.live() - 1; }
  uint32_t block_count() const { return blocks_.live(); }
  uint32_t block_end() const { return blocks_.end(); }

  static Position root() { return {kRoot, 0}; }
  Position after(BlockId id) const { return {blocks_[id].node, blocks_[id].offset + 1}; }

  // The block before this one on its path, or kNone at the start of a path.
  BlockId parent_of(BlockId id) const {
    const Block& b = blocks_[id];
    const Node& n = nodes_[b.node];
    if (b.offset != 0) return n.chain.block()[b.offset - 1];
    if (n.parent == kRoot) return kNone;
    const Chain& above = nodes_[n.parent].chain;
    return above.block()[above.len() - 1];
  }

  // Walks along `locals` from `at` as far as the tree goes; writes the ids of the blocks met and
  // returns their number. `at` then lies behind the last of them.
  //
  //   locals c d x, `at` is │      P ── [a b│c] ── [d e]   =>   P ── [a b c] ── [d│e]     2 met
  size_t walk(Position& at, const uint64_t* locals, size_t n, BlockId* out) const {
    const Chain& chain = nodes_[at.node].chain;
    const size_t most = std::min<size_t>(chain.len() - at.offset, n);
    const size_t here = equal_length(chain.local() + at.offset, locals, most);
    std::copy_n(chain.block() + at.offset, here, out);
    at.offset += static_cast<uint32_t>(here);
    if (at.offset < chain.len()) return here;
    return here +
           descend(at.node, locals + here, n - here, [&](NodeId id, size_t start, size_t met) {
             std::copy_n(nodes_[id].chain.block(), met, out + here + start);
             at = {id, static_cast<uint32_t>(met)};
           });
  }

  // Adds blocks behind `at`, where `walk` has just ended; nobody holds them yet.
  //
  //   at the end of a leaf    P ── [a b]             =>  P ── [a b x y]
  //   behind other children   P ── [a b] ── kids     =>  P ── [a b] ──┬─ kids
  //                                                                   └─ [x y]
  //   inside a chain          P ── [a b c] ── kids   =>  P ── [a b] ──┬─ [c] ── kids
  //                                                                   └─ [x y]
  void grow(Position at, const uint64_t* locals, const uint64_t* names, size_t n, BlockId* out) {
    if (n == 0) return;
    NodeId tip = at.node;
    const bool branches = at.offset < nodes_[tip].chain.len();
    if (branches) tip = split(tip, at.offset);
    const NodeId head = tip;
    size_t i = 0;
    if (tip != kRoot && nodes_[tip].children == 0) i = extend(tip, locals, names, n, out);
    while (i < n) {
      tip = add_child(tip);
      const size_t room = n - i < kMaxChain ? n - i : kMaxChain;
      nodes_[tip].chain.reserve(static_cast<uint32_t>(room));
      nodes_[tip].chain.push(locals[i], new_block(tip, 0, names[i]));
      out[i] = nodes_[tip].chain.block()[0];
      insert_child(tip);
      ++i;
      i += extend(tip, locals + i, names + i, n - i, out + i);
    }
    if (!branches) return;
    // The branch has split a chain, which may have been too long to be merged with its neighbours;
    // its two parts may be short enough.
    merge_with_only_child(nodes_[head].parent);
    merge_with_only_child(at.node);
  }

  bool held(BlockId id, LayerId layer, RankId rank) const {
    const Block& b = blocks_[id];
    return sets().contains(RunLists::set_at(nodes_[b.node].runs, layer, b.offset), rank);
  }

  // These change the holders of blocks of a chain as `RunLists` says. After a release the caller
  // trims.
  template <class Already>
  uint32_t hold(NodeId id, LayerId layer, uint32_t from, uint32_t to, RankId rank,
                Already&& already) {
    return runs_.hold(nodes_[id].runs, layer, from, to, rank, already);
  }
  void release(NodeId id, LayerId layer, uint32_t from, uint32_t to, RankId rank) {
    runs_.release(nodes_[id].runs, layer, from, to, rank);
  }
  template <class Lost>
  void release_chain(NodeId id, LayerMask mask, RankId rank, Lost&& lost) {
    runs_.release_all(nodes_[id].runs, mask, rank, lost);
  }

  // Frees what nobody holds at the end of the path through `id`, and merges chains that can now be
  // one. Calls `forget(block id)` for every block before it is freed.
  //
  //   the end of a leaf     P ── [a b c d]  {7} to 2    =>  P ── [a b]
  //   a whole leaf          P ── [a b] ──┬─ [c d]       =>  P ── [a b c d]
  //                                      └─ [x]  nobody     (further up, if [a b] is a leaf now)
  //   a chain before kids   stays, since the chains behind it need the path
  template <class Forget>
  void trim(NodeId id, Forget&& forget) {
    while (id != kRoot) {
      Node& n = nodes_[id];
      if (n.children == 0) {
        const uint32_t keep = RunLists::held_length(n.runs);
        if (keep == n.chain.len()) break;
        for (uint32_t i = keep; i < n.chain.len(); ++i) {
          forget(n.chain.block()[i]);
          blocks_.give(n.chain.block()[i]);
        }
        const NodeId parent = n.parent;
        if (keep == 0) {
          remove_leaf(id);
          id = parent;
          continue;
        }
        n.chain.truncate(keep);
        if (parent != kRoot) merge_with_only_child(parent);
        break;
      }
      merge_with_only_child(id);
      break;
    }
  }

  // True while `id` names a node. Ids of freed nodes may be passed too, until they are reused.
  bool alive(NodeId id) const { return id < nodes_.end() && nodes_[id].parent != kNone; }

  // The node of a block. For a freed block: any node, or kNone.
  NodeId node_of(BlockId id) const {
    if (id >= blocks_.end()) return kNone;
    return alive(blocks_[id].node) ? blocks_[id].node : kNone;
  }

  NodeId successor(NodeId id) const {
    if (nodes_[id].first_child != kNone) return nodes_[id].first_child;
    while (id != kRoot && nodes_[id].next == kNone) id = nodes_[id].parent;
    return id == kRoot ? kNone : nodes_[id].next;
  }

  // Begins a traversal: `next` is the first node. Mutations may come between its steps: it may then
  // see a block twice, but never misses one that was there all the time.
  void watch(Watcher* w) {
    w->next = successor(kRoot);
    watchers_.push_back(w);
  }
  void unwatch(Watcher* w) {
    for (size_t i = 0; i < watchers_.size(); ++i) {
      if (watchers_[i] == w) watchers_.erase(watchers_.begin() + static_cast<std::ptrdiff_t>(i--));
    }
  }

  // Frees one piece of unused memory; false when there is none.
  bool shrink() { return blocks_.shrink() || nodes_.shrink() || sets().shrink(); }

  size_t bytes() const {
    return nodes_.bytes() + blocks_.bytes() + children_.bytes() + sets().bytes() + chain_bytes();
  }

 private:
  friend class Chains<Tree, Node>;

  size_t chain_bytes() const {  // an estimate: the exact sum would need a walk over all nodes
    return size_t{blocks_.live()} * (sizeof(uint64_t) + sizeof(BlockId)) +
           size_t{nodes_.live()} * sizeof(Run);
  }

  BlockId new_block(NodeId node, uint32_t offset, uint64_t name) {
    const BlockId id = blocks_.take();
    blocks_[id] = {name, node, offset};
    return id;
  }

  size_t extend(NodeId tip, const uint64_t* locals, const uint64_t* names, size_t n, BlockId* out) {
    Chain& chain = nodes_[tip].chain;
    size_t i = 0;
    for (; i < n && chain.len() < kMaxChain; ++i) {
      out[i] = new_block(tip, chain.len(), names[i]);
      chain.push(locals[i], out[i]);
    }
    return i;
  }

  NodeId add_child(NodeId parent) {
    const NodeId id = nodes_.take();
    link(parent, id);
    nodes_[id].depth = nodes_[parent].depth + nodes_[parent].chain.len();
    return id;
  }

  //   P: first_child 9, 9 <=> 5     link(P, 4)          =>   P: first_child 4, 4 <=> 9 <=> 5
  //                                 unlink(9)           =>   P: first_child 5
  void link(NodeId parent, NodeId id) {
    Node& p = nodes_[parent];
    Node& n = nodes_[id];
    n.parent = parent;
    n.prev = kNone;
    n.next = p.first_child;
    if (n.next != kNone) nodes_[n.next].prev = id;
    p.first_child = id;
    ++p.children;
  }

  void unlink(NodeId id) {
    Node& n = nodes_[id];
    Node& p = nodes_[n.parent];
    if (n.prev != kNone) nodes_[n.prev].next = n.next;
    if (n.next != kNone) nodes_[n.next].prev = n.prev;
    if (p.first_child == id) p.first_child = n.next;
    --p.children;
  }

  // Puts `id` in the place of `old` among its siblings, so that no traversal passes over it. The
  // caller links `old` anew, or frees it.
  //
  //   P: first_child 9, 9 <=> 5     replace_child(9, 4)   =>   P: first_child 4, 4 <=> 5
  void replace_child(NodeId old, NodeId id) {
    const Node& o = nodes_[old];
    Node& n = nodes_[id];
    n.parent = o.parent;
    n.prev = o.prev;
    n.next = o.next;
    if (n.prev != kNone) nodes_[n.prev].next = id;
    if (n.next != kNone) nodes_[n.next].prev = id;
    if (nodes_[n.parent].first_child == old) nodes_[n.parent].first_child = id;
  }

  void free_node(NodeId id) {
    Node& n = nodes_[id];
    n.chain.truncate(0);
    Runs().swap(n.runs);
    n.parent = n.first_child = n.next = n.prev = kNone;
    n.children = 0;
    nodes_.give(id);
    children_.shrink(*this);
  }

  void remove_leaf(NodeId id) {
    for (Watcher* w : watchers_) {
      if (w->next == id) {
        w->next = successor(id);
        ++w->moves;
      }
    }
    erase_child(id);
    unlink(id);
    runs_.clear(nodes_[id].runs);
    free_node(id);
  }

  void set_positions(NodeId id) {
    const Chain& chain = nodes_[id].chain;
    for (uint32_t i = 0; i < chain.len(); ++i) {
      Block& b = blocks_[chain.block()[i]];
      b.node = id;
      b.offset = i;
    }
  }

  // Splits a node behind its first `at` blocks and returns the head, a new node. A traversal that
  // had the tail as its next node gets the head instead, or it would miss those blocks.
  //
  //   P ── 9 [a b c d e] depth 3 ── kids   =>   P ── 4 [a b] depth 3 ──── 9 [c d e] depth 5 ── kids
  //   blocks  c: (9, 2)                         c: (9, 0)     a, b: in 4, with the same offsets
  //   watcher next 9                            next 4
  NodeId split(NodeId id, uint32_t at) {
    const NodeId head = nodes_.take();
    Node& n = nodes_[id];
    Node& h = nodes_[head];
    split_node(id, head, [&] {
      h.chain.append(n.chain, 0, at);
      Chain tail;
      tail.append(n.chain, at, n.chain.len());
      n.chain.swap(tail);
      runs_.split(n.runs, h.runs, at);
      h.depth = n.depth;
      n.depth += at;
    });
    set_positions(head);
    set_positions(id);
    for (Watcher* w : watchers_) {
      if (w->next == id) {
        w->next = head;
        ++w->moves;
      }
    }
    return head;
  }

  // Merges a node with its only child, unless the two together exceed kMaxChain.
  //
  //   P ── 4 [a b] depth 3 ──── 9 [c d e] depth 5 ── kids   =>   P ── 9 [a b c d e] depth 3 ── kids
  //   blocks  a: (4, 0)   c: (9, 0)                              a: (9, 0)   c: (9, 2)
  //   watcher next 4 or 9                                        next 9
  void merge_with_only_child(NodeId id) {
    Node& n = nodes_[id];
    if (id == kRoot || n.children != 1) return;
    const NodeId below = n.first_child;
    Node& c = nodes_[below];
    if (n.chain.len() + c.chain.len() > kMaxChain) return;
    for (Watcher* w : watchers_) {
      // If only the child was still to come, the head's blocks are visited a second time.
      if (w->next == id) w->next = below;
      if (w->next == below) ++w->moves;
    }
    merge_nodes(id, below, [&] {
      const uint32_t shift = n.chain.len();
      Chain whole;
      whole.append(n.chain, 0, shift);
      whole.append(c.chain, 0, c.chain.len());
      c.chain.swap(whole);
      runs_.merge(n.runs, c.runs, shift);
      c.depth = n.depth;
    });
    set_positions(below);
    free_node(id);
  }

  Arena<Block> blocks_;
  RunLists runs_;
  std::vector<Watcher*> watchers_;
};

}  // namespace kvd
