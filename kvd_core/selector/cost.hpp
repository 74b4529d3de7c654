// What it would cost a candidate to serve the prompt, in blocks; lower is better.
//
//   prompt     [ device | host | disk | to compute ............. ]  isl tokens
//                1.0      0.75   0.25                               credits
//   cached     round(block size x (device + 0.75 host + 0.25 disk))  tokens
//   raw        (tokens being prefilled + isl, at least cached) / block size
//   prefill    weight x max(0, raw - (credit x device + 0.75 host + 0.25 disk))
//   decode     blocks in use + blocks of the prompt that are not in use already
//   cost       prefill + decode + active request weight x requests of the rank, by default 0
//
// Without prefill tracking there is no prefill term; the credit is then taken off the decode term,
// which does not fall below 0, unless the weight or the device credit is 0.
//
// The device credit is a preference of the cost only: what a rank will not have to compute, and so
// the tokens that are booked, does not follow it. Weight 0 makes the device credit 0.
//
// With a decay above 0, and prefill tracking, the device credit of a rank is
//
//   credit x (1 / (1 + decay x (((its prefill tokens - least) / block size) / blocks of the prompt)))
//
// with the least prefill tokens of those that may be chosen, and a last block that is not full
// counted. Credits of the tiers below do not decay.
//
// With `last_token` a prompt finds cached what lies before the block of its last token: engines compute
// that token to have something to go on from, and with it all of its block. So a prompt of whole
// blocks that is cached to its end has one block to compute.
//
// Invariant: each operation is one of IEEE doubles in the order written here, integers are summed
// before they become doubles: so costs are equal to the last bit on every machine, and to those of
// Dynamo 1.6.1 (the core is built with -ffp-contract=off).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "selector/types.hpp"

namespace kvd::selector {

struct Terms {
  uint64_t cached_tokens;     // weighed by tier and rounded, halves away from zero
  uint64_t effective_tokens;  // to prefill
  double raw;                 // blocks to prefill before credits, with those being prefilled
  double credit;
  double prefill;
  double decode;
  double cost;
};

// Values stay below 2^63, and signed conversion is one instruction.
inline double real(uint64_t value) { return static_cast<double>(static_cast<int64_t>(value)); }

class Scale {
 public:
  Scale(const Settings& settings, const Prompt& prompt, uint32_t block_size)
      : s_(settings),
        block_size_(block_size),
        isl_(prompt.isl_tokens),
        blocks_(prompt.sequence.size()),
        usable_(settings.last_token ? (std::max<uint64_t>(isl_, 1) - 1) / block_size : UINT64_MAX),
        device_credit_(settings.overlap_weight == 0 ? 0 : settings.device_credit),
        rejects_(std::min({settings.decode_blocks_threshold, settings.prefill_tokens_threshold,
                           settings.prefill_tokens_threshold_frac}) != Settings::kOff &&
                 settings.mode != DIRECT) {}

  uint64_t cached_tokens(const CandidateState& c) const { return tokens(cached(c)); }

  uint64_t effective_tokens(const CandidateState& c) const {
    const uint64_t cached = cached_tokens(c);
    return isl_ > cached ? isl_ - cached : 0;
  }

  // Blocks in use with the prompt on top.
  uint64_t decode_blocks(const CandidateState& c) const {
    return c.decode_blocks + (blocks_ - c.live);
  }

  // The same, counting a last block that is not full.
  uint64_t occupied_blocks(const CandidateState& c) const {
    return c.decode_blocks + (std::max(blocks_, started()) - c.live);
  }

  // The device credit of a rank depends on what others prefill.
  bool decays() const { return s_.credit_decay != 0 && s_.track_prefill; }

  // Of all ranks, unless it decays.
  double device_credit() const { return device_credit_; }

  // `least`: the fewest prefill tokens of those that may be chosen; UINT64_MAX unless it decays.
  double device_credit(const CandidateState& c, uint64_t least) const {
    if (c.prefill_tokens <= least) return device_credit_;
    const double excess = real(c.prefill_tokens - least) / real(block_size_);
    return device_credit_ *
           (1 / (1 + s_.credit_decay * (excess / real(std::max<uint64_t>(started(), 1)))));
  }

  Terms terms(const CandidateState& c, double device_credit) const {
    Terms t;
    const Cached used = cached(c);
    t.cached_tokens = tokens(used);
    t.effective_tokens = isl_ > t.cached_tokens ? isl_ - t.cached_tokens : 0;
    t.credit = device_credit * real(used.device) + s_.host_credit * real(used.host) +
               s_.disk_credit * real(used.disk);
    t.raw = 0;
    t.prefill = 0;
    t.decode = s_.track_active_blocks ? real(decode_blocks(c)) : 0;
    if (s_.track_prefill) {
      t.raw = real(c.prefill_tokens + t.effective_tokens + t.cached_tokens) / real(block_size_);
      t.prefill = s_.overlap_weight * std::max(0.0, t.raw - t.credit);
    } else if (device_credit_ > 0) {
      t.decode = std::max(0.0, t.decode - t.credit);
    }
    t.cost = t.prefill + t.decode;
    if (s_.active_request_weight != 0) t.cost += s_.active_request_weight * real(c.requests);
    return t;
  }

  // The mode does not look at the load of the prompt's candidates in tokens.
  bool is_blind() const { return s_.mode != KV && s_.mode != DIRECT; }

  // New work waits while all candidates are.
  bool is_busy(const Candidate& c, const CandidateState& at) const {
    return s_.mode != DIRECT && exceeds(at.prefill_tokens, s_.queue_threshold, c.max_batch_tokens);
  }

  // Answers say whether its blocks in use, with the prompt on top, are more than the threshold.
  bool tells_decode_busy(const Candidate& c) const {
    return s_.decode_busy_threshold != Settings::kOff && c.total_blocks > 0;
  }
  bool is_decode_busy(const Candidate& c, const CandidateState& at) const {
    return exceeds(occupied_blocks(at), s_.decode_busy_threshold, c.total_blocks);
  }

  // It gets no new work.
  bool is_overloaded(const Candidate& c, const CandidateState& at) const {
    return rejects_ &&
           (real(at.prefill_tokens) > s_.prefill_tokens_threshold ||
            exceeds(at.prefill_tokens, s_.prefill_tokens_threshold_frac, c.max_batch_tokens) ||
            exceeds(at.decode_blocks, s_.decode_blocks_threshold, c.total_blocks));
  }

 private:
  struct Cached {
    uint32_t device;
    uint32_t host;
    uint32_t disk;
  };

  // What of the cached blocks the prompt can use.
  Cached cached(const CandidateState& c) const {
    if (uint64_t{c.device} + c.host + c.disk <= usable_) return {c.device, c.host, c.disk};
    const auto device = static_cast<uint32_t>(std::min<uint64_t>(c.device, usable_));
    const auto host = static_cast<uint32_t>(std::min<uint64_t>(c.host, usable_ - device));
    return {device, host, static_cast<uint32_t>(usable_ - device - host)};
  }

  // Blocks of the prompt, with a last one that is not full.
  uint64_t started() const { return isl_ / block_size_ + (isl_ % block_size_ != 0); }

  uint64_t tokens(const Cached& c) const {
    if ((c.host | c.disk) == 0) return uint64_t{c.device} * block_size_;
    const double blocks =
        real(c.device) + s_.host_credit * real(c.host) + s_.disk_credit * real(c.disk);
    return static_cast<uint64_t>(std::round(blocks * real(block_size_)));
  }

  static bool exceeds(uint64_t value, double threshold, double capacity) {
    return capacity > 0 && real(value) > threshold * capacity;
  }

  const Settings& s_;
  uint32_t block_size_;
  uint64_t isl_;
  uint64_t blocks_;
  uint64_t usable_;  // blocks
  double device_credit_;
  bool rejects_;  // there is a busy threshold, and it is heeded
};

}  // namespace kvd::selector
