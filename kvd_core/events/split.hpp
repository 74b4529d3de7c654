// Finds the events of a msgpack payload, in every form that publishers of KV events send.
//
//   [ts, [event, event], rank]      {"events": [event, event], "dp_rank": rank}
//         ^^^^^  ^^^^^
//   [event, event]      event
//
// Only the framing of an event is read: it shows that the event is complete, and counts its maps
// and arrays. So the event's reader allocates no memory for lengths that are only claimed.
//
// Invariant: the ranges are whole values, in ascending order without overlap.
// Cost: 5 ns a value (an element of an array, a member of a map).
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string_view>
#include <vector>

#include "events/types.hpp"
#include "base/msgpack.hpp"

namespace kvd {

class Split {
 public:
  struct Event {
    size_t from, to;  // bytes of the payload
    size_t containers;
  };

  std::vector<Event> events;  // the first events, `max_events` at most
  uint64_t beyond = 0;        // number of further events
  bool has_rank = false;
  uint32_t rank = 0;
  const char* fault = nullptr;  // why the payload has no events

  void read(const uint8_t* payload, size_t size, size_t max_events) {
    Cursor in(payload, payload + size);
    payload_ = payload;
    max_events_ = max_events;
    read_batch(in);
    if (in.broken() || in.left() != 0) fault = "msgpack";
  }

 private:
  static constexpr std::string_view kRanks[] = {"data_parallel_rank", "dp_rank", "attn_dp_rank"};

  void read_batch(Cursor& in) {
    const uint8_t* start = in.at();
    uint32_t count;
    if (in.map(&count)) {
      read_map(in, start, count);
    } else if (!in.array(&count)) {
      in.skip();
      fault = "batch_shape";
    } else if (count != 0 && is_map(in)) {
      for (; count != 0 && !in.broken(); --count) {
        if (!is_map(in)) fault = "batch_shape";
        take_event(in);
      }
    } else {
      read_array(in, count);
    }
  }

  void read_array(Cursor& in, uint32_t count) {
    if (count < 2) fault = "batch_shape";
    for (uint32_t i = 0; i < count && !in.broken(); ++i) {
      if (i == 0) {
        if (!in.nil() && !in.number()) skip_fault(in, "batch_shape");
      } else if (i == 1) {
        read_events(in);
      } else if (i == 2) {
        read_rank(in);
      } else {
        in.skip();
      }
    }
  }

  // Reads a map, which is one event or a batch with named members; of repeated names the last
  // counts.
  void read_map(Cursor& in, const uint8_t* start, uint32_t count) {
    bool is_event = false, has_events = false;
    const uint8_t* ranks[std::size(kRanks)] = {};
    for (; count != 0 && !in.broken(); --count) {
      std::string_view key;
      if (!in.text(&key)) {
        in.skip(2);
        continue;
      }
      is_event = is_event || key == "event_type" || key == "type";
      if (key == "events") {
        forget_events();
        read_events(in);
        has_events = true;
        continue;
      }
      for (size_t i = 0; i < std::size(kRanks); ++i) {
        if (key == kRanks[i]) ranks[i] = in.at();
      }
      in.skip();
    }
    if (in.broken()) return;
    const uint8_t* end = in.at();
    if (is_event) {
      forget_events();
      in.back_to(start);
      take_event(in);
      return;
    }
    if (!has_events) fault = "batch_shape";
    for (const uint8_t* at : ranks) {
      if (at == nullptr || fault != nullptr || has_rank) continue;
      in.back_to(at);
      read_rank(in);
    }
    in.back_to(end);
  }

  void forget_events() {
    fault = nullptr;
    events.clear();
    beyond = 0;
  }

  void read_events(Cursor& in) {
    uint32_t count;
    if (!in.array(&count)) return skip_fault(in, "batch_shape");
    for (; count != 0 && !in.broken(); --count) take_event(in);
  }

  void read_rank(Cursor& in) {
    Integer number;
    if (in.nil()) return;
    if (!in.integer(&number)) return skip_fault(in, "rank");
    if (number.negative || number.bits > INT32_MAX) return note("rank");
    has_rank = true;
    rank = static_cast<uint32_t>(number.bits);
  }

  void take_event(Cursor& in) {
    if (events.size() == max_events_) {
      ++beyond;
      in.skip();
      return;
    }
    const auto at = [&] { return static_cast<size_t>(in.at() - payload_); };
    const size_t from = at(), containers = walk(in);
    events.push_back({from, at(), containers});
  }

  // Takes a value; returns its number of maps and arrays.
  static size_t walk(Cursor& in) {
    size_t containers = 0;
    uint32_t count;
    for (uint64_t values = 1; values != 0 && !in.broken(); --values) {
      if (in.array(&count)) {
        values += count;
      } else if (in.map(&count)) {
        values += uint64_t{2} * count;
      } else {
        in.skip();
        continue;
      }
      ++containers;
    }
    return containers;
  }

  static bool is_map(Cursor in) {
    uint32_t count;
    return in.map(&count);
  }

  void skip_fault(Cursor& in, const char* why) {
    in.skip();
    note(why);
  }

  void note(const char* why) {
    if (fault == nullptr) fault = why;
  }

  const uint8_t* payload_ = nullptr;
  size_t max_events_ = 0;
};

}  // namespace kvd
