// The live requests of a ledger: by id, in order of admission, and by rank.
//
//   ids       [ .. | 4 | .. | 0 | 9 | .. ]     open addressing over 4-byte numbers
//                    │
//   request 4   text "chat-17" "retry-a"       id and retry key, one buffer
//               rank 2, end node 9, 12 blocks, 48 tokens, prefill running
//               outputs: 5, of which the first 3 weigh 0.25
//               older 0, newer 9               all requests, as admitted
//               before 0, after kNone          those of rank 2, as admitted
//
// A fraction given for the output blocks of a request replaces that of all it has, and those that
// come later weigh 1: so two counts and one fraction say it all, however many there are.
//
// Invariants
//   1. ids are distinct; every live request is in `ids_` and in both chains once;
//   2. decayed <= outputs.
//
// Costs: find O(bytes of the id); take, give O(1) and one allocation; 88 bytes and the two texts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "base/arena.hpp"
#include "base/keyed.hpp"
#include "ledger/trie.hpp"

namespace kvd::ledger {

using RequestId = uint32_t;

struct Request {
  char* text;       // id, then retry key
  uint64_t hash;    // of the id
  uint64_t tokens;  // to prefill, as given
  double admitted;  // seconds of the caller's clock
  double fraction;  // weight of the first `decayed` output blocks
  RankId rank;
  NodeId end;        // the last node of its prompt, kRoot when that is empty
  uint32_t blocks;   // of the prompt
  uint32_t outputs;  // output blocks
  uint32_t decayed;
  RequestId older, newer;
  RequestId before, after;
  uint32_t expected;  // tokens of output, kNone if nobody has said
  uint16_t id_size;   // bytes
  uint16_t key_size;  // bytes, 0 without a retry key
  bool prefilling;    // its tokens count

  std::string_view id() const { return {text, id_size}; }
  std::string_view key() const { return {text + id_size, key_size}; }
  RequestId& free_link() { return older; }
};

// A list threaded through requests by two of their members.
template <RequestId Request::* Previous, RequestId Request::* Next>
struct Chain {
  RequestId first = kNone;
  RequestId last = kNone;

  void append(Arena<Request>& all, RequestId id) {
    all[id].*Previous = last;
    all[id].*Next = kNone;
    (last == kNone ? first : all[last].*Next) = id;
    last = id;
  }

  void unlink(Arena<Request>& all, RequestId id) {
    const RequestId previous = all[id].*Previous, next = all[id].*Next;
    (previous == kNone ? first : all[previous].*Next) = next;
    (next == kNone ? last : all[next].*Previous) = previous;
  }
};

using AdmissionChain = Chain<&Request::older, &Request::newer>;
using RankChain = Chain<&Request::before, &Request::after>;

class Requests {
 public:
  Requests() = default;
  Requests(const Requests&) = delete;
  Requests& operator=(const Requests&) = delete;
  ~Requests() {
    for (RequestId id = admitted_.first; id != kNone; id = all_[id].newer) std::free(all_[id].text);
  }

  Request& operator[](RequestId id) { return all_[id]; }
  const Request& operator[](RequestId id) const { return all_[id]; }
  uint32_t size() const { return all_.live(); }
  RequestId oldest() const { return admitted_.first; }
  size_t bytes() const { return all_.bytes() + ids_.bytes() + texts_; }

  RequestId find(std::string_view id) const {
    const uint32_t at = slot(id, hash_(id));
    return at == ProbeTable::kEmpty ? kNone : ids_.at(at);
  }

  // A new request, the newest of all and of its rank; what is not said here is the caller's to set.
  RequestId take(std::string_view id, std::string_view key, RankChain& of_rank) {
    char* text = static_cast<char*>(take_heap(id.size() + key.size() + 1));
    std::memcpy(text, id.data(), id.size());
    if (!key.empty()) std::memcpy(text + id.size(), key.data(), key.size());
    const RequestId number = all_.take();
    Request& request = all_[number];
    request.text = text;
    request.hash = hash_(id);
    request.id_size = static_cast<uint16_t>(id.size());
    request.key_size = static_cast<uint16_t>(key.size());
    texts_ += id.size() + key.size() + 1;
    ids_.insert(request.hash, number, *this);
    admitted_.append(all_, number);
    of_rank.append(all_, number);
    return number;
  }

  void give(RequestId number, RankChain& of_rank) {
    Request& request = all_[number];
    ids_.erase(slot(request.id(), request.hash), *this);
    ids_.shrink(*this);
    admitted_.unlink(all_, number);
    of_rank.unlink(all_, number);
    texts_ -= size_t{request.id_size} + request.key_size + 1;
    std::free(request.text);
    all_.give(number);
    while (all_.live() == 0 && all_.shrink()) {}
  }

  bool is_spread() const { return ids_.is_spread(*this); }

  // For the table of ids.
  uint64_t hash_of(RequestId number) const { return all_[number].hash; }

 private:
  uint32_t slot(std::string_view id, uint64_t hash) const {
    return ids_.find(hash, [&](RequestId number) {
      return all_[number].hash == hash && all_[number].id() == id;
    });
  }

  Arena<Request> all_;
  ProbeTable ids_;
  KeyedHash hash_;  // of ids
  AdmissionChain admitted_;
  size_t texts_ = 0;  // bytes
};

}  // namespace kvd::ledger
