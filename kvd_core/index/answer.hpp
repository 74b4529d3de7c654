// Renders a match as the JSON that indexer clients read.
//
//   {"scores":{"1":{"0":32}},"frequencies":[1,1],
//    "instances":{"1":{"longest_matched":48,"gpu":32,"dp":{"0":32},"cpu":48,"disk":48}}}
//
// All figures are tokens. A registered rank that caches something a query can credit is listed with
// zeros where nothing of it matches; a rank known only from its batches, or with no such block (a
// remembered name is none, nor is a block of a window group alone), is listed when it matched.
// Instance figures are the best of the instance's ranks, each tier by itself.
#pragma once

#include <charconv>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "index/match.hpp"
#include "index/worker.hpp"

namespace kvd {

class Answer {
 public:
  Answer(const Index& index, const Match& match, std::string& out)
      : index_(index), match_(match), out_(out) {}

  void render(const std::vector<const Worker*>& workers) {
    out_.assign("{\"scores\":{");
    bool first = true;
    for (const Worker* worker : workers) scores(*worker, first);
    out_.append("},\"frequencies\":[");
    frequencies();
    out_.append("],\"instances\":{");
    first = true;
    for (const Worker* worker : workers) instance(*worker, first);
    out_.append("}}");
  }

 private:
  bool shown(RankId id) const {
    const Rank& rank = index_.rank(id);
    return match_.depth(id).disk != 0 || (rank.listed && rank.credited() != 0);
  }

  void separate(bool& first) {
    if (!first) out_.push_back(',');
    first = false;
  }

  void number(uint64_t value) {
    char digits[20];
    const auto end = std::to_chars(digits, digits + sizeof digits, value).ptr;
    out_.append(digits, end);
  }

  void tokens(uint64_t blocks) { number(blocks * index_.block_size()); }

  void ranks(const Worker& worker) {
    bool first = true;
    for (const auto& [dp_rank, id] : worker.ranks) {
      if (!shown(id)) continue;
      separate(first);
      out_.push_back('"');
      number(dp_rank);
      out_.append("\":");
      tokens(match_.depth(id).device);
    }
  }

  bool any_shown(const Worker& worker) const {
    for (const auto& entry : worker.ranks) {
      if (shown(entry.second)) return true;
    }
    return false;
  }

  void scores(const Worker& worker, bool& first) {
    if (!any_shown(worker)) return;
    separate(first);
    out_.append(worker.key);
    out_.append(":{");
    ranks(worker);
    out_.push_back('}');
  }

  void instance(const Worker& worker, bool& first) {
    if (!any_shown(worker)) return;
    separate(first);
    uint32_t gpu = 0, cpu = 0, disk = 0;
    for (const auto& entry : worker.ranks) {
      const Match::Depth depth = match_.depth(entry.second);
      gpu = std::max(gpu, depth.device);
      cpu = std::max(cpu, depth.host);
      disk = std::max(disk, depth.disk);
    }
    out_.append(worker.key);
    out_.append(":{\"longest_matched\":");
    tokens(disk);  // the tiers are cumulative: disk is the largest of the three
    out_.append(",\"gpu\":");
    tokens(gpu);
    out_.append(",\"dp\":{");
    ranks(worker);
    out_.append("},\"cpu\":");
    tokens(cpu);
    out_.append(",\"disk\":");
    tokens(disk);
    out_.push_back('}');
  }

  // One figure a block, mostly the one before: its text is made when it changes, and copied whole.
  void frequencies() {
    char text[4096];
    char* to = text;
    char figure[16] = {','};
    size_t length = 0;
    uint32_t last = 0;
    bool first = true;
    for (const uint32_t holders : match_.frequencies()) {
      if (length == 0 || holders != last) {
        last = holders;
        length =
            static_cast<size_t>(std::to_chars(figure + 1, std::end(figure), holders).ptr - figure);
      }
      if (std::end(text) - to < std::end(figure) - figure) {
        out_.append(text, to);
        to = text;
      }
      std::memcpy(to, figure + first, sizeof figure - 1);
      to += length - first;
      first = false;
    }
    out_.append(text, to);
  }

  const Index& index_;
  const Match& match_;
  std::string& out_;
};

}  // namespace kvd
