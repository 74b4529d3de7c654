// What a ledger is made of besides the trie and the requests: its bounds, ranks, what goes in and
// what comes out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "ledger/requests.hpp"

namespace kvd::ledger {

// Longest request id or retry key in UTF-8: ids are UUIDs or a little more.
constexpr size_t kMaxIdBytes = 4096;
// Live requests: 512 ranks with 2,048 each; 100 MB without their prompts.
constexpr uint32_t kMaxRequests = 1u << 20;
// Blocks of all live prompts, what they share counted once: 1 GB.
constexpr uint64_t kMaxBlocks = 1ull << 27;
// Pairs of a node and a rank, 16 bytes each: 1 GB. Prompts that branch at every block could make
// one a block and rank.
constexpr uint64_t kMaxRankRefs = 1ull << 26;
// Output blocks of one request: 2^24 tokens in blocks of 16; a fraction visits each of them.
constexpr uint32_t kMaxOutputs = 1u << 20;
// Ranks of a ledger: the largest fleets have some thousand; about 200 bytes each.
constexpr uint32_t kMaxRanks = 65'536;
// Tokens of one request: what JSON readers keep exact.
constexpr uint64_t kMaxTokens = 1ull << 53;
constexpr uint64_t kMaxRankTokens = 1ull << 62;  // tokens of a rank: sums stay in 64 bits
// Ledgers with ranks that share their loads: a face has one.
constexpr size_t kMaxLedgers = 8;

// A bit for each ledger that takes part.
using Owners = uint8_t;

struct Limits {
  uint32_t requests = kMaxRequests;
  uint64_t blocks = kMaxBlocks;
  uint32_t outputs = kMaxOutputs;
};

enum Outcome : int { ADDED, REPEATED, EXISTS, FULL, OVERFLOWN };

struct Tally {
  uint64_t added = 0;
  uint64_t repeated = 0;  // adds that were retries of a live request
  uint64_t freed = 0;
  uint64_t refused_outputs = 0;  // output blocks
};

struct Rank {
  uint64_t worker_id;
  uint32_t dp_rank;
  uint32_t requests = 0;
  uint64_t prefill_tokens = 0;
  uint64_t blocks = 0;   // different ones of its prompts
  uint64_t outputs = 0;  // output blocks
  double prompt = 0;     // sum of the weights of `blocks`
  double output = 0;     // and of `outputs`
  char text[56];         // "worker_id":7,"dp_rank":0
  uint8_t text_size = 0;
  Owners owners = 0;        // whose it is; nobody's: free
  uint32_t prefilling = 0;  // of `requests`, those with tokens that are being prefilled

  // The requests that have nothing left to prefill.
  uint32_t decoding() const { return requests - prefilling; }

  uint64_t decode_blocks() const {
    const double load = prompt + output;
    if (load <= 0) return 0;
    const auto whole = static_cast<uint64_t>(load);
    return whole + (load - static_cast<double>(whole) >= 0.5);
  }
};

struct Admission {
  std::string_view id;
  std::string_view key;  // empty: none
  RankId rank;           // one of the ledger's
  const uint64_t* hashes;
  size_t blocks;
  uint64_t tokens;
  double now;                 // seconds
  uint32_t expected = kNone;  // tokens of output, if known
};

// Where a rank stands in the order of rendering.
struct Listed {
  uint64_t worker_id;
  uint32_t dp_rank;
  RankId rank;

  bool operator<(const Listed& other) const {
    return worker_id != other.worker_id ? worker_id < other.worker_id : dp_rank < other.dp_rank;
  }
};

}  // namespace kvd::ledger
