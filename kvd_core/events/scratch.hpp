// Memory in which events wait for the end of their batch, since its rank comes last on the wire.
//
//   order    [S0][R0][S1][C0]...                  in the order of the batch
//   stored   [event, hashes_at, tokens_at, mm_at] removed [event, hashes_at]  cleared [event]
//   hashes   [h h h|h|h h]    tokens [t t t t|t t]    mm_begin [0 0 2|...]    mm [m m|...]
//   remaining [n n n|...]
//
// Invariants
//  1. Events refer to the vectors by offset while these grow, by pointer when they are emitted.
//  2. All vectors keep their capacity up to kScratchKeepBytes for the next batch of the thread, so
//     the steady state allocates none.
//  3. Claimed lengths allocate nothing: a byte of payload takes at most eleven bytes here (the
//     shortest stored event has 16 and takes 168), besides the vectors' own doubling.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "events/types.hpp"
#include "base/steps.hpp"

namespace kvd {

// Largest vector that is kept after a batch, so that long batches do not stay resident: more than
// the largest recorded batch needs.
constexpr size_t kScratchKeepBytes = size_t{64} << 10;

namespace decoding {

// Memory of a vector that is freed between two checks of the steps: the kernel takes 0.1 ms for it.
constexpr size_t kFreedAtOnce = size_t{1} << 20;
constexpr size_t kStepsAFree = 1000;
constexpr size_t kPageBytes = 4096;

constexpr size_t kReservedFrom = 65536;  // elements for which memory is reserved at once

enum class Type : uint8_t { NONE, STORED, REMOVED, CLEARED, IGNORED, UNKNOWN };

struct PendingStored {
  StoredEvent event;  // its pointers are set when it is emitted, as the vectors grow until then
  size_t hashes_at;
  size_t tokens_at;
  size_t mm_at;  // into mm_begin; meaningful when has_mm
  bool has_mm;

  // Member by member: the compiler's code to zero the whole struct is slower than reading an event.
  PendingStored() : hashes_at(0), tokens_at(0), mm_at(0), has_mm(false) {
    event.n_hashes = event.n_tokens = 0;
    event.has_parent = event.pairs = event.remote = event.has_lora_id = false;
    event.parent = event.block_size = 0;
    event.tier = Tier::DEVICE;
    event.kind = GroupKind::NONE;
    event.group = -1;
    event.window = event.lora_id = 0;
    event.mm_begin = nullptr;
    event.mm = nullptr;
    event.origin = Origin::UNKNOWN;
  }
};
struct PendingRemoved {
  RemovedEvent event;
  size_t hashes_at;
  size_t remaining_at;  // meaningful when has_remaining
  bool has_remaining;
};
struct Pending {
  Type type;       // STORED, REMOVED or CLEARED
  uint32_t index;  // into the vector of that type
};

struct Scratch {
  std::vector<uint64_t> hashes;
  std::vector<uint32_t> tokens;
  std::vector<uint32_t> mm_begin;
  std::vector<uint64_t> mm;
  std::vector<uint32_t> remaining;
  std::vector<PendingStored> stored;
  std::vector<PendingRemoved> removed;
  std::vector<ClearedEvent> cleared;
  std::vector<Pending> order;
  // Local hashes of the part of an event that is being stored, and its local hashes by the seed of
  // sequence hashes where that differs.
  std::vector<uint64_t> locals, plain;
  size_t given_back = 0;  // bytes of the vector that is being freed

  // Makes room for a long list at once, where growing step by step would copy what is there again
  // and again. Untouched memory costs nothing, and a short list leaves growing to the vector.
  template <class T>
  static void expect(std::vector<T>& items, size_t more) {
    if (more >= kReservedFrom) items.reserve(items.size() + more);
  }

  void clear() {
    each([](auto& items) { items.clear(); });
    given_back = 0;
  }

  // Frees vectors beyond kScratchKeepBytes; false when the steps are used up before that. Their
  // content is lost.
  bool give_back(Steps& steps) {
    bool all = true;
    each([&](auto& items) { all = all && give_back(items, steps); });
    return all;
  }

  template <class T>
  bool give_back(std::vector<T>& items, Steps& steps) {
    const size_t bytes = items.capacity() * sizeof(T);
    if (bytes <= kScratchKeepBytes) return true;
    char* page = reinterpret_cast<char*>(items.data());
    page += -reinterpret_cast<uintptr_t>(page) % kPageBytes;
    for (; given_back + kFreedAtOnce + kPageBytes <= bytes; given_back += kFreedAtOnce) {
      if (!steps.left()) return false;
      madvise(page + given_back, kFreedAtOnce, MADV_DONTNEED);
      steps.take(kStepsAFree);
    }
    given_back = 0;
    std::vector<T>().swap(items);  // not `= {}`, which assigns an empty list and keeps the capacity
    return true;
  }

  template <class Visit>
  void each(Visit visit) {
    visit(hashes), visit(tokens), visit(mm_begin), visit(mm), visit(remaining);
    visit(stored), visit(removed), visit(cleared), visit(order), visit(locals), visit(plain);
  }
};

}  // namespace decoding

using Scratch = decoding::Scratch;

}  // namespace kvd
