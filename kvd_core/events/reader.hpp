// Reads one event of a batch, in every form that engines send.
//
//   array   [tag, known positions..., tail...]     vLLM to 0.23, SGLang to 0.5.19
//   map     {"type": tag, member: value, ...}      newer ones; any order, any further members
//                 └──▶ read_member(which) for both
//
// A list or a skipped value may have millions of elements. So reading stops between two elements
// when the slice's steps are used up; `left_` says how many are to come.
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
#include <iterator>
#include <string_view>
#include <vector>

#include "events/block_identity.hpp"
#include "events/members.hpp"
#include "events/scratch.hpp"
#include "events/types.hpp"
#include "base/msgpack.hpp"
#include "base/steps.hpp"

namespace kvd {
namespace decoding {

constexpr uint64_t kShortList = 256;  // elements that are read at once; part of their event's steps
constexpr uint64_t kElementsAStep = 16;  // of a longer list, or values that are skipped
constexpr uint32_t kMembersAtOnce = 64;  // members of an event between two checks of the steps

// Elements that a slice's steps suffice for, a short list at least.
inline uint64_t elements_for(const Steps& steps) {
  constexpr int64_t kMost = int64_t{1} << 32;  // a payload has fewer
  const auto rest = static_cast<uint64_t>(std::clamp<int64_t>(steps.rest(), 1, kMost));
  return std::max(kShortList, kElementsAStep * rest);
}

// Skips values until the steps are used up; returns how many are left.
inline uint64_t skip_some(Cursor& in, uint64_t values, Steps& steps) {
  const uint64_t most = elements_for(steps);
  uint64_t unused = most;
  values = in.skip(values, &unused);
  steps.take((most - unused) / kElementsAStep);
  return values;
}

// Reads one event after another into Scratch. What short events never need is not inlined, as the
// rest is read faster then.
class EventReader {
 public:
  EventReader(Cursor& in, Scratch& scratch) : in_(in), scratch_(scratch), identity_(scratch) {}

  uint32_t bad[kReasons] = {};
  uint32_t ignored = 0;

  // Reads one value into Scratch, or leaves that as it was if the event is refused. Of a long value
  // it reads a part and returns false; then call it again.
  bool read(Steps& steps) {
    steps_ = &steps;
    if (form_ == Form::NONE) begin();
    if (form_ != Form::READ) {
      if (!read_members()) return false;
      form_ = Form::READ;
      has_identity_ = type_ == Type::STORED && (mm_infos_ != nullptr || extra_keys_ != nullptr);
      if (has_identity_)
        identity_.begin(in_.end(), *pending_, mm_infos_, mm_from_tail_, extra_keys_);
    }
    if (has_identity_ && !in_.broken() && !identity_.read(steps)) return false;
    end();
    return true;
  }

 private:
  enum class Form : uint8_t { NONE, MAP, ARRAY, READ };  // READ: all members have been read

  void begin() {
    before_ = {scratch_.hashes.size(), scratch_.tokens.size(), scratch_.mm_begin.size(),
               scratch_.mm.size(), scratch_.remaining.size()};
    type_ = Type::NONE;
    seen_ = wrong_ = 0;
    has_medium_ = mm_from_tail_ = false;
    n_remaining_ = kNoCounts;
    extra_keys_ = mm_infos_ = nullptr;
    pending_ = &scratch_.stored.emplace_back();
    event_ = &pending_->event;
    members_ = 0;
    hint_ = TYPE;
    if (in_.map(&members_)) {
      form_ = Form::MAP;
      return;
    }
    form_ = Form::ARRAY;
    n_slots_ = 0;
    position_ = positions_end_ = nullptr;
    if (!in_.array(&members_)) return skip(1);
    if (members_ == 0) return;
    --members_;
    read_member(TYPE);
    if (type_ == Type::STORED) {
      position_ = std::begin(kStoredPositions), positions_end_ = std::end(kStoredPositions);
    } else if (type_ == Type::REMOVED) {
      position_ = std::begin(kRemovedPositions), positions_end_ = std::end(kRemovedPositions);
    }
  }

  void end() {
    form_ = Form::NONE;
    const bool kept = !in_.broken() && keep();
    if (!kept || type_ != Type::STORED) scratch_.stored.pop_back();
    if (kept) return;
    scratch_.hashes.resize(before_.hashes);
    scratch_.tokens.resize(before_.tokens);
    scratch_.mm_begin.resize(before_.mm_begin);
    scratch_.mm.resize(before_.mm);
    scratch_.remaining.resize(before_.remaining);
  }

  // Returns false when the steps are used up before all members are read.
  bool read_members() {
    for (;;) {
      while (left_ != 0) {
        if (!steps_->left()) return false;
        if (!go_on()) take_as_wrong();
      }
      if (members_ == 0 || in_.broken()) break;
      const uint32_t before = members_;
      form_ == Form::MAP ? read_map() : read_array();
      if (members_ == 0) continue;
      steps_->take(before - members_);
      if (!steps_->left()) return false;
    }
    if (form_ == Form::ARRAY && n_slots_ != 0 && !in_.broken()) read_tail();
    return true;
  }

  // Whether another member can be read at once: the last one is read, and there were not many.
  bool read_on(uint32_t* count) {
    return --members_ != 0 && --*count != 0 && left_ == 0 && !in_.broken();
  }

  // ---- the two encodings

  void read_map() {
    unsigned hint = hint_;
    uint32_t count = kMembersAtOnce;
    do {
      std::string_view key;
      if (!in_.text(&key)) {  // no engine has other keys; they are skipped rather than refused
        skip(2);
        continue;
      }
      const Member member = member_named(key, hint);
      if (member != OTHER_MEMBER) hint = member + 1;
      read_member(member);
    } while (read_on(&count));
    hint_ = hint;
  }

  static Member member_named(std::string_view key, unsigned hint) {
    for (unsigned tried = 0; tried < OTHER_MEMBER; ++tried, ++hint) {
      if (hint >= OTHER_MEMBER) hint = 0;
      if (same_text(kMembers[hint], key)) return static_cast<Member>(hint);
    }
    return OTHER_MEMBER;
  }

  void read_array() {
    const bool has_tail = type_ == Type::STORED || type_ == Type::REMOVED;
    uint32_t count = kMembersAtOnce;
    do {
      if (position_ != positions_end_) {
        read_member(*position_++);
      } else if (has_tail && n_slots_ < kTail) {
        read_slot();
      } else {
        skip(1);
      }
    } while (read_on(&count));
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

  void read_slot() {
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
      skip(count);
    } else {
      skip(1);
    }
    slots_[n_slots_++] = {value_type, at};
  }

  // Reads the slots once all of them are known.
  [[gnu::noinline]] void read_tail() {
    const uint8_t* after = in_.at();
    if (has_fixed_tail()) {
      constexpr Member kFixed[kTail] = {GROUP, KIND, WINDOW, LOCALITY};
      for (uint32_t i = 0; i < n_slots_; ++i) take_slot(kFixed[i], slots_[i]);
    } else {
      read_legacy_tail();
    }
    in_.back_to(after);
  }

  bool has_fixed_tail() const {
    constexpr ValueType kFixed[kTail] = {ValueType::NUMBER, ValueType::TEXT, ValueType::NUMBER,
                                         ValueType::TEXT};
    bool fits = true;
    for (uint32_t i = 0; i < n_slots_; ++i) {
      const ValueType found = slots_[i].value_type;
      if (found == ValueType::LIST) return false;
      fits = fits && (found == kFixed[i] || found == ValueType::NIL);
    }
    return fits || n_slots_ == kTail;
  }

  void read_legacy_tail() {
    for (uint32_t i = 0; i < n_slots_; ++i) {
      switch (slots_[i].value_type) {
        case ValueType::NUMBER:
          if (!seen(WINDOW)) take_slot(seen(GROUP) ? WINDOW : GROUP, slots_[i]);
          break;
        case ValueType::TEXT:
          if (!seen(KIND)) take_slot(KIND, slots_[i]);
          break;
        case ValueType::LIST:
          mm_from_tail_ = true;
          take_slot(MM_INFOS, slots_[i]);
          break;
        default:
          break;
      }
    }
  }

  // A wrong type in the tail is no error, as the tail differs from version to version.
  void take_slot(Member member, const Slot& slot) {
    in_.back_to(slot.at);
    read_member(member);
    wrong_ &= ~bit(member);
    left_ = 0;  // the value was skipped before
  }

  // ---- members

  void read_member(Member member) {
    if (in_.nil()) return;  // nil counts as absent
    start_ = in_.at();
    member_ = member;
    seen_ |= bit(member);
    wrong_ &= ~bit(member);
    if (!take(member)) take_as_wrong();
  }

  // Notes that the member's value is of a wrong type, and skips it.
  [[gnu::noinline]] void take_as_wrong() {
    left_ = 0;
    if (in_.broken()) return;
    wrong_ |= bit(member_);
    in_.back_to(start_);
    skip(1);
  }

  // ---- lists, and values that are skipped

  enum class Elements : uint8_t { SKIPPED, HASHES, TOKENS, PAIRS, REMAINING };

  [[gnu::noinline]] void skip(uint64_t values) {
    elements_ = Elements::SKIPPED;
    left_ = skip_some(in_, values, *steps_);
  }

  // Begins a list with too many elements to be read at once. Of a repeated member the last counts.
  template <class T>
  [[gnu::noinline]] bool begin_long(Elements elements, uint64_t count, std::vector<T>& items,
                                    size_t before) {
    items.resize(before);
    Scratch::expect(items, count + 1);
    elements_ = elements;
    left_ = count;
    return go_on();
  }

  // Takes elements, as many as there are steps for; false if one is of a wrong type.
  [[gnu::noinline]] bool go_on() {
    if (elements_ == Elements::SKIPPED) {
      left_ = skip_some(in_, left_, *steps_);
      return true;
    }
    const auto some = static_cast<uint32_t>(std::min(left_, elements_for(*steps_)));
    left_ -= some;
    steps_->take(some / kElementsAStep);
    switch (elements_) {
      case Elements::HASHES:
        return take_some_hashes(scratch_.hashes.size(), some);
      case Elements::TOKENS:
        return take_some_tokens(scratch_.tokens.size(), some);
      case Elements::PAIRS:
        return take_some_pairs(scratch_.tokens.size(), some);
      default:
        return take_some_remaining(scratch_.remaining.size(), some);
    }
  }

  template <class T>
  static T* grown(std::vector<T>& items, size_t at, size_t count) {
    items.resize(at + count);
    return items.data() + at;
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
    skip(1);
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
    const size_t at = pending_->hashes_at = before_.hashes;
    event_->n_hashes = count;
    if (count > kShortList) return begin_long(Elements::HASHES, count, scratch_.hashes, at);
    return take_some_hashes(at, count);
  }

  bool take_some_hashes(size_t at, uint32_t count) {
    uint64_t* out = grown(scratch_.hashes, at, count);
    for (uint32_t i = 0; i < count; ++i) {
      if (!take_hash(out + i)) return false;
    }
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
    const size_t at = pending_->tokens_at = before_.tokens;
    const uint8_t* first = in_.at();
    event_->pairs = count != 0 && in_.array(&pair);
    event_->n_tokens = count + event_->pairs;
    if (event_->pairs) {
      in_.back_to(first);
      grown(scratch_.tokens, at, 1);
      return begin_long(Elements::PAIRS, count, scratch_.tokens, at + 1);
    }
    if (count > kShortList) return begin_long(Elements::TOKENS, count, scratch_.tokens, at);
    return take_some_tokens(at, count);
  }

  bool take_some_tokens(size_t at, uint32_t count) {
    return in_.read_u32s(grown(scratch_.tokens, at, count), count);
  }

  // Stores [[a, b], [b, c], [c, d]] as a b c d: each pair overwrites the last token, and adds one.
  bool take_some_pairs(size_t at, uint32_t count) {
    uint32_t* out = grown(scratch_.tokens, at, count) - 1;
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
    skip(count);
    *at = start;
    return true;
  }

  // No hash depends on the number, so the event is not refused for it, whatever its type.
  bool take_lora_id() {
    Integer number;
    event_->has_lora_id = in_.integer(&number);
    if (event_->has_lora_id) event_->lora_id = static_cast<int64_t>(number.bits);
    return event_->has_lora_id;
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
    Cursor map = in_.short_part(kMaxEntryBytes);
    for (; count != 0 && !map.broken(); --count) {
      std::string_view key;
      if (!map.text(&key)) {
        map.skip(2);
      } else if (key != kMembers[CACHE_SALT]) {
        map.skip();
      } else if (!map.nil() && !map.text(&event_->salt)) {
        return false;
      }
    }
    in_.back_to(map.at());
    return !map.broken();
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
    if (!in_.text(&text)) return false;
    event_->remote = text != "LOCAL";
    return true;
  }

  // A list without exactly one count for each hash is ignored.
  [[gnu::noinline]] bool take_remaining() {
    n_remaining_ = kNoCounts;
    uint32_t count;
    if (!in_.array(&count) || !in_.expect(count)) return false;
    return begin_long(Elements::REMAINING, count, scratch_.remaining, before_.remaining);
  }

  bool take_some_remaining(size_t at, uint32_t count) {
    uint32_t* out = grown(scratch_.remaining, at, count);
    for (uint32_t i = 0; i < count; ++i) {
      uint64_t copies;
      if (!take_unsigned(UINT32_MAX, &copies)) return false;
      out[i] = static_cast<uint32_t>(copies);
    }
    if (left_ == 0) n_remaining_ = scratch_.remaining.size() - before_.remaining;
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
                                before_.remaining,
                                n_remaining_ == event_->n_hashes});
    return true;
  }

  bool keep_stored() {
    if (!good(HASHES)) return refuse(Reason::HASHES);
    if (wrong(PARENT)) return refuse(Reason::PARENT);
    if (!good(TOKENS)) return refuse(Reason::TOKENS);
    if (wrong(BLOCK_SIZE)) return refuse(Reason::BLOCK_SIZE);
    if ((wrong_ & kStoredFields) != 0 || (has_identity_ && !identity_.good()))
      return refuse(Reason::FIELD_TYPE);
    event_->names_salts = extra_keys_ != nullptr;
    wait(scratch_.stored.size() - 1);
    return true;
  }

  Cursor& in_;
  Scratch& scratch_;
  Steps* steps_ = nullptr;  // of the slice

  Form form_ = Form::NONE;
  uint32_t members_ = 0;              // members or positions that have not begun
  unsigned hint_ = TYPE;              // of a map: the member that comes next in engines' events
  const Member* position_ = nullptr;  // of an array: the members at its next positions
  const Member* positions_end_ = nullptr;
  Slot slots_[kTail];  // of its tail
  uint32_t n_slots_ = 0;
  Member member_ = OTHER_MEMBER;    // the last one that has begun
  const uint8_t* start_ = nullptr;  // of its value
  Elements elements_ = Elements::SKIPPED;
  uint64_t left_ = 0;  // elements of the list, or values to skip, that are to come
  BlockIdentity identity_;
  bool has_identity_ = false;  // there is one to be read

  struct Sizes {
    size_t hashes, tokens, mm_begin, mm, remaining;
  };
  Sizes before_ = {};  // of Scratch, before the event

  // The event being read, of any type. It is read directly into Scratch, as it is large.
  PendingStored* pending_ = nullptr;  // scratch_.stored.back()
  StoredEvent* event_ = nullptr;      // in it
  Type type_ = Type::NONE;
  uint32_t seen_ = 0;   // bit(Member)
  uint32_t wrong_ = 0;  // bit(Member), a subset of seen_
  // Number of counts of remaining copies; kNoCounts without valid ones.
  static constexpr uint64_t kNoCounts = UINT64_MAX;
  uint64_t n_remaining_ = kNoCounts;
  bool has_medium_ = false;
  bool mm_from_tail_ = false;
  const uint8_t* extra_keys_ = nullptr;  // head of the list; nullptr when absent or nil
  const uint8_t* mm_infos_ = nullptr;    // likewise
};

}  // namespace decoding
}  // namespace kvd
