// Publishers of the KV Events standard, and what they hold, in the index that the workers share.
//
//   instance "a" ─┬─ source vLLM, rank 0 ──── holder ("", rank 0) ─── rank 5 of the index
//                 └─ source Mooncake ─────┬── holder ("pool-a", no rank) ─── rank 6
//                                         └── holder ("pool-b", no rank) ─── rank 9
//
// A source is one registration. A holder is a party that holds blocks in it: a backend, with or
// without a data-parallel rank. A holder is a rank of the index, with its own names table and
// layers. Media beyond the tiers are further layers.
//
// A namespace (adapter and salt) is what the two add to the seed of local hashes, so it is part of
// the path in the tree. A block that has no place yet waits for one. So the order of events does
// not matter, with two exceptions: a hash that becomes ambiguous later keeps what it meant, and a
// block whose parent announces its salt later was hashed without it (counted: parked_unsalted).
//
// The class is here, with its short members. This header includes the longer ones, by subject:
//
//   conductor/sources.hpp    registrations, and the worker ranks that their holders count as
//   conductor/events.hpp     stores, removals, clears
//   conductor/meaning.hpp    which block an announced hash means
//   conductor/waiting.hpp    blocks that have no place yet, and how they get one
//
// Invariants
//   1. a parked block of a holder has an entry for each thing that it waits for; entries of blocks
//      that are parked no longer are recognised by their stamp, and dropped in time;
//   2. only an engine's own events make second copies (index/index.hpp); in standard events,
//      storing a hash again changes nothing, and its removal takes all copies.
//
// Costs: those of the index; one look-up a block while anything waits; and for a hash that no
// holder of the instance has announced, one look-up for each rank of the index. A waiting block
// takes about 250 bytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "conductor/types.hpp"
#include "conductor/waiters.hpp"
#include "base/hash.hpp"
#include "index/index.hpp"
#include "base/keyed.hpp"
#include "index/sequence.hpp"
#include "base/steps.hpp"
#include "index/worker.hpp"

namespace kvd {

struct StagedWaiting;

class Conductor final : public Placements {
 public:
  enum class StoreOutcome : uint8_t { PLACED, PARKED, FULL, REFUSED };

  // A conductor without sources costs the index nothing: sequence hashes are kept from the first
  // source, or the first query by hash, on.
  Conductor(Index& index, uint64_t seed) : index_(index), seed_(seed) {}
  Conductor(const Conductor&) = delete;
  Conductor& operator=(const Conductor&) = delete;
  ~Conductor() override { index_.placements_ = nullptr; }

  const Index& index() const { return index_; }
  uint64_t seed() const { return seed_; }
  const std::vector<std::unique_ptr<Instance>>& instances() const { return instances_; }
  const std::vector<Medium>& media() const { return media_; }
  bool anything_waits() const { return !waiters_.empty(); }
  size_t waiter_count() const { return waiters_.size(); }
  size_t bytes() const { return waiters_.bytes(); }

  // Whether queries by hash find all blocks that can have a sequence hash.
  bool sequenced() const { return index_.sequenced(); }

  // Keeps sequence hashes from now on, and makes missing ones in about `budget` steps of at most
  // 0.1 us; true when none is missing.
  bool sequence(uint32_t budget) {
    index_.keep_sequences(seed_, this);
    return index_.make_sequences(budget);
  }

  // ---- registrations (conductor/sources.hpp)

  Source* add_source(const std::string& key, uint64_t home, uint64_t adapter, uint32_t dp_rank,
                     bool store);

  // Ends a source: its blocks no longer count, and `Index::sweep` frees them.
  void remove_source(Source* source);

  // Forgets the source's holders that hold nothing.
  void drop_idle(Source* source);

  Instance* find(const std::string& key) const {
    const auto it = by_key_.find(key);
    return it == by_key_.end() ? nullptr : it->second;
  }

  // The instance of the stores that serve every instance; null while there is none.
  Instance* common() const { return common_; }

  std::vector<std::string> keys_of_instances() const {
    std::vector<std::string> found;
    for (const auto& instance : instances_) found.push_back(instance->key);
    return found;
  }

  // Makes the instance's ranks count as those of a worker of the index, or of none (null).
  void link(Instance* instance, Worker* worker);

  // The holder's rank, made when it is new; kNone when too many holders of the source hold blocks.
  RankId holder(Source* source, uint32_t backend, bool ranked, uint32_t dp_rank);

  // The layer of a medium, given by its upper-case name and as a JSON member name; kNone when there
  // are too many, or when it cannot be a member.
  LayerId medium(const std::string& name, const std::string& key);

  // ---- events (conductor/events.hpp)

  // Stores a run, or at most `most_parked` blocks of one whose parent is unknown: `e.n` becomes how
  // many. The caller then calls `resolve_waiting`.
  StoreOutcome store(Source* source, RankId id, StoredBlocks& e, uint32_t most_parked = kNone);

  // Stores blocks announced by hash alone, from `from` on until the steps are used up, at least
  // one. Returns the position reached, kNone when they are refused because the index is full. The
  // caller then calls `resolve_waiting`.
  uint32_t store_named(Source* source, RankId id, const uint64_t* hashes, uint32_t from, uint32_t n,
                       LayerId layer, uint64_t space, bool by_engine, bool has_parent,
                       Steps& steps);

  // Takes the layers of `mask` from the block that the holder calls `hash`.
  void remove(Source* source, RankId id, uint64_t hash, LayerMask mask, uint64_t space,
              bool by_engine);

  // ---- kept by another process (conductor/kept_holdings.hpp); then call `resolve_waiting`

  bool bring_back(RankId id, const Store& s, uint64_t above);
  bool wait_again(RankId id, const StagedWaiting& waiting, LayerId layer);

  // The block before a run that was kept, kNone while that block is unknown.
  BlockId parent_of_kept(RankId id, uint64_t parent, uint64_t space, uint64_t above) const;

  // From now on, a re-announcement of the source's restored blocks may mean a second copy.
  void settled(const Source& source) {
    for (const Holder& holder : source.holders) index_.rank(holder.id).restored = false;
  }

  // Drops what the holder has on the layers of `mask`, in one namespace or with `all` in every one.
  void clear(Source* source, RankId id, LayerMask mask, uint64_t space, bool all);

  // ---- cache groups

  RankTraits& traits(RankId id) { return index_.rank(id); }

  // The layer of a cache group on the holder's device, which must hold the last `blocks` blocks of
  // a reusable prefix; kNone when there are too many layers.
  LayerId device_group(RankId id, int32_t group, uint32_t blocks) {
    const LayerId layer = device_group(group);
    if (layer != kNone && blocks != 0) index_.set_window(id, layer, blocks);
    return layer;
  }

  LayerId device_group(int32_t group) {
    return index_.group_layer(kDeviceLayer, static_cast<uint32_t>(group));
  }

  // Forgets the cache groups: another engine process speaks from now on.
  void forget_groups(const Source& source) {
    for (const Holder& holder : source.holders) {
      RankTraits& traits = index_.rank(holder.id);
      traits.groups.clear();
      traits.windows.clear();
      traits.main_group = -1;
    }
  }

  // ---- queries

  // Places blocks that were announced by sequence hash alone behind `last`, the prompt's last block
  // in the tree (kNone: none); at most kExplainedAtOnce. False if it has placed none.
  bool place_by_prompt(BlockId last, const uint64_t* locals, const uint64_t* plain, size_t from,
                       size_t n, uint64_t space);

  // Calls visit(rank, layers) for each waiting block that counts as a key's, which the tree lacks.
  template <class Visit>
  void each_credit(uint64_t key, Visit&& visit) const;

  // Counts a query whose first block a holder has, once for each source.
  void note_match(RankId id) const {
    Source& source = *owners_[id];
    if (source.last_matched == source.instance->asked) return;
    source.last_matched = source.instance->asked;
    ++source.matched;
  }

  // The (block, holder, medium) triples of a source in the tree, and the number of waiting blocks.
  std::pair<uint64_t, uint64_t> held_by(const Source& source) const {
    std::pair<uint64_t, uint64_t> held{};
    for (const Holder& holder : source.holders) {
      const Rank& rank = index_.ranks_[holder.id];
      held.first += rank.credited() + rank.held[Rank::kCounters - 1];
      held.second += rank.parked();
    }
    return held;
  }

  // ---- called by the index
  //
  // They are virtual, so they are defined in the class: a module that includes a class with a
  // virtual method that is only declared would emit the class's table, and everything that it
  // refers to.

  void placed(const Store& s, const BlockId* blocks) override {
    if (waiters_.empty()) return;
    for (uint32_t i = 0; i < s.n; ++i) {
      if (const uint64_t key = sequences().key_of(blocks[i])) await(key);
      await(sequences().key(s.space, s.names[i]));  // a worker's name; holders' are announced
      if (common_ == nullptr) continue;
      for (const Source* each : common_->sources) {
        if (each->home != s.space) await(sequences().key(each->home, s.names[i]));
      }
    }
  }

  void sequenced(const BlockId* blocks, uint32_t n) override {
    if (waiters_.empty()) return;
    for (uint32_t i = 0; i < n; ++i) {
      if (const uint64_t key = sequences().key_of(blocks[i])) await(key);
    }
  }

  // For a prompt of the base model, whose local hashes are the plain ones if the seeds are equal.
  bool place_by_prompt(BlockId last, const uint64_t* locals, size_t from, size_t n) override {
    return from != n && !waiters_.empty() && seed_ == kBaseSeed &&
           place_by_prompt(last, locals, locals, from, n, 0);
  }

  // One block may set off all that wait, so this goes in slices, too.
  bool resolve_waiting(Steps& steps) override {
    while (steps.left() && !(untried_.empty() && at_ == kNone && work_.empty())) {
      if (!untried_.empty()) {
        const Waiter waiter = untried_.back();
        untried_.pop_back();
        try_place(waiter);
      } else if (at_ != kNone) {
        try_next();
      } else {
        at_ = waiters_.newest(work_.back());
        work_.pop_back();
        steps.take(1);
        continue;
      }
      steps.take(kStepsAWaiter + tables_asked());
    }
    if (!untried_.empty() || at_ != kNone || !work_.empty()) return false;
    prune(steps);
    return true;
  }

  const Sequences& sequences() const { return *index_.sequences_; }

  // Throws if an invariant does not hold.
  template <class Require>
  void verify(Require&& require) const;

 private:
  // Entries of a parked block: for its parent, its hash and its sequence hash, and a stale one.
  static constexpr size_t kWaitersABlock = 4;

  NameKeys keys() const { return index_.keys(); }

  const Source* owner(RankId id) const { return id < owners_.size() ? owners_[id] : nullptr; }

  Holder& holder_of(Source& source, RankId id) {
    return *std::find_if(source.holders.begin(), source.holders.end(),
                         [&](const Holder& each) { return each.id == id; });
  }

  void note(Source& source, RankId id, uint64_t space) { holder_of(source, id).note(space); }

  // ---- registrations (conductor/sources.hpp)

  void prepare();
  static bool before(const Holder& a, const Holder& b);
  void give_back(const Instance& instance);
  static bool has_row(const Instance& instance, uint32_t dp_rank);
  template <class T>
  static void drop(std::vector<T*>& list, const T* item);
  template <class T>
  static void drop_owned(std::vector<std::unique_ptr<T>>& list, const T* item);
  void own(RankId id, Source* source);
  void show(const Instance& instance);
  void show(const Instance& instance, const Holder& holder,
            const std::vector<std::pair<uint32_t, RankId>>& ranks);
  static Instance::InstanceRank& row(Instance& instance, uint32_t dp_rank);
  static void list_rows(Instance& instance);

  // ---- the meaning of hashes (conductor/meaning.hpp)

  static uint64_t name_of(const Source& source, uint64_t hash, uint64_t space, bool by_engine);
  bool knows(const Rank& rank, uint64_t name) const;
  bool has(const Rank& rank, uint64_t name, LayerId layer) const;
  uint32_t slot_in(uint64_t home, RankId id, uint64_t hash, uint64_t space, bool any_space) const;
  BlockId block_in(uint64_t home, RankId id, uint64_t hash, uint64_t space, bool any_space) const;
  BlockId meaning(const Source& source, RankId id, uint64_t hash, uint64_t space,
                  bool any_space) const;
  BlockId meaning_or_standard(const Source& source, RankId id, uint64_t hash, uint64_t space,
                              bool any_space) const;
  BlockId nearer(const Source& source, RankId id, uint64_t hash, uint64_t space,
                 bool any_space) const;
  BlockId among(const Source& source, RankId asks, uint64_t hash, uint64_t space,
                bool any_space) const;
  size_t tables_asked();
  BlockId elsewhere(const Instance& instance, uint64_t hash, uint64_t space, bool any_space) const;
  uint64_t standard_parent(const Source& source, RankId id, const StoredBlocks& e,
                           uint64_t space) const;
  uint64_t parked_sequence(const Source& source, RankId id, uint64_t hash, uint64_t space) const;

  // ---- placing (conductor/events.hpp)

  struct Parent {       // of a run
    BlockId block;      // kNone: unknown
    uint64_t space;     // of the run
    uint64_t sequence;  // its sequence hash, if no name leads to it; 0 unknown
  };
  Parent parent_of(const Source& source, RankId id, const StoredBlocks& e);
  void hash_tokens(const StoredBlocks& e, uint64_t space);
  bool affords(RankId id, const Store& s, BlockId below);
  void put(RankId id, const Store& s, BlockId below);
  void adopt(RankId id, uint64_t name, BlockId block, LayerMask layers);
  bool credit(Source& source, RankId id, uint64_t hash, LayerId layer, uint64_t space,
              bool by_engine, bool copy);
  void clear_space(RankId id, LayerMask mask, uint64_t space);

  bool await_sequences(RankId id, const Store& s);

  // ---- waiting blocks (conductor/waiting.hpp)

  bool can_wait(uint32_t n) const;
  void park_run(Source& source, RankId id, const StoredBlocks& e, const Store& s, uint64_t above);
  void set_aside(Source& source, RankId id, uint64_t hash, const Store& one, uint64_t sequence,
                 bool by_engine);
  void take_over_parked(RankId id, uint64_t name);
  uint64_t behind(uint64_t key) const;
  void enter(uint64_t key, uint32_t parked, WaitsFor kind);
  void await(uint64_t key);
  void announce(const Source& source, uint64_t space, uint64_t hash, bool by_engine);
  const Parked* parked_of(const Waiter& waiter) const;
  bool has_entry(uint64_t key, const Parked& parked) const;
  void try_next();
  void try_place(const Waiter& waiter);
  void try_credit(Source& source, const Waiter& waiter, const Parked& parked);
  void try_behind_parent(Source& source, const Waiter& waiter, const Parked& parked);
  void take_out(const Waiter& waiter);
  bool place(uint64_t key, uint64_t local, uint64_t plain, uint64_t space, BlockId below);
  void prune(Steps& steps);

  Index& index_;
  uint64_t seed_;  // of sequence hashes
  // A rank, made with the first source, that holds blocks which must not be trimmed meanwhile.
  RankId guard_ = kNone;
  std::vector<std::unique_ptr<Source>> sources_;
  std::vector<std::unique_ptr<Instance>> instances_;
  std::unordered_map<std::string, Instance*, KeyedHash> by_key_;
  Instance* common_ = nullptr;   // of kCommonKey
  std::vector<Source*> owners_;  // by rank; null for a worker's rank
  std::vector<Medium> media_;    // beyond the tiers, in the order of their layers
  Waiters waiters_;
  KeyedHash hash_;                   // of keys under which children wait
  std::vector<Waiter> untried_;      // of blocks that have waited in another process
  std::vector<uint64_t> work_;       // keys whose meaning has changed
  uint32_t at_ = kNone;              // the next waiter of such a key, to be tried
  uint32_t prune_at_ = 0;            // the waiter that `prune` has reached
  mutable size_t tables_asked_ = 0;  // names tables that `elsewhere` has searched, see tables_asked

  // Scratch of the operation in progress, kept for its capacity.
  std::vector<uint64_t> names_;
  std::vector<uint64_t> locals_;
  std::vector<uint64_t> plain_;
};

}  // namespace kvd

// Definitions of the members that are only declared above.
#include "conductor/events.hpp"
#include "conductor/meaning.hpp"
#include "conductor/sources.hpp"
#include "conductor/waiting.hpp"
