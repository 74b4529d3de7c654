// From the bytes of one engine batch to index events.
//
//   batch   [ts, [event, ...], rank?, ...]   or   {"ts":, "events": [...], "dp_rank":, ...}
//
//   payload ──Cursor──▶ BatchReader ──events──▶ EventReader ──▶ Scratch
//                                                                  │ when the rank is known
//                        sink.begin, stored, removed, cleared, bad ◀┘
//
// Invariants
//  1. The rank comes after the events on the wire, but the sink hears it first: events wait in
//     Scratch, so each byte is read once. Nothing is emitted of a batch that is refused whole.
//  2. An event that cannot be used costs exactly itself: its value is skipped, its Reason counted,
//     its siblings stay.
//  3. When the msgpack framing breaks, the events before the break count, one Reason is given, and
//     the rank is the one read so far, if any.
//  4. Claimed lengths reserve nothing, nesting costs no stack: any bytes end in time and memory
//     proportional to their number.
// Cost: 0.4 to 1 ns a byte; the parts say more.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "event_reader.hpp"
#include "event_scratch.hpp"
#include "event_types.hpp"
#include "msgpack.hpp"

namespace kvd {

// Counts of tokens, hashes and events are 32 bits wide; receiving sockets are limited far below.
constexpr size_t kMaxPayloadBytes = size_t{1} << 31;

namespace decoding {

// Reads a whole payload into Scratch.
class BatchReader {
 public:
  BatchReader(const uint8_t* payload, size_t size, Scratch& scratch)
      : in_(payload, payload + size), scratch_(scratch), events_(in_, scratch) {}

  bool has_events = false;  // the event list was reached and the batch is not refused
  bool has_rank = false;
  uint32_t rank = 0;
  BatchResult result = {};

  void read() {
    scratch_.clear();
    uint32_t count;
    if (in_.left() > kMaxPayloadBytes) {
      refuse(Reason::TOO_LARGE);
    } else if (in_.array(&count)) {
      read_array(count);
    } else if (in_.map(&count)) {
      read_map(count);
    } else {
      in_.skip();
      refuse(Reason::BATCH_SHAPE);
    }
    finish();
  }

  uint32_t bad(size_t reason) const { return events_.bad[reason]; }

 private:
  enum class Part : uint8_t { TIME, EVENTS, RANK, OTHER };
  static constexpr Spelling<Part> kParts[] = {
      {"ts", Part::TIME},      {"events", Part::EVENTS},     {"data_parallel_rank", Part::RANK},
      {"dp_rank", Part::RANK}, {"attn_dp_rank", Part::RANK},
  };

  void read_array(uint32_t count) {
    if (count < 2) return refuse(Reason::BATCH_SHAPE);
    constexpr Part kPositions[] = {Part::TIME, Part::EVENTS, Part::RANK};
    for (uint32_t i = 0; i < count && going(); ++i) {
      read_part(i < 3 ? kPositions[i] : Part::OTHER);
    }
  }

  void read_map(uint32_t count) {
    for (; count != 0 && going(); --count) {
      std::string_view key;
      if (!in_.text(&key)) {
        in_.skip(2);
      } else if (!in_.nil()) {
        read_part(spelled(kParts, key, Part::OTHER));
      }
    }
    if (!has_events) refuse(Reason::BATCH_SHAPE);
  }

  void read_part(Part part) {
    switch (part) {
      case Part::TIME:
        if (!in_.number()) refuse(Reason::TIMESTAMP);
        break;
      case Part::EVENTS:
        read_events();
        break;
      case Part::RANK:
        if (!in_.nil()) read_rank();
        break;
      case Part::OTHER:
        in_.skip();
        break;
    }
  }

  void read_events() {
    uint32_t count;
    if (has_events || !in_.array(&count)) return refuse(Reason::BATCH_SHAPE);
    has_events = true;
    for (; count != 0; --count) {
      events_.read();
      if (in_.broken()) return;
      ++result.events;
    }
  }

  void read_rank() {
    Integer number;
    if (!in_.integer(&number) || number.negative || number.bits > INT32_MAX) {
      return refuse(Reason::RANK);
    }
    has_rank = true;
    rank = static_cast<uint32_t>(number.bits);
  }

  bool going() const { return !refused_ && !in_.broken(); }

  // The batch as a whole is no good. A broken framing is a reason of its own.
  void refuse(Reason reason) {
    if (!going()) return;
    refused_ = true;
    has_events = false;
    result.events = 0;
    scratch_.clear();
    std::fill_n(events_.bad, kReasons, 0);
    events_.ignored = 0;
    note(reason);
  }

  void note(Reason reason) { ++events_.bad[static_cast<size_t>(reason)]; }

  void finish() {
    if (in_.framing() == Framing::TRUNCATED) {
      note(Reason::TRUNCATED);
    } else if (in_.framing() == Framing::NOT_MSGPACK) {
      note(Reason::NOT_MSGPACK);
    } else if (!refused_ && in_.left() != 0) {
      note(Reason::TRAILING);
    }
    for (const uint32_t count : events_.bad) result.bad += count;
    result.ignored = events_.ignored;
  }

  Cursor in_;
  Scratch& scratch_;
  EventReader events_;
  bool refused_ = false;
};

inline void point_into(const Scratch& scratch, PendingStored& pending) {
  StoredEvent& e = pending.event;
  e.hashes = scratch.hashes.data() + pending.hashes_at;
  e.tokens = scratch.tokens.data() + pending.tokens_at;
  if (!pending.has_mm) return;
  e.mm_begin = scratch.mm_begin.data() + pending.mm_at;
  e.mm = scratch.mm.data();
}

}  // namespace decoding

// Decodes one payload; any bytes are fine. The sink has
//   begin(bool has_rank, uint32_t rank)   once, before the others, unless the batch is refused
//   stored(const StoredEvent&), removed(const RemovedEvent&), cleared(const ClearedEvent&)
//                                         the events in their order
//   bad(Reason)                           once for each thing that was wrong, last
// and must not touch `scratch`. What the events point to is gone when the sink's call returns.
template <class Sink>
BatchResult decode_batch(const uint8_t* payload, size_t size, Scratch& scratch, Sink& sink) {
  using decoding::Type;
  decoding::BatchReader batch(payload, size, scratch);
  batch.read();
  if (batch.has_events) sink.begin(batch.has_rank, batch.rank);
  for (const decoding::Pending& item : scratch.order) {
    if (item.type == Type::STORED) {
      decoding::PendingStored& pending = scratch.stored[item.index];
      decoding::point_into(scratch, pending);
      sink.stored(static_cast<const StoredEvent&>(pending.event));
    } else if (item.type == Type::REMOVED) {
      decoding::PendingRemoved& pending = scratch.removed[item.index];
      pending.event.hashes = scratch.hashes.data() + pending.hashes_at;
      sink.removed(static_cast<const RemovedEvent&>(pending.event));
    } else {
      sink.cleared(static_cast<const ClearedEvent&>(scratch.cleared[item.index]));
    }
  }
  for (size_t reason = 0; reason < kReasons; ++reason) {
    for (uint32_t n = batch.bad(reason); n != 0; --n) sink.bad(static_cast<Reason>(reason));
  }
  scratch.give_back();
  return batch.result;
}

}  // namespace kvd
