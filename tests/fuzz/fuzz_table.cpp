// Any sequence of inserts, erases, shrinks and walks on a table whose entries move to a larger or
// smaller array now and then, on a heap that is full now and then. After each step the table's
// entries are those of a plain map, and found. A step that fails changes nothing.
//
// tests/fuzz/build builds it. The input is read as pairs of bytes: an operation, and how often.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <set>

#include "base/arena.hpp"

namespace {

using kvd::ProbeTable;

enum Kind : uint8_t { ADD, ERASE, SHRINK, CLEAR, WALK, FULL, kinds };

void require(bool holds) {
  if (!holds) std::abort();
}

// Hashes of which many have the same home, or one at the end of the array.
struct Keys {
  uint64_t hash_of(uint32_t value) const {
    const uint64_t hash = kvd::mix64(value + 1);
    return hash % 4 == 0 ? ~uint64_t{0} << 32 << hash % 3 : hash;
  }
};

class Life {
 public:
  void step(Kind kind, uint32_t count) {
    switch (kind) {
      case ADD:
        for (uint32_t i = 0; i < count; ++i) add();
        break;
      case ERASE:
        for (uint32_t i = 0; i < count && !live_.empty(); ++i) erase();
        break;
      case SHRINK:
        for (uint32_t i = 0; i < count; ++i) table_.shrink(keys_);
        break;
      case CLEAR:
        clear(count);
        break;
      case WALK:
        walk(count);
        break;
      case FULL:
        add_on_full_heap(count);
        break;
      default:
        break;
    }
    check();
  }

  void end() {
    clear(1);
    table_.shrink(keys_);
    require(table_.size() == 0 && table_.capacity() == 0 && table_.bytes() == 0);
  }

 private:
  void add() {
    table_.insert(keys_.hash_of(next_), next_, keys_);
    live_.insert(next_++);
  }

  void add_on_full_heap(uint32_t left) {
    kvd::heap_left = left % 2;
    try {
      table_.make_room();
      kvd::heap_left = 0;
      add();
    } catch (const std::bad_alloc&) { require(left % 2 == 0); }
    table_.shrink(keys_);
    kvd::heap_left = UINT64_MAX;
  }

  // Erases the entry after the one that was erased last.
  void erase() {
    auto at = live_.upper_bound(erased_);
    if (at == live_.end()) at = live_.begin();
    erased_ = static_cast<uint32_t>(kvd::mix64(*at));
    table_.erase(table_.index_of(keys_.hash_of(*at), *at), keys_);
    live_.erase(at);
  }

  // Erases every entry that is divisible by `by` in one walk.
  void clear(uint32_t by) {
    for (uint32_t i = 0; i < table_.capacity(); ++i) {
      const uint32_t value = table_.at(i);
      if (value == ProbeTable::kEmpty || value % by != 0) continue;
      live_.erase(value);
      table_.erase(i, keys_);
      --i;
    }
    for (const uint32_t value : live_) require(value % by != 0);
  }

  // Walks over all entries, with an insert every few slots. Those that were there are all met.
  void walk(uint32_t each) {
    const uint32_t capacity = table_.capacity();
    std::set<uint32_t> missing = live_;
    for (uint32_t i = 0; i < capacity; ++i) {
      missing.erase(table_.at(i));
      if (i % each != 0) continue;
      add();
      if (table_.capacity() != capacity) return;
    }
    require(missing.empty());
  }

  void check() const {
    require(table_.size() == live_.size());
    std::set<uint32_t> met;
    for (uint32_t i = 0; i < table_.capacity(); ++i) {
      const uint32_t value = table_.at(i);
      if (value != ProbeTable::kEmpty) require(met.insert(value).second);
    }
    require(met == live_);
    for (const uint32_t value : live_) {
      const uint32_t i = table_.index_of(keys_.hash_of(value), value);
      require(i < table_.capacity() && table_.at(i) == value);
    }
    require(table_.index_of(keys_.hash_of(next_), next_) == ProbeTable::kEmpty);
    require(table_.is_spread(keys_));
  }

  Keys keys_;
  ProbeTable table_;
  std::set<uint32_t> live_;
  uint32_t next_ = 0, erased_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Life life;
  for (size_t i = 0; i + 1 < size && i < 256; i += 2) {
    life.step(static_cast<Kind>(data[i] % kinds), 1u + data[i + 1]);
  }
  life.end();
  return 0;
}
