// The events of an engine batch as structs, which the decoder passes to its sinks, and tables that
// map the engines' spellings to their values.
//
// Invariants
//  1. Nothing here owns memory: pointers and string_views are valid during the sink's call only.
//  2. Absent and nil mean the same, and each field has one value for it.
//  3. Each mapping from text to value is one table, with frequent spellings first.
// Cost: a lookup takes one comparison of lengths an entry, and one of texts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/msgpack.hpp"

namespace kvd {

enum class Tier : uint8_t { DEVICE = 0, HOST = 1, DISK = 2, EXTERNAL = 3, UNKNOWN = 255 };
enum class GroupKind : uint8_t { NONE, FULL, WINDOW, OTHER };

// Whether the blocks of a Stored are new copies or were there before; not all engines say so.
enum class Origin : uint8_t { UNKNOWN, NEW, REUSED };

struct StoredEvent {
  const uint64_t* hashes;  // engine hashes folded to 64 bits
  uint32_t n_hashes;
  bool has_parent;
  uint64_t parent;
  const uint32_t* tokens;  // pairs: all first elements + the last second element
  uint32_t n_tokens;
  bool pairs;           // EAGLE; never with 0 tokens
  uint64_t block_size;  // tokens; 0 when absent
  Tier tier;
  GroupKind kind;
  bool remote;                 // locality present and not LOCAL
  int32_t group;               // -1 absent
  int64_t window;              // tokens; 0 absent
  std::string_view lora_name;  // empty = none
  bool has_lora_id;
  int64_t lora_id;
  std::string_view salt;     // empty = none
  bool names_salts;          // the event has extra_keys, which would contain a salt
  const uint32_t* mm_begin;  // n_hashes + 1 offsets into mm; nullptr when no block has objects
  const uint64_t* mm;        // block i: mm[mm_begin[i] .. mm_begin[i + 1]) ascending
  std::string_view medium;   // as spelled in the event; empty = none
  Origin origin;
};

struct RemovedEvent {
  const uint64_t* hashes;
  uint32_t n_hashes;
  Tier tier;
  GroupKind kind;
  bool remote;
  int32_t group;  // -1 absent
  std::string_view medium;
  const uint32_t* remaining;  // copies of each block that are left; nullptr when not said
};

struct ClearedEvent {
  Tier tier;
  bool has_tier;
  std::string_view medium;
};

enum class Reason : uint8_t {
  TOO_LARGE,    // above kMaxPayloadBytes; not read
  NOT_MSGPACK,  // the byte 0xc1
  TRUNCATED,    // a value runs past the payload's end
  TRAILING,     // bytes after the batch; its events count
  BATCH_SHAPE,  // neither an array of two or more nor a map with events, or events are no array
  TIMESTAMP,    // no number
  RANK,         // neither null nor 0 .. 2^31 - 1
  EVENT_SHAPE,  // neither array nor map, or no tag
  UNKNOWN_TYPE,
  HASHES,  // missing, or one is neither an integer nor bytes
  PARENT,
  TOKENS,  // missing, or neither all u32 nor all pairs of u32
  BLOCK_SIZE,
  FIELD_TYPE,  // another member that changes the event's meaning is of a wrong type
};
constexpr const char* kReasonNames[] = {
    "too_large", "not_msgpack", "truncated",   "trailing",     "batch_shape",
    "timestamp", "rank",        "event_shape", "unknown_type", "hashes",
    "parent",    "tokens",      "block_size",  "field_type",
};
constexpr size_t kReasons = sizeof kReasonNames / sizeof *kReasonNames;
static_assert(kReasons == static_cast<size_t>(Reason::FIELD_TYPE) + 1, "a name for every reason");

struct BatchResult {
  uint32_t events;   // elements of the batch's event list that were framed
  uint32_t bad;      // calls of sink.bad
  uint32_t ignored;  // events tagged "Ignored"
};

// ---- spellings of the engines: one table for each mapping, with frequent spellings first

template <class Value>
struct Spelling {
  std::string_view text;
  Value value;
};

template <class Value, size_t N>
Value spelled(const Spelling<Value> (&table)[N], std::string_view text, Value otherwise) {
  for (const Spelling<Value>& entry : table) {
    if (same_text(entry.text, text)) return entry.value;
  }
  return otherwise;
}

// Case matters to the engines and to Dynamo: "gpu" is unknown. The Mooncake and LMCache connectors
// inside vLLM write lower-case "cpu"; vLLM wrote FS and OBJ before STORAGE.
constexpr Spelling<Tier> kMedia[] = {
    {"GPU", Tier::DEVICE},        {"CPU", Tier::HOST},        {"CPU_PINNED", Tier::HOST},
    {"STORAGE", Tier::DISK},      {"", Tier::DEVICE},         {"DISK", Tier::DISK},
    {"EXTERNAL", Tier::EXTERNAL}, {"cpu", Tier::HOST},        {"DEVICE", Tier::DEVICE},
    {"CPU_TIER1", Tier::HOST},    {"CPU_TIER2", Tier::DISK},  {"NVME", Tier::DISK},
    {"FS", Tier::DISK},           {"OBJ", Tier::DISK},        {"NETWORK", Tier::EXTERNAL},
    {"REMOTE", Tier::EXTERNAL},   {"SHARED", Tier::EXTERNAL},
};

constexpr Spelling<GroupKind> kKinds[] = {
    {"full_attention", GroupKind::FULL},      {"sliding_window", GroupKind::WINDOW},
    {"mla_attention", GroupKind::FULL},       {"sliding_window_mla", GroupKind::WINDOW},
    {"sink_full_attention", GroupKind::FULL},
};

constexpr Spelling<Origin> kOrigins[] = {{"NEW", Origin::NEW}, {"REUSED", Origin::REUSED}};

}  // namespace kvd
