// Decodes the bytes of one engine batch into index events.
//
//   batch   [ts, [event, ...], rank?, ...]   or   {"ts":, "events": [...], "dp_rank":, ...}
//
//   payload ──Cursor──▶ BatchReader ──events──▶ EventReader ──▶ Scratch
//                                                                  │ when the rank is known
//                        sink.begin, stored, removed, cleared, bad ◀┘
//
// A payload may be megabytes long, so it is read and applied in slices (SlicedBatch). Reading and
// applying stop also inside of an event.
//
// Invariants
//  1. The rank comes after the events on the wire, but the sink gets it first. So events wait in
//     Scratch, and each byte is read once. Of a payload longer than a portion, the reader looks
//     ahead for the rank; then one portion of events after the other is read and applied, so that
//     Scratch stays small. A batch that is refused whole emits nothing.
//  2. An unusable event affects only itself: its value is skipped, its Reason counted, and the
//     other events of the batch are applied.
//  3. When the msgpack framing breaks, the events before the break count, one Reason is given, and
//     the rank is the one read so far, if any.
//  4. Claimed lengths allocate nothing, and nesting uses no stack: time and memory are proportional
//     to the number of bytes.
//  5. The result of a sliced batch does not depend on the slices.
// Cost: 0.4 to 1 ns a byte; the headers of the parts have details.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "events/reader.hpp"
#include "events/scratch.hpp"
#include "events/types.hpp"
#include "base/msgpack.hpp"
#include "base/steps.hpp"

namespace kvd {

// Longest batch: counts of tokens, hashes and events are 32 bits wide. The limit of receiving
// sockets is far lower.
constexpr size_t kMaxPayloadBytes = size_t{1} << 31;

// Blocks of an event that are applied between two checks of the slice's budget. An event of more
// blocks with tokens is applied as several events, since recognising a second copy needs all blocks
// of an event together.
constexpr uint32_t kBlocksAtOnce = 8192;
// Hashes without tokens, or blocks below an unknown parent, applied between two such checks.
constexpr uint32_t kHashesAtOnce = 512;
// Costs in steps of 0.1 us.
constexpr size_t kStepsAStored = 8;  // a stored event, besides its blocks: a chain of its own
constexpr size_t kStepsABlock = 5;
constexpr size_t kStepsAName = 8;
constexpr size_t kStepsARemoval = 4;
constexpr size_t kSlotsAStep = 4;   // slots of a names table, for a clear
constexpr size_t kBytesAStep = 64;  // bytes of an event that is read, besides one step for it
// Bytes of events that are read before they are applied, but at least one event. The memory for
// them is up to eleven times as much.
constexpr ptrdiff_t kPortionBytes = ptrdiff_t{1} << 20;

namespace decoding {

// Reads a payload into Scratch, portion by portion.
class BatchReader {
 public:
  BatchReader(const uint8_t* payload, size_t size, Scratch& scratch)
      : payload_(payload), in_(payload, payload + size), scratch_(scratch), events_(in_, scratch) {
    seeks_rank_ = in_.left() > kPortionBytes;
    begin();
  }

  bool has_events = false;  // the event list was reached and the batch is not refused
  bool has_rank = false;
  uint32_t rank = 0;
  BatchResult result = {};
  bool done = false;  // all is read

  // Reads on, at least a little; false when the steps are used up before a portion is in Scratch.
  bool read(Steps& steps) {
    if (portion_ == nullptr) {
      portion_ = in_.at();
      scratch_.clear();
    }
    do {
      while (going()) {
        if (events_left_ != 0) {
          if (!read_event(steps)) return false;
          if (events_left_ == 0) continue;
          if (in_.at() - portion_ >= kPortionBytes) return end_portion();
          if (!steps.left()) return false;
        } else if (to_skip_ != 0) {
          steps.take(1);
          to_skip_ = skip_some(in_, to_skip_, steps);
          if (!steps.left()) return false;
        } else if (parts_left_ != 0) {
          --parts_left_;
          if (!is_map_) {
            read_part(at_part_ < std::size(kPositions) ? kPositions[at_part_++] : Part::OTHER);
            continue;
          }
          read_member();
          steps.take(1);
          if (!steps.left()) return false;
        } else {
          break;
        }
      }
      if (is_map_ && !has_events) refuse(Reason::BATCH_SHAPE);
    } while (rewinds());
    finish();
    done = true;
    return end_portion();
  }

  uint32_t bad(size_t reason) const { return events_.bad[reason]; }

 private:
  enum class Part : uint8_t { TIME, EVENTS, RANK, OTHER };
  static constexpr Spelling<Part> kParts[] = {
      {"ts", Part::TIME},      {"events", Part::EVENTS},     {"data_parallel_rank", Part::RANK},
      {"dp_rank", Part::RANK}, {"attn_dp_rank", Part::RANK},
  };

  static constexpr Part kPositions[] = {Part::TIME, Part::EVENTS, Part::RANK};

  void begin() {
    at_part_ = 0;
    has_events = false;
    if (in_.left() > kMaxPayloadBytes) {
      refuse(Reason::TOO_LARGE);
    } else if (in_.array(&parts_left_)) {
      if (parts_left_ < 2) refuse(Reason::BATCH_SHAPE);
    } else if (in_.map(&parts_left_)) {
      is_map_ = true;
    } else {
      in_.skip();
      refuse(Reason::BATCH_SHAPE);
    }
  }

  // Begins again once the reader has looked ahead, unless the batch is refused.
  bool rewinds() {
    if (!seeks_rank_ || refused_) return false;
    seeks_rank_ = false;
    knows_rank_ = true;
    in_ = Cursor(payload_, in_.end());
    portion_ = payload_;
    begin();
    return true;
  }

  bool end_portion() {
    portion_ = nullptr;
    return true;
  }

  void read_member() {
    std::string_view key;
    if (!in_.text(&key)) {
      to_skip_ = 2;
    } else if (!in_.nil()) {
      read_part(spelled(kParts, key, Part::OTHER));
    }
  }

  void read_part(Part part) {
    switch (part) {
      case Part::TIME:
        if (!in_.number()) refuse(Reason::TIMESTAMP);
        break;
      case Part::EVENTS:
        if (has_events || !in_.array(&events_left_)) return refuse(Reason::BATCH_SHAPE);
        has_events = true;
        if (seeks_rank_) to_skip_ = std::exchange(events_left_, 0);
        break;
      case Part::RANK:
        if (knows_rank_) {
          to_skip_ = 1;
        } else if (!in_.nil()) {
          read_rank();
        }
        break;
      case Part::OTHER:
        to_skip_ = 1;
        break;
    }
  }

  // Returns false when the steps are used up before the event is read.
  bool read_event(Steps& steps) {
    const uint8_t* from = in_.at();
    if (!events_.read(steps)) return false;
    if (in_.broken()) return true;
    --events_left_;
    ++result.events;
    steps.take(1 + static_cast<size_t>(in_.at() - from) / kBytesAStep);
    return true;
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

  // Refuses the batch as a whole, unless its framing is broken, which has a reason of its own.
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
    if (in_.framing() == Wholeness::TRUNCATED) {
      note(Reason::TRUNCATED);
    } else if (in_.framing() == Wholeness::NOT_MSGPACK) {
      note(Reason::NOT_MSGPACK);
    } else if (!refused_ && in_.left() != 0) {
      note(Reason::TRAILING);
    }
    for (const uint32_t count : events_.bad) result.bad += count;
    result.ignored = events_.ignored;
  }

  const uint8_t* payload_;
  Cursor in_;
  Scratch& scratch_;
  EventReader events_;
  uint32_t parts_left_ = 0;
  uint32_t at_part_ = 0;
  uint32_t events_left_ = 0;
  uint64_t to_skip_ = 0;  // values
  bool is_map_ = false;
  bool refused_ = false;
  bool seeks_rank_;  // for the rank: events are skipped
  bool knows_rank_ = false;
  const uint8_t* portion_ = nullptr;  // the beginning of the one that is being read
};

inline void point_into(const Scratch& scratch, PendingStored& pending) {
  StoredEvent& e = pending.event;
  e.hashes = scratch.hashes.data() + pending.hashes_at;
  e.tokens = scratch.tokens.data() + pending.tokens_at;
  if (!pending.has_mm) return;
  e.mm_begin = scratch.mm_begin.data() + pending.mm_at;
  e.mm = scratch.mm.data();
}

inline void point_into(const Scratch& scratch, PendingRemoved& pending) {
  pending.event.hashes = scratch.hashes.data() + pending.hashes_at;
  if (pending.has_remaining)
    pending.event.remaining = scratch.remaining.data() + pending.remaining_at;
}

}  // namespace decoding

// Decodes one payload; any bytes are fine. The sink has
//   begin(bool has_rank, uint32_t rank)   once, before the others, unless the batch is refused
//   stored(const StoredEvent&), removed(const RemovedEvent&), cleared(const ClearedEvent&)
//                                         the events in their order
//   bad(Reason)                           once for each fault, last
// and must not use `scratch`. The events' pointers are valid only during the sink's call.
template <class Sink>
BatchResult decode_batch(const uint8_t* payload, size_t size, Scratch& scratch, Sink& sink) {
  using decoding::Type;
  decoding::BatchReader batch(payload, size, scratch);
  for (bool begun = false; !batch.done;) {
    Steps some(INT64_MAX);
    batch.read(some);
    if (!begun && batch.has_events) sink.begin(batch.has_rank, batch.rank);
    begun = true;
    for (const decoding::Pending& item : scratch.order) {
      if (item.type == Type::STORED) {
        decoding::PendingStored& pending = scratch.stored[item.index];
        decoding::point_into(scratch, pending);
        sink.stored(static_cast<const StoredEvent&>(pending.event));
      } else if (item.type == Type::REMOVED) {
        decoding::PendingRemoved& pending = scratch.removed[item.index];
        decoding::point_into(scratch, pending);
        sink.removed(static_cast<const RemovedEvent&>(pending.event));
      } else {
        sink.cleared(static_cast<const ClearedEvent&>(scratch.cleared[item.index]));
      }
    }
  }
  for (size_t reason = 0; reason < kReasons; ++reason) {
    for (uint32_t n = batch.bad(reason); n != 0; --n) sink.bad(static_cast<Reason>(reason));
  }
  Steps all(INT64_MAX);
  scratch.give_back(all);
  return batch.result;
}

namespace decoding {

// What a batch needs while it is read and applied.
class BatchState {
 public:
  // The state that the last batch of this thread has left, with its memory, or a new one. So
  // streams at rest, of which a fleet has thousands, hold none.
  static std::unique_ptr<BatchState> take() {
    return spare_ ? std::move(spare_) : std::make_unique<BatchState>();
  }

  // Takes back the state of a batch that is over.
  static void give(std::unique_ptr<BatchState> state) {
    state->reader.reset();
    spare_ = std::move(state);
  }

  Scratch scratch;
  std::optional<BatchReader> reader;
  size_t next = 0;       // position in `Scratch::order`
  uint32_t at = 0;       // position in that event's hashes
  bool reading = false;  // the next portion is being read
  bool begun = false;    // the first portion has been read

 private:
  static inline thread_local std::unique_ptr<BatchState> spare_;
};

}  // namespace decoding

// Decodes and applies a payload in slices. The sink has
//   begin(bool has_rank, uint32_t rank)   as above
//   resume()                              before each further slice, as other batches may have been
//                                         applied in between
//   stored(event, from, steps), removed(event, from, steps)
//                                         applies some of the event's hashes, from position `from`
//                                         on, and returns the position reached
//   cleared(event, steps)
//   resolve_waiting(steps)                places blocks that waited for those; false if some are
//                                         left
//   bad(Reason, count)                    last
template <class Sink>
class SlicedBatch {
  using State = decoding::BatchState;

 public:
  // Begins with a payload, which has to stay in place until the batch is over. Drops an unfinished
  // batch.
  void begin(const uint8_t* payload, size_t size) {
    drop();
    state_ = State::take();
    state_->reader.emplace(payload, size, state_->scratch);
    state_->reading = true;
    state_->begun = false;
  }

  void drop() { state_.reset(); }
  bool under_way() const { return state_ != nullptr; }

  // The memory of the batch under way.
  Scratch& scratch() { return state_->scratch; }

  // Once the batch is over: whether it was refused as a whole.
  bool refused() const { return refused_; }

  // Continues, at least a little; false when the batch is over.
  bool advance(Sink& sink, Steps& steps) {
    if (state_->begun) sink.resume();
    for (;;) {
      if (state_->reading && !read(sink, steps)) return true;
      while (sink.resolve_waiting(steps) && state_->next != state_->scratch.order.size()) {
        if (!steps.left()) return true;
        apply_some(sink, state_->scratch.order[state_->next], steps);
      }
      if (state_->next != state_->scratch.order.size() || !sink.resolve_waiting(steps)) return true;
      state_->scratch.order.clear();
      state_->next = 0;
      if (!state_->scratch.give_back(steps)) return true;
      if (state_->reader->done) break;
      state_->reading = true;
      if (!steps.left()) return true;
    }
    for (size_t reason = 0; reason < kReasons; ++reason) {
      if (const uint32_t n = state_->reader->bad(reason)) sink.bad(static_cast<Reason>(reason), n);
    }
    State::give(std::move(state_));
    return false;
  }

 private:
  // Reads the next portion; false when the steps are used up before it is complete.
  bool read(Sink& sink, Steps& steps) {
    if (!state_->reader->read(steps)) return false;
    state_->reading = false;
    state_->next = state_->at = 0;
    if (state_->begun) return true;
    state_->begun = true;
    refused_ = !state_->reader->has_events;
    if (!refused_) sink.begin(state_->reader->has_rank, state_->reader->rank);
    return true;
  }

  void apply_some(Sink& sink, const decoding::Pending& item, Steps& steps) {
    if (item.type == decoding::Type::STORED) {
      decoding::PendingStored& pending = state_->scratch.stored[item.index];
      if (state_->at == 0) decoding::point_into(state_->scratch, pending);
      steps.take(kStepsAStored);
      state_->at = sink.stored(static_cast<const StoredEvent&>(pending.event), state_->at, steps);
      if (state_->at < pending.event.n_hashes) return;
    } else if (item.type == decoding::Type::REMOVED) {
      decoding::PendingRemoved& pending = state_->scratch.removed[item.index];
      decoding::point_into(state_->scratch, pending);
      state_->at = sink.removed(static_cast<const RemovedEvent&>(pending.event), state_->at, steps);
      if (state_->at < pending.event.n_hashes) return;
    } else {
      sink.cleared(static_cast<const ClearedEvent&>(state_->scratch.cleared[item.index]), steps);
    }
    ++state_->next;
    state_->at = 0;
  }

  std::unique_ptr<State> state_;  // of the batch under way
  bool refused_ = false;
};

}  // namespace kvd
