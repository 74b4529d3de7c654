// Writes what an index holds as the event list of /dump, piece by piece.
//
//   {"worker_id":1,"storage_tier":"device","residency_domain":"worker","event":{"event_id":0,
//    "data":{"stored":{"parent_hash":null,"start_position":null,"blocks":[
//      {"block_hash":101,"tokens_hash":14643705804678351452,"mm_extra_info":null}, ..]}},
//    "dp_rank":0}}
//
// The dump follows the tree in preorder (parents before children) and may be left and resumed
// between any two (chain, rank) pairs while the index goes on changing: it is weakly consistent.
// A block that is there all the time is written at least once; blocks that come or go meanwhile
// may or may not be, which the live events settle for the reader.
//
// Device blocks come as one event per rank and unbroken run of a chain; lower tiers as one event
// per block, which is what readers of the format expect. Names are the rank's own.
//
// Costs: O(bytes written); memory O(1) beside the caller's buffer, plus a reverse table of the
// names of ranks whose engine hashes differ from the first holder's.
#pragma once

#include <charconv>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "index.hpp"
#include "worker.hpp"

namespace kvd {

class Dump {
 public:
  // Watches the index until it is destroyed; the index must outlive it.
  explicit Dump(Index& index) : index_(index) {
    watcher_.next = index.tree().node(Tree::kRoot).first_child;
    index_.tree().watch(&watcher_);
  }
  Dump(const Dump&) = delete;
  Dump& operator=(const Dump&) = delete;
  ~Dump() { index_.tree().unwatch(&watcher_); }

  // Appends events, separated by commas, until `out` holds `enough` bytes or all is written.
  // `owners[rank]` is the worker of a rank, null where the rank is not to be dumped.
  // Returns false when all is written.
  bool fill(const std::vector<const Worker*>& owners, std::string& out, size_t enough) {
    while (watcher_.next != kNone) {
      if (out.size() >= enough) return true;
      if (watcher_.moves != moves_) {  // the chain in progress has changed: begin it anew
        moves_ = watcher_.moves;
        rank_ = 0;
      }
      const NodeId node = watcher_.next;
      const RankId rank = next_holder(node, rank_);
      if (rank == kNone) {
        watcher_.next = index_.tree().successor(node);
        rank_ = 0;
        continue;
      }
      if (rank < owners.size() && owners[rank] != nullptr) chain(node, rank, *owners[rank], out);
      rank_ = rank + 1;
    }
    return false;
  }

 private:
  static constexpr const char* kTierNames[] = {"device", "host_pinned", "disk", "external"};

  // The smallest rank >= `from` that holds some block of the chain on some tier.
  RankId next_holder(NodeId node, RankId from) const {
    RankId best = kNone;
    for (const Run& run : index_.tree().node(node).runs) {
      if (run.layer >= kTierLayers) continue;
      const auto& members = index_.tree().sets().members(run.set);
      const auto it = std::lower_bound(members.begin(), members.end(), from);
      if (it != members.end()) best = std::min(best, *it);
    }
    return best;
  }

  void chain(NodeId id, RankId rank, const Worker& worker, std::string& out) {
    const Node& node = index_.tree().node(id);
    uint32_t start = 0;
    for (size_t i = 0; i < node.runs.size(); ++i) {
      const Run& run = node.runs[i];
      if (i == 0 || node.runs[i - 1].layer != run.layer) start = 0;
      const bool holds = run.layer < kTierLayers && index_.tree().sets().contains(run.set, rank);
      const bool goes_on = i + 1 < node.runs.size() && node.runs[i + 1].layer == run.layer &&
                           index_.tree().sets().contains(node.runs[i + 1].set, rank);
      if (!holds) {
        start = run.end;
      } else if (!goes_on) {
        stretch(node, rank, worker, run.layer, start, run.end, out);
        start = run.end;
      }
    }
  }

  void stretch(const Node& node, RankId rank, const Worker& worker, LayerId tier, uint32_t from,
               uint32_t to, std::string& out) {
    if (tier == kDeviceLayer) {
      event(node, rank, worker, tier, from, to, out);
    } else {
      for (uint32_t i = from; i < to; ++i) event(node, rank, worker, tier, i, i + 1, out);
    }
  }

  void event(const Node& node, RankId rank, const Worker& worker, LayerId tier, uint32_t from,
             uint32_t to, std::string& out) {
    out.append(begun_ ? "," : "");
    begun_ = true;
    out.append("{\"worker_id\":").append(worker.number);
    out.append(",\"storage_tier\":\"").append(kTierNames[tier]);
    out.append("\",\"residency_domain\":\"worker\",\"event\":{\"event_id\":");
    number(event_id_[tier]++, out);
    out.append(",\"data\":{\"stored\":{\"parent_hash\":");
    const BlockId parent = index_.tree().parent_of(node.chain.block()[from]);
    if (parent == kNone) {
      out.append("null");
    } else {
      number(name_of(rank, parent), out);
    }
    out.append(",\"start_position\":null,\"blocks\":[");
    for (uint32_t i = from; i < to; ++i) {
      out.append(i == from ? "{\"block_hash\":" : ",{\"block_hash\":");
      number(name_of(rank, node.chain.block()[i]), out);
      out.append(",\"tokens_hash\":");
      number(node.chain.local()[i], out);
      out.append(",\"mm_extra_info\":null}");
    }
    out.append("]}},\"dp_rank\":");
    number(index_.rank(rank).dp_rank, out);
    out.append("}}");
  }

  static void number(uint64_t value, std::string& out) {
    char digits[20];
    out.append(digits, std::to_chars(digits, digits + sizeof digits, value).ptr);
  }

  // What the rank calls the block; the block's own name when the rank does not hold it (the
  // parent of a run behind a hole).
  uint64_t name_of(RankId rank, BlockId block) {
    const uint64_t own = index_.tree().block(block).name;
    if (means(rank, own, block)) return own;
    auto& names = other_names_[rank];
    auto it = names.find(block);
    if (it == names.end() || !means(rank, it->second, block)) {
      if (!holds(rank, block)) return own;
      collect(rank, names);
      it = names.find(block);
    }
    return it == names.end() ? own : it->second;
  }

  bool means(RankId rank, uint64_t name, BlockId block) const {
    const Names& names = index_.rank(rank).names;
    const uint32_t slot = names.find(name, index_.keys());
    return slot != Names::kAbsent && index_.keys().block(names.value(slot)) == block;
  }

  bool holds(RankId rank, BlockId block) const {
    for (LayerId layer = 0; layer < kTierLayers; ++layer) {
      if (index_.tree().held(block, layer, rank)) return true;
    }
    return false;
  }

  void collect(RankId rank, std::unordered_map<BlockId, uint64_t>& names) const {
    names.clear();
    const Names& all = index_.rank(rank).names;
    for (uint32_t slot = 0; slot < all.capacity(); ++slot) {
      const uint32_t value = all.value(slot);
      if (value == Names::kAbsent) continue;
      const BlockId block = index_.keys().block(value);
      const uint64_t name = index_.keys().name(value);
      if (name != index_.tree().block(block).name) names[block] = name;
    }
  }

  Index& index_;
  Watcher watcher_;
  uint64_t moves_ = 0;
  RankId rank_ = 0;
  bool begun_ = false;
  uint64_t event_id_[kTierLayers] = {};
  std::unordered_map<RankId, std::unordered_map<BlockId, uint64_t>> other_names_;
};

}  // namespace kvd
