// The parts of a selection: the ranks to choose from, what a match finds about each, the prompt.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "base/arena.hpp"
#include "base/hash.hpp"
#include "ledger/bounds.hpp"
#include "ledger/rank_refs.hpp"
#include "index/worker.hpp"

namespace kvd::selector {

// Tokens of a prompt: as many as the ledger accepts for one request.
constexpr uint64_t kMaxIslTokens = ledger::kMaxTokens;
// Hashes for which memory is kept between prompts: 512 KiB, prompts of a million tokens in blocks
// of 16. The memory of a longer prompt is given back with the next one.
constexpr size_t kKeptHashes = 1u << 16;

// A rank that requests can be sent to.
struct Candidate {
  uint64_t worker_id;
  uint32_t dp_rank;
  ledger::LoadedRankId booked;  // its rank in the ledger
  const Worker* caches;         // the worker whose blocks it can use; null: none
  double max_batch_tokens;      // 0: unbounded
  double total_blocks;          // below 0: unknown
  uint32_t first;               // the first candidate of its worker
  uint32_t end;                 // set in that one alone: behind the last of the worker
  bool heard = true;            // false: its events do not arrive, so its blocks may be gone
  bool reachable = true;        // false: it cannot be chosen
};

// What a match found about a candidate, in blocks unless said otherwise.
struct CandidateState {
  uint32_t device = 0;  // blocks of the prompt that it caches
  uint32_t host = 0;    // further ones behind those on the device
  uint32_t disk = 0;    // further ones behind those, on disk and external
  uint32_t live = 0;    // blocks of the prompt that its requests have in use
  uint64_t prefill_tokens = 0;
  uint64_t decode_blocks = 0;
  uint32_t requests = 0;
  bool present = false;    // false: it has left the ledger or is unreachable; cannot be chosen
  uint32_t decoding : 24;  // those of `requests` with nothing left to prefill

  CandidateState() : decoding(0) {}
};
// A pass over the candidates takes time in proportion to these bytes.
static_assert(sizeof(CandidateState) == 40);
// `decoding` is wide enough for the requests of all ledgers together.
static_assert(uint64_t{ledger::kMaxLedgers} * ledger::kMaxRequests < 1u << 24);

// Blocks of the prompt that are cached on any tier.
inline uint32_t overlap_of(const CandidateState& at) { return at.device + at.host + at.disk; }

// A prompt in the forms that the index and the ledger need.
struct Prompt {
  std::vector<uint64_t> locals;
  std::vector<uint64_t> salted;  // local hashes with the prompt's salt, if `is_salted`
  std::vector<uint64_t> sequence;
  uint64_t isl_tokens = 0;
  bool is_salted = false;
  bool is_adapted = false;
  bool by_tokens = false;    // it came as one or more tokens
  uint32_t first_token = 0;  // the first of these

  void take(const Prompt& other) {
    copy(other.locals.data(), other.locals.size(), locals);
    copy(other.salted.data(), other.salted.size(), salted);
    copy(other.sequence.data(), other.sequence.size(), sequence);
    isl_tokens = other.isl_tokens;
    is_salted = other.is_salted;
    is_adapted = other.is_adapted;
    by_tokens = other.by_tokens;
    first_token = other.first_token;
  }

  void take_hashes(const uint64_t* local, size_t n_local, const uint64_t* rolling, size_t n_rolling,
                   uint64_t isl) {
    copy(local, n_local, locals);
    copy(rolling, n_rolling, sequence);
    isl_tokens = isl;
    is_salted = is_adapted = by_tokens = false;
  }

  // `eagle` hashes blocks as EAGLE engines cache them: as pairs, each token with the one behind it.
  void take_tokens(const uint32_t* tokens, size_t n, uint32_t block_size, std::string_view lora,
                   std::string_view salt, bool eagle) {
    const size_t blocks = (eagle && n != 0 ? n - 1 : n) / block_size;
    const auto hash = eagle ? eagle_hashes : local_hashes;
    isl_tokens = n;
    is_salted = !salt.empty();
    is_adapted = !lora.empty();
    by_tokens = n != 0;
    first_token = by_tokens ? tokens[0] : 0;
    fit(locals, blocks);
    hash(tokens, blocks, block_size, local_hash_seed(lora, {}), locals.data());
    fit(salted, is_salted ? blocks : 0);
    hash(tokens, salted.size(), block_size, local_hash_seed(lora, salt), salted.data());
    fit(sequence, blocks);
    sequence_hashes((is_salted ? salted : locals).data(), blocks, sequence.data());
  }

  // The local hashes of the blocks that a rank will cache.
  const std::vector<uint64_t>& used() const { return is_salted ? salted : locals; }

  // Makes the prompt share no block in use with any other; `seed` is a random number.
  void make_unique(uint64_t seed) {
    for (uint64_t& hash : sequence) hash = mix64(seed++);
  }

 private:
  static void fit(std::vector<uint64_t>& hashes, size_t n) {
    if (hashes.capacity() > kKeptHashes && n <= kKeptHashes) std::vector<uint64_t>().swap(hashes);
    hashes.resize(n);
  }

  static void copy(const uint64_t* from, size_t n, std::vector<uint64_t>& to) {
    fit(to, n);
    if (n != 0) std::memcpy(to.data(), from, n * sizeof *from);
  }
};

}  // namespace kvd::selector
