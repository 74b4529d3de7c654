// What the choices of all pools have come to, as plain sums for /metrics.
//
//   request ──> outcome, by mode and phase         a retry is one, too; a wait is counted beside
//           └─> when served: its tokens
//   choice  ──> by the phase that it is for: blocks cached where it went, and where most were, and
//               what the difference is; tokens, those saved, those to prefill
//
// A request for both phases is one request and two choices. Blocks cached are those of all tiers,
// unweighed: how far the prompt can be reused without computing. Those saved are weighed by tier.
//
// Invariant: everything but `rates.sum` is whole numbers, and that one is added to in the order of
// the choices: so two services that choose the same count the same to the last bit.
//
// Costs: a request and its choice some 40 ns, beside Pool::most_cached.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "selector/pool.hpp"

namespace kvd::selector {

constexpr size_t kModes = 5;
constexpr size_t kPhases = 4;        // of requests: whole, prefill, decode, both
constexpr size_t kChoicePhases = 3;  // of choices: all but both
constexpr size_t kOutcomes = 16;     // more than the callers have names for
constexpr size_t kServed = 0;        // the first of them

// How often a number was at most 0, 1, 2, 4, ... 2^(N - 2), each without those before, or more.
template <size_t N>
struct Powers {
  uint64_t buckets[N + 1] = {};

  void add(uint64_t value) { ++buckets[std::min(position(value), N)]; }

 private:
  static size_t position(uint64_t value) {
    if (value < 2) return static_cast<size_t>(value);
    return 65 - static_cast<size_t>(__builtin_clzll(value - 1));
  }
};

// How often a share was at most 0, 0.1, ... 1, each without those before.
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
  uint64_t cached_tokens = 0;     // of these, weighed by tier
  uint64_t effective_tokens = 0;  // to prefill
  uint64_t chosen_blocks = 0;     // cached by who was chosen
  uint64_t best_blocks = 0;       // by the rank that caches most, of those that could be chosen
  uint64_t chosen_tokens = 0;     // the same in tokens
  uint64_t best_tokens = 0;
  Powers<16> regret;  // blocks: best - chosen
  Tenths rates;       // of the prompt, cached by who was chosen
};

struct ChoiceStats {
  uint64_t outcomes[kModes][kPhases][kOutcomes] = {};
  uint64_t held[kModes][kPhases] = {};
  uint64_t served_tokens = 0;
  Powers<22> lengths;  // prompts of requests that were served, tokens
  ChoiceSums choices[kChoicePhases];

  void serve(size_t mode, size_t phase, uint64_t tokens) {
    ++outcomes[mode][phase][kServed];
    served_tokens += tokens;
    lengths.add(tokens);
  }

  // A candidate of `pool` was chosen for its prompt, of which it caches `cached_tokens`, weighed by
  // tier; `best` is what Pool::most_cached says.
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
