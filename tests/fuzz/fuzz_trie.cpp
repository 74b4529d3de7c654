// Any sequence of prompts that are added, weighed less and removed, on a heap that is full now and
// then. After each step the trie's invariants hold, a prompt is found as far as a plain search
// finds it, and the blocks reported as gained and lost are those of the trie. A step that fails
// changes nothing, and in the end nothing is left.
//
// tests/fuzz/build builds it. The input is read byte by byte: an operation, then what it needs.
// Prompts are runs of 1 or 1,500 equal hashes out of four, so that they share, branch, and exceed
// the longest node.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <new>
#include <vector>

#include "ledger/trie.hpp"
#include "ledger/verify.hpp"

namespace {

using namespace kvd::ledger;
using Prompt = std::vector<uint64_t>;

constexpr uint32_t kRanks = 4, kLongRun = 1500, kIds = 16;
constexpr double kFractions[] = {0, 0.1, 0.5, 1};

enum Kind : uint8_t { ADD, FREE, WEIGH, ASK, kinds };

void require(bool holds) {
  if (!holds) std::abort();
}

class Input {
 public:
  Input(const uint8_t* at, const uint8_t* end) : at_(at), end_(end) {}

  bool more() const { return at_ != end_; }
  uint8_t byte() { return more() ? *at_++ : 0; }

  Prompt prompt() {
    Prompt hashes;
    for (uint8_t runs = byte() % 8; runs != 0; --runs) {
      const uint8_t run = byte();
      hashes.insert(hashes.end(), (run & 0xf0) == 0xf0 ? kLongRun : 1, run % 4);
    }
    return hashes;
  }

 private:
  const uint8_t *at_, *end_;
};

// While one of these exists, only so many requests for memory succeed.
class FullHeap {
 public:
  explicit FullHeap(uint64_t left) { kvd::heap_left = left; }
  ~FullHeap() { kvd::heap_left = UINT64_MAX; }
};

class Life {
 public:
  explicit Life(Input input) : input_(input) {}

  void run() {
    while (input_.more()) {
      step(static_cast<Kind>(input_.byte() % kinds));
      check();
    }
    while (!live_.empty()) drop(live_.begin());
    check();
    require(trie_.node_count() == 0 && trie_.bytes() == Trie().bytes());
  }

 private:
  struct Request {
    NodeId end;
    LoadedRankId rank;
    Prompt prompt;
  };
  using Live = std::map<uint8_t, Request>;

  void step(Kind kind) {
    if (kind == ASK) return ask();
    const uint8_t id = input_.byte() % kIds;
    const auto known = live_.find(id);
    if (kind == ADD && known == live_.end()) add(id);
    if (kind == FREE && known != live_.end()) drop(known);
    if (kind == WEIGH && known != live_.end()) weigh(known->second);
  }

  void add(uint8_t id) {
    const LoadedRankId rank = input_.byte() % kRanks;
    const Prompt prompt = input_.prompt();
    const Trie::PathPosition at = trie_.find(prompt.data(), prompt.size());
    const uint64_t refs = trie_.rank_ref_count(),
                   needed = trie_.rank_refs_needed(at, prompt.size());
    const uint64_t left = input_.byte() % 16;
    size_t gained = 0;
    NodeId end;
    try {
      const FullHeap full(left);
      end = trie_.insert(at, prompt.data(), prompt.size(), rank, gained);
    } catch (const std::bad_alloc&) { return; }
    require(trie_.rank_ref_count() <= refs + needed);
    live_[id] = {end, rank, prompt};
    blocks_[rank] += gained;
    weight_[rank] += static_cast<double>(gained);
  }

  void drop(Live::iterator which) {
    const Request& request = which->second;
    const LoadedRankId rank = request.rank;
    const uint64_t left = input_.byte() % 16;
    {
      const FullHeap full(left);
      trie_.erase(request.end, rank, [&](uint32_t blocks, double weight) {
        blocks_[rank] -= blocks;
        weight_[rank] -= blocks * weight;
      });
    }
    live_.erase(which);
  }

  void weigh(const Request& request) {
    const double fraction = kFractions[input_.byte() % 4];
    const FullHeap full(input_.byte() % 16);
    trie_.weigh(request.end, request.rank, fraction, [&](uint32_t blocks, double old) {
      weight_[request.rank] += blocks * (fraction - old);
    });
  }

  void ask() {
    const Prompt prompt = input_.prompt();
    size_t expected = 0;
    for (const auto& [id, held] : live_) {
      const size_t most = std::min(prompt.size(), held.prompt.size());
      size_t depth = 0;
      while (depth < most && prompt[depth] == held.prompt[depth]) ++depth;
      expected = std::max(expected, depth);
    }
    require(trie_.find(prompt.data(), prompt.size()).depth == expected);
  }

  void check() const {
    TrieVerifier verifier(trie_);
    for (const auto& [id, held] : live_) {
      verifier.note(held.end, held.rank, static_cast<uint32_t>(held.prompt.size()));
    }
    verifier.run();
    for (LoadedRankId rank = 0; rank < kRanks; ++rank) {
      require(verifier.held(rank).blocks == blocks_[rank]);
      require(std::abs(verifier.held(rank).weight - weight_[rank]) < 1e-6);
    }
  }

  Input input_;
  Trie trie_;
  Live live_;
  uint64_t blocks_[kRanks] = {};
  double weight_[kRanks] = {};
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Life(Input(data, data + size)).run();
  return 0;
}
