// The bounds of a ledger.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvd::ledger {

// Longest request id or retry key in UTF-8: ids are UUIDs or a little more.
constexpr size_t kMaxIdBytes = 4096;
// Live requests: 512 ranks with 2,048 each; 100 MB without their prompts.
constexpr uint32_t kMaxRequests = 1u << 20;
// Blocks of all live prompts, shared ones counted once: 1 GB.
constexpr uint64_t kMaxBlocks = 1ull << 27;
// Pairs of a node and a rank, 16 bytes each: 1 GB. Prompts that branch at every block could make
// one for each block and rank.
constexpr uint64_t kMaxRankRefs = 1ull << 26;
// Output blocks of one request: 2^24 tokens in blocks of 16; a fraction visits each of them.
constexpr uint32_t kMaxOutputs = 1u << 20;
// Ranks of a ledger: the largest fleets have some thousand; about 200 bytes each.
constexpr uint32_t kMaxRanks = 65'536;
// Tokens of one request: the most that JSON readers keep exact.
constexpr uint64_t kMaxTokens = 1ull << 53;
constexpr uint64_t kMaxRankTokens = 1ull << 62;  // tokens of a rank: sums stay in 64 bits
// Ledgers with ranks that share their loads: each face has one, and each has a bit of a byte.
constexpr uint32_t kMaxLedgers = 8;
// Bytes that rows of loads may need to be rendered at once: 10,000 ranks, or 6,000 candidates of a
// selection. Those of more are kept as of one moment, 32 or 48 bytes each, and rendered in pieces.
constexpr size_t kWholeRowsBytes = size_t{2} << 20;

}  // namespace kvd::ledger
