// The prefix cache of a simulated engine: blocks of prompts; the least recently used are evicted.
//
// Cost: a lookup, and a move in the order of use, for each block of a prompt.
#pragma once

#include <list>
#include <unordered_map>

#include "dataset.hpp"
#include "events.hpp"

namespace kvbench {

constexpr size_t kTokenBytes = 4;  // bytes of a text that make one token

// Appends the tokens of a text, one for each kTokenBytes: equal beginnings have equal tokens.
inline void append_tokens(Tokens& tokens, const char* text, size_t size) {
  for (size_t at = 0; at < size; at += kTokenBytes) {
    uint32_t word = 0;
    std::memcpy(&word, text + at, std::min(kTokenBytes, size - at));
    tokens.push_back(uint32_t(uint64_t(word * 2654435761u) * kVocabulary >> 32));
  }
}

class PrefixCache {
 public:
  PrefixCache(size_t capacity, size_t block_size) : capacity_(capacity), block_size_(block_size) {}

  // Caches the whole blocks of a prompt, and adds the stored and removed blocks to `events`.
  // Returns how many leading blocks were cached before.
  size_t serve(const Tokens& tokens, Batch& events) {
    const Hashes chain = sequence_hashes(tokens, block_size_, nullptr);
    size_t held = 0;
    while (held < chain.size() && places_.count(chain[held])) held++;
    for (size_t i = chain.size(); i-- > 0;) touch(chain[i]);  // so that the last block goes first
    if (held < chain.size()) {
      const auto first = tokens.begin() + long(held * block_size_);
      const auto end = tokens.begin() + long(chain.size() * block_size_);
      events.stored({chain.begin() + long(held), chain.end()}, held ? &chain[held - 1] : nullptr,
                    {first, end}, long(block_size_));
    }
    Hashes gone;
    for (; places_.size() > capacity_; order_.pop_front()) {
      gone.push_back(order_.front());
      places_.erase(order_.front());
    }
    if (!gone.empty()) events.removed(gone);
    return held;
  }

  void clear() {
    order_.clear();
    places_.clear();
  }

 private:
  void touch(uint64_t block) {
    const auto found = places_.find(block);
    if (found != places_.end()) {
      order_.splice(order_.end(), order_, found->second);
    } else {
      order_.push_back(block);
      places_[block] = std::prev(order_.end());
    }
  }

  size_t capacity_, block_size_;
  std::list<uint64_t> order_;  // least recently used first
  std::unordered_map<uint64_t, std::list<uint64_t>::iterator> places_;
};

}  // namespace kvbench
