// Arrays of integers in JSON text, taken 64 bytes at a time into plain memory.
//
// Each class of byte becomes a 64-bit mask (bit i = byte i), and the grammar of "integers between
// commas" becomes a few operations on whole masks:
//
//   bytes    ,   1 2 8 0 0 0 ,   9 9 0 6 ,   1 ...      gap = 2: from a comma to the next integer
//   run      . . 1 1 1 1 1 1 . . 1 1 1 1 . . 1          digits, for hashes a minus too
//   starts   . . 1 . . . . . . . 1 . . . . . 1          run & ~(run << 1)
//   ends     1 . . . . . . . 1 . . . . . 1 . .          ~run & (run << 1)
//   comma    1 . . . . . . . 1 . . . . . 1 . .
//
//   regular: ends == comma, starts == comma << gap, the rest is white space, no leading zero
//
// So every integer lies between two commas, and a list of the commas' positions describes them all.
// One loop makes the list without a branch on the data, and a second one converts it, also without
// one, so that no integer's form delays the next. Four tokens, or one hash, are converted at once.
//
// Invariants
//  1. Reads stay inside [begin, end): the last, short block is a copy padded with NUL (irregular),
//     and the conversion reads back from an integer's end, at most LOOKBACK bytes.
//  2. This code reports no fault. At the first irregular byte, and before a chunk with a number out
//     of range, it stops behind a whole element; there the byte-wise reader goes on and finds it.
//  3. A varying gap is irregular: every JSON writer in use separates elements evenly.
//
// Costs in ns an element (arrays of 131,072, warm; EPYC 7003 at 3.2 GHz, gcc 12 -O3), for the
// separators "," and ", ", and the plain digit loop over the same bytes for comparison:
//
//                             SSE2         portable      digit loop
//   tokens below 128,000      2.8   3.3    6.1    7.7     8.3   9.1
//   tokens of seven digits    2.9   3.3    6.8    8.5     7.3   8.3
//   hashes of 18-20 digits   10.5  11.2   22     25      19    20
//   irregular, byte-wise     13 a token, 34 a hash
//
// Tried and slower: one eight-byte load an integer (tokens 4.6, 5.8), one 16-byte mask an integer
// (3.8, 5.7), converting while walking the mask (4.3, 5.6; hashes 19). A 32-byte window for each
// hash takes 8.6, which is not worth a second mechanism. AVX2 windows that begin and end with the
// hash, found from each other or from the commas, take 8.9 to 9.5 and need a third code path.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the digit arithmetic is little endian");

namespace kvd::scanning {

// Most bytes that a column keeps from one scan to the next: 1 Mi tokens, as many as the longest
// contexts in use have, or 512 Ki hashes. Memory beyond that is freed.
constexpr size_t KEPT_BYTES = size_t{4} << 20;
// Most bytes before the end of an integer that its conversion loads.
constexpr ptrdiff_t LOOKBACK = 16;

// An array of numbers. Unlike std::vector it grows without writing zeros that are overwritten next.
template <class T>
class Column {
 public:
  Column() = default;
  Column(const Column&) = delete;
  Column& operator=(const Column&) = delete;
  Column(Column&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)),
        capacity_(std::exchange(other.capacity_, 0)) {}
  ~Column() { std::free(data_); }

  const T* data() const { return data_; }
  size_t size() const { return size_; }
  size_t held_bytes() const { return capacity_ * sizeof(T); }

  // Returns room for `count` more numbers; the caller writes them there and then calls `commit`.
  T* room(size_t count) {
    if (capacity_ - size_ < count) grow(size_ + count);
    return data_ + size_;
  }
  void commit(size_t count) { size_ += count; }

  // Drops the numbers, and frees the memory if it exceeds KEPT_BYTES.
  void clear() {
    size_ = 0;
    if (held_bytes() <= KEPT_BYTES) return;
    std::free(std::exchange(data_, nullptr));
    capacity_ = 0;
  }

 private:
  void grow(size_t least) {
    size_t capacity = capacity_ == 0 ? 1024 : capacity_ * 2;
    while (capacity < least) capacity *= 2;
    void* data = std::realloc(data_, capacity * sizeof(T));
    if (data == nullptr) throw std::bad_alloc();
    data_ = static_cast<T*>(data);
    capacity_ = capacity;
  }

  T* data_ = nullptr;
  size_t size_ = 0;
  size_t capacity_ = 0;
};

inline bool is_digit(uint8_t c) { return static_cast<uint8_t>(c - '0') < 10; }
inline bool is_white(uint8_t c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }

template <class Word>
inline Word load(const uint8_t* p) {
  Word word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

inline unsigned lowest(uint64_t mask) { return static_cast<unsigned>(__builtin_ctzll(mask)); }

// Without the instruction, which is not in the x86-64 baseline, the builtin is a library call.
inline unsigned count_bits(uint64_t v) {
  v -= v >> 1 & 0x5555555555555555;
  v = (v & 0x3333333333333333) + (v >> 2 & 0x3333333333333333);
  return static_cast<unsigned>(((v + (v >> 4)) & 0x0f0f0f0f0f0f0f0f) * 0x0101010101010101 >> 56);
}

#if defined(__SSE2__)
inline __m128i load_sixteen(const uint8_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
#endif

// 64 bytes, with masks of the bytes in a class. The loops are written out, as -O2 does not unroll.
#if defined(__SSE2__)
class ByteBlock {
 public:
  explicit ByteBlock(const uint8_t* p)
      : a_(load_sixteen(p)),
        b_(load_sixteen(p + 16)),
        c_(load_sixteen(p + 32)),
        d_(load_sixteen(p + 48)) {}

  uint64_t digits() const {
    // '0'..'9' become the ten lowest signed bytes.
    const __m128i shift = _mm_set1_epi8(static_cast<char>(128 - '0'));
    const __m128i limit = _mm_set1_epi8(-128 + 10);
    return mask([=](__m128i v) { return _mm_cmplt_epi8(_mm_add_epi8(v, shift), limit); });
  }
  uint64_t equal(char c) const {
    const __m128i wanted = _mm_set1_epi8(c);
    return mask([=](__m128i v) { return _mm_cmpeq_epi8(v, wanted); });
  }

 private:
  template <class Test>
  uint64_t mask(Test test) const {
    const auto bits = [&](__m128i v) { return static_cast<uint64_t>(_mm_movemask_epi8(test(v))); };
    return (bits(a_) | bits(b_) << 16) | (bits(c_) | bits(d_) << 16) << 32;
  }
  __m128i a_, b_, c_, d_;
};
#else
class ByteBlock {
 public:
  explicit ByteBlock(const uint8_t* p) : p_(p) {}

  uint64_t digits() const {
    return mask([](uint64_t v) {
      v ^= 0x3030303030303030;  // 0..9 for a digit, more for anything else
      return ~(((v & LOW7) + 0x7676767676767676) | v);
    });
  }
  uint64_t equal(char c) const {
    const uint64_t wanted = 0x0101010101010101 * static_cast<uint8_t>(c);
    return mask([=](uint64_t v) {
      v ^= wanted;
      return ~(((v & LOW7) + LOW7) | v);
    });
  }

 private:
  static constexpr uint64_t LOW7 = 0x7f7f7f7f7f7f7f7f;
  // `test` answers in the top bit of each byte; one multiplication gathers the eight of them.
  template <class Test>
  uint64_t mask(Test test) const {
    const auto bits = [&](int i) {
      const uint64_t tops = test(load<uint64_t>(p_ + 8 * i)) >> 7 & 0x0101010101010101;
      return (tops * 0x0102040810204080 >> 56) << 8 * i;
    };
    return bits(0) | bits(1) | bits(2) | bits(3) | bits(4) | bits(5) | bits(6) | bits(7);
  }
  const uint8_t* p_;
};
#endif

// The end of the white space from p on, which takes 64 bytes at a time where it is that long.
[[gnu::noinline]] inline const uint8_t* white_run(const uint8_t* p, const uint8_t* end) {
  const uint8_t* const from = p;
  while (p != end && is_white(*p)) {
    if (++p - from != 64) continue;
    for (; end - p >= 64; p += 64) {
      const ByteBlock block(p);
      if (~(block.equal(' ') | block.equal('\n') | block.equal('\r') | block.equal('\t')) != 0)
        break;
    }
  }
  return p;
}

// The number written in the last `count` (1..8) of the eight bytes before `end`. Digits are joined
// in parallel lanes into pairs, then fours, then all eight.
inline uint64_t up_to_eight(const uint8_t* end, size_t count) {
  const size_t unused = 64 - 8 * count;
  uint64_t v = load<uint64_t>(end - 8) >> unused << unused;
  v = (v & 0x0f0f0f0f0f0f0f0f) * (10 * 256 + 1) >> 8;
  v = (v & 0x00ff00ff00ff00ff) * (100 * 65536 + 1) >> 16;
  return (v & 0x0000ffff0000ffff) * (10000 * (uint64_t{1} << 32) + 1) >> 32;
}

// The number written in the first `count` (1..4) of the four bytes from `first`.
inline uint64_t up_to_four(const uint8_t* first, size_t count) {
  uint32_t v = load<uint32_t>(first) << (32 - 8 * count);
  v = (v & 0x0f0f0f0f) * (10 * 256 + 1) >> 8;
  return (v & 0x00ff00ff) * (100 * 65536 + 1) >> 16;
}

#if defined(__SSE2__)
// KEEP + n masks all but the last n of 16 bytes, KEEP + 8 + n all but the last n of eight.
inline constexpr uint8_t KEEP[32] = {
    0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,
    15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15,
};

// Joins sixteen digits, as values and not characters, into four numbers of four digits.
inline __m128i fours(__m128i digits) {
  const __m128i pairs = _mm_srli_epi16(_mm_mullo_epi16(digits, _mm_set1_epi16(10 * 256 + 1)), 8);
  return _mm_madd_epi16(pairs, _mm_set1_epi32(1 << 16 | 100));
}
// Joins eight numbers of four digits into four of eight digits.
inline __m128i eights(__m128i low, __m128i high) {
  return _mm_madd_epi16(_mm_packs_epi32(low, high), _mm_set1_epi32(1 << 16 | 10000));
}
inline __m128i two_halves(const uint8_t* low, const uint8_t* high) {
  const __m128i half = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(low));
  return _mm_unpacklo_epi64(half, _mm_loadl_epi64(reinterpret_cast<const __m128i*>(high)));
}
#endif

// The conversions of each kind of element. `commas` converts the integers between the commas at
// body[at[0]], body[at[1]] .. body[at[count]]; it returns false if one is out of range. `digits`
// converts one run of digits, of any length, without leading zeros.
struct U32 {
  using type = uint32_t;
  static constexpr bool negative = false;
  static constexpr unsigned usual = 8;  // commas in 64 bytes, separated by "," at seven digits
  static constexpr const char* range = " is not in 0..4294967295";

  static bool commas(const uint8_t* body, const uint32_t* at, uint32_t gap, size_t count,
                     type* out) {
    bool good = true;
    size_t i = 0;
#if defined(__SSE2__)
    for (; i + 4 <= count; i += 4) {
      const uint32_t n0 = at[i + 1] - at[i] - gap, n1 = at[i + 2] - at[i + 1] - gap;
      const uint32_t n2 = at[i + 3] - at[i + 2] - gap, n3 = at[i + 4] - at[i + 3] - gap;
      if (__builtin_expect(((n0 - 1) | (n1 - 1) | (n2 - 1) | (n3 - 1)) > 7, 0)) {
        for (size_t k = i; k < i + 4; ++k) good &= one(body, at + k, gap, out + k);
        continue;
      }
      const auto two = [=](size_t k, uint32_t m, uint32_t n) {
        const __m128i text = two_halves(body + at[k + 1] - 8, body + at[k + 2] - 8);
        return fours(_mm_and_si128(text, two_halves(KEEP + 8 + m, KEEP + 8 + n)));
      };
      const __m128i four = eights(two(i, n0, n1), two(i + 2, n2, n3));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), four);
    }
#endif
    for (; i < count; ++i) good &= one(body, at + i, gap, out + i);
    return good;
  }
  static bool digits(const uint8_t* first, const uint8_t* end, bool minus, type* out) {
    if (minus || end - first > 10) return false;
    uint64_t value = 0;
    for (; first != end; ++first) value = value * 10 + (*first & 15);
    *out = static_cast<type>(value);
    return value <= UINT32_MAX;
  }

 private:
  static bool one(const uint8_t* body, const uint32_t* at, uint32_t gap, type* out) {
    const uint32_t count = at[1] - at[0] - gap;
    if (count > 8) return digits(body + at[0] + gap, body + at[1], false, out);
    *out = static_cast<type>(up_to_eight(body + at[1], count));
    return true;
  }
};

// Integers of 64 bits up to HIGHEST, negative ones as two's complement.
template <uint64_t HIGHEST>
struct Wide64 {
  using type = uint64_t;
  static constexpr bool negative = true;
  static constexpr unsigned usual = 4;  // commas in 64 bytes at 19 or 20 digits
  static constexpr const char* range = HIGHEST == UINT64_MAX
                                           ? " is not in -9223372036854775808..18446744073709551615"
                                           : " is not in -9223372036854775808..9223372036854775807";

  // Does not branch on random properties of a hash: its sign, and whether it has 18, 19 or 20
  // digits.
  static bool commas(const uint8_t* body, const uint32_t* at, uint32_t gap, size_t count,
                     type* out) {
    uint64_t bad = 0;
    for (size_t i = 0; i < count; ++i) {
      const uint8_t* end = body + at[i + 1];
      const uint64_t minus = body[at[i] + gap] == '-';
      const size_t length = at[i + 1] - at[i] - gap - minus;
      uint64_t value = sixteen(end, length);
      if (__builtin_expect(length > 16, 1)) {
        if (length > 20) return false;
        value += up_to_four(end - length, length - 16) * E16;
        // A number of 20 digits below 2^64 begins with 1, and its value has not wrapped.
        bad |= uint64_t{length == 20} & (uint64_t{end[-20] != '1'} | uint64_t{value < E19});
      }
      bad |= minus & (uint64_t{value > LOWEST} | uint64_t{value == 0});
      if (HIGHEST != UINT64_MAX) bad |= ~minus & uint64_t{value > HIGHEST};
      out[i] = (value ^ (0 - minus)) + minus;
    }
    return bad == 0;
  }
  static bool digits(const uint8_t* first, const uint8_t* end, bool minus, type* out) {
    uint64_t value = 0;
    for (; first != end; ++first)
      if (__builtin_mul_overflow(value, 10, &value) ||
          __builtin_add_overflow(value, *first & 15, &value))
        return false;
    *out = minus ? 0 - value : value;
    return value <= (minus ? LOWEST : HIGHEST);
  }

 private:
  static constexpr uint64_t E8 = 100000000, E16 = E8 * E8, E19 = 1000 * E16;
  static constexpr uint64_t LOWEST = uint64_t{1} << 63;  // magnitude of the lowest negative

  // The number in the last `length` bytes before `end`, or in the last 16 if there are more.
  static uint64_t sixteen(const uint8_t* end, size_t length) {
#if defined(__SSE2__)
    const __m128i keep = load_sixteen(KEEP + (length < 16 ? length : 16));
    const __m128i four = fours(_mm_and_si128(load_sixteen(end - 16), keep));
    uint64_t both;
    _mm_storel_epi64(reinterpret_cast<__m128i*>(&both), eights(four, four));
    return (both & 0xffffffff) * E8 + (both >> 32);
#else
    if (length <= 8) return up_to_eight(end, length);
    return up_to_eight(end - 8, length < 16 ? length - 8 : 8) * E8 + up_to_eight(end, 8);
#endif
  }
};

using Hash64 = Wide64<UINT64_MAX>;  // of engines, which write them signed or unsigned
using Int64 = Wide64<INT64_MAX>;

// Checks the rules of the picture block by block; its state is carried into the next block.
template <bool NEGATIVE>
class Grammar {
 public:
  // Begins at a comma that follows a digit.
  explicit Grammar(unsigned gap) : gap_(gap) {}

  // The mask of the integers' ends in the last block.
  uint64_t ends() const { return ends_; }

  // Checks the next block; returns the mask of bytes that break a rule. Inlined by force: with the
  // call that -O2 makes of it the block stays in memory, which costs a seventh.
  __attribute__((always_inline)) uint64_t step(const ByteBlock& block) {
    const uint64_t digit = block.digits(), comma = block.equal(','), zero = block.equal('0');
    const uint64_t minus = NEGATIVE ? block.equal('-') : 0, run = digit | minus;
    const uint64_t after_run = run << 1 | run_before_;
    const uint64_t starts = run & ~after_run, ends = ~run & after_run;
    uint64_t irregular = (comma ^ ends) | (starts ^ (ends << gap_ | ends_ >> (64 - gap_)));
    const uint64_t first_zero = zero & ~(digit << 1 | digit_before_);
    irregular |= digit & (first_zero << 1 | zero_before_);
    if (NEGATIVE) {
      irregular |= (minus & ~starts) | (~digit & (minus << 1 | minus_before_));
      minus_before_ = minus >> 63;
    }
    const uint64_t other = ~(run | comma) & ~(gap_ == 1 ? 0 : block.equal(' '));
    if (other != 0)
      irregular |= other & ~(block.equal('\n') | block.equal('\r') | block.equal('\t'));
    ends_ = ends;
    run_before_ = run >> 63;
    digit_before_ = digit >> 63;
    zero_before_ = first_zero >> 63;
    return irregular;
  }

 private:
  const unsigned gap_;
  uint64_t ends_ = 0;
  uint64_t run_before_ = 1, digit_before_ = 1;  // the class of the byte before the block: 0 or 1
  uint64_t zero_before_ = 0, minus_before_ = 0;
};

template <size_t... I>
inline void put(uint64_t& mask, uint32_t base, uint32_t* to, std::index_sequence<I...>) {
  ((to[I] = base + lowest(mask | uint64_t{1} << 63), mask &= mask - 1), ...);
}

// Appends base + the index of each bit. Writes up to USUAL entries too many, to avoid a branch.
template <unsigned USUAL>
inline uint32_t* put_positions(uint64_t mask, uint32_t base, uint32_t* to) {
  uint32_t* const end = to + count_bits(mask);
  put(mask, base, to, std::make_index_sequence<USUAL>());
  for (to += USUAL; __builtin_expect(to < end, 0); to += 4)
    put(mask, base, to, std::make_index_sequence<4>());
  return end;
}

// Converts the elements behind `comma` as long as they are regular; returns the comma behind the
// last one converted. A digit precedes `comma`, and comma - begin >= LOOKBACK.
template <class E>
const uint8_t* take_regular(const uint8_t* begin, const uint8_t* comma, const uint8_t* end,
                            Column<typename E::type>& out) {
  const uint8_t* next = comma + 1;
  while (next != end && is_white(*next)) ++next;
  const auto gap = next - comma;
  if (gap > 63 || end - begin > ptrdiff_t{UINT32_MAX}) return comma;

  constexpr ptrdiff_t CHUNK = 512;  // commas between two conversions; they stay in the L1 cache
  uint32_t commas[CHUNK + 64 + E::usual];
  uint32_t* to = commas;
  const auto convert = [&] {
    const size_t count = static_cast<size_t>(to - commas) - 1;
    const auto step = static_cast<uint32_t>(gap);
    if (!E::commas(begin, commas, step, count, out.room(count))) return false;
    out.commit(count);
    commas[0] = to[-1];
    to = commas + 1;
    return true;
  };
  Grammar<E::negative> grammar(static_cast<unsigned>(gap));
  for (const uint8_t* base = comma; base < end; base += 64) {
    uint8_t padded[64];
    const bool whole = end - base >= 64;
    if (!whole) {
      std::memset(padded, 0, sizeof padded);
      std::memcpy(padded, base, static_cast<size_t>(end - base));
    }
    const uint64_t irregular = grammar.step(ByteBlock(whole ? base : padded));
    uint64_t ends = grammar.ends();
    if (irregular != 0) ends &= (irregular & (0 - irregular)) - 1;
    to = put_positions<E::usual>(ends, static_cast<uint32_t>(base - begin), to);
    if (irregular != 0) break;
    if (to - commas > CHUNK && !convert()) return begin + commas[0];
  }
  convert();
  return begin + commas[0];
}

}  // namespace kvd::scanning
