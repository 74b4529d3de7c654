// Hashes of blocks: XXH3-64, exactly as Dynamo and other consumers of engines' events compute them.
//
//   block i:   tokens[i*B .. i*B+B)  as u32 LE ──XXH3(seed)──▶ local hash b(i)
//   EAGLE:     tokens[i*B .. i*B+B]  (one more, windows overlap by one token)
//   with mm:   tokens ‖ mm hashes as u64 LE, ascending ──XXH3(seed)──▶ b(i)
//   sequence:  s(0) = b(0);  s(i) = XXH3(LE s(i-1) ‖ LE b(i), 1337)
//   seed:      1337 + (lora ? XXH3(lora, 0) : 0) + (salt ? XXH3(salt, 1) : 0)   mod 2^64
//
// Invariants
//  1. Nothing here allocates except local_hash_mm for blocks above its stack buffer.
//  2. Whole blocks only: the caller passes their number; a partial tail is never hashed.
//  3. Without LoRA and salt the seed is kBaseSeed, so unsalted blocks of a base model share hashes.
// Cost: one XXH3 call a block (about 10 ns for 16 tokens); a sequence hash the same.
#pragma once

#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL
#endif
#include <xxhash.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

namespace kvd {

// Tokens and hashes are fed to XXH3 straight from memory as little-endian integers.
#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "kvd hashes tokens from memory and is written for little-endian machines"
#endif

constexpr uint64_t kBaseSeed = 1337;  // for local and sequence hashes; Dynamo's constant
constexpr uint64_t kLoraSeed = 0;
constexpr uint64_t kSaltSeed = 1;

inline uint64_t xxh3(const void* data, size_t size, uint64_t seed) noexcept {
  return XXH3_64bits_withSeed(data, size, seed);
}

inline uint64_t lora_term(std::string_view name) noexcept {
  return name.empty() ? 0 : xxh3(name.data(), name.size(), kLoraSeed);
}

inline uint64_t salt_term(std::string_view salt) noexcept {
  return salt.empty() ? 0 : xxh3(salt.data(), salt.size(), kSaltSeed);
}

inline uint64_t local_hash_seed(std::string_view lora_name, std::string_view salt) noexcept {
  return kBaseSeed + lora_term(lora_name) + salt_term(salt);
}

// Hashes n windows of `window` tokens, each beginning `stride` tokens after the previous one.
// The caller guarantees (n - 1) * stride + window tokens.
inline void window_hashes(const uint32_t* tokens, size_t n, size_t window, size_t stride,
                          uint64_t seed, uint64_t* out) noexcept {
  const size_t bytes = window * sizeof(uint32_t);
  for (size_t i = 0; i < n; ++i) out[i] = xxh3(tokens + i * stride, bytes, seed);
}

inline void local_hashes(const uint32_t* tokens, size_t n_blocks, size_t block_size, uint64_t seed,
                         uint64_t* out) noexcept {
  window_hashes(tokens, n_blocks, block_size, block_size, seed, out);
}

// EAGLE: a block covers block_size pairs, that is block_size + 1 raw tokens.
inline void eagle_hashes(const uint32_t* tokens, size_t n_blocks, size_t block_size, uint64_t seed,
                         uint64_t* out) noexcept {
  window_hashes(tokens, n_blocks, block_size + 1, block_size, seed, out);
}

// Hashes one block that holds n multimodal objects; mm must be ascending.
// `tokens` may be an EAGLE window; then pass block_size + 1.
inline uint64_t local_hash_mm(const uint32_t* tokens, size_t block_size, const uint64_t* mm,
                              size_t n, uint64_t seed) {
  constexpr size_t kStackBytes = 4096;  // 960 tokens and 32 objects: no engine's block is larger
  const size_t token_bytes = block_size * sizeof(uint32_t);
  const size_t mm_bytes = n * sizeof(uint64_t);
  const size_t total = token_bytes + mm_bytes;
  uint8_t stack[kStackBytes] = {};
  std::vector<uint8_t> heap;
  uint8_t* buffer = stack;
  if (total > kStackBytes) {
    heap.resize(total);
    buffer = heap.data();
  }
  if (token_bytes != 0) std::memcpy(buffer, tokens, token_bytes);
  if (mm_bytes != 0) std::memcpy(buffer + token_bytes, mm, mm_bytes);
  return xxh3(buffer, total, seed);
}

inline void sequence_hashes(const uint64_t* local, size_t n, uint64_t* out) noexcept {
  if (n == 0) return;
  uint64_t pair[2] = {local[0], 0};
  out[0] = local[0];
  for (size_t i = 1; i < n; ++i) {
    pair[1] = local[i];
    pair[0] = xxh3(pair, sizeof pair, kBaseSeed);
    out[i] = pair[0];
  }
}

}  // namespace kvd
