// One pass over a JSON request body: long integer arrays go straight into memory, a few named
// members are located, everything else is checked and skipped. Strict RFC 8259, no Python in here.
//
//   {"model_name": "m", "x": [[{}]], "token_ids": [128000, 9906, 1917, 0], "lora_name": null}
//    `---key----'   |     `-skip-'    `---key---'  `-- Column<uint32_t> -'              |
//              Value{text}         (a bit a level)                                Value{null}
//
//   json/scan.hpp       objects, arrays, numbers; known members; the faults of a bad body
//   json/scan_ints.hpp  the integers of an array, 64 bytes at a time
//   json/scan_text.hpp  strings
//
// Invariants
//  1. No byte outside [begin_, end_) is read; nothing relies on a terminator.
//  2. After a scan that is not `ok` every column is empty and every value absent.
//  3. Values point into the body and live as long as it; columns live until the next scan.
//  4. The first problem in reading order is reported, as by Dynamo's streaming reader; so a body
//     with a wrong member before malformed text is wrong, not malformed. A container in the wrong
//     place is noticed at its opening bracket, a scalar at its end, a duplicate at its key.
//  5. Memory kept between scans is bounded: KEPT_BYTES a column and text, 128 KiB for the bit
//     stack.
//
// Costs (EPYC 7003 at 3.2 GHz): linear in the body; a member 13-15 ns, a bracket 2 ns. A query body
// of 512 tokens and two texts takes 2 us from bytes to dict, 0.35 us of it before the first token.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "json/scan_ints.hpp"
#include "json/scan_text.hpp"

namespace kvd::scanning {

// Most levels of brackets in a skipped value. They take 128 KiB of the bit stack. An 8 MiB body
// could nest eight times deeper, which only an attack would do.
constexpr size_t MAX_DEPTH = size_t{1} << 20;
// Most levels inside a requested member, whose decoder recurses; serde_json allows 128 as well.
constexpr size_t MAX_FIELD_DEPTH = 128;
// Longest name of a known member with its escapes, far above the names that there are.
constexpr size_t MAX_NAME = 1024;
// How many times as long a byte takes in a step of brackets, members or escapes, or of integers
// that are taken one by one, as among regular integers. Measured: 0.4 ns, and 1.5 to 4.
constexpr size_t SLOWER = 4;
// Most bytes of client input that an error text repeats: enough to recognise a number, too few to
// abuse.
constexpr size_t MAX_ECHO = 40;

enum class ScanResult : uint8_t { ok, malformed, wrong };
enum class Element : uint8_t { u32, hash64, i64 };
enum class ValueKind : uint8_t { absent, null, no, yes, integer, real, text, escaped, nested };

// The position of a requested member in the body; of a text, without its quotes.
struct Value {
  ValueKind kind = ValueKind::absent;
  const uint8_t* begin = nullptr;
  const uint8_t* end = nullptr;
};

// The scanner of one route; its members are declared before the first scan. Not re-entrant.
class BodyScan {
 public:
  // A `nullable` array may be null, which counts as absent.
  void add_array(const std::string& name, Element element, bool nullable = false) {
    arrays_.push_back(Array{name, element, nullable, false, false, {}, {}});
  }
  void add_field(const std::string& name) { fields_.push_back(Field{name, {}, nullptr}); }

  ScanResult scan(const uint8_t* body, size_t length);

  // Does the same in steps: `advance` returns true once the body is scanned. What takes longer than
  // regular integers and plain text counts SLOWER times as many `bytes`. A step may be longer by as
  // much plain text, white space and digits as there are.
  void begin(const uint8_t* body, size_t length);
  bool advance(size_t bytes);
  // Takes over a scan in steps of another scanner with the same members: until `disown`, a `scan` of
  // the same bytes returns its result.
  void adopt(BodyScan& other);
  void disown() { adopted_ = false; }

  ScanResult result() const { return result_; }  // of the last scan

  // Empties the columns and values.
  void forget();

  const std::string& message() const { return message_; }  // why the last scan was not ok
  bool present(size_t array) const { return arrays_[array].present; }
  const Column<uint32_t>& narrow(size_t array) const { return arrays_[array].narrow; }
  const Column<uint64_t>& wide(size_t array) const { return arrays_[array].wide; }
  const Value& value(size_t field) const { return fields_[field].value; }
  const uint8_t* member(size_t field) const { return fields_[field].begin; }  // if it has a value

  // Memory kept for the next scan.
  size_t held_bytes() const {
    size_t sum = text_.capacity() + brackets_.capacity() * sizeof brackets_[0];
    for (const Array& array : arrays_) sum += array.narrow.held_bytes() + array.wide.held_bytes();
    return sum;
  }

  // The text of a ValueKind::escaped value as UTF-8; valid until the next call of any function.
  const std::string& unescaped(const Value& value) {
    unescape(value.begin, value.end, text_);
    return text_;
  }

 private:
  using Bytes = const uint8_t*;  // a position in the body; nullptr: failed, message_ says why

  struct Array {
    std::string name;
    Element element;
    bool nullable;
    bool met;  // the body has the member, maybe as null
    bool present;
    Column<uint32_t> narrow;
    Column<uint64_t> wide;
  };
  struct Field {
    std::string name;
    Value value;
    Bytes begin;  // of the member: its quote
  };

  // Where a step goes on.
  enum class Inside : uint8_t {
    BODY,
    MEMBERS,
    NAME,
    INTEGERS,
    TEXT,  // a member's value
    CONTAINER,
    CONTAINER_NAME,
    CONTAINER_TEXT
  };

  Bytes go_on();
  Bytes pause(Bytes p, Inside where);
  Bytes body(Bytes p);
  Bytes members(Bytes p);
  Bytes last(Bytes p);
  Bytes member(Bytes p);
  Bytes named(Bytes p);
  Bytes colon(Bytes p);
  Bytes value_of(Bytes p, Field* into);
  Bytes ended(Bytes p, ValueKind kind);
  Bytes closed(Bytes p);
  Bytes array(Bytes p, Array& into);
  Bytes elements_of(Bytes p, Array& into);
  template <class E>
  Bytes elements(Bytes p, const std::string& name, Column<typename E::type>& out);
  template <class E>
  Bytes element(Bytes p, const std::string& name, Column<typename E::type>& out);

  Bytes scalar(Bytes p, ValueKind* kind, Inside where);
  Bytes literal(Bytes p, const char* word);
  Bytes number(Bytes p, ValueKind* kind);
  Bytes container(Bytes p, bool at_value = true);
  Bytes container_name(Bytes p);
  Bytes string_end(Bytes p, Inside where);
  Bytes string_rest(Bytes p, Inside where);

  // Returns NUL at the end, which JSON's grammar allows nowhere.
  uint8_t at(Bytes p) const { return p != end_ ? *p : 0; }
  Bytes white(Bytes p) const {
    if (p != end_ && is_white(*p) && ++p != end_ && is_white(*p)) return white_run(p + 1, end_);
    return p;
  }

  Bytes bad_number(Bytes p, Bytes end, const std::string& name, size_t index, const char* problem);
  Bytes malformed(Bytes p, const char* why);
  Bytes wrong(const std::string& what);
  Bytes unexpected(Bytes p, const std::string& expected);

  std::vector<Array> arrays_;
  std::vector<Field> fields_;
  Bytes begin_ = nullptr;
  Bytes end_ = nullptr;
  Bytes at_ = nullptr;              // where the next step goes on
  Inside inside_ = Inside::BODY;    // and in what
  Bytes stop_ = nullptr;            // the step ends behind it among regular integers,
  Bytes near_ = nullptr;            // and behind this in anything else
  Array* open_ = nullptr;           // the array of integers that is being read
  Field* into_ = nullptr;           // the member whose value is being read; null: skipped
  Bytes value_ = nullptr;           // where that value begins, or a member's name
  size_t depth_ = 0;                // brackets that are open in that value
  size_t deepest_ = 0;              // most of them
  bool paused_ = false;             // the last step has not come to the end
  bool adopted_ = false;            // the bytes from begin_ to end_ are scanned already
  bool escaped_ = false;            // the last string has escapes
  std::vector<uint64_t> brackets_;  // a bit for each open bracket: 1 = object
  std::string text_;                // an unescaped key or value
  std::string message_;
  ScanResult result_ = ScanResult::ok;
};

inline ScanResult BodyScan::scan(const uint8_t* body_begin, size_t length) {
  if (adopted_ && begin_ == body_begin && end_ == body_begin + length) return result_;
  adopted_ = false;
  begin(body_begin, length);
  advance(SIZE_MAX);
  return result_;
}

inline void BodyScan::begin(const uint8_t* body_begin, size_t length) {
  begin_ = at_ = body_begin;
  end_ = body_begin + length;
  inside_ = Inside::BODY;
  forget();
  if (text_.capacity() > KEPT_BYTES) std::string().swap(text_);
  result_ = ScanResult::ok;
}

inline bool BodyScan::advance(size_t bytes) {
  const size_t left = static_cast<size_t>(end_ - at_);
  stop_ = at_ + (bytes < left ? bytes : left);
  near_ = at_ + (bytes / SLOWER < left ? bytes / SLOWER : left);
  paused_ = false;
  if (go_on() == nullptr && !paused_) forget();
  return !paused_;
}

// Not inlined, as `pause` and the refusals: they would crowd the loops over a body, whose state then
// does not fit the registers.
[[gnu::noinline]] inline BodyScan::Bytes BodyScan::go_on() {
  const auto text = [this] { return string_rest(at_, inside_); };  // the closing quote
  switch (inside_) {
    case Inside::BODY:
      return body(at_);
    case Inside::MEMBERS:
      return members(at_);
    case Inside::NAME:
      return members(named(text()));
    case Inside::INTEGERS:
      return members(elements_of(at_, *open_));
    case Inside::TEXT: {
      const Bytes quote = text();
      if (quote == nullptr) return nullptr;
      return members(ended(quote + 1, escaped_ ? ValueKind::escaped : ValueKind::text));
    }
    case Inside::CONTAINER:
      return members(closed(container(at_)));
    case Inside::CONTAINER_NAME: {
      const Bytes quote = text();
      const Bytes p = quote == nullptr ? nullptr : colon(quote + 1);
      return p == nullptr ? nullptr : members(closed(container(p)));
    }
    default: {
      const Bytes quote = text();
      return quote == nullptr ? nullptr : members(closed(container(white(quote + 1), false)));
    }
  }
}

// Ends a step at p.
[[gnu::noinline]] inline BodyScan::Bytes BodyScan::pause(Bytes p, Inside where) {
  at_ = p;
  inside_ = where;
  paused_ = true;
  return nullptr;
}

inline void BodyScan::adopt(BodyScan& other) {
  arrays_.swap(other.arrays_);
  fields_.swap(other.fields_);
  begin_ = other.begin_, end_ = other.end_;
  message_.swap(other.message_);
  result_ = other.result_;
  adopted_ = true;
}

inline void BodyScan::forget() {
  for (Array& array : arrays_) {
    array.met = array.present = false;
    array.narrow.clear();
    array.wide.clear();
  }
  for (Field& field : fields_) field.value = Value{};
}

// -- the object ---------------------------------------------------------------------------------

inline BodyScan::Bytes BodyScan::body(Bytes p) {
  p = white(p);
  if (at(p) != '{') return unexpected(p, "expected an object");
  p = white(p + 1);
  return at(p) == '}' ? last(p + 1) : members(member(p));
}

// Reads on behind a member.
inline BodyScan::Bytes BodyScan::members(Bytes p) {
  while (p != nullptr) {
    if (p > near_) return pause(p, Inside::MEMBERS);
    p = white(p);
    if (at(p) == '}') return last(p + 1);
    if (at(p) != ',') return malformed(p, "expected `,` or `}`");
    p = member(white(p + 1));
  }
  return nullptr;
}

inline BodyScan::Bytes BodyScan::last(Bytes p) {
  p = white(p);
  return p == end_ ? p : malformed(p, "expected no more");
}

inline BodyScan::Bytes BodyScan::member(Bytes p) {
  if (at(p) != '"') return malformed(p, "expected a member name");
  value_ = p + 1;
  return named(string_end(p + 1, Inside::NAME));
}

// Reads on at the quote behind a member's name, which is a part of the body, or text_ if it had to
// be unescaped. Names longer than MAX_NAME are unknown.
inline BodyScan::Bytes BodyScan::named(Bytes p) {
  if (p == nullptr) return nullptr;
  const char* name = reinterpret_cast<const char*>(value_);
  size_t length = static_cast<size_t>(p - value_);
  if (escaped_ && length <= MAX_NAME) {
    unescape(value_, p, text_);
    name = text_.data();
    length = text_.size();
  }
  const auto is = [=](const std::string& known) {
    return known.size() == length && std::memcmp(known.data(), name, length) == 0;
  };
  for (Array& known : arrays_) {
    if (!is(known.name)) continue;
    if (std::exchange(known.met, true)) return wrong("duplicate member `" + known.name + "`");
    return (p = colon(p + 1)) != nullptr ? array(p, known) : nullptr;
  }
  for (Field& known : fields_) {
    if (!is(known.name)) continue;
    if (known.value.kind != ValueKind::absent)
      return wrong("duplicate member `" + known.name + "`");
    known.begin = value_ - 1;
    return (p = colon(p + 1)) != nullptr ? value_of(p, &known) : nullptr;
  }
  return (p = colon(p + 1)) != nullptr ? value_of(p, nullptr) : nullptr;
}

inline BodyScan::Bytes BodyScan::colon(Bytes p) {
  p = white(p);
  return at(p) == ':' ? white(p + 1) : malformed(p, "expected `:`");
}

// Reads a member's value; `into` is null where it is skipped.
inline BodyScan::Bytes BodyScan::value_of(Bytes p, Field* into) {
  into_ = into;
  value_ = p;
  depth_ = deepest_ = 0;
  if (at(p) == '{' || at(p) == '[') return closed(container(p));
  ValueKind kind = ValueKind::absent;
  p = scalar(p, &kind, Inside::TEXT);
  return p != nullptr ? ended(p, kind) : nullptr;
}

inline BodyScan::Bytes BodyScan::ended(Bytes p, ValueKind kind) {
  const bool quoted = kind == ValueKind::text || kind == ValueKind::escaped;
  if (into_ != nullptr) into_->value = Value{kind, value_ + quoted, p - quoted};
  return p;
}

inline BodyScan::Bytes BodyScan::closed(Bytes p) {
  if (p == nullptr) return nullptr;
  if (into_ != nullptr && deepest_ > MAX_FIELD_DEPTH)
    return wrong(into_->name + ": nested deeper than " + std::to_string(MAX_FIELD_DEPTH) +
                 " levels");
  return ended(p, ValueKind::nested);
}

// -- arrays of integers -------------------------------------------------------------------------

inline BodyScan::Bytes BodyScan::array(Bytes p, Array& into) {
  if (at(p) == 'n' && into.nullable) return literal(p, "null");
  if (at(p) != '[') return unexpected(p, into.name + ": expected an array");
  into.present = true;
  p = white(p + 1);
  return at(p) == ']' ? p + 1 : elements_of(p, into);
}

// Reads on at an element; pauses behind a comma once the step is over.
inline BodyScan::Bytes BodyScan::elements_of(Bytes p, Array& into) {
  open_ = &into;
  switch (into.element) {
    case Element::u32:
      return elements<U32>(p, into.name, into.narrow);
    case Element::hash64:
      return elements<Hash64>(p, into.name, into.wide);
    default:
      return elements<Int64>(p, into.name, into.wide);
  }
}

template <class E>
BodyScan::Bytes BodyScan::elements(Bytes p, const std::string& name,
                                   Column<typename E::type>& out) {
  for (bool blocks = true;;) {
    if ((p = element<E>(white(p), name, out)) == nullptr) return nullptr;
    if (blocks && p < stop_ && *p == ',' && p - begin_ >= LOOKBACK) {
      p = take_regular<E>(begin_, p, stop_, out);
      blocks = false;
    }
    p = white(p);
    if (at(p) == ']') return p + 1;
    if (at(p) != ',') return malformed(p, "expected `,` or `]`");
    ++p;
    if (p > near_) return pause(p, Inside::INTEGERS);
  }
}

// Reads one element byte by byte.
template <class E>
BodyScan::Bytes BodyScan::element(Bytes p, const std::string& name, Column<typename E::type>& out) {
  if (at(p) != '-' && !is_digit(at(p)))
    return unexpected(p, name + "[" + std::to_string(out.size()) + "]: expected an integer");
  ValueKind kind = ValueKind::absent;
  const Bytes end = number(p, &kind);
  if (end == nullptr) return nullptr;
  const bool minus = *p == '-';
  const char* problem = nullptr;
  // -0 is a float, as for serde_json, Dynamo's reader.
  if (kind != ValueKind::integer || (minus && p[1] == '0')) problem = " is not an integer";
  else if (!E::digits(p + minus, end, minus, out.room(1))) problem = E::range;
  if (problem != nullptr) return bad_number(p, end, name, out.size(), problem);
  out.commit(1);
  return end;
}

inline BodyScan::Bytes BodyScan::bad_number(Bytes p, Bytes end, const std::string& name,
                                            size_t index, const char* problem) {
  const size_t length = static_cast<size_t>(end - p);
  std::string echo(reinterpret_cast<const char*>(p), length < MAX_ECHO ? length : MAX_ECHO);
  if (length > MAX_ECHO) echo += "...";
  return wrong(name + "[" + std::to_string(index) + "]: " + echo + problem);
}

// -- any value ----------------------------------------------------------------------------------

// `where`: in what a step goes on that ends inside of a text.
inline BodyScan::Bytes BodyScan::scalar(Bytes p, ValueKind* kind, Inside where) {
  switch (at(p)) {
    case '"':
      p = string_end(p + 1, where);
      *kind = escaped_ ? ValueKind::escaped : ValueKind::text;
      return p != nullptr ? p + 1 : nullptr;
    case 't':
      *kind = ValueKind::yes;
      return literal(p, "true");
    case 'f':
      *kind = ValueKind::no;
      return literal(p, "false");
    case 'n':
      *kind = ValueKind::null;
      return literal(p, "null");
    default:
      return number(p, kind);
  }
}

inline BodyScan::Bytes BodyScan::literal(Bytes p, const char* word) {
  for (; *word != 0; ++word, ++p)
    if (at(p) != static_cast<uint8_t>(*word)) return malformed(p, "expected a value");
  return p;
}

inline BodyScan::Bytes BodyScan::number(Bytes p, ValueKind* kind) {
  const auto digits = [this](Bytes q) {
    while (q != end_ && is_digit(*q)) ++q;
    return q;
  };
  if (at(p) == '-') ++p;
  if (!is_digit(at(p))) return malformed(p, "expected a value");
  if (*p == '0' && is_digit(at(p + 1))) return malformed(p, "leading zero");
  p = digits(p);
  *kind = ValueKind::integer;
  if (at(p) == '.') {
    *kind = ValueKind::real;
    if (digits(p + 1) == p + 1) return malformed(p + 1, "expected a digit");
    p = digits(p + 1);
  }
  if (at(p) == 'e' || at(p) == 'E') {
    *kind = ValueKind::real;
    ++p;
    if (at(p) == '+' || at(p) == '-') ++p;
    if (digits(p) == p) return malformed(p, "expected a digit");
    p = digits(p);
  }
  return p;
}

// Checks an array or object without recursion; brackets_ has only the kind of each open bracket.
// p is at a value, or else behind one.
inline BodyScan::Bytes BodyScan::container(Bytes p, bool at_value) {
  size_t depth = depth_;
  const auto in_object = [&] {
    return (brackets_[(depth - 1) / 64] >> ((depth - 1) % 64) & 1) != 0;
  };
  for (;; at_value = true) {
    if (at_value) {
      depth_ = depth;
      if (p > near_ && depth != 0) return pause(p, Inside::CONTAINER);
      const uint8_t open = at(p);
      if (open == '{' || open == '[') {
        if (depth == MAX_DEPTH) return malformed(p, "nested too deep");
        if (depth / 64 == brackets_.size()) brackets_.push_back(0);
        const uint64_t bit = uint64_t{1} << depth % 64;
        brackets_[depth / 64] = (brackets_[depth / 64] & ~bit) | (open == '{' ? bit : 0);
        depth_ = ++depth;
        if (depth > deepest_) deepest_ = depth;
        p = white(p + 1);
        if (at(p) != (open == '{' ? '}' : ']')) {
          if (open == '{' && (p = container_name(p)) == nullptr) return nullptr;
          continue;
        }
      } else {
        ValueKind kind = ValueKind::absent;
        if ((p = scalar(p, &kind, Inside::CONTAINER_TEXT)) == nullptr) return nullptr;
        p = white(p);
      }
    }
    while (at(p) == (in_object() ? '}' : ']')) {  // close what ends here
      ++p;
      if (--depth == 0) return p;
      p = white(p);
    }
    if (at(p) != ',')
      return malformed(p, in_object() ? "expected `,` or `}`" : "expected `,` or `]`");
    p = white(p + 1);
    depth_ = depth;
    if (in_object() && (p = container_name(p)) == nullptr) return nullptr;
  }
}

inline BodyScan::Bytes BodyScan::container_name(Bytes p) {
  if (at(p) != '"') return malformed(p, "expected a member name");
  p = string_end(p + 1, Inside::CONTAINER_NAME);
  return p != nullptr ? colon(p + 1) : nullptr;
}

// p is behind the opening quote; returns the closing one.
inline BodyScan::Bytes BodyScan::string_end(Bytes p, Inside where) {
  escaped_ = false;
  return string_rest(p, where);
}

inline BodyScan::Bytes BodyScan::string_rest(Bytes p, Inside where) {
  const TextEnd found = find_end(p, end_, near_, escaped_);
  escaped_ = found.escaped;
  if (found.problem != nullptr) return malformed(found.at, found.problem);
  return *found.at == '"' ? found.at : pause(found.at, where);
}

// -- refusals -----------------------------------------------------------------------------------

[[gnu::noinline]] inline BodyScan::Bytes BodyScan::malformed(Bytes p, const char* why) {
  result_ = ScanResult::malformed;
  message_ = why;
  message_ += p < end_ ? " at byte " + std::to_string(p - begin_) : " at the end of the body";
  return nullptr;
}

inline BodyScan::Bytes BodyScan::wrong(const std::string& what) {
  result_ = ScanResult::wrong;
  message_ = what;
  return nullptr;
}

// Refuses the value at p: as malformed if it is no value at all, else as of the wrong kind.
[[gnu::noinline]] inline BodyScan::Bytes BodyScan::unexpected(Bytes p,
                                                              const std::string& expected) {
  if (at(p) == '{') return wrong(expected + ", found an object");
  if (at(p) == '[') return wrong(expected + ", found an array");
  ValueKind kind = ValueKind::absent;
  near_ = end_;  // the text is read in this step
  if (scalar(p, &kind, Inside::TEXT) == nullptr) return nullptr;
  const bool number = kind == ValueKind::integer || kind == ValueKind::real;
  return wrong(expected + ", found " +
               (number                                            ? "a number"
                : kind == ValueKind::null                         ? "null"
                : kind == ValueKind::yes || kind == ValueKind::no ? "a boolean"
                                                                  : "a string"));
}

}  // namespace kvd::scanning
