// Who holds which block: the radix tree, the ranks' names, and the rules that join them.
//
//   rank 7 ── names: engine hash 0xa1 ─┐
//   rank 9 ── names: engine hash 0x5c ─┴─> block 12 ── tree: .. ─ block 11 ─ block 12 ─ ..
//                                          DEVICE {7, 9}   HOST {9}
//
// The index keeps presence per rank and layer. A layer is a tier, a window group of a tier (hybrid
// models keep fewer blocks in those), or the memory of recently dropped names (kGhostLayer).
//
// The rules, with their reasons (docs/accuracy.md has the engine traffic that they come from):
//   - content decides: the same tokens under the same prefix are one block, whatever engines call
//     it; each rank may have its own name for it;
//   - several names of one rank may mean one block; the rank holds it until the last name goes;
//   - a Stored whose blocks are all held already is a re-announcement and changes nothing: an
//     engine reuses what it holds. Unless the event says which it is, two kinds count as second
//     copies, which need a second removal: a single block below a parent (an engine computes a
//     prompt's last block again), and any block of a hybrid model (it computes again what a window
//     group has dropped);
//   - when a name comes back with other content, the old content is gone;
//   - a block whose parent is unknown, or of which only the name is known, is parked until what it
//     lacks arrives; parked blocks are bounded, the oldest is dropped first and counted;
//   - an unknown name in a removal is normal traffic: counted, no effect.
//
// A rank that leaves, or whose cache is cleared, is retired: in O(1) it stops counting, and `sweep`
// takes it apart bit by bit.
//
// The class is here, with its short members. This header includes the longer ones, by subject:
//
//   index/store.hpp     a store: room, place, names, presence
//   index/remove.hpp    a removal: layers that names lose, ghosts
//   index/parked.hpp    blocks without a place, and how they get one
//   index/retire.hpp    caches that are cleared, ranks that leave, the sweep
//
// Invariants (beyond those of index/tree.hpp and index/names.hpp)
// for live ranks
//   1. rank r is among the holders of block b on layer l exactly when some name of r means b and
//      has l; `rare->shared` of b and l counts the further such names;
//   2. `rare->copies` of name and l counts the further copies of a name that has l;
//   3. a name whose only layer is the ghost layer is in its rank's `ghosts` ring;
//   4. every parked block waits: its name is unknown, and so is its parent or its content;
// for all ranks
//   5. `held[counter(l)]` is the number of (block, layer) pairs that the rank holds;
// for retired ranks
//   6. every block that the rank still holds has a slot in its names at or behind `sweep_at`; the
//      records of the slots before it have been given back;
// for the index
//   7. the budget counts the blocks of the tree, and the names of live ranks.
//
// Costs: store O(blocks + runs touched), remove O(runs of the node) for each block, all amortised;
// retire and clear O(1), but O(names of the rank) to clear only a part of its layers. No operation
// depends on the number of ranks, except through the sizes of the sets it changes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/arena.hpp"
#include "base/hash.hpp"
#include "index/chronicle.hpp"
#include "index/types.hpp"
#include "base/keyed.hpp"
#include "index/names.hpp"
#include "base/numbers.hpp"
#include "index/predicted.hpp"
#include "index/prompt_stats.hpp"
#include "index/sequence.hpp"
#include "base/steps.hpp"
#include "index/tree.hpp"

namespace kvd {

class Index {
 public:
  // `max_blocks` bounds the blocks of the tree, the records, and the names of each rank. Without a
  // budget the index makes one of its own, without bounds; without a chronicle it notes no changes.
  explicit Index(uint32_t block_size, uint32_t max_blocks = Tree::kMaxBlocks,
                 std::shared_ptr<Budget> budget = nullptr,
                 std::shared_ptr<Chronicle> chronicle = nullptr)
      : block_size_(block_size),
        max_blocks_(max_blocks),
        records_(0, NameKeys::kRecordBit - 16),
        budget_(budget != nullptr ? std::move(budget) : std::make_shared<Budget>()),
        chronicle_(std::move(chronicle)) {}

  ~Index() {
    budget_->blocks -= tree_.block_count();
    for (const Rank& rank : ranks_) budget_->names -= rank.live ? rank.names.size() : 0;
  }

  uint32_t block_size() const { return block_size_; }
  const Tree& tree() const { return tree_; }
  Tree& tree() { return tree_; }
  const IndexStats& stats() const { return stats_; }
  const Budget& budget() const { return *budget_; }
  PromptStats& asked() { return asked_; }          // of queries
  PromptStats& announced() { return announced_; }  // of engines
  Seeds& seeds() { return seeds_; }                // of the prompts that engines have stored
  const Seeds& seeds() const { return seeds_; }
  FirstBlocks& first_blocks() { return first_blocks_; }  // of queries
  // Whether, after so many queries, blocks with which some began are stored: both sides hash alike.
  bool stores_asked(uint64_t queries) const {
    return first_blocks_.any(
        queries, [this](uint64_t local) { return tree_.child(Tree::kRoot, local) != kNone; });
  }
  const Chronicle* chronicle() const { return chronicle_.get(); }  // null: changes are not noted
  uint64_t held(LayerId tier) const { return held_[tier]; }
  const CountArena& counts() const { return counts_; }
  const ParkedArena& parked_blocks() const { return parked_blocks_; }
  NameKeys keys() const { return {tree_, records_, hash_}; }

  // Keeps predictions from now on (see index/predicted.hpp), unless it already does.
  void predict(double ttl_s, uint32_t max, uint32_t target) {
    if (predicted_ == nullptr) predicted_ = std::make_unique<Predicted>(ttl_s, max, target);
  }
  Predicted* predicted() const { return predicted_.get(); }  // null: none are kept

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

  // Notes what happens to the rank from now on, if there is a chronicle.
  void chronicle_rank(RankId id) {
    if (chronicle_ != nullptr) ranks_[id].owner = chronicle_->new_owner();
  }

  // Notes that a rank's tiers (as bits) are emptied.
  void note_emptied(RankId id, uint32_t tiers, Change::Kind kind) {
    Rank& rank = ranks_[id];
    if (rank.owner == kNone || tiers == 0) return;
    ++rank.noted;
    chronicle_->note({0, chronicle_->now(), rank.owner, 0, 0, 0, kind, uint8_t(tiers)});
  }

  Rank& rank(RankId id) { return ranks_[id]; }
  const Rank& rank(RankId id) const { return ranks_[id]; }
  RankId rank_end() const { return static_cast<RankId>(ranks_.size()); }

  // The rank stops counting at once; `sweep` takes it apart later, in slices.
  void retire_rank(RankId id);

  // Retires the rank and returns a new one in its place, which has its traits and nothing else.
  RankId renew_rank(RankId id);

  // Makes a conductor's rank count as a worker's rank, or as none (kNone). O(1).
  void set_alias(RankId id, RankId rank) {
    ranks_[id].alias_of = rank;
    ranks_[id].hidden = rank == kNone;
    linked_ = linked_ || rank != kNone;
    if (!aliases_.empty()) aliases_.erase(id);
  }

  // Makes it count as each of these ranks of a worker.
  void set_aliases(RankId id, std::vector<RankId> ranks) {
    set_alias(id, ranks.empty() ? kNone : kMany);
    if (!ranks.empty()) aliases_[id] = std::move(ranks);
  }

  // Makes ranks that count as every rank of a worker count as its new rank `fresh`, too; `known` is
  // another rank of the worker. O(ranks of kMany, times the ranks that each counts as).
  void join_aliases(RankId fresh, RankId known) {
    for (auto& entry : aliases_) {
      std::vector<RankId>& ranks = entry.second;
      if (std::find(ranks.begin(), ranks.end(), known) != ranks.end()) ranks.push_back(fresh);
    }
  }

  // The ranks that a rank of kMany counts as.
  const std::vector<RankId>& aliases_of(RankId id) const { return aliases_.at(id); }

  // Frees what retired ranks held and spare memory of an emptied index, and makes missing sequence
  // hashes, in about `budget` steps of at most 0.1 us; false when nothing is left to do.
  bool sweep(uint32_t budget);

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

  bool has_layer(LayerId layer) const { return layer < kFirstGroupLayer + group_layers_.size(); }

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
    windowed_ = true;
  }

  bool windowed() const { return windowed_; }  // some rank may have windows

  // Notes that an engine has announced this many blocks of a lower tier in one event. While the
  // number is always the same, it is the engine's chunk.
  void note_chunk(RankId id, uint32_t blocks) {
    uint32_t& chunk = ranks_[id].chunk;
    chunk = chunk == 0 || chunk == blocks ? blocks : 1;
    chunked_ = chunked_ || chunk > 1;
  }

  bool chunked() const { return chunked_; }  // some rank may have chunks of several blocks

  // ---- sequence hashes (index/sequence.hpp)

  const Sequences* sequences() const { return sequences_.get(); }

  // Keeps the sequence hash of every block stored from now on. `make_sequences` gives the blocks
  // already there theirs, unless a seed other than `seed` went into them (adapter, salt):
  // those get theirs when they are stored again.
  void keep_sequences(uint64_t seed, Placements* placements) {
    placements_ = placements;
    if (sequences_ != nullptr) return;
    sequences_ = std::make_unique<Sequences>(seed);
    if (seed != kBaseSeed || tree_.node_count() == 0) return;
    sequences_->reserve(tree_.block_count());
    tree_.watch(&unsequenced_);
  }

  // Continues that for about `budget` steps of at most 0.1 us; true when all blocks have theirs.
  bool make_sequences(uint32_t budget) {
    Steps steps{budget};
    make_sequences(steps);
    return sequenced() && resolve_waiting(steps);
  }

  // Uses a query's local hashes to place blocks that are known by sequence hash alone. Returns
  // whether the tree now has more of the prompt.
  bool place_by_prompt(BlockId last, const uint64_t* locals, size_t from, size_t n) const {
    return placements_ != nullptr && placements_->place_by_prompt(last, locals, from, n);
  }

  // Whether every block that can have a sequence hash has one.
  bool sequenced() const { return sequences_ != nullptr && unsequenced_.next == kNone; }

  // ---- blocks

  // Stores blocks in path order: names[i] is what the rank calls the block with content locals[i].
  // False when they are refused because the index is full. The caller then calls `resolve_waiting`.
  bool store(RankId id, const Store& s);

  // Continues what placed blocks have set off, in their rank and elsewhere; false while there is
  // more.
  bool resolve_waiting(Steps& steps) {
    return place_parked(steps) && (placements_ == nullptr || placements_->resolve_waiting(steps));
  }

  // Stores blocks known by name alone (offload events, window groups). The rank holds each on
  // `layer` once the name means something. False when they are refused because the index is full.
  // An event of many names may come in parts: `still` names of it come after these.
  bool store_named(RankId id, const uint64_t* names, uint32_t n, LayerId layer, bool has_parent,
                   uint32_t still = 0, Origin origin = Origin::UNKNOWN);

  // Writes over the local hashes of blocks that are to be stored on a lower tier those that the
  // rank's names for them have already; true if any changes. Engines announce what they offload
  // without its salt, images or adapter, which are part of the content; but the name stands for the
  // same block.
  bool recall_content(RankId id, const uint64_t* names, size_t n, uint64_t* locals) const {
    bool changes = false;
    for (size_t i = 0; i < n; ++i) {
      const uint32_t slot = ranks_[id].names.find(names[i], keys());
      if (slot == Names::kAbsent) continue;
      const Block b = tree_.block(keys().block(ranks_[id].names.value(slot)));
      const uint64_t known = tree_.node(b.node).chain.local()[b.offset];
      changes = changes || locals[i] != known;
      locals[i] = known;
    }
    return changes;
  }

  // Takes a layer from the block that the rank calls `name`.
  void remove(RankId id, uint64_t name, LayerId layer);
  // The same where the engine says how many copies it has left: that many are kept, whatever it has
  // announced before.
  void remove(RankId id, uint64_t name, LayerId layer, uint32_t left);

  // Whether the rank's cache is entirely unknown: no block, no copy, nothing parked.
  bool holds_nothing(RankId id) const {
    return ranks_[id].names.size() == 0 && ranks_[id].parked() == 0;
  }

  // Drops everything the rank holds, on all layers or on those of some tiers. Returns the rank's id
  // from now on.
  RankId clear(RankId id, LayerMask mask);

  // The inherited hash term of the block that the rank calls `name`, parked or not; 0 without one.
  uint64_t term_of(RankId id, uint64_t name) const {
    const Rank& rank = ranks_[id];
    if (terms_.size() == 0 && rank.parked() == 0) return 0;
    const uint32_t slot = rank.names.find(name, keys());
    if (slot != Names::kAbsent) return term_at(keys().block(rank.names.value(slot)));
    const uint32_t at = parked_at(id, name);
    return at == kNone ? 0 : parked_blocks_[at].term;
  }

  // The inherited hash term of a placed block; 0 without one.
  uint64_t term_at(BlockId block) const { return terms_[block]; }

  size_t parked_count() const { return parked_; }
  size_t record_count() const { return records_.live(); }
  size_t exception_count() const { return terms_.size() + counts_.live(); }

  size_t bytes() const {
    size_t total = tree_.bytes() + records_.bytes() + counts_.bytes() + terms_.bytes();
    total += parked_blocks_.bytes() + order_.size() * sizeof(ParkedQueue::Entry);
    total += ranks_.capacity() * sizeof(Rank);
    for (const Rank& r : ranks_) {
      total += r.names.bytes() + r.ghosts() * sizeof(uint64_t);
      if (r.rare == nullptr) continue;
      total += kRareStateBytes + r.rare->copies.bytes() + r.rare->shared.bytes();
      total += r.rare->parked.bytes();
    }
    if (predicted_ != nullptr) total += predicted_->bytes();
    if (sequences_ != nullptr) total += sequences_->bytes();
    return total;
  }

 private:
  friend class Verifier;
  friend class Conductor;

  static constexpr size_t kRareStateBytes = sizeof(RareState) + 576;  // an empty deque's memory

  // What a step of a sweep covers: slots passed, blocks freed, or members of a set copied; and the
  // steps that a chain costs besides. Measured: together they keep a step below 0.1 us.
  static constexpr size_t kSlotsAStep = 16;
  static constexpr size_t kFreedAStep = 8;
  static constexpr size_t kMembersAStep = 64;
  static constexpr size_t kStepsAChain = 16;
  static constexpr size_t kStepsASegment = 8;
  static constexpr size_t kStepsASequence = 2;
  static constexpr int64_t kStepsAStore = 64;  // to sweep for, before a store is refused
  static constexpr size_t kStepsAParked = 8;   // for a waiting block that is placed

  // Goes chain by chain, each after the chains before it on its path. A block stored between two
  // calls either finds a sequence hash above it and gets its own at once, or is still to come here.
  void make_sequences(Steps& steps) {
    if (unsequenced_.next == kNone || !steps.left()) return;
    while (unsequenced_.next != kNone && steps.left()) {
      const NodeId id = unsequenced_.next;
      unsequenced_.next = tree_.successor(id);
      const Chain& chain = tree_.node(id).chain;
      sequences_->chain(tree_.parent_of(chain.block()[0]), chain.block(), chain.local(),
                        chain.len(), 0, false);
      if (placements_ != nullptr) placements_->sequenced(chain.block(), chain.len());
      steps.take(1 + chain.len() * kStepsASequence);
    }
    if (unsequenced_.next == kNone) tree_.unwatch(&unsequenced_);
    resolve_waiting(steps);
  }

  // The index of a layer's counter in `Rank::held`.
  size_t counter(LayerId layer) const {
    if (layer < kFirstGroupLayer) return layer;
    return kFirstGroupLayer + std::min<uint32_t>(tier_of(layer), kTierLayers);
  }

  bool has_room(RankId id, uint32_t n) const {
    const auto fits = [&](uint32_t used) { return used <= max_blocks_ && n <= max_blocks_ - used; };
    return fits(tree_.block_count()) && fits(records_.live()) && fits(ranks_[id].names.size());
  }

  void insert_name(RankId id, uint64_t name, BlockId block, LayerMask layers) {
    ranks_[id].names.insert(name, block, layers, keys(), records_);
    ++budget_->names;
  }

  void erase_name(RankId id, uint32_t slot) {
    ranks_[id].names.erase(slot, keys(), records_);
    --budget_->names;
  }

  BlockId block_of(RankId id, uint64_t name) const {
    return keys().block(ranks_[id].names.value(ranks_[id].names.find(name, keys())));
  }

  // ---- a store (index/store.hpp)

  bool affords(RankId id, const Store& s, Position at);
  bool refuse(uint32_t n);
  void make_room(RankId id, uint32_t n);
  bool refers_to_itself(const Store& s);
  void place(RankId id, const Store& s, Position at, BlockId below = kNone);
  void sequence_blocks(const Store& s);
  bool forget_other_content(RankId id, const Store& s, size_t met);
  void name_blocks(RankId id, const Store& s);
  bool is_copy(RankId id, uint32_t n, bool has_parent, Origin origin = Origin::UNKNOWN) const;
  void hold_gained(RankId id, const Store& s);
  void hold(RankId id, NodeId node, LayerId layer, uint32_t from, uint32_t to);
  void note(RankId id, Change::Kind kind, LayerId layer, NodeId node, uint32_t from, uint32_t to);
  void add_layer(RankId id, uint32_t slot, LayerId layer);
  void gain_name(RankId id, uint32_t slot, LayerId layer);
  void add_copy(RankId id, uint64_t name, LayerId layer);

  // ---- a removal (index/remove.hpp)

  void forget_name(RankId id, uint32_t slot);
  void lose(RankId id, BlockId block, LayerId layer);
  bool take_copy(RankId id, uint64_t name, LayerId layer);
  void trim(NodeId node);
  void keep_ghost(RankId id, uint32_t slot, uint64_t name, BlockId block);
  void forget_oldest_ghost(RankId id);

  // ---- parked blocks (index/parked.hpp)

  void park_run(RankId id, const Store& s);
  void park(RankId id, uint64_t name, LayerId layer, const Store* content);
  void bound_parked();
  bool is_parked(uint32_t at, uint64_t stamp) const;
  uint32_t parked_at(RankId id, uint64_t name) const;
  void forget_parked(uint32_t at);
  bool unpark(RankId id, uint64_t name, LayerId layer);
  void drop_parked(RankId id, LayerMask mask);
  bool place_parked(Steps& steps);
  bool is_awaited(RankId id, uint64_t name) const;
  void gain_parked_layers(RankId id, uint64_t name);
  void place_parked_child(RankId id, uint64_t parent, uint32_t at);

  // ---- clearing, and sweeping retired ranks (index/retire.hpp)

  void pass_on(RankId from, RankId to);
  bool lies_within(RankId id, LayerMask mask) const;
  void clear_names(RankId id, LayerMask mask);
  void clear_rare_state(RareState& rare, LayerMask mask);
  size_t leave_chain(RankId id, NodeId node, LayerMask mask);
  void sweep_retired(Steps& steps);
  bool sweep_rare_state(RankId id, Steps& steps);
  bool sweep_names(RankId id, Steps& steps);
  void sweep_chain(RankId id, NodeId node, Steps& steps);

  uint32_t block_size_;
  uint32_t max_blocks_;
  Tree tree_;
  Arena<Record> records_;
  CountArena counts_;
  ParkedArena parked_blocks_;
  KeyedHash hash_;  // of names
  std::shared_ptr<Budget> budget_;
  std::shared_ptr<Chronicle> chronicle_;
  std::vector<Rank> ranks_;
  std::vector<RankId> free_ranks_;
  std::vector<RankId> retired_;
  std::vector<std::pair<uint32_t, uint32_t>> group_layers_;
  Numbers terms_;
  std::unique_ptr<Sequences> sequences_;  // null until sequence hashes are kept
  Watcher unsequenced_;                   // the next chain whose blocks have none yet
  Placements* placements_ = nullptr;
  bool linked_ = false;  // some rank counts as another
  bool chunked_ = false;
  bool windowed_ = false;
  std::unordered_map<RankId, std::vector<RankId>> aliases_;  // of the ranks of kMany
  size_t max_parked_ = kMaxParked;
  ParkedQueue order_;
  size_t parked_ = 0;  // of live ranks
  uint64_t stamp_ = 0;
  std::vector<std::pair<RankId, uint64_t>> placed_;  // known names that parked blocks wait for
  uint64_t held_[kTierLayers] = {};                  // by live ranks
  IndexStats stats_;
  PromptStats asked_, announced_;
  FirstBlocks first_blocks_;
  Seeds seeds_;
  std::unique_ptr<Predicted> predicted_;

  // Scratch of the operation in progress, kept for its capacity.
  std::vector<BlockId> ids_;
  std::vector<uint8_t> gained_;
  std::vector<uint64_t> sorted_;
  std::vector<NodeId> touched_;
};

}  // namespace kvd

// Definitions of the members that are only declared above.
#include "index/parked.hpp"
#include "index/remove.hpp"
#include "index/retire.hpp"
#include "index/store.hpp"
