// The ranks with live requests through a node, how many requests, and what a block weighs for each.
//
//   one rank    [ {rank 7, requests 2, weight 1} ]                       inside the object
//   several  ──>[ {2, 1, 1} | {5, 3, 0.5} | {811, 1, 1} | .. | .. ]      one buffer, by rank
//
// Most nodes are the tail of one prompt and have one rank: no allocation. A node that many ranks
// share (a system prompt) has a buffer, with a binary search.
//
// Invariants: ranks ascend strictly; every reference has requests >= 1 and 0 <= weight <= 1; a list
// of at most one has no buffer. Without memory, insert and copy throw and change nothing, and a
// buffer that should shrink stays as it is.
//
// Costs of n references: find O(log n); insert, erase O(log n), and O(n) moved when a rank comes or
// goes (16 bytes each).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#include "base/pages.hpp"

namespace kvd::ledger {

using LoadedRankId = uint32_t;

struct RankRef {
  LoadedRankId rank;
  uint32_t requests;  // live ones of the rank
  double weight;      // of each block, 1 unless a fraction was given
};

// The owner counts the bytes of all buffers: members that change them take that count as `bytes`.
class RankRefs {
 public:
  RankRefs() = default;
  RankRefs(const RankRefs&) = delete;
  RankRefs& operator=(const RankRefs&) = delete;
  ~RankRefs() {
    if (capacity_ != 1) std::free(at_.many);
  }

  uint32_t size() const { return size_; }
  const RankRef* begin() const { return capacity_ == 1 ? &at_.one : at_.many; }
  const RankRef* end() const { return begin() + size_; }
  size_t bytes() const { return capacity_ == 1 ? 0 : capacity_ * sizeof(RankRef); }

  // The rank's reference, or null.
  RankRef* find(LoadedRankId rank) {
    RankRef* at = lower_bound(rank);
    return at != data() + size_ && at->rank == rank ? at : nullptr;
  }

  // Adds a request of the rank; true when it is the rank's first.
  bool insert(LoadedRankId rank, size_t& bytes) {
    RankRef* at = lower_bound(rank);
    if (at != data() + size_ && at->rank == rank) {
      ++at->requests;
      return false;
    }
    const auto index = static_cast<size_t>(at - data());
    if (size_ == capacity_) resize(capacity_ == 1 ? 4 : capacity_ + capacity_ / 2, bytes);
    at = data() + index;
    std::memmove(at + 1, at, (size_ - index) * sizeof(RankRef));
    *at = {rank, 1, 1.0};
    ++size_;
    return true;
  }

  // Takes off one request of the rank, which has at least one; true when it was the last.
  bool erase(RankRef* at, size_t& bytes) {
    if (--at->requests != 0) return false;
    std::memmove(at, at + 1, static_cast<size_t>(data() + size_ - at - 1) * sizeof(RankRef));
    --size_;
    if (capacity_ != 1 && (size_ <= 1 || size_ < capacity_ / 4)) shrink(bytes);
    return true;
  }

  void copy(const RankRefs& other, size_t& bytes) {
    resize(other.size_ <= 1 ? 1 : other.size_, bytes);
    size_ = other.size_;
    std::memcpy(data(), other.begin(), size_ * sizeof(RankRef));
  }

  void clear(size_t& bytes) {
    size_ = 0;
    resize(1, bytes);
  }

  // Whether each rank has the same weight here and there. Both have the same ranks.
  bool weighs_like(const RankRefs& other) const {
    const RankRef* there = other.begin();
    for (const RankRef& here : *this) {
      if (here.weight != (there++)->weight) return false;
    }
    return true;
  }

 private:
  RankRef* data() { return capacity_ == 1 ? &at_.one : at_.many; }

  RankRef* lower_bound(LoadedRankId rank) {
    return std::lower_bound(data(), data() + size_, rank,
                            [](const RankRef& ref, LoadedRankId r) { return ref.rank < r; });
  }

  void shrink(size_t& bytes) {
    try {
      resize(size_ <= 1 ? 1 : capacity_ / 2, bytes);
    } catch (const std::bad_alloc&) {}
  }

  // `capacity` >= size_; 1 means inside the object.
  void resize(uint32_t capacity, size_t& bytes) {
    if (capacity == capacity_) return;
    const size_t before = this->bytes();
    if (capacity == 1) {
      RankRef* many = at_.many;
      if (size_ != 0) at_.one = many[0];
      std::free(many);
    } else {
      RankRef* many = static_cast<RankRef*>(take_heap(capacity * sizeof(RankRef)));
      std::memcpy(many, data(), size_ * sizeof(RankRef));
      if (capacity_ != 1) std::free(at_.many);
      at_.many = many;
    }
    capacity_ = capacity;
    bytes += this->bytes() - before;
  }

  union {
    RankRef one;
    RankRef* many;
  } at_;
  uint32_t size_ = 0;
  uint32_t capacity_ = 1;
};

}  // namespace kvd::ledger
