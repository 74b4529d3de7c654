// The names of events and of their members, and where array events have them.
#pragma once

#include <cstdint>
#include <string_view>

#include "events/types.hpp"

namespace kvd {
namespace decoding {

constexpr Spelling<Type> kTypes[] = {
    {"BlockStored", Type::STORED},
    {"BlockRemoved", Type::REMOVED},
    {"AllBlocksCleared", Type::CLEARED},
    {"Ignored", Type::IGNORED},
};

// Members of map events, in the order in which vLLM and SGLang write them: a search that begins
// behind the last member found needs one comparison.
enum Member : uint8_t {
  TYPE,
  HASHES,
  PARENT,
  TOKENS,
  BLOCK_SIZE,
  LORA_ID,
  MEDIUM,
  LORA_NAME,
  EXTRA_KEYS,
  GROUP,
  KIND,
  WINDOW,
  LOCALITY,
  CACHE_SALT,
  MM_INFOS,
  REMAINING,
  ORIGIN,
  EVENT_TYPE,
  OTHER_MEMBER,
};
constexpr std::string_view kMembers[] = {
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "cache_salt",
    "block_mm_infos",
    "remaining_copy_counts",
    "origin",
    "event_type",
};
static_assert(sizeof kMembers / sizeof *kMembers == OTHER_MEMBER, "a name for every member");

constexpr uint32_t bit(Member member) { return 1u << member; }

// The members at the positions of array events, from the one after the tag to the tail.
constexpr Member kStoredPositions[] = {HASHES,  PARENT, TOKENS,    BLOCK_SIZE,
                                       LORA_ID, MEDIUM, LORA_NAME, EXTRA_KEYS};
constexpr Member kRemovedPositions[] = {HASHES, MEDIUM};

}  // namespace decoding
}  // namespace kvd
