// What every rank is working on, whoever has booked it: the part that ledgers share.
//
//   ledger of one face   ──┐          rank 2, of both: 3 requests, 96 prefill tokens,
//     its ranks, requests  ├─> loads                   prompt 41.5, output 2
//   ledger of another    ──┘          trie of the live prompts of all                ledger/trie.hpp
//
// A ledger takes part while it has ranks. A rank is here while any ledger has it, and weighs what
// the requests of all its ledgers weigh: blocks that two of them have live count once.
//
// Invariants (checked with those of the ledgers that take part, ledger/verify.hpp)
//   1. a rank's prefill tokens are the sum of those of its requests whose prefill is running, and
//      those of these that have any are counted;
//   2. its blocks are those of the nodes it passes through; its prompt load is their weights' sum,
//      its output load that of its requests' output blocks: exact while all weights are 1, else as
//      f64 sums go, and exactly 0 where nothing is left to sum;
//   3. a rank has an owner, and every owner lists it; a rank id without one is in `free_`.
//
// How the two sums are formed decides what becomes of halves, as observed of Dynamo 1.6.1: a change
// of weight adds (new - old) for each output block by itself, but blocks x (new - old) for a
// stretch of prompt blocks that weigh the same. The load is the sum of both, rounded, halves away
// from zero. A stretch is gathered over nodes, so it does not matter where other ranks split them.
//
// Costs (blocks n of the prompt, nodes m on its path, ranks p of a node, ranks r in all): insert,
// erase O(n + m log p); end_prefill O(1); add_output O(1); decay O(output blocks + m log p); depths
// O(n + r + ranks of the skipped nodes' rest).
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "ledger/requests.hpp"
#include "ledger/trie.hpp"
#include "ledger/types.hpp"

namespace kvd::ledger {

class Ledger;

class Loads {
 public:
  Loads() = default;
  Loads(const Loads&) = delete;
  Loads& operator=(const Loads&) = delete;

  const Trie& trie() const { return trie_; }
  size_t bytes() const {
    return trie_.bytes() + ranks_.capacity() * sizeof(Rank) +
           (free_.capacity() + depths_.capacity()) * sizeof(uint32_t);
  }

  // Rank ids are below this.
  RankId rank_end() const { return static_cast<RankId>(ranks_.size()); }
  const Rank& rank(RankId id) const { return ranks_[id]; }
  bool is_of(RankId id, Owners who) const {
    return id < ranks_.size() && (ranks_[id].owners & who) != 0;
  }

  // ---- ledgers and their ranks

  // Lets a ledger take part; returns the bit it is known by.
  Owners attach(const Ledger* ledger) {
    for (size_t i = 0; i < ledgers_.size(); ++i) {
      if (ledgers_[i] != nullptr) continue;
      ledgers_[i] = ledger;
      return static_cast<Owners>(1u << i);
    }
    throw std::length_error("too many ledgers share their loads");
  }

  // The ledger must have no ranks any more.
  void detach(const Ledger* ledger) {
    std::replace(ledgers_.begin(), ledgers_.end(), ledger, static_cast<const Ledger*>(nullptr));
  }

  // Calls visit(ledger) for each that takes part.
  template <class Visit>
  void each_ledger(Visit&& visit) const {
    for (const Ledger* ledger : ledgers_) {
      if (ledger != nullptr) visit(*ledger);
    }
  }

  // A rank that no ledger has.
  RankId take(uint64_t worker_id, uint32_t dp_rank) {
    if (free_.empty()) {
      ranks_.emplace_back();
      free_.push_back(rank_end() - 1);
      depths_.resize(ranks_.size());
    }
    const RankId id = free_.back();
    free_.pop_back();
    Rank& rank = ranks_[id] = Rank();
    rank.worker_id = worker_id;
    rank.dp_rank = dp_rank;
    name(rank);
    return id;
  }

  void own(RankId id, Owners who) { ranks_[id].owners |= who; }

  // The ledger must have no requests on the rank any more.
  void disown(RankId id, Owners who) {
    ranks_[id].owners &= static_cast<Owners>(~who);
    if (ranks_[id].owners != 0) return;
    free_.push_back(id);
    if (free_.size() != ranks_.size()) return;
    std::vector<Rank>().swap(ranks_);
    std::vector<RankId>().swap(free_);
    std::vector<uint32_t>().swap(depths_);
  }

  // ---- requests

  bool overflows(RankId id, uint64_t tokens) const {
    return ranks_[id].prefill_tokens + tokens > kMaxRankTokens;
  }

  bool has_room(const Trie::Place& at, size_t blocks, uint64_t limit) const {
    return blocks <= limit && trie_.block_count() + (blocks - at.depth) <= limit &&
           trie_.rank_ref_count() + trie_.rank_refs_needed(at, blocks) <= kMaxRankRefs;
  }

  // Returns the last node of the prompt, which was found at `at`.
  NodeId insert(const Trie::Place& at, const Admission& a) {
    Rank& rank = ranks_[a.rank];
    size_t gained = 0;
    const NodeId end = trie_.insert(at, a.hashes, a.blocks, a.rank, gained);
    ++rank.requests;
    rank.prefill_tokens += a.tokens;
    rank.prefilling += a.tokens != 0;
    rank.blocks += gained;
    rank.prompt += static_cast<double>(gained);
    return end;
  }

  void end_prefill(Request& request) {
    if (!request.prefilling) return;
    request.prefilling = false;
    Rank& rank = ranks_[request.rank];
    rank.prefill_tokens -= request.tokens;
    rank.prefilling -= request.tokens != 0;
  }

  void erase(Request& request) {
    end_prefill(request);
    Rank& rank = ranks_[request.rank];
    Stretches lost([&](double blocks, double weight) { rank.prompt -= blocks * weight; });
    trie_.erase(request.end, request.rank, [&](uint32_t blocks, double weight) {
      rank.blocks -= blocks;
      lost.add(blocks, weight);
    });
    lost.end();
    for (uint32_t i = 0; i < request.outputs; ++i) {
      rank.output -= i < request.decayed ? request.fraction : 1;
    }
    rank.outputs -= request.outputs;
    if (rank.blocks == 0) rank.prompt = 0;
    if (rank.outputs == 0) rank.output = 0;
    --rank.requests;
  }

  void add_output(Request& request) {
    Rank& rank = ranks_[request.rank];
    ++request.outputs;
    ++rank.outputs;
    rank.output += 1;
  }

  // Gives all output blocks of a request, and those at the end of its prompt that no other request
  // of its rank has, the weight `fraction`, in [0, 1].
  void decay(Request& request, double fraction) {
    Rank& rank = ranks_[request.rank];
    for (uint32_t i = 0; i < request.outputs; ++i) {
      rank.output += fraction - (i < request.decayed ? request.fraction : 1);
    }
    request.decayed = request.outputs;
    request.fraction = fraction;
    Stretches changed([&](double blocks, double old) { rank.prompt += blocks * (fraction - old); });
    trie_.weigh(request.end, request.rank, fraction,
                [&](uint32_t blocks, double old) { changed.add(blocks, old); });
    changed.end();
  }

  // ---- questions

  // Writes how many leading blocks of a prompt each rank has live, for all ids below rank_end().
  void depths(const uint64_t* hashes, size_t n, uint32_t* out) const {
    if (!ranks_.empty()) std::memset(out, 0, ranks_.size() * sizeof *out);
    const Trie::Place at = trie_.find(hashes, n);
    uint32_t depth = static_cast<uint32_t>(at.depth), given = 0;
    uint32_t inside = at.inside;
    for (NodeId id = at.node; id != kRoot;) {
      const Node& node = trie_.node(id);
      if (node.ranks.size() != given) {
        for (const RankRef& ref : node.ranks) {
          if (out[ref.rank] == 0) out[ref.rank] = depth;
        }
        given = node.ranks.size();
      }
      depth -= inside;
      id = node.parent;
      if (id != kRoot) inside = trie_.node(id).len;
    }
  }

  // The same, into an array that stays until the next call.
  const uint32_t* depths(const uint64_t* hashes, size_t n) {
    depths(hashes, n, depths_.data());
    return depths_.data();
  }

 private:
  friend class Verifier;

  // Joins neighbouring blocks of one weight, and hands them on as (blocks, weight).
  template <class Take>
  class Stretches {
   public:
    explicit Stretches(Take&& take) : take_(take) {}

    void add(uint32_t blocks, double weight) {
      if (weight != weight_) end();
      blocks_ += blocks;
      weight_ = weight;
    }

    void end() {
      if (blocks_ != 0) take_(static_cast<double>(blocks_), weight_);
      blocks_ = 0;
    }

   private:
    Take take_;
    uint64_t blocks_ = 0;
    double weight_ = 0;
  };

  static void name(Rank& rank) {
    constexpr std::string_view worker = "\"worker_id\":", dp_rank = ",\"dp_rank\":";
    char* to = std::copy(worker.begin(), worker.end(), rank.text);
    to = std::to_chars(to, rank.text + sizeof rank.text, rank.worker_id).ptr;
    to = std::copy(dp_rank.begin(), dp_rank.end(), to);
    to = std::to_chars(to, rank.text + sizeof rank.text, rank.dp_rank).ptr;
    rank.text_size = static_cast<uint8_t>(to - rank.text);
  }

  Trie trie_;
  std::vector<Rank> ranks_;
  std::vector<RankId> free_;
  std::vector<uint32_t> depths_;  // one a rank: room for the answer of the last question
  std::array<const Ledger*, kMaxLedgers> ledgers_{};  // by the number of their bit
};

}  // namespace kvd::ledger
