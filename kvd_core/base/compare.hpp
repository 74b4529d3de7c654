// How far two sequences of hashes agree.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvd {

// How many of the first `n` are equal. Eight at a time, because a loop that may end at each
// element is not vectorised.
inline size_t equal_length(const uint64_t* a, const uint64_t* b, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    uint64_t differ = 0;
    for (size_t k = i; k < i + 8; ++k) differ |= a[k] ^ b[k];
    if (differ != 0) break;
  }
  while (i < n && a[i] == b[i]) ++i;
  return i;
}

}  // namespace kvd
