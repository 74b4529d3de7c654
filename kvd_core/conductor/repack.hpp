// Writes JSON text as msgpack, part by part, so that one reader of msgpack serves all publishers of
// KV events.
//
//   {"ts": 1.5,  "events": [7, -1]}
//   df00000002   a2 t s  cb3ff8..   a6 e v e n t s   dd00000002   07 ff
//    `-- counted when the bracket closes -------------^
//
// Lengths of arrays and maps always take four bytes, because they are known last.
//
// Invariants
//   1. `open_` are the containers that are not closed yet, at most JsonStream::kMaxDepth;
//   2. values are those of the text: an integer beyond 64 bits is the nearest double, -0 is 0.
//
// Costs: linear; 5 ns a byte of token ids, 10 at worst (short numbers). The output is at most 2.25
// times as long as the text (`1e9,`), shorter than it for token ids and hashes.
#pragma once

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <system_error>
#include <vector>

#include "json/stream.hpp"
#include "base/msgpack.hpp"

namespace kvd {

class Repack {
 public:
  // Throws std::invalid_argument if the text is malformed.
  void feed(const uint8_t* p, size_t n) { stream_.feed(p, n, *this); }

  // To be called when all text is fed: the msgpack, or null unless the text is one whole value.
  const std::vector<uint8_t>* whole() const { return stream_.complete() ? &out_ : nullptr; }

  // ---- the stream's sink

  void open(bool object) {
    count();
    open_.push_back({out_.size() + 1, 0});
    put(object ? wire::MAP32 : wire::ARRAY32, 0, 4);
  }

  void close(bool) {
    big_endian(open_.back().at, open_.back().count, 4);
    open_.pop_back();
  }

  void key(std::string_view name) { put(name); }

  void text(std::string_view chars) {
    count();
    put(chars);
  }

  void word(std::string_view chars) {
    count();
    out_.push_back(chars == "null" ? wire::NIL : chars == "true" ? wire::TRUE_ : wire::FALSE_);
  }

  void number(std::string_view digits) {
    count();
    const char *begin = digits.data(), *end = begin + digits.size();
    uint64_t natural = 0;
    int64_t negative = 0;
    if (const auto [at, error] = std::from_chars(begin, end, natural);
        error == std::errc() && at == end) {
      put(natural);
    } else if (const auto [at, error] = std::from_chars(begin, end, negative);
               error == std::errc() && at == end) {
      negative == 0 ? put(uint64_t{0}) : put(wire::INT64, static_cast<uint64_t>(negative), 8);
    } else {
      real(begin, end);
    }
  }

 private:
  struct Container {
    size_t at;  // position of the four bytes of its length
    uint32_t count;
  };

  void count() {
    if (!open_.empty()) ++open_.back().count;
  }

  void real(const char* begin, const char* end) {
    double value = 0;  // stays so for a number that is too small, or too large for any member
    std::from_chars(begin, end, value);
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    put(wire::FLOAT64, bits, 8);
  }

  void put(uint64_t natural) {
    if (natural < 128) {
      out_.push_back(static_cast<uint8_t>(natural));
    } else if (natural <= UINT16_MAX) {
      natural <= UINT8_MAX ? put(wire::UINT8, natural, 1) : put(wire::UINT16, natural, 2);
    } else {
      natural <= UINT32_MAX ? put(wire::UINT32, natural, 4) : put(wire::UINT64, natural, 8);
    }
  }

  void put(std::string_view chars) {
    const size_t size = chars.size();  // below 2^32, as JsonStream::kMaxToken and a piece are
    if (size < 32) {
      out_.push_back(static_cast<uint8_t>(0xa0 | size));
    } else {
      size <= UINT8_MAX ? put(wire::STR8, size, 1) : put(wire::STR32, size, 4);
    }
    out_.insert(out_.end(), chars.begin(), chars.end());
  }

  void put(wire::Tag tag, uint64_t value, size_t bytes) {
    out_.push_back(tag);
    out_.resize(out_.size() + bytes);
    big_endian(out_.size() - bytes, value, bytes);
  }

  void big_endian(size_t at, uint64_t value, size_t bytes) {
    for (size_t i = bytes; i-- != 0; value >>= 8) out_[at + i] = static_cast<uint8_t>(value);
  }

  JsonStream<Repack> stream_;
  std::vector<uint8_t> out_;
  std::vector<Container> open_;
};

}  // namespace kvd
