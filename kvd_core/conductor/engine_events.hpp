// Engines' own events for a source of the conductor: a sink of the decoder, as Stream is for a
// worker.
//
//   batch [ts, events, rank] ── decode ──> stored / removed / cleared
//                                              │  medium -> layer, adapter and salt -> namespace
//                                              v
//                                          Conductor
//
// The hashes are the engine's own and mean the same in every namespace. Cache groups and second
// copies work as for workers: a hybrid model's window groups on the device limit what can be
// reused. An event that is not about a prefix (a remote copy, a group of another kind) has no
// effect.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "index/cache_groups.hpp"
#include "conductor/conductor.hpp"
#include "events/events.hpp"

namespace kvd {

// Names of media that stand for another medium; any other name is a medium of its own.
constexpr std::pair<std::string_view, std::string_view> kFoldedMedia[] = {
    {"", "GPU"},      {"DEVICE", "GPU"},      {"CPU_PINNED", "CPU"}, {"CPU_TIER1", "CPU"},
    {"HOST", "CPU"},  {"HOST_PINNED", "CPU"}, {"DRAM", "CPU"},       {"CPU_TIER2", "DISK"},
    {"NVME", "DISK"}, {"SSD", "DISK"},        {"STORAGE", "DISK"},   {"FS", "DISK"},
};
// Longest name of a medium, which becomes a member of every answer.
constexpr size_t kMaxMediumBytes = 64;
// Hashes announced without tokens in several groups that are applied between two checks of steps.
constexpr uint32_t kNamesAtOnce = 64;

// What became of events.
struct EngineStats {
  uint64_t events = 0;
  uint64_t stored = 0;      // stored events, or parts of them, that count or will count
  uint64_t parked = 0;      // stored events whose parent is not known
  uint64_t lora_name = 0;   // of another adapter than the registered one
  uint64_t block_size = 0;  // of another block size
  uint64_t remote = 0;
  uint64_t group = 0;  // of cache groups that say nothing about a prefix
  uint64_t pairs = 0;  // EAGLE's
  uint64_t full = 0;
  uint64_t media = 0;
  uint64_t holders = 0;
  uint64_t refused = 0;  // faulty in themselves: a hash repeated
  uint64_t bad[kReasons] = {};
};

class EngineEvents {
 public:
  EngineEvents(Conductor& conductor, Source* source, std::string lora_name, std::string salt)
      : conductor_(conductor),
        source_(source),
        lora_name_(std::move(lora_name)),
        salt_(std::move(salt)) {}

  enum class Progress : uint8_t { REFUSED, DONE, UNFINISHED };

  // Begins a batch. If it is refused whole, nothing of it is counted. Drops an unfinished batch
  // before it.
  Progress apply(const uint8_t* payload, size_t size, uint32_t steps) {
    flaw_ = kReasons;
    std::fill(std::begin(bad_), std::end(bad_), 0);
    batch_.begin(payload, size);
    return advance(steps);
  }

  // Continues an unfinished batch, whose payload must not have moved.
  Progress advance(uint32_t steps) {
    Steps some{steps};
    if (!batch_.under_way()) return Progress::DONE;
    if (batch_.advance(*this, some)) return Progress::UNFINISHED;
    if (batch_.refused()) return Progress::REFUSED;
    for (size_t reason = 0; reason < kReasons; ++reason) counters.bad[reason] += bad_[reason];
    return Progress::DONE;
  }

  // The first Reason of the last batch, in their order; kReasons if it is not flawed.
  size_t flaw() const { return flaw_; }

  // Forgets the cache groups: another engine process speaks from now on.
  void forget() {
    batch_.drop();
    conductor_.forget_groups(*source_);
  }

  EngineStats counters;

  // ---- the decoder's sink

  void begin(bool has_rank, uint32_t dp_rank) { rank_ = has_rank ? dp_rank : source_->dp_rank; }

  void resume() {}

  bool resolve_waiting(Steps& steps) { return conductor_.resolve_waiting(steps); }

  uint32_t stored(const StoredEvent& e, uint32_t from, Steps& steps) {
    if (from == 0) ++counters.events;
    if (is_elsewhere(e)) return e.n_hashes;
    std::string_view adapter = e.lora_name;
    std::string number;
    if (adapter.empty() && e.has_lora_id && e.lora_id > 0)
      adapter = number = "#" + std::to_string(e.lora_id);
    if (!lora_name_.empty() && !adapter.empty() && adapter != lora_name_) {
      ++counters.lora_name;
      return e.n_hashes;
    }
    const LayerId medium = layer_of(e.medium);
    const RankId id = holder(medium);
    if (id == kNone) return e.n_hashes;
    const StoreTarget target = target_of(id, e, medium);
    const uint32_t size = conductor_.index().block_size();
    if (target.layer == kNone) {
      ++counters.group;
    } else if (target.by_name) {
      return store_names(id, e, target.layer, from, e.n_hashes, steps);
    } else if (e.block_size != 0 && e.block_size != size) {
      ++counters.block_size;
    } else if (e.pairs) {
      ++counters.pairs;
    } else {
      return store_blocks(id, e, target.layer, medium, adapter, from, steps);
    }
    return e.n_hashes;
  }

  uint32_t removed(const RemovedEvent& e, uint32_t from, Steps& steps) {
    if (from == 0) ++counters.events;
    if (is_elsewhere(e)) return e.n_hashes;
    const LayerId medium = layer_of(e.medium);
    const RankId id = holder(medium);
    if (id == kNone) return e.n_hashes;
    const LayerId layer = layer_of(id, e, medium);
    if (layer == kNone) {
      ++counters.group;
      return e.n_hashes;
    }
    const std::vector<LayerId>& groups = groups_of_all(id, e, medium);
    const uint32_t to = from + std::min(kHashesAtOnce, e.n_hashes - from);
    for (uint32_t i = from; i < to; ++i) {
      conductor_.remove(source_, id, e.hashes[i], 1u << layer, source_->home, true);
      for (const LayerId group : groups) {
        conductor_.remove(source_, id, e.hashes[i], 1u << group, source_->home, true);
      }
    }
    steps.take(kStepsARemoval * (to - from) * (1 + groups.size()));
    return to;
  }

  // Drops everything of the rank, whoever announced it; on all media unless one is named.
  void cleared(const ClearedEvent& e, Steps& steps) {
    ++counters.events;
    const LayerId layer = e.has_tier ? layer_of(e.medium) : 0;
    if (layer == kNone) return;
    const LayerMask mask = e.has_tier ? 1u << layer : kAllLayers;
    for (size_t i = 0; i < source_->holders.size(); ++i) {
      const Holder& each = source_->holders[i];
      steps.take(1);
      if (!each.ranked || each.dp_rank != rank_) continue;
      steps.take(conductor_.index().rank(each.id).names.capacity() / kSlotsAStep);
      conductor_.clear(source_, each.id, mask, 0, true);
    }
  }

  void bad(Reason reason, uint32_t count) {
    bad_[static_cast<size_t>(reason)] += count;
    if (flaw_ == kReasons && reason != Reason::TRAILING && reason != Reason::UNKNOWN_TYPE) {
      flaw_ = static_cast<size_t>(reason);
    }
  }

 private:
  // Stores a part of an event's blocks, in all groups if it names none; returns the position
  // reached. Blocks without tokens count only in groups other than the main one.
  uint32_t store_blocks(RankId id, const StoredEvent& e, LayerId layer, LayerId medium,
                        std::string_view adapter, uint32_t from, Steps& steps) {
    const uint32_t size = conductor_.index().block_size();
    const uint32_t whole = size == 0 ? 0 : std::min(e.n_hashes, e.n_tokens / size);
    const std::vector<LayerId>& groups = groups_of_all(id, e, medium);
    uint32_t to = from + std::min(kNamesAtOnce, e.n_hashes - from);
    if (from < whole) {
      // A last part of one block would be a lone block below a parent, which means a second copy.
      to = whole - from > kBlocksAtOnce + 1 ? from + kBlocksAtOnce : whole;
      to = store(e, from, to, id, layer, adapter, steps);
      if (to == kNone) return e.n_hashes;
    }
    Steps all{kNone};
    for (const LayerId group : groups) store_names(id, e, group, from, to, all);
    steps.take(kNone - all.rest());
    return to >= whole && groups.empty() ? e.n_hashes : to;
  }

  // Stores blocks with their tokens; returns the position reached, kNone when they were neither
  // placed nor parked.
  uint32_t store(const StoredEvent& e, uint32_t from, uint32_t to, RankId id, LayerId layer,
                 std::string_view adapter, Steps& steps) {
    StoredBlocks stored{};
    stored.hashes = e.hashes + from;
    stored.n = to - from;
    stored.has_parent = from != 0 || e.has_parent;
    stored.parent = from != 0 ? e.hashes[from - 1] : e.parent;
    stored.tokens = e.tokens + from * size_t{conductor_.index().block_size()};
    stored.layer = layer;
    stored.space = lora_term(adapter.empty() ? std::string_view(lora_name_) : adapter) +
                   salt_term(e.salt.empty() ? std::string_view(salt_) : e.salt);
    stored.inherits = e.salt.empty();
    stored.by_engine = true;
    stored.mm_begin = e.mm_begin == nullptr ? nullptr : e.mm_begin + from;
    stored.mm = e.mm;
    const Conductor::StoreOutcome outcome = conductor_.store(source_, id, stored, kHashesAtOnce);
    const bool waits = outcome == Conductor::StoreOutcome::PARKED;
    steps.take((waits ? kStepsAName : kStepsABlock) * stored.n);
    counters.parked += from == 0 && waits;
    counters.full += outcome == Conductor::StoreOutcome::FULL;
    counters.refused += outcome == Conductor::StoreOutcome::REFUSED;
    const bool kept = waits || outcome == Conductor::StoreOutcome::PLACED;
    counters.stored += kept;
    return kept ? from + stored.n : kNone;
  }

  // Stores blocks by hash alone until the steps are used up; returns the position reached.
  uint32_t store_names(RankId id, const StoredEvent& e, LayerId layer, uint32_t from, uint32_t to,
                       Steps& steps) {
    const uint32_t reached = conductor_.store_named(source_, id, e.hashes, from, to, layer,
                                                    source_->home, true, e.has_parent, steps);
    counters.full += reached == kNone;
    counters.stored += reached != kNone;
    return reached;
  }

  template <class Event>
  bool is_elsewhere(const Event& e) {
    counters.remote += e.remote;
    return e.remote;
  }

  // ---- cache groups

  StoreTarget target_of(RankId id, const StoredEvent& e, LayerId medium) {
    RankTraits& traits = conductor_.traits(id);
    learn_group(traits, e);
    const GroupKind kind = kind_of(traits, e);
    uint32_t blocks = kNone;  // a further full-attention group must hold the whole prefix
    if (kind == GroupKind::WINDOW) {
      if (!window_blocks(traits, e, conductor_.index().block_size(), &blocks)) return kNowhere;
    } else if (kind != GroupKind::FULL) {
      return kNowhere;
    } else if (!is_further_group(traits, e.group)) {
      if (e.n_tokens != 0 && traits.main_group < 0) traits.main_group = std::max(0, e.group);
      return {medium, e.n_tokens == 0};
    }
    // Only groups on the device decide where a reusable prefix ends.
    if (medium != kDeviceLayer) return kNowhere;
    return {conductor_.device_group(id, e.group, blocks), true};
  }

  LayerId layer_of(RankId id, const RemovedEvent& e, LayerId medium) {
    const RankTraits& traits = conductor_.traits(id);
    const GroupKind kind = kind_of(traits, e);
    if (e.group >= 0 && (kind == GroupKind::WINDOW || is_further_group(traits, e.group))) {
      return medium == kDeviceLayer ? conductor_.device_group(e.group) : kNone;
    }
    return kind == GroupKind::FULL ? medium : kNone;
  }

  // The layers of all groups but the main one, if an event names no group and so is about all.
  template <class Event>
  const std::vector<LayerId>& groups_of_all(RankId id, const Event& e, LayerId medium) {
    groups_.clear();
    if (e.group < 0 && medium == kDeviceLayer) {
      for (const Window& window : conductor_.traits(id).windows) groups_.push_back(window.layer);
    }
    return groups_;
  }

  // The holder of the batch's rank. Without a layer, or with too many holders: kNone, and counted.
  RankId holder(LayerId layer) {
    if (layer == kNone) {
      ++counters.media;
      return kNone;
    }
    const RankId id = conductor_.holder(source_, 0, true, rank_);
    if (id == kNone) ++counters.holders;
    return id;
  }

  LayerId layer_of(std::string_view medium) {
    const auto known = layers_.find(medium);
    if (known != layers_.end()) return known->second;
    if (medium.size() > kMaxMediumBytes) return kNone;
    std::string name(medium);
    for (char& c : name) {
      if (c >= 'a' && c <= 'z') c = static_cast<char>(c - 'a' + 'A');
    }
    for (const auto& [from, to] : kFoldedMedia) {
      if (name == from) name = to;
    }
    const auto plain = [](char c) { return c >= ' ' && c <= '~' && c != '"' && c != '\\'; };
    if (!std::all_of(name.begin(), name.end(), plain)) return kNone;
    const std::string key = '"' + name + '"';
    const LayerId layer = conductor_.medium(name, key);
    if (layer != kNone && layers_.size() < kMaxKnown) layers_.emplace(medium, layer);
    return layer;
  }

  // Spellings of media remembered; a publisher has a handful.
  static constexpr size_t kMaxKnown = 4096;

  Conductor& conductor_;
  Source* source_;
  std::string lora_name_;
  std::string salt_;
  std::map<std::string, LayerId, std::less<>> layers_;  // by the medium's spelling
  std::vector<LayerId> groups_;
  SlicedBatch<EngineEvents> batch_;
  uint32_t bad_[kReasons] = {};
  size_t flaw_ = kReasons;
  uint32_t rank_ = 0;
};

}  // namespace kvd
