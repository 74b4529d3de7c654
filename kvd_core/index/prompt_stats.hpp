// What is known of prompts: those of queries, and those that engines have stored. Where the two
// sides differ, nothing matches, and these counts show how they differ.
//
//   prompts   all prompts known by their tokens; queries by hash do not count
//   salted    of these, with a cache salt       adapted   of these, with an adapter
//   announcing_salts  of these, from engines that would have announced a salt
//   first     the first tokens of the last kKept prompts, in a ring
//   seeds     what adapters and salts of engines' prompts add to the seed of local hashes
//
// Prompts that share nothing match nothing either. But engines store them after they were asked
// for, so the first blocks of some earlier queries are found in the tree (FirstBlocks).
//
// Costs: `note` is one store and three additions a prompt. A seed is one comparison where it equals
// that of the prompt before, else kKept.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvd {

struct PromptStats {
  // First tokens kept: enough to distinguish a template of one side from that of the other.
  static constexpr uint32_t kKept = 16;

  uint64_t prompts = 0;
  uint64_t salted = 0;
  uint64_t adapted = 0;
  uint64_t announcing_salts = 0;
  uint32_t first[kKept] = {};

  void note(uint32_t token, bool is_salted, bool is_adapted, bool announces_salts) noexcept {
    first[prompts % kKept] = token;
    ++prompts;
    salted += is_salted;
    adapted += is_adapted;
    announcing_salts += announces_salts;
  }
};

// First blocks of queries of every age, by local hash: for each k that of the latest query whose
// number is an odd multiple of 2^k. However many queries come while a prompt is computed, and
// before its blocks are evicted, some of these are likely to lie between.
struct FirstBlocks {
  static constexpr uint32_t kKept = 32;  // blocks: queries of every age, up to 2^32 queries ago

  uint64_t local[kKept] = {};

  // Queries are numbered from 1.
  void note(uint64_t query, uint64_t first) noexcept {
    local[__builtin_ctzll(query) % kKept] = first;
  }

  // Whether is_stored(local hash) is true of any, after so many queries.
  template <class IsStored>
  bool any(uint64_t queries, IsStored&& is_stored) const {
    for (uint32_t k = 0; k < kKept && queries >> k != 0; ++k) {
      if (is_stored(local[k])) return true;
    }
    return false;
  }
};

// The last kKept pairs of adapter and salt that engines have announced, each once.
struct Seeds {
  static constexpr uint32_t kKept = 32;  // pairs: an explanation hashes the prompt by each

  struct Seed {
    uint64_t adapter;  // 0: none
    uint64_t salt;     // 0: none
    bool operator==(const Seed& o) const { return adapter == o.adapter && salt == o.salt; }
  };

  uint64_t met = 0;  // distinct seeds; one that came back after being replaced counts again
  Seed kept[kKept] = {};

  uint32_t size() const { return static_cast<uint32_t>(std::min<uint64_t>(met, kKept)); }

  void note(uint64_t adapter, uint64_t salt) noexcept {
    const Seed seed{adapter, salt};
    if ((adapter | salt) == 0 || (met != 0 && kept[(met - 1) % kKept] == seed)) return;
    if (std::find(kept, kept + size(), seed) != kept + size()) return;
    kept[met++ % kKept] = seed;
  }
};

}  // namespace kvd
