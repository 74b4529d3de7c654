// Sums over the choices of all pools, for /metrics.
//
//   request ──> outcome, by mode and phase         a retry has one, too; waits are counted besides
//           └─> if served: its tokens
//   choice  ──> by the phase that it is for: blocks cached on the chosen rank and on the best one,
//               and their difference; tokens of the prompt, those saved, those to prefill
//
// A request for both phases is one request and two choices. Cached blocks are those of all tiers,
// without weights: how far the prompt can be reused without computing. Saved tokens are weighted by
// tier.
//
// Invariant: everything except `rates.sum` is a whole number, and `rates.sum` grows in the order of
// the choices. So two services that make the same choices have the same counts to the last bit.
//
// Costs: some 40 ns for a request and its choice, without Pool::most_cached.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "selector/pool.hpp"

namespace kvd::selector {

constexpr size_t kModes = 5;
constexpr size_t kPhases = 4;        // of requests: whole, prefill, decode, both
constexpr size_t kChoicePhases = 3;  // of choices: all but both
constexpr size_t kOutcomes = 16;     // more than callers name
constexpr size_t kServed = 0;        // the first outcome

// A histogram of numbers: at most 0, 1, 2, 4, ... 2^(N - 2), or more. Each bucket counts without
// those before it.
template <size_t N>
struct Log2Histogram {
  uint64_t buckets[N + 1] = {};

  void add(uint64_t value) { ++buckets[std::min(position(value), N)]; }

 private:
  static size_t position(uint64_t value) {
    if (value < 2) return static_cast<size_t>(value);
    return 65 - static_cast<size_t>(__builtin_clzll(value - 1));
  }
};

// A histogram of shares: at most 0, 0.1, ... 1. Each bucket counts without those before it.
struct Tenths {
  uint64_t buckets[11] = {};
  double sum = 0;

  void add(uint64_t part, uint64_t whole) {
    part = std::min(part, whole);
    if (part == 0) {
      ++buckets[0];
      return;
    }
    ++buckets[(part * 10 + whole - 1) / whole];
    sum += static_cast<double>(part) / static_cast<double>(whole);
  }
};

// Choices for one phase.
struct ChoiceSums {
  uint64_t choices = 0;
  uint64_t prompt_tokens = 0;
  uint64_t cached_tokens = 0;     // of these; weighted by tier
  uint64_t effective_tokens = 0;  // to prefill
  uint64_t chosen_blocks = 0;     // that the chosen rank caches
  uint64_t best_blocks = 0;       // that the best rank caches, of those that could be chosen
  uint64_t chosen_tokens = 0;     // chosen_blocks in tokens
  uint64_t best_tokens = 0;       // best_blocks in tokens
  Log2Histogram<16> regret;       // blocks: best - chosen
  Tenths rates;                   // the chosen rank's cached share of the prompt
};

struct ChoiceStats {
  uint64_t outcomes[kModes][kPhases][kOutcomes] = {};
  uint64_t held[kModes][kPhases] = {};
  uint64_t served_tokens = 0;
  Log2Histogram<22> lengths;  // tokens of the prompts of served requests
  ChoiceSums choices[kChoicePhases];

  void serve(size_t mode, size_t phase, uint64_t tokens) {
    ++outcomes[mode][phase][kServed];
    served_tokens += tokens;
    lengths.add(tokens);
  }

  // Counts the choice of a candidate for the pool's prompt, of which it caches `cached_tokens`,
  // weighted by tier. `best` comes from Pool::most_cached.
  void choose(Pool& pool, size_t at, uint64_t cached_tokens, uint32_t best, size_t phase) {
    ChoiceSums& sums = choices[phase];
    const CandidateState& state = pool.state(at);
    const uint64_t isl = pool.prompt().isl_tokens;
    const uint64_t saved = std::min(cached_tokens, isl);
    const uint64_t mine = overlap_of(state), most = std::max<uint64_t>(best, mine);
    ++sums.choices;
    sums.prompt_tokens += isl;
    sums.cached_tokens += saved;
    sums.effective_tokens += isl - saved;
    sums.chosen_blocks += mine;
    sums.best_blocks += most;
    sums.chosen_tokens += mine * pool.block_size();
    sums.best_tokens += most * pool.block_size();
    sums.regret.add(most - mine);
    sums.rates.add(mine * pool.block_size(), isl);
  }
};

}  // namespace kvd::selector
