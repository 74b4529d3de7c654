// Finds where each element of a JSON array ends, in one pass over its bytes.
//
//   [ {"role":"user","content":"a, \"b\" ]"} , {"role":"assistant", ...} ]
//     └──────────── element 0 ─────────────┘   └──────── element 1 ────┘
//
// The array is known to be well-formed: the caller has scanned the body that it is of. So
// only strings and the depth of brackets matter; blanks around elements belong to none.
//
// Cost: about 1 ns a byte outside of strings, 0.1 ns inside of long ones (memchr).
#pragma once

#include <cstddef>
#include <cstring>

namespace kvd::prompts {

// Returns the quote that ends the string of which the first byte is at `at`.
inline const char* string_end(const char* at, const char* end) {
  const char* const begin = at;
  while (at < end) {
    at = static_cast<const char*>(std::memchr(at, '"', static_cast<size_t>(end - at)));
    if (at == nullptr) break;
    const char* slash = at;
    while (slash > begin && slash[-1] == '\\') --slash;
    if ((at - slash) % 2 == 0) return at;  // no backslash, or each escapes another one
    ++at;
  }
  return end;
}

// Calls `element(begin, end)` for each element of the array in [at, end).
template <class Element>
void each_element(const char* at, const char* end, Element element) {
  int depth = 0;
  const char* begin = nullptr;  // of the element that is being read
  const char* last = nullptr;   // behind its last byte that is no blank
  for (; at < end; ++at) {
    const char c = *at;
    if (c == ' ' || c == '\t' || c == '\n' || c == '\r') continue;
    if (depth == 1 && (c == ',' || c == ']')) {
      if (begin != nullptr) element(begin, last);
      begin = nullptr;
      if (c == ']') return;
      continue;
    }
    if (depth >= 1 && begin == nullptr) begin = at;
    if (c == '[' || c == '{') {
      ++depth;
    } else if (c == ']' || c == '}') {
      --depth;
    } else if (c == '"') {
      at = string_end(at + 1, end);
    }
    last = at + 1;
  }
}

}  // namespace kvd::prompts
