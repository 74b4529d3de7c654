// From one worker's events to index operations: what an event means for the rank that it came from.
//
//   batch [ts, events, rank] ── decode ──> stored / removed / cleared
//                                              │  tier and group -> layer, or ignored by reason
//                                              │  tokens + lora + salt + images -> local hashes
//                                              v
//                                            Index
//
// A stream belongs to one worker. A batch that names a rank speaks for that rank, any other for the
// registered one. For each rank, the stream remembers what earlier events have shown: the kinds of
// its cache groups, and the engine dialect that decides what a clear means.
//
// Costs: those of decoding, one XXH3 a block, and of the index operation; no allocation in the
// steady state.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "index/cache_groups.hpp"
#include "events/events.hpp"
#include "base/hash.hpp"
#include "base/keyed.hpp"
#include "index/index.hpp"
#include "index/worker.hpp"

namespace kvd {

// Why an event that was understood had no effect.
enum class Ignored : uint8_t {
  MEDIUM,          // a medium that names no tier
  REMOTE,          // its locality says that the blocks live elsewhere
  KIND,            // an attention kind whose blocks say nothing about a prefix
  GROUP,           // a cache group of unknown kind, or one too many
  BLOCK_SIZE,      // not the registered block size
  TOKENS,          // fewer tokens than hashes
  TOO_MANY_RANKS,  // the worker's ranks exceed kMaxRanksPerWorker
  FULL,            // the index has no room for more blocks
};
constexpr size_t kIgnored = 8;

constexpr uint32_t kAllTiers = (1u << kTierLayers) - 1;

// Longest batch that is searched for names of restored blocks: 3 ms if it is full of hashes.
// Batches of 64,000 tokens fit. A longer one counts as naming none.
constexpr size_t kSearchedBytes = 384 * 1024;

// Bits that say how far the stream's blocks can be trusted after a batch.
enum BatchOutcome : uint32_t {
  kCleared = 1,  // earlier losses of its rank no longer matter on the tiers that `cleared` returns
  kFlawed = 2,   // part of the batch could not be understood: its events are lost
  kUnfinished = 4,  // alone: the batch is long, and `advance` has to be called for the rest
  kNoRoom = 8,      // the index was full: some events had no effect, or only in part
  kNewRank = 16,    // the first batch for its rank, or the first that names a rank
};

struct IngestStats {
  uint64_t batches = 0;
  uint64_t stored = 0;   // events
  uint64_t removed = 0;  // events
  uint64_t cleared = 0;  // events
  uint64_t ignored[kIgnored] = {};
  uint64_t bad[kReasons] = {};
};

class Stream {
 public:
  Stream(Index& index, Worker& worker, uint32_t dp_rank, IngestStats& counters)
      : index_(index), worker_(worker), dp_rank_(dp_rank), counters_(counters) {}

  // Begins a batch; returns BatchOutcome bits, or kUnfinished. Drops an unfinished batch before it.
  uint32_t apply(const uint8_t* payload, size_t size, uint32_t steps) {
    ++counters_.batches;
    outcome_ = cleared_ = 0;
    knows_rank_ = false;
    flaw_ = kReasons;
    batch_.drop();
    if (size == 0) return outcome_;  // a heartbeat or barrier: its number is all that it says
    batch_.begin(payload, size);
    return advance(steps);
  }

  // Continues an unfinished batch, whose payload must not have moved; returns the same.
  uint32_t advance(uint32_t steps) {
    Steps some{steps};
    return batch_.under_way() && batch_.advance(*this, some) ? kUnfinished : outcome_;
  }

  // Why the last applied batch is flawed: the first Reason that it met, in the order of
  // kReasonNames and as an index there; kReasons if it is not flawed.
  size_t flaw() const { return flaw_; }

  // The rank that the last applied batch spoke for; false when the batch does not show it.
  bool rank(uint32_t* dp_rank) const {
    *dp_rank = speaks_for_;
    return knows_rank_;
  }

  // Whether batches name their ranks, so that ranks not yet heard from may exist.
  bool names_ranks() const { return names_ranks_; }

  // The tiers that clears of the last applied batch have emptied, as bits.
  uint32_t cleared() const { return cleared_; }

  // Events without effect since the engine's process began, by Ignored.
  const uint64_t* ignored() const { return ignored_.data(); }

  // Whether, since then, events were ignored and no store has had an effect.
  bool is_unused() const { return ignored_ != decltype(ignored_){} && !stores_; }

  // The block size in tokens of the last event since then that was ignored for its block size; 0 if
  // none was.
  uint64_t other_block_size() const { return other_block_size_; }

  // Drops every block of every rank that this stream has spoken for or may yet speak for, and all
  // that it has learned: another engine process speaks from now on. O(ranks); `Index::sweep` frees
  // the blocks.
  void clear() {
    batch_.drop();
    drop_restored();
    worker_.renew(index_, dp_rank_);
    for (const uint32_t dp_rank : heard_) {
      if (dp_rank != dp_rank_) worker_.renew(index_, dp_rank);
    }
    heard_.clear();
    names_ranks_ = stores_ = false;
    ignored_.fill(0);
    other_block_size_ = 0;
  }

  // Whether there are blocks from a dump whose rank no batch of this stream has spoken for yet.
  bool restored() const {
    const auto& ranks = worker_.ranks;
    return std::any_of(ranks.begin(), ranks.end(), [&](auto& entry) { return unheard(entry); });
  }

  // Drops these blocks: the engine announces everything again.
  void drop_restored() {
    for (const auto& entry : worker_.ranks) {
      if (unheard(entry)) worker_.renew(index_, entry.first);
    }
  }

  // Whether a batch names, as parents or as removed, blocks that it has not stored itself but that
  // the index has from a dump. A new engine process begins with no such batch.
  bool names_restored(const uint8_t* payload, size_t size) {
    if (size > kSearchedBytes) return false;
    Scratch scratch;
    NamesRestored sink{*this};
    decode_batch(payload, size, scratch, sink);
    return sink.found;
  }

  // ---- the decoder's sink

  void begin(bool has_rank, uint32_t dp_rank) {
    speaks_for_ = has_rank ? dp_rank : dp_rank_;
    resume();
    if (rank_ == kNone) return;
    knows_rank_ = true;
    named_ = has_rank;
    if (heard_.insert(speaks_for_).second || (has_rank && !names_ranks_)) outcome_ |= kNewRank;
    names_ranks_ = names_ranks_ || has_rank;
    traits().restored = false;
    traits().heard_from = dp_rank_;
  }

  void resume() { rank_ = worker_.rank(index_, speaks_for_); }

  bool resolve_waiting(Steps& steps) { return index_.resolve_waiting(steps); }

  uint32_t stored(const StoredEvent& e, uint32_t from, Steps& steps) {
    if (from == 0) ++counters_.stored;
    const StoreTarget target = target_of(e);
    if (target.layer == kNone) return e.n_hashes;
    if (target.by_name) {
      const uint32_t to = from + std::min(kHashesAtOnce, e.n_hashes - from);
      steps.take(kStepsAName * (to - from));
      return store_names(e, target.layer, from, to, e.n_hashes) ? to : e.n_hashes;
    }
    const bool waits = waits_for_parent(e, from);
    const uint32_t most = waits ? kHashesAtOnce : kBlocksAtOnce;
    // A last part of one block would be a lone block below a parent, which means a second copy.
    const uint32_t left = e.n_hashes - from, to = from + (left > most + 1 ? most : left);
    steps.take((waits ? kStepsAName : kStepsABlock) * (to - from));
    const bool whole = store_blocks(e, target.layer, from, to);
    for (const Window& window : windows_of_all(e)) store_names(e, window.layer, from, to, to);
    return whole ? to : e.n_hashes;
  }

  uint32_t removed(const RemovedEvent& e, uint32_t from, Steps& steps) {
    if (from == 0) ++counters_.removed;
    const LayerId layer = layer_of(e);
    if (layer == kNone) return e.n_hashes;
    const uint32_t to = from + std::min(kHashesAtOnce, e.n_hashes - from);
    for (uint32_t i = from; i < to; ++i) {
      remove(e, i, layer);
      for (const Window& window : windows_of_all(e)) remove(e, i, window.layer);
    }
    steps.take(kStepsARemoval * (to - from) * (1 + windows_of_all(e).size()));
    return to;
  }

  // A clear without a medium means what the engine means by it: vLLM resets its device cache and
  // keeps the offloaded blocks, SGLang flushes every tier. Only vLLM numbers its cache groups.
  void cleared(const ClearedEvent& e, Steps& steps) {
    ++counters_.cleared;
    if (ignored_rank()) return;
    steps.take(1 + index_.rank(rank_).names.capacity() / kSlotsAStep);
    if (e.has_tier && e.tier == Tier::UNKNOWN) {
      ignore(Ignored::MEDIUM);
    } else if (e.has_tier) {
      clear_layers(index_.tier_mask(static_cast<uint32_t>(e.tier)),
                   1u << static_cast<uint32_t>(e.tier));
    } else if (traits().numbers_groups) {
      clear_layers(index_.tier_mask(kDeviceLayer), 1u << kDeviceLayer);
    } else {
      // Before the engine has shown whether it numbers groups, it may have kept its lower tiers. So
      // losses stop mattering on the device only.
      clear_layers(kAllLayers, traits().plain ? kAllTiers : 1u << kDeviceLayer);
    }
  }

  void bad(Reason reason, uint32_t count) {
    counters_.bad[static_cast<size_t>(reason)] += count;
    // Trailing bytes take nothing from the batch, and events of other types concern other things.
    if (reason == Reason::TRAILING || reason == Reason::UNKNOWN_TYPE) return;
    outcome_ |= kFlawed;
    if (reason == Reason::TRUNCATED || reason == Reason::NOT_MSGPACK) lose_rank();
    if (flaw_ == kReasons) flaw_ = static_cast<size_t>(reason);
  }

 private:
  // A decoder's sink that searches for known names that the batch has not stored itself.
  struct NamesRestored {
    Stream& stream;
    RankId rank = kNone;
    bool found = false;
    std::unordered_set<uint64_t, KeyedHash> stored_in_batch{};

    void begin(bool has_rank, uint32_t dp_rank) {
      rank = stream.worker_.find(has_rank ? dp_rank : stream.dp_rank_);
    }
    void stored(const StoredEvent& e) {
      if (e.has_parent) find(e.parent);
      stored_in_batch.insert(e.hashes, e.hashes + e.n_hashes);
    }
    void removed(const RemovedEvent& e) {
      for (uint32_t i = 0; i < e.n_hashes; ++i) find(e.hashes[i]);
    }
    void cleared(const ClearedEvent&) {}
    void bad(Reason) {}

    void find(uint64_t name) {
      if (rank == kNone || stored_in_batch.count(name) != 0) return;
      const Index& index = stream.index_;
      found |= index.rank(rank).names.find(name, index.keys()) != Names::kAbsent;
    }
  };

  // The batch broke off before it could name its rank. It was taken for the registered rank's, but
  // may be another's.
  void lose_rank() {
    if (named_ || !knows_rank_) return;
    knows_rank_ = false;
    if ((outcome_ & kNewRank) != 0) heard_.erase(dp_rank_);
    outcome_ &= ~kNewRank;
  }

  // What is remembered of the batch's rank.
  RankTraits& traits() { return index_.rank(rank_); }
  const RankTraits& traits() const { return index_.rank(rank_); }

  // A rank that came with a dump is this stream's if the stream is registered for it. It may also
  // be this stream's if it is registered nowhere: then only batches name it.
  bool unheard(const std::pair<uint32_t, RankId>& entry) const {
    const Rank& rank = index_.rank(entry.second);
    return rank.restored && (entry.first == dp_rank_ || !rank.listed);
  }

  void clear_layers(LayerMask mask, uint32_t tiers) {
    outcome_ |= kCleared;
    cleared_ |= tiers;
    if (cleared_ == kAllTiers) outcome_ &= ~kNoRoom;
    rank_ = worker_.clear(index_, index_.rank(rank_).dp_rank, mask);
    // No block of the dump is left, so from now on every announcement is the first.
    if (index_.holds_nothing(rank_)) traits().settling = false;
  }

  void ignore(Ignored why) {
    ++counters_.ignored[static_cast<size_t>(why)];
    ++ignored_[static_cast<size_t>(why)];
  }

  bool no_room() {
    ignore(Ignored::FULL);
    outcome_ |= kNoRoom;
    return false;
  }

  bool ignored_rank() {
    if (rank_ != kNone) return false;
    ignore(Ignored::TOO_MANY_RANKS);
    return true;
  }

  // Whether the event is about a cache of this rank that the index keeps; counts it if not.
  template <class Event>
  bool ours(const Event& e) {
    if (ignored_rank()) return false;
    (e.group >= 0 ? traits().numbers_groups : traits().plain) = true;
    if (e.remote) {
      ignore(Ignored::REMOTE);
      return false;
    }
    if (e.tier == Tier::UNKNOWN) {
      ignore(Ignored::MEDIUM);
      return false;
    }
    return true;
  }

  StoreTarget target_of(const StoredEvent& e) {
    if (!ours(e)) return kNowhere;
    learn_group(traits(), e);
    const GroupKind kind = kind_of(traits(), e);
    if (kind == GroupKind::WINDOW) return window_target(e);
    if (kind != GroupKind::FULL) {
      ignore(kind == GroupKind::NONE ? Ignored::GROUP : Ignored::KIND);
      return kNowhere;
    }
    if (is_further_group(traits(), e.group)) return whole_prefix_target(e);
    if (e.n_tokens != 0) {
      if (traits().main_group < 0) traits().main_group = e.group < 0 ? 0 : e.group;
      // Only vLLM numbers groups, and it announces each offloaded chunk in an event of its own.
      if (e.group >= 0 && e.tier != Tier::DEVICE && e.n_hashes != 0)
        index_.note_chunk(rank_, e.n_hashes);
      return {static_cast<LayerId>(e.tier), false};
    }
    if (e.n_hashes != 0) index_.rank(rank_).offloads = true;
    return {static_cast<LayerId>(e.tier), true};
  }

  StoreTarget window_target(const StoredEvent& e) {
    uint32_t blocks = 0;
    if (!window_blocks(traits(), e, index_.block_size(), &blocks)) {
      ignore(Ignored::KIND);
      return kNowhere;
    }
    return group_target(e, blocks);
  }

  // A further full-attention group must hold the whole prefix.
  StoreTarget whole_prefix_target(const StoredEvent& e) { return group_target(e, kNone); }

  StoreTarget group_target(const StoredEvent& e, uint32_t blocks) {
    const LayerId layer =
        index_.group_layer(static_cast<uint32_t>(e.tier), static_cast<uint32_t>(e.group));
    if (layer == kNone) {
      ignore(Ignored::GROUP);
      return kNowhere;
    }
    if (e.tier == Tier::DEVICE && blocks != 0) index_.set_window(rank_, layer, blocks);
    return {layer, true};
  }

  LayerId layer_of(const RemovedEvent& e) {
    if (!ours(e)) return kNone;
    const GroupKind kind = kind_of(traits(), e);
    const bool of_group =
        e.group >= 0 && (kind == GroupKind::WINDOW || is_further_group(traits(), e.group));
    if (of_group) {
      return index_.group_layer(static_cast<uint32_t>(e.tier), static_cast<uint32_t>(e.group));
    }
    if (kind == GroupKind::FULL) return static_cast<LayerId>(e.tier);
    ignore(kind == GroupKind::NONE ? Ignored::GROUP : Ignored::KIND);
    return kNone;
  }

  // The window groups that a device event concerns besides its own: all, if it names no group.
  template <class Event>
  const std::vector<Window>& windows_of_all(const Event& e) const {
    static const std::vector<Window> none;
    return e.group < 0 && e.tier == Tier::DEVICE ? index_.rank(rank_).windows : none;
  }

  void remove(const RemovedEvent& e, uint32_t i, LayerId layer) {
    if (e.remaining == nullptr) {
      index_.remove(rank_, e.hashes[i], layer);
    } else {
      index_.remove(rank_, e.hashes[i], layer, e.remaining[i]);
    }
  }

  // Stores hashes [from, to) of an event that has `end` of them; false when there is no room.
  bool store_names(const StoredEvent& e, LayerId layer, uint32_t from, uint32_t to, uint32_t end) {
    stores_ = true;
    const bool below = e.has_parent && e.n_hashes == 1;  // a lone block below a parent is a copy
    if (index_.store_named(rank_, e.hashes + from, to - from, layer, below, end - to, e.origin))
      return true;
    return no_room();
  }

  // Whether the blocks of an event from `from` on are parked, which takes longer, as their parent
  // is unknown.
  bool waits_for_parent(const StoredEvent& e, uint32_t from) const {
    if (from == 0 && !e.has_parent) return false;
    const uint64_t parent = from != 0 ? e.hashes[from - 1] : e.parent;
    return index_.rank(rank_).names.find(parent, index_.keys()) == Names::kAbsent;
  }

  // Stores blocks [from, to) of an event, below the part before; false when there is no room.
  bool store_blocks(const StoredEvent& e, LayerId layer, uint32_t from, uint32_t to) {
    const size_t size = index_.block_size();
    if (e.block_size != size || size == 0) {
      if (from == 0) ignore(Ignored::BLOCK_SIZE);
      other_block_size_ = e.block_size;
      return true;
    }
    const size_t tokens = e.pairs ? e.n_tokens - 1 : e.n_tokens;
    const size_t whole = std::min<size_t>(e.n_hashes, tokens / size);
    if (from == 0 && whole < e.n_hashes) ignore(Ignored::TOKENS);
    if (from == 0 && whole != 0 && !e.has_parent) {
      index_.announced().note(e.tokens[0], !e.salt.empty(), !e.lora_name.empty() || e.has_lora_id,
                              e.names_salts || !e.salt.empty());
      index_.seeds().note(lora_term(e.lora_name) + numbered_adapter_term(e), salt_term(e.salt));
    }
    const size_t n = std::min<size_t>(whole, to) - std::min<size_t>(whole, from);
    const bool has_parent = from != 0 || e.has_parent;
    const uint64_t parent = from != 0 ? e.hashes[from - 1] : e.parent;
    const uint64_t inherited = prompt_term(e, has_parent, parent, layer);
    const uint64_t seed = local_hash_seed(e.lora_name, {}) + inherited;
    const uint32_t* content = e.tokens + from * size;
    std::vector<uint64_t>& locals = batch_.scratch().locals;
    hash_blocks(e, content, from, n, seed, locals);
    Store run{e.hashes + from, locals.data(), static_cast<uint32_t>(n), has_parent, parent,
              layer,           inherited};
    run.origin = e.origin;
    const bool recalled =
        layer != kDeviceLayer && index_.recall_content(rank_, run.names, n, locals.data());
    if (index_.sequences() != nullptr && !recalled) add_plain(e, content, from, n, seed, run);
    stores_ = stores_ || n != 0;
    if (index_.store(rank_, run)) return true;
    return no_room();
  }

  // Adds the local hashes for sequence hashes, which have a seed of their own.
  void add_plain(const StoredEvent& e, const uint32_t* content, size_t from, size_t n,
                 uint64_t seed, Store& run) {
    const uint64_t own = index_.sequences()->seed();
    if (seed == kBaseSeed && own == kBaseSeed) return;
    std::vector<uint64_t>& plain = batch_.scratch().plain;
    hash_blocks(e, content, from, n, own, plain);
    run.plain = plain.data();
    run.space = seed - kBaseSeed;
  }

  // Hashes the content of `n` blocks, of which the first is block `first` of the event.
  void hash_blocks(const StoredEvent& e, const uint32_t* content, size_t first, size_t n,
                   uint64_t seed, std::vector<uint64_t>& hashes) {
    const size_t size = index_.block_size();
    hashes.resize(n);
    if (e.pairs) {
      eagle_hashes(content, n, size, seed, hashes.data());
    } else {
      local_hashes(content, n, size, seed, hashes.data());
    }
    if (e.mm_begin == nullptr) return;
    // The identity of images belongs to the blocks that they reach into, beside the tokens.
    const size_t window = e.pairs ? size + 1 : size;
    for (size_t i = 0; i < n; ++i) {
      const uint32_t from = e.mm_begin[first + i], to = e.mm_begin[first + i + 1];
      if (from == to) continue;
      hashes[i] = local_hash_mm(content + i * size, window, e.mm + from, to - from, seed);
    }
  }

  // The hash term of the prompt. An engine says it once, with the prompt's first block, and it
  // holds for all blocks below: the cache salt, and the adapter if it is known by number alone,
  // which counts as one named "#number". It need not be said again of a block that is offloaded.
  uint64_t prompt_term(const StoredEvent& e, bool has_parent, uint64_t parent, LayerId layer) {
    if (e.names_salts || !e.salt.empty()) index_.rank(rank_).salted = true;
    uint64_t known = 0;
    if (has_parent) {
      known = index_.term_of(rank_, parent);
    } else if (layer != kDeviceLayer && e.n_hashes != 0) {
      known = index_.term_of(rank_, e.hashes[0]);
    }
    if (known != 0) return known;
    return salt_term(e.salt) + (has_parent ? 0 : numbered_adapter_term(e));
  }

  static uint64_t numbered_adapter_term(const StoredEvent& e) {
    if (!e.has_lora_id || e.lora_id <= 0 || !e.lora_name.empty()) return 0;
    return lora_term("#" + std::to_string(e.lora_id));
  }

  Index& index_;
  Worker& worker_;
  uint32_t dp_rank_;
  IngestStats& counters_;
  std::unordered_set<uint32_t> heard_;  // ranks that batches have spoken for
  bool names_ranks_ = false;            // some batches have named their rank
  std::array<uint64_t, kIgnored> ignored_{};
  bool stores_ = false;  // stores of this engine process have had an effect
  uint64_t other_block_size_ = 0;
  SlicedBatch<Stream> batch_;
  uint32_t speaks_for_ = 0;  // the dp rank of the batch
  RankId rank_ = kNone;      // its rank in the index
  bool named_ = false;       // the batch names its rank
  bool knows_rank_ = false;  // the last batch is known to be of that rank
  uint32_t outcome_ = 0;
  uint32_t cleared_ = 0;
  size_t flaw_ = kReasons;
};

}  // namespace kvd
