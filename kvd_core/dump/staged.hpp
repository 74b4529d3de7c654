// A received dump, before any of it counts: checked as a whole, then applied in slices.
//
//   entry "m:default", 16 tokens a block
//     workers   0: 7 {0, 1}    1: 12 {0}               ids as JSON, with the ranks named
//     runs      [ worker 0, rank 0, device, parent -, 3 blocks ] [ .. ] ..
//     pages     [ name local | name local | .. ]       64 Ki blocks each; a run lies in one page
//
// A dump of what publishers hold also has sequence hashes (a third number a block, and that of the
// block before a run), waiting blocks, and names of media.
//
// Applying cannot fail halfway: everything that could be refused was refused on reading.
//
// Invariants
//   1. a run has 1 .. kRunBlocks blocks, all in one page; a longer one is cut, and each part has
//      the last block of the one before as its parent;
//   2. a run's worker and rank are listed in `workers`; a worker has at most kMaxRanksPerWorker
//      ranks;
//   3. no block is its own parent.
//
// Costs: 16 bytes a block, 56 a run, 80 a rank; applying costs what storing costs (0.2 us a block).
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "dump/format.hpp"
#include "index/index.hpp"
#include "base/keyed.hpp"
#include "base/steps.hpp"
#include "index/worker.hpp"

namespace kvd {

// Blocks stored in one go: 0.8 ms at 0.2 us each, a time that a query can wait.
constexpr uint32_t kRunBlocks = kRecordBlocks;

// Storing a run copies sets of holders, at worst of all ranks. This many take as long as a block.
constexpr uint32_t kRanksABlock = 256;

// The most that a dump may bring; more is refused.
struct DumpLimits {
  uint64_t blocks;
  uint64_t runs;
  uint64_t entries;
  uint64_t ranks;  // of all workers of all entries
};

struct StagedRun {
  uint64_t parent;
  uint64_t first;  // page << 32 | offset, in blocks
  uint32_t n;
  uint64_t term;
  uint32_t worker;
  uint32_t dp_rank;
  uint32_t group;  // kNone: the main one
  uint8_t tier;
  bool has_parent;
  uint64_t above;  // sequence hash of the block before, 0 unknown
};

// A waiting block of a publisher, or a further name of a block that has a place.
struct StagedWaiting {
  uint32_t worker = 0;
  uint32_t dp_rank = 0;
  uint32_t group = kNone;
  uint8_t tier = 0;
  bool has_content = false;
  bool by_engine = false;
  bool certain = false;  // whether `sequence` is certain
  uint64_t name = 0, hash = 0, space = 0, parent = 0, local = 0, plain = 0, sequence = 0;
};

struct StagedMedium {
  uint8_t tier;  // its number in runs
  std::string name;
  std::string key;  // as a JSON member name
};

// The rank and layer of a run, and what comes before it.
struct RunOf {
  uint32_t dp_rank;
  uint8_t tier;
  uint32_t group = kNone;
  bool has_parent = false;
  uint64_t parent = 0;
  uint64_t term = 0;
  uint64_t above = 0;
};

// A rank with its traits.
struct StagedRank {
  struct StagedWindow {
    uint32_t group;
    uint32_t blocks;
  };
  uint32_t dp_rank;
  uint32_t blocks = 0;  // on its device; it has about as many names
  bool salted = false;
  bool offloads = false;
  bool numbers_groups = false;
  int32_t main_group = -1;
  std::vector<CacheGroup> groups;
  std::vector<StagedWindow> windows;
};

struct StagedWorker {
  std::string id;  // as JSON: 7, or "prefill-7"
  std::vector<StagedRank> ranks;
};

struct StagedEntry {
  std::string key;  // the entry's name in the text, empty in the binary form
  std::string model;
  std::string tenant;
  bool has_model = false;
  bool has_tenant = false;
  uint32_t block_size = 0;
  uint64_t blocks = 0;
  std::vector<StagedWorker> workers;
  std::deque<StagedRun> runs;
  std::deque<StagedWaiting> waiting;
  std::vector<StagedMedium> media;
};

// Collects entries. `refuse` throws a std::invalid_argument with a text for the log.
class Stage {
 public:
  static constexpr uint32_t kPageBlocks = 65536;

  Stage(DumpLimits limits, bool sequences) : limits_(limits), sequences_(sequences) {}

  [[noreturn]] static void refuse(const std::string& why) { throw std::invalid_argument(why); }

  std::deque<StagedEntry>& entries() { return entries_; }
  bool sequences() const { return sequences_; }
  size_t words() const { return sequences_ ? 3 : 2; }  // numbers that a block takes in a page
  const uint64_t* page(uint64_t first) const {
    return pages_[first >> 32].data() + words() * (first & 0xffffffff);
  }

  void begin_entry() {
    if (entries_.size() == limits_.entries) refuse("too many entries");
    entries_.emplace_back();
    worker_numbers_.clear();
    last_worker_ = kNone;
  }

  void begin_run() { first_part_ = entries_.back().runs.size(); }

  void add_block(uint64_t name, uint64_t local, uint64_t sequence = 0) {
    StagedEntry& entry = entries_.back();
    if (++blocks_ > limits_.blocks) refuse("too many blocks");
    const bool goes_on = entry.runs.size() != first_part_;
    if (goes_on && name == last_name_) refuse_parent();
    const bool whole = goes_on && entry.runs.back().n < kRunBlocks;
    if (!whole || used_ == kPageBlocks) begin_part(entry);
    uint64_t* const at = pages_.back().data() + words() * used_++;
    at[0] = last_name_ = name;
    at[1] = local;
    last_sequence_ = sequence;
    if (sequences_) at[2] = sequence;
    ++entry.runs.back().n;
    ++entry.blocks;
  }

  // Says which rank and layer the blocks added since `begin_run` belong to.
  void end_run(const std::string& worker_id, const RunOf& of) {
    StagedEntry& entry = entries_.back();
    if (entry.runs.size() == first_part_) return;
    const uint32_t worker = worker_number(entry, worker_id);
    StagedRank& holder = rank(entry.workers[worker].ranks, of.dp_rank);
    entry.runs[first_part_].has_parent = of.has_parent;
    entry.runs[first_part_].parent = of.parent;
    entry.runs[first_part_].above = of.above;
    if (of.has_parent && page(entry.runs[first_part_].first)[0] == of.parent) refuse_parent();
    for (size_t i = first_part_; i < entry.runs.size(); ++i) {
      entry.runs[i].worker = worker;
      entry.runs[i].dp_rank = of.dp_rank;
      entry.runs[i].tier = of.tier;
      entry.runs[i].group = of.group;
      entry.runs[i].term = of.term;
      if (of.tier == kDeviceLayer && of.group == kNone) holder.blocks += entry.runs[i].n;
    }
  }

  // Sets a rank's traits.
  void add_rank(const std::string& worker_id, StagedRank staged) {
    StagedEntry& entry = entries_.back();
    StagedRank& known = rank(entry.workers[worker_number(entry, worker_id)].ranks, staged.dp_rank);
    staged.blocks = known.blocks;
    known = std::move(staged);
  }

  void add_waiting(const std::string& worker_id, StagedWaiting staged) {
    StagedEntry& entry = entries_.back();
    if (++waiting_ > limits_.blocks) refuse("too many blocks without a place");
    staged.worker = worker_number(entry, worker_id);
    rank(entry.workers[staged.worker].ranks, staged.dp_rank);
    entry.waiting.push_back(staged);
  }

  // Blocks of all entries. Those of a removed entry stay in their pages as long as the stage.
  uint64_t blocks() const { return blocks_; }

 private:
  void begin_part(StagedEntry& entry) {
    if (++runs_ > limits_.runs) refuse("too many events");
    if (pages_.empty() || used_ == kPageBlocks) {
      pages_.emplace_back(words() * kPageBlocks);
      used_ = 0;
    }
    const uint64_t first = uint64_t{pages_.size() - 1} << 32 | used_;
    const bool goes_on = entry.runs.size() != first_part_;
    entry.runs.push_back({goes_on ? last_name_ : 0, first, 0, 0, 0, 0, kNone, 0, goes_on,
                          goes_on ? last_sequence_ : 0});
  }

  // No cache holds such a block, so nothing in this dump can be trusted. A name that comes again
  // further on is fine: some engines name blocks by their own content alone.
  [[noreturn]] static void refuse_parent() { refuse("a block is its own parent"); }

  uint32_t worker_number(StagedEntry& entry, const std::string& id) {
    if (last_worker_ != kNone && entry.workers[last_worker_].id == id) return last_worker_;
    const auto made = worker_numbers_.emplace(id, static_cast<uint32_t>(entry.workers.size()));
    if (made.second) entry.workers.push_back({id, {}});
    return last_worker_ = made.first->second;
  }

  StagedRank& rank(std::vector<StagedRank>& ranks, uint32_t dp_rank) {
    const auto before = [](const StagedRank& some, uint32_t wanted) {
      return some.dp_rank < wanted;
    };
    const auto at = std::lower_bound(ranks.begin(), ranks.end(), dp_rank, before);
    if (at != ranks.end() && at->dp_rank == dp_rank) return *at;
    if (ranks.size() == kMaxRanksPerWorker) refuse("too many ranks of one worker");
    if (++ranks_ > limits_.ranks) refuse("too many workers and ranks");
    StagedRank made;
    made.dp_rank = dp_rank;
    return *ranks.insert(at, std::move(made));
  }

  const DumpLimits limits_;
  const bool sequences_;
  std::deque<StagedEntry> entries_;
  std::vector<PageVector<uint64_t>> pages_;
  uint32_t used_ = 0;  // blocks in the last page
  uint64_t blocks_ = 0;
  uint64_t runs_ = 0;
  uint64_t ranks_ = 0;
  uint64_t waiting_ = 0;
  size_t first_part_ = 0;
  uint64_t last_name_ = 0;
  uint64_t last_sequence_ = 0;
  std::unordered_map<std::string, uint32_t, KeyedHash> worker_numbers_;
  uint32_t last_worker_ = kNone;
};

constexpr uint32_t kStepsARestored = 2;  // for each block

// This many names can be made room for in the time that a block takes.
constexpr uint32_t kNamesABlock = 16;

// Stores a dump's blocks as those of workers; `workers[i]` is the worker of the entry's i-th, null
// if its blocks are not wanted (any more).
class WorkersOf {
 public:
  WorkersOf(Index& index, const std::vector<Worker*>& workers) : index_(index), workers_(workers) {}

  RankId rank(size_t worker, uint32_t dp_rank) {
    return workers_[worker] == nullptr ? kNone : workers_[worker]->rank(index_, dp_rank);
  }

  LayerId layer(uint8_t tier, uint32_t group) {
    return group == kNone ? tier : index_.group_layer(tier, group);
  }

  bool knows(RankId rank, const StagedRun& run) const {
    return index_.rank(rank).names.find(run.parent, index_.keys()) != Names::kAbsent;
  }

  bool store(RankId rank, const Store& blocks, uint64_t) { return index_.store(rank, blocks); }

 private:
  Index& index_;
  const std::vector<Worker*>& workers_;
};

// Applies one entry to an index, slice by slice.
//
// A run whose parent its rank does not know yet waits for it, because events of lower tiers come in
// any order. Runs that have waited in vain are stored last: the index parks them, as it parks any
// such event.
//
// `To` says which ranks the blocks belong to: `WorkersOf`, or the holders of publishers
// (conductor/kept_holdings.hpp).
class Restore {
 public:
  Restore(const Stage& stage, const StagedEntry& entry) : stage_(stage), entry_(entry) {}

  // Stores blocks until the steps are used up; false when everything is done.
  template <class To>
  bool apply(Index& index, To& to, Steps& steps) {
    while (steps.left() && worker_ < entry_.workers.size()) {
      steps.take(kStepsARestored * teach(index, to));
    }
    while (steps.left()) {
      const StagedRun* run = next_run();
      if (run == nullptr) return false;
      steps.take(kStepsARestored);  // unwanted runs take time as well
      const RankId rank = to.rank(run->worker, run->dp_rank);
      if (rank == kNone) continue;
      if (!last_call_ && run->has_parent && !to.knows(rank, *run)) {
        waiting_[{rank, run->parent}].push_back(*run);
        continue;
      }
      store(index, to, rank, *run);
      steps.take(size_t{kStepsARestored} * (run->n + index.rank_end() / kRanksABlock));
    }
    return true;
  }

  uint64_t stored() const { return stored_; }

 private:
  struct Name {
    RankId rank;
    uint64_t name;
    bool operator==(const Name& o) const { return rank == o.rank && name == o.name; }
  };
  struct NameHash : KeyedHash {
    size_t operator()(const Name& n) const noexcept {
      return KeyedHash::operator()(n.name, n.rank);
    }
  };

  // Gives a worker's ranks their traits, and makes room for their names: otherwise the tables of
  // equal ranks would all grow at the same time. Returns the cost, in blocks.
  template <class To>
  size_t teach(Index& index, To& to) {
    const auto& ranks = entry_.workers[worker_].ranks;
    size_t cost = 1 + ranks.size();
    for (const StagedRank& staged : ranks) {
      const RankId rank = to.rank(worker_, staged.dp_rank);
      if (rank == kNone) continue;
      teach(index, rank, staged);
      index.rank(rank).names.reserve(staged.blocks);
      cost += staged.blocks / kNamesABlock;
    }
    ++worker_;
    return cost;
  }

  // Sets only those traits that the rank's own stream has not shown already.
  static void teach(Index& index, RankId rank, const StagedRank& staged) {
    RankTraits& traits = index.rank(rank);
    traits.salted |= staged.salted;
    traits.offloads |= staged.offloads;
    traits.numbers_groups |= staged.numbers_groups;
    if (traits.main_group < 0) traits.main_group = staged.main_group;
    if (traits.groups.empty()) traits.groups = staged.groups;
    if (!traits.windows.empty()) return;
    for (const auto& window : staged.windows) {
      const LayerId layer = index.group_layer(kDeviceLayer, window.group);
      if (layer != kNone) index.set_window(rank, layer, window.blocks);
    }
  }

  const StagedRun* next_run() {
    if (!found_.empty()) {
      run_ = found_.back();
      found_.pop_back();
      return &run_;
    }
    if (next_ < entry_.runs.size()) return &entry_.runs[next_++];
    if (waiting_.empty()) return nullptr;
    last_call_ = true;
    found_ = std::move(waiting_.begin()->second);
    waiting_.erase(waiting_.begin());
    return next_run();
  }

  template <class To>
  void store(Index& index, To& to, RankId rank, const StagedRun& run) {
    const size_t words = stage_.words();
    const uint64_t* block = stage_.page(run.first);
    names_.resize(run.n);
    locals_.resize(run.n);
    sequences_.resize(run.n);
    for (uint32_t i = 0; i < run.n; ++i, block += words) {
      names_[i] = block[0];
      locals_[i] = block[1];
      if (words == 3) sequences_[i] = block[2];
    }
    index.rank(rank).settling = index.rank(rank).restored = true;
    const LayerId layer = to.layer(run.tier, run.group);
    if (layer == kNone) return;  // too many groups: left out, as their events would be
    Store blocks{names_.data(), locals_.data(), run.n, run.has_parent, run.parent, layer, run.term};
    if (words == 3) blocks.sequences = sequences_.data();
    if (to.store(rank, blocks, run.above)) stored_ += run.n;
    if (waiting_.empty()) return;
    for (const uint64_t name : names_) {
      const auto it = waiting_.find({rank, name});
      if (it == waiting_.end()) continue;
      found_.insert(found_.end(), it->second.begin(), it->second.end());
      waiting_.erase(it);
    }
  }

  const Stage& stage_;
  const StagedEntry& entry_;
  size_t worker_ = 0;  // the next one whose ranks get their traits
  size_t next_ = 0;
  bool last_call_ = false;
  uint64_t stored_ = 0;
  StagedRun run_{};
  std::vector<StagedRun> found_;  // runs whose parent has been stored
  std::unordered_map<Name, std::vector<StagedRun>, NameHash> waiting_;
  std::vector<uint64_t> names_, locals_, sequences_;
};

}  // namespace kvd
