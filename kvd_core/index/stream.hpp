// From one worker's events to index operations: what an event means for the rank it came from.
//
//   batch [ts, events, rank] ── decode ──> stored / removed / cleared
//                                              │  tier and group -> layer, or ignored by reason
//                                              │  tokens + lora + salt + images -> local hashes
//                                              v
//                                            Index
//
// A stream belongs to one worker; a batch that names a rank speaks for that rank, else for the
// registered one. What earlier events taught (which cache group is of which kind, which engine
// dialect a clear follows) is remembered per rank.
//
// Costs: those of decoding, one XXH3 a block, and of the index operation; no allocation in the
// steady state.
#pragma once

#include <algorithm>
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
  REMOTE,          // locality says the blocks live elsewhere
  KIND,            // an attention kind whose blocks say nothing about a prefix
  GROUP,           // a cache group of unknown kind, or one too many
  BLOCK_SIZE,      // not the registered block size
  TOKENS,          // fewer tokens than hashes
  TOO_MANY_RANKS,  // the worker's ranks exceed kMaxRanksPerWorker
  FULL,            // the index has as many blocks as it can or may have
};
constexpr size_t kIgnored = 8;

constexpr uint32_t kAllTiers = (1u << kTierLayers) - 1;

// What one batch has shown about how far the stream's blocks can be believed, as bits.
enum BatchOutcome : uint32_t {
  kCleared = 1,  // what was missed of its rank no longer matters on the tiers that `cleared` says
  kFlawed = 2,   // part of the batch could not be understood: its events are lost
  kUnfinished = 4,  // and nothing else is said yet: the batch is long, and goes on with `go_on`
  kNoRoom = 8,      // the index was full: events of it had no effect, or not all
  kNewRank = 16,    // no batch has spoken for its rank before, or none has named one
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

  // Begins a batch; returns BatchOutcome bits, or kUnfinished. What was unfinished is dropped.
  uint32_t apply(const uint8_t* payload, size_t size, uint32_t steps) {
    ++counters_.batches;
    outcome_ = cleared_ = 0;
    says_rank_ = false;
    flaw_ = kReasons;
    batch_.drop();
    if (size == 0) return outcome_;  // a beat or a barrier, whose number is all that it says
    batch_.begin(payload, size, scratch_);
    return go_on(steps);
  }

  // Goes on with an unfinished one, whose payload has stayed where it is, and returns the same.
  uint32_t go_on(uint32_t steps) {
    Steps some{steps};
    return batch_.under_way() && batch_.go_on(*this, some) ? kUnfinished : outcome_;
  }

  // Why the last applied batch is flawed, as an index of kReasonNames: the first Reason in their
  // order, kReasons if it is not.
  size_t flaw() const { return flaw_; }

  // The rank that the last applied batch has spoken for; false when that cannot be known of it.
  bool rank(uint32_t* dp_rank) const {
    *dp_rank = speaks_for_;
    return says_rank_;
  }

  // Whether batches name their ranks, so that there may be more than have been heard.
  bool names_ranks() const { return names_ranks_; }

  // The tiers that the last applied batch has emptied by clears, as bits.
  uint32_t cleared() const { return cleared_; }

  // Events that had no effect since the stream was made, by Ignored.
  const uint64_t* ignored() const { return ignored_; }

  // Whether events had no effect since the engine's process began, and none that stored has had
  // any.
  bool is_unused() const { return ignores_ && !stores_; }

  // Tokens a block of the last event that was ignored for them since then, 0 if none was.
  uint64_t other_block_size() const { return other_block_size_; }

  // Drops every block of every rank this stream has spoken for or may speak for yet, and what it
  // was taught: another engine process speaks from now on. O(ranks); `Index::sweep` frees the
  // blocks.
  void clear() {
    batch_.drop();
    drop_restored();
    worker_.renew(index_, dp_rank_);
    for (const uint32_t dp_rank : heard_) {
      if (dp_rank != dp_rank_) worker_.renew(index_, dp_rank);
    }
    heard_.clear();
    names_ranks_ = ignores_ = stores_ = false;
    other_block_size_ = 0;
  }

  // Whether there are blocks of a dump that this stream's engine has not been heard about.
  bool restored() const {
    const auto& ranks = worker_.ranks;
    return std::any_of(ranks.begin(), ranks.end(), [&](auto& entry) { return unheard(entry); });
  }

  // Drops those: the engine announces everything again.
  void drop_restored() {
    for (const auto& entry : worker_.ranks) {
      if (unheard(entry)) worker_.renew(index_, entry.first);
    }
  }

  // Whether a batch names blocks that are known from a dump alone: as parents, or as removed. No
  // engine begins with that.
  bool goes_on(const uint8_t* payload, size_t size) {
    batch_.drop();  // it has the same scratch
    GoesOn sink{*this};
    decode_batch(payload, size, scratch_, sink);
    return sink.found;
  }

  // ---- the decoder's sink

  void begin(bool has_rank, uint32_t dp_rank) {
    speaks_for_ = has_rank ? dp_rank : dp_rank_;
    resume();
    if (rank_ == kNone) return;
    says_rank_ = true;
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
    // A lone last block would be one below a parent, which means something else.
    const uint32_t left = e.n_hashes - from,
                   to = from + (left > kBlocksAtOnce + 1 ? kBlocksAtOnce : left);
    steps.take(kStepsABlock * (to - from));
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

  // Without a medium a clear means what the engine means by it: vLLM resets its device cache and
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
      // Lower tiers may hold what was missed where the engine has not shown yet that it is none of
      // those that number groups.
      clear_layers(kAllLayers, traits().plain ? kAllTiers : 1u << kDeviceLayer);
    }
  }

  void bad(Reason reason, uint32_t count) {
    counters_.bad[static_cast<size_t>(reason)] += count;
    // Bytes behind a batch take nothing from it, and events of other types are about other things.
    if (reason == Reason::TRAILING || reason == Reason::UNKNOWN_TYPE) return;
    outcome_ |= kFlawed;
    if (reason == Reason::TRUNCATED || reason == Reason::NOT_MSGPACK) lose_rank();
    if (flaw_ == kReasons) flaw_ = static_cast<size_t>(reason);
  }

 private:
  // A sink that searches for known names that the batch itself has not stored.
  struct GoesOn {
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
  // The batch broke off before it could name its rank: it passes for the stream's own, and may be
  // another's.
  void lose_rank() {
    if (named_ || !says_rank_) return;
    says_rank_ = false;
    if ((outcome_ & kNewRank) != 0) heard_.erase(dp_rank_);
    outcome_ &= ~kNewRank;
  }

  // What has been taught about the rank of the batch.
  RankTraits& traits() { return index_.rank(rank_); }
  const RankTraits& traits() const { return index_.rank(rank_); }

  // A rank that came with a dump is this stream's if it is its own, or is registered nowhere: then
  // only batches name it, and these may be of this stream.
  bool unheard(const std::pair<uint32_t, RankId>& entry) const {
    const Rank& rank = index_.rank(entry.second);
    return rank.restored && (entry.first == dp_rank_ || !rank.listed);
  }

  void clear_layers(LayerMask mask, uint32_t tiers) {
    outcome_ |= kCleared;
    cleared_ |= tiers;
    if (cleared_ == kAllTiers) outcome_ &= ~kNoRoom;
    rank_ = worker_.clear(index_, index_.rank(rank_).dp_rank, mask);
    // Nothing that came with a dump is left, so whatever is announced from now on is announced
    // once.
    if (index_.holds_nothing(rank_)) traits().settling = false;
  }

  void ignore(Ignored why) {
    ++counters_.ignored[static_cast<size_t>(why)];
    ++ignored_[static_cast<size_t>(why)];
    ignores_ = true;
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

  // False when the event is not about a cache of this rank at all.
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
      // Only vLLM numbers groups, and it announces what it offloads a chunk an event.
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

  // A second full-attention group must hold a prefix whole.
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

  // An event that names no cache group is about all of them.
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

  // Stores the hashes of a part of an event that has them up to `end`; false when there is no room.
  bool store_names(const StoredEvent& e, LayerId layer, uint32_t from, uint32_t to, uint32_t end) {
    stores_ = true;
    const bool below = e.has_parent && e.n_hashes == 1;  // a lone block below a parent is a copy
    if (index_.store_named(rank_, e.hashes + from, to - from, layer, below, end - to, e.origin))
      return true;
    return no_room();
  }

  // Stores the blocks of a part of an event, below the one before it; false when there is no room.
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
    const uint64_t inherited = prompt_term(e, has_parent, parent);
    const uint64_t seed = local_hash_seed(e.lora_name, {}) + inherited;
    const uint32_t* said = e.tokens + from * size;
    locals_.resize(n);
    if (e.pairs) {
      eagle_hashes(said, n, size, seed, locals_.data());
    } else {
      local_hashes(said, n, size, seed, locals_.data());
    }
    if (e.mm_begin != nullptr) hash_images(e, said, from, n, seed);
    Store run{e.hashes + from, locals_.data(), static_cast<uint32_t>(n), has_parent, parent,
              layer,           inherited};
    run.origin = e.origin;
    if (index_.sequences() != nullptr) add_plain(e, said, n, seed, run);
    stores_ = stores_ || n != 0;
    if (index_.store(rank_, run)) return true;
    return no_room();
  }

  // Sequence hashes have a seed of their own, and are about text.
  void add_plain(const StoredEvent& e, const uint32_t* said, size_t n, uint64_t seed, Store& run) {
    const uint64_t own = index_.sequences()->seed();
    if (e.pairs || e.mm_begin != nullptr || (seed == kBaseSeed && own == kBaseSeed)) return;
    plain_.resize(n);
    local_hashes(said, n, index_.block_size(), own, plain_.data());
    run.plain = plain_.data();
    run.space = seed - kBaseSeed;
  }

  // Blocks that images reach into carry the images' identity beside their tokens.
  void hash_images(const StoredEvent& e, const uint32_t* said, size_t first, size_t n,
                   uint64_t seed) {
    const size_t size = index_.block_size();
    const size_t window = e.pairs ? size + 1 : size;
    for (size_t i = 0; i < n; ++i) {
      const uint32_t from = e.mm_begin[first + i], to = e.mm_begin[first + i + 1];
      if (from == to) continue;
      locals_[i] = local_hash_mm(said + i * size, window, e.mm + from, to - from, seed);
    }
  }

  // What an engine says once, with a prompt's first block, and what holds for all blocks below it:
  // the cache salt, and an adapter known by number only, which counts as one named "#number".
  uint64_t prompt_term(const StoredEvent& e, bool has_parent, uint64_t parent) {
    if (e.names_salts || !e.salt.empty()) index_.rank(rank_).salted = true;
    if (!has_parent) return salt_term(e.salt) + numbered_adapter_term(e);
    const uint64_t above = index_.term_of(rank_, parent);
    return above != 0 ? above : salt_term(e.salt);
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
  bool names_ranks_ = false;            // some have named theirs
  uint64_t ignored_[kIgnored] = {};
  bool ignores_ = false;  // events of this engine process had no effect
  bool stores_ = false;   // and some that stored have had
  uint64_t other_block_size_ = 0;
  Scratch scratch_;
  std::vector<uint64_t> locals_;
  std::vector<uint64_t> plain_;  // local hashes by the seed of sequence hashes, where it differs
  SlicedBatch<Stream> batch_;
  uint32_t speaks_for_ = 0;  // the rank of the batch
  RankId rank_ = kNone;      // the same, of the index
  bool named_ = false;       // it says so itself
  bool says_rank_ = false;   // the last batch is known to be of that rank
  uint32_t outcome_ = 0;
  uint32_t cleared_ = 0;
  size_t flaw_ = kReasons;
};

}  // namespace kvd
