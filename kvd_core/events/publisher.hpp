// Finds the publisher's id in a batch: 16 opaque bytes, new ones with every start of an engine.
//
//   [ts, events, rank, id, ...]   or   {"publisher_id": id, ...}        id: a bin of 16 bytes
//
// Any other value there counts as no id. (A batch that merely ends with the bytes of the expected
// id counts as naming it, since only its publisher knows these bytes.)
//
// Costs: a test of the first byte if the batch is too short for an id, as most are; a test of the
// last 18 bytes if the id is the expected one; otherwise everything before the id is skipped over.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "base/msgpack.hpp"

namespace kvd {

constexpr size_t kPublisherBytes = 16;

namespace decoding {

constexpr std::string_view kPublisherMember = "publisher_id";
constexpr uint32_t kPublisherPosition = 3;  // in an array

inline const uint8_t* take_publisher(Cursor& in) {
  std::string_view id;
  return in.bin(&id) && id.size() == kPublisherBytes ? reinterpret_cast<const uint8_t*>(id.data())
                                                     : nullptr;
}

// The id in a map, or nullptr; if the member is repeated, the last one counts, as for all members.
inline const uint8_t* publisher_member(Cursor& in, uint32_t members) {
  const uint8_t* found = nullptr;
  for (; members != 0 && !in.broken(); --members) {
    std::string_view key;
    if (!in.text(&key)) {
      in.skip(2);
    } else if (!same_text(key, kPublisherMember)) {
      in.skip();
    } else if (!in.nil()) {
      const uint8_t* at = in.at();
      found = take_publisher(in);
      in.back_to(at);
      in.skip();
    }
  }
  return in.broken() ? nullptr : found;
}

}  // namespace decoding

// The publisher's id in a payload, or nullptr. `expected` is the most likely id, or nullptr.
inline const uint8_t* publisher_of(const uint8_t* payload, size_t size, const uint8_t* expected) {
  constexpr uint8_t kShortest = 0x90 | (decoding::kPublisherPosition + 1);
  constexpr size_t kTail = kPublisherBytes + 2;
  if (size < kTail) return nullptr;
  if ((payload[0] & 0xf0) == 0x90) {
    if (payload[0] < kShortest) return nullptr;
    const uint8_t* tail = payload + size - kTail;
    if (expected != nullptr && payload[0] == kShortest && tail[0] == wire::BIN8 &&
        tail[1] == kPublisherBytes && std::memcmp(tail + 2, expected, kPublisherBytes) == 0) {
      return tail + 2;
    }
  }
  Cursor in(payload, payload + size);
  uint32_t count;
  if (in.array(&count)) {
    if (count <= decoding::kPublisherPosition) return nullptr;
    in.skip(decoding::kPublisherPosition);
    return decoding::take_publisher(in);
  }
  const std::string_view all(reinterpret_cast<const char*>(payload), size);
  if (!in.map(&count) || memmem(all.data(), all.size(), decoding::kPublisherMember.data(),
                                decoding::kPublisherMember.size()) == nullptr) {
    return nullptr;
  }
  return decoding::publisher_member(in, count);
}

}  // namespace kvd
