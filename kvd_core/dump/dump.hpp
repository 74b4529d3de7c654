// Walks an index and writes what its ranks hold, run by run, in pieces.
//
//   tree      ── [a b c .. 1024] ── [1025 ..] ──┬── [x y]      rank 7 holds a .. 1100 and x
//                      chain          chain     └── [z]
//   events    7: a .. 1100       7: x            a run ends where the rank stops or the path forks
//
// The dump follows the tree in preorder (parents before children). It may be left and resumed
// anywhere, even inside an event, while the index keeps changing: it is weakly consistent. A block
// that a rank holds all the time is written at least once; blocks that come or go meanwhile may be
// missing, and the live events settle those for the reader.
//
// Device blocks come as one event for each rank and unbroken run between two forks, which is how
// Dynamo's indexer merges them; in the text form, lower tiers come as one event a block, as they do
// there. Names are the rank's own. Cache groups beside the main one, salts, and the traits of ranks
// are in the binary form only.
//
// Chains are bounded, runs are not. A run that continues in the next chain is written to its end at
// once; `taken_` notes how far it went, so that the visit to that chain begins behind it.
//
// Invariants
//   1. while `open_`, `last_` is the block written last; if there is none yet, the run begins at
//      `at_`;
//   2. everything of chain `watcher_.next` before (rank_, layer_, offset_) has been written, unless
//      the chain has changed since (`moves_`): then its visit starts anew.
//
// Costs: O(bytes written); memory O(1) beside the caller's buffer, plus 16 bytes for each rank and
// chain that a run has continued in, plus a reverse table, 10 to 20 bytes a name, for ranks whose
// engine hashes differ from the first holder's.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/arena.hpp"
#include "base/pages.hpp"
#include "base/steps.hpp"
#include "dump/format.hpp"
#include "index/index.hpp"

namespace kvd {

// A rank's names for blocks whose own name is a different one: block -> value of its names table.
//
// Open addressing with linear probing. Its memory is mapped, and untouched until something is
// noted, so making and dropping it are quick however many names there are.
class OtherNames {
 public:
  OtherNames() = default;
  OtherNames(const OtherNames&) = delete;
  OtherNames& operator=(const OtherNames&) = delete;
  ~OtherNames() { drop(); }

  // Starts anew, with room for `most` names.
  void reset(uint32_t most) {
    drop();
    if (most == 0) return;
    size_t capacity = 8;
    while (capacity < size_t{most} * 2) capacity *= 2;
    slots_ = static_cast<uint32_t*>(map_pages(capacity * sizeof(uint32_t)));
    capacity_ = capacity;
  }

  // The value must not be 0.
  void note(BlockId block, uint32_t value) {
    size_t i = home(block);
    while (slots_[i] != 0) i = next(i);
    slots_[i] = value;
  }

  // The value noted for a block that satisfies `same`, or 0.
  template <class Same>
  uint32_t find(BlockId block, Same&& same) const {
    if (capacity_ == 0) return 0;
    size_t i = home(block);
    while (slots_[i] != 0 && !same(slots_[i])) i = next(i);
    return slots_[i];
  }

 private:
  size_t home(BlockId block) const { return mix64(block) & (capacity_ - 1); }
  size_t next(size_t i) const { return (i + 1) & (capacity_ - 1); }

  void drop() {
    if (capacity_ != 0) unmap_pages(slots_, capacity_ * sizeof(uint32_t));
    capacity_ = 0;
  }

  uint32_t* slots_ = nullptr;
  size_t capacity_ = 0;
};

class Dump {
 public:
  // Watches the index until the dump is destroyed; the index must outlive it.
  Dump(Index& index, bool binary) : Dump(index, make_format(index, binary), binary) {}

  // A dump in the binary form with sequence hashes; `sequences` must outlive it, too.
  Dump(Index& index, const Sequences& sequences)
      : Dump(index, std::make_unique<BinaryFormat>(index, &sequences), true) {}

  Dump(const Dump&) = delete;
  Dump& operator=(const Dump&) = delete;
  ~Dump() { tree().unwatch(&watcher_); }

  uint64_t blocks_written() const { return blocks_written_; }

  // Appends events until `out` holds `enough` bytes, a slice of the work is done, or everything is
  // written: then it returns false. `owners[rank]` is the id of the rank's worker as JSON, null if
  // the rank is not to be dumped.
  bool fill(const std::vector<const std::string*>& owners, std::string& out, size_t enough) {
    if (open_ && !still_ours(owners)) close(out);
    if (open_) resume(out);
    Steps steps(kStepsASlice);
    while (out.size() < enough && steps.left()) {
      if (unnamed_ != kNone) {
        collect(steps);
      } else if (open_) {
        const uint64_t before = blocks_written_;
        write_run(out, std::min(enough, out.size() + kPieceBytes));
        steps.take((blocks_written_ - before) * kStepsABlock);
      } else if (watcher_.next != kNone) {
        steps.take(kStepsAVisit);
        step(owners, out);
      } else if (!other_names_.empty()) {
        steps.take(kStepsATable);
        other_names_.erase(other_names_.begin());
      } else {
        return false;
      }
      steps.take(lookups_ * kStepsALookup);
      lookups_ = 0;
    }
    format_->pause(out);
    return true;
  }

 private:
  static constexpr uint32_t kBatch = 32;  // blocks named before they are written: 3 KiB of text
  // Work of a call, about 0.3 ms: blocks written, chains and ranks passed that have nothing to
  // dump, and names searched.
  static constexpr int64_t kStepsASlice = 4096;
  static constexpr size_t kStepsABlock = 2;
  static constexpr size_t kPieceBytes = 16 * 1024;  // of a run, between two checks of the steps
  static constexpr size_t kStepsAVisit = 8, kStepsAName = 3, kStepsALookup = 6, kStepsATable = 2048;

  Dump(Index& index, std::unique_ptr<DumpFormat> format, bool binary)
      : index_(index), binary_(binary), format_(std::move(format)) {
    tree().watch(&watcher_);
  }

  static std::unique_ptr<DumpFormat> make_format(const Index& index, bool binary) {
    if (binary) return std::make_unique<BinaryFormat>(index);
    return std::make_unique<TextFormat>();
  }

  Tree& tree() { return index_.tree(); }
  const Tree& tree() const { return index_.tree(); }

  // ---- which run comes next

  void step(const std::vector<const std::string*>& owners, std::string& out) {
    if (watcher_.moves != moves_) {  // the chain in progress has changed: start its visit anew
      moves_ = watcher_.moves;
      rank_ = layer_ = offset_ = 0;
    }
    const NodeId node = watcher_.next;
    const RankId rank = next_holder(node, rank_);
    if (rank == kNone) {
      watcher_.next = tree().successor(node);
      rank_ = layer_ = offset_ = 0;
      return;
    }
    if (rank != rank_) {
      rank_ = rank;
      layer_ = offset_ = 0;
    }
    if (rank < owners.size() && owners[rank] != nullptr && begin_run(node, *owners[rank], out)) {
      if (open_) write_run(out, out.size() + 1);  // no event is left empty
    } else {
      ++rank_;
      layer_ = offset_ = 0;
    }
  }

  bool is_dumped(LayerId layer) const {
    return layer < kTierLayers || (binary_ && layer != kGhostLayer);
  }

  // The smallest rank >= `from` that holds some block of the chain on some dumped layer.
  RankId next_holder(NodeId node, RankId from) const {
    RankId best = kNone;
    for (const Run& run : tree().node(node).runs) {
      if (!is_dumped(run.layer)) continue;
      const auto& members = tree().sets().members(run.set);
      const auto it = std::lower_bound(members.begin(), members.end(), from);
      if (it != members.end()) best = std::min(best, *it);
    }
    return best;
  }

  // Opens the rank's first run in the chain at or behind (layer_, offset_), or first has its names
  // collected; false if there is no such run.
  bool begin_run(NodeId id, const std::string& owner, std::string& out) {
    const Node& node = tree().node(id);
    for (size_t i = 0; i < node.runs.size(); ++i) {
      const Run& run = node.runs[i];
      const uint32_t past = run.layer == layer_ ? offset_ : run.layer < layer_ ? run.end : 0;
      uint32_t from = std::max(start_of(node.runs, i), past);
      if (!is_dumped(run.layer) || from >= run.end) continue;
      if (!tree().sets().contains(run.set, rank_)) continue;
      if (run.layer == kDeviceLayer && from == 0) from = behind_taken(node);
      layer_ = run.layer;
      offset_ = from;
      if (from >= run.end) continue;
      if (can_name(node.chain.block()[from])) open(owner, {id, from}, out);
      return true;
    }
    return false;
  }

  // How many blocks at the chain's start were written as the end of a run that began above.
  uint32_t behind_taken(const Node& node) const {
    const auto it = taken_.find(key(node.chain.block()[0]));
    if (it == taken_.end() || !is_in_tree(it->second)) return 0;
    const Block& last = tree().block(it->second);
    return &tree().node(last.node) == &node ? last.offset + 1 : 0;
  }

  uint64_t key(BlockId first) const { return uint64_t{first} << 32 | rank_; }

  // True while the block lives. Ids of freed blocks may be passed too, until they are reused.
  bool is_in_tree(BlockId id) const {
    if (id >= tree().block_end()) return false;
    const Block& b = tree().block(id);
    if (!tree().alive(b.node)) return false;
    const Chain& chain = tree().node(b.node).chain;
    return b.offset < chain.len() && chain.block()[b.offset] == id;
  }

  // ---- one run

  void open(const std::string& owner, Position at, std::string& out) {
    at_ = at;
    last_ = first_beyond_ = kNone;
    open_ = true;
    owner_ = owner;
    dp_rank_ = index_.rank(rank_).dp_rank;
    const BlockId parent = tree().parent_of(tree().node(at.node).chain.block()[at.offset]);
    uint64_t name = 0;
    if (parent != kNone) find_name_above(parent, name);
    if (begun_.insert(rank_).second) format_->rank(owner, index_.rank(rank_), out);
    const RunHead head{
        &owner, dp_rank_, index_.tier_of(layer_), index_.group_of(layer_), parent != kNone,
        name,   parent};
    format_->open(head, out);
  }

  bool still_ours(const std::vector<const std::string*>& owners) const {
    return rank_ < owners.size() && owners[rank_] != nullptr && *owners[rank_] == owner_ &&
           index_.rank(rank_).dp_rank == dp_rank_;
  }

  // The tree may have changed since the last piece: finds the run's position in it again.
  void resume(std::string& out) {
    if (last_ != kNone && is_in_tree(last_)) {
      at_ = tree().after(last_);
    } else {
      close(out);
    }
  }

  void write_run(std::string& out, size_t enough) {
    while (out.size() < enough && unnamed_ == kNone) {
      const Node& node = tree().node(at_.node);
      if (at_.offset == node.chain.len()) {
        if (!enter_only_child(node)) return close(out);
        continue;
      }
      uint32_t to = held_until(node);
      if (to == at_.offset) return close(out);
      const bool alone = layer_ != kDeviceLayer && !binary_;
      to = std::min(to, at_.offset + (alone ? 1 : kBatch));
      write_blocks(node, to, out);
      if (alone && unnamed_ == kNone) return close(out);
    }
  }

  bool enter_only_child(const Node& node) {
    if (layer_ != kDeviceLayer || node.children != 1) return false;
    at_ = {node.first_child, 0};
    const Node& below = tree().node(at_.node);
    if (held_until(below) == 0) return false;
    first_beyond_ = below.chain.block()[0];
    return true;
  }

  // Offset behind the last block that the rank holds without a break from `at_` on.
  uint32_t held_until(const Node& node) const {
    uint32_t until = at_.offset;
    for (const Run& run : node.runs) {
      if (run.layer != layer_ || run.end <= at_.offset) continue;
      if (!tree().sets().contains(run.set, rank_)) break;
      until = run.end;
    }
    return until;
  }

  void write_blocks(const Node& node, uint32_t to, std::string& out) {
    uint64_t names[kBatch];
    const BlockId* ids = node.chain.block() + at_.offset;
    uint32_t n = 0;
    for (; n < to - at_.offset && find_name(ids[n], layer_, names[n]); ++n) {}
    if (n != to - at_.offset) unnamed_ = ids[n];
    if (n == 0) return;
    format_->blocks(ids, names, node.chain.local() + at_.offset, n, out);
    blocks_written_ += n;
    last_ = ids[n - 1];
    at_.offset += n;
    if (first_beyond_ != kNone) taken_[key(first_beyond_)] = last_;
  }

  void close(std::string& out) {
    format_->close(out);
    open_ = false;
    // Where the run has left its chain, nothing of the layer remains to be written in that chain.
    offset_ = at_.node == watcher_.next ? at_.offset : kNone;
  }

  // ---- names

  // Finds what the rank calls a block that it holds on the layer; false if its names have to be
  // collected first.
  bool find_name(BlockId block, LayerId layer, uint64_t& name) {
    name = tree().block(block).name;
    if (means(name, block, layer)) return true;
    ++lookups_;
    // The noted value may mean another block by now, or be gone: then it does not count.
    const NameKeys& keys = index_.keys();
    const uint32_t value = other_names_[rank_].find(block, [&](uint32_t each) {
      return keys.is_there(each) && keys.block(each) == block &&
             (keys.layers(each) >> layer & 1) != 0;
    });
    if (value == 0) return false;
    name = keys.name(value);
    return means(name, block, layer);
  }

  // Whether a run that begins with a block can be opened now; if not, sets `unnamed_` to collect.
  bool can_name(BlockId first) {
    uint64_t name;
    const BlockId above = tree().parent_of(first);
    if (!find_name(first, layer_, name)) {
      unnamed_ = first;
    } else if (above != kNone && !find_name_above(above, name)) {
      unnamed_ = above;
    }
    return unnamed_ == kNone;
  }

  // What the rank calls the block before a run. If the rank does not hold that block (the run lies
  // behind a hole), this is the block's own name, or another that means nothing to the rank.
  bool find_name_above(BlockId block, uint64_t& name) {
    if (tree().held(block, layer_, rank_)) return find_name(block, layer_, name);
    for (LayerId layer = 0; layer < kMaxLayers; ++layer) {
      if (is_dumped(layer) && tree().held(block, layer, rank_))
        return find_name(block, layer, name);
    }
    name = unused(tree().block(block).name);
    return true;
  }

  uint64_t unused(uint64_t name) const {
    while (index_.rank(rank_).names.find(name, index_.keys()) != Names::kAbsent)
      name = mix64(name + 1);
    return name;
  }

  bool means(uint64_t name, BlockId block, LayerId layer) const {
    const Names& names = index_.rank(rank_).names;
    const uint32_t slot = names.find(name, index_.keys());
    if (slot == Names::kAbsent) return false;
    const uint32_t value = names.value(slot);
    return index_.keys().block(value) == block && (index_.keys().layers(value) >> layer & 1) != 0;
  }

  // Continues the search of the rank's names for those that are not the blocks' own. If the table
  // has grown meanwhile, the search starts anew. If the table was searched in parts and still lacks
  // the name, it has changed meanwhile: then it is searched at once.
  void collect(Steps& steps) {
    const Names& all = index_.rank(rank_).names;
    auto& names = other_names_[rank_];
    if (all.capacity() != slots_) {
      names.reset(all.capacity());
      slots_ = all.capacity();
      slot_ = 0;
    }
    const bool again = collected_ == key(unnamed_);
    while (slot_ < slots_ && (steps.left() || again)) {
      note_name(all.value(slot_++), names);
      steps.take(kStepsAName);
    }
    if (slot_ < slots_) return;
    collected_ = key(unnamed_);
    unnamed_ = kNone;
    slots_ = 0;
  }

  void note_name(uint32_t value, OtherNames& names) const {
    if (value == Names::kAbsent) return;
    const BlockId block = index_.keys().block(value);
    if (index_.keys().name(value) != tree().block(block).name) names.note(block, value);
  }

  Index& index_;
  const bool binary_;
  std::unique_ptr<DumpFormat> format_;
  uint64_t blocks_written_ = 0;

  Watcher watcher_;
  uint64_t moves_ = 0;
  RankId rank_ = 0;
  LayerId layer_ = 0;
  uint32_t offset_ = 0;

  bool open_ = false;
  Position at_{0, 0};
  BlockId last_ = kNone;
  BlockId first_beyond_ = kNone;  // first block of the lower chain that the run is in, kNone: none
  std::string owner_;             // worker and rank of the open run
  uint32_t dp_rank_ = 0;

  std::unordered_set<RankId> begun_;             // ranks whose first run has begun
  std::unordered_map<uint64_t, BlockId> taken_;  // (first block of a chain, rank) -> last written
  BlockId unnamed_ = kNone;                      // a block of the rank whose name has to be found
  uint64_t collected_ = 0;                       // `key` of the last such block
  uint32_t slots_ = 0;  // size of the rank's names table, while it is searched
  uint32_t slot_ = 0;   // the next slot of it
  size_t lookups_ = 0;  // look-ups in `other_names_` whose steps have not been taken yet
  std::unordered_map<RankId, OtherNames> other_names_;
};

}  // namespace kvd
