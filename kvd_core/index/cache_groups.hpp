// A rank's cache groups, as its stream describes them, and the group that an event is about.
//
//   group 0   full attention       the prefix itself (the main group)
//   group 1   sliding window 128   a prefix is reusable if the group still holds its last blocks
//   group 2   full attention       a prefix is reusable if the group holds all of it
//   group 3   anything else        says nothing about a prefix
//
// An event names its group by number and only sometimes by kind, so the kind is remembered.
//
// Costs: O(groups of the rank), a handful.
#pragma once

#include <algorithm>
#include <cstdint>

#include "events/types.hpp"
#include "index/index.hpp"

namespace kvd {

inline const CacheGroup* known_group(const RankTraits& traits, int32_t id) {
  for (const CacheGroup& group : traits.groups) {
    if (group.id == id) return &group;
  }
  return nullptr;
}

inline void learn_group(RankTraits& traits, const StoredEvent& e) {
  if (e.kind == GroupKind::NONE || e.group < 0) return;
  for (CacheGroup& group : traits.groups) {
    if (group.id != e.group) continue;
    group.kind = e.kind;
    if (e.window > 0) group.window = e.window;
    return;
  }
  if (traits.groups.size() < kMaxGroups) traits.groups.push_back({e.group, e.kind, e.window});
}

// The kind of group that an event is about: the kind it names, else the remembered kind of its
// group. If an engine never names kinds, its first group counts as full attention.
template <class Event>
GroupKind kind_of(const RankTraits& traits, const Event& e) {
  if (e.kind != GroupKind::NONE) return e.kind;
  if (e.group < 0) return GroupKind::FULL;
  if (const CacheGroup* group = known_group(traits, e.group)) return group->kind;
  return e.group == 0 ? GroupKind::FULL : GroupKind::NONE;
}

// Whether a full-attention group is not the main group.
inline bool is_further_group(const RankTraits& traits, int32_t group) {
  return group > 0 && traits.main_group >= 0 && group != traits.main_group;
}

// How many blocks the event's window group must hold at the end of a reusable prefix; false where
// that is unknown.
inline bool window_blocks(const RankTraits& traits, const StoredEvent& e, uint64_t block_size,
                          uint32_t* blocks) {
  const CacheGroup* group = known_group(traits, e.group);
  const int64_t window = e.window > 0 ? e.window : group != nullptr ? group->window : 0;
  if (e.group < 0 || window <= 0 || block_size == 0) return false;
  // The next token attends to itself and the window - 1 tokens before it.
  *blocks = static_cast<uint32_t>(
      std::min<uint64_t>((static_cast<uint64_t>(window) - 1 + block_size - 1) / block_size, kNone));
  return true;
}

}  // namespace kvd
