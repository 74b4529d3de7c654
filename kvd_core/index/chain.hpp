// The blocks of a node of the tree: their local hashes and ids, as two parallel arrays in one
// allocation.
//
//   data_  [ local 0 | local 1 | ... | cap_ ][ id 0 | id 1 | ... | cap_ ]
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/arena.hpp"

namespace kvd {

using BlockId = uint32_t;

class Chain {
 public:
  Chain() = default;
  Chain(const Chain&) = delete;
  Chain& operator=(const Chain&) = delete;
  ~Chain() { std::free(data_); }

  uint32_t len() const { return len_; }
  uint64_t* local() { return data_; }
  const uint64_t* local() const { return data_; }
  BlockId* block() { return reinterpret_cast<BlockId*>(data_ + cap_); }
  const BlockId* block() const { return reinterpret_cast<const BlockId*>(data_ + cap_); }

  void push(uint64_t local_hash, BlockId id) {
    if (len_ == cap_) grow(cap_ + cap_ / 2 + 4);
    data_[len_] = local_hash;
    block()[len_++] = id;
  }

  void reserve(uint32_t cap) {
    if (cap > cap_) grow(cap);
  }

  void truncate(uint32_t len) {
    len_ = len;
    if (len == 0) {
      std::free(data_);
      data_ = nullptr;
      cap_ = 0;
    } else if (cap_ > 16 && len < cap_ / 4) {
      grow(len + len / 4);
    }
  }

  void append(const Chain& other, uint32_t from, uint32_t to) {
    if (len_ + (to - from) > cap_) grow(len_ + (to - from));
    std::memcpy(data_ + len_, other.local() + from, (to - from) * sizeof(uint64_t));
    std::memcpy(block() + len_, other.block() + from, (to - from) * sizeof(BlockId));
    len_ += to - from;
  }

  void swap(Chain& other) {
    std::swap(data_, other.data_);
    std::swap(len_, other.len_);
    std::swap(cap_, other.cap_);
  }

  size_t bytes() const { return cap_ * (sizeof(uint64_t) + sizeof(BlockId)); }

 private:
  void grow(uint32_t cap) {
    cap = (cap + 1) & ~1u;  // keeps the ids 8-byte aligned
    auto* data = static_cast<uint64_t*>(take_heap(cap * (sizeof(uint64_t) + sizeof(BlockId))));
    if (len_ != 0) {
      std::memcpy(data, data_, len_ * sizeof(uint64_t));
      std::memcpy(data + cap, block(), len_ * sizeof(BlockId));
    }
    std::free(data_);
    data_ = data;
    cap_ = cap;
  }

  uint64_t* data_ = nullptr;
  uint32_t len_ = 0;
  uint32_t cap_ = 0;
};

}  // namespace kvd
