// Renders a match rank by rank and tier by tier, for selectors that ask a remote indexer.
//
//   {"block_size":4,
//    "tiered":{"device":{"scores":[[{"worker_id":7,"dp_rank":0},2]],"frequencies":[]},
//              "lower_tier":[["host_pinned",{"hits":[[{"worker_id":7,"dp_rank":0},1]]}]]}}
//
// All figures are blocks. A tier's hits are what it adds behind the point that the rank has reached
// on the tiers before it: they add up to the depths of `Match`. Rows of 0 and tiers without hits
// are left out.
//
// Costs: O(ranks), and O(r log r) for the r ranks that match.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "dump/format.hpp"
#include "index/match.hpp"
#include "index/worker.hpp"

namespace kvd {

class TieredAnswer {
 public:
  TieredAnswer(const Index& index, const Match& match, std::string& out)
      : index_(index), match_(match), out_(out) {}

  void render(const std::vector<const Worker*>& workers) {
    for (const Worker* worker : workers) collect(*worker);
    std::sort(rows_.begin(), rows_.end(), [](const Row& a, const Row& b) { return a.before(b); });
    out_.assign("{\"block_size\":");
    number(index_.block_size());
    out_.append(",\"tiered\":{\"device\":{\"scores\":");
    hits(0);
    out_.append(",\"frequencies\":[]},\"lower_tier\":[");
    bool first = true;
    for (size_t tier = 1; tier < kTierLayers; ++tier) {
      if (std::none_of(rows_.begin(), rows_.end(),
                       [&](const Row& row) { return row.blocks[tier] != 0; })) {
        continue;
      }
      out_.append(first ? "[\"" : ",[\"").append(kTierNames[tier]).append("\",{\"hits\":");
      hits(tier);
      out_.append("}]");
      first = false;
    }
    out_.append("]}}");
  }

 private:
  struct Row {
    std::string_view worker;  // its id's digits
    uint32_t dp_rank;
    uint32_t blocks[kTierLayers];  // that each tier adds

    bool before(const Row& other) const {
      if (worker.size() != other.worker.size()) return worker.size() < other.worker.size();
      if (worker != other.worker) return worker < other.worker;
      return dp_rank < other.dp_rank;
    }
  };

  void collect(const Worker& worker) {
    for (const auto& [dp_rank, id] : worker.ranks) {
      const Match::Depth depth = match_.depth(id);
      if (depth.disk == 0) continue;
      const uint32_t disk = match_.before_external(id);
      rows_.push_back(
          {worker.number,
           dp_rank,
           {depth.device, depth.host - depth.device, disk - depth.host, depth.disk - disk}});
    }
  }

  void hits(size_t tier) {
    out_.push_back('[');
    bool first = true;
    for (const Row& row : rows_) {
      if (row.blocks[tier] == 0) continue;
      out_.append(first ? "[{\"worker_id\":" : ",[{\"worker_id\":").append(row.worker);
      out_.append(",\"dp_rank\":");
      number(row.dp_rank);
      out_.append("},");
      number(row.blocks[tier]);
      out_.push_back(']');
      first = false;
    }
    out_.push_back(']');
  }

  void number(uint64_t value) {
    char digits[20];
    out_.append(digits, std::to_chars(digits, digits + sizeof digits, value).ptr);
  }

  const Index& index_;
  const Match& match_;
  std::string& out_;
  std::vector<Row> rows_;
};

}  // namespace kvd
