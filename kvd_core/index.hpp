// Who holds which block: the radix tree, the ranks' names, and the rules that join them.
//
//   rank 7 ── names: engine hash 0xa1 ─┐
//   rank 9 ── names: engine hash 0x5c ─┴─> block 12 ── tree: .. ─ block 11 ─ block 12 ─ ..
//                                          DEVICE {7, 9}   HOST {9}
//
// Presence is kept per rank and layer. A layer is a tier, a window group of a tier (hybrid
// models keep fewer blocks in those), or the memory of recently dropped names (kGhostLayer).
//
// The rules, with their reasons (the engines' traffic they come from is in docs/accuracy.md):
//   - content decides: the same tokens under the same prefix are one block whatever the engines
//     call it; what a rank calls it is that rank's affair;
//   - several names of one rank may mean one block; it is held until the last name goes;
//   - a Stored whose blocks are all held already is a re-announcement and changes nothing: an
//     engine reuses what it holds. Two kinds of it are second copies and take a second removal:
//     a single block below a parent (an engine computes a prompt's last block again), and any of
//     a hybrid model's (it computes again what a window group has dropped);
//   - a name that comes back with other content means the old content is gone;
//   - a block whose parent is unknown, or that is only named, is parked until what it needs
//     arrives; parked blocks are bounded, the oldest is dropped first and counted;
//   - an unknown name in a removal is normal traffic: counted, no effect.
//
// Invariants (beyond those of tree.hpp and names.hpp)
//   1. rank r is in the holders of block b on layer l exactly when some name of r means b and
//      has l; `shared_[r, b, l]` counts the further such names;
//   2. `copies_[r, name, l]` counts the further copies of a name that has l;
//   3. a name whose only layer is the ghost layer is in its rank's `ghosts` ring;
//   4. every parked block of a live rank waits: its name is unknown and so is its parent or its
//      content.
//
// Costs: store O(blocks + runs touched), remove O(runs of the node) a block, clear O(names of
// the rank), all amortised; no operation depends on the number of ranks except through the size
// of the sets it changes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "arena.hpp"
#include "names.hpp"
#include "ranksets.hpp"
#include "tree.hpp"

namespace kvd {

constexpr LayerId kTierLayers = 4;  // DEVICE, HOST, DISK, EXTERNAL: the layer is the tier
constexpr LayerId kGhostLayer = 4;
constexpr LayerId kFirstGroupLayer = 5;
constexpr LayerId kMaxLayers = 32;  // bits of a LayerMask; 27 (tier, group) pairs per partition
constexpr LayerMask kAllLayers = 0xffffffffu;

// Parked blocks of one partition. 64 Ki blocks are ~8 MB: minutes of a broken stream, not hours.
constexpr size_t kMaxParked = 65536;
// Dropped names remembered per rank that offloads: an offload event names its block by hash
// alone and may come after the device copy went; engines keep them a few steps apart.
constexpr size_t kMaxGhosts = 4096;

// What happened, in blocks unless said otherwise. Plain totals since the index was made.
struct Tally {
  uint64_t stored = 0;           // gained by a rank on a layer
  uint64_t refreshed = 0;        // announced again, held already
  uint64_t copies = 0;           // second and further copies
  uint64_t rebound = 0;          // names that came back with other content
  uint64_t removed = 0;          // lost by a rank on a layer
  uint64_t removed_copies = 0;   // removals that a further copy survived
  uint64_t removed_unknown = 0;  // removals of names not held
  uint64_t parked = 0;           // set aside: parent or content unknown
  uint64_t unparked = 0;         // placed after all
  uint64_t parked_dropped = 0;   // the bound on parked blocks dropped the oldest
  uint64_t self_references = 0;  // events refused: a name repeated, or equal to its parent
};

struct Window {
  LayerId layer;
  uint32_t blocks;  // how many blocks behind a reusable prefix's end the group must hold
};

struct Rank {
  Names names;
  std::vector<Window> windows;
  std::deque<uint64_t> ghosts;
  uint32_t dp_rank = 0;
  uint32_t parked = 0;
  uint32_t sweep_at = 0;  // where the sweep of a retired rank goes on
  bool live = false;      // false: retired, invisible, waiting for its sweep
  bool listed = false;    // registered, so it is shown without a match too
  bool salted = false;    // its stream says which blocks carry a cache salt
  bool offloads = false;  // its stream names lower-tier blocks by hash alone
  bool settling = false;  // took blocks from a dump; its stream may tell of them once more
};

struct Store {
  const uint64_t* names;
  const uint64_t* locals;
  uint32_t n;
  bool has_parent;
  uint64_t parent;
  LayerId layer;
  uint64_t term;  // what the local hashes' seed has inherited from the prompt's first block, or 0
};

class Index {
 public:
  explicit Index(uint32_t block_size)
      : block_size_(block_size), records_(0, NameKeys::kRecordBit - 16) {}

  uint32_t block_size() const { return block_size_; }
  const Tree& tree() const { return tree_; }
  Tree& tree() { return tree_; }
  const Tally& tally() const { return tally_; }
  uint64_t held(LayerId layer) const { return held_[layer]; }
  NameKeys keys() const { return {tree_, records_}; }

  // ---- ranks

  RankId add_rank(uint32_t dp_rank) {
    RankId id = 0;
    if (!free_ranks_.empty()) {
      id = free_ranks_.back();
      free_ranks_.pop_back();
    } else {
      id = static_cast<RankId>(ranks_.size());
      ranks_.emplace_back();
    }
    ranks_[id].dp_rank = dp_rank;
    ranks_[id].live = true;
    return id;
  }

  Rank& rank(RankId id) { return ranks_[id]; }
  const Rank& rank(RankId id) const { return ranks_[id]; }
  RankId rank_end() const { return static_cast<RankId>(ranks_.size()); }

  // The rank stops counting at once; `sweep` takes its blocks out later, in slices.
  void retire_rank(RankId id) {
    drop_parked(id, kAllLayers);
    ranks_[id].live = false;
    retired_.push_back(id);
  }

  bool has_retired() const { return !retired_.empty(); }

  // Takes at most about `budget` blocks of retired ranks out; false when there is none left.
  bool sweep(uint32_t budget) {
    while (!retired_.empty() && budget != 0) {
      const RankId id = retired_.back();
      budget -= clear_names(id, kAllLayers, budget);
      if (ranks_[id].names.size() == 0) {
        retired_.pop_back();
        ranks_[id] = Rank();
        free_ranks_.push_back(id);
      }
    }
    return !retired_.empty();
  }

  // ---- layers

  // The layer of a (tier, group) pair beside the main group, or kNone when all are in use.
  LayerId group_layer(uint32_t tier, uint32_t group) {
    for (size_t i = 0; i < group_layers_.size(); ++i) {
      if (group_layers_[i] == std::make_pair(tier, group)) {
        return kFirstGroupLayer + static_cast<LayerId>(i);
      }
    }
    if (kFirstGroupLayer + group_layers_.size() == kMaxLayers) return kNone;
    group_layers_.emplace_back(tier, group);
    return kFirstGroupLayer + static_cast<LayerId>(group_layers_.size()) - 1;
  }

  uint32_t tier_of(LayerId layer) const {
    if (layer < kTierLayers) return layer;
    return layer == kGhostLayer ? kNone : group_layers_[layer - kFirstGroupLayer].first;
  }

  // Every layer of one tier, its groups included.
  LayerMask tier_mask(uint32_t tier) const {
    LayerMask mask = 1u << tier;
    for (size_t i = 0; i < group_layers_.size(); ++i) {
      if (group_layers_[i].first == tier) mask |= 1u << (kFirstGroupLayer + i);
    }
    return mask;
  }

  void set_window(RankId id, LayerId layer, uint32_t blocks) {
    for (Window& window : ranks_[id].windows) {
      if (window.layer == layer) {
        window.blocks = blocks;
        return;
      }
    }
    ranks_[id].windows.push_back({layer, blocks});
  }

  // ---- blocks

  // Blocks in path order: names[i] is what the rank calls the block with content locals[i].
  void store(RankId id, const Store& s) {
    if (s.n == 0) return;
    if (refers_to_itself(s)) {
      ++tally_.self_references;
      return;
    }
    Position at = Tree::root();
    if (s.has_parent) {
      const uint32_t slot = ranks_[id].names.find(s.parent, keys());
      if (slot == Names::kAbsent) {
        park_run(id, s);
        return;
      }
      at = tree_.after(keys().block(ranks_[id].names.value(slot)));
    }
    place(id, s, at);
    if (ranks_[id].parked != 0) {
      for (uint32_t i = 0; i < s.n; ++i) work_.push_back(s.names[i]);
      settle(id);
    }
  }

  // Blocks known by name alone (offload events, window groups). Held on `layer` once the name
  // means something.
  void store_named(RankId id, const uint64_t* names, uint32_t n, LayerId layer, bool has_parent) {
    const bool copy = is_copy(id, n, has_parent);
    for (uint32_t i = 0; i < n; ++i) {
      const uint32_t slot = ranks_[id].names.find(names[i], keys());
      if (slot == Names::kAbsent) {
        park(id, names[i], layer, nullptr);
      } else if ((keys().layers(ranks_[id].names.value(slot)) >> layer & 1) == 0) {
        gain_name(id, slot, layer);
      } else if (copy) {
        add_copy(id, names[i], layer);
      } else {
        ++tally_.refreshed;
      }
    }
  }

  void remove(RankId id, uint64_t name, LayerId layer) {
    const uint32_t slot = ranks_[id].names.find(name, keys());
    const uint32_t value = slot == Names::kAbsent ? Names::kAbsent : ranks_[id].names.value(slot);
    if (value == Names::kAbsent || (keys().layers(value) >> layer & 1) == 0) {
      if (!unpark(id, name, layer)) ++tally_.removed_unknown;
      return;
    }
    if (take_copy(id, name, layer)) {
      ++tally_.removed_copies;
      return;
    }
    const BlockId block = keys().block(value);
    const LayerMask left = keys().layers(value) & ~(1u << layer);
    if (left != 0) {
      ranks_[id].names.set_layers(slot, left, keys(), records_);
    } else if (ranks_[id].offloads) {
      haunt(id, slot, name, block);
    } else {
      ranks_[id].names.erase(slot, keys(), records_);
      ranks_[id].names.shrink(keys());
    }
    lose(id, block, layer);
    trim(tree_.block(block).node);
    if (ranks_[id].ghosts.size() > kMaxGhosts) lay_oldest_ghost(id);
  }

  // Whether nothing is known of the rank's cache: no block, no copy, nothing set aside.
  bool holds_nothing(RankId id) const {
    return ranks_[id].names.size() == 0 && ranks_[id].parked == 0;
  }

  // Drops everything the rank holds on the layers of `mask`.
  void clear(RankId id, LayerMask mask) {
    drop_parked(id, mask);
    // A name that loses its last layer to a clear is forgotten: nothing may refer to it later.
    clear_names(id, mask | 1u << kGhostLayer, kNone);
    ranks_[id].ghosts.clear();
  }

  // The inherited hash term of the block that the rank calls `name`, 0 without one.
  uint64_t term_of(RankId id, uint64_t name) const {
    if (terms_.empty()) return 0;
    const uint32_t slot = ranks_[id].names.find(name, keys());
    if (slot == Names::kAbsent) return 0;
    const auto it = terms_.find(keys().block(ranks_[id].names.value(slot)));
    return it == terms_.end() ? 0 : it->second;
  }

  size_t parked_count() const { return parked_.size(); }
  size_t record_count() const { return records_.live(); }
  size_t exception_count() const { return copies_.size() + shared_.size() + terms_.size(); }

  size_t bytes() const {
    size_t total = tree_.bytes() + records_.bytes() + ranks_.capacity() * sizeof(Rank);
    for (const Rank& r : ranks_) total += r.names.bytes() + r.ghosts.size() * sizeof(uint64_t);
    return total + parked_.size() * kParkedBytes + exception_count() * kExceptionBytes;
  }

 private:
  friend class Verifier;

  struct Key {  // of a name or a block, within a rank and a layer
    uint64_t id;
    RankId rank;
    LayerId layer;
    bool operator==(const Key& o) const { return id == o.id && rank == o.rank && layer == o.layer; }
  };
  struct KeyHash {
    size_t operator()(const Key& k) const {
      return mix64(k.id ^ mix64((uint64_t{k.rank} << 32 | k.layer) + 1));
    }
  };
  struct Parked {
    bool has_content;  // false: only named so far, `parent`, `local` and `term` mean nothing
    uint64_t parent;
    uint64_t local;
    uint64_t term;
    LayerMask layers;
    uint64_t stamp;
  };

  static constexpr size_t kParkedBytes = 160;    // two hash nodes and a queue entry
  static constexpr size_t kExceptionBytes = 48;  // one hash node

  bool refers_to_itself(const Store& s) {
    if (s.n == 1) return s.has_parent && s.names[0] == s.parent;
    sorted_.assign(s.names, s.names + s.n);
    if (s.has_parent) sorted_.push_back(s.parent);
    std::sort(sorted_.begin(), sorted_.end());
    return std::adjacent_find(sorted_.begin(), sorted_.end()) != sorted_.end();
  }

  // Stores a run whose place is known.
  void place(RankId id, const Store& s, Position at) {
    ids_.resize(s.n);
    Position tip = at;
    size_t met = tree_.walk(tip, s.locals, s.n, ids_.data());
    if (forget_other_content(id, s, met)) {
      // Forgetting may have freed blocks of the path below `at`; the parent is held, so `at`
      // names a block that lives, but its chain may have moved.
      tip = s.has_parent ? tree_.after(block_of(id, s.parent)) : Tree::root();
      met = tree_.walk(tip, s.locals, s.n, ids_.data());
    }
    tree_.grow(tip, s.locals + met, s.names + met, s.n - met, ids_.data() + met);
    name_blocks(id, s);
  }

  BlockId block_of(RankId id, uint64_t name) const {
    return keys().block(ranks_[id].names.value(ranks_[id].names.find(name, keys())));
  }

  // Names that mean another block than the one they are stored with now lose it.
  bool forget_other_content(RankId id, const Store& s, size_t met) {
    bool any = false;
    for (uint32_t i = 0; i < s.n; ++i) {
      const uint32_t slot = ranks_[id].names.find(s.names[i], keys());
      if (slot == Names::kAbsent) continue;
      const uint32_t value = ranks_[id].names.value(slot);
      if (i < met && keys().block(value) == ids_[i]) continue;
      ++tally_.rebound;
      forget_name(id, slot);
      any = true;
    }
    return any;
  }

  // Erases a name with all it stands for.
  void forget_name(RankId id, uint32_t slot) {
    const uint32_t value = ranks_[id].names.value(slot);
    const uint64_t name = keys().name(value);
    const BlockId block = keys().block(value);
    const LayerMask layers = keys().layers(value);
    ranks_[id].names.erase(slot, keys(), records_);
    for (LayerId layer = 0; layer < kMaxLayers; ++layer) {
      if ((layers >> layer & 1) == 0) continue;
      copies_.erase({name, id, layer});
      lose(id, block, layer);
    }
    trim(tree_.block(block).node);
  }

  // Enters the names of placed blocks and makes the rank their holder on the store's layer.
  void name_blocks(RankId id, const Store& s) {
    Rank& rank = ranks_[id];
    gained_.assign(s.n, 0);
    uint32_t gained = 0;
    for (uint32_t i = 0; i < s.n; ++i) {
      if (s.term != 0) terms_[ids_[i]] = s.term;
      const uint32_t slot = rank.names.find(s.names[i], keys());
      if (slot == Names::kAbsent) {
        rank.names.insert(s.names[i], ids_[i], 1u << s.layer, keys(), records_);
      } else if ((keys().layers(rank.names.value(slot)) >> s.layer & 1) == 0) {
        add_layer(id, slot, s.layer);
      } else {
        continue;
      }
      gained_[i] = 1;
      ++gained;
    }
    if (gained == 0 && !is_copy(id, s.n, s.has_parent)) {
      tally_.refreshed += s.n;
      return;
    }
    for (uint32_t i = 0; i < s.n; ++i) {
      if (gained_[i] == 0) add_copy(id, s.names[i], s.layer);
    }
    hold_gained(id, s);
  }

  // Whether a Stored of blocks that are all held already tells of second copies. What came with a
  // dump is told again by the events that made it; counted twice it would outlive its removal.
  bool is_copy(RankId id, uint32_t n, bool has_parent) const {
    if (ranks_[id].settling) return false;
    return (n == 1 && has_parent) || !ranks_[id].windows.empty();
  }

  // Blocks of one chain that were gained together change its runs in one edit.
  void hold_gained(RankId id, const Store& s) {
    uint32_t i = 0;
    while (i < s.n) {
      if (gained_[i] == 0) {
        ++i;
        continue;
      }
      const Block first = tree_.block(ids_[i]);
      uint32_t j = i + 1;
      while (j < s.n && gained_[j] != 0 && tree_.block(ids_[j]).node == first.node) ++j;
      hold(id, first.node, s.layer, first.offset, first.offset + (j - i));
      i = j;
    }
  }

  void hold(RankId id, NodeId node, LayerId layer, uint32_t from, uint32_t to) {
    const uint32_t gained = tree_.hold(node, layer, from, to, id, [&](uint32_t offset) {
      ++shared_[{tree_.node(node).chain.block()[offset], id, layer}];
    });
    if (layer != kGhostLayer) {
      held_[layer] += gained;
      tally_.stored += gained;
    }
  }

  void lose(RankId id, BlockId block, LayerId layer) {
    if (!shared_.empty()) {
      const auto it = shared_.find({block, id, layer});
      if (it != shared_.end()) {
        if (--it->second == 0) shared_.erase(it);
        return;
      }
    }
    const Block b = tree_.block(block);
    tree_.release(b.node, layer, b.offset, b.offset + 1, id);
    if (layer != kGhostLayer) {
      --held_[layer];
      ++tally_.removed;
    }
  }

  // Gives a known name one more layer; a ghost that is held again is no ghost.
  void add_layer(RankId id, uint32_t slot, LayerId layer) {
    const uint32_t value = ranks_[id].names.value(slot);
    LayerMask layers = keys().layers(value) | 1u << layer;
    if ((layers >> kGhostLayer & 1) != 0) {
      layers &= ~(1u << kGhostLayer);
      lose(id, keys().block(value), kGhostLayer);
    }
    ranks_[id].names.set_layers(slot, layers, keys(), records_);
  }

  void gain_name(RankId id, uint32_t slot, LayerId layer) {
    const BlockId block = keys().block(ranks_[id].names.value(slot));
    add_layer(id, slot, layer);
    const Block b = tree_.block(block);
    hold(id, b.node, layer, b.offset, b.offset + 1);
  }

  void add_copy(RankId id, uint64_t name, LayerId layer) {
    ++copies_[{name, id, layer}];
    ++tally_.copies;
  }

  bool take_copy(RankId id, uint64_t name, LayerId layer) {
    if (copies_.empty()) return false;
    const auto it = copies_.find({name, id, layer});
    if (it == copies_.end()) return false;
    if (--it->second == 0) copies_.erase(it);
    return true;
  }

  void trim(NodeId node) {
    tree_.trim(node, [&](BlockId block) {
      if (!terms_.empty()) terms_.erase(block);
    });
  }

  // ---- ghosts: names remembered after their last layer went

  void haunt(RankId id, uint32_t slot, uint64_t name, BlockId block) {
    ranks_[id].names.set_layers(slot, 1u << kGhostLayer, keys(), records_);
    const Block b = tree_.block(block);
    hold(id, b.node, kGhostLayer, b.offset, b.offset + 1);
    ranks_[id].ghosts.push_back(name);
  }

  void lay_oldest_ghost(RankId id) {
    const uint64_t name = ranks_[id].ghosts.front();
    ranks_[id].ghosts.pop_front();
    const uint32_t slot = ranks_[id].names.find(name, keys());
    if (slot == Names::kAbsent) return;
    if (keys().layers(ranks_[id].names.value(slot)) != 1u << kGhostLayer) return;
    forget_name(id, slot);
  }

  // ---- parked blocks

  // The parent is unknown. A block of the run that is known already keeps its place (an unknown
  // parent cannot contradict it), and what follows it has a parent after all.
  void park_run(RankId id, const Store& s) {
    Store one = s;
    for (uint32_t i = 0; i < s.n; ++i) {
      one.names = s.names + i;
      one.locals = s.locals + i;
      one.parent = i == 0 ? s.parent : s.names[i - 1];
      if (ranks_[id].names.find(s.names[i], keys()) != Names::kAbsent) {
        store_named(id, s.names + i, 1, s.layer, false);
        store(id, {s.names + i + 1, s.locals + i + 1, s.n - i - 1, true, s.names[i], s.layer, s.term});
        return;
      }
      park(id, s.names[i], s.layer, &one);
    }
  }

  // `content` is null when only the name is known.
  void park(RankId id, uint64_t name, LayerId layer, const Store* content) {
    const Key key{name, id, 0};
    auto it = parked_.find(key);
    if (it == parked_.end()) {
      it = parked_.emplace(key, Parked{false, 0, 0, 0, 0, ++stamp_}).first;
      order_.emplace_back(key, stamp_);
      ++ranks_[id].parked;
      ++tally_.parked;
    }
    Parked& p = it->second;
    p.layers |= 1u << layer;
    if (content != nullptr && !p.has_content) {
      p.has_content = true;
      p.parent = content->parent;
      p.local = content->locals[0];
      p.term = content->term;
      waiting_.emplace(Key{content->parent, id, 0}, name);
    }
    bound_parked();
  }

  void bound_parked() {
    while (parked_.size() > kMaxParked) {
      const auto it = parked_.find(order_.front().first);
      if (it != parked_.end() && it->second.stamp == order_.front().second) {
        forget_parked(it);
        ++tally_.parked_dropped;
      }
      order_.pop_front();
    }
    // Entries of blocks placed meanwhile are dropped from the queue before they outnumber it.
    if (order_.size() > 2 * parked_.size() + 64) {
      std::deque<std::pair<Key, uint64_t>> kept;
      for (const auto& entry : order_) {
        const auto it = parked_.find(entry.first);
        if (it != parked_.end() && it->second.stamp == entry.second) kept.push_back(entry);
      }
      order_.swap(kept);
    }
  }

  void forget_parked(std::unordered_map<Key, Parked, KeyHash>::iterator it) {
    const Key key = it->first;
    if (it->second.has_content) {
      const auto range = waiting_.equal_range(Key{it->second.parent, key.rank, 0});
      for (auto w = range.first; w != range.second; ++w) {
        if (w->second == key.id) {
          waiting_.erase(w);
          break;
        }
      }
    }
    --ranks_[key.rank].parked;
    parked_.erase(it);
  }

  bool unpark(RankId id, uint64_t name, LayerId layer) {
    if (ranks_[id].parked == 0) return false;
    const auto it = parked_.find({name, id, 0});
    if (it == parked_.end() || (it->second.layers >> layer & 1) == 0) return false;
    it->second.layers &= ~(1u << layer);
    if (it->second.layers == 0) forget_parked(it);
    return true;
  }

  void drop_parked(RankId id, LayerMask mask) {
    if (ranks_[id].parked == 0) return;
    for (auto it = parked_.begin(); it != parked_.end();) {
      const auto here = it++;
      if (here->first.rank != id) continue;
      here->second.layers &= ~mask;
      if (here->second.layers == 0) forget_parked(here);
    }
  }

  // Places what waited for the names in `work_`, and what waited for that in turn.
  void settle(RankId id) {
    while (!work_.empty() && ranks_[id].parked != 0) {
      const uint64_t name = work_.back();
      work_.pop_back();
      settle_layers(id, name);
      while (true) {
        const auto child = waiting_.find(Key{name, id, 0});
        if (child == waiting_.end()) break;
        settle_child(id, name, child->second);
      }
    }
    work_.clear();
  }

  // A parked block whose name has been placed by another event only adds its layers.
  void settle_layers(RankId id, uint64_t name) {
    const auto it = parked_.find({name, id, 0});
    if (it == parked_.end()) return;
    const LayerMask layers = it->second.layers;
    forget_parked(it);
    ++tally_.unparked;
    for (LayerId layer = 0; layer < kMaxLayers; ++layer) {
      if ((layers >> layer & 1) == 0) continue;
      const uint32_t slot = ranks_[id].names.find(name, keys());
      if ((keys().layers(ranks_[id].names.value(slot)) >> layer & 1) == 0) gain_name(id, slot, layer);
    }
  }

  void settle_child(RankId id, uint64_t parent, uint64_t name) {
    const auto it = parked_.find({name, id, 0});
    const Parked p = it->second;
    forget_parked(it);
    ++tally_.unparked;
    for (LayerId layer = 0; layer < kMaxLayers; ++layer) {
      if ((p.layers >> layer & 1) == 0) continue;
      const Store s{&name, &p.local, 1, true, parent, layer, p.term};
      place(id, s, tree_.after(block_of(id, parent)));
    }
    work_.push_back(name);
  }

  // ---- clearing

  // Takes the layers of `mask` from at most `budget` names; returns how many were looked at.
  // Works on many blocks at once: chains change run by run, not block by block.
  uint32_t clear_names(RankId id, LayerMask mask, uint32_t budget) {
    Rank& rank = ranks_[id];
    losses_.clear();
    uint32_t seen = 0;
    uint32_t slot = rank.sweep_at;
    for (; slot < rank.names.capacity() && seen < budget; ++slot) {
      const uint32_t value = rank.names.value(slot);
      if (value == Names::kAbsent) continue;
      ++seen;
      const LayerMask gone = keys().layers(value) & mask;
      if (gone == 0) continue;
      losses_.push_back({tree_.block(keys().block(value)), keys().block(value), gone});
      drop_copies(id, keys().name(value), gone);
      const LayerMask left = keys().layers(value) & ~mask;
      if (left != 0) {
        rank.names.set_layers(slot, left, keys(), records_);
      } else {
        rank.names.erase(slot, keys(), records_);
        --slot;  // another entry may have moved here (unsigned wrap at 0 is undone by ++)
      }
    }
    const bool finished = slot >= rank.names.capacity();
    rank.sweep_at = finished ? 0 : slot;
    lose_all(id);
    if (finished) rank.names.shrink(keys());
    return seen == 0 ? 1 : seen;
  }

  void drop_copies(RankId id, uint64_t name, LayerMask layers) {
    if (copies_.empty()) return;
    for (LayerId layer = 0; layer < kMaxLayers; ++layer) {
      if ((layers >> layer & 1) != 0) copies_.erase({name, id, layer});
    }
  }

  struct Loss {
    Block at;
    BlockId block;
    LayerMask layers;
  };

  void lose_all(RankId id) {
    std::sort(losses_.begin(), losses_.end(), [](const Loss& a, const Loss& b) {
      return a.at.node != b.at.node ? a.at.node < b.at.node : a.at.offset < b.at.offset;
    });
    for (size_t i = 0; i < losses_.size();) {
      size_t j = i + 1;
      // A run of neighbours that lose the same layers, none of them under two names.
      while (shared_.empty() && j < losses_.size() && losses_[j].at.node == losses_[i].at.node &&
             losses_[j].at.offset == losses_[j - 1].at.offset + 1 &&
             losses_[j].layers == losses_[i].layers) {
        ++j;
      }
      lose_run(id, losses_[i], static_cast<uint32_t>(j - i));
      i = j;
    }
    NodeId last = kNone;
    for (const Loss& loss : losses_) {
      // Trimming may free nodes of this list, or merge them into others of it; ids are not
      // reused meanwhile, because trimming makes no nodes.
      if (loss.at.node != last && tree_.alive(loss.at.node)) trim(loss.at.node);
      last = loss.at.node;
    }
  }

  void lose_run(RankId id, const Loss& first, uint32_t n) {
    for (LayerId layer = 0; layer < kMaxLayers; ++layer) {
      if ((first.layers >> layer & 1) == 0) continue;
      if (n == 1) {
        lose(id, first.block, layer);
        continue;
      }
      tree_.release(first.at.node, layer, first.at.offset, first.at.offset + n, id);
      if (layer != kGhostLayer) {
        held_[layer] -= n;
        tally_.removed += n;
      }
    }
  }

  uint32_t block_size_;
  Tree tree_;
  Arena<Record> records_;
  std::vector<Rank> ranks_;
  std::vector<RankId> free_ranks_;
  std::vector<RankId> retired_;
  std::vector<std::pair<uint32_t, uint32_t>> group_layers_;
  std::unordered_map<Key, uint32_t, KeyHash> copies_;
  std::unordered_map<Key, uint32_t, KeyHash> shared_;
  std::unordered_map<BlockId, uint64_t> terms_;
  std::unordered_map<Key, Parked, KeyHash> parked_;
  std::unordered_multimap<Key, uint64_t, KeyHash> waiting_;  // parent -> parked children
  std::deque<std::pair<Key, uint64_t>> order_;               // parked blocks, oldest first
  uint64_t stamp_ = 0;
  uint64_t held_[kMaxLayers] = {};
  Tally tally_;

  // Scratch of the operation in progress, kept for its capacity.
  std::vector<BlockId> ids_;
  std::vector<uint8_t> gained_;
  std::vector<uint64_t> sorted_;
  std::vector<uint64_t> work_;
  std::vector<Loss> losses_;
};

}  // namespace kvd
