// Writes JSON into memory that the caller has made large enough.
#pragma once

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace kvd {

constexpr size_t kMaxDigits = 20;  // digits of 2^64 - 1

inline char* put(char* to, std::string_view text) {
  std::memcpy(to, text.data(), text.size());
  return to + text.size();
}

// Most numbers of an answer have one digit; these skip the count of digits in std::to_chars.
inline char* put(char* to, uint64_t value) {
  if (value < 10) {
    *to = static_cast<char>('0' + value);
    return to + 1;
  }
  return std::to_chars(to, to + kMaxDigits, value).ptr;
}

}  // namespace kvd
