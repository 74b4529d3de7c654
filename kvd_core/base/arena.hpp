// Storage whose entries never move, addressed by dense 32-bit ids.
//
//   ids     0 .. 255         256 .. 511         ...
//          +-----------+    +-----------+
//          | T T T ... |    | T T T ... |      one segment = 256 entries
//          +-----------+    +-----------+
//
// Growth adds a segment: no copy, no doubling slack, no pause proportional to the size. Free
// entries form a list threaded through the entries themselves, so freeing costs no memory:
// `T::free_link()` returns a member that is unused while the entry is free. A struct without it, as
// Cython's are, has to begin with such a uint32_t.
//
// The first 16 segments are in the heap. Otherwise thousands of small arenas would need thousands
// of mappings, and a process may have 65,530. Further segments share a mapping, 16 in each
// (base/pages.hpp).
//
// Invariants
//   1. an id is either live or on the free list, never both;
//   2. the first `pinned` ids are taken once and never given back; when only they are live, the
//      segments they do not need are spare, and `shrink` gives them back one by one.
//
// Costs: take, give and operator[] O(1); memory = live high-water mark rounded up to a segment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "base/pages.hpp"

namespace kvd {

template <class T>
auto free_link(T& entry, int) -> decltype((entry.free_link())) {
  return entry.free_link();
}

template <class T>
uint32_t& free_link(T& entry, long) {
  static_assert(std::is_standard_layout_v<T>);  // so the first member has the entry's address
  return reinterpret_cast<uint32_t&>(entry);
}

template <class T>
class Arena {
 public:
  static constexpr uint32_t kSegmentBits = 8;
  static constexpr uint32_t kSegment = 1u << kSegmentBits;

  // `max_ids` is exclusive; callers that steal high bits of an id pass a smaller bound.
  explicit Arena(uint32_t pinned = 0, uint32_t max_ids = 0xfffffff0u)
      : pinned_(pinned), max_ids_(max_ids) {}

  ~Arena() {
    while (!segments_.empty()) drop_segment();
  }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  T& operator[](uint32_t id) { return segments_[id >> kSegmentBits][id & (kSegment - 1)]; }
  const T& operator[](uint32_t id) const {
    return segments_[id >> kSegmentBits][id & (kSegment - 1)];
  }

  uint32_t take() {
    if (free_ != kNoId) {
      const uint32_t id = free_;
      free_ = free_link((*this)[id], 0);
      ++live_;
      return id;
    }
    make_room();
    ++live_;
    return end_++;
  }

  // Makes room for one entry, so that the next `take` does not throw.
  void make_room() {
    if (free_ != kNoId) return;
    if (end_ == max_ids_) throw std::length_error("kvd_core: arena is full");
    if ((end_ >> kSegmentBits) == segments_.size()) add_segment();
  }

  void give(uint32_t id) {
    if (--live_ == pinned_) {
      free_ = kNoId;
      end_ = pinned_;
    } else {
      free_link((*this)[id], 0) = free_;
      free_ = id;
    }
  }

  // Frees a segment behind the last id; false when there is none.
  bool shrink() {
    if (segments_.size() <= (size_t{end_} + kSegment - 1) >> kSegmentBits) return false;
    drop_segment();
    return true;
  }

  uint32_t live() const { return live_; }
  uint32_t end() const { return end_; }  // every live id is below it

  size_t bytes() const { return segments_.size() * kSegmentBytes; }

 private:
  static constexpr uint32_t kNoId = 0xffffffffu;
  static constexpr size_t kSegmentBytes = kSegment * sizeof(T);
  static constexpr size_t kGroup = 16;  // segments of one mapping

  void add_segment() {
    const size_t n = segments_.size();
    segments_.push_back(nullptr);
    try {
      segments_[n] = room_for_segment(n);
    } catch (const std::bad_alloc&) {
      segments_.pop_back();
      throw;
    }
    std::uninitialized_value_construct_n(segments_[n], kSegment);
  }

  T* room_for_segment(size_t n) const {
    if (n < kGroup) return static_cast<T*>(take_heap(kSegmentBytes));
    if (n % kGroup == 0) return static_cast<T*>(map_pages(kGroup * kSegmentBytes));
    return segments_[n - 1] + kSegment;
  }

  void drop_segment() {
    T* const segment = segments_.back();
    segments_.pop_back();
    std::destroy_n(segment, kSegment);
    const size_t n = segments_.size();
    if (n < kGroup) std::free(segment);
    else if (n % kGroup == 0) unmap_pages(segment, kGroup * kSegmentBytes);
  }

  std::vector<T*> segments_;
  uint32_t free_ = kNoId;  // the id that was given back last
  uint32_t pinned_;
  uint32_t max_ids_;
  uint32_t end_ = 0;
  uint32_t live_ = 0;
};

// An arena whose entries keep the hash of their key as `hash`; it serves as the `Keys` of a
// `ProbeTable`.
template <class T>
class HashedArena : public Arena<T> {
 public:
  uint64_t hash_of(uint32_t id) const { return (*this)[id].hash; }
};

// Spreads a number over all 64 bits, in the same way everywhere; tables use a keyed hash instead
// (base/keyed.hpp). Constants of the splitmix64 finalizer (Steele, Lea, Flood 2014).
inline uint64_t mix64(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// Open addressing over 32-bit values whose keys live elsewhere. Linear probing, and deletion by
// moving later entries back: a delete leaves no marker behind, so millions of deletes of absent
// keys cost nothing and change nothing (deletes of unknown blocks are normal traffic).
//
// `Keys` supplies `uint64_t hash_of(uint32_t value) const`. Clients that choose keys must not be
// able to predict it (base/keyed.hpp): a probe sequence grows with the keys that share its start.
class ProbeTable {
 public:
  static constexpr uint32_t kEmpty = 0xffffffffu;
  // Most slots from an entry to its home that `verify` accepts; unpredictable hashes never need as
  // many.
  static constexpr uint32_t kFar = 4096;

  uint32_t size() const { return count_; }
  uint32_t capacity() const { return static_cast<uint32_t>(slots_.size()); }
  uint32_t at(uint32_t index) const { return slots_[index]; }
  void set(uint32_t index, uint32_t value) { slots_[index] = value; }
  size_t bytes() const { return slots_.capacity() * sizeof(uint32_t); }

  // Makes room for `count` entries in an empty table.
  void reserve(uint32_t count) {
    uint64_t capacity = 8;
    while (count * 5ull > capacity * 4ull) capacity *= 2;
    slots_.assign(capacity, kEmpty);
    mask_ = static_cast<uint32_t>(capacity - 1);
  }

  // Index of the entry for which `same(value)` holds, or kEmpty.
  template <class Same>
  uint32_t find(uint64_t hash, Same&& same) const {
    if (slots_.empty()) return kEmpty;
    for (uint32_t i = home(hash);; i = next(i)) {
      const uint32_t value = slots_[i];
      if (value == kEmpty) return kEmpty;
      if (same(value)) return i;
    }
  }

  // The first slot of a hash's probe sequence, in a table with slots, and the slot after another;
  // the sequence ends at an empty slot. For callers that cannot pass a lambda to `find`.
  uint32_t home(uint64_t hash) const { return static_cast<uint32_t>(hash >> 32) & mask_; }
  uint32_t next(uint32_t i) const { return (i + 1) & mask_; }

  // Makes room for `n` entries, so that the next `n` inserts do not throw.
  template <class Keys>
  void make_room(uint32_t n, const Keys& keys) {
    const uint64_t filled = (uint64_t{count_} + n) * 5;
    if (filled <= slots_.size() * 4ull) return;
    uint64_t capacity = slots_.empty() ? 8 : slots_.size() * 2ull;
    while (filled > capacity * 4) capacity *= 2;
    resize(static_cast<uint32_t>(capacity), keys);
  }

  // The key must be absent.
  template <class Keys>
  void insert(uint64_t hash, uint32_t value, const Keys& keys) {
    make_room(1, keys);
    fill_slot(hash, value);
    ++count_;
  }

  template <class Keys>
  void erase(uint32_t index, const Keys& keys) {
    uint32_t hole = index;
    for (uint32_t i = next(hole); slots_[i] != kEmpty; i = next(i)) {
      const uint32_t want = home(keys.hash_of(slots_[i]));
      // The entry may move back only if its home is not between the hole and itself.
      if (((i - want) & mask_) >= ((i - hole) & mask_)) {
        slots_[hole] = slots_[i];
        hole = i;
      }
    }
    slots_[hole] = kEmpty;
    --count_;
  }

  // Whether all entries are near their homes, as with an unpredictable hash: a table that is 4/5
  // full has no probe sequence of kFar slots in the age of the universe.
  template <class Keys>
  bool is_spread(const Keys& keys) const {
    for (uint32_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i] != kEmpty && ((i - home(keys.hash_of(slots_[i]))) & mask_) > kFar) return false;
    }
    return true;
  }

  // Frees memory after many erases; not called by erase, so that scans by index stay valid. Shrinks
  // late, because every remaining entry is inserted again (at worst some 100 ns each). If there is
  // no memory for the smaller table, the old one stays.
  template <class Keys>
  void shrink(const Keys& keys) {
    if (count_ == 0) {
      PageVector<uint32_t>().swap(slots_);
      mask_ = 0;
    } else if (slots_.size() > 64 && count_ * 32ull < slots_.size()) {
      try {
        resize(capacity() / 8, keys);
      } catch (const std::bad_alloc&) {}
    }
  }

 private:
  void fill_slot(uint64_t hash, uint32_t value) {
    uint32_t i = home(hash);
    while (slots_[i] != kEmpty) i = next(i);
    slots_[i] = value;
  }

  template <class Keys>
  void resize(uint32_t capacity, const Keys& keys) {
    PageVector<uint32_t> old(capacity, kEmpty);
    old.swap(slots_);
    mask_ = capacity - 1;
    for (const uint32_t value : old) {
      if (value != kEmpty) fill_slot(keys.hash_of(value), value);
    }
  }

  PageVector<uint32_t> slots_;
  uint32_t mask_ = 0;
  uint32_t count_ = 0;
};

}  // namespace kvd
