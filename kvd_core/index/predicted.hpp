// Blocks that ranks should cache soon because a prompt was sent to them, kept beside what their
// events announce: between a booking and the first event of its prompt, nothing else says so.
//
//   booked on rank 7:  a1 77 03        chained: 5e 0c d9     one entry a (rank, chained hash)
//   events of rank 7:  a1              depth: 1 by its events, 3 with the predictions
//
//   oldest ──────────────────────────────────────────> newest       in order of expiry
//   (7, d9) (7, 0c) (7, 5e)   (9, 41) (9, 5e)
//    └ one booking, its deepest block first ┘
//
// An entry ends when its time is up, when there are too many, when the rank has refused the only
// prompt that predicts it, or when the rank says that it has dropped a block of the same content:
// the engine knows better. An eviction finds entries by the block's content alone, because that is
// what O(1) allows. So it also ends the prediction of an equal block in another prompt, which loses
// a prediction and makes none wrong. Events that confirm a prediction do not end it: the larger of
// the two depths counts, and then they are equal.
//
// The index uses no predictions: they are in none of its answers, dumps or statistics.
//
// Invariants
//   1. entries are distinct by (owner, hash); each is in `exact_`, in the list of its (owner,
//      local) that `content_` finds, and in the order of expiry;
//   2. an owner stands for a rank from when the rank is first seen until its next `forget`; entries
//      of earlier owners cannot be found any more and leave when their time is up.
//
// Costs: add and withdraw O(blocks); reach O(1 + blocks predicted); evict O(entries of that
// content), at most kMaxEvicted; forget O(1). 48 bytes an entry and about 12 in the tables.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/arena.hpp"
#include "base/keyed.hpp"

namespace kvd {

class Predicted {
 public:
  // Entries of one content and rank that an eviction ends at once, in some microseconds. More come
  // only from prompts that repeat a block; those end with their time.
  static constexpr uint32_t kMaxEvicted = 64;

  // Beyond `max` entries, the oldest go until `target` are left.
  Predicted(double ttl_s, uint32_t max, uint32_t target)
      : ttl_s_(ttl_s), max_(max), target_(target) {}

  uint32_t size() const { return entries_.live(); }
  size_t bytes() const {
    return entries_.bytes() + exact_.bytes() + content_.bytes() +
           owners_.capacity() * sizeof(uint32_t);
  }

  // Chains local hashes: `chained[i]` stands for the blocks up to i.
  void chain(const uint64_t* locals, size_t n, std::vector<uint64_t>& chained) const {
    chained.resize(n);
    uint64_t hash = 0;
    for (size_t i = 0; i < n; ++i) chained[i] = hash = hash_(locals[i], hash);
  }

  // Notes that a prompt was sent to a rank, from its block `from` on. Blocks noted before get a new
  // time.
  void add(uint32_t rank, const uint64_t* locals, size_t n, size_t from, double now) {
    n = std::min<size_t>(n, max_);
    chain(locals, n, chained_);
    const uint32_t owner = owner_of(rank);
    for (size_t i = n; i-- > from;) note(owner, chained_[i], locals[i], now + ttl_s_);
    if (size() > max_) excess_ = size() - target_;
    prune(now, 2 * n);
  }

  // Takes back what `add` at that time has newly predicted of a prompt, but for blocks that other
  // prompts have predicted since.
  void withdraw(uint32_t rank, const uint64_t* locals, size_t n, double then) {
    if (rank >= owners_.size()) return;
    n = std::min<size_t>(n, max_);
    chain(locals, n, chained_);
    for (size_t i = n; i-- > 0;) {
      const uint32_t id = find(owners_[rank], chained_[i]);
      if (id == kNoEntry) continue;
      if (!entries_[id].renewed && entries_[id].expiry == then + ttl_s_) end(id);
    }
  }

  // How far the rank's predicted blocks reach from block `from` on; `from` if none are predicted.
  size_t reach(uint32_t rank, const std::vector<uint64_t>& chained, size_t from) const {
    if (rank >= owners_.size()) return from;
    const uint32_t owner = owners_[rank];
    while (from < chained.size() && find(owner, chained[from]) != kNoEntry) ++from;
    return from;
  }

  // Notes that the rank has dropped a block.
  void evict(uint32_t rank, uint64_t local) {
    if (rank >= owners_.size()) return;
    for (uint32_t left = kMaxEvicted; left > 0; --left) {
      const uint32_t at = slot_of_content(owners_[rank], local);
      if (at == ProbeTable::kEmpty) return;
      end(content_.at(at));
    }
  }

  // Notes that the rank has dropped everything, or that the number now names another rank.
  void forget(uint32_t rank) {
    if (rank < owners_.size()) owners_[rank] = next_owner_++;
  }

  // Ends at most `limit` entries that are too old or too many; false when there are no more.
  bool prune(double now, size_t limit) {
    for (; limit > 0 && oldest_ != kNoEntry; --limit) {
      if (entries_[oldest_].expiry > now && excess_ == 0) return false;
      end(oldest_);
    }
    return oldest_ != kNoEntry && (entries_[oldest_].expiry <= now || excess_ > 0);
  }

 private:
  static constexpr uint32_t kNoEntry = 0xffffffffu;

  struct Entry {
    uint64_t hash;  // chained
    uint64_t local;
    double expiry;
    uint32_t owner;
    uint32_t older, newer;
    uint32_t before, after;  // of the same owner and local hash
    bool renewed;            // by another `add`

    uint32_t& free_link() { return older; }
  };

  struct ByHash {
    const Predicted& in;
    uint64_t hash_of(uint32_t id) const {
      return in.hash_(in.entries_[id].hash, in.entries_[id].owner);
    }
  };
  struct ByLocal {
    const Predicted& in;
    uint64_t hash_of(uint32_t id) const {
      return in.hash_(in.entries_[id].local, in.entries_[id].owner);
    }
  };

  uint32_t owner_of(uint32_t rank) {
    while (owners_.size() <= rank) owners_.push_back(next_owner_++);
    return owners_[rank];
  }

  uint32_t slot_of(uint32_t owner, uint64_t hash) const {
    return exact_.find(hash_(hash, owner), [&](uint32_t id) {
      return entries_[id].hash == hash && entries_[id].owner == owner;
    });
  }

  uint32_t slot_of_content(uint32_t owner, uint64_t local) const {
    return content_.find(hash_(local, owner), [&](uint32_t id) {
      return entries_[id].local == local && entries_[id].owner == owner;
    });
  }

  uint32_t find(uint32_t owner, uint64_t hash) const {
    const uint32_t at = slot_of(owner, hash);
    return at == ProbeTable::kEmpty ? kNoEntry : exact_.at(at);
  }

  void note(uint32_t owner, uint64_t hash, uint64_t local, double expiry) {
    uint32_t id = find(owner, hash);
    if (id != kNoEntry) {
      unlink(id);
      entries_[id].renewed = true;
    } else {
      id = entries_.take();
      Entry& entry = entries_[id];
      entry.hash = hash;
      entry.local = local;
      entry.owner = owner;
      entry.renewed = false;
      exact_.insert(hash_(hash, owner), id, ByHash{*this});
      link_content(id);
    }
    entries_[id].expiry = expiry;
    append(id);
  }

  void end(uint32_t id) {
    if (excess_ > 0) --excess_;
    unlink(id);
    exact_.erase(slot_of(entries_[id].owner, entries_[id].hash), ByHash{*this});
    exact_.shrink(ByHash{*this});
    unlink_content(id);
    entries_.give(id);
    while (entries_.live() == 0 && entries_.shrink()) {}
  }

  // ---- the order of expiry

  void append(uint32_t id) {
    entries_[id].older = newest_;
    entries_[id].newer = kNoEntry;
    (newest_ == kNoEntry ? oldest_ : entries_[newest_].newer) = id;
    newest_ = id;
  }

  void unlink(uint32_t id) {
    const uint32_t older = entries_[id].older, newer = entries_[id].newer;
    (older == kNoEntry ? oldest_ : entries_[older].newer) = newer;
    (newer == kNoEntry ? newest_ : entries_[newer].older) = older;
  }

  // ---- the lists of one content

  void link_content(uint32_t id) {
    Entry& entry = entries_[id];
    const uint32_t at = slot_of_content(entry.owner, entry.local);
    entry.before = kNoEntry;
    entry.after = kNoEntry;
    if (at == ProbeTable::kEmpty) {
      content_.insert(hash_(entry.local, entry.owner), id, ByLocal{*this});
      return;
    }
    entry.after = content_.at(at);
    entries_[entry.after].before = id;
    content_.set(at, id);
  }

  void unlink_content(uint32_t id) {
    const Entry& entry = entries_[id];
    if (entry.after != kNoEntry) entries_[entry.after].before = entry.before;
    if (entry.before != kNoEntry) {
      entries_[entry.before].after = entry.after;
      return;
    }
    const uint32_t at = slot_of_content(entry.owner, entry.local);
    if (entry.after != kNoEntry) {
      content_.set(at, entry.after);
      return;
    }
    content_.erase(at, ByLocal{*this});
    content_.shrink(ByLocal{*this});
  }

  friend class Verifier;

  double ttl_s_;
  uint32_t max_, target_;
  uint32_t excess_ = 0;  // entries that still have to go because there were too many
  Arena<Entry> entries_;
  ProbeTable exact_, content_;
  KeyedHash hash_;
  std::vector<uint32_t> owners_;  // by rank of the index
  uint32_t next_owner_ = 0;
  uint32_t oldest_ = kNoEntry, newest_ = kNoEntry;
  std::vector<uint64_t> chained_;  // scratch of `add` and `withdraw`
};

}  // namespace kvd
