// Reads JSON in pieces of any size and calls a sink for its parts. Strict RFC 8259.
//
//   pieces    {"m:default":{"block_si | ze":16,"events":[{"wor | ..
//                             `-kept-'   joined with the next piece before it is read
//
// The sink has  open(is_object) close(is_object) key(text) number(text) text(text) word(text)
// where texts are string_views that are valid during the call; `word` gets null, true or false.
//
// Invariants
//   1. `kept_` is the beginning of one token, at most kMaxToken bytes;
//   2. bit i of `objects_` tells whether container i is an object; there are at most kMaxDepth.
//
// Costs: linear; ~5 ns a token; memory one token.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>

#include "json/scan_text.hpp"

namespace kvd {

template <class Sink>
class JsonStream {
 public:
  // Most levels of a dump's JSON: it has 9, and later versions hardly many more.
  static constexpr uint32_t kMaxDepth = 64;
  // Longest string or number of a dump's JSON: names of models and workers are below 1 KiB. The
  // bound keeps an endless string from filling memory.
  static constexpr size_t kMaxToken = 64 * 1024;

  // Throws std::invalid_argument for malformed text, and whatever the sink throws.
  void feed(const uint8_t* p, size_t n, Sink& sink) {
    if (kept_.empty()) {
      keep(read(p, p + n, sink), p + n);
      return;
    }
    joined_.swap(kept_);
    kept_.clear();
    joined_.append(reinterpret_cast<const char*>(p), n);
    const uint8_t* const begin = reinterpret_cast<const uint8_t*>(joined_.data());
    keep(read(begin, begin + joined_.size(), sink), begin + joined_.size());
  }

  // Whether exactly one whole value has been read.
  bool complete() const { return expect_ == Expect::NOTHING && kept_.empty(); }

 private:
  enum class Expect : uint8_t {
    VALUE,
    VALUE_OR_END,
    KEY,
    KEY_OR_END,
    COLON,
    COMMA_OR_END,
    NOTHING
  };

  [[noreturn]] static void malformed(const char* what) {
    throw std::invalid_argument(std::string("malformed JSON: ") + what);
  }

  static bool is_space(uint8_t c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }

  void keep(const uint8_t* p, const uint8_t* end) {
    if (static_cast<size_t>(end - p) > kMaxToken) malformed("a string is too long");
    kept_.assign(reinterpret_cast<const char*>(p), static_cast<size_t>(end - p));
  }

  // Reads whole tokens; returns where the first incomplete one begins.
  const uint8_t* read(const uint8_t* p, const uint8_t* end, Sink& sink) {
    while (true) {
      while (p != end && is_space(*p)) ++p;
      if (p == end) return p;
      const uint8_t* const after = token(p, end, sink);
      if (after == nullptr) return p;
      p = after;
    }
  }

  // Reads the token at p; returns its end, or null if it continues behind `end`.
  const uint8_t* token(const uint8_t* p, const uint8_t* end, Sink& sink) {
    switch (*p) {
      case '{':
        open(true, sink);
        return p + 1;
      case '[':
        open(false, sink);
        return p + 1;
      case '}':
        close(true, sink);
        return p + 1;
      case ']':
        close(false, sink);
        return p + 1;
      case ':':
        if (expect_ != Expect::COLON) malformed("an unexpected colon");
        expect_ = Expect::VALUE;
        return p + 1;
      case ',':
        if (expect_ != Expect::COMMA_OR_END) malformed("an unexpected comma");
        expect_ = in_object() ? Expect::KEY : Expect::VALUE;
        return p + 1;
      case '"':
        return string(p + 1, end, sink);
      default:
        return scalar(p, end, sink);
    }
  }

  bool in_object() const { return (objects_ >> (depth_ - 1) & 1) != 0; }

  void want_value() {
    if (expect_ != Expect::VALUE && expect_ != Expect::VALUE_OR_END)
      malformed("an unexpected value");
  }

  void value_ends() { expect_ = depth_ == 0 ? Expect::NOTHING : Expect::COMMA_OR_END; }

  void open(bool object, Sink& sink) {
    want_value();
    if (depth_ == kMaxDepth) malformed("nested too deep");
    const uint64_t bit = uint64_t{1} << depth_++;
    objects_ = object ? objects_ | bit : objects_ & ~bit;
    expect_ = object ? Expect::KEY_OR_END : Expect::VALUE_OR_END;
    sink.open(object);
  }

  void close(bool object, Sink& sink) {
    const bool empty = expect_ == (object ? Expect::KEY_OR_END : Expect::VALUE_OR_END);
    if (depth_ == 0 || in_object() != object || !(empty || expect_ == Expect::COMMA_OR_END)) {
      malformed("an unexpected bracket");
    }
    --depth_;
    value_ends();
    sink.close(object);
  }

  const uint8_t* string(const uint8_t* p, const uint8_t* end, Sink& sink) {
    const uint8_t* quote = scanning::plain_run(p, end);
    if (quote == end) return nullptr;
    std::string_view chars(reinterpret_cast<const char*>(p), static_cast<size_t>(quote - p));
    if (*quote != '"') {
      quote = closing_quote(quote, end);
      if (quote == nullptr) return nullptr;
      const scanning::TextEnd found = scanning::find_end(p, quote + 1, quote);
      if (found.problem != nullptr) malformed(found.problem);
      scanning::unescape(p, quote, unescaped_);
      chars = unescaped_;
    }
    if (expect_ == Expect::KEY || expect_ == Expect::KEY_OR_END) {
      expect_ = Expect::COLON;
      sink.key(chars);
    } else {
      want_value();
      value_ends();
      sink.text(chars);
    }
    return quote + 1;
  }

  static const uint8_t* closing_quote(const uint8_t* p, const uint8_t* end) {
    for (; p < end; ++p) {
      if (*p == '"') return p;
      if (*p == '\\') ++p;
    }
    return nullptr;
  }

  static bool in_scalar(uint8_t c) {
    const uint8_t lower = c | 0x20;
    return scanning::is_digit(c) || (lower >= 'a' && lower <= 'z') || c == '-' || c == '+' ||
           c == '.';
  }

  const uint8_t* scalar(const uint8_t* p, const uint8_t* end, Sink& sink) {
    const uint8_t* q = p;
    while (q != end && in_scalar(*q)) ++q;
    if (q == end) return nullptr;
    if (q == p) malformed("an unexpected character");
    want_value();
    value_ends();
    const std::string_view chars(reinterpret_cast<const char*>(p), static_cast<size_t>(q - p));
    if (chars == "null" || chars == "true" || chars == "false") {
      sink.word(chars);
    } else {
      check_number(chars);
      sink.number(chars);
    }
    return q;
  }

  static void check_number(std::string_view s) {
    size_t i = s[0] == '-' ? 1 : 0;
    const auto digits = [&] {
      const size_t from = i;
      while (i < s.size() && scanning::is_digit(static_cast<uint8_t>(s[i]))) ++i;
      return i != from;
    };
    const bool zero = i < s.size() && s[i] == '0';
    const size_t start = i;
    bool good = digits() && !(zero && i - start > 1);
    if (good && i < s.size() && s[i] == '.') good = (++i, digits());
    if (good && i < s.size() && (s[i] | 0x20) == 'e') {
      ++i;
      if (i < s.size() && (s[i] == '+' || s[i] == '-')) ++i;
      good = digits();
    }
    if (!good || i != s.size()) malformed("not a number");
  }

  Expect expect_ = Expect::VALUE;
  uint32_t depth_ = 0;
  uint64_t objects_ = 0;
  std::string kept_, joined_, unescaped_;
};

}  // namespace kvd
