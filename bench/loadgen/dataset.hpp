// The data set: which tokens and which hashes every worker holds. Deterministic in its options.
//
//   chain 0   [== system prompt 0 ==][------ own blocks ------]      a chain is `depth` blocks,
//   chain 1   [== system prompt 1 ==][------ own blocks ------]      the first `prefix` of them a
//   chain 2   [== system prompt 0 ==][------ own blocks ------]      system prompt
//
// Every worker has `chains()` chains; chain k starts with system prompt k mod `prompts()`. System
// prompts are the same on all workers; the blocks after them are the worker's own, unless the set
// is replicated: then all workers hold the same chains.
#pragma once

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "options.hpp"

namespace kvbench {

using Tokens = std::vector<uint32_t>;
using Hashes = std::vector<uint64_t>;

// Token ids come from separate ranges, so that generated blocks can never match by accident. Where
// timing depends on them they are in the range of real vocabularies, as JSON costs by the digit.
constexpr uint32_t kDataTokens = 100;  // .. +kVocabulary: blocks of the data set
constexpr uint32_t kVocabulary = 120000;
constexpr uint32_t kSentinelTokens = 200000;  // upwards: sentinel blocks
constexpr uint32_t kChurnTokens = 1u << 30;   // .. +kVocabulary: blocks stored and removed again

constexpr uint64_t kHashSeed = 1337;  // the indexers' seed for blocks without LoRA or salt

inline uint64_t local_hash(const uint32_t* tokens, size_t count) {
  return XXH3_64bits_withSeed(tokens, count * sizeof *tokens, kHashSeed);
}

// Returns a block's sequence hash, from that of its parent and its own local hash.
inline uint64_t chain_hash(uint64_t parent, uint64_t local) {
  const uint64_t both[2] = {parent, local};
  return XXH3_64bits_withSeed(both, sizeof both, kHashSeed);
}

inline Hashes local_hashes(const Tokens& tokens, size_t block_size) {
  Hashes hashes;
  for (size_t at = 0; at + block_size <= tokens.size(); at += block_size)
    hashes.push_back(local_hash(&tokens[at], block_size));
  return hashes;
}

// Returns the sequence hashes of the blocks in `tokens` below `parent` (null: the chain starts
// here). They serve as engine hashes: equal content has equal hashes on all workers, as with vLLM
// under one PYTHONHASHSEED.
inline Hashes sequence_hashes(const Tokens& tokens, size_t block_size, const uint64_t* parent) {
  Hashes hashes = local_hashes(tokens, block_size);
  for (size_t i = 0; i < hashes.size(); i++) {
    const uint64_t* before = i ? &hashes[i - 1] : parent;
    if (before) hashes[i] = chain_hash(*before, hashes[i]);
  }
  return hashes;
}

// Turns a counter into a well-mixed number (splitmix64's finaliser).
inline uint64_t scramble(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

class DataSet {
 public:
  explicit DataSet(const Options& options)
      : workers(options.integer("workers", 1)),
        depth(options.integer("depth", 1)),
        prefix(options.integer("prefix", 0)),
        block_size(options.integer("block-size", 1)),
        seed_(uint64_t(options.integer("seed", 0))),
        replicated_(options.integer("replicated", 0) != 0) {
    if (prefix >= depth) prefix = 0;
    const long share = options.integer("pairs", 1) / workers;
    const long own = depth - prefix;
    // Four chains of a worker share a system prompt.
    prompts_ = prefix ? std::max(1L, share / own / 4) : 0;
    chains_ = std::max({1L, prompts_, (share - prompts_ * prefix) / own});
  }

  long chains() const { return chains_; }
  long prompts() const { return prompts_; }
  long prompt_of(long chain) const { return chain % prompts_; }

  // Appends the tokens of blocks [first, first + count) of a chain to `out`.
  void append(long worker, long chain, long first, long count, Tokens& out) const {
    for (long block = first; block < first + count; block++)
      for (long slot = 0; slot < block_size; slot++)
        out.push_back(token(worker, chain, block, slot));
  }

  Tokens tokens(long worker, long chain, long first, long count) const {
    Tokens out;
    out.reserve(size_t(count * block_size));
    append(worker, chain, first, count, out);
    return out;
  }

  // Returns a prompt of `blocks` blocks: the first `hits` blocks of an indexed chain, then novel
  // ones. `number` picks the chain and the novel part.
  Tokens prompt(uint64_t number, long blocks, long hits) const {
    const long worker = long(scramble(number * 2 + 1) % uint64_t(workers));
    const long chain = long(scramble(number * 2 + 2) % uint64_t(chains_));
    Tokens out = tokens(worker, chain, 0, std::min(hits, depth));
    for (uint64_t i = out.size(); i < uint64_t(blocks * block_size); i++)
      out.push_back(kDataTokens + uint32_t(scramble(~number * 1000003 + i) % kVocabulary));
    return out;
  }

  const long workers, depth;
  long prefix;
  const long block_size;

 private:
  uint32_t token(long worker, long chain, long block, long slot) const {
    constexpr uint64_t kPrompt = 1ULL << 62;  // keeps prompts and own chains apart
    const uint64_t holder = replicated_ ? 0 : uint64_t(worker) + 1;
    const uint64_t source =
        block < prefix ? kPrompt + uint64_t(prompt_of(chain)) : (holder << 32) + uint64_t(chain);
    const uint64_t place = (uint64_t(block) << 10) + uint64_t(slot);
    const uint64_t mixed = scramble(scramble(source + (seed_ << 48)) + place);
    return kDataTokens + uint32_t(mixed % kVocabulary);
  }

  uint64_t seed_;
  bool replicated_;
  long prompts_ = 0, chains_ = 0;
};

}  // namespace kvbench
