// A reading cursor over msgpack bytes: no allocation, no recursion, no trust in claimed lengths.
//
//   payload: [....................................]
//             ^p_ next value                       ^end_
//
// Invariants
//  1. p_ <= end_ always; no byte at or after end_ is read.
//  2. A reader (array, map, text, ...) either takes the next value's head and returns true, or
//     returns false and leaves the cursor where it was, so that the caller may skip() the value.
//  3. A broken framing (a value past the end, the byte 0xc1) is remembered: from then on every
//     reader returns false and skip() does nothing, as the start of the next value is unknown.
//  4. skip() keeps a count of values to come instead of a stack, so nesting of any depth costs no
//     memory and a claimed length of 2^32 - 1 ends at the first missing byte.
// Cost: skip is one switch a value; read_u32s 1.3 ns an element, 2 ns where widths mix.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace kvd {

enum class Wholeness : uint8_t { WHOLE, TRUNCATED, NOT_MSGPACK };

// An integer of any msgpack width, sign-extended to 64 bits.
struct Integer {
  uint64_t bits;
  bool negative;
};

namespace wire {

inline uint64_t big_endian(const uint8_t* p, size_t bytes) noexcept {
  uint64_t value = 0;
  for (size_t i = 0; i < bytes; ++i) value = value << 8 | p[i];
  return value;
}
#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the fixed-width loads below swap bytes and are written for little-endian machines"
#endif

inline uint16_t be16(const uint8_t* p) noexcept {
  uint16_t value;
  std::memcpy(&value, p, sizeof value);
  return __builtin_bswap16(value);
}
inline uint32_t be32(const uint8_t* p) noexcept {
  uint32_t value;
  std::memcpy(&value, p, sizeof value);
  return __builtin_bswap32(value);
}
inline uint64_t be64(const uint8_t* p) noexcept {
  uint64_t value;
  std::memcpy(&value, p, sizeof value);
  return __builtin_bswap64(value);
}

enum Tag : uint8_t {  // first bytes of values; ranges are tested by the readers
  NIL = 0xc0,
  NEVER_USED = 0xc1,
  FALSE_ = 0xc2,
  TRUE_ = 0xc3,
  BIN8 = 0xc4,
  BIN16 = 0xc5,
  BIN32 = 0xc6,
  EXT8 = 0xc7,
  EXT16 = 0xc8,
  EXT32 = 0xc9,
  FLOAT32 = 0xca,
  FLOAT64 = 0xcb,
  UINT8 = 0xcc,
  UINT16 = 0xcd,
  UINT32 = 0xce,
  UINT64 = 0xcf,
  INT8 = 0xd0,
  INT64 = 0xd3,
  FIXEXT1 = 0xd4,
  FIXEXT16 = 0xd8,
  STR8 = 0xd9,
  STR16 = 0xda,
  STR32 = 0xdb,
  ARRAY16 = 0xdc,
  ARRAY32 = 0xdd,
  MAP16 = 0xde,
  MAP32 = 0xdf,
  NEGATIVE_FIXINT = 0xe0,
};

}  // namespace wire

// Compares `Word` by `Word`; the last word overlaps the one before it.
template <class Word>
bool same_words(const char* p, const char* q, size_t size) noexcept {
  for (size_t at = 0;; at += sizeof(Word)) {
    at = std::min(at, size - sizeof(Word));
    Word x, y;
    std::memcpy(&x, p + at, sizeof x);
    std::memcpy(&y, q + at, sizeof y);
    if (x != y) return false;
    if (at + sizeof(Word) == size) return true;
  }
}

// Compares short texts without a call of memcmp.
inline bool same_text(std::string_view a, std::string_view b) noexcept {
  if (a.size() != b.size()) return false;
  if (a.size() >= 8) return same_words<uint64_t>(a.data(), b.data(), a.size());
  if (a.size() >= 4) return same_words<uint32_t>(a.data(), b.data(), a.size());
  return a.empty() || same_words<uint8_t>(a.data(), b.data(), a.size());
}

class Cursor {
 public:
  Cursor(const uint8_t* begin, const uint8_t* end) noexcept : p_(begin), end_(end) {}

  const uint8_t* at() const noexcept { return p_; }
  const uint8_t* end() const noexcept { return end_; }
  size_t left() const noexcept { return static_cast<size_t>(end_ - p_); }
  Wholeness framing() const noexcept { return framing_; }
  bool broken() const noexcept { return framing_ != Wholeness::WHOLE; }

  // A cursor for the next `bytes` at most: what runs past them is truncated for it.
  Cursor short_part(size_t bytes) const noexcept { return {p_, p_ + std::min(bytes, left())}; }

  // Moves back to a position where this cursor has been; a broken framing stays broken.
  void back_to(const uint8_t* at) noexcept { p_ = at; }

  bool nil() noexcept {
    if (!ready() || *p_ != wire::NIL) return false;
    ++p_;
    return true;
  }

  bool array(uint32_t* count) noexcept {
    if (!ready()) return false;
    if ((*p_ & 0xf0) == 0x90) return short_head(*p_ & 0x0f, count);
    return long_head(wire::ARRAY16, 2, count);
  }

  bool map(uint32_t* count) noexcept {
    if (!ready()) return false;
    if ((*p_ & 0xf0) == 0x80) return short_head(*p_ & 0x0f, count);
    return long_head(wire::MAP16, 2, count);
  }

  bool text(std::string_view* out) noexcept {
    if (!ready()) return false;
    const uint8_t* start = p_;
    uint32_t size;
    if ((*p_ & 0xe0) == 0xa0) {
      short_head(*p_ & 0x1f, &size);
    } else if (!long_head(wire::STR8, 1, &size)) {
      return false;
    }
    return body(start, size, out);
  }

  bool bin(std::string_view* out) noexcept {
    if (!ready()) return false;
    const uint8_t* start = p_;
    uint32_t size;
    return long_head(wire::BIN8, 1, &size) && body(start, size, out);
  }

  bool integer(Integer* out) noexcept {
    if (!ready()) return false;
    const uint8_t tag = *p_;
    if (tag < 0x80 || tag >= wire::NEGATIVE_FIXINT) {
      ++p_;
      *out = {static_cast<uint64_t>(int64_t{static_cast<int8_t>(tag)}), tag >= 0x80};
      return true;
    }
    if (tag < wire::UINT8 || tag > wire::INT64) return false;
    const size_t bytes = size_t{1} << (tag & 3);  // cc..cf and d0..d3: 1, 2, 4, 8
    if (!has(1 + bytes)) return false;
    const unsigned unused = static_cast<unsigned>(64 - 8 * bytes);
    const uint64_t high = left() > 8 ? wire::be64(p_ + 1) >> unused << unused
                                     : wire::big_endian(p_ + 1, bytes) << unused;
    p_ += 1 + bytes;
    if (tag < wire::INT8) {
      *out = {high >> unused, false};
    } else {
      const int64_t value = static_cast<int64_t>(high) >> unused;
      *out = {static_cast<uint64_t>(value), value < 0};
    }
    return true;
  }

  bool number() noexcept {  // takes an integer or a float, NaN too; the value is not kept
    if (!ready()) return false;
    if (*p_ == wire::FLOAT32 || *p_ == wire::FLOAT64) {
      skip();
      return !broken();
    }
    Integer ignored;
    return integer(&ignored);
  }

  // Returns false, and marks the framing as broken, if the remaining bytes cannot hold so many
  // values.
  bool expect(size_t values) noexcept { return !broken() && has(values); }

  // Takes `count` unsigned integers below 2^32. False leaves the cursor somewhere inside.
  bool read_u32s(uint32_t* out, size_t count) noexcept {
    uint32_t* const stop = out + count;
    while (out != stop) {
      out = read_common_u32s(out, stop);
      if (out == stop) break;
      Integer value;  // near the end of the payload, or of a width that encoders avoid for tokens
      if (!integer(&value) || value.negative || value.bits > UINT32_MAX) return false;
      *out++ = static_cast<uint32_t>(value.bits);
    }
    return true;
  }

  void skip(uint64_t values = 1) noexcept {
    uint64_t all = UINT64_MAX;
    skip(values, &all);
  }

  // Moves past values until all are passed or `*most` heads are; takes these heads off `*most`.
  // Returns how many values are left, 0 in a broken framing.
  uint64_t skip(uint64_t values, uint64_t* most) noexcept {
    for (; values != 0 && *most != 0 && ready(); --*most) values += skip_head() - 1;
    return broken() ? 0 : values;
  }

 private:
  bool ready() noexcept {
    if (broken()) return false;
    if (p_ == end_) framing_ = Wholeness::TRUNCATED;
    return p_ != end_;
  }

  bool has(size_t bytes) noexcept {
    if (left() < bytes) framing_ = Wholeness::TRUNCATED;
    return left() >= bytes;
  }

  bool short_head(uint32_t count, uint32_t* out) noexcept {
    ++p_;
    *out = count;
    return true;
  }

  // Heads come in families of consecutive tags whose length field doubles in width.
  bool long_head(uint8_t first_tag, size_t first_width, uint32_t* out) noexcept {
    const unsigned step = static_cast<uint8_t>(*p_ - first_tag);
    if (step > 2 || first_width << step > 4) return false;
    const size_t width = first_width << step;
    if (!has(1 + width)) return false;
    *out = static_cast<uint32_t>(wire::big_endian(p_ + 1, width));
    p_ += 1 + width;
    return true;
  }

  bool body(const uint8_t* start, uint32_t size, std::string_view* out) noexcept {
    if (!has(size)) {
      p_ = start;
      return false;
    }
    *out = {reinterpret_cast<const char*>(p_), size};
    p_ += size;
    return true;
  }

  // Reads the widths that all engines' encoders use for token ids, without calls or bounds checks
  // for each width.
  uint32_t* read_common_u32s(uint32_t* out, uint32_t* stop) noexcept {
    constexpr ptrdiff_t kWidest = 5;  // bytes of a uint32 with its tag
    const uint8_t* p = p_;
    while (out != stop && end_ - p >= kWidest) {
      const uint8_t tag = *p;
      if (tag == wire::UINT16) {
        *out++ = wire::be16(p + 1);
        p += 3;
      } else if (tag < 0x80) {
        *out++ = tag;
        p += 1;
      } else if (tag == wire::UINT32) {
        *out++ = wire::be32(p + 1);
        p += 5;
      } else if (tag == wire::UINT8) {
        *out++ = p[1];
        p += 2;
      } else {
        break;
      }
    }
    p_ = p;
    return out;
  }

  bool advance(uint64_t bytes) noexcept {
    if (left() < bytes) {
      framing_ = Wholeness::TRUNCATED;
      return false;
    }
    p_ += bytes;
    return true;
  }

  // The length field of `width` bytes after the tag; 0, with a broken framing, if it is cut off.
  uint64_t length(size_t width) noexcept {
    return has(1 + width) ? wire::big_endian(p_ + 1, width) : 0;
  }

  uint64_t leaf(uint64_t bytes) noexcept {  // a value of that many bytes has no children
    advance(bytes);
    return 0;
  }

  // Moves past one value without its children; returns how many children follow.
  uint64_t skip_head() noexcept {
    const uint8_t tag = *p_;
    if (tag < 0x80 || tag >= wire::NEGATIVE_FIXINT) return leaf(1);
    if (tag < 0x90) return leaf(1) + 2 * (tag & 0x0fu);
    if (tag < 0xa0) return leaf(1) + (tag & 0x0fu);
    if (tag < 0xc0) return leaf(1 + (tag & 0x1fu));
    return skip_long(tag);
  }

  uint64_t skip_long(uint8_t tag) noexcept {
    switch (tag) {
      case wire::NIL:
      case wire::FALSE_:
      case wire::TRUE_:
        return leaf(1);
      case wire::NEVER_USED:
        framing_ = Wholeness::NOT_MSGPACK;
        return 0;
      case wire::BIN8:
      case wire::STR8:
        return leaf(2 + length(1));
      case wire::BIN16:
      case wire::STR16:
        return leaf(3 + length(2));
      case wire::BIN32:
      case wire::STR32:
        return leaf(5 + length(4));
      case wire::EXT8:
        return leaf(3 + length(1));
      case wire::EXT16:
        return leaf(4 + length(2));
      case wire::EXT32:
        return leaf(6 + length(4));
      case wire::FLOAT32:
        return leaf(5);
      case wire::FLOAT64:
        return leaf(9);
      case wire::ARRAY16:
      case wire::ARRAY32:
      case wire::MAP16:
      case wire::MAP32:
        return skip_container(tag);
      default:
        break;
    }
    if (tag <= wire::INT64) return leaf(1 + (uint64_t{1} << (tag & 3)));
    return leaf(2 + (uint64_t{1} << (tag - wire::FIXEXT1)));
  }

  uint64_t skip_container(uint8_t tag) noexcept {
    const size_t width = tag == wire::ARRAY16 || tag == wire::MAP16 ? 2 : 4;
    const uint64_t count = length(width);
    const bool is_map = tag >= wire::MAP16;
    return advance(1 + width) ? (is_map ? 2 * count : count) : 0;
  }

  const uint8_t* p_;
  const uint8_t* end_;
  Wholeness framing_ = Wholeness::WHOLE;
};

}  // namespace kvd
