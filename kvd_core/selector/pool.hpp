// The ranks that a selection chooses from, and what one match finds about each of them: one walk in
// the index, one in the ledger.
//
//   prompt ── local hashes ──> index ───> cached blocks by tier ─┐   find_cached
//          └─ rolling hashes > ledger ──> blocks in use, loads ──┤   selector/loads.pxd
//                                                                ▼
//   candidates   w1/0      w1/1      w7/0      w9/0          states, until the next match
//
// The code for the ledger is in Cython, as the ledger is, and so is all that follows from a match:
// what each candidate would cost (selector/cost.pxd), and which one is chosen
// (selector/choice.pxd).
//
// Predictions beside a rank's events count only once the loads are known: a rank that has far more
// requests than the others is not sent even more for blocks that it has yet to compute (`foresee`).
//
// The candidates are the ranks of one (model, tenant) that requests can be sent to, ascending by
// (worker, dp rank). Within a pool, a candidate only changes in whether it is heard and reachable;
// a rank that joins, leaves or changes its limits makes a new pool, which copies what stays. A rank
// of the index gets another id after a clear, so every match looks ids up in the workers.
//
// Invariants
//   1. a state is that of the last match; its loads are those found last;
//   2. a worker's candidates are those from the `first` of any of them to the `end` of that one.
//
// Costs: find_cached O(blocks + candidates + what Match takes); foresee O(blocks + candidates)
// where anything is predicted; remember and changed O(candidates); add_from 5 ns a candidate.
// Nothing is allocated in the steady state.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "index/match.hpp"
#include "selector/types.hpp"

namespace kvd::selector {

class Pool {
 public:
  static constexpr double kUnbounded = std::numeric_limits<double>::infinity();

  // Without an `index` (null), nothing counts as cached except what `predicted` says (null:
  // nothing). `predicted` is for candidates without events and names ranks as the ledger does; for
  // the others the index has predictions, under its own rank ids. Predictions beside events count
  // on ranks with at most `bound` times the mean requests plus 1.
  Pool(uint32_t block_size, const Index* index, Predicted* predicted, double bound)
      : index_(index), block_size_(block_size), own_(predicted), bound_(bound) {}

  // Candidates come in ascending order of (worker, dp rank).
  void add(Candidate candidate) {
    const auto at = static_cast<uint32_t>(candidates_.size());
    candidate.first = at;
    if (at != 0 && candidates_.back().worker_id == candidate.worker_id) {
      candidate.first = candidates_.back().first;
    }
    candidates_.push_back(candidate);
    candidates_[candidate.first].end = at + 1;
    states_.emplace_back();
    on_device_.push_back(0);
    overlaps_.push_back(0);
  }

  // Adds the candidates of whole workers, those at [begin, end) of another pool, which come behind
  // all that are here; they are heard and reachable.
  void add_from(const Pool& other, size_t begin, size_t end) {
    const size_t at = candidates_.size(), size = at + (end - begin);
    candidates_.insert(candidates_.end(), other.candidates_.begin() + static_cast<ptrdiff_t>(begin),
                       other.candidates_.begin() + static_cast<ptrdiff_t>(end));
    const auto shift = static_cast<uint32_t>(at - begin);  // modulo 2^32, as are the sums
    for (size_t i = at; i < size; ++i) {
      Candidate& each = candidates_[i];
      each.first += shift;
      if (each.first == i) each.end += shift;
      each.heard = each.reachable = true;
    }
    states_.resize(size);
    on_device_.resize(size);
    overlaps_.resize(size);
  }

  size_t size() const { return candidates_.size(); }
  uint32_t block_size() const { return block_size_; }
  double bound() const { return bound_; }
  const Candidate& candidate(size_t i) const { return candidates_[i]; }
  const CandidateState& state(size_t i) const { return states_[i]; }
  // The position of the first candidate not sorted before (worker, dp rank); size() if none.
  size_t position(uint64_t worker_id, uint32_t dp_rank) const {
    const auto before = [&](const Candidate& c) {
      return c.worker_id != worker_id ? c.worker_id < worker_id : c.dp_rank < dp_rank;
    };
    const auto at = std::partition_point(candidates_.begin(), candidates_.end(), before);
    return static_cast<size_t>(at - candidates_.begin());
  }
  // The candidates of the same worker are those from its `first` up to here.
  uint32_t end_of_worker(const Candidate& c) const { return candidates_[c.first].end; }
  // Predicts that a candidate caches the prompt, if predictions are kept; blocks that its events
  // have announced need none.
  void predict(size_t at, double now) {
    const Candidate& c = candidates_[at];
    Predicted* predicted = predictions_of(c);
    const uint32_t rank = rank_in_predictions(c);
    const size_t on_device = c.caches == nullptr ? 0 : on_device_[at];
    if (predicted != nullptr && rank != kNone) {
      predicted->add(rank, prompt_.used().data(), prompt_.used().size(), on_device, now);
    }
  }

  // Takes back what was predicted of the prompt at that time, as the candidate has refused it.
  void withdraw(size_t at, double then) {
    const Candidate& c = candidates_[at];
    Predicted* predicted = predictions_of(c);
    const uint32_t rank = rank_in_predictions(c);
    if (predicted != nullptr && rank != kNone)
      predicted->withdraw(rank, prompt_.used().data(), prompt_.used().size(), then);
  }

  Prompt& prompt() { return prompt_; }
  const Prompt& prompt() const { return prompt_; }

  // Sets whether anything that a candidate caches counts, from the next match on.
  void set_heard(size_t at, bool heard) { candidates_[at].heard = heard; }
  // Sets whether a candidate can be chosen.
  void set_reachable(size_t at, bool reachable) { candidates_[at].reachable = reachable; }

  // All of them, for the code that looks up their loads.
  const Candidate* candidates() const { return candidates_.data(); }
  CandidateState* states() { return states_.data(); }

  // Finds what all candidates cache of the prompt. Afterwards `scratch` is free for other use.
  void find_cached(Match& scratch) {
    if (index_ != nullptr) search(scratch);
    const bool found = index_ != nullptr && !scratch.touched().empty();
    for (size_t i = 0; i < candidates_.size(); ++i) {
      const Worker* worker = found ? caches(candidates_[i]) : nullptr;
      const RankId id = worker == nullptr ? kNone : worker->find(candidates_[i].dp_rank);
      const Match::Depth depth = id == kNone ? Match::Depth() : scratch.depth(id);
      states_[i].device = on_device_[i] = depth.device;
      states_[i].host = depth.host - depth.device;
      states_[i].disk = depth.disk - depth.host;
      overlaps_[i] = static_cast<int32_t>(depth.disk);
    }
  }

  // Adds the predicted blocks of all candidates. The loads must have been found.
  void foresee() {
    if (own_ != nullptr) foresee(*own_, false);
    if (index_ != nullptr && index_->predicted() != nullptr) foresee(*index_->predicted(), true);
  }

  // Remembers, for all candidates, the parts of the loads just found that decide whether one may be
  // chosen.
  void remember() {
    remembers_ = true;
    seen_.clear();
    for (const CandidateState& at : states_) seen_.emplace_back(at);
  }

  // Sets a byte for each candidate: 1 if the loads just found differ from those remembered, else 0.
  // False if none are remembered.
  bool changed(uint8_t* changed) const {
    if (!remembers_) return false;
    for (size_t i = 0; i < candidates_.size(); ++i) changed[i] = seen_[i].differs(states_[i]);
    return true;
  }

  // The most blocks of the prompt that any of the `n` candidates at `positions` caches. 0.2 ns each
  // if these are all candidates.
  uint32_t most_cached(const uint32_t* positions, size_t n) const {
    int32_t most = 0;
    if (n == overlaps_.size()) {
      for (const int32_t blocks : overlaps_) most = std::max(most, blocks);
    } else {
      for (size_t k = 0; k < n; ++k) most = std::max(most, overlaps_[positions[k]]);
    }
    return static_cast<uint32_t>(most);
  }

 private:
  static const Worker* caches(const Candidate& c) { return c.heard ? c.caches : nullptr; }

  Predicted* predictions_of(const Candidate& c) const {
    return c.caches == nullptr ? own_ : index_->predicted();
  }

  static uint32_t rank_in_predictions(const Candidate& c) {
    return c.caches == nullptr ? c.booked : c.caches->find(c.dp_rank);
  }

  // A rank's predicted blocks continue where those known by its events end, if it has events.
  void foresee(const Predicted& predicted, bool beside_events) {
    if (predicted.size() == 0) return;
    const std::vector<uint64_t>& locals = prompt_.used();
    predicted.chain(locals.data(), locals.size(), chained_);
    const double most = beside_events ? bound_ * (mean_requests() + 1) : kUnbounded;
    for (size_t i = 0; i < candidates_.size(); ++i) {
      const Candidate& c = candidates_[i];
      if (!c.heard || (c.caches != nullptr) != beside_events) continue;
      if (states_[i].requests > most) continue;
      const uint32_t id = rank_in_predictions(c);
      if (id == kNone) continue;
      CandidateState& at = states_[i];
      const uint32_t host = at.device + at.host, disk = host + at.disk;
      at.device = static_cast<uint32_t>(predicted.reach(id, chained_, at.device));
      at.host = std::max(host, at.device) - at.device;
      at.disk = std::max(disk, at.device + at.host) - (at.device + at.host);
      overlaps_[i] = static_cast<int32_t>(overlap_of(at));
    }
  }

  double mean_requests() const {
    uint64_t requests = 0;
    for (const CandidateState& at : states_) requests += at.requests;
    return static_cast<double>(requests) / static_cast<double>(states_.size());
  }

  void search(Match& match) const {
    match.reset(*index_);
    if (prompt_.is_salted) {
      match.add(*index_, prompt_.salted.data(), prompt_.salted.size(), Match::SaltFilter::kSalted);
    }
    match.add(*index_, prompt_.locals.data(), prompt_.locals.size(),
              prompt_.is_salted ? Match::SaltFilter::kUnsalted : Match::SaltFilter::kAll);
  }

  const Index* index_;
  uint32_t block_size_;
  Predicted* own_;  // for candidates without events; null: none are kept
  double bound_;

  struct Seen {
    explicit Seen(const CandidateState& at)
        : prefill_tokens(at.prefill_tokens), decode_blocks(at.decode_blocks), present(at.present) {}
    bool differs(const CandidateState& at) const {
      return prefill_tokens != at.prefill_tokens || decode_blocks != at.decode_blocks ||
             present != at.present;
    }

    uint64_t prefill_tokens;
    uint64_t decode_blocks;
    bool present;
  };

  Prompt prompt_;
  std::vector<Candidate> candidates_;
  std::vector<CandidateState> states_;  // one a candidate
  std::vector<uint32_t> on_device_;     // blocks on its device by its events, one a candidate
  std::vector<int32_t> overlaps_;       // one a candidate; signed, for SSE2 compares no unsigned
  std::vector<uint64_t> chained_;       // scratch of `foresee`
  std::vector<Seen> seen_;              // one a candidate, once it `remembers_`
  bool remembers_ = false;
};

}  // namespace kvd::selector
