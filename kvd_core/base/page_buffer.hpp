// A vector of plain structs that grows without copying them.
//
// Where it is large it is a mapping, and the kernel moves its pages to a longer range of addresses.
// A vector that copies 4 MB into fresh pages holds up the loop for 4 ms.
//
// Costs: growth O(entries), but some 20 us where there is a mapping.
#pragma once

#include <cstddef>
#include <cstring>
#include <new>
#include <type_traits>

#include "base/pages.hpp"

namespace kvd {

template <class T>
class PageBuffer {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  PageBuffer() = default;
  PageBuffer(const PageBuffer&) = delete;
  PageBuffer& operator=(const PageBuffer&) = delete;
  ~PageBuffer() { release(); }

  size_t size() const { return size_; }
  size_t capacity() const { return capacity_; }
  T* data() { return data_; }
  const T* data() const { return data_; }
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }

  // Makes room for `n` entries in all; nothing has changed when it throws.
  void reserve(size_t n) {
    if (n <= capacity_) return;
    data_ = is_mapped() ? remapped(n) : copied(n);
    capacity_ = n;
  }

  // Appends an entry, for which there has to be room; what it contains is undefined.
  void extend() { ++size_; }

  // Gives all memory back.
  void release() {
    if (data_ != nullptr) PageAllocator<T>().deallocate(data_, capacity_);
    data_ = nullptr;
    size_ = capacity_ = 0;
  }

 private:
  bool is_mapped() const { return capacity_ * sizeof(T) >= PageAllocator<T>::kMapped; }

  T* remapped(size_t n) {
    if (heap_is_full()) throw std::bad_alloc();
    void* pages = mremap(data_, capacity_ * sizeof(T), n * sizeof(T), MREMAP_MAYMOVE);
    if (pages == MAP_FAILED) throw std::bad_alloc();
    return static_cast<T*>(pages);
  }

  T* copied(size_t n) {
    T* larger = PageAllocator<T>().allocate(n);
    if (data_ != nullptr) {
      std::memcpy(larger, data_, size_ * sizeof(T));
      PageAllocator<T>().deallocate(data_, capacity_);
    }
    return larger;
  }

  T* data_ = nullptr;
  size_t size_ = 0, capacity_ = 0;
};

}  // namespace kvd
