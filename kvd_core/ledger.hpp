// The slot accounting of one (model, tenant): what every rank is working on.
//
//   add "chat-17" on rank 2 ──> request ──> last node of its prompt      ledger_requests.hpp
//                                 │               │
//        rank 2: 3 requests,      │      root ── [ a1 77 03 ] ── [ 91 c4 ]      ledger_trie.hpp
//        96 prefill tokens, <─────┘                  │               │
//        prompt 41.5, output 2                   ranks 2, 5       rank 2
//
// A rank's decode load is the number of different blocks of its live prompts, and the output
// blocks of its requests, each times its weight. One trie serves all ranks: what thousands of
// requests share is stored once, and a question for all ranks is one walk down the prompt and one
// up again, giving each rank the depth of the deepest node it passes through:
//
//     nodes on the way     ranks 1 2 3 4 5 6     ranks 2 5     rank 5
//     given on the way up    rest, depth 3       2, depth 9    5, depth 12
//
// A node with as many ranks as have their depth already has no others: it is skipped.
//
// Invariants (those of the parts are in their headers; ledger_verify.hpp checks all)
//   1. a rank's prefill tokens are the sum of those of its requests whose prefill is running;
//   2. its blocks are those of the nodes it passes through; its prompt load is their weights' sum,
//      its output load that of its requests' output blocks: exact while all weights are 1, else as
//      f64 sums go, and exactly 0 where nothing is left to sum;
//   3. ranks are listed in `order_` by (worker, dp rank); a free rank id is in `free_`.
//
// How the two sums are formed decides what becomes of halves, as observed of Dynamo 1.6.1: a change
// of weight adds (new - old) for each output block by itself, but blocks x (new - old) for a
// stretch of prompt blocks that weigh the same. The load is the sum of both, rounded, halves away
// from zero. A stretch is gathered over nodes, so it does not matter where other ranks part them.
//
// Costs (blocks n of the prompt, nodes m on its path, passages p of a node, ranks r): add, free
// O(n + m log p); prefill_complete O(1); output_block O(1), with a fraction O(output blocks + m log
// p); depths O(n + r + passages of the skipped nodes' rest); a refused add O(n). See the trie for
// what parting and joining cost.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <string_view>
#include <vector>

#include "ledger_requests.hpp"
#include "ledger_trie.hpp"
#include "ledger_types.hpp"

namespace kvd::ledger {

class Ledger {
 public:
  explicit Ledger(const Limits& limits) : limits_(limits) {}

  const Trie& trie() const { return trie_; }
  const Requests& requests() const { return requests_; }
  const std::vector<Listed>& order() const { return order_; }
  const Tally& tally() const { return tally_; }
  uint64_t output_count() const { return outputs_; }
  size_t bytes() const {
    return trie_.bytes() + requests_.bytes() + ranks_.capacity() * sizeof(Rank) +
           (free_.capacity() + depths_.capacity()) * sizeof(uint32_t) +
           order_.capacity() * sizeof(Listed);
  }

  // Rank ids are below this; an id is `live` or free.
  RankId rank_end() const { return static_cast<RankId>(ranks_.size()); }
  const Rank& rank(RankId id) const { return ranks_[id]; }
  bool is_live(RankId id) const { return id < ranks_.size() && ranks_[id].live; }

  RankId find_rank(uint64_t worker_id, uint32_t dp_rank) const {
    const auto at = std::lower_bound(order_.begin(), order_.end(), Listed{worker_id, dp_rank, 0});
    const bool found = at != order_.end() && at->worker_id == worker_id && at->dp_rank == dp_rank;
    return found ? at->rank : kNone;
  }

  // The id of a rank, new or known; kNone when there are too many.
  RankId add_rank(uint64_t worker_id, uint32_t dp_rank) {
    const RankId known = find_rank(worker_id, dp_rank);
    if (known != kNone || order_.size() == kMaxRanks) return known;
    if (free_.empty()) {
      ranks_.emplace_back();
      free_.push_back(rank_end() - 1);
      depths_.resize(ranks_.size());
    }
    const Listed entry{worker_id, dp_rank, free_.back()};
    order_.insert(std::lower_bound(order_.begin(), order_.end(), entry), entry);
    free_.pop_back();
    Rank& rank = ranks_[entry.rank] = Rank();
    rank.worker_id = worker_id;
    rank.dp_rank = dp_rank;
    rank.live = true;
    name(rank);
    return entry.rank;
  }

  // The rank must have no requests any more.
  void remove_rank(RankId id) {
    const Listed entry{ranks_[id].worker_id, ranks_[id].dp_rank, id};
    order_.erase(std::lower_bound(order_.begin(), order_.end(), entry));
    ranks_[id].live = false;
    free_.push_back(id);
    if (!order_.empty()) return;
    std::vector<Rank>().swap(ranks_);
    std::vector<RankId>().swap(free_);
    std::vector<uint32_t>().swap(depths_);
    std::vector<Listed>().swap(order_);
  }

  // Refusals are counted by who words them: not every caller does.
  Outcome add(const Admission& a) {
    if (a.tokens > kMaxTokens) return OVERFLOWN;
    const RequestId known = requests_.find(a.id);
    if (known != kNone) return meet_again(known, a);
    Rank& rank = ranks_[a.rank];
    if (rank.prefill_tokens + a.tokens > kMaxRankTokens) return OVERFLOWN;
    const Trie::Place at = trie_.find(a.hashes, a.blocks);
    if (!has_room(at, a.blocks)) return FULL;
    size_t gained = 0;
    Request& request = requests_[requests_.take(a.id, a.key, rank.chain)];
    request.end = trie_.enter(at, a.hashes, a.blocks, a.rank, gained);
    request.rank = a.rank;
    request.blocks = static_cast<uint32_t>(a.blocks);
    request.tokens = a.tokens;
    request.admitted = a.now;
    request.prefilling = true;
    request.outputs = request.decayed = 0;
    request.expected = a.expected;
    request.fraction = 1;
    ++rank.requests;
    rank.prefill_tokens += a.tokens;
    rank.blocks += gained;
    rank.prompt += static_cast<double>(gained);
    ++tally_.added;
    return ADDED;
  }

  void complete_prefill(RequestId id) {
    Request& request = requests_[id];
    if (request.prefilling) ranks_[request.rank].prefill_tokens -= request.tokens;
    request.prefilling = false;
  }

  void free(RequestId id) {
    complete_prefill(id);
    const Request& request = requests_[id];
    Rank& rank = ranks_[request.rank];
    Stretches lost([&](double blocks, double weight) { rank.prompt -= blocks * weight; });
    trie_.leave(request.end, request.rank, [&](uint32_t blocks, double weight) {
      rank.blocks -= blocks;
      lost.add(blocks, weight);
    });
    lost.end();
    for (uint32_t i = 0; i < request.outputs; ++i) {
      rank.output -= i < request.decayed ? request.fraction : 1;
    }
    rank.outputs -= request.outputs;
    outputs_ -= request.outputs;
    if (rank.blocks == 0) rank.prompt = 0;
    if (rank.outputs == 0) rank.output = 0;
    --rank.requests;
    ++tally_.freed;
    requests_.give(id, rank.chain);
  }

  void add_output(RequestId id) {
    Request& request = requests_[id];
    if (request.outputs == limits_.outputs) {
      ++tally_.refused_outputs;
      return;
    }
    Rank& rank = ranks_[request.rank];
    ++request.outputs;
    ++rank.outputs;
    ++outputs_;
    rank.output += 1;
  }

  // Gives all output blocks of a request, and those at the end of its prompt that no other request
  // of its rank has, the weight `fraction`, in [0, 1].
  void decay(RequestId id, double fraction) {
    Request& request = requests_[id];
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

  // Writes how many leading blocks of a prompt each rank has live, for all ids below rank_end().
  void depths(const uint64_t* hashes, size_t n, uint32_t* out) const {
    if (!ranks_.empty()) std::memset(out, 0, ranks_.size() * sizeof *out);
    const Trie::Place at = trie_.find(hashes, n);
    uint32_t depth = static_cast<uint32_t>(at.depth), given = 0;
    uint32_t inside = at.inside;
    for (NodeId id = at.node; id != kRoot;) {
      const Node& node = trie_.node(id);
      if (node.passages.size() != given) {
        for (const Passage& passage : node.passages) {
          if (out[passage.rank] == 0) out[passage.rank] = depth;
        }
        given = node.passages.size();
      }
      depth -= inside;
      id = node.parent;
      if (id != kRoot) inside = trie_.node(id).len;
    }
  }

  // The same, into an array of the ledger's own that stays until the next call.
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

  bool has_room(const Trie::Place& at, size_t blocks) const {
    return requests_.size() < limits_.requests && blocks <= limits_.blocks &&
           trie_.block_count() + (blocks - at.depth) <= limits_.blocks &&
           trie_.passage_count() + trie_.passages_needed(at, blocks) <= kMaxPassages;
  }

  Outcome meet_again(RequestId id, const Admission& a) {
    if (!is_retry(requests_[id], a)) return EXISTS;
    ++tally_.repeated;
    return REPEATED;
  }

  bool is_retry(const Request& request, const Admission& a) const {
    if (a.key.empty() || a.key != request.key() || a.rank != request.rank ||
        a.tokens != request.tokens || a.blocks != request.blocks) {
      return false;
    }
    const Trie::Place at = trie_.find(a.hashes, a.blocks);
    return at.depth == a.blocks && at.node == request.end;
  }

  Limits limits_;
  Trie trie_;
  Requests requests_;
  std::vector<Rank> ranks_;
  std::vector<RankId> free_;
  std::vector<Listed> order_;
  std::vector<uint32_t> depths_;  // one a rank: room for the answer of the last question
  uint64_t outputs_ = 0;          // output blocks of all requests
  Tally tally_;
};

}  // namespace kvd::ledger
