// Publishers of the KV Events standard, and what they hold, in the index that the workers share.
//
//   instance "a" ─┬─ source vLLM, rank 0 ──── holder ("", rank 0) ─── rank 5 of the index
//                 └─ source Mooncake ─────┬── holder ("pool-a", no rank) ─── rank 6
//                                         └── holder ("pool-b", no rank) ─── rank 9
//
// A source is one registration. A holder is who holds blocks in it: a backend, and a data-parallel
// rank or none; it is a rank of the index, with a names table and layers of its own. Media beyond
// the tiers are further layers.
//
// A namespace (adapter and salt) is what its names add to the seed of local hashes, so it is part of
// the path in the tree. An announced hash means a block in its namespace only: a holder's names table
// has it as it is in the namespace of the registration, and mixed with the namespace in others.
//
//   announced hash ── own names ── others of the source ── of the instance ── of all, if they agree
//                  └─ else: the sequence hash itself, if the tree has a block of it
//                  └─ else: parked under its name, and `loose_` knows it by what it waits for
//
//   loose_   key of hash 501   CREDIT  rank 6, name 501     told without tokens: counts as the block
//                                                           of sequence hash 501 until 501 is known
//            key of hash 77    CHILD   rank 5, name 78      78 is the block behind 77
//            key of hash 78    ALIAS   rank 5, name 78      what 78 is called
//
// When a block is placed, by whomever, the keys of its sequence hash and of its announced hash are
// looked up here, and what waited for them goes into the tree. So the order of events does not
// matter, but for two: a hash that becomes ambiguous later keeps what it meant, and a block whose
// parent tells of its salt later was hashed without it (counted: parked_unsalted).
//
// Invariants
//   1. a parked block of a holder has an entry for each thing it waits for; entries of blocks that
//      are parked no longer are recognised by their stamp, and dropped with time;
//   2. only an engine's own events make second copies (index.hpp); in a standard event storing a hash
//      again changes nothing, and its removal takes all copies.
//
// Costs: those of the index, a look-up a block while anything is loose, and for a hash that nobody of
// the instance has announced one look-up a rank of the index. A loose block takes about 300 bytes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hash.hpp"
#include "index.hpp"
#include "steps.hpp"
#include "worker.hpp"

namespace kvd {

// Blocks of a partition told without tokens or parent, once it has publishers of the standard: a
// store alone, without its engines, tells of nothing else. Some 300 MB.
constexpr size_t kMaxLoose = size_t{1} << 20;
// Backends and ranks of one source. The bound keeps a mad publisher from making one a number.
constexpr size_t kMaxHolders = 4096;
// Steps of making sequence hashes at the first source, two a block: 1 to 1.5 ms.
constexpr uint32_t kSequencedAtOnce = 8192;
// Steps of a slice (steps.hpp), of 0.1 us.
constexpr size_t kStepsACredit = 20;  // a hash without tokens
constexpr size_t kStepsALook = 20;    // at something that waits

struct Holder {
  uint32_t backend;
  bool ranked;
  uint32_t dp_rank;  // 0 without one
  RankId id;
  uint64_t space = 0;    // the namespace of its blocks
  bool used = false;     // it has had any
  bool several = false;  // in more than one namespace

  std::pair<uint64_t, uint32_t> order() const { return {uint64_t{backend} << 1 | ranked, dp_rank}; }

  void note(uint64_t in) {
    several = several || (used && space != in);
    space = in;
    used = true;
  }
};

struct Medium {
  std::string name;  // upper case
  std::string key;   // as a JSON member name, quotes included
};

struct Instance;

struct Source {
  Instance* instance;
  // Of questions, for those who look why none finds what it holds.
  uint64_t matched;       // that have found their first block with it
  uint64_t last_matched;  // `Instance::asked` at the last of them
  uint64_t asked_before;  // `Instance::asked` as it came
  uint64_t home;          // namespace of the registration
  uint32_t dp_rank;       // registered
  bool store;
  std::vector<Holder> holders;  // by `order`
};

struct Instance {
  // A data-parallel rank, and who holds blocks for it.
  struct Row {
    uint32_t dp_rank;
    std::vector<RankId> ids;
  };

  std::string key;  // its id as a JSON member name, quotes included
  std::vector<Source*> sources;
  Worker* worker = nullptr;    // of the same id, if there can be one
  std::vector<Row> rows;       // ascending by rank
  std::vector<RankId> shared;  // who holds blocks for all of them
  uint64_t asked = 0;          // questions about a block or more that have shown it
};

// A stored event, understood.
struct Told {
  const uint64_t* hashes;
  uint32_t n;
  bool has_parent;
  uint64_t parent;
  const uint32_t* tokens;
  LayerId layer;
  uint64_t space;
  bool inherits;   // the parent's namespace goes before `space`
  bool by_engine;  // no standard event: hashes mean what they mean to the engine, in any namespace
  const uint32_t* mm_begin;  // n + 1 offsets into mm; nullptr without objects
  const uint64_t* mm;
};

class Conductor final : public Placements {
 public:
  enum class Outcome : uint8_t { PLACED, PARKED, FULL, REFUSED };

  // Costs the index nothing: what it needs of that comes with the first source, or question by hash.
  Conductor(Index& index, uint64_t seed) : index_(index), seed_(seed) {}
  Conductor(const Conductor&) = delete;
  Conductor& operator=(const Conductor&) = delete;
  ~Conductor() override { index_.placements_ = nullptr; }

  const Index& index() const { return index_; }
  uint64_t seed() const { return seed_; }
  const std::vector<std::unique_ptr<Instance>>& instances() const { return instances_; }
  const std::vector<Medium>& media() const { return media_; }
  bool anything_loose() const { return !loose_.empty(); }
  size_t loose_count() const { return loose_.size(); }
  size_t bytes() const { return loose_.size() * kLooseBytes; }

  // Whether questions by hash find all blocks that can be found so.
  bool sequenced() const { return index_.sequenced(); }

  // Keeps sequence hashes from now on, and makes those that are missing, in about `budget` steps of
  // at most 0.1 us; true when none is.
  bool sequence(uint32_t budget) {
    index_.keep_sequences(seed_, this);
    return index_.make_sequences(budget);
  }

  // ---- who is registered

  Source* add_source(const std::string& key, uint64_t home, uint32_t dp_rank, bool store) {
    if (guard_ == kNone) prepare();
    Instance* instance = find(key);
    if (instance == nullptr) {
      instances_.push_back(std::make_unique<Instance>());
      instance = instances_.back().get();
      instance->key = key;
      by_key_[key] = instance;
    }
    sources_.push_back(std::make_unique<Source>(Source{instance, 0, 0, instance->asked, home, dp_rank, store, {}}));
    instance->sources.push_back(sources_.back().get());
    list_rows(*instance);
    return sources_.back().get();
  }

  // Its blocks no longer count; `Index::sweep` frees them.
  void remove_source(Source* source) {
    for (const Holder& holder : source->holders) {
      owners_[holder.id] = nullptr;
      index_.retire_rank(holder.id);
    }
    Instance* instance = source->instance;
    drop(instance->sources, source);
    if (instance->sources.empty()) {
      link(instance, nullptr);
      by_key_.erase(instance->key);
      drop_owned(instances_, instance);
    } else {
      list_rows(*instance);
    }
    drop_owned(sources_, source);
  }

  Instance* find(const std::string& key) const {
    const auto it = by_key_.find(key);
    return it == by_key_.end() ? nullptr : it->second;
  }

  std::vector<std::string> keys_of_instances() const {
    std::vector<std::string> found;
    for (const auto& instance : instances_) found.push_back(instance->key);
    return found;
  }

  // The instance's ranks count as those of a worker of the index, or of none.
  void link(Instance* instance, Worker* worker) {
    if (instance->worker != nullptr) instance->worker->shared = false;
    instance->worker = worker;
    if (worker != nullptr) {
      worker->shared = true;
      for (const Source* source : instance->sources) worker->rank(index_, source->dp_rank);
    }
    show(*instance);
  }

  // The holder's rank, made when it is new; kNone when the source has too many.
  RankId holder(Source* source, uint32_t backend, bool ranked, uint32_t dp_rank) {
    const Holder wanted{backend, ranked, ranked ? dp_rank : 0, kNone};
    std::vector<Holder>& holders = source->holders;
    const auto at = std::lower_bound(holders.begin(), holders.end(), wanted, before);
    if (at != holders.end() && at->order() == wanted.order()) return at->id;
    if (holders.size() == kMaxHolders) return kNone;
    const RankId id = index_.add_rank(wanted.dp_rank);
    Rank& rank = index_.ranks_[id];
    rank.settling = rank.offloads = rank.salted = rank.hidden = rank.published = true;
    const auto made = holders.insert(at, wanted);
    made->id = id;
    own(id, source);
    show(*source->instance);
    list_rows(*source->instance);
    return id;
  }

  // The layer of a medium by its upper-case name, and as a JSON member name; kNone when there are
  // too many, or when it cannot be a member.
  LayerId medium(const std::string& name, const std::string& key) {
    if (name == "DP") return kNone;  // a row has another member of that name
    static const char* const kTiers[] = {"GPU", "CPU", "DISK", "EXTERNAL"};
    for (LayerId tier = 0; tier < kTierLayers; ++tier) {
      if (name == kTiers[tier]) return tier;
    }
    const auto at = std::find_if(media_.begin(), media_.end(), [&](const Medium& each) { return each.name == name; });
    const uint32_t number = kFirstMedium + static_cast<uint32_t>(at - media_.begin());
    const LayerId layer = index_.group_layer(number, 0);
    if (layer != kNone && at == media_.end()) media_.push_back({name, key});
    return layer;
  }

  // ---- events

  // `settle` has to follow.
  Outcome store(Source* source, RankId id, const Told& e) {
    if (!index_.has_room(id, e.n)) return Outcome::FULL;
    index_.make_room(id, e.n);
    index_.ranks_[id].settling = !e.by_engine;
    BlockId below = e.has_parent ? meaning(*source, id, e.parent, e.space, e.by_engine) : kNone;
    uint64_t space = e.space;
    if (below != kNone && e.inherits) space = sequences().space_of(below);
    note(*source, id, space);
    hash_tokens(e, space);
    names_.resize(e.n);
    for (uint32_t i = 0; i < e.n; ++i) names_[i] = name_of(*source, e.hashes[i], space, e.by_engine);
    Store s{names_.data(), locals_.data(), e.n, e.has_parent,
            name_of(*source, e.parent, space, e.by_engine), e.layer, 0, plain_.data(), space};
    if (e.n == 0) return Outcome::PLACED;
    if (index_.refers_to_itself(s)) {
      ++index_.tally_.self_references;
      return Outcome::REFUSED;
    }
    uint64_t above = 0;  // sequence hash of a parent that is not in the tree
    if (e.has_parent && below == kNone) {
      above = standard_parent(*source, id, e, space);
      if (above != 0) below = sequences().find(Sequences::key(space, above));
    }
    const bool placed = !e.has_parent || below != kNone;
    if (placed ? !affords(id, s, below) : !index_.budget_->fits(e.n)) {
      index_.refuse(e.n);
      return Outcome::FULL;
    }
    if (placed) {
      put(id, s, below);
      for (uint32_t i = 0; i < e.n; ++i) {
        settle_own(id, names_[i]);
        announce(*source, space, e.hashes[i], e.by_engine);
      }
    } else {
      park_run(*source, id, e, s, above);
    }
    return placed ? Outcome::PLACED : Outcome::PARKED;
  }

  // Blocks told by hash alone, from `from` on until the steps are used up, one at least. Returns how
  // far it has come, kNone when they are refused because the index is full. `settle` has to follow.
  uint32_t store_named(Source* source, RankId id, const uint64_t* hashes, uint32_t from, uint32_t n,
                       LayerId layer, uint64_t space, bool by_engine, bool has_parent, Steps& steps) {
    if (!index_.has_room(id, n - from)) return kNone;
    index_.ranks_[id].settling = !by_engine;
    const bool copy = index_.is_copy(id, n, has_parent);
    note(*source, id, space);
    if (from == n) return n;
    uint32_t refused = 0;
    do {
      refused += !credit(*source, id, hashes[from], layer, space, by_engine, copy);
      steps.take(kStepsACredit + looked_up());
    } while (++from != n && steps.left());
    if (refused == 0) return from;
    index_.refuse(refused);
    return kNone;
  }

  // Takes the layers of `mask` from what the holder calls `hash`.
  void remove(Source* source, RankId id, uint64_t hash, LayerMask mask, uint64_t space, bool by_engine) {
    const Rank& rank = index_.ranks_[id];
    uint64_t name = name_of(*source, hash, space, by_engine);
    if (!knows(rank, name)) {
      const uint32_t slot = slot_of(*source, id, hash, space, by_engine);
      if (slot == Names::kAbsent) {
        ++index_.tally_.removed_unknown;
        return;
      }
      name = keys().name(rank.names.value(slot));
    }
    for (LayerId layer = 0; layer < kMaxLayers; ++layer) {
      if ((mask >> layer & 1) == 0 || layer == kGhostLayer) continue;
      if (mask != 1u << layer && !has(index_.ranks_[id], name, layer)) continue;
      if (!by_engine && rank.has_copies()) index_.ranks_[id].rare->copies.erase({name, layer});
      index_.remove(id, name, layer);
    }
  }

  // Drops what the holder has on the layers of `mask` in one namespace, or with `all` in all.
  void clear(Source* source, RankId id, LayerMask mask, uint64_t space, bool all) {
    Holder& holder = holder_of(*source, id);
    for (LayerId tier = 0; tier < kTierLayers; ++tier) {
      if ((mask >> tier & 1) != 0) mask |= index_.tier_mask(tier);
    }
    if (!holder.used || (!all && !holder.several && holder.space != space)) return;
    if (!all && holder.several) return clear_space(id, mask, space);
    const RankId now = index_.clear(id, mask);
    if (mask == kAllLayers) holder.used = holder.several = false;
    if (now == id) return;
    holder.id = now;
    owners_[id] = nullptr;
    own(now, source);
    list_rows(*source->instance);
  }

  // ---- cache groups

  RankTraits& traits(RankId id) { return index_.rank(id); }

  // The layer of a cache group of the holder's device, of which a prefix needs the last `blocks`
  // blocks; kNone when there are too many.
  LayerId device_group(RankId id, int32_t group, uint32_t blocks) {
    const LayerId layer = device_group(group);
    if (layer != kNone && blocks != 0) index_.set_window(id, layer, blocks);
    return layer;
  }

  LayerId device_group(int32_t group) { return index_.group_layer(kDeviceLayer, static_cast<uint32_t>(group)); }

  // Another engine process speaks from now on.
  void forget_groups(const Source& source) {
    for (const Holder& holder : source.holders) {
      RankTraits& traits = index_.rank(holder.id);
      traits.groups.clear();
      traits.windows.clear();
      traits.main_group = -1;
    }
  }

  // ---- questions

  // Calls visit(rank, layers) for what counts as the block of a key though the tree has none.
  template <class Visit>
  void each_credit(uint64_t key, Visit&& visit) const {
    const auto range = loose_.equal_range(key);
    for (auto it = range.first; it != range.second; ++it) {
      if (it->second.kind != Kind::CREDIT) continue;
      if (const Parked* parked = parked_of(it->second)) visit(it->second.rank, parked->layers);
    }
  }

  // Counts a question that has found its first block with a holder; once for a source.
  void note_match(RankId id) const {
    Source& source = *owners_[id];
    if (source.last_matched == source.instance->asked) return;
    source.last_matched = source.instance->asked;
    ++source.matched;
  }

  // (block, holder, medium) triples of a source in the tree, and its blocks that wait for a place.
  std::pair<uint64_t, uint64_t> held_by(const Source& source) const {
    std::pair<uint64_t, uint64_t> held{};
    for (const Holder& holder : source.holders) {
      const Rank& rank = index_.ranks_[holder.id];
      held.first += rank.credited() + rank.held[Rank::kCounters - 1];
      held.second += rank.parked();
    }
    return held;
  }

  // ---- told by the index

  void placed(const Store& s, const BlockId* blocks) override {
    if (loose_.empty()) return;
    for (uint32_t i = 0; i < s.n; ++i) {
      if (const uint64_t key = sequences().key_of(blocks[i])) await(key);
      await(Sequences::key(s.space, s.names[i]));  // a worker's; a holder's names are announced
    }
  }

  void sequenced(const BlockId* blocks, uint32_t n) override {
    if (loose_.empty()) return;
    for (uint32_t i = 0; i < n; ++i) {
      if (const uint64_t key = sequences().key_of(blocks[i])) await(key);
    }
  }

  // What can be placed now may be all that waits, so it is done in slices, too.
  bool settle(Steps& steps) override {
    while (steps.left() && !(looked_at_ == waiting_.size() && work_.empty())) {
      if (looked_at_ != waiting_.size()) {
        const Loose loose = waiting_[looked_at_++];
        look_at(loose);
        steps.take(kStepsALook + looked_up());
      } else {
        const uint64_t key = work_.back();
        work_.pop_back();
        look_again(key);
        steps.take(1 + waiting_.size());
      }
    }
    if (looked_at_ != waiting_.size() || !work_.empty()) return false;
    if (waiting_.capacity() > kWaitingKept) std::vector<Loose>().swap(waiting_), looked_at_ = 0;
    prune(steps);
    return true;
  }

  const Sequences& sequences() const { return *index_.sequences_; }

  // Throws where an invariant does not hold.
  template <class Require>
  void verify(Require&& require) const {
    for (RankId id = 0; id < index_.rank_end(); ++id) {
      const Rank& rank = index_.rank(id);
      if (!rank.live || id >= owners_.size() || owners_[id] == nullptr) continue;
      if (rank.rare == nullptr) continue;
      for (const auto& [name, p] : rank.rare->parked) {
        const uint64_t key = Sequences::key(p.space, p.has_content ? p.parent : p.hash);
        require(has_entry(id, name, p.has_content ? behind(key) : key),
                "conductor 1: what is parked waits for something");
      }
    }
  }

 private:
  enum class Kind : uint8_t { CREDIT, ALIAS, CHILD };
  struct Loose {  // a parked block, by one thing that it waits for
    RankId rank;
    uint64_t name;
    uint64_t stamp;
    Kind kind;
  };

  static constexpr size_t kLooseBytes = 56;  // a hash node
  // Entries of a parked block: its parent, its hash, its sequence hash, and one that is stale.
  static constexpr size_t kMostALoose = 4;
  static constexpr size_t kWaitingKept = 65536;  // entries of `waiting_`, 2 MB

  // What few blocks need of sequence hashes at the first source is made at once.
  void prepare() {
    sequence(kSequencedAtOnce);
    index_.max_parked_ = kMaxLoose;
    guard_ = index_.add_rank(0);
    index_.show_as(guard_, kNone);
  }

  static bool before(const Holder& a, const Holder& b) { return a.order() < b.order(); }

  template <class T>
  static void drop(std::vector<T*>& list, const T* item) {
    list.erase(std::find(list.begin(), list.end(), item));
  }

  template <class T>
  static void drop_owned(std::vector<std::unique_ptr<T>>& list, const T* item) {
    list.erase(std::find_if(list.begin(), list.end(), [&](const auto& each) { return each.get() == item; }));
  }

  NameKeys keys() const { return index_.keys(); }

  void own(RankId id, Source* source) {
    if (owners_.size() <= id) owners_.resize(id + 1, nullptr);
    owners_[id] = source;
  }

  const Source* owner(RankId id) const { return id < owners_.size() ? owners_[id] : nullptr; }

  Holder& holder_of(Source& source, RankId id) {
    return *std::find_if(source.holders.begin(), source.holders.end(),
                         [&](const Holder& each) { return each.id == id; });
  }

  void note(Source& source, RankId id, uint64_t space) { holder_of(source, id).note(space); }

  // Lets the instance's holders count as ranks of its worker, those without a rank as each of them.
  void show(const Instance& instance) {
    std::vector<std::pair<uint32_t, RankId>> ranks;
    for (const bool ranked : {true, false}) {
      if (!ranked && instance.worker != nullptr) ranks = instance.worker->ranks;
      for (const Source* source : instance.sources) {
        for (const Holder& holder : source->holders) {
          if (holder.ranked == ranked) show(instance, holder, ranks);
        }
      }
    }
    // What nothing but a conductor tells of is salted where its events say so.
    for (const auto& rank : ranks) {
      if (!index_.rank(rank.second).listed) index_.rank(rank.second).salted = true;
    }
  }

  void show(const Instance& instance, const Holder& holder, const std::vector<std::pair<uint32_t, RankId>>& ranks) {
    if (instance.worker == nullptr) {
      index_.show_as(holder.id, kNone);
    } else if (holder.ranked) {
      index_.show_as(holder.id, instance.worker->rank(index_, holder.dp_rank));
    } else {
      std::vector<RankId> ids;
      for (const auto& rank : ranks) ids.push_back(rank.second);
      index_.show_among(holder.id, std::move(ids));
    }
  }

  static Instance::Row& row(Instance& instance, uint32_t dp_rank) {
    auto& rows = instance.rows;
    const auto at = std::lower_bound(rows.begin(), rows.end(), dp_rank,
                                     [](const Instance::Row& a, uint32_t b) { return a.dp_rank < b; });
    if (at != rows.end() && at->dp_rank == dp_rank) return *at;
    return *rows.insert(at, {dp_rank, {}});
  }

  static void list_rows(Instance& instance) {
    instance.rows.clear();
    instance.shared.clear();
    for (const Source* source : instance.sources) {
      row(instance, source->dp_rank);
      for (const Holder& holder : source->holders) {
        if (holder.ranked) {
          row(instance, holder.dp_rank).ids.push_back(holder.id);
        } else {
          instance.shared.push_back(holder.id);
        }
      }
    }
  }

  // ---- what a hash means

  static uint64_t name_of(const Source& source, uint64_t hash, uint64_t space, bool by_engine) {
    return by_engine || space == source.home ? hash : hash ^ mix64(space ^ source.home);
  }

  bool knows(const Rank& rank, uint64_t name) const {
    return rank.names.find(name, keys()) != Names::kAbsent ||
           (rank.parked() != 0 && rank.rare->parked.count(name) != 0);
  }

  bool has(const Rank& rank, uint64_t name, LayerId layer) const {
    const uint32_t slot = rank.names.find(name, keys());
    if (slot != Names::kAbsent) return (keys().layers(rank.names.value(slot)) >> layer & 1) != 0;
    if (rank.parked() == 0) return false;
    const auto it = rank.rare->parked.find(name);
    return it != rank.rare->parked.end() && (it->second.layers >> layer & 1) != 0;
  }

  // Slot of what a rank calls `hash`. An engine's own names mean what they mean in any namespace.
  uint32_t slot_in(uint64_t home, RankId id, uint64_t hash, uint64_t space, bool any_space) const {
    const Names& names = index_.ranks_[id].names;
    const auto fits = [&](uint32_t slot) {
      return slot != Names::kAbsent &&
             (any_space || sequences().space_of(keys().block(names.value(slot))) == space);
    };
    const uint32_t as_told = names.find(hash, keys());
    if (fits(as_told)) return as_told;
    if (space == home) return Names::kAbsent;
    const uint32_t mixed = names.find(hash ^ mix64(space ^ home), keys());
    return fits(mixed) ? mixed : Names::kAbsent;
  }

  uint32_t slot_of(const Source& source, RankId id, uint64_t hash, uint64_t space, bool any_space) const {
    return slot_in(source.home, id, hash, space, any_space);
  }

  BlockId block_in(uint64_t home, RankId id, uint64_t hash, uint64_t space, bool any_space) const {
    const uint32_t slot = slot_in(home, id, hash, space, any_space);
    return slot == Names::kAbsent ? kNone : keys().block(index_.ranks_[id].names.value(slot));
  }

  // The block that `hash` means to a holder: by its own names, its source's, its instance's, or by
  // those of all others where they agree.
  BlockId meaning(const Source& source, RankId id, uint64_t hash, uint64_t space, bool any_space) const {
    const BlockId found = nearer(source, id, hash, space, any_space);
    return found != kNone ? found : elsewhere(*source.instance, hash, space);
  }

  // The same, or the block of that sequence hash, which is found sooner than the names of all others.
  BlockId meaning_or_standard(const Source& source, RankId id, uint64_t hash, uint64_t space, bool any_space) const {
    BlockId found = nearer(source, id, hash, space, any_space);
    if (found == kNone) found = sequences().find(Sequences::key(space, hash));
    return found != kNone ? found : elsewhere(*source.instance, hash, space);
  }

  BlockId nearer(const Source& source, RankId id, uint64_t hash, uint64_t space, bool any_space) const {
    BlockId found = block_in(source.home, id, hash, space, any_space);
    if (found != kNone) return found;
    found = among(source, id, hash, space, any_space);
    for (const Source* other : source.instance->sources) {
      if (found != kNone) return found;
      if (other != &source) found = among(*other, id, hash, space, any_space);
    }
    return found;
  }

  BlockId among(const Source& source, RankId asks, uint64_t hash, uint64_t space, bool any_space) const {
    for (const Holder& holder : source.holders) {
      if (holder.id == asks) continue;
      const BlockId found = block_in(source.home, holder.id, hash, space, any_space);
      if (found != kNone) return found;
    }
    return kNone;
  }

  // Returns how many tables have been asked since it was called last; each takes a step.
  size_t looked_up() { return std::exchange(looked_up_, 0); }

  BlockId elsewhere(const Instance& instance, uint64_t hash, uint64_t space) const {
    BlockId found = kNone;
    looked_up_ += index_.rank_end();
    for (RankId id = 0; id < index_.rank_end(); ++id) {
      if (!index_.ranks_[id].live || index_.ranks_[id].names.size() == 0) continue;
      const Source* source = owner(id);
      if (source != nullptr && source->instance == &instance) continue;
      const BlockId here = block_in(source == nullptr ? 0 : source->home, id, hash, space, false);
      if (here == kNone || here == found) continue;
      if (found != kNone) return kNone;
      found = here;
    }
    return found;
  }

  // The sequence hash of a parent that no name leads to, 0 unknown: the hash itself where the event
  // follows the standard, or where somebody holds a block of that hash; else a parked block's.
  uint64_t standard_parent(const Source& source, RankId id, const Told& e, uint64_t space) const {
    if (sequences().next(e.parent, plain_[0]) == e.hashes[0]) return e.parent;
    return parked_sequence(source, id, e.parent, space);
  }

  // The sequence hash of parked blocks that are called `hash`: one's own, else what all others say.
  uint64_t parked_sequence(const Source& source, RankId id, uint64_t hash, uint64_t space) const {
    uint64_t found = 0;
    bool clear = true;
    const auto range = loose_.equal_range(Sequences::key(space, hash));
    for (auto it = range.first; it != range.second; ++it) {
      const Loose& loose = it->second;
      const Parked* parked = parked_of(loose);
      if (parked == nullptr || parked->hash != hash || parked->sequence == 0) continue;
      if (loose.rank == id) return parked->sequence;
      const bool nearer = owner(loose.rank) != nullptr && owner(loose.rank)->instance == source.instance;
      if (nearer) return parked->sequence;
      clear = clear && (found == 0 || found == parked->sequence);
      found = parked->sequence;
    }
    return clear ? found : 0;
  }

  // ---- placing

  void hash_tokens(const Told& e, uint64_t space) {
    const size_t size = index_.block_size();
    const uint64_t seed = kBaseSeed + space, own = sequences().seed();
    locals_.resize(e.n);
    plain_.resize(e.n);
    local_hashes(e.tokens, e.n, size, seed, locals_.data());
    if (own == seed) {
      plain_ = locals_;
    } else {
      local_hashes(e.tokens, e.n, size, own, plain_.data());
    }
    for (uint32_t i = 0; e.mm_begin != nullptr && i < e.n; ++i) {
      const uint32_t from = e.mm_begin[i], to = e.mm_begin[i + 1];
      if (from == to) continue;
      locals_[i] = local_hash_mm(e.tokens + i * size, size, e.mm + from, to - from, seed);
      plain_[i] = local_hash_mm(e.tokens + i * size, size, e.mm + from, to - from, own);
    }
  }

  bool affords(RankId id, const Store& s, BlockId below) {
    return index_.affords(id, s, below == kNone ? Tree::root() : index_.tree_.after(below));
  }

  // Stores a run behind `below`, at the root with kNone.
  void put(RankId id, const Store& s, BlockId below) {
    Store run = s;
    if (below == kNone) {
      run.has_parent = false;
      index_.place(id, run, Tree::root());
      return;
    }
    // What the names meant before may have been all that kept the parent.
    const Names& names = index_.ranks_[id].names;
    const bool rebinds = std::any_of(run.names, run.names + run.n, [&](uint64_t name) {
      return names.find(name, keys()) != Names::kAbsent;
    });
    Tree& tree = index_.tree_;
    if (rebinds) {
      const Block b = tree.block(below);
      tree.hold(b.node, kGhostLayer, b.offset, b.offset + 1, guard_, [](uint32_t) {});
    }
    index_.place(id, run, tree.after(below), below);
    if (rebinds) {
      const Block b = tree.block(below);
      tree.release(b.node, kGhostLayer, b.offset, b.offset + 1, guard_);
      index_.trim(b.node);
    }
  }

  // Gives the holder a block under a name that it does not have yet.
  void adopt(RankId id, uint64_t name, BlockId block, LayerMask layers) {
    index_.insert_name(id, name, block, layers);
    for (LayerId layer = 0; layer < kMaxLayers; ++layer) {
      if ((layers >> layer & 1) == 0) continue;
      const Block b = index_.tree_.block(block);
      index_.hold(id, b.node, layer, b.offset, b.offset + 1);
    }
  }

  // With `copy` a block that is held already is a second copy of it. False when there is no room.
  bool credit(Source& source, RankId id, uint64_t hash, LayerId layer, uint64_t space, bool by_engine, bool copy) {
    const uint64_t name = name_of(source, hash, space, by_engine);
    uint32_t slot = slot_of(source, id, hash, space, by_engine);
    // A holder's own name stands, even where it has told of it in another namespace.
    if (slot == Names::kAbsent) slot = index_.ranks_[id].names.find(name, keys());
    if (slot != Names::kAbsent) {
      const uint32_t value = index_.ranks_[id].names.value(slot);
      if ((keys().layers(value) >> layer & 1) == 0) {
        index_.gain_name(id, slot, layer);
      } else if (copy) {
        index_.add_copy(id, keys().name(value), layer);
      } else {
        ++index_.tally_.refreshed;
      }
      return true;
    }
    if (!index_.budget_->fits(1)) return false;
    // What is parked may be asked about a thousand times: only for what is new is it looked elsewhere.
    const bool known = knows(index_.ranks_[id], name);
    const BlockId block = known ? kNone : meaning_or_standard(source, id, hash, space, by_engine);
    if (block != kNone) {
      adopt(id, name, block, 1u << layer);
      announce(source, space, hash, by_engine);
      return true;
    }
    index_.park(id, name, layer, nullptr);
    if (known) return true;
    Parked* parked = parked_at(id, name);
    if (parked == nullptr) return true;
    parked->hash = parked->sequence = hash;
    parked->space = space;
    parked->by_engine = by_engine;
    enter(Sequences::key(space, hash), {id, name, parked->stamp, Kind::CREDIT});
    announce(source, space, hash, by_engine);
    return true;
  }

  // Sets a run aside whose parent is unknown; `above` is the parent's sequence hash, 0 unknown.
  void park_run(Source& source, RankId id, const Told& e, const Store& s, uint64_t above) {
    for (uint32_t i = 0; i < s.n; ++i) {
      const uint32_t slot = index_.ranks_[id].names.find(s.names[i], keys());
      if (slot != Names::kAbsent) {
        // An unknown parent does not contradict what is known, and what follows has a parent now.
        const uint32_t value = index_.ranks_[id].names.value(slot);
        const BlockId below = keys().block(value);
        if ((keys().layers(value) >> s.layer & 1) == 0) index_.gain_name(id, slot, s.layer);
        if (i + 1 == s.n) return;
        const Store rest{s.names + i + 1, s.locals + i + 1, s.n - i - 1, true, s.names[i],
                         s.layer, 0, s.plain + i + 1, s.space};
        put(id, rest, below);
        for (uint32_t j = i + 1; j < s.n; ++j) {
          settle_own(id, s.names[j]);
          announce(source, s.space, e.hashes[j], e.by_engine);
        }
        return;
      }
      if (above != 0) above = sequences().next(above, s.plain[i]);
      Store one{s.names + i, s.locals + i, 1, true, i == 0 ? e.parent : e.hashes[i - 1],
                s.layer, 0, s.plain + i, s.space};
      set_aside(source, id, e.hashes[i], one, above, e.by_engine);
      // Another publisher may have told of the block before, under the same hash.
      if (i != 0) await(Sequences::key(s.space, one.parent));
    }
  }

  void set_aside(Source& source, RankId id, uint64_t hash, const Store& one, uint64_t sequence, bool by_engine) {
    const uint64_t name = one.names[0];
    Parked* before = parked_at(id, name);
    const bool had_content = before != nullptr && before->has_content;
    index_.park(id, name, one.layer, &one);
    Parked* parked = parked_at(id, name);
    if (parked == nullptr || had_content) return;
    parked->stamp = ++index_.stamp_;  // what it was known by without content is over
    index_.order_.push({name, parked->stamp, id});
    parked->hash = hash;
    parked->by_engine = by_engine;
    parked->sequence = sequence;
    const uint64_t stamp = parked->stamp, space = one.space;
    enter(behind(Sequences::key(space, one.parent)), {id, name, stamp, Kind::CHILD});
    enter(Sequences::key(space, hash), {id, name, stamp, Kind::ALIAS});
    if (sequence != 0) {
      enter(Sequences::key(space, sequence), {id, name, stamp, Kind::CREDIT});
      announce(source, space, hash, by_engine);
    }
  }

  // A name that has been placed takes over what was parked under it.
  void settle_own(RankId id, uint64_t name) {
    if (index_.ranks_[id].parked() == 0) return;
    const auto it = index_.ranks_[id].rare->parked.find(name);
    if (it == index_.ranks_[id].rare->parked.end()) return;
    const LayerMask layers = it->second.layers;
    index_.forget_parked(id, it);
    ++index_.tally_.unparked;
    for (LayerId layer = 0; layer < kMaxLayers; ++layer) {
      if ((layers >> layer & 1) == 0 || has(index_.ranks_[id], name, layer)) continue;
      index_.gain_name(id, index_.ranks_[id].names.find(name, keys()), layer);
    }
  }

  // ---- what waits

  // Where those wait that come behind the block of a key. There may be thousands, of one prompt's
  // beginning that has not been heard: nobody who asks what the key means is to meet them.
  static uint64_t behind(uint64_t key) { return mix64(~key); }

  void enter(uint64_t key, const Loose& loose) {
    loose_.emplace(key, loose);
    if (loose_.size() != kGrowsTo) return;
    loose_.max_load_factor(kMostALoose);
    loose_.reserve(kMostALoose * kMaxLoose);
  }

  void await(uint64_t key) {
    for (const uint64_t each : {key, behind(key)}) {
      if (loose_.find(each) != loose_.end()) work_.push_back(each);
    }
  }

  // A hash means something now.
  void announce(const Source& source, uint64_t space, uint64_t hash, bool by_engine) {
    if (loose_.empty()) return;
    await(Sequences::key(space, hash));
    if (by_engine && space != source.home) await(Sequences::key(source.home, hash));
  }

  Parked* parked_at(RankId id, uint64_t name) const {
    const Rank& rank = index_.ranks_[id];
    if (!rank.live || rank.parked() == 0) return nullptr;
    const auto it = rank.rare->parked.find(name);
    return it == rank.rare->parked.end() ? nullptr : &it->second;
  }

  const Parked* parked_of(const Loose& loose) const {
    const Parked* parked = parked_at(loose.rank, loose.name);
    return parked != nullptr && parked->stamp == loose.stamp ? parked : nullptr;
  }

  bool has_entry(RankId id, uint64_t name, uint64_t key) const {
    const auto range = loose_.equal_range(key);
    return std::any_of(range.first, range.second, [&](const auto& entry) {
      return entry.second.rank == id && entry.second.name == name && parked_of(entry.second) != nullptr;
    });
  }

  // What waits for a key may have its place now: `waiting_` has it then.
  void look_again(uint64_t key) {
    waiting_.clear();
    looked_at_ = 0;
    const auto range = loose_.equal_range(key);
    for (auto it = range.first; it != range.second; ++it) {
      if (parked_of(it->second) != nullptr) waiting_.push_back(it->second);
    }
    // All at once: erasing one of many equal keys walks over those before it.
    loose_.erase(range.first, range.second);
    for (const Loose& each : waiting_) enter(key, each);
  }

  void look_at(const Loose& loose) {
    const Parked* parked = parked_of(loose);
    Source* source = loose.rank < owners_.size() ? owners_[loose.rank] : nullptr;
    if (parked == nullptr || source == nullptr) return;
    if (loose.kind == Kind::CHILD) {
      try_behind_parent(*source, loose, *parked);
    } else if (loose.kind == Kind::CREDIT) {
      try_credit(*source, loose, *parked);
    }
  }

  void try_credit(Source& source, const Loose& loose, const Parked& parked) {
    BlockId block = kNone;
    if (!parked.has_content) block = meaning(source, loose.rank, parked.hash, parked.space, parked.by_engine);
    if (block == kNone) block = sequences().find(Sequences::key(parked.space, parked.sequence));
    if (block == kNone) return;
    const Parked was = parked;
    take_out(loose);
    if (index_.ranks_[loose.rank].names.find(loose.name, keys()) == Names::kAbsent) {
      adopt(loose.rank, loose.name, block, was.layers);
    }
    announce(source, was.space, was.hash, was.by_engine);
  }

  void try_behind_parent(Source& source, const Loose& loose, const Parked& parked) {
    BlockId below = meaning(source, loose.rank, parked.parent, parked.space, parked.by_engine);
    uint64_t above = 0;
    if (below == kNone) {
      above = sequences().next(parked.parent, parked.plain) == parked.hash
                  ? parked.parent
                  : parked_sequence(source, loose.rank, parked.parent, parked.space);
      if (above != 0) below = sequences().find(Sequences::key(parked.space, above));
    }
    if (below != kNone) {
      const Parked was = parked;
      take_out(loose);
      index_.ranks_[loose.rank].settling = true;  // what has waited is no second copy
      if (sequences().space_of(below) != was.space) ++index_.tally_.parked_unsalted;
      for (LayerId layer = 0; layer < kMaxLayers; ++layer) {
        if ((was.layers >> layer & 1) == 0) continue;
        put(loose.rank, {&loose.name, &was.local, 1, true, 0, layer, 0, &was.plain, was.space}, below);
      }
      announce(source, was.space, was.hash, was.by_engine);
    } else if (above != 0 && parked.sequence == 0) {
      Parked* known = parked_at(loose.rank, loose.name);
      known->sequence = sequences().next(above, known->plain);
      const uint64_t space = known->space, own = known->hash;
      const bool by_engine = known->by_engine;
      enter(Sequences::key(space, known->sequence), {loose.rank, loose.name, loose.stamp, Kind::CREDIT});
      await(Sequences::key(space, known->sequence));
      announce(source, space, own, by_engine);
    }
  }

  void take_out(const Loose& loose) {
    index_.forget_parked(loose.rank, index_.ranks_[loose.rank].rare->parked.find(loose.name));
    ++index_.tally_.unparked;
  }

  // Frees what waited for those that are no more, while that is most of it; the sweep does so, too.
  void prune(Steps& steps) {
    for (; loose_.size() > kMostALoose * index_.parked_ + 256 && steps.left(); steps.take(1 + stale_.size())) {
      prune_at_ = prune_at_ + 1 < loose_.bucket_count() ? prune_at_ + 1 : 0;
      stale_.clear();
      for (auto it = loose_.begin(prune_at_); it != loose_.end(prune_at_); ++it) {
        if (parked_of(it->second) == nullptr) stale_.push_back(it->first);
      }
      for (const uint64_t key : stale_) drop_stale(key);
    }
  }

  void drop_stale(uint64_t key) {
    const auto range = loose_.equal_range(key);
    for (auto it = range.first; it != range.second;) {
      it = parked_of(it->second) == nullptr ? loose_.erase(it) : std::next(it);
    }
  }

  void clear_space(RankId id, LayerMask mask, uint64_t space) {
    const Rank& rank = index_.ranks_[id];
    std::vector<uint64_t> names;
    for (uint32_t slot = 0; slot < rank.names.capacity(); ++slot) {
      const uint32_t value = rank.names.value(slot);
      if (value == Names::kAbsent || sequences().space_of(keys().block(value)) != space) continue;
      names.push_back(keys().name(value));
    }
    if (rank.parked() != 0) {
      for (const auto& [name, parked] : rank.rare->parked) {
        if (parked.space == space) names.push_back(name);
      }
    }
    for (const uint64_t name : names) {
      for (LayerId layer = 0; layer < kMaxLayers; ++layer) {
        if ((mask >> layer & 1) == 0 || layer == kGhostLayer) continue;
        while (has(index_.ranks_[id], name, layer)) index_.remove(id, name, layer);  // copies, too
      }
    }
  }

  Index& index_;
  uint64_t seed_;         // of sequence hashes
  RankId guard_ = kNone;  // from the first source on: holds what must not be trimmed for the length of an operation
  std::vector<std::unique_ptr<Source>> sources_;
  std::vector<std::unique_ptr<Instance>> instances_;
  std::unordered_map<std::string, Instance*> by_key_;
  std::vector<Source*> owners_;  // by rank; null for a worker's
  std::vector<Medium> media_;  // beyond the tiers, in the order of their layers
  std::unordered_multimap<uint64_t, Loose> loose_;
  std::vector<uint64_t> work_;   // keys whose meaning has changed
  std::vector<Loose> waiting_;   // what waited for one of them, to be looked at
  size_t looked_at_ = 0;         // so many of these have been
  std::vector<uint64_t> stale_;  // scratch of `prune`
  size_t prune_at_ = 0;          // bucket of `loose_` that it was at last
  mutable size_t looked_up_ = 0;  // names tables that `elsewhere` has asked since `looked_up`

  // Scratch of the operation in progress, kept for its capacity.
  std::vector<uint64_t> names_;
  std::vector<uint64_t> locals_;
  std::vector<uint64_t> plain_;
};

}  // namespace kvd
