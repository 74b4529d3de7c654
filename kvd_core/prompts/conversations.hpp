// What the beginnings of conversations are in blocks, so that a next turn needs no tokenizer.
//
//   context ──┬─ message 0 ──┬─ message 1 ──┬─ message 2 ──┐      a conversation as it is sent
//             h0             h1             h2             h3     128 bits each, over all before
//
//   known:  h3 ──> local hashes of the whole blocks of context .. message 2, and how many tokens
//
//   next turn:   the same, and messages 3 and 4: h5 and h4 are unknown, h3 is known
//
// The context is what else decides about the tokens: model, tools, options of the template. Two
// conversations with the same beginning have the same hashes there, whoever leads them. Only the
// beginning counts that ends with a message: a template that writes earlier messages anew when
// others follow makes the last blocks differ, which costs a little of the overlap and nothing else.
//
// Where nobody says the tokens, the same beginnings lead a next turn to its conversation's strand:
// a number, made of the beginning that was seen first.
//
// Invariants
//   1. every entry is linked once, from the least recently used one on; the table finds it by its
//      hash;
//   2. `bytes_` is what all entries take and is at most `max_bytes_`; entries that do not fit by
//      themselves are not kept.
//
// Costs (messages m, bytes b, blocks n): recall O(b) for the hashes, about 0.1 ns a byte, and m
// probes from the last message back; remember the same and a copy of n hashes; strand_of both in
// one pass; 8 bytes a block, and 64 an entry or 40 a strand.
#pragma once

#include <xxhash.h>

#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "base/arena.hpp"
#include "base/keyed.hpp"
#include "prompts/messages.hpp"

namespace kvd::prompts {

struct Beginning {
  uint64_t low = 0;
  uint64_t high = 0;

  bool operator==(const Beginning& other) const { return low == other.low && high == other.high; }
};

// What a beginning is in blocks.
struct Blocks {
  std::vector<uint64_t> local_hashes;  // of its whole blocks
  uint32_t tokens = 0;

  size_t bytes() const { return local_hashes.size() * sizeof(uint64_t); }
};

// Which conversation a beginning is of.
struct Strand {
  uint64_t number = 0;

  size_t bytes() const { return 0; }
};

// Values of beginnings, each of which says how many `bytes` it takes beside itself.
template <class Value>
class Beginnings {
 public:
  explicit Beginnings(size_t max_bytes) : max_bytes_(max_bytes) {}

  size_t size() const { return entries_.live(); }
  size_t bytes() const { return bytes_; }
  uint64_t forgotten() const { return forgotten_; }  // entries that made room for others

 protected:
  struct Known {
    Beginning of;
    Value value;
    uint32_t older, newer;  // neighbours in the order of use

    uint32_t& free_link() { return older; }
  };

  // Hashes every beginning that ends with a message, each with where it ends; false without any.
  bool read(std::string_view context, std::string_view messages) {
    read_.clear();
    XXH128_hash_t at = XXH3_128bits(context.data(), context.size());
    each_element(messages.data(), messages.data() + messages.size(),
                 [&](const char* begin, const char* end) {
                   const XXH128_hash_t own = XXH3_128bits(begin, static_cast<size_t>(end - begin));
                   const XXH128_hash_t both[2] = {at, own};
                   at = XXH3_128bits(both, sizeof both);
                   read_.push_back({{at.low64, at.high64}, end});
                 });
    return !read_.empty();
  }

  // Finds the longest known beginning of what was read, and makes it the last to go.
  const Known* longest(const char** end) {
    for (size_t i = read_.size(); i-- > 0;) {
      const uint32_t at = find(read_[i].first);
      if (at == kNone) continue;
      unlink(at);
      append(at);
      if (end != nullptr) *end = read_[i].second;
      return &entries_[at];
    }
    return nullptr;
  }

  // The beginning that is all that was read.
  const Beginning& whole() const { return read_.back().first; }

  // Notes what all that was read is; false if it does not fit.
  bool keep(Value value) {
    const Beginning of = whole();
    if (const uint32_t known = find(of); known != kNone) forget(known);
    const size_t needed = kEntryBytes + value.bytes();
    if (needed > max_bytes_) return false;
    while (bytes_ + needed > max_bytes_) {
      forget(oldest_);
      ++forgotten_;
    }
    table_.make_room();
    const uint32_t at = entries_.take();
    entries_[at].of = of;
    entries_[at].value = std::move(value);
    table_.insert(entries_.hash_of(at), at, entries_);
    append(at);
    bytes_ += needed;
    return true;
  }

 private:
  static constexpr uint32_t kNone = 0xffffffffu;
  static constexpr size_t kEntryBytes = sizeof(Known) + 8;  // with its slot in the table

  struct KnownArena : Arena<Known> {
    KeyedHash hash;

    uint64_t hash_of(uint32_t at) const { return hash((*this)[at].of.low, (*this)[at].of.high); }
  };

  uint32_t find(const Beginning& of) const {
    const uint32_t slot = table_.find(entries_.hash(of.low, of.high),
                                      [&](uint32_t at) { return entries_[at].of == of; });
    return slot == ProbeTable::kEmpty ? kNone : table_.at(slot);
  }

  void forget(uint32_t at) {
    bytes_ -= kEntryBytes + entries_[at].value.bytes();
    table_.erase(table_.index_of(entries_.hash_of(at), at), entries_);
    unlink(at);
    entries_[at].value = Value{};
    entries_.give(at);
  }

  void append(uint32_t at) {
    entries_[at].older = newest_;
    entries_[at].newer = kNone;
    (newest_ == kNone ? oldest_ : entries_[newest_].newer) = at;
    newest_ = at;
  }

  void unlink(uint32_t at) {
    const uint32_t older = entries_[at].older, newer = entries_[at].newer;
    (older == kNone ? oldest_ : entries_[older].newer) = newer;
    (newer == kNone ? newest_ : entries_[newer].older) = older;
  }

  size_t max_bytes_;
  size_t bytes_ = 0;
  uint64_t forgotten_ = 0;
  KnownArena entries_;
  ProbeTable table_;
  uint32_t oldest_ = kNone, newest_ = kNone;
  std::vector<std::pair<Beginning, const char*>> read_;  // of the last conversation read
};

// The beginning of a conversation that is known, and how much follows it.
struct Recalled {
  const Blocks* known = nullptr;  // until the next change; nullptr: nothing is known
  size_t rest = 0;                // bytes of the messages behind it
};

class Conversations : public Beginnings<Blocks> {
 public:
  using Beginnings::Beginnings;

  // Finds the longest known beginning of messages (a JSON array).
  Recalled recall(std::string_view context, std::string_view messages) {
    read(context, messages);
    const char* end = nullptr;
    const Known* known = longest(&end);
    if (known == nullptr) return {};
    return {&known->value, static_cast<size_t>(messages.data() + messages.size() - end)};
  }

  // Notes what all of the messages are; false if they do not fit.
  bool remember(std::string_view context, std::string_view messages, const uint64_t* local_hashes,
                size_t blocks, uint32_t tokens) {
    return read(context, messages) && keep({{local_hashes, local_hashes + blocks}, tokens});
  }
};

class Strands : public Beginnings<Strand> {
 public:
  using Beginnings::Beginnings;

  // Finds the strand that messages (a JSON array) go on with, or begin; false if there are none.
  bool strand_of(std::string_view context, std::string_view messages, uint64_t& strand) {
    if (!read(context, messages)) return false;
    const Known* known = longest(nullptr);
    strand = known != nullptr ? known->value.number : whole().low;
    keep({strand});
    return true;
  }
};

}  // namespace kvd::prompts
