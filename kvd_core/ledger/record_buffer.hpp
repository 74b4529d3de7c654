// Records of a journal that wait to be written: one after the other, each whole or not at all.
//
//   [ u32 n | kind | n - 1 bytes ] [ u32 n | kind | .. ] ..          little-endian
//
// A change of a ledger must not wait and cannot fail, so a record that exceeds the limit is dropped
// and counted: the journal then has a hole, and its writer starts it anew.
//
// While paused, the buffer records nothing and counts nothing as dropped: its reader has no use for
// these records.
//
// Costs: extend O(1), amortised; memory at most twice the bytes that wait.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace kvd::ledger {

class RecordBuffer {
 public:
  // Memory kept when all records have been taken: some thousand steps of requests.
  static constexpr size_t kKept = 256 * 1024;

  explicit RecordBuffer(size_t limit) : limit_(limit) {}
  RecordBuffer(const RecordBuffer&) = delete;
  RecordBuffer& operator=(const RecordBuffer&) = delete;
  ~RecordBuffer() { std::free(bytes_); }

  // Begins a record with `n` bytes behind its kind; returns where these go, null if there is no
  // room.
  char* extend(char kind, size_t n) noexcept {
    if (paused_) return nullptr;
    const size_t whole = sizeof(uint32_t) + 1 + n;
    if (whole > limit_ - size_ || !make_room(size_ + whole)) {
      ++dropped_;
      return nullptr;
    }
    const uint32_t rest = static_cast<uint32_t>(n + 1);
    char* const to = bytes_ + size_;
    std::memcpy(to, &rest, sizeof rest);
    to[sizeof rest] = kind;
    size_ += whole;
    return to + sizeof rest + 1;
  }

  const char* bytes() const { return bytes_; }
  size_t size() const { return size_; }
  uint64_t dropped() const { return dropped_; }

  void pause() noexcept { paused_ = true; }
  void resume() noexcept { paused_ = false; }

  void clear() noexcept {
    size_ = 0;
    if (capacity_ <= kKept) return;
    std::free(bytes_);
    bytes_ = nullptr;
    capacity_ = 0;
  }

 private:
  bool make_room(size_t size) noexcept {
    if (size <= capacity_) return true;
    size_t capacity = capacity_ == 0 ? 4096 : capacity_;
    while (capacity < size) capacity *= 2;
    void* const grown = std::realloc(bytes_, capacity);
    if (grown == nullptr) return false;
    bytes_ = static_cast<char*>(grown);
    capacity_ = capacity;
    return true;
  }

  size_t limit_;
  char* bytes_ = nullptr;
  size_t size_ = 0;
  size_t capacity_ = 0;
  uint64_t dropped_ = 0;
  bool paused_ = false;
};

}  // namespace kvd::ledger
