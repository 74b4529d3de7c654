// Checks every numbered invariant of the ledger's headers and forms every sum anew: of the loads, and
// of all ledgers that share them.
// For tests and debug builds: O(everything).
#pragma once

#include <cmath>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#include "ledger/ledger.hpp"

namespace kvd::ledger {

class Verifier {
 public:
  explicit Verifier(const Loads& loads) : loads_(loads), trie_(loads.trie()) {}

  // Throws std::logic_error with the first violation.
  void run() {
    loads_.each_ledger([&](const Ledger& ledger) { check_requests(ledger); });
    check_nodes();
    loads_.each_ledger([&](const Ledger& ledger) { check_listed(ledger); });
    check_ranks();
  }

 private:
  struct Sums {
    uint64_t tokens = 0, blocks = 0, outputs = 0, requests = 0, prefilling = 0;
    double prompt = 0, output = 0;
  };

  static void require(bool holds, const std::string& what) {
    if (!holds) throw std::logic_error("kvd_core ledger invariant broken: " + what);
  }

  void check_requests(const Ledger& ledger) {
    const Requests& requests = ledger.requests();
    uint64_t count = 0, outputs = 0;
    RequestId older = kNone;
    for (RequestId id = requests.oldest(); id != kNone; id = requests[id].newer) {
      const Request& request = requests[id];
      require(++count <= requests.size(), "requests 1: the chain of admission ends");
      require(request.older == older, "requests 1: the chain of admission is linked both ways");
      require(requests.find(request.id()) == id, "requests 1: a request is found by its id");
      require(request.decayed <= request.outputs, "requests 2: decayed outputs are outputs");
      require(ledger.has(request.rank), "ledger: a request's rank is its ledger's");
      check_path(request);
      sum(request);
      outputs += request.outputs;
      older = id;
    }
    require(requests.is_spread(), "requests: ids are near their homes");
    require(count == requests.size(), "requests 1: every request is in the chain of admission");
    require(outputs == ledger.output_count(), "ledger: output blocks are counted");
  }

  void check_path(const Request& request) {
    uint64_t blocks = 0;
    if (request.end != kRoot) ++ends_[request.end];
    for (NodeId id = request.end; id != kRoot; id = trie_.node(id).parent) {
      blocks += trie_.node(id).len;
      ++passing_[{id, request.rank}];
      require(blocks <= request.blocks, "trie: a path leads to the root");
    }
    require(blocks == request.blocks, "trie: a request covers whole nodes");
  }

  void sum(const Request& request) {
    Sums& sums = sums_[request.rank];
    ++sums.requests;
    sums.tokens += request.prefilling ? request.tokens : 0;
    sums.prefilling += request.prefilling && request.tokens != 0;
    sums.outputs += request.outputs;
    sums.output += request.decayed * request.fraction + (request.outputs - request.decayed);
  }

  void check_nodes() {
    uint64_t nodes = 0, blocks = 0, rank_refs = 0;
    size_t heap = 0;
    trie_.each([&](NodeId id) {
      const Node& node = trie_.node(id);
      ++nodes;
      blocks += node.len;
      rank_refs += node.ranks.size();
      heap += node.ranks.bytes();
      require(node.len >= 1 && node.len <= Trie::kMaxRun, "trie 2: runs are bounded");
      require(node.first == node.hashes[0], "trie: the first hash is at hand");
      require(trie_.child(node.parent, node.first) == id, "trie 1: children are found");
      require(node.ends == ends_[id], "trie: ends are counted");
      ++children_[node.parent];
      children_xor_[node.parent] ^= id;
      check_rank_refs(id, node);
    });
    require(trie_.children_.is_spread(trie_), "trie: children are near their homes");
    require(nodes == trie_.node_count(), "trie: nodes are counted");
    require(blocks == trie_.block_count(), "trie: blocks are counted");
    require(rank_refs == trie_.rank_ref_count() && rank_refs == passing_.size(),
            "trie 3: every reference is some request's");
    require(heap == trie_.heap_, "trie: memory of references is counted");
    trie_.each([&](NodeId id) { check_shape(id, trie_.node(id)); });
  }

  void check_rank_refs(NodeId id, const Node& node) {
    require(node.ranks.size() >= 1, "trie 2: some request passes through a node");
    require(node.ranks.size() > 1 || node.ranks.bytes() == 0, "rank refs: one needs no buffer");
    const RankRef* last = nullptr;
    for (const RankRef& ref : node.ranks) {
      require(last == nullptr || last->rank < ref.rank, "rank refs: ranks ascend");
      require(ref.weight >= 0 && ref.weight <= 1, "rank refs: weights are fractions");
      const auto counted = passing_.find({id, ref.rank});
      require(counted != passing_.end() && counted->second == ref.requests,
              "trie 3: requests that pass are counted");
      Sums& sums = sums_[ref.rank];
      sums.blocks += node.len;
      sums.prompt += node.len * ref.weight;
      last = &ref;
    }
  }

  void check_shape(NodeId id, const Node& node) {
    require(node.children == children_[id] && node.child_xor == children_xor_[id],
            "trie 5: children are counted");
    if (node.children != 1 || node.ends != 0) return;
    const Node& child = trie_.node(node.child_xor);
    require(node.len + child.len > Trie::kMaxRun || !node.ranks.weighs_like(child.ranks),
            "trie 4: an only child is merged");
  }

  void check_listed(const Ledger& ledger) {
    const auto& order = ledger.order();
    require(!order.empty() && ledger.bit() != 0 && (seen_ & ledger.bit()) == 0,
            "ledger 2: a ledger with ranks takes part once");
    seen_ |= ledger.bit();
    uint64_t chained = 0;
    for (size_t i = 0; i < order.size(); ++i) {
      const RankId id = order[i].rank;
      require(i == 0 || order[i - 1] < order[i], "ledger 1: ranks are sorted");
      require(ledger.has(id), "ledger 1: a listed rank is the ledger's");
      const Rank& rank = loads_.rank(id);
      require(rank.worker_id == order[i].worker_id && rank.dp_rank == order[i].dp_rank,
              "ledger 1: ranks are listed by their names");
      require(ids_.emplace(std::make_pair(rank.worker_id, rank.dp_rank), id).first->second == id,
              "ledger 1: a rank has one id");
      owners_[id] |= ledger.bit();
      chained += check_chain(ledger, id);
    }
    require(chained == ledger.requests().size(), "requests 1: every request is in a rank's chain");
  }

  void check_ranks() {
    size_t taken = 0;
    for (RankId id = 0; id < loads_.rank_end(); ++id) {
      const Rank& rank = loads_.rank(id);
      require(rank.owners == owners_[id], "loads 3: every owner lists a rank");
      if (rank.owners == 0) continue;
      ++taken;
      check_sums(rank, sums_[id]);
    }
    require(taken + loads_.free_.size() == loads_.rank_end(), "loads 3: a rank is owned or free");
  }

  void check_sums(const Rank& rank, const Sums& sums) {
    require(rank.requests == sums.requests, "loads: a rank's requests are counted");
    require(rank.prefill_tokens == sums.tokens, "loads 1: prefill tokens are summed");
    require(rank.prefilling == sums.prefilling, "loads 1: requests with such tokens are counted");
    require(rank.blocks == sums.blocks, "loads 2: blocks are counted");
    require(rank.outputs == sums.outputs, "loads 2: output blocks are counted");
    require(near(rank.prompt, sums.prompt), "loads 2: weights of blocks are summed");
    require(near(rank.output, sums.output), "loads 2: weights of output blocks are summed");
    require(rank.blocks != 0 || rank.prompt == 0, "loads 2: no blocks weigh nothing");
    require(rank.outputs != 0 || rank.output == 0, "loads 2: no output blocks weigh nothing");
  }

  static bool near(double running, double anew) {
    return std::abs(running - anew) <= 1e-9 * (1 + std::abs(anew));
  }

  static uint64_t check_chain(const Ledger& ledger, RankId id) {
    uint64_t count = 0;
    RequestId before = kNone;
    for (RequestId at = ledger.chain(id).first; at != kNone; at = ledger.requests()[at].after) {
      const Request& request = ledger.requests()[at];
      require(request.rank == id && request.before == before && ++count <= ledger.requests().size(),
              "requests 1: a rank's chain has its requests");
      before = at;
    }
    require(ledger.chain(id).last == before, "requests 1: a rank's chain ends with its last");
    return count;
  }

  const Loads& loads_;
  const Trie& trie_;
  std::map<NodeId, uint32_t> ends_;
  std::map<NodeId, uint32_t> children_;
  std::map<NodeId, NodeId> children_xor_;
  std::map<std::pair<NodeId, RankId>, uint32_t> passing_;
  std::map<RankId, Sums> sums_;
  std::map<RankId, Owners> owners_;
  std::map<std::pair<uint64_t, uint32_t>, RankId> ids_;
  Owners seen_ = 0;
};

}  // namespace kvd::ledger
