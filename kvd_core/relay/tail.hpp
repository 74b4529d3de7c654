// The last bytes of a payload that comes in pieces of any size.
//
//   ring_  [ ...newest | oldest... ]
//                      ^ size_ % kMaxTail
//
// Costs: O(bytes) a piece, at most kMaxTail of them; memory kMaxTail bytes from the first piece on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

namespace kvd::relay {

constexpr size_t kMaxTail = 1024;  // bytes kept of a payload's end, for errors and usage

class Tail {
 public:
  // All bytes added so far.
  uint64_t size() const { return size_; }

  void add(const char* data, size_t n) {
    if (n == 0) return;
    if (!ring_) ring_.reset(new char[kMaxTail]);
    size_ += n;
    const size_t kept = n < kMaxTail ? n : kMaxTail;
    const size_t at = static_cast<size_t>((size_ - kept) % kMaxTail);
    const size_t first = kept < kMaxTail - at ? kept : kMaxTail - at;
    data += n - kept;
    std::memcpy(ring_.get() + at, data, first);
    std::memcpy(ring_.get(), data + first, kept - first);
  }

  // The last kMaxTail bytes in order, or all if there are fewer.
  std::string text() const {
    if (size_ <= kMaxTail) return std::string(ring_.get(), static_cast<size_t>(size_));
    const size_t at = static_cast<size_t>(size_ % kMaxTail);
    return std::string(ring_.get() + at, kMaxTail - at).append(ring_.get(), at);
  }

  // Whether it ends with a line that ends so, and empty lines.
  bool ends_with_line(const char* end) const {
    std::string last = text();
    last.erase(last.find_last_not_of("\r\n") + 1);
    const size_t n = std::strlen(end);
    return last.size() >= n && last.compare(last.size() - n, n, end) == 0;
  }

  bool ends_with(const char* end) const {
    const size_t n = std::strlen(end);
    if (size_ < n) return false;
    for (size_t i = 0; i < n; ++i) {
      if (ring_[static_cast<size_t>((size_ - n + i) % kMaxTail)] != end[i]) return false;
    }
    return true;
  }

 private:
  std::unique_ptr<char[]> ring_;
  uint64_t size_ = 0;
};

}  // namespace kvd::relay
