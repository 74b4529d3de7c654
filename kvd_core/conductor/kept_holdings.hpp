// What publishers hold, as a process leaves it to its successor.
//
//   KeptHoldings          runs of every holder         as `Dump` writes them, with sequence hashes
//                         'W'  further names           where a holder has several for a block
//                         'W'  waiting blocks          with all that they wait for
//                         'M'  media
//   RestoreHoldings       run    parent known by its name, or by its sequence hash ─> put behind it
//                                else ─> each block waits for its sequence hash
//                         'W'    its name is known ─> gains the medium
//                                else ─> waits, and is tried once
//
// A holder's id is a JSON text, "PUBLISHER/BACKEND/r" or, without a rank, "PUBLISHER/BACKEND/-";
// the publisher is its index in a list that both processes have.
//
// Blocks that nobody holds are not written, even if held blocks lie behind them. Such a held block
// waits until a prompt or an event shows the blocks before it; until then it would not count
// anyway. Second copies are not written.
//
// Invariant: writing changes nothing. It may pause and continue while publishers come and go, as a
// dump may (dump/dump.hpp). A block that is held or waits all the time is written at least once.
//
// Costs: 24 bytes a block, some 90 a waiting block; restoring costs what storing does, and
// kStepsAWaiter for each waiting block.
#pragma once

#include <charconv>
#include <cstdint>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "base/steps.hpp"
#include "conductor/conductor.hpp"
#include "dump/dump.hpp"
#include "dump/staged.hpp"

namespace kvd {

// ---- members of Conductor

// Stores a run that was held; `above` is the sequence hash of the block before it. False when it is
// refused.
inline bool Conductor::bring_back(RankId id, const Store& s, uint64_t above) {
  if (!index_.has_room(id, s.n)) return false;
  index_.make_room(id, s.n);
  Source& source = *owners_[id];
  note(source, id, s.space);
  BlockId below = kNone;
  if (s.has_parent) {
    below = parent_of_kept(id, s.parent, s.space, above);
    if (below == kNone) return await_sequences(id, s);
  }
  if (!affords(id, s, below)) return index_.refuse(s.n);
  put(id, s, below);
  for (uint32_t i = 0; i < s.n; ++i) take_over_parked(id, s.names[i]);
  return true;
}

inline BlockId Conductor::parent_of_kept(RankId id, uint64_t parent, uint64_t space,
                                         uint64_t above) const {
  const Names& names = index_.ranks_[id].names;
  const uint32_t slot = names.find(parent, keys());
  if (slot != Names::kAbsent) return keys().block(names.value(slot));
  return above == 0 ? kNone : sequences().find(sequences().key(space, above));
}

// Nobody has the blocks before these: they wait, and count as the blocks of their sequence hashes.
inline bool Conductor::await_sequences(RankId id, const Store& s) {
  const uint64_t home = owners_[id]->home;
  bool all = true;
  for (uint32_t i = 0; i < s.n; ++i) {
    StagedWaiting one;
    one.name = s.names[i];
    one.hash = one.name ^ (s.space == home ? 0 : mix64(s.space ^ home));
    one.space = s.space;
    one.certain = true;
    one.sequence = s.sequences[i];
    all = one.sequence != 0 && wait_again(id, one, s.layer) && all;
  }
  return all;
}

// Parks a block that waited, and queues it to be tried; the caller then calls `resolve_waiting`.
// False when it is refused.
inline bool Conductor::wait_again(RankId id, const StagedWaiting& w, LayerId layer) {
  const uint32_t slot = index_.ranks_[id].names.find(w.name, keys());
  if (slot != Names::kAbsent) {
    if ((keys().layers(index_.ranks_[id].names.value(slot)) >> layer & 1) == 0)
      index_.gain_name(id, slot, layer);
    return true;
  }
  const uint32_t before = index_.parked_at(id, w.name);
  if (before != kNone) {
    index_.ranks_[id].rare->parked.add_layer(before, layer, index_.parked_blocks_);
    return true;
  }
  if (!can_wait(1)) return index_.refuse(1);
  note(*owners_[id], id, w.space);
  index_.rank(id).settling = index_.rank(id).restored = true;
  const Store content{&w.name, &w.local, 1, true, w.parent, layer, 0, &w.plain, w.space};
  index_.park(id, w.name, layer, w.has_content ? &content : nullptr);
  const uint32_t at = index_.parked_at(id, w.name);
  if (at == kNone) return true;
  Parked& parked = index_.parked_blocks_[at];
  parked.hash = w.hash;
  parked.space = w.space;
  parked.sequence = w.sequence;
  parked.by_engine = w.by_engine;
  parked.certain = w.certain;
  const uint64_t own = sequences().key(w.space, w.hash);
  const uint64_t known = w.sequence == 0 ? 0 : sequences().key(w.space, w.sequence);
  const bool by_hash = !w.has_content && (known == 0 || known == own);
  enter(own, at, by_hash ? WaitsFor::CREDIT : WaitsFor::ALIAS);
  if (known != 0 && !by_hash) enter(known, at, WaitsFor::CREDIT);
  untried_.push_back({parked.stamp, at, WaitsFor::CREDIT});
  if (!w.has_content) return true;
  enter(behind(sequences().key(w.space, w.parent)), at, WaitsFor::CHILD);
  untried_.push_back({parked.stamp, at, WaitsFor::CHILD});
  return true;
}

// ---- writing

// Writes what holders have, piece by piece. Watches the index until it is destroyed.
class KeptHoldings {
 public:
  KeptHoldings(Index& index, const Conductor& conductor)
      : index_(index), conductor_(conductor), runs_(index, conductor.sequences()) {}

  uint64_t blocks_written() const { return runs_.blocks_written(); }

  // Appends records until `out` holds `enough` bytes, or a slice of the work is done; false when
  // everything is written. Publishers that have gone meanwhile are null; new ones may have come.
  bool fill(const std::vector<const Source*>& publishers, std::string& out, size_t enough) {
    name_holders(publishers);
    if (!runs_written_) {
      runs_written_ = !runs_.fill(owners_, out, enough);
      return true;
    }
    Steps steps(kStepsASlice);
    while (out.size() < enough && steps.left()) {
      if (rank_ == owners_.size() && !write_waiting(out)) {
        write_media(out);
        return false;
      }
      if (rank_ != owners_.size()) write_names(out);
      steps.take(1);
    }
    return true;
  }

 private:
  static constexpr int64_t kStepsASlice = 4096;  // slots of tables, waiting blocks: about 0.2 ms
  static constexpr size_t kSlotsAStep = 8;

  void name_holders(const std::vector<const Source*>& publishers) {
    ids_.clear();
    owners_.assign(index_.rank_end(), nullptr);
    size_t holders = 0;
    for (const Source* source : publishers)
      holders += source == nullptr ? 0 : source->holders.size();
    ids_.reserve(holders);  // so that their addresses stay valid
    for (size_t i = 0; i < publishers.size(); ++i) {
      if (publishers[i] == nullptr) continue;
      for (const Holder& holder : publishers[i]->holders) {
        ids_.push_back('"' + std::to_string(i) + '/' + std::to_string(holder.backend) +
                       (holder.ranked ? "/r\"" : "/-\""));
        owners_[holder.id] = &ids_.back();
      }
    }
  }

  // Writes a part of the rank's names.
  void write_names(std::string& out) {
    const Rank& rank = std::as_const(index_).rank(rank_);
    const bool some = owners_[rank_] != nullptr && rank.live && rank.has_shared();
    const uint32_t slots = some ? rank.names.capacity() : 0;
    if (slots != slots_) {  // the table has grown: start it anew
      slots_ = slots;
      at_ = 0;
    }
    for (size_t i = 0; i < kSlotsAStep && at_ < slots_; ++i) write_name(rank, at_++, out);
    if (at_ != slots_) return;
    ++rank_;
    slots_ = at_ = 0;
  }

  // Writes the next waiting block; false when there are no more.
  bool write_waiting(std::string& out) {
    if (waiting_ >= index_.parked_blocks().end()) return false;
    const Parked& parked = index_.parked_blocks()[waiting_++];
    if (parked.stamp != 0 && index_.rank(parked.rank).live && owners_[parked.rank] != nullptr)
      write_parked(parked, out);
    return true;
  }

  // Writes one of several names that the rank has for a block.
  void write_name(const Rank& rank, uint32_t slot, std::string& out) {
    const uint32_t value = rank.names.value(slot);
    if (value == Names::kAbsent) return;
    const BlockId block = index_.keys().block(value);
    const LayerMask layers = index_.keys().layers(value);
    const auto& shared = rank.rare->shared;
    bool several = false;
    for (LayerId layer = 0; layer < kMaxLayers; ++layer)
      several =
          several || ((layers >> layer & 1) != 0 && shared.get(block, layer, index_.counts()) != 0);
    const uint64_t sequence = conductor_.sequences().sequence_of(block);
    if (!several || sequence == 0) return;
    Parked kept;
    kept.rank = rank_;
    kept.layers = layers;
    kept.name = kept.hash = index_.keys().name(value);
    kept.space = conductor_.sequences().space_of(block);
    kept.sequence = sequence;
    kept.certain = true;
    write_parked(kept, out);
  }

  void write_parked(const Parked& parked, std::string& out) {
    const std::string& owner = *owners_[parked.rank];
    for (LayerId layer = 0; layer < kMaxLayers; ++layer) {
      if ((parked.layers >> layer & 1) == 0 || layer == kGhostLayer) continue;
      put<uint8_t>(out, kWaitingTag);
      put<uint8_t>(out, (parked.has_content ? kHasContent : 0) |
                            (parked.by_engine ? kByEngine : 0) | (parked.certain ? kCertain : 0));
      put<uint8_t>(out, static_cast<uint8_t>(index_.tier_of(layer)));
      put<uint32_t>(out, index_.group_of(layer));
      put<uint32_t>(out, index_.rank(parked.rank).dp_rank);
      put<uint64_t>(out, owner.size());
      for (const uint64_t each : {parked.name, parked.hash, parked.space, parked.parent,
                                  parked.local, parked.plain, parked.sequence})
        put<uint64_t>(out, each);
      out.append(owner);
    }
  }

  void write_media(std::string& out) const {
    const std::vector<Medium>& media = conductor_.media();
    for (size_t i = 0; i < media.size(); ++i) {
      put<uint8_t>(out, kMediumTag);
      put<uint8_t>(out, static_cast<uint8_t>(kFirstMedium + i));
      put<uint32_t>(out, static_cast<uint32_t>(media[i].name.size()));
      put<uint32_t>(out, static_cast<uint32_t>(media[i].key.size()));
      out.append(media[i].name).append(media[i].key);
    }
  }

  Index& index_;
  const Conductor& conductor_;
  Dump runs_;
  bool runs_written_ = false;
  std::vector<std::string> ids_;            // of all holders
  std::vector<const std::string*> owners_;  // pointers to these, by rank
  RankId rank_ = 0;                         // the rank whose names are next
  uint32_t slots_ = 0, at_ = 0;             // its table's size when it was begun; position there
  uint32_t waiting_ = 0;                    // the waiting block that is next
};

// ---- reading

// Restores an entry's blocks to holders; `publishers[i]` is null if they are not wanted.
class HoldersOf {
 public:
  HoldersOf(Index& index, Conductor& conductor, const StagedEntry& entry)
      : index_(index), conductor_(conductor), entry_(entry) {
    for (const StagedWorker& worker : entry.workers) ids_.push_back(parse(worker.id));
  }

  void update(std::vector<Source*> publishers) { publishers_ = std::move(publishers); }

  RankId rank(size_t worker, uint32_t dp_rank) {
    const Id& id = ids_[worker];
    if (id.publisher >= publishers_.size() || publishers_[id.publisher] == nullptr) return kNone;
    return conductor_.holder(publishers_[id.publisher], id.backend, id.ranked, dp_rank);
  }

  LayerId layer(uint8_t tier, uint32_t group) {
    if (tier < kTierLayers) return group == kNone ? tier : index_.group_layer(tier, group);
    for (const StagedMedium& medium : entry_.media) {
      if (medium.tier == tier) return conductor_.medium(medium.name, medium.key);
    }
    return kNone;
  }

  bool knows(RankId rank, const StagedRun& run) const {
    return conductor_.parent_of_kept(rank, run.parent, run.term, run.above) != kNone;
  }

  bool store(RankId rank, const Store& blocks, uint64_t above) {
    Store run = blocks;
    run.space = blocks.term;
    run.term = 0;
    return conductor_.bring_back(rank, run, above);
  }

  void wait(const StagedWaiting& waiting) {
    const RankId id = rank(waiting.worker, waiting.dp_rank);
    const LayerId on = layer(waiting.tier, waiting.group);
    if (id != kNone && on != kNone) conductor_.wait_again(id, waiting, on);
  }

 private:
  struct Id {
    uint32_t publisher, backend;
    bool ranked;
  };

  static Id parse(const std::string& text) {
    Id id{};
    const char* const end = text.data() + text.size();
    const auto [slash, bad] = std::from_chars(text.data() + 1, end, id.publisher);
    if (bad != std::errc() || slash == end || *slash != '/')
      Stage::refuse("a holder without a name");
    const auto [rest, worse] = std::from_chars(slash + 1, end, id.backend);
    const std::string_view kind(rest, static_cast<size_t>(end - rest));
    if (worse != std::errc() || (kind != "/r\"" && kind != "/-\""))
      Stage::refuse("a holder without a name");
    id.ranked = kind == "/r\"";
    return id;
  }

  Index& index_;
  Conductor& conductor_;
  const StagedEntry& entry_;
  std::vector<Id> ids_;  // by worker of the entry
  std::vector<Source*> publishers_;
};

// Gives holders back what an entry has of them, slice by slice; `Stage` refuses faulty content.
class RestoreHoldings {
 public:
  RestoreHoldings(Index& index, Conductor& conductor, const Stage& stage, const StagedEntry& entry)
      : index_(index),
        conductor_(conductor),
        entry_(entry),
        to_(index, conductor, entry),
        runs_(stage, entry) {}

  // Continues until the steps are used up; false when all is done.
  bool apply(std::vector<Source*> publishers, Steps& steps) {
    to_.update(std::move(publishers));
    if (!runs_stored_) runs_stored_ = !runs_.apply(index_, to_, steps);
    while (runs_stored_ && steps.left() && next_ < entry_.waiting.size()) {
      to_.wait(entry_.waiting[next_++]);
      steps.take(kStepsAWaiter);
    }
    const bool placed = conductor_.resolve_waiting(steps);
    return !runs_stored_ || next_ < entry_.waiting.size() || !placed;
  }

  uint64_t stored() const { return runs_.stored(); }

 private:
  Index& index_;
  Conductor& conductor_;
  const StagedEntry& entry_;
  HoldersOf to_;
  Restore runs_;
  bool runs_stored_ = false;
  size_t next_ = 0;  // position in the entry's waiting blocks
};

}  // namespace kvd
