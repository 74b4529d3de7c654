// Reads one event of a batch, in every form that engines send.
//
//   array   [tag, known positions..., tail...]     vLLM to 0.23, SGLang to 0.5.19
//   map     {"type": tag, member: value, ...}      newer ones; any order, any further members
//                 └──▶ read_member(which) for both
//
// Invariants
//  1. The cursor ends after exactly one value, or is broken.
//  2. A value of a wrong type is noted and skipped. Whether the event is refused for it is decided
//     once the event's type is known, by the members of that type.
//  3. A refused event leaves Scratch as it was.
// Cost (one core of an EPYC, g++ 12 -O3): 60 ns an event in array form, 115 ns as a map of 11
// members, and 1.3 ns a token; 2 ns where a vocabulary above 65,536 mixes the tokens' widths.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "events/block_identity.hpp"
#include "events/scratch.hpp"
#include "events/types.hpp"
#include "base/msgpack.hpp"

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

// Reads one event after another into Scratch.
class EventReader {
 public:
  EventReader(Cursor& in, Scratch& scratch) : in_(in), scratch_(scratch) {}

  uint32_t bad[kReasons] = {};
  uint32_t ignored = 0;

  // Reads one value into Scratch, or leaves that as it was if the event is refused.
  void read() {
    const size_t hashes = scratch_.hashes.size(), tokens = scratch_.tokens.size();
    const size_t mm_begin = scratch_.mm_begin.size(), mm = scratch_.mm.size();
    const size_t remaining = scratch_.remaining.size();
    read_value();
    const bool kept = !in_.broken() && keep();
    if (!kept || type_ != Type::STORED) scratch_.stored.pop_back();
    if (kept) return;
    scratch_.hashes.resize(hashes);
    scratch_.tokens.resize(tokens);
    scratch_.mm_begin.resize(mm_begin);
    scratch_.mm.resize(mm);
    scratch_.remaining.resize(remaining);
  }

 private:
  void read_value() {
    type_ = Type::NONE;
    seen_ = wrong_ = 0;
    has_medium_ = mm_from_tail_ = false;
    n_remaining_ = kNoCounts;
    extra_keys_ = mm_infos_ = nullptr;
    pending_ = &scratch_.stored.emplace_back();
    event_ = &pending_->event;
    uint32_t count;
    if (in_.map(&count)) {
      read_map(count);
    } else if (in_.array(&count)) {
      read_array(count);
    } else {
      in_.skip();
    }
  }

  // ---- the two encodings

  void read_map(uint32_t count) {
    unsigned hint = TYPE;
    for (; count != 0 && !in_.broken(); --count) {
      std::string_view key;
      if (!in_.text(&key)) {  // no engine has other keys; they are skipped rather than refused
        in_.skip(2);
        continue;
      }
      const Member member = member_named(key, hint);
      if (member != OTHER_MEMBER) hint = member + 1;
      read_member(member);
    }
  }

  static Member member_named(std::string_view key, unsigned hint) {
    for (unsigned tried = 0; tried < OTHER_MEMBER; ++tried, ++hint) {
      if (hint >= OTHER_MEMBER) hint = 0;
      if (same_text(kMembers[hint], key)) return static_cast<Member>(hint);
    }
    return OTHER_MEMBER;
  }

  void read_array(uint32_t count) {
    if (count == 0) return;
    read_member(TYPE);
    --count;
    if (type_ == Type::STORED) {
      read_tail(count - read_positions(kStoredPositions, count));
    } else if (type_ == Type::REMOVED) {
      read_tail(count - read_positions(kRemovedPositions, count));
    } else {
      in_.skip(count);
    }
  }

  template <size_t N>
  uint32_t read_positions(const Member (&positions)[N], uint32_t count) {
    const uint32_t known = std::min<uint32_t>(count, N);
    for (uint32_t i = 0; i < known; ++i) read_member(positions[i]);
    return known;
  }

  // ---- the tail of array events
  // Newer engines fill every slot. Older ones appended only the values that they had,
  // block_mm_infos among them, so in their events the type of a value identifies its member.

  static constexpr uint32_t kTail = 4;  // slots with a meaning: group, kind, window, locality

  enum class ValueType : uint8_t { NIL, NUMBER, TEXT, LIST, ELSE };
  struct Slot {
    ValueType value_type;
    const uint8_t* at;
  };

  void read_tail(uint32_t count) {
    if (count == 0) return;
    Slot slots[kTail];
    const uint32_t known = std::min(count, kTail);
    for (uint32_t i = 0; i < known; ++i) slots[i] = next_slot();
    in_.skip(count - known);
    if (in_.broken()) return;
    const uint8_t* after = in_.at();
    if (is_fixed_tail(slots, known)) {
      constexpr Member kFixed[kTail] = {GROUP, KIND, WINDOW, LOCALITY};
      for (uint32_t i = 0; i < known; ++i) read_slot(kFixed[i], slots[i]);
    } else {
      read_legacy_tail(slots, known);
    }
    in_.back_to(after);
  }

  Slot next_slot() {
    const uint8_t* at = in_.at();
    std::string_view text;
    Integer number;
    uint32_t count;
    ValueType value_type = ValueType::ELSE;
    if (in_.nil()) {
      value_type = ValueType::NIL;
    } else if (in_.integer(&number)) {
      value_type = ValueType::NUMBER;
    } else if (in_.text(&text)) {
      value_type = ValueType::TEXT;
    } else if (in_.array(&count)) {
      value_type = ValueType::LIST;
      in_.skip(count);
    } else {
      in_.skip();
    }
    return {value_type, at};
  }

  static bool is_fixed_tail(const Slot* slots, uint32_t known) {
    constexpr ValueType kFixed[kTail] = {ValueType::NUMBER, ValueType::TEXT, ValueType::NUMBER,
                                         ValueType::TEXT};
    bool fits = true;
    for (uint32_t i = 0; i < known; ++i) {
      if (slots[i].value_type == ValueType::LIST) return false;
      fits = fits && (slots[i].value_type == kFixed[i] || slots[i].value_type == ValueType::NIL);
    }
    return fits || known == kTail;
  }

  void read_legacy_tail(const Slot* slots, uint32_t known) {
    for (uint32_t i = 0; i < known; ++i) {
      switch (slots[i].value_type) {
        case ValueType::NUMBER:
          if (!seen(WINDOW)) read_slot(seen(GROUP) ? WINDOW : GROUP, slots[i]);
          break;
        case ValueType::TEXT:
          if (!seen(KIND)) read_slot(KIND, slots[i]);
          break;
        case ValueType::LIST:
          mm_from_tail_ = true;
          read_slot(MM_INFOS, slots[i]);
          break;
        default:
          break;
      }
    }
  }

  // A wrong type in the tail is no error, as the tail differs from version to version.
  void read_slot(Member member, const Slot& slot) {
    in_.back_to(slot.at);
    read_member(member);
    wrong_ &= ~bit(member);
  }

  // ---- members

  void read_member(Member member) {
    if (in_.nil()) return;  // nil counts as absent
    const uint8_t* start = in_.at();
    seen_ |= bit(member);
    wrong_ &= ~bit(member);
    if (take(member) || in_.broken()) return;
    wrong_ |= bit(member);
    in_.back_to(start);
    in_.skip();
  }

  // Returns false if the value is of a wrong type or range; the cursor may be inside of it then.
  bool take(Member member) {
    switch (member) {
      case TYPE:
        return take_type();
      case HASHES:
        return take_hashes();
      case PARENT:
        return event_->has_parent = take_hash(&event_->parent);
      case TOKENS:
        return take_tokens();
      case BLOCK_SIZE:
        return take_unsigned(UINT64_MAX, &event_->block_size);
      case LORA_ID:
        return take_lora_id();
      case MEDIUM:
        return take_medium();
      case LORA_NAME:
        return take_lora_name();
      case EXTRA_KEYS:
        return take_list(&extra_keys_);
      case GROUP:
        return take_group();
      case KIND:
        return take_kind();
      case WINDOW:
        return take_window();
      case LOCALITY:
        return take_locality();
      case CACHE_SALT:
        return in_.text(&event_->salt);
      case MM_INFOS:
        return take_list(&mm_infos_);
      case REMAINING:
        return take_remaining();
      case ORIGIN:
        return take_origin();
      case EVENT_TYPE:
      case OTHER_MEMBER:
        break;
    }
    in_.skip();
    return true;
  }

  bool take_type() {
    std::string_view text;
    type_ = Type::NONE;
    if (!in_.text(&text)) return false;
    type_ = spelled(kTypes, text, Type::UNKNOWN);
    return true;
  }

  bool take_hashes() {
    uint32_t count;
    if (!in_.array(&count) || !in_.expect(count)) return false;
    pending_->hashes_at = scratch_.hashes.size();
    scratch_.hashes.resize(pending_->hashes_at + count);
    uint64_t* out = scratch_.hashes.data() + pending_->hashes_at;
    for (uint32_t i = 0; i < count; ++i) {
      if (!take_hash(out + i)) return false;
    }
    event_->n_hashes = count;
    return true;
  }

  // Bytes are folded to their last 8, as vLLM does to make integers of them.
  bool take_hash(uint64_t* out) {
    Integer number;
    if (in_.integer(&number)) {
      *out = number.bits;
      return true;
    }
    std::string_view bytes;
    if (!in_.bin(&bytes) || bytes.empty()) return false;
    const size_t folded = std::min(bytes.size(), sizeof *out);
    const auto* last = reinterpret_cast<const uint8_t*>(bytes.data() + bytes.size() - folded);
    *out = wire::big_endian(last, folded);
    return true;
  }

  bool take_tokens() {
    uint32_t count, pair;
    if (!in_.array(&count) || !in_.expect(count)) return false;
    pending_->tokens_at = scratch_.tokens.size();
    event_->n_tokens = count;
    event_->pairs = false;
    const uint8_t* first = in_.at();
    if (count != 0 && in_.array(&pair)) {
      in_.back_to(first);
      return take_pairs(count);
    }
    scratch_.tokens.resize(pending_->tokens_at + count);
    return in_.read_u32s(scratch_.tokens.data() + pending_->tokens_at, count);
  }

  // Stores [[a, b], [b, c], [c, d]] as a b c d.
  bool take_pairs(uint32_t count) {
    event_->pairs = true;
    event_->n_tokens = count + 1;
    scratch_.tokens.resize(pending_->tokens_at + count + 1);
    uint32_t* out = scratch_.tokens.data() + pending_->tokens_at;
    for (uint32_t i = 0; i < count; ++i) {
      uint32_t size;
      if (!in_.array(&size) || size != 2 || !in_.read_u32s(out + i, 2)) return false;
    }
    return true;
  }

  bool take_unsigned(uint64_t limit, uint64_t* out) {
    Integer number;
    if (!in_.integer(&number) || number.negative || number.bits > limit) return false;
    *out = number.bits;
    return true;
  }

  bool take_list(const uint8_t** at) {
    *at = nullptr;
    const uint8_t* start = in_.at();
    uint32_t count;
    if (!in_.array(&count)) return false;
    in_.skip(count);
    *at = start;
    return !in_.broken();
  }

  // No hash depends on the number, so the event is not refused for it, whatever its type.
  bool take_lora_id() {
    Integer number;
    event_->has_lora_id = in_.integer(&number);
    if (event_->has_lora_id) {
      event_->lora_id = static_cast<int64_t>(number.bits);
    } else {
      in_.skip();
    }
    return true;
  }

  bool take_medium() {
    std::string_view text;
    if (!in_.text(&text)) return false;
    has_medium_ = !text.empty();
    event_->medium = text;
    event_->tier = spelled(kMedia, text, Tier::UNKNOWN);
    return true;
  }

  // SGLang's array form may have a map {cache_salt} in place of the adapter.
  bool take_lora_name() {
    uint32_t count;
    if (!in_.map(&count)) return in_.text(&event_->lora_name);
    for (; count != 0 && !in_.broken(); --count) {
      std::string_view key;
      if (!in_.text(&key)) {
        in_.skip(2);
      } else if (key != kMembers[CACHE_SALT]) {
        in_.skip();
      } else if (!in_.nil() && !in_.text(&event_->salt)) {
        return false;
      }
    }
    return true;
  }

  bool take_group() {
    event_->group = -1;
    uint64_t group;
    if (!take_unsigned(INT32_MAX, &group)) return false;
    event_->group = static_cast<int32_t>(group);
    return true;
  }

  bool take_kind() {
    std::string_view text;
    event_->kind = GroupKind::NONE;
    if (!in_.text(&text)) return false;
    event_->kind = spelled(kKinds, text, GroupKind::OTHER);
    return true;
  }

  bool take_window() {
    event_->window = 0;
    uint64_t window;
    if (!take_unsigned(INT64_MAX, &window)) return false;
    event_->window = static_cast<int64_t>(window);
    return true;
  }

  // Blocks count as remote unless the event says LOCAL.
  bool take_locality() {
    std::string_view text;
    event_->remote = true;
    if (in_.text(&text)) {
      event_->remote = text != "LOCAL";
    } else {
      in_.skip();
    }
    return true;
  }

  // A list without exactly one count for each hash is ignored.
  bool take_remaining() {
    n_remaining_ = kNoCounts;
    uint32_t count;
    if (!in_.array(&count) || !in_.expect(count)) return false;
    remaining_at_ = scratch_.remaining.size();
    scratch_.remaining.resize(remaining_at_ + count);
    for (uint32_t i = 0; i < count; ++i) {
      uint64_t copies;
      if (!take_unsigned(UINT32_MAX, &copies)) return false;
      scratch_.remaining[remaining_at_ + i] = static_cast<uint32_t>(copies);
    }
    n_remaining_ = count;
    return true;
  }

  bool take_origin() {
    std::string_view text;
    event_->origin = Origin::UNKNOWN;
    if (!in_.text(&text)) return false;
    event_->origin = spelled(kOrigins, text, Origin::UNKNOWN);
    return true;
  }

  // ---- is it an event?

  bool seen(Member member) const { return (seen_ & bit(member)) != 0; }
  bool wrong(Member member) const { return (wrong_ & bit(member)) != 0; }
  bool good(Member member) const { return seen(member) && !wrong(member); }

  bool refuse(Reason reason) {
    ++bad[static_cast<size_t>(reason)];
    return false;
  }

  bool keep() {
    if (seen(EVENT_TYPE)) return refuse(Reason::UNKNOWN_TYPE);  // Mooncake's own vocabulary
    switch (type_) {
      case Type::STORED:
        return keep_stored();
      case Type::REMOVED:
        return keep_removed();
      case Type::CLEARED:
        wait(scratch_.cleared.size());
        scratch_.cleared.push_back({event_->tier, has_medium_, event_->medium});
        return true;
      case Type::IGNORED:
        ++ignored;
        return false;
      case Type::UNKNOWN:
        return refuse(Reason::UNKNOWN_TYPE);
      case Type::NONE:
        break;
    }
    return refuse(Reason::EVENT_SHAPE);
  }

  void wait(size_t index) { scratch_.order.push_back({type_, static_cast<uint32_t>(index)}); }

  static constexpr uint32_t kRemovedFields = bit(MEDIUM) | bit(GROUP) | bit(KIND) | bit(WINDOW);
  static constexpr uint32_t kStoredFields =
      kRemovedFields | bit(LORA_NAME) | bit(CACHE_SALT) | bit(EXTRA_KEYS) | bit(MM_INFOS);

  bool keep_removed() {
    if (!good(HASHES)) return refuse(Reason::HASHES);
    if ((wrong_ & kRemovedFields) != 0) return refuse(Reason::FIELD_TYPE);
    wait(scratch_.removed.size());
    scratch_.removed.push_back({{nullptr, event_->n_hashes, event_->tier, event_->kind,
                                 event_->remote, event_->group, event_->medium, nullptr},
                                pending_->hashes_at,
                                remaining_at_,
                                n_remaining_ == event_->n_hashes});
    return true;
  }

  bool keep_stored() {
    if (!good(HASHES)) return refuse(Reason::HASHES);
    if (wrong(PARENT)) return refuse(Reason::PARENT);
    if (!good(TOKENS)) return refuse(Reason::TOKENS);
    if (wrong(BLOCK_SIZE)) return refuse(Reason::BLOCK_SIZE);
    if ((wrong_ & kStoredFields) != 0 || !read_identity()) return refuse(Reason::FIELD_TYPE);
    wait(scratch_.stored.size() - 1);
    return true;
  }

  bool read_identity() {
    event_->names_salts = extra_keys_ != nullptr;
    if (mm_infos_ == nullptr && extra_keys_ == nullptr) return true;
    BlockIdentity identity(in_.end(), scratch_, *pending_);
    return identity.read(mm_infos_, mm_from_tail_, extra_keys_);
  }

  Cursor& in_;
  Scratch& scratch_;

  // The event being read, of any type. It is read directly into Scratch, as it is large.
  PendingStored* pending_ = nullptr;  // scratch_.stored.back()
  StoredEvent* event_ = nullptr;      // in it
  Type type_ = Type::NONE;
  uint32_t seen_ = 0;   // bit(Member)
  uint32_t wrong_ = 0;  // bit(Member), a subset of seen_
  // Number of counts of remaining copies, from `remaining_at_` on; kNoCounts without valid ones.
  static constexpr uint64_t kNoCounts = UINT64_MAX;
  uint64_t n_remaining_ = kNoCounts;
  size_t remaining_at_ = 0;
  bool has_medium_ = false;
  bool mm_from_tail_ = false;
  const uint8_t* extra_keys_ = nullptr;  // head of the list; nullptr when absent or nil
  const uint8_t* mm_infos_ = nullptr;    // likewise
};

}  // namespace decoding
}  // namespace kvd
