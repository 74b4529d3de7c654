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
// A rank that leaves, or whose cache is cleared, is retired: it counts no longer, in O(1), and
// `sweep` takes it apart bit by bit. Its names are then only hints where its blocks may be. The
// first that leads to a chain takes the rank off the whole chain, so the others of that chain find
// nothing to do, and it does not matter that the block they mean may have been freed or reused:
//
//   retired 7   names [ 17 | .. | R3 | .. | 902 | 18 | .. ]      18 is in the chain of 17
//                       ─────────>│ sweep_at                     and has nothing left to say
//
// Invariants (beyond those of tree.hpp and names.hpp), for live ranks
//   1. rank r is in the holders of block b on layer l exactly when some name of r means b and
//      has l; `rare->shared[b, l]` counts the further such names;
//   2. `rare->copies[name, l]` counts the further copies of a name that has l;
//   3. a name whose only layer is the ghost layer is in its rank's `ghosts` ring;
//   4. every parked block waits: its name is unknown and so is its parent or its content;
// for all
//   5. `held[counter(l)]` is the number of (block, layer) pairs whose holder the rank is;
//   7. the budget counts the blocks of the tree, and the names of live ranks;
// and for retired ranks
//   6. every block whose holder the rank is has a slot in its names at or behind `sweep_at`; the
//      records of the slots before it have been given back.
//
// Costs: store O(blocks + runs touched), remove O(runs of the node) a block, all amortised; clear
// and retire O(1), but O(names of the rank) to clear a part of it; no operation depends on the
// number of ranks except through the size of the sets it changes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <numeric>
#include <unordered_map>
#include <vector>

#include "arena.hpp"
#include "event_types.hpp"
#include "names.hpp"
#include "predicted.hpp"
#include "ranksets.hpp"
#include "sequence.hpp"
#include "steps.hpp"
#include "tree.hpp"

namespace kvd {

constexpr LayerId kTierLayers = 4;  // DEVICE, HOST, DISK, EXTERNAL: the layer is the tier
constexpr LayerId kGhostLayer = 4;
constexpr LayerId kFirstGroupLayer = 5;
constexpr LayerId kMaxLayers = 32;  // bits of a LayerMask; 27 (tier, group) pairs per partition
constexpr LayerMask kAllLayers = 0xffffffffu;
// Media that are none of the tiers take layers like cache groups, as tiers from here on.
constexpr uint32_t kFirstMedium = 16;
// Of `RankTraits::seen_as`: as each of `Index::shared_with`.
constexpr RankId kMany = 0xfffffffeu;

// Parked blocks of one partition. 64 Ki blocks are ~8 MB: minutes of a broken stream, not hours.
constexpr size_t kMaxParked = 65536;
// Dropped names remembered per rank that offloads: an offload event names its block by hash
// alone and may come after the device copy went; engines keep them a few steps apart.
constexpr size_t kMaxGhosts = 4096;
// Entries that a table of what waits grows to step by step, 3 ms for the last one.
constexpr size_t kGrowsTo = size_t{1} << 15;
// Cache groups remembered per rank. A hybrid model has a handful.
constexpr size_t kMaxGroups = 64;
// A cache of so few names is cleared at once, in some microseconds: no more than a new rank costs.
constexpr uint32_t kClearAtOnce = 64;

// What indexes that share it may have together, and what they have. Names are counted of live ranks:
// (rank, block) pairs; blocks also where nobody holds them any more, between others that are held.
// Of a budget of n there are n of each at most, and what was parked before it was used up.
struct Budget {
  uint64_t max = UINT64_MAX;  // of blocks, and of names
  uint64_t blocks = 0;
  uint64_t names = 0;
  uint64_t refused = 0;  // blocks told that there was no room for

  bool fits(uint64_t new_blocks, uint64_t new_names) const {
    return fit(blocks, new_blocks) && fit(names, new_names);
  }
  bool fits(uint64_t n) const { return fits(n, n); }
  // Whether so much is left that names may be remembered that mean nothing any more.
  bool ample() const { return names <= max - max / 8; }

 private:
  bool fit(uint64_t used, uint64_t n) const { return n == 0 || (used <= max && n <= max - used); }
};

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
  uint64_t parked_unsalted = 0;  // of `unparked`: hashed without the salt of their prompt
  uint64_t self_references = 0;  // events refused: a name repeated, or equal to its parent
};

// What a stream has told about one of its cache groups.
struct CacheGroup {
  int32_t id;
  Kind kind;
  int64_t window;  // tokens, 0 unknown
};

struct Window {
  LayerId layer;
  uint32_t blocks;  // how many blocks behind a reusable prefix's end the group must hold
};

struct Parked {
  bool has_content;  // false: only named so far, `parent`, `local` and `term` mean nothing
  uint64_t parent;
  uint64_t local;
  uint64_t term;
  LayerMask layers;
  uint64_t stamp;
  // What the conductor keeps of its own (conductor.hpp); 0 elsewhere.
  uint64_t hash = 0;        // as the publisher announced it
  uint64_t space = 0;       // namespace
  uint64_t plain = 0;       // local hash by the seed of sequence hashes
  uint64_t sequence = 0;    // sequence hash, 0 unknown
  bool by_engine = false;   // an engine's own event has told of it
  // The others of its rank that wait for the same parent; null where it waits for none (publishers').
  uint64_t name = 0;  // its own
  Parked* newer = nullptr;
  Parked* older = nullptr;
};

// What few ranks have, or have little of.
struct Rarities {
  struct Key {  // of a name or a block, and a layer
    uint64_t id;
    LayerId layer;
    bool operator==(const Key& o) const { return id == o.id && layer == o.layer; }
  };
  struct Hash {
    size_t operator()(uint64_t name) const { return mix64(name + 1); }
    size_t operator()(const Key& k) const { return mix64(k.id ^ mix64(k.layer + 1)); }
  };

  std::unordered_map<Key, uint32_t, Hash> copies;             // name and layer -> further copies
  std::unordered_map<Key, uint32_t, Hash> shared;             // block and layer -> further names
  std::unordered_map<uint64_t, Parked, Hash> parked;          // by name
  std::unordered_map<uint64_t, Parked*, Hash> waiting;        // parent -> the newest that waits for it
  std::deque<uint64_t> ghosts;                                // names, oldest first

  size_t exceptions() const { return copies.size() + shared.size(); }
};

// What a rank's stream has told, beside its blocks.
struct RankTraits {
  std::vector<CacheGroup> groups;
  std::vector<Window> windows;
  int32_t main_group = -1;      // the full-attention group whose blocks are the prefix
  bool numbers_groups = false;  // its stream numbers cache groups
  bool plain = false;           // its stream has told of blocks without numbering groups
  uint32_t dp_rank = 0;
  bool listed = false;    // registered, so it is shown without a match too
  bool salted = false;    // its stream says which blocks carry a cache salt
  bool offloads = false;  // its stream names lower-tier blocks by hash alone
  bool settling = false;  // took blocks from a dump; its stream may tell of them once more
  bool restored = false;  // took blocks from a dump, and no batch has spoken for it since
  // A conductor's rank counts for workers as the rank that it stands for, kMany, or not at all.
  RankId seen_as = kNone;
  bool hidden = false;
  bool published = false;  // a conductor's, which knows itself what its parked blocks wait for
};

struct Rank : RankTraits {
  // The tiers of the main group, the ghosts, for each tier all its other groups, other media.
  static constexpr size_t kCounters = kFirstGroupLayer + kTierLayers + 1;

  Names names;
  std::unique_ptr<Rarities> rare;
  uint64_t held[kCounters] = {};
  uint32_t sweep_at = 0;  // where the sweep of a retired rank goes on
  bool live = false;      // false: retired, invisible, waiting for its sweep

  Rarities& rarities() {
    if (rare == nullptr) rare = std::make_unique<Rarities>();
    return *rare;
  }
  bool has_shared() const { return rare != nullptr && !rare->shared.empty(); }
  bool has_copies() const { return rare != nullptr && !rare->copies.empty(); }
  size_t parked() const { return rare == nullptr ? 0 : rare->parked.size(); }
  size_t ghosts() const { return rare == nullptr ? 0 : rare->ghosts.size(); }

  // Blocks that a query can credit.
  uint64_t credited() const { return std::accumulate(held, held + kTierLayers, uint64_t{0}); }
  uint64_t presence() const { return std::accumulate(held, held + kCounters, uint64_t{0}); }
};

struct Store {
  const uint64_t* names;
  const uint64_t* locals;
  uint32_t n;
  bool has_parent;
  uint64_t parent;
  LayerId layer;
  uint64_t term;  // what the local hashes' seed has inherited from the prompt's first block, or 0
  // For sequence hashes: local hashes by their own seed, nullptr if `locals` are, and namespace.
  const uint64_t* plain = nullptr;
  uint64_t space = 0;
};

// Told of blocks as they are placed, while sequence hashes are kept.
class Placements {
 public:
  virtual ~Placements() = default;
  virtual void placed(const Store& s, const BlockId* blocks) = 0;
  // Blocks that were there before have their sequence hashes now, if they can have any.
  virtual void sequenced(const BlockId* blocks, uint32_t n) = 0;
  // Goes on with what that has set off; false while there is more.
  virtual bool settle(Steps& steps) = 0;
};

class Index {
 public:
  // `max_blocks` bounds the blocks of the tree, the records, and the names of each rank. Without a
  // budget the index has one of its own, which is without end.
  explicit Index(uint32_t block_size, uint32_t max_blocks = Tree::kMaxBlocks,
                 std::shared_ptr<Budget> budget = nullptr)
      : block_size_(block_size), max_blocks_(max_blocks), records_(0, NameKeys::kRecordBit - 16),
        budget_(budget != nullptr ? std::move(budget) : std::make_shared<Budget>()) {}

  ~Index() {
    budget_->blocks -= tree_.block_count();
    for (const Rank& rank : ranks_) budget_->names -= rank.live ? rank.names.size() : 0;
  }

  uint32_t block_size() const { return block_size_; }
  const Tree& tree() const { return tree_; }
  Tree& tree() { return tree_; }
  const Tally& tally() const { return tally_; }
  const Budget& budget() const { return *budget_; }
  uint64_t held(LayerId tier) const { return held_[tier]; }
  NameKeys keys() const { return {tree_, records_}; }

  // Keeps predictions from now on (see predicted.hpp), if it does not yet.
  void predict(double ttl_s, uint32_t max, uint32_t target) {
    if (predicted_ == nullptr) predicted_ = std::make_unique<Predicted>(ttl_s, max, target);
  }
  Predicted* predicted() const { return predicted_.get(); }  // null: it keeps none

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

  // The rank stops counting at once; `sweep` takes it apart later, in slices.
  void retire_rank(RankId id) {
    Rank& rank = ranks_[id];
    if (linked_) pass_on(id, kNone);
    if (rank.seen_as == kMany) shared_with_.erase(id);
    for (LayerId tier = 0; tier < kTierLayers; ++tier) held_[tier] -= rank.held[tier];
    parked_ -= rank.parked();
    budget_->names -= rank.names.size();
    rank.live = false;
    if (predicted_ != nullptr) predicted_->forget(id);
    retired_.push_back(id);
  }

  // Retires the rank; a new one with its traits, and nothing else of it, takes its place.
  RankId renew_rank(RankId id) {
    const RankId fresh = add_rank(ranks_[id].dp_rank);
    static_cast<RankTraits&>(ranks_[fresh]) = ranks_[id];
    if (linked_) pass_on(id, fresh);
    if (ranks_[id].seen_as == kMany) shared_with_[fresh] = shared_with_[id];
    retire_rank(id);
    return fresh;
  }

  // Lets a conductor's rank count as a worker's, or with kNone not at all. O(1).
  void show_as(RankId id, RankId rank) {
    ranks_[id].seen_as = rank;
    ranks_[id].hidden = rank == kNone;
    linked_ = linked_ || rank != kNone;
    if (!shared_with_.empty()) shared_with_.erase(id);
  }

  // Lets it count as each of a worker's ranks.
  void show_among(RankId id, std::vector<RankId> ranks) {
    show_as(id, ranks.empty() ? kNone : kMany);
    if (!ranks.empty()) shared_with_[id] = std::move(ranks);
  }

  // The ranks that one of kMany is seen as.
  const std::vector<RankId>& shared_with(RankId id) const { return shared_with_.at(id); }

  // Frees what retired ranks held, and memory that an emptied index has kept, and makes sequence
  // hashes that are missing, in about `budget` steps of at most 0.1 us; false when nothing is left.
  bool sweep(uint32_t budget) {
    Steps steps{budget};
    if (!settled(steps)) return true;
    sweep_retired(steps);
    make_sequences(steps);
    while (steps.left() && (tree_.shrink() || records_.shrink())) steps.take(kStepsASegment);
    return !steps.left();
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

  bool has_layer(LayerId layer) const {
    return layer < kFirstGroupLayer + group_layers_.size();
  }

  // The group of a layer beside the main group's, kNone for the others.
  uint32_t group_of(LayerId layer) const {
    return layer < kFirstGroupLayer ? kNone : group_layers_[layer - kFirstGroupLayer].second;
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

  // ---- sequence hashes (sequence.hpp)

  const Sequences* sequences() const { return sequences_.get(); }

  // Keeps the sequence hash of every block that is stored from now on. Those that are there get
  // theirs by `make_sequences`, but where another seed than `seed` has gone into them (adapter, salt):
  // these are known by one when they are stored again.
  void keep_sequences(uint64_t seed, Placements* placements) {
    placements_ = placements;
    if (sequences_ != nullptr) return;
    sequences_ = std::make_unique<Sequences>(seed);
    unsequenced_.next = seed == kBaseSeed ? tree_.node(Tree::kRoot).first_child : kNone;
    if (unsequenced_.next == kNone) return;
    sequences_->reserve(tree_.block_count());
    tree_.watch(&unsequenced_);
  }

  // Goes on with that for about `budget` steps of at most 0.1 us; true when all have theirs.
  bool make_sequences(uint32_t budget) {
    Steps steps{budget};
    make_sequences(steps);
    return sequenced() && settled(steps);
  }

  // Whether all blocks have sequence hashes that can have any.
  bool sequenced() const { return sequences_ != nullptr && unsequenced_.next == kNone; }

  // ---- blocks

  // Blocks in path order: names[i] is what the rank calls the block with content locals[i].
  // False when they are refused because the index is full. `settled` has to follow.
  bool store(RankId id, const Store& s) {
    if (s.n == 0) return true;
    if (!has_room(id, s.n)) return false;
    make_room(id, s.n);
    if (refers_to_itself(s)) {
      ++tally_.self_references;
      return true;
    }
    Position at = Tree::root();
    if (s.has_parent) {
      const uint32_t slot = ranks_[id].names.find(s.parent, keys());
      if (slot == Names::kAbsent) {
        if (!budget_->fits(s.n)) return refuse(s.n);
        park_run(id, s);
        return true;
      }
      at = tree_.after(keys().block(ranks_[id].names.value(slot)));
    }
    if (!affords(id, s, at)) return refuse(s.n);
    place(id, s, at);
    if (ranks_[id].parked() != 0) {
      for (uint32_t i = 0; i < s.n; ++i) work_.push_back(s.names[i]);
      settle(id);
    }
    return true;
  }

  // Goes on with what placed blocks have set off elsewhere; false while there is more.
  bool settled(Steps& steps) { return placements_ == nullptr || placements_->settle(steps); }

  // Blocks known by name alone (offload events, window groups). Held on `layer` once the name
  // means something. False when they are refused because the index is full. An event of many may
  // come in parts, of which it is said how many are `still` to come with them.
  bool store_named(RankId id, const uint64_t* names, uint32_t n, LayerId layer, bool has_parent,
                   uint32_t still = 0) {
    if (!has_room(id, n + still)) return false;
    const bool copy = is_copy(id, n, has_parent);
    uint32_t refused = 0;
    for (uint32_t i = 0; i < n; ++i) {
      const uint32_t slot = ranks_[id].names.find(names[i], keys());
      if (slot == Names::kAbsent && !budget_->fits(1)) {
        ++refused;
      } else if (slot == Names::kAbsent) {
        park(id, names[i], layer, nullptr);
      } else if ((keys().layers(ranks_[id].names.value(slot)) >> layer & 1) == 0) {
        gain_name(id, slot, layer);
      } else if (copy) {
        add_copy(id, names[i], layer);
      } else {
        ++tally_.refreshed;
      }
    }
    return refused == 0 || refuse(refused);
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
    } else if (ranks_[id].offloads && records_.live() < max_blocks_ && budget_->ample()) {
      haunt(id, slot, name, block);
    } else {
      erase_name(id, slot);
      ranks_[id].names.shrink(keys());
    }
    lose(id, block, layer);
    trim(tree_.block(block).node);
    if (ranks_[id].ghosts() > kMaxGhosts) lay_oldest_ghost(id);
  }

  // Whether nothing is known of the rank's cache: no block, no copy, nothing set aside.
  bool holds_nothing(RankId id) const {
    return ranks_[id].names.size() == 0 && ranks_[id].parked() == 0;
  }

  // Drops everything the rank holds on all layers, or on those of some tiers. Returns the id that
  // the rank has from now on.
  RankId clear(RankId id, LayerMask mask) {
    if (predicted_ != nullptr && (mask & 1u << kDeviceLayer) != 0) predicted_->forget(id);
    if (mask != kAllLayers) drop_parked(id, mask);
    const bool all = mask == kAllLayers || (ranks_[id].parked() == 0 && lies_within(id, mask));
    if (all && ranks_[id].names.size() + ranks_[id].parked() > kClearAtOnce) return renew_rank(id);
    if (mask == kAllLayers) drop_parked(id, mask);
    // A name that loses its last layer to a clear is forgotten: nothing may refer to it later.
    clear_names(id, mask | 1u << kGhostLayer);
    return id;
  }

  // The inherited hash term of the block that the rank calls `name`, parked or not; 0 without one.
  uint64_t term_of(RankId id, uint64_t name) const {
    const Rank& rank = ranks_[id];
    if (terms_.empty() && rank.parked() == 0) return 0;
    const uint32_t slot = rank.names.find(name, keys());
    if (slot != Names::kAbsent) return term_at(keys().block(rank.names.value(slot)));
    if (rank.parked() == 0) return 0;
    const auto it = rank.rare->parked.find(name);
    return it == rank.rare->parked.end() ? 0 : it->second.term;
  }

  // The same of a placed block.
  uint64_t term_at(BlockId block) const {
    if (terms_.empty()) return 0;
    const auto it = terms_.find(block);
    return it == terms_.end() ? 0 : it->second;
  }

  size_t parked_count() const { return parked_; }
  size_t record_count() const { return records_.live(); }
  size_t exception_count() const {
    size_t total = terms_.size();
    for (const Rank& r : ranks_) total += r.rare == nullptr ? 0 : r.rare->exceptions();
    return total;
  }

  size_t bytes() const {
    size_t total = tree_.bytes() + records_.bytes() + ranks_.capacity() * sizeof(Rank);
    for (const Rank& r : ranks_) {
      total += r.names.bytes() + r.ghosts() * sizeof(uint64_t) + r.parked() * kParkedBytes;
      if (r.rare != nullptr) total += kRaritiesBytes + r.rare->exceptions() * kExceptionBytes;
    }
    if (predicted_ != nullptr) total += predicted_->bytes();
    if (sequences_ != nullptr) total += sequences_->bytes();
    return total + terms_.size() * kExceptionBytes;
  }

 private:
  friend class Verifier;
  friend class Conductor;

  struct QueueEntry {  // of a parked block
    uint64_t name;
    uint64_t stamp;
    RankId rank;
  };

  // Parked blocks, oldest first, among entries of such as are parked no longer. These are taken out
  // bit by bit: `kept_` has the entries before those of `rest_` that have been looked at.
  class Queue {
   public:
    size_t size() const { return kept_.size() + rest_.size(); }
    void push(const QueueEntry& entry) { rest_.push_back(entry); }

    QueueEntry pop() {
      std::deque<QueueEntry>& from = kept_.empty() ? rest_ : kept_;
      const QueueEntry oldest = from.front();
      from.pop_front();
      return oldest;
    }

    template <class Wanted>
    void compact(Wanted&& wanted) {
      for (size_t n = 0; n < kLooks && !rest_.empty(); ++n) {
        if (wanted(rest_.front())) kept_.push_back(rest_.front());
        rest_.pop_front();
      }
      if (rest_.empty()) rest_.swap(kept_);
    }

    template <class Visit>
    void each(Visit&& visit) const {
      for (const std::deque<QueueEntry>* part : {&kept_, &rest_}) {
        for (const QueueEntry& entry : *part) visit(entry);
      }
    }

   private:
    static constexpr size_t kLooks = 64;  // at once, for each block that is parked

    std::deque<QueueEntry> kept_, rest_;
  };

  static constexpr size_t kParkedBytes = 200;    // two hash nodes and a queue entry
  static constexpr size_t kExceptionBytes = 48;  // one hash node
  static constexpr size_t kRaritiesBytes = sizeof(Rarities) + 576;  // an empty deque's memory

  // Steps of a sweep: slots passed, blocks freed, members of a set copied, each in one of them;
  // and what a chain costs besides. Measured: together they keep a step below 0.1 us.
  static constexpr size_t kSlotsAStep = 16;
  static constexpr size_t kFreedAStep = 8;
  static constexpr size_t kMembersAStep = 64;
  static constexpr size_t kStepsAChain = 16;
  static constexpr size_t kStepsASegment = 8;
  static constexpr size_t kStepsASequence = 2;
  static constexpr int64_t kStepsAStore = 64;  // of sweeping in the place of refusing

  // Chain by chain, what comes before always first; whatever is stored between two calls meets a
  // block with a sequence hash above it and has its own, or is still to come here.
  void make_sequences(Steps& steps) {
    if (unsequenced_.next == kNone || !steps.left()) return;
    while (unsequenced_.next != kNone && steps.left()) {
      const NodeId id = unsequenced_.next;
      unsequenced_.next = tree_.successor(id);
      const Chain& chain = tree_.node(id).chain;
      sequences_->chain(tree_.parent_of(chain.block()[0]), chain.block(), chain.local(), chain.len(), 0, false);
      if (placements_ != nullptr) placements_->sequenced(chain.block(), chain.len());
      steps.take(1 + chain.len() * kStepsASequence);
    }
    if (unsequenced_.next == kNone) tree_.unwatch(&unsequenced_);
    settled(steps);
  }

  // Which counter of a rank counts a layer.
  size_t counter(LayerId layer) const {
    if (layer < kFirstGroupLayer) return layer;
    return kFirstGroupLayer + std::min<uint32_t>(tier_of(layer), kTierLayers);
  }

  // Ranks that are seen as `from` are seen as `to` from now on.
  void pass_on(RankId from, RankId to) {
    for (Rank& rank : ranks_) {
      if (rank.seen_as != from) continue;
      rank.seen_as = to;
      rank.hidden = to == kNone;
    }
    for (auto& entry : shared_with_) {
      std::vector<RankId>& ranks = entry.second;
      const auto at = std::find(ranks.begin(), ranks.end(), from);
      if (at == ranks.end()) continue;
      if (to == kNone) {
        ranks.erase(at);
      } else {
        *at = to;
      }
    }
  }

  bool has_room(RankId id, uint32_t n) const {
    const auto fits = [&](uint32_t used) { return used <= max_blocks_ && n <= max_blocks_ - used; };
    return fits(tree_.block_count()) && fits(records_.live()) && fits(ranks_[id].names.size());
  }

  // ---- the budget

  // Whether the budget has room for what a run behind `at` would add; what is told again adds nothing.
  // Where it has not, names that mean other blocks lose these all the same: they are gone.
  bool affords(RankId id, const Store& s, Position at) {
    if (budget_->fits(s.n)) return true;
    ids_.resize(s.n);
    const size_t met = tree_.walk(at, s.locals, s.n, ids_.data());
    uint64_t fresh = 0;
    for (uint32_t i = 0; i < s.n; ++i) {
      fresh += ranks_[id].names.find(s.names[i], keys()) == Names::kAbsent;
    }
    if (budget_->fits(s.n - met, fresh)) return true;
    forget_other_content(id, s, met);
    return false;
  }

  bool refuse(uint32_t n) {
    budget_->refused += n;
    return false;
  }

  // Rather than to refuse n blocks, names that the rank remembers are forgotten, and what retired
  // ranks hold, which counts until it is freed, is freed now; for as long as storing them would
  // take. It may move chains.
  void make_room(RankId id, uint32_t n) {
    if (budget_->fits(n)) return;
    Steps steps(kStepsAStore + int64_t{n} * 2);
    for (; ranks_[id].ghosts() != 0 && !budget_->fits(n) && steps.left(); steps.take(1)) {
      lay_oldest_ghost(id);
    }
    sweep_retired(steps);
  }

  void insert_name(RankId id, uint64_t name, BlockId block, LayerMask layers) {
    ranks_[id].names.insert(name, block, layers, keys(), records_);
    ++budget_->names;
  }

  void erase_name(RankId id, uint32_t slot) {
    ranks_[id].names.erase(slot, keys(), records_);
    --budget_->names;
  }

  bool refers_to_itself(const Store& s) {
    if (s.n == 1) return s.has_parent && s.names[0] == s.parent;
    sorted_.assign(s.names, s.names + s.n);
    if (s.has_parent) sorted_.push_back(s.parent);
    std::sort(sorted_.begin(), sorted_.end());
    return std::adjacent_find(sorted_.begin(), sorted_.end()) != sorted_.end();
  }

  // Stores a run whose place is known: behind `at`, which for a conductor's is behind `below`.
  void place(RankId id, const Store& s, Position at, BlockId below = kNone) {
    ids_.resize(s.n);
    Position tip = at;
    size_t met = tree_.walk(tip, s.locals, s.n, ids_.data());
    if (forget_other_content(id, s, met)) {
      // Forgetting may have freed blocks of the path below `at`; the parent is held, so `at`
      // names a block that lives, but its chain may have moved.
      if (below == kNone && s.has_parent) below = block_of(id, s.parent);
      tip = below != kNone ? tree_.after(below) : Tree::root();
      met = tree_.walk(tip, s.locals, s.n, ids_.data());
    }
    tree_.grow(tip, s.locals + met, s.names + met, s.n - met, ids_.data() + met);
    budget_->blocks += s.n - met;
    name_blocks(id, s);
    if (sequences_ != nullptr) sequence_blocks(s);
  }

  void sequence_blocks(const Store& s) {
    const bool told = s.plain != nullptr;
    if (told || sequences_->seed() == kBaseSeed) {
      sequences_->chain(tree_.parent_of(ids_[0]), ids_.data(), told ? s.plain : s.locals, s.n, s.space, told);
    }
    if (placements_ != nullptr) placements_->placed(s, ids_.data());
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
    erase_name(id, slot);
    for (LayerId layer = 0; layer < kMaxLayers; ++layer) {
      if ((layers >> layer & 1) == 0) continue;
      if (ranks_[id].has_copies()) ranks_[id].rare->copies.erase({name, layer});
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
        insert_name(id, s.names[i], ids_[i], 1u << s.layer);
      } else if ((keys().layers(rank.names.value(slot)) >> s.layer & 1) == 0) {
        add_layer(id, slot, s.layer);
      } else {
        continue;
      }
      gained_[i] = 1;
      ++gained;
    }
    const bool copies = gained == 0 ? is_copy(id, s.n, s.has_parent) : !ranks_[id].settling;
    if (!copies) {
      tally_.refreshed += s.n - gained;
    } else {
      for (uint32_t i = 0; i < s.n; ++i) {
        if (gained_[i] == 0) add_copy(id, s.names[i], s.layer);
      }
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
      ++ranks_[id].rarities().shared[{tree_.node(node).chain.block()[offset], layer}];
    });
    ranks_[id].held[counter(layer)] += gained;
    if (layer < kTierLayers) held_[layer] += gained;
    if (layer != kGhostLayer) tally_.stored += gained;
  }

  void lose(RankId id, BlockId block, LayerId layer) {
    Rank& rank = ranks_[id];
    if (rank.has_shared()) {
      const auto it = rank.rare->shared.find({block, layer});
      if (it != rank.rare->shared.end()) {
        if (--it->second == 0) rank.rare->shared.erase(it);
        return;
      }
    }
    const Block b = tree_.block(block);
    if (predicted_ != nullptr && layer == kDeviceLayer) {
      predicted_->evict(id, tree_.node(b.node).chain.local()[b.offset]);
    }
    tree_.release(b.node, layer, b.offset, b.offset + 1, id);
    --rank.held[counter(layer)];
    if (layer < kTierLayers) --held_[layer];
    if (layer != kGhostLayer) ++tally_.removed;
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
    ++ranks_[id].rarities().copies[{name, layer}];
    ++tally_.copies;
  }

  bool take_copy(RankId id, uint64_t name, LayerId layer) {
    if (!ranks_[id].has_copies()) return false;
    auto& copies = ranks_[id].rare->copies;
    const auto it = copies.find({name, layer});
    if (it == copies.end()) return false;
    if (--it->second == 0) copies.erase(it);
    return true;
  }

  void trim(NodeId node) {
    tree_.trim(node, [&](BlockId block) {
      --budget_->blocks;
      if (!terms_.empty()) terms_.erase(block);
      if (sequences_ != nullptr) sequences_->erase(block);
    });
  }

  // ---- ghosts: names remembered after their last layer went

  void haunt(RankId id, uint32_t slot, uint64_t name, BlockId block) {
    ranks_[id].names.set_layers(slot, 1u << kGhostLayer, keys(), records_);
    const Block b = tree_.block(block);
    hold(id, b.node, kGhostLayer, b.offset, b.offset + 1);
    ranks_[id].rarities().ghosts.push_back(name);
  }

  void lay_oldest_ghost(RankId id) {
    const uint64_t name = ranks_[id].rare->ghosts.front();
    ranks_[id].rare->ghosts.pop_front();
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
      if (s.plain != nullptr) one.plain = s.plain + i;
      one.parent = i == 0 ? s.parent : s.names[i - 1];
      if (ranks_[id].names.find(s.names[i], keys()) != Names::kAbsent) {
        store_named(id, s.names + i, 1, s.layer, false);
        store(id, {s.names + i + 1, s.locals + i + 1, s.n - i - 1, true, s.names[i], s.layer, s.term,
                   s.plain == nullptr ? nullptr : s.plain + i + 1, s.space});
        return;
      }
      park(id, s.names[i], s.layer, &one);
    }
  }

  // `content` is null when only the name is known.
  void park(RankId id, uint64_t name, LayerId layer, const Store* content) {
    Rarities& rare = ranks_[id].rarities();
    auto it = rare.parked.find(name);
    if (it == rare.parked.end()) {
      it = rare.parked.emplace(name, Parked{false, 0, 0, 0, 0, ++stamp_}).first;
      it->second.name = name;
      order_.push({name, stamp_, id});
      ++parked_;
      ++tally_.parked;
      // What grows beyond that may have the whole bound, and growing is not done in slices.
      if (rare.parked.size() == kGrowsTo && max_parked_ > kMaxParked) rare.parked.reserve(max_parked_);
    }
    Parked& p = it->second;
    p.layers |= 1u << layer;
    if (content != nullptr && !p.has_content) {
      p.has_content = true;
      p.parent = content->parent;
      p.local = content->locals[0];
      p.term = content->term;
      p.plain = content->plain == nullptr ? 0 : content->plain[0];
      p.space = content->space;
      if (!ranks_[id].published) wait_for_parent(rare, p);
    }
    bound_parked();
  }

  static void wait_for_parent(Rarities& rare, Parked& p) {
    Parked*& newest = rare.waiting[p.parent];
    p.older = newest;
    if (newest != nullptr) newest->newer = &p;
    newest = &p;
  }

  static void wait_no_more(Rarities& rare, Parked& p) {
    if (p.older != nullptr) p.older->newer = p.newer;
    if (p.newer != nullptr) {
      p.newer->older = p.older;
    } else if (p.older != nullptr) {
      rare.waiting[p.parent] = p.older;
    } else {
      rare.waiting.erase(p.parent);
    }
  }

  void bound_parked() {
    while (parked_ > max_parked_) {
      const QueueEntry oldest = order_.pop();
      if (!is_parked(oldest)) continue;
      forget_parked(oldest.rank, ranks_[oldest.rank].rare->parked.find(oldest.name));
      ++tally_.parked_dropped;
    }
    // Entries of blocks placed meanwhile are dropped from the queue before they outnumber it.
    if (order_.size() > 2 * parked_ + 64) {
      order_.compact([&](const QueueEntry& entry) { return is_parked(entry); });
    }
  }

  bool is_parked(const QueueEntry& entry) const {
    const Rank& rank = ranks_[entry.rank];
    if (!rank.live || rank.parked() == 0) return false;
    const auto it = rank.rare->parked.find(entry.name);
    return it != rank.rare->parked.end() && it->second.stamp == entry.stamp;
  }

  void forget_parked(RankId id, std::unordered_map<uint64_t, Parked, Rarities::Hash>::iterator it) {
    Rarities& rare = *ranks_[id].rare;
    if (it->second.has_content && !ranks_[id].published) wait_no_more(rare, it->second);
    --parked_;
    rare.parked.erase(it);
  }

  bool unpark(RankId id, uint64_t name, LayerId layer) {
    if (ranks_[id].parked() == 0) return false;
    const auto it = ranks_[id].rare->parked.find(name);
    if (it == ranks_[id].rare->parked.end() || (it->second.layers >> layer & 1) == 0) return false;
    it->second.layers &= ~(1u << layer);
    if (it->second.layers == 0) forget_parked(id, it);
    return true;
  }

  void drop_parked(RankId id, LayerMask mask) {
    if (ranks_[id].parked() == 0) return;
    auto& parked = ranks_[id].rare->parked;
    for (auto it = parked.begin(); it != parked.end();) {
      const auto here = it++;
      here->second.layers &= ~mask;
      if (here->second.layers == 0) forget_parked(id, here);
    }
  }

  // Places what waited for the names in `work_`, and what waited for that in turn.
  void settle(RankId id) {
    while (!work_.empty() && ranks_[id].parked() != 0) {
      const uint64_t name = work_.back();
      work_.pop_back();
      settle_layers(id, name);
      while (true) {
        const auto child = ranks_[id].rare->waiting.find(name);
        if (child == ranks_[id].rare->waiting.end()) break;
        settle_child(id, name, child->second->name);
      }
    }
    work_.clear();
  }

  // A parked block whose name has been placed by another event only adds its layers.
  void settle_layers(RankId id, uint64_t name) {
    const auto it = ranks_[id].rare->parked.find(name);
    if (it == ranks_[id].rare->parked.end()) return;
    const LayerMask layers = it->second.layers;
    forget_parked(id, it);
    ++tally_.unparked;
    for (LayerId layer = 0; layer < kMaxLayers; ++layer) {
      if ((layers >> layer & 1) == 0) continue;
      const uint32_t slot = ranks_[id].names.find(name, keys());
      if ((keys().layers(ranks_[id].names.value(slot)) >> layer & 1) == 0) gain_name(id, slot, layer);
    }
  }

  void settle_child(RankId id, uint64_t parent, uint64_t name) {
    const auto it = ranks_[id].rare->parked.find(name);
    const Parked p = it->second;
    forget_parked(id, it);
    ++tally_.unparked;
    // No query asks for a block that was hashed without its prompt's term. It is placed all the
    // same: removals mean it, and what follows it inherits the term.
    const uint64_t above = term_at(block_of(id, parent));
    const uint64_t term = above != 0 ? above : p.term;
    if (term != p.term) ++tally_.parked_unsalted;
    for (LayerId layer = 0; layer < kMaxLayers; ++layer) {
      if ((p.layers >> layer & 1) == 0) continue;
      const Store s{&name, &p.local, 1, true, parent, layer, term, p.plain == 0 ? nullptr : &p.plain, p.space};
      place(id, s, tree_.after(block_of(id, parent)));
    }
    work_.push_back(name);
  }

  // ---- clearing

  // Whether the rank holds nothing, but for ghosts, on any layer that is not in `mask`: all layers
  // of some tiers.
  bool lies_within(RankId id, LayerMask mask) const {
    const Rank& rank = ranks_[id];
    for (LayerId tier = 0; tier < kTierLayers; ++tier) {
      if ((mask >> tier & 1) != 0) continue;
      if (rank.held[tier] != 0 || rank.held[kFirstGroupLayer + tier] != 0) return false;
    }
    return rank.held[Rank::kCounters - 1] == 0 || mask == kAllLayers;
  }

  // Takes the layers of `mask` from every name, and the rank off them, chain by chain.
  void clear_names(RankId id, LayerMask mask) {
    Rank& rank = ranks_[id];
    if (rank.rare != nullptr) clear_rarities(*rank.rare, mask);
    touched_.clear();
    for (uint32_t slot = 0; slot < rank.names.capacity(); ++slot) {
      const uint32_t value = rank.names.value(slot);
      if (value == Names::kAbsent) continue;
      const LayerMask layers = keys().layers(value);
      if ((layers & mask) == 0) continue;
      const NodeId node = tree_.block(keys().block(value)).node;
      if (touched_.empty() || touched_.back() != node) touched_.push_back(node);
      if ((layers & ~mask) != 0) {
        rank.names.set_layers(slot, layers & ~mask, keys(), records_);
      } else {
        erase_name(id, slot);
        --slot;  // another entry may have moved here (unsigned wrap at 0 is undone by ++)
      }
    }
    for (const NodeId node : touched_) leave_chain(id, node, mask);
    rank.names.shrink(keys());
    // Trimming may free chains of this list, or merge them into others of it; ids are not reused
    // meanwhile, because trimming makes no nodes.
    for (const NodeId node : touched_) {
      if (tree_.alive(node)) trim(node);
    }
  }

  static void clear_rarities(Rarities& rare, LayerMask mask) {
    for (auto* counts : {&rare.copies, &rare.shared}) {
      for (auto it = counts->begin(); it != counts->end();) {
        it = (mask >> it->first.layer & 1) != 0 ? counts->erase(it) : std::next(it);
      }
    }
    rare.ghosts.clear();
  }

  // Takes the rank off a whole chain. Returns the members of the sets that changed.
  size_t leave_chain(RankId id, NodeId node, LayerMask mask) {
    Rank& rank = ranks_[id];
    size_t copied = 0;
    tree_.release_chain(node, mask, id, [&](LayerId layer, uint32_t blocks, size_t members) {
      copied += members;
      rank.held[counter(layer)] -= blocks;
      if (rank.live && layer < kTierLayers) held_[layer] -= blocks;
      if (layer != kGhostLayer) tally_.removed += blocks;
    });
    return copied;
  }

  // ---- sweeping retired ranks

  void sweep_retired(Steps& steps) {
    while (!retired_.empty() && steps.left()) {
      const RankId id = retired_.back();
      if (!sweep_rarities(id, steps) || !sweep_names(id, steps)) continue;
      retired_.pop_back();
      ranks_[id] = Rank();
      free_ranks_.push_back(id);
    }
  }

  bool sweep_rarities(RankId id, Steps& steps) {
    if (ranks_[id].rare == nullptr) return true;
    Rarities& rare = *ranks_[id].rare;
    return empty_out(rare.copies, steps) && empty_out(rare.shared, steps) &&
           empty_out(rare.parked, steps) && empty_out(rare.waiting, steps);
  }

  template <class Map>
  static bool empty_out(Map& map, Steps& steps) {
    for (; !map.empty() && steps.left(); steps.take(1)) map.erase(map.begin());
    return map.empty();
  }

  // True when the rank is nowhere any more and none of its records is left.
  bool sweep_names(RankId id, Steps& steps) {
    Rank& rank = ranks_[id];
    bool present = rank.presence() != 0;
    for (; rank.sweep_at < rank.names.capacity() && steps.left(); ++rank.sweep_at) {
      if (rank.sweep_at % kSlotsAStep == 0) steps.take(1);
      const uint32_t value = rank.names.value(rank.sweep_at);
      if (value == Names::kAbsent) continue;
      const BlockId block = keys().block(value);
      if ((value & NameKeys::kRecordBit) != 0) {
        records_.give(value & ~NameKeys::kRecordBit);
        steps.take(1);
      }
      if (!present) continue;
      sweep_chain(id, tree_.node_of(block), steps);
      present = rank.presence() != 0;
    }
    return rank.sweep_at == rank.names.capacity();
  }

  void sweep_chain(RankId id, NodeId node, Steps& steps) {
    steps.take(1);
    if (node == kNone) return;
    const uint32_t before = tree_.block_count();
    const size_t copied = leave_chain(id, node, kAllLayers);
    if (copied == 0) return;
    trim(node);
    const size_t freed = before - tree_.block_count();
    steps.take(kStepsAChain + freed / kFreedAStep + copied / kMembersAStep);
  }

  uint32_t block_size_;
  uint32_t max_blocks_;
  Tree tree_;
  Arena<Record> records_;
  std::shared_ptr<Budget> budget_;
  std::vector<Rank> ranks_;
  std::vector<RankId> free_ranks_;
  std::vector<RankId> retired_;
  std::vector<std::pair<uint32_t, uint32_t>> group_layers_;
  std::unordered_map<BlockId, uint64_t> terms_;
  std::unique_ptr<Sequences> sequences_;  // null while nobody asks for them
  Watcher unsequenced_;  // the next chain whose blocks have none yet
  Placements* placements_ = nullptr;
  bool linked_ = false;  // some rank is seen as another
  std::unordered_map<RankId, std::vector<RankId>> shared_with_;  // of those seen as kMany
  size_t max_parked_ = kMaxParked;
  Queue order_;
  size_t parked_ = 0;             // of live ranks
  uint64_t stamp_ = 0;
  uint64_t held_[kTierLayers] = {};  // by live ranks
  Tally tally_;
  std::unique_ptr<Predicted> predicted_;

  // Scratch of the operation in progress, kept for its capacity.
  std::vector<BlockId> ids_;
  std::vector<uint8_t> gained_;
  std::vector<uint64_t> sorted_;
  std::vector<uint64_t> work_;
  std::vector<NodeId> touched_;
};

}  // namespace kvd
