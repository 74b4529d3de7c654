// Renders a match rank by rank and tier by tier, for selectors that ask a remote indexer.
//
//   {"block_size":4,
//    "tiered":{"device":{"scores":[[{"worker_id":7,"dp_rank":0},2]],"frequencies":[]},
//              "lower_tier":[["host_pinned",{"hits":[[{"worker_id":7,"dp_rank":0},1]]}]]}}
//
// All figures are blocks. A tier's hits are what it adds behind the depth that the rank has reached
// on the tiers before it, so they add up to the depths of `Match`. Rows of 0 and tiers without hits
// are left out.
//
// Costs: O(ranks), and O(r log r) for the r ranks that match.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "dump/format.hpp"
#include "index/match.hpp"
#include "index/worker.hpp"
#include "json/text.hpp"

namespace kvd {

class TieredAnswer {
 public:
  TieredAnswer(const Index& index, const Match& match) : index_(index), match_(match) {}

  // Returns the text, which is in `memory`; makes `memory` larger if it has to.
  std::string_view render(const std::vector<const Worker*>& workers, std::string& memory) {
    for (const Worker* worker : workers) collect(*worker);
    std::sort(rows_.begin(), rows_.end(), [](const Row& a, const Row& b) { return a.before(b); });
    if (const size_t room = room_for_rows(); memory.size() < room) memory.resize(room);
    char* const begin = memory.data();
    char* to = put(put(begin, "{\"block_size\":"), uint64_t{index_.block_size()});
    to = put_hits(put(to, ",\"tiered\":{\"device\":{\"scores\":"), 0);
    to = put(to, ",\"frequencies\":[]},\"lower_tier\":[");
    bool first = true;
    for (size_t tier = 1; tier < kTierLayers; ++tier) {
      if (std::none_of(rows_.begin(), rows_.end(),
                       [&](const Row& row) { return row.blocks[tier] != 0; })) {
        continue;
      }
      to = put(put(to, first ? "[\"" : ",[\""), kTierNames[tier]);
      to = put(put_hits(put(to, "\",{\"hits\":"), tier), "}]");
      first = false;
    }
    to = put(to, "]}}");
    const size_t size = static_cast<size_t>(to - begin);
    assert(size <= memory.size());
    return {begin, size};
  }

 private:
  struct Row {
    std::string_view worker;  // the digits of its id
    uint32_t dp_rank;
    uint32_t blocks[kTierLayers];  // added by each tier

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

  // Bytes that no answer exceeds.
  size_t room_for_rows() const {
    constexpr size_t kAround = 128 + kTierLayers * 48;  // the text around the rows
    constexpr size_t kRow = 32 + 2 * kMaxDigits;        // names, brackets, numbers
    size_t room = kAround;
    for (const Row& row : rows_) room += kTierLayers * (kRow + row.worker.size());
    return room;
  }

  char* put_hits(char* to, size_t tier) const {
    *to++ = '[';
    bool first = true;
    for (const Row& row : rows_) {
      if (row.blocks[tier] == 0) continue;
      to = put(put(to, first ? "[{\"worker_id\":" : ",[{\"worker_id\":"), row.worker);
      to = put(put(to, ",\"dp_rank\":"), uint64_t{row.dp_rank});
      to = put(put(put(to, "},"), uint64_t{row.blocks[tier]}), "]");
      first = false;
    }
    return put(to, "]");
  }

  const Index& index_;
  const Match& match_;
  std::vector<Row> rows_;
};

}  // namespace kvd
