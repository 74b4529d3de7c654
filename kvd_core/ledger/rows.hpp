// Renders loads and projections of all ranks of a ledger as JSON, straight into the answer's bytes.
//
//   {"worker_id":7,"dp_rank":0,"active_prefill_tokens":48,"active_decode_blocks":3}
//   {"worker_id":7,"dp_rank":0,"potential_prefill_tokens":80,"potential_decode_blocks":5,
//    "active_requests":2}
//
// Rows are separated by commas and sorted by (worker, dp rank).
//
// Costs: some 25 ns a row. The caller gives `room()` bytes, which no row can exceed.
#pragma once

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "ledger/ledger.hpp"

namespace kvd::ledger {

class Rows {
 public:
  explicit Rows(const Ledger& ledger) : ledger_(ledger), loads_(ledger.loads()) {}

  // Bytes that the rows need at most, each with `prefix` bytes more.
  size_t room(size_t prefix) const { return ledger_.order().size() * (kMaxRow + prefix) + 2; }

  // Returns the end of what it has written; `prefix` is ready JSON text that opens each row.
  char* loads(char* to, std::string_view prefix) const {
    char* const begin = to;
    for (const Listed& listed : ledger_.order()) {
      const Rank& rank = loads_.rank(listed.rank);
      if (to != begin) *to++ = ',';
      *to++ = '{';
      to = text(to, prefix);
      to = text(to, {rank.text, rank.text_size});
      to = text(to, ",\"active_prefill_tokens\":");
      to = number(to, rank.prefill_tokens);
      to = text(to, ",\"active_decode_blocks\":");
      to = number(to, rank.decode_blocks());
      *to++ = '}';
    }
    return to;
  }

  // The same as a JSON array, for a prompt of `blocks` that is live as far as `depths` says.
  char* projection(char* to, const uint32_t* depths, size_t blocks, uint64_t new_tokens) const {
    *to++ = '[';
    char* const begin = to;
    for (const Listed& listed : ledger_.order()) {
      const Rank& rank = loads_.rank(listed.rank);
      if (to != begin) *to++ = ',';
      *to++ = '{';
      to = text(to, {rank.text, rank.text_size});
      to = text(to, ",\"potential_prefill_tokens\":");
      to = number(to, rank.prefill_tokens + new_tokens);
      to = text(to, ",\"potential_decode_blocks\":");
      to = number(to, rank.decode_blocks() + (blocks - depths[listed.rank]));
      to = text(to, ",\"active_requests\":");
      to = number(to, rank.requests);
      *to++ = '}';
    }
    *to++ = ']';
    return to;
  }

 private:
  // {, rank's text, the longer three names, three numbers of at most 20 digits, } and a comma.
  static constexpr size_t kMaxRow = 1 + sizeof(Rank::text) + 27 + 27 + 19 + 3 * 20 + 2;

  static char* text(char* to, std::string_view text) {
    std::memcpy(to, text.data(), text.size());
    return to + text.size();
  }

  static char* number(char* to, uint64_t value) { return std::to_chars(to, to + 20, value).ptr; }

  const Ledger& ledger_;
  const Loads& loads_;
};

}  // namespace kvd::ledger
