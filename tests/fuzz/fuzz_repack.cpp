// Any bytes as JSON, in pieces of any size: the resulting msgpack equals, byte for byte, that of a
// plain reader of the whole text, and there is no result if that reader finds the text malformed.
//
//   clang++ -g -O1 -std=c++17 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all
//       -Ikvd_core tests/fuzz/fuzz_repack.cpp -o fuzz_repack
//   ./fuzz_repack -max_len=8192 -max_total_time=120 CORPUS_FOLDER
//
// The input: one byte n, n bytes with lengths of pieces, which are used in turn, and the text.

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "conductor/repack.hpp"

namespace {

using Bytes = std::vector<uint8_t>;

void require(bool holds) {
  if (!holds) std::abort();
}

// Reads the whole text by recursion; shares no code with kvd::Repack. Functions return false if the
// text is malformed.
class Plain {
 public:
  explicit Plain(const std::string& text) : text_(text) {}

  std::optional<Bytes> whole() {
    if (!value(0)) return {};
    space();
    if (at_ != text_.size()) return {};
    return out_;
  }

 private:
  static constexpr int kMaxDepth = 64;

  int peek() const { return at_ < text_.size() ? static_cast<uint8_t>(text_[at_]) : -1; }

  bool take(char c) {
    if (peek() != c) return false;
    ++at_;
    return true;
  }

  bool take(const char* word) {
    const size_t size = std::strlen(word);
    if (text_.compare(at_, size, word) != 0) return false;
    at_ += size;
    return true;
  }

  void space() {
    while (peek() == ' ' || peek() == '\n' || peek() == '\r' || peek() == '\t') ++at_;
  }

  void number(uint64_t value, int bytes) {
    while (bytes-- != 0) out_.push_back(static_cast<uint8_t>(value >> 8 * bytes));
  }

  bool value(int depth) {
    space();
    if (peek() == '{' || peek() == '[') return depth < kMaxDepth && container(depth);
    if (take("null")) return out_.push_back(0xc0), true;
    if (take("false")) return out_.push_back(0xc2), true;
    if (take("true")) return out_.push_back(0xc3), true;
    return peek() == '"' ? text() : digits();
  }

  bool container(int depth) {
    const bool object = take('{');
    if (!object) take('[');
    const char closing = object ? '}' : ']';
    out_.push_back(object ? 0xdf : 0xdd);
    const size_t from = out_.size();
    number(0, 4);
    uint32_t count = 0;
    space();
    if (!take(closing)) {
      do {
        space();
        if (object && !text()) return false;
        if (object) space();
        if (object && !take(':')) return false;
        if (!value(depth + 1)) return false;
        ++count;
        space();
      } while (take(','));
      if (!take(closing)) return false;
    }
    for (size_t i = 0; i < 4; ++i) out_[from + i] = static_cast<uint8_t>(count >> (24 - 8 * i));
    return true;
  }

  bool digits() {
    const size_t from = at_;
    const bool negative = take('-');
    const size_t first = at_;
    if (!run() || (text_[first] == '0' && at_ - first > 1)) return false;
    bool natural = true;
    if (take('.')) {
      natural = false;
      if (!run()) return false;
    }
    if (take('e') || take('E')) {
      natural = false;
      if (!take('+')) take('-');
      if (!run()) return false;
    }
    const std::string token = text_.substr(from, at_ - from);
    errno = 0;
    if (natural && !negative) {
      const uint64_t value = std::strtoull(token.c_str(), nullptr, 10);
      if (errno == 0) return unsigned_(value), true;
    } else if (natural) {
      const int64_t value = std::strtoll(token.c_str(), nullptr, 10);
      if (errno == 0 && value == 0) return unsigned_(0), true;
      if (errno == 0) return out_.push_back(0xd3), number(static_cast<uint64_t>(value), 8), true;
    }
    errno = 0;
    double real = std::strtod(token.c_str(), nullptr);
    if (errno != 0 && (real == 0 || std::isinf(real))) real = 0;  // beyond the range of a double
    uint64_t bits;
    std::memcpy(&bits, &real, sizeof bits);
    out_.push_back(0xcb);
    number(bits, 8);
    return true;
  }

  bool run() {
    const size_t from = at_;
    while (peek() >= '0' && peek() <= '9') ++at_;
    return at_ != from;
  }

  void unsigned_(uint64_t value) {
    if (value < 128) return number(value, 1);
    const int power = value < 1u << 8             ? 0
                      : value < 1u << 16          ? 1
                      : value < uint64_t{1} << 32 ? 2
                                                  : 3;
    out_.push_back(static_cast<uint8_t>(0xcc + power));
    number(value, 1 << power);
  }

  bool text() {
    std::string token;
    if (!take('"')) return false;
    while (!take('"')) {
      uint32_t c = 0;
      if (!(take('\\') ? escaped(&c) : plain(&c))) return false;
      utf8(c, token);
    }
    const size_t size = token.size();
    if (size < 32) {
      number(0xa0 + size, 1);
    } else {
      out_.push_back(size < 256 ? 0xd9 : 0xdb);
      number(size, size < 256 ? 1 : 4);
    }
    out_.insert(out_.end(), token.begin(), token.end());
    return true;
  }

  // Reads a code point in UTF-8: shortest form, no surrogate, no control character.
  bool plain(uint32_t* c) {
    const int lead = peek();
    if (lead < ' ') return false;  // also at the end of the text
    const size_t from = at_++;
    int more = 0;
    while (more < 7 && (lead << more & 0x80) != 0) ++more;
    if (more == 1 || more > 4) return false;
    *c = more == 0 ? lead : lead & (0x7f >> more);
    for (int i = 1; i < more; ++i, ++at_) {
      if (peek() < 0 || (peek() & 0xc0) != 0x80) return false;
      *c = *c << 6 | (peek() & 0x3f);
    }
    if (*c > 0x10ffff || (*c >= 0xd800 && *c < 0xe000)) return false;
    std::string again;
    utf8(*c, again);
    return text_.compare(from, at_ - from, again) == 0;
  }

  bool escaped(uint32_t* c) {
    static constexpr char kLetters[] = "\"\\/bfnrt", kMeant[] = "\"\\/\b\f\n\r\t";
    const int letter = peek();
    ++at_;
    if (letter == 'u') return unit(c) && (*c < 0xd800 || *c >= 0xe000 || pair(c));
    const char* found = letter <= 0 ? nullptr : std::strchr(kLetters, letter);
    if (found != nullptr) *c = static_cast<uint8_t>(kMeant[found - kLetters]);
    return found != nullptr;
  }

  bool pair(uint32_t* high) {
    uint32_t low = 0;
    if (*high >= 0xdc00 || !take("\\u") || !unit(&low) || low < 0xdc00 || low >= 0xe000)
      return false;
    *high = 0x10000 + ((*high - 0xd800) << 10) + (low - 0xdc00);
    return true;
  }

  bool unit(uint32_t* c) {
    const std::string digits = text_.substr(std::min(at_, text_.size()), 4);
    at_ += 4;
    if (digits.size() != 4 ||
        digits.find_first_not_of("0123456789abcdefABCDEF") != std::string::npos)
      return false;
    *c = static_cast<uint32_t>(std::strtoul(digits.c_str(), nullptr, 16));
    return true;
  }

  static void utf8(uint32_t c, std::string& to) {
    if (c < 0x80) {
      to += static_cast<char>(c);
      return;
    }
    const int more = c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
    to += static_cast<char>((0xf0f0e0c0u >> 8 * (more - 1) & 0xff) | c >> 6 * more);
    for (int i = more; i-- != 0;) to += static_cast<char>(0x80 | (c >> 6 * i & 0x3f));
  }

  const std::string& text_;
  size_t at_ = 0;
  Bytes out_;
};

// Returns the text as msgpack, fed in pieces of these lengths, over and over; nothing if malformed.
std::optional<Bytes> repacked(const std::string& text, const uint8_t* lengths, size_t n) {
  kvd::Repack repack;
  try {
    for (size_t at = 0, turn = 0; at < text.size(); ++turn) {
      const size_t size =
          std::min<size_t>(n == 0 ? text.size() : lengths[turn % n] + 1u, text.size() - at);
      // A copy of exactly this size: the sanitizer sees a read of one byte too far.
      const std::unique_ptr<uint8_t[]> piece(new uint8_t[size]);
      std::memcpy(piece.get(), text.data() + at, size);
      repack.feed(piece.get(), size);
      at += size;
    }
    const uint8_t end = ' ';  // ends a bare number, too
    repack.feed(&end, 1);
  } catch (const std::invalid_argument&) { return {}; }
  if (repack.whole() == nullptr) return {};
  return *repack.whole();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const size_t n = std::min<size_t>(data[0] % 8, size - 1);
  const std::string text(reinterpret_cast<const char*>(data) + 1 + n, size - 1 - n);
  const std::optional<Bytes> expected = Plain(text).whole();
  require(repacked(text, data + 1, n) == expected);
  require(repacked(text, nullptr, 0) == expected);
  return 0;
}
