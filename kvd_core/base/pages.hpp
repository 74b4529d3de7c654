// Memory in mappings of its own, for what is large.
//
// The C library's heap gives back what is free at its end, and nothing below the last byte in use.
// An index that has shrunk leaves holes between what Python and libzmq hold on to, and they stay
// resident. What is mapped here is gone the moment that it is freed.
//
// Costs: a mapping and its end some 2 us, and each page the kernel's clearing of it, 0.1 to 0.25
// us.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <vector>

namespace kvd {

#ifdef FUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION  // a fuzzer says when the heap is full
inline uint64_t heap_left = UINT64_MAX;          // how often memory can be had
inline bool heap_is_full() { return heap_left == 0 || heap_left-- == 0; }
#else
constexpr bool heap_is_full() { return false; }
#endif

// Zeroed memory; throws std::bad_alloc.
inline void* map_pages(size_t bytes) {
  if (heap_is_full()) throw std::bad_alloc();
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return memory;
}

inline void unmap_pages(void* memory, size_t bytes) { munmap(memory, bytes); }

// Memory of the heap, as it happens to be, or null where there is none; to be freed with std::free.
inline void* try_heap(size_t bytes) { return heap_is_full() ? nullptr : std::malloc(bytes); }

// The same; throws std::bad_alloc where there is none.
inline void* take_heap(size_t bytes) {
  void* memory = try_heap(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

// For vectors that may become large; small ones are in the heap as any other's.
template <class T>
struct PageAllocator {
  static constexpr size_t kMapped = 64 * 1024;

  using value_type = T;

  PageAllocator() = default;
  template <class U>
  PageAllocator(const PageAllocator<U>&) {}

  T* allocate(size_t n) {
    const size_t bytes = n * sizeof(T);
    if (bytes >= kMapped) return static_cast<T*>(map_pages(bytes));
    return static_cast<T*>(take_heap(bytes));
  }

  void deallocate(T* memory, size_t n) {
    if (n * sizeof(T) >= kMapped) unmap_pages(memory, n * sizeof(T));
    else std::free(memory);
  }

  template <class U>
  bool operator==(const PageAllocator<U>&) const {
    return true;
  }
  template <class U>
  bool operator!=(const PageAllocator<U>&) const {
    return false;
  }
};

template <class T>
using PageVector = std::vector<T, PageAllocator<T>>;

}  // namespace kvd
