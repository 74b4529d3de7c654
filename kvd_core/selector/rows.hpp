// Renders what a look has found as JSON, straight into the answer's bytes.
//
//   "overlap":{"longest_matched":128,"gpu":64,"dp":{"0":64,"1":32},"cpu":96,"disk":128},
//   "effective_prefill_tokens":384,"potential_decode_blocks":40       members of a selection
//   {"worker_id":1,"dp_rank":0,"device_blocks":4,...}                 rows of overlaps
//   {"worker_id":1,"dp_rank":0,"potential_prefill_tokens":80,...}     rows of projected loads
//
// An overlap is that of the chosen candidate's worker, in tokens: `dp` has the device depth of all
// its ranks, the others are the best of its ranks, cumulative over the tiers. Of a selection the
// decode blocks include a last block that is not full. Rows count blocks and stand for ranks, sorted
// by (worker, dp rank).
//
// Costs: some 20 ns a row, less for a rank of the worker. The caller gives `..._room()` bytes, which
// cannot be exceeded.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "json/text.hpp"
#include "selector/selector.hpp"

namespace kvd::selector {

class Rows {
 public:
  explicit Rows(const Pool& pool) : pool_(pool) {}

  size_t choice_room(size_t at) const {
    const Candidate& candidate = pool_.candidate(at);
    return kChoice + (pool_.end_of_worker(candidate) - candidate.first) * kMaxRank;
  }
  size_t rows_room() const { return pool_.size() * kMaxRow + 2; }

  // Returns the end of what it has written.
  char* choice(char* to, size_t at, const Settings& settings) const {
    uint32_t gpu = 0, cpu = 0, disk = 0;
    const Candidate& candidate = pool_.candidate(at);
    for (uint32_t i = candidate.first; i < pool_.end_of_worker(candidate); ++i) {
      const CandidateState& rank = pool_.standing(i);
      gpu = std::max(gpu, rank.device);
      cpu = std::max(cpu, rank.device + rank.host);
      disk = std::max(disk, rank.device + rank.host + rank.disk);
    }
    to = tokens(put(to, "\"overlap\":{\"longest_matched\":"), disk);
    to = tokens(put(to, ",\"gpu\":"), gpu);
    to = ranks(put(to, ",\"dp\":{"), candidate);
    to = tokens(put(to, "},\"cpu\":"), cpu);
    to = tokens(put(to, ",\"disk\":"), disk);
    const Scale scale = pool_.scale(settings);
    to = put(to, "},\"effective_prefill_tokens\":");
    to = put(to, scale.effective_tokens(pool_.standing(at)));
    to = put(to, ",\"potential_decode_blocks\":");
    to = put(to, scale.occupied_blocks(pool_.standing(at)));
    if (!scale.tells_decode_busy(candidate)) return to;
    to = put(to, ",\"decode_busy\":");
    return put(to, scale.is_decode_busy(candidate, pool_.standing(at)) ? "true" : "false");
  }

  char* overlaps(char* to) const {
    return rows(to, [](char* end, const CandidateState& at) {
      end = put(put(end, ",\"device_blocks\":"), uint64_t{at.device});
      end = put(put(end, ",\"host_pinned_blocks\":"), uint64_t{at.device} + at.host);
      end = put(put(end, ",\"disk_blocks\":"), uint64_t{at.device} + at.host + at.disk);
      end = put(put(end, ",\"host_pinned_extension_blocks\":"), uint64_t{at.host});
      end = put(put(end, ",\"disk_extension_blocks\":"), uint64_t{at.disk});
      return put(end, ",\"shared_beyond_device_blocks\":null");
    });
  }

  char* loads(char* to, const Settings& settings) const {
    const Scale scale = pool_.scale(settings);
    return rows(to, [&](char* end, const CandidateState& at) {
      const uint64_t added = settings.track_prefill ? scale.effective_tokens(at) : 0;
      end = put(put(end, ",\"potential_prefill_tokens\":"), at.prefill_tokens + added);
      end = put(put(end, ",\"potential_decode_blocks\":"), scale.decode_blocks(at));
      return put(put(end, ",\"active_requests\":"), uint64_t{at.requests});
    });
  }

 private:
  // The names and braces of a choice are 135 bytes, and it has six numbers beside its ranks.
  static constexpr size_t kChoice = 160 + 6 * kMaxDigits;
  static constexpr size_t kMaxRank = 4 + 2 * kMaxDigits;
  // The names of the longer kind of row are 172 bytes, and it has seven numbers.
  static constexpr size_t kMaxRow = 192 + 7 * kMaxDigits;

  char* tokens(char* to, uint64_t blocks) const { return put(to, blocks * pool_.block_size()); }

  char* ranks(char* to, const Candidate& candidate) const {
    for (uint32_t i = candidate.first; i < pool_.end_of_worker(candidate); ++i) {
      if (i != candidate.first) *to++ = ',';
      *to++ = '"';
      to = put(put(to, uint64_t{pool_.candidate(i).dp_rank}), "\":");
      to = tokens(to, pool_.standing(i).device);
    }
    return to;
  }

  template <class Members>
  char* rows(char* to, Members&& members) const {
    *to++ = '[';
    for (size_t i = 0; i < pool_.size(); ++i) {
      if (i != 0) *to++ = ',';
      to = put(put(to, "{\"worker_id\":"), pool_.candidate(i).worker_id);
      to = put(put(to, ",\"dp_rank\":"), uint64_t{pool_.candidate(i).dp_rank});
      to = members(to, pool_.standing(i));
      *to++ = '}';
    }
    *to++ = ']';
    return to;
  }

  const Pool& pool_;
};

}  // namespace kvd::selector
