// Large memory, in mappings of its own.
//
// The C library's heap returns free memory only from its end, nothing below the last byte in use.
// An index that has shrunk leaves holes between memory that Python and libzmq still use, and these
// stay resident. A mapping returns to the operating system as soon as it is freed.
//
// Costs: some 2 us to map and unmap, and 0.1 to 0.25 us a page, which the kernel clears.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <vector>

namespace kvd {

#ifdef FUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION  // a fuzzer decides when the heap is full
inline uint64_t heap_left = UINT64_MAX;          // allocations that still succeed
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

// Gives back the end of a mapping; returns the bytes that are left, all without memory for that.
inline size_t shrink_pages(void* memory, size_t bytes, size_t needed) {
  return mremap(memory, bytes, needed, 0) == MAP_FAILED ? bytes : needed;
}

// Uninitialised memory from the heap, or null without any left; free it with std::free.
inline void* try_heap(size_t bytes) { return heap_is_full() ? nullptr : std::malloc(bytes); }

// Like try_heap, but throws std::bad_alloc without memory.
inline void* take_heap(size_t bytes) {
  void* memory = try_heap(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

// The allocator of vectors that may become large; small ones are in the heap as usual.
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
