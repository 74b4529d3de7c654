// Reads the head of a plain HTTP/1.1 request: the one nearly every client sends.
//
//   POST /query?x=1 HTTP/1.1\r\n            GET, POST or DELETE, an absolute path, HTTP/1.1
//   Host: kvd\r\n                           a host, at most once; any headers of plain names and
//                                           printable values, ...
//   Content-Type: application/json\r\n
//   Content-Length: 3052\r\n                ... at most one length, and nothing that changes how
//   \r\n                                    the connection or the body is to be read
//
// 1. A plain head is well-formed by any reading of RFC 9112, and means the same to any parser.
// 2. A head that is not plain is not refused, but left to llhttp, which decides (kvd/http/head.py).
//
// Cost: about 1 ns a byte; nothing is allocated.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <strings.h>

namespace kvd {

struct Text {
  const char* begin = nullptr;
  size_t size = 0;

  bool is(const char* other, size_t n) const {  // letter case aside; `other` in lower case
    return size == n && strncasecmp(begin, other, n) == 0;
  }
};

// Of the name of a header.
inline constexpr std::array<bool, 256> kNameChars = [] {
  std::array<bool, 256> allowed{};
  for (unsigned char c = 'a'; c <= 'z'; c++) allowed[c] = allowed[c - 'a' + 'A'] = true;
  for (unsigned char c = '0'; c <= '9'; c++) allowed[c] = true;
  allowed['-'] = allowed['_'] = true;
  return allowed;
}();

// Printable, allowed in a URL, and not the end of a path.
inline constexpr std::array<bool, 256> kTargetChars = [] {
  std::array<bool, 256> allowed{};
  for (unsigned char c = '!'; c <= '~'; c++) allowed[c] = true;
  for (const unsigned char c : {'"', '#', '<', '>', '?', '\\', '^', '`', '{', '|', '}'}) {
    allowed[c] = false;
  }
  return allowed;
}();

struct PlainHeader {
  Text name, value;
};

// Returns whether every reader accepts a text as a `Host`: it is empty, or a name of labels of 1 to
// 63 letters, digits, `-` and `_` (perhaps with the root's dot), or an IPv6 address in brackets;
// perhaps with a port.
inline bool names_host(const Text& text) {
  constexpr size_t kMaxLabel = 63, kMaxName = 253, kMaxBracketed = 47, kMaxPort = 5;
  const auto digit = [](char c) { return c >= '0' && c <= '9'; };
  const auto letter = [](char c, char last) { return (c | 0x20) >= 'a' && (c | 0x20) <= last; };
  const char *p = text.begin, *const end = p + text.size;
  if (p == end) return true;
  if (*p == '[') {
    for (++p; p < end && (digit(*p) || letter(*p, 'f') || *p == ':' || *p == '.');) ++p;
    if (p == end || *p++ != ']' || p - text.begin < 4 || p - text.begin > ptrdiff_t{kMaxBracketed})
      return false;
  } else {
    size_t label = 0;
    for (; p < end && *p != ':'; ++p) {
      if (*p == '.' ? label == 0 : !digit(*p) && !letter(*p, 'z') && *p != '-' && *p != '_')
        return false;
      label = *p == '.' ? 0 : label + 1;
      if (label > kMaxLabel) return false;
    }
    if (p == text.begin || p - text.begin > ptrdiff_t{kMaxName}) return false;
  }
  if (p == end) return true;
  if (*p++ != ':' || end - p > ptrdiff_t{kMaxPort}) return false;
  while (p < end && digit(*p)) ++p;
  return p == end;
}

// A header that claims something about the client: its last value, and how often it came.
struct Claim {
  Text value;
  unsigned times = 0;

  void take(const Text& text) {
    value = text;
    ++times;
  }
};

// The claims of a head about its client and the page behind it; http/permits.hpp judges them.
struct Claims {
  Claim authorization, host, origin;

  void take(const Text& name, const Text& text) {
    switch (name.size) {
      case 4:
        if (name.is("host", 4)) host.take(text);
        break;
      case 6:
        if (name.is("origin", 6)) origin.take(text);
        break;
      case 13:
        if (name.is("authorization", 13)) authorization.take(text);
        break;
      default:
        break;
    }
  }
};

struct PlainHead {
  // Longest head of a plain request: below every limit a listener may have (kvd/http/limits.py).
  static constexpr size_t kMaxBytes = 4096;
  // Headers of a plain request: below every limit a listener may have.
  static constexpr size_t kMaxHeaders = 48;
  static constexpr size_t kMaxDigits = 9;  // digits of a length: no overflow, and beyond any limit

  size_t size = 0;  // bytes, with the empty line
  Text route;       // method and path with the space between them
  Text query;       // behind the question mark
  size_t n_headers = 0;
  PlainHeader headers[kMaxHeaders];
  size_t length = 0;   // of the body
  bool json = false;   // the body is announced as exactly application/json
  bool keyed = false;  // an Idempotency-Key may change what the request means
  Claims claims;
};

class PlainHeadReader {
 public:
  PlainHeadReader(const char* data, size_t n)
      : p_(data), end_(data + (n < PlainHead::kMaxBytes ? n : PlainHead::kMaxBytes)) {}

  // Returns whether the data begin with the whole head of a plain request.
  bool read(PlainHead& head) {
    const char* const begin = p_;
    if (!request_line(head)) return false;
    head.n_headers = head.length = 0;
    head.json = head.keyed = false;
    head.claims = Claims();
    bool has_length = false, has_type = false;
    while (!skip("\r\n", 2)) {
      if (head.n_headers == PlainHead::kMaxHeaders) return false;
      PlainHeader& header = head.headers[head.n_headers];
      if (!header_line(header)) return false;
      if (!note(header, head, has_length, has_type)) return false;
      head.claims.take(header.name, header.value);
      ++head.n_headers;
    }
    if (head.claims.host.times > 1) return false;
    head.size = static_cast<size_t>(p_ - begin);
    return true;
  }

 private:
  bool skip(const char* text, size_t n) {
    if (static_cast<size_t>(end_ - p_) < n || std::memcmp(p_, text, n) != 0) return false;
    p_ += n;
    return true;
  }

  bool request_line(PlainHead& head) {
    head.route.begin = p_;
    if (!skip("POST /", 6) && !skip("GET /", 5) && !skip("DELETE /", 8)) return false;
    while (p_ < end_ && target_char(*p_)) ++p_;
    head.route.size = static_cast<size_t>(p_ - head.route.begin);
    head.query = {p_, 0};
    if (skip("?", 1)) {
      head.query.begin = p_;
      while (p_ < end_ && (target_char(*p_) || *p_ == '?')) ++p_;
      head.query.size = static_cast<size_t>(p_ - head.query.begin);
    }
    return skip(" HTTP/1.1\r\n", 11);
  }

  bool header_line(PlainHeader& header) {
    header.name.begin = p_;
    while (p_ < end_ && name_char(*p_)) ++p_;
    header.name.size = static_cast<size_t>(p_ - header.name.begin);
    if (header.name.size == 0 || !skip(":", 1)) return false;
    while (p_ < end_ && *p_ == ' ') ++p_;
    header.value.begin = p_;
    while (p_ < end_ && *p_ >= ' ' && *p_ <= '~') ++p_;
    const char* stop = p_;
    while (stop > header.value.begin && stop[-1] == ' ') --stop;
    header.value.size = static_cast<size_t>(stop - header.value.begin);
    return skip("\r\n", 2);
  }

  // Notes what a header says of the request; returns false if the header is not plain.
  bool note(const PlainHeader& header, PlainHead& head, bool& has_length, bool& has_type) {
    const Text &name = header.name, &value = header.value;
    switch (name.size) {
      case 4:
        return !name.is("host", 4) || names_host(value);
      case 6:
        return !name.is("expect", 6);
      case 7:
        return !name.is("upgrade", 7);
      case 10:
        return !name.is("connection", 10) || value.is("keep-alive", 10);
      case 12:
        if (!has_type && name.is("content-type", 12)) {
          has_type = true;
          head.json = value.size == 16 && std::memcmp(value.begin, "application/json", 16) == 0;
        }
        return true;
      case 14:
        if (!name.is("content-length", 14)) return true;
        if (has_length) return false;
        has_length = true;
        return digits(value, head.length);
      case 15:
        if (name.is("idempotency-key", 15)) head.keyed = true;
        return true;
      case 16:
        return !name.is("proxy-connection", 16) && !name.is("content-encoding", 16);
      case 17:
        return !name.is("transfer-encoding", 17);
      default:
        return true;
    }
  }

  static bool digits(const Text& text, size_t& number) {
    if (text.size == 0 || text.size > PlainHead::kMaxDigits) return false;
    for (size_t i = 0; i < text.size; ++i) {
      if (text.begin[i] < '0' || text.begin[i] > '9') return false;
      number = number * 10 + static_cast<size_t>(text.begin[i] - '0');
    }
    return true;
  }

  static bool target_char(char c) { return kTargetChars[static_cast<uint8_t>(c)]; }

  static bool name_char(char c) { return kNameChars[static_cast<uint8_t>(c)]; }

  const char* p_;
  const char* const end_;
};

// Returns whether the data begin with the whole head of a plain request, which is then in `head`.
inline bool read_plain_head(const char* data, size_t n, PlainHead& head) {
  return PlainHeadReader(data, n).read(head);
}

}  // namespace kvd
