// The hash of tables whose keys clients and engines choose: each table has random keys of its own.
//
//   a ──^ k0──× k1──fold──^ b──× k2──fold──> 64 bits     fold: both halves of the 128-bit product,
//                                                              xored
//
// Names of blocks, hashes of prompts and ids of requests come from outside in bulk. A public mixing
// function can be inverted: a batch of 100,000 names that all begin at one slot of a probe table
// takes time quadratic in their number, 22 s. So three numbers are drawn from the operating system
// for each table. Both factors are odd and secret. How the products of two keys differ depends on
// all bits of k1 and of the keys, and stays unknown until the second product spreads it again. So a
// difference between keys that makes hashes collide in one process does not in the next.
//
// This is no cryptographic function. An observer of hashes, or of the time of single probes, might
// infer the numbers; but neither hashes nor the order of a table leave the process. A table keeps
// its numbers for life, so equal keys have equal hashes in it.
//
// Costs: two multiplications, about 3 ns; for texts one multiplication for each 8 bytes; a system
// call for each KeyedHash that is made, some 0.3 us.
#pragma once

#include <unistd.h>
#if !defined(__GLIBC__)
#include <sys/random.h>
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string_view>

namespace kvd {

class KeyedHash {
 public:
  KeyedHash() {
    draw();
    first_ |= 1;
    second_ |= 1;
  }

  // The hash of a key, or of a key and a number; outsiders may choose both.
  uint64_t operator()(uint64_t a, uint64_t b = 0) const noexcept {
    return fold(fold(a ^ mask_, first_) ^ b, second_);
  }

  uint64_t operator()(std::string_view text) const noexcept {
    uint64_t hash = mask_ ^ text.size();
    for (; text.size() > 8; text.remove_prefix(8)) hash = fold(hash ^ word(text.data(), 8), first_);
    return fold(fold(hash ^ word(text.data(), text.size()), first_), second_);
  }

 private:
  static uint64_t word(const char* bytes, size_t n) noexcept {
    uint64_t value = 0;
    if (n != 0) std::memcpy(&value, bytes, n);
    return value;
  }

  static uint64_t fold(uint64_t a, uint64_t b) noexcept {
    const auto product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  }

  void draw() {
#ifdef FUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION  // fixed, so that a fuzzer's finding is repeatable
    mask_ = 0x243f6a8885a308d3ull;
    first_ = 0x13198a2e03707344ull;
    second_ = 0xa4093822299f31d0ull;
#else
    uint64_t numbers[3];
    if (getentropy(numbers, sizeof numbers) != 0)
      throw std::runtime_error("kvd_core: no random numbers");
    mask_ = numbers[0];
    first_ = numbers[1];
    second_ = numbers[2];
#endif
  }

  uint64_t mask_, first_, second_;
};

}  // namespace kvd
