// Storage whose entries never move, addressed by dense 32-bit ids.
//
//   ids     0 .. 255         256 .. 511         ...
//          +-----------+    +-----------+
//          | T T T ... |    | T T T ... |      one segment = 256 entries, or fewer
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
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <type_traits>
#include <utility>
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

template <class T, uint32_t kBits = 8>
class Arena {
 public:
  static constexpr uint32_t kSegmentBits = kBits;
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

// One array of a `ProbeTable`: open addressing with linear probing. It keeps the complements of the
// values: so memory that has just been mapped is empty, and a large array is made without touching
// it.
class Slots {
 public:
  static constexpr uint32_t kEmpty = 0xffffffffu;

  Slots() = default;
  // `capacity`: a power of two.
  explicit Slots(uint32_t capacity)
      : slots_(Memory().allocate(capacity)), capacity_(capacity), mask_(capacity - 1) {
    if (bytes() < Memory::kMapped) std::memset(slots_, 0, bytes());
  }
  ~Slots() {
    if (slots_ != nullptr) Memory().deallocate(slots_, capacity_);
  }
  Slots(Slots&& other) noexcept { *this = std::move(other); }
  Slots& operator=(Slots&& other) noexcept {
    std::swap(slots_, other.slots_);
    std::swap(capacity_, other.capacity_);
    std::swap(mask_, other.mask_);
    return *this;
  }

  uint32_t capacity() const { return capacity_; }
  size_t bytes() const { return capacity_ * sizeof(uint32_t); }
  uint32_t operator[](uint32_t i) const { return ~slots_[i]; }
  void set(uint32_t i, uint32_t value) { slots_[i] = ~value; }

  template <class Same>
  uint32_t find(uint64_t hash, Same&& same) const {
    if (capacity_ == 0) return kEmpty;
    for (uint32_t i = home(hash);; i = next(i)) {
      const uint32_t value = (*this)[i];
      if (value == kEmpty) return kEmpty;
      if (same(value)) return i;
    }
  }

  void insert(uint64_t hash, uint32_t value) {
    uint32_t i = home(hash);
    while ((*this)[i] != kEmpty) i = next(i);
    set(i, value);
  }

  template <class Keys>
  void erase(uint32_t hole, const Keys& keys) {
    for (uint32_t i = next(hole); (*this)[i] != kEmpty; i = next(i)) {
      // The entry may move back only if its home is not between the hole and itself.
      if (distance((*this)[i], i, keys) >= ((i - hole) & mask_)) {
        slots_[hole] = slots_[i];
        hole = i;
      }
    }
    set(hole, kEmpty);
  }

  // Slots from the home of a value to slot i, where it is.
  template <class Keys>
  uint32_t distance(uint32_t value, uint32_t i, const Keys& keys) const {
    return (i - home(keys.hash_of(value))) & mask_;
  }

 private:
  using Memory = PageAllocator<uint32_t>;

  uint32_t home(uint64_t hash) const { return static_cast<uint32_t>(hash >> 32) & mask_; }
  uint32_t next(uint32_t i) const { return (i + 1) & mask_; }

  uint32_t* slots_ = nullptr;
  uint32_t capacity_ = 0;
  uint32_t mask_ = 0;
};

// Open addressing over 32-bit values whose keys live elsewhere. Linear probing, and deletion by
// moving later entries back: a delete leaves no marker behind, so millions of deletes of absent
// keys cost nothing and change nothing (deletes of unknown blocks are normal traffic).
//
// A table that grows or shrinks takes a new array, and each insert and each `shrink` then moves a
// few entries there. No call takes a time that grows with the table:
//
//   old_    [ . . . . . . . . . . | 17 . 9 4 . 12 . 3 ]     what has not been moved
//             moved: all empty     moved_
//   now_    [ . 5 . . . 8 . . . . 31 . . . 6 . . . 20 . . . . 11 . . 2 . . . . ]     the others
//             new entries come here
//
//   index     0 .. old capacity - 1: slots of old_; from there on: slots of now_
//
// Entries go by whole runs, up to an empty slot. So each array is complete in itself: an entry in
// it is found from its home. At rest old_ has no slots, and a search costs what one array costs.
//
// Invariants
//   1. an entry is in one of the arrays, and no empty slot is between its home there and itself;
//   2. all slots of old_ before `moved_` are empty;
//   3. now_ has room for all entries, at most 4/5 full. It is not full before old_ is empty: a
//      table of 4/5 C entries grows to 2 C slots and has moved all after C/16 inserts; one of C/32
//      entries that shrinks to C/8 slots has room for C/10, and has moved all after C/16, too.
//
// `Keys` supplies `uint64_t hash_of(uint32_t value) const`. Clients that choose keys must not be
// able to predict it (base/keyed.hpp): a probe sequence grows with the keys that share its start.
class ProbeTable {
 public:
  static constexpr uint32_t kEmpty = Slots::kEmpty;
  // Most slots from an entry to its home that `verify` accepts; unpredictable hashes never need as
  // many.
  static constexpr uint32_t kFar = 4096;

  uint32_t size() const { return count_; }
  // Indices are below it. Whoever walks over them in parts meets each entry that was there all the
  // time, perhaps twice, unless the capacity changes meanwhile or an erase moves it back.
  uint32_t capacity() const { return old_.capacity() + now_.capacity(); }
  uint32_t at(uint32_t index) const {
    const uint32_t before = old_.capacity();
    return index < before ? old_[index] : now_[index - before];
  }
  void set(uint32_t index, uint32_t value) {
    const uint32_t before = old_.capacity();
    if (index < before) old_.set(index, value);
    else now_.set(index - before, value);
  }
  size_t bytes() const { return old_.bytes() + now_.bytes(); }

  // Makes room for `count` entries in an empty table.
  void reserve(uint32_t count) {
    uint64_t capacity = kLeast;
    while (count * 5ull > capacity * 4ull) capacity *= 2;
    now_ = Slots(static_cast<uint32_t>(capacity));
    old_ = Slots();
  }

  // Index of the entry for which `same(value)` holds, or kEmpty.
  template <class Same>
  uint32_t find(uint64_t hash, Same&& same) const {
    const uint32_t i = now_.find(hash, same);
    if (__builtin_expect(old_.capacity() == 0, 1)) return i;
    return i != kEmpty ? old_.capacity() + i : find_old(hash, same);
  }

  // The same for callers that cannot pass a lambda.
  template <class State>
  uint32_t find(uint64_t hash, bool (*same)(const State*, uint32_t), const State* state) const {
    return find(hash, [&](uint32_t value) { return same(state, value); });
  }

  // Index of a value that is in the table.
  uint32_t index_of(uint64_t hash, uint32_t value) const {
    return find(hash, [&](uint32_t each) { return each == value; });
  }

  // Makes room for an entry, so that the next insert does not throw.
  void make_room() {
    if ((count_ + 1ull) * 5 <= now_.capacity() * 4ull) return;
    move_to(now_.capacity() == 0 ? kLeast : now_.capacity() * 2);
  }

  // The key must be absent.
  template <class Keys>
  void insert(uint64_t hash, uint32_t value, const Keys& keys) {
    make_room();
    if (old_.capacity() != 0) move_some(keys);
    now_.insert(hash, value);
    ++count_;
  }

  template <class Keys>
  void erase(uint32_t index, const Keys& keys) {
    const uint32_t before = old_.capacity();
    const bool is_old = index < before;
    (is_old ? old_ : now_).erase(is_old ? index : index - before, keys);
    --count_;
  }

  // Whether all entries are near their homes, as with an unpredictable hash: a table that is 4/5
  // full has no probe sequence of kFar slots in the age of the universe.
  template <class Keys>
  bool is_spread(const Keys& keys) const {
    for (const Slots* slots : {&old_, &now_}) {
      for (uint32_t i = 0; i < slots->capacity(); ++i) {
        const uint32_t value = (*slots)[i];
        if (value != kEmpty && slots->distance(value, i, keys) > kFar) return false;
      }
    }
    return true;
  }

  // Goes on moving entries, or begins a smaller array after many erases; not called by erase, so
  // that scans by index stay valid. If there is no memory for the smaller array, the table stays as
  // it is.
  template <class Keys>
  void shrink(const Keys& keys) {
    if (count_ == 0) {
      now_ = Slots();
      old_ = Slots();
    } else if (old_.capacity() != 0) {
      move_some(keys);
    } else if (now_.capacity() > 64 && count_ * 32ull < now_.capacity()) {
      try {
        move_to(now_.capacity() / 8);
      } catch (const std::bad_alloc&) {}
    }
  }

 private:
  static constexpr uint32_t kLeast = 8;
  static constexpr uint32_t kMoved = 16;  // slots at a time, and on to the end of a run

  void move_to(uint32_t capacity) {
    Slots empty(capacity);
    old_ = std::move(now_);
    now_ = std::move(empty);
    moved_ = 0;
  }

  // These two are no part of the code that runs at rest.
  template <class Same>
  [[gnu::noinline]] uint32_t find_old(uint64_t hash, Same&& same) const {
    return old_.find(hash, same);
  }

  template <class Keys>
  [[gnu::noinline]] void move_some(const Keys& keys) {
    const uint32_t end = old_.capacity();
    for (uint32_t least = moved_ + kMoved; moved_ < end; ++moved_) {
      const uint32_t value = old_[moved_];
      if (value != kEmpty) {
        now_.insert(keys.hash_of(value), value);
        old_.set(moved_, kEmpty);
      } else if (moved_ >= least) {
        return;
      }
    }
    old_ = Slots();
  }

  Slots now_, old_;
  uint32_t moved_ = 0;  // the next slot of old_ to be moved
  uint32_t count_ = 0;
};

}  // namespace kvd
