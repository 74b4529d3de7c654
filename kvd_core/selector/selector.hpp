// Which rank should serve a prompt: one walk in the index, one in the ledger, one pass over the
// candidates.
//
//   prompt ── local hashes ──> index ───> cached blocks by tier ─┐
//          └─ rolling hashes > ledger ──> blocks in use, loads ──┤   look
//                                                                ▼
//   candidates   w1/0      w1/1      w7/0      w9/0          standings, until the next look
//   eligible      yes       yes       no        yes             the caller's mask
//   overloaded    no        no        .         yes             busy thresholds: left out
//   busy          yes       no        .         .               all of them: BUSY, the caller waits
//   cost         18.0      11.5       .         .               choose
//
// The candidates are the ranks of one (model, tenant) that requests can be sent to, ascending by
// (worker, dp rank). A pool does not change but for the turns of ROUND_ROBIN, and for who is heard
// and reachable; who joins, leaves or changes its limits makes a new one. A rank of the index has another id after a clear, so ids are
// looked up in the workers each time.
//
// The rules, with what they follow:
//   - once one candidate is not busy, busy ones are chosen too if they cost least: the threshold
//     says when to wait, not where to go (Dynamo 1.6.1, observed);
//   - a busy threshold takes a rank out by itself, whatever the other ranks of its worker do: each
//     has its own cache and batch (Dynamo takes out workers, when all their ranks are over it);
//   - temperature T: chances follow exp(-(cost - lowest) / (highest - lowest) / T); 0 takes the
//     lowest; equal ones have equal chances;
//   - the least loaded rank is that with the fewest requests (Dynamo: connections);
//   - modes that do not weigh the prompt leave busy ranks out, as long as there are others: who has
//     waited would otherwise be sent to one that still is busy;
//   - turns go by when a rank was last chosen, so those are fair whatever masks there are between
//     them, and they outlive a pool (`take_turns`); who is new comes first; each line has its own;
//   - factors multiply costs, by what the prompt's sender prefers.
//
// Invariants
//   1. a standing is that of the last look, its loads are those of the last look or `refusal`;
//   2. the candidates of a worker are those from `first` of any of them to `end` of that one.
//
// Costs: look O(blocks + candidates + what Match and depths take); choose O(candidates), with a
// temperature one exp a candidate; refusal, remember and changed O(candidates). Nothing is allocated
// in the steady state.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "ledger/ledger.hpp"
#include "index/match.hpp"
#include "selector/cost.hpp"
#include "selector/types.hpp"

namespace kvd::selector {

class Pool {
 public:
  // `index` may be null: nobody caches anything.
  Pool(uint32_t block_size, const Index* index, const ledger::Ledger& ledger)
      : index_(index), ledger_(ledger), block_size_(block_size) {}

  // Candidates come in ascending order of (worker, dp rank).
  void add(Candidate candidate) {
    const auto at = static_cast<uint32_t>(candidates_.size());
    candidate.first = at;
    if (at != 0 && candidates_.back().worker_id == candidate.worker_id) {
      candidate.first = candidates_.back().first;
    }
    candidates_.push_back(candidate);
    candidates_[candidate.first].end = at + 1;
    standings_.emplace_back();
    overlaps_.push_back(0);
    turns_.emplace_back();
  }

  size_t size() const { return candidates_.size(); }
  uint32_t block_size() const { return block_size_; }
  const Candidate& candidate(size_t i) const { return candidates_[i]; }
  const CandidateState& standing(size_t i) const { return standings_[i]; }
  // Of the first candidate that does not sort before (worker, dp rank); size() if all do.
  size_t position(uint64_t worker_id, uint32_t dp_rank) const {
    const auto before = [&](const Candidate& c) {
      return c.worker_id != worker_id ? c.worker_id < worker_id : c.dp_rank < dp_rank;
    };
    const auto at = std::partition_point(candidates_.begin(), candidates_.end(), before);
    return static_cast<size_t>(at - candidates_.begin());
  }
  // The candidates of the same worker are those from its `first` up to here.
  uint32_t end_of_worker(const Candidate& c) const { return candidates_[c.first].end; }
  Prompt& prompt() { return prompt_; }
  const Prompt& prompt() const { return prompt_; }
  Scale scale(const Settings& settings) const { return Scale(settings, prompt_, block_size_); }

  // From the next look on nothing that a candidate caches counts, or it does again.
  void set_heard(size_t at, bool heard) { candidates_[at].heard = heard; }
  // A candidate cannot be chosen, or can again.
  void set_reachable(size_t at, bool reachable) { candidates_[at].reachable = reachable; }

  // The last choice has not come to pass: whoever has lost their turn has it again.
  void take_back() {
    if (last_.at < turns_.size()) turns_[last_.at][last_.line] = last_.before;
  }

  // Goes on with the turns of a pool that this one replaces.
  void take_turns(const Pool& former) {
    turn_ = former.turn_;
    for (size_t i = 0; i < candidates_.size(); ++i) {
      const Candidate& c = candidates_[i];
      const size_t at = former.position(c.worker_id, c.dp_rank);
      if (at == former.size()) continue;
      const Candidate& same = former.candidates_[at];
      if (same.worker_id == c.worker_id && same.dp_rank == c.dp_rank) turns_[i] = former.turns_[at];
    }
  }

  // Finds out how all candidates stand to the prompt; `scratch` is free to be used by others
  // afterwards.
  void look(Match& scratch) {
    find_cached(scratch);
    find_live();
    find_loads();
  }

  // Whether one may be chosen now: 0 or a Refusal, for the loads of this moment.
  int64_t refusal(const Settings& settings, const uint8_t* mask) {
    find_loads();
    return find_open(scale(settings), mask);
  }

  // Remembers what decides about `refusal` at this moment, of all candidates.
  void remember() {
    find_loads();
    remembers_ = true;
    seen_.clear();
    for (const CandidateState& at : standings_) seen_.emplace_back(at);
  }

  // Says of each candidate, by 1 or 0, whether that is other than what was remembered. False where
  // nothing was.
  bool changed(uint8_t* changed) {
    if (!remembers_) return false;
    find_loads();
    for (size_t i = 0; i < candidates_.size(); ++i) changed[i] = seen_[i].differs(standings_[i]);
    return true;
  }

  // Blocks of the prompt cached by whoever caches most of those that the last `choose` or `refusal`
  // found open. O(candidates), 0.2 ns each where all are.
  uint32_t best() const {
    int32_t most = 0;
    if (open_.size() == overlaps_.size()) {
      for (const int32_t blocks : overlaps_) most = std::max(most, blocks);
    } else {
      for (const uint32_t i : open_) most = std::max(most, overlaps_[i]);
    }
    return static_cast<uint32_t>(most);
  }

  // The fewest tokens that a candidate of the mask would have to prefill; all tokens without any.
  uint64_t least_effective_tokens(const Settings& settings, const uint8_t* mask) const {
    const Scale scale = this->scale(settings);
    uint64_t least = prompt_.isl_tokens;
    for (size_t i = 0; i < candidates_.size(); ++i) {
      if (mask != nullptr && mask[i] == 0) continue;
      least = std::min(least, scale.effective_tokens(standings_[i]));
    }
    return least;
  }

  // What the terms of a candidate need of the others: the fewest prefill tokens of those that may be
  // chosen.
  uint64_t least_prefill(const Settings& settings, const uint8_t* mask) {
    const Scale scale = this->scale(settings);
    if (scale.decays()) find_open(scale, mask);
    return least_prefill(scale);
  }

  // The index of a candidate or a Refusal. `mask` has a byte for each candidate, 0 for those that
  // must not be chosen; null for none. `random` is uniform. `factors` has a number for each
  // candidate that its cost is multiplied with; null for 1.
  int64_t choose(const Settings& settings, const uint8_t* mask, uint64_t random,
                 const double* factors = nullptr) {
    const Scale scale = this->scale(settings);
    last_ = Turn();
    const int64_t refusal = find_open(scale, mask);
    if (refusal < 0) return refusal;
    switch (settings.mode) {
      case ROUND_ROBIN:
        return next_in_turn(settings.line);
      case RANDOM:
        return open_[below(open_.size(), random)];
      case LEAST_LOADED:
        return lowest([&](uint32_t i) { return standings_[i].requests; }, random);
      case KV:
      case DIRECT:
        break;
    }
    if (!scale.decays()) {
      const double credit = scale.device_credit();
      const auto cost = [&](uint32_t i) { return scale.terms(standings_[i], credit).cost; };
      return by_cost(cost, settings.temperature, random, factors);
    }
    const uint64_t least = least_prefill(scale);
    const auto cost = [&](uint32_t i) {
      return scale.terms(standings_[i], scale.device_credit(standings_[i], least)).cost;
    };
    return by_cost(cost, settings.temperature, random, factors);
  }

 private:
  void find_cached(Match& match) {
    if (index_ != nullptr) search(match);
    const bool found = index_ != nullptr && !match.touched().empty();
    for (size_t i = 0; i < candidates_.size(); ++i) {
      const Worker* worker = found ? caches(candidates_[i]) : nullptr;
      const RankId id = worker == nullptr ? kNone : worker->find(candidates_[i].dp_rank);
      const Match::Depth depth = id == kNone ? Match::Depth() : match.depth(id);
      standings_[i].device = depth.device;
      standings_[i].host = depth.host - depth.device;
      standings_[i].disk = depth.disk - depth.host;
      overlaps_[i] = static_cast<int32_t>(depth.disk);
    }
    if (index_ != nullptr && index_->predicted() != nullptr) foresee(*index_->predicted());
  }

  static const Worker* caches(const Candidate& c) { return c.heard ? c.caches : nullptr; }

  // What a rank is thought to cache goes on where its events end.
  void foresee(const Predicted& predicted) {
    if (predicted.size() == 0) return;
    const std::vector<uint64_t>& locals = prompt_.used();
    predicted.chain(locals.data(), locals.size(), chained_);
    for (size_t i = 0; i < candidates_.size(); ++i) {
      const Worker* worker = caches(candidates_[i]);
      const RankId id = worker == nullptr ? kNone : worker->find(candidates_[i].dp_rank);
      if (id == kNone) continue;
      CandidateState& at = standings_[i];
      const uint32_t host = at.device + at.host, disk = host + at.disk;
      at.device = static_cast<uint32_t>(predicted.reach(id, chained_, at.device));
      at.host = std::max(host, at.device) - at.device;
      at.disk = std::max(disk, at.device + at.host) - (at.device + at.host);
      overlaps_[i] = static_cast<int32_t>(overlap_of(at));
    }
  }

  void search(Match& match) const {
    match.reset(*index_);
    if (prompt_.is_salted) {
      match.add(*index_, prompt_.salted.data(), prompt_.salted.size(), Match::Only::kSalted);
    }
    match.add(*index_, prompt_.locals.data(), prompt_.locals.size(),
              prompt_.is_salted ? Match::Only::kUnsalted : Match::Only::kAll);
  }

  void find_live() {
    const ledger::Loads& loads = ledger_.loads();
    depths_.resize(loads.rank_end());
    loads.depths(prompt_.sequence.data(), prompt_.sequence.size(), depths_.data());
    for (size_t i = 0; i < candidates_.size(); ++i) {
      const ledger::RankId rank = candidates_[i].booked;
      standings_[i].live = rank < depths_.size() ? depths_[rank] : 0;
    }
  }

  void find_loads() {
    const ledger::Loads& loads = ledger_.loads();
    const ledger::Owners mine = ledger_.bit();
    for (size_t i = 0; i < candidates_.size(); ++i) {
      const Candidate& candidate = candidates_[i];
      CandidateState& standing = standings_[i];
      standing.present = false;
      if (!loads.is_of(candidate.booked, mine)) continue;
      const ledger::Rank& rank = loads.rank(candidate.booked);
      standing.present = candidate.reachable && rank.worker_id == candidate.worker_id &&
                         rank.dp_rank == candidate.dp_rank;
      standing.prefill_tokens = rank.prefill_tokens;
      standing.decode_blocks = rank.decode_blocks();
      standing.requests = rank.requests;
    }
  }

  // Lists the candidates that may be chosen in `open_`; 0, or the Refusal when none may.
  int64_t find_open(const Scale& scale, const uint8_t* mask) {
    open_.clear();
    idle_.clear();
    const bool blind = scale.is_blind();
    bool all_busy = true, any = false;
    for (uint32_t i = 0; i < candidates_.size(); ++i) {
      if ((mask != nullptr && mask[i] == 0) || !standings_[i].present) continue;
      any = true;
      if (scale.is_overloaded(candidates_[i], standings_[i])) continue;
      open_.push_back(i);
      if (blind) {
        if (!scale.is_busy(candidates_[i], standings_[i])) idle_.push_back(i);
      } else {
        all_busy = all_busy && scale.is_busy(candidates_[i], standings_[i]);
      }
    }
    if (!any) return NONE;
    if (open_.empty()) return OVERLOADED;
    if (blind ? idle_.empty() : all_busy) return BUSY;
    if (blind) open_.swap(idle_);
    return 0;
  }

  // Of those that are open, if it is of account: O(candidates).
  uint64_t least_prefill(const Scale& scale) const {
    uint64_t least = UINT64_MAX;
    if (!scale.decays()) return least;
    for (const uint32_t i : open_) least = std::min(least, standings_[i].prefill_tokens);
    return least;
  }

  template <class Cost>
  int64_t by_cost(Cost&& cost, double temperature, uint64_t random, const double* factors) {
    if (factors == nullptr && temperature == 0) return lowest(cost, random);
    weights_.clear();
    for (const uint32_t i : open_)
      weights_.push_back(cost(i) * (factors == nullptr ? 1 : factors[i]));
    return temperature == 0 ? lowest_weight(random) : drawn(temperature, random);
  }

  int64_t next_in_turn(int line) {
    uint32_t chosen = open_.front();
    for (const uint32_t i : open_) {
      if (turns_[i][line] < turns_[chosen][line]) chosen = i;
    }
    last_ = Turn{chosen, line, turns_[chosen][line]};
    turns_[chosen][line] = ++turn_;
    return chosen;
  }

  // Uniform in [0, n): the error of the multiplication is n / 2^64.
  static size_t below(size_t n, uint64_t random) {
    return static_cast<size_t>(static_cast<unsigned __int128>(random) * n >> 64);
  }

  // Of the open candidates with the lowest value, any.
  template <class Value>
  int64_t lowest(Value&& value, uint64_t random) {
    ties_.clear();
    auto best = value(open_.front());
    for (const uint32_t i : open_) {
      const auto mine = value(i);
      if (mine > best) continue;
      if (mine < best) {
        best = mine;
        ties_.clear();
      }
      ties_.push_back(i);
    }
    return ties_[below(ties_.size(), random)];
  }

  // The same by `weights_`, which has one for each open candidate.
  int64_t lowest_weight(uint64_t random) {
    ties_.clear();
    const double best = *std::min_element(weights_.begin(), weights_.end());
    for (size_t i = 0; i < open_.size(); ++i) {
      if (weights_[i] == best) ties_.push_back(open_[i]);
    }
    return ties_[below(ties_.size(), random)];
  }

  int64_t drawn(double temperature, uint64_t random) {
    const auto [least, most] = std::minmax_element(weights_.begin(), weights_.end());
    const double lo = *least, hi = *most;
    if (lo == hi) return open_[below(open_.size(), random)];
    double sum = 0;
    for (double& weight : weights_) {
      weight = std::exp(-((weight - lo) / (hi - lo) / temperature));
      sum += weight;
    }
    const double target = std::ldexp(static_cast<double>(random >> 11), -53) * sum;
    double passed = 0;
    size_t chosen = 0;
    for (size_t i = 0; i < weights_.size(); ++i) {
      if (weights_[i] == 0) continue;
      chosen = i;
      passed += weights_[i];
      if (passed > target) break;
    }
    return open_[chosen];
  }

  using Lines = std::array<uint64_t, kLines>;

  const Index* index_;
  const ledger::Ledger& ledger_;
  uint32_t block_size_;
  struct Turn {
    size_t at = SIZE_MAX;  // a candidate; behind all of them: nobody
    int line = 0;
    uint64_t before = 0;  // its turn until then
  };

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

  uint64_t turn_ = 0;  // choices in ROUND_ROBIN, here and in former pools
  Turn last_;          // what `choose` has made of it
  Prompt prompt_;
  std::vector<Candidate> candidates_;
  std::vector<CandidateState> standings_;  // one a candidate
  std::vector<int32_t> overlaps_;          // one a candidate, signed: SSE2 compares no others
  std::vector<uint32_t> depths_;           // by rank of the ledger
  std::vector<uint64_t> chained_;          // scratch of `foresee`
  std::vector<Lines> turns_;               // one a candidate: when it was last chosen, 0 is never
  std::vector<Seen> seen_;                 // one a candidate, once it `remembers_`
  bool remembers_ = false;
  std::vector<uint32_t> open_;  // scratch of `choose`
  std::vector<uint32_t> idle_;
  std::vector<uint32_t> ties_;
  std::vector<double> weights_;
};

}  // namespace kvd::selector
