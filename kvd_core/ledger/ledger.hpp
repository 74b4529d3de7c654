// The slot accounting of one (model, tenant) as one face keeps it: its ranks, and who runs on them.
//
//   add "chat-17" on rank 2 ──> request ──> last node of its prompt      ledger/requests.hpp
//                                 │               │
//        rank 2: 3 requests,      │      root ── [ a1 77 03 ] ── [ 91 c4 ]      ledger/trie.hpp
//        96 prefill tokens, <─────┘                  │               │
//        prompt 41.5, output 2                   ranks 2, 5       rank 2
//                                                                              ledger/loads.hpp
//
// Ids of requests, ranks, ages and counts are a ledger's own. What its requests weigh is added to
// the loads, which several ledgers may share: what a rank works on is then the sum of all of them,
// and one ledger neither lists, finds nor removes what is another's.
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
// Invariants (those of the parts are in their headers; ledger/verify.hpp checks all)
//   1. ranks are listed in `order_` by (worker, dp rank), and the loads name the ledger as one of
//      their owners; two ledgers that share loads have one id for the same rank;
//   2. a ledger takes part in its loads while it has ranks.
//
// Costs (blocks n of the prompt, nodes m on its path, ranks p of a node, ranks r in all): add, free
// O(n + m log p); prefill_complete O(1); output_block O(1), with a fraction O(output blocks + m log
// p); a refused add O(n). See the trie for what a split and a merge cost.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "ledger/loads.hpp"
#include "ledger/requests.hpp"
#include "ledger/trie.hpp"
#include "ledger/types.hpp"

namespace kvd::ledger {

class Ledger {
 public:
  Ledger(const Limits& limits, std::shared_ptr<Loads> loads)
      : limits_(limits), loads_(std::move(loads)) {}
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;
  // Others may go on with the loads.
  ~Ledger() {
    if (order_.empty() || loads_.use_count() == 1) return;
    while (requests_.oldest() != kNone) free(requests_.oldest());
    while (!order_.empty()) remove_rank(order_.back().rank);
  }

  Loads& loads() { return *loads_; }
  const Loads& loads() const { return *loads_; }
  const Requests& requests() const { return requests_; }
  const std::vector<Listed>& order() const { return order_; }
  const Tally& tally() const { return tally_; }
  uint64_t output_count() const { return outputs_; }
  // Those of the loads included.
  size_t bytes() const {
    return loads_->bytes() + requests_.bytes() + chains_.capacity() * sizeof(RankChain) +
           order_.capacity() * sizeof(Listed);
  }

  // The ledger's bit among the owners of its ranks, 0 while it has none.
  Owners bit() const { return bit_; }
  bool has(RankId id) const { return loads_->is_of(id, bit_); }
  // Its requests on a rank it has.
  const RankChain& chain(RankId id) const { return chains_[id]; }

  RankId find_rank(uint64_t worker_id, uint32_t dp_rank) const {
    const auto at = std::lower_bound(order_.begin(), order_.end(), Listed{worker_id, dp_rank, 0});
    const bool found = at != order_.end() && at->worker_id == worker_id && at->dp_rank == dp_rank;
    return found ? at->rank : kNone;
  }

  // The id of a rank, new or known; kNone when there are too many.
  RankId add_rank(uint64_t worker_id, uint32_t dp_rank) {
    const RankId known = find_rank(worker_id, dp_rank);
    if (known != kNone || order_.size() == kMaxRanks) return known;
    if (order_.empty()) bit_ = loads_->attach(this);
    RankId id = kNone;
    loads_->each_ledger([&](const Ledger& other) {
      if (id == kNone) id = other.find_rank(worker_id, dp_rank);
    });
    if (id == kNone) id = loads_->take(worker_id, dp_rank);
    if (id >= chains_.size()) chains_.resize(loads_->rank_end());
    chains_[id] = RankChain();
    const Listed entry{worker_id, dp_rank, id};
    order_.insert(std::lower_bound(order_.begin(), order_.end(), entry), entry);
    loads_->own(id, bit_);
    return id;
  }

  // The ledger must have no requests on the rank any more.
  void remove_rank(RankId id) {
    const Rank& rank = loads_->rank(id);
    order_.erase(
        std::lower_bound(order_.begin(), order_.end(), Listed{rank.worker_id, rank.dp_rank, id}));
    loads_->disown(id, bit_);
    if (!order_.empty()) return;
    loads_->detach(this);
    bit_ = 0;
    std::vector<RankChain>().swap(chains_);
    std::vector<Listed>().swap(order_);
  }

  // Refusals are counted by who words them: not every caller does.
  Outcome add(const Admission& a) {
    if (a.tokens > kMaxTokens) return OVERFLOWN;
    const RequestId known = requests_.find(a.id);
    if (known != kNone) return meet_again(known, a);
    Loads& loads = *loads_;
    if (loads.overflows(a.rank, a.tokens)) return OVERFLOWN;
    const Trie::Place at = loads.trie().find(a.hashes, a.blocks);
    if (requests_.size() >= limits_.requests || !loads.has_room(at, a.blocks, limits_.blocks)) {
      return FULL;
    }
    Request& request = requests_[requests_.take(a.id, a.key, chains_[a.rank])];
    request.end = loads.insert(at, a);
    request.rank = a.rank;
    request.blocks = static_cast<uint32_t>(a.blocks);
    request.tokens = a.tokens;
    request.admitted = a.now;
    request.prefilling = true;
    request.outputs = request.decayed = 0;
    request.expected = a.expected;
    request.fraction = 1;
    ++tally_.added;
    return ADDED;
  }

  void complete_prefill(RequestId id) { loads_->end_prefill(requests_[id]); }

  void free(RequestId id) {
    Request& request = requests_[id];
    loads_->erase(request);
    outputs_ -= request.outputs;
    ++tally_.freed;
    requests_.give(id, chains_[request.rank]);
  }

  void add_output(RequestId id) {
    Request& request = requests_[id];
    if (request.outputs == limits_.outputs) {
      ++tally_.refused_outputs;
      return;
    }
    loads_->add_output(request);
    ++outputs_;
  }

  // See Loads::decay.
  void decay(RequestId id, double fraction) { loads_->decay(requests_[id], fraction); }

 private:
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
    const Trie::Place at = loads_->trie().find(a.hashes, a.blocks);
    return at.depth == a.blocks && at.node == request.end;
  }

  Limits limits_;
  std::shared_ptr<Loads> loads_;
  Owners bit_ = 0;
  Requests requests_;
  std::vector<RankChain> chains_;  // by rank id, of the requests on it
  std::vector<Listed> order_;
  uint64_t outputs_ = 0;  // output blocks of all requests
  Tally tally_;
};

}  // namespace kvd::ledger
