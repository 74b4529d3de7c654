// Renders a match as the JSON that indexer clients read.
//
//   {"scores":{"1":{"0":32}},"frequencies":[1,1],
//    "instances":{"1":{"longest_matched":48,"gpu":32,"dp":{"0":32},"cpu":48,"disk":48}}}
//
// All figures are tokens. A registered rank that holds something a query can credit is listed even
// where nothing matches, with zeros. Any other rank is listed only when it matches: one known from
// its batches alone, or one with no such block (remembered names and blocks of window groups are
// none). Instance figures are the best of the instance's ranks, tier by tier.
//
// Costs: some 20 ns a rank, and a copy of a few bytes a block.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "index/match.hpp"
#include "index/worker.hpp"
#include "json/text.hpp"

namespace kvd {

class Answer {
 public:
  Answer(const Index& index, const Match& match) : index_(index), match_(match) {
    const auto& holders = match.frequencies();
    const auto most = std::max_element(holders.begin(), holders.end());
    char digits[kMaxDigits];
    if (most != holders.end()) figure_ = static_cast<size_t>(put(digits, uint64_t{*most}) - digits);
  }

  // Returns the text, which is in `memory`; makes `memory` larger if it has to.
  std::string_view render(const std::vector<const Worker*>& workers, std::string& memory) const {
    if (const size_t room = room_for(workers); memory.size() < room) memory.resize(room);
    char* const begin = memory.data();
    bool first = true;
    char* to = put(begin, "{\"scores\":{");
    for (const Worker* worker : workers) to = put_scores(to, *worker, first);
    to = put_frequencies(put(to, "},\"frequencies\":["));
    to = put(to, "],\"instances\":{");
    first = true;
    for (const Worker* worker : workers) to = put_instance(to, *worker, first);
    to = put(to, "}}");
    const size_t size = static_cast<size_t>(to - begin);
    assert(size <= memory.size());
    return {begin, size};
  }

 private:
  // Bytes that no answer exceeds.
  size_t room_for(const std::vector<const Worker*>& workers) const {
    constexpr size_t kAround = 64;                   // the text around the workers
    constexpr size_t kWorker = 64 + 4 * kMaxDigits;  // names, braces, depths of tiers
    constexpr size_t kRank = 4 + 2 * kMaxDigits;
    // Every figure is copied with a fixed width, so the last one may write past its digits.
    size_t room = kAround + match_.frequencies().size() * (figure_ + 1) + sizeof(Figure);
    for (const Worker* worker : workers) {
      room += kWorker + 2 * (worker->key.size() + worker->ranks.size() * kRank);
    }
    return room;
  }

  bool shown(RankId id) const {
    const Rank& rank = index_.rank(id);
    return match_.depth(id).disk != 0 || (rank.listed && rank.credited() != 0);
  }

  bool any_shown(const Worker& worker) const {
    for (const auto& entry : worker.ranks) {
      if (shown(entry.second)) return true;
    }
    return false;
  }

  char* put_tokens(char* to, uint64_t blocks) const {
    return put(to, blocks * index_.block_size());
  }

  static char* put_key(char* to, const Worker& worker, bool& first) {
    if (!first) *to++ = ',';
    first = false;
    return put(to, worker.key);
  }

  char* put_ranks(char* to, const Worker& worker) const {
    bool first = true;
    for (const auto& [dp_rank, id] : worker.ranks) {
      if (!shown(id)) continue;
      to = put(to, first ? "\"" : ",\"");
      to = put(put(to, uint64_t{dp_rank}), "\":");
      to = put_tokens(to, match_.depth(id).device);
      first = false;
    }
    return to;
  }

  char* put_scores(char* to, const Worker& worker, bool& first) const {
    if (!any_shown(worker)) return to;
    to = put(put_key(to, worker, first), ":{");
    return put(put_ranks(to, worker), "}");
  }

  char* put_instance(char* to, const Worker& worker, bool& first) const {
    if (!any_shown(worker)) return to;
    uint32_t gpu = 0, cpu = 0, disk = 0;
    for (const auto& entry : worker.ranks) {
      const Match::Depth depth = match_.depth(entry.second);
      gpu = std::max(gpu, depth.device);
      cpu = std::max(cpu, depth.host);
      disk = std::max(disk, depth.disk);
    }
    // The tiers are cumulative: disk is the largest of the three.
    to = put_tokens(put(put_key(to, worker, first), ":{\"longest_matched\":"), disk);
    to = put_tokens(put(to, ",\"gpu\":"), gpu);
    to = put_ranks(put(to, ",\"dp\":{"), worker);
    to = put_tokens(put(to, "},\"cpu\":"), cpu);
    to = put_tokens(put(to, ",\"disk\":"), disk);
    return put(to, "}");
  }

  // One figure a block, mostly equal to the one before: its text is made only when it changes.
  char* put_frequencies(char* to) const {
    Figure figure = {','};
    size_t length = 0;
    uint32_t last = 0;
    bool first = true;
    for (const uint32_t holders : match_.frequencies()) {
      if (length == 0 || holders != last) {
        last = holders;
        length = static_cast<size_t>(put(figure + 1, uint64_t{holders}) - figure);
      }
      std::memcpy(to, figure + first, kCopied);
      to += length - first;
      first = false;
    }
    return to;
  }

  static constexpr size_t kCopied = 15;
  using Figure = char[kMaxDigits + 1];

  const Index& index_;
  const Match& match_;
  size_t figure_ = 0;  // digits of the most holders
};

}  // namespace kvd
