// Decides whether a request may be served, by the claims in its head.
//
//   Authorization: Bearer 6f1c...    must be one of the tokens, which grants some scopes (bits)
//   Host: 127.0.0.1:8090             the name by which a browser came: must not be a stranger's
//   Origin: https://a.example        the site whose page makes the browser ask
//
// 1. Every token is compared to its last byte, whatever the client sends: the time taken reveals
//    nothing about the tokens.
// 2. A claim that comes twice is refused: two readers could take different ones.
// 3. A page of this server itself may ask: its origin is the host that the request names. Where no
//    token is needed, that must be a name that no stranger's page can have.
// 4. Without tokens `Authorization` is not read. The host is judged instead (`checks_host`): a page
//    can make its own name lead to the loopback interface.
//
// Cost: 30 ns with a token, 5 ns for each further one; nothing is allocated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "http/plain_head.hpp"

namespace kvd {

enum class Verdict : int { granted, missing, malformed, unknown, scope, host, origin };

class Authorizer {
 public:
  static constexpr size_t kMaxToken = 128;  // longest token in bytes

  void clear() {
    tokens_.clear();
    hosts_.clear();
    origins_.clear();
  }

  // Adds a token of up to kMaxToken bytes, which grants routes of any of these scopes.
  void add_token(const char* text, size_t size, unsigned scopes) {
    tokens_.push_back(padded({text, size}));
    tokens_.back().scopes = scopes;
  }

  void add_host(const char* name, size_t size) { hosts_.emplace_back(name, size); }
  void add_origin(const char* origin, size_t size) { origins_.emplace_back(origin, size); }

  // Judges a request for a route of this scope, 0 for one that is open to all.
  Verdict judge(const Claims& claims, unsigned scope, bool checks_host) const {
    if (scope == 0) return Verdict::granted;
    if (claims.origin.times && !listed(origins_, claims.origin) && !of_own_page(claims))
      return Verdict::origin;
    if (!tokens_.empty()) return judge_token(claims.authorization, scope);
    return checks_host && !good_host(claims.host) ? Verdict::host : Verdict::granted;
  }

 private:
  struct Token {
    uint64_t words[kMaxToken / sizeof(uint64_t)] = {};
    uint64_t size = 0;
    unsigned scopes = 0;
  };

  static Token padded(const Text& text) {
    Token token;
    std::memcpy(token.words, text.begin, text.size);
    token.size = text.size;
    return token;
  }

  Verdict judge_token(const Claim& claim, unsigned scope) const {
    if (claim.times == 0) return Verdict::missing;
    Text text;
    if (claim.times > 1 || !bearer(claim.value, text)) return Verdict::malformed;
    if (text.size > kMaxToken) return Verdict::unknown;
    const Token shown = padded(text);
    unsigned scopes = 0, known = 0;
    for (const Token& token : tokens_) {
      uint64_t differ = token.size ^ shown.size;
      for (size_t i = 0; i < kMaxToken / sizeof(uint64_t); ++i)
        differ |= token.words[i] ^ shown.words[i];
      const unsigned same = differ == 0;
      known |= same;
      scopes |= token.scopes & (0u - same);
    }
    if (!known) return Verdict::unknown;
    return scopes & scope ? Verdict::granted : Verdict::scope;
  }

  // Finds the token in `Bearer TOKEN`; returns false for any other form.
  static bool bearer(const Text& value, Text& token) {
    const char *p = value.begin, *end = p + value.size;
    while (end > p && blank(end[-1])) --end;
    if (end - p < 8 || strncasecmp(p, "bearer ", 7) != 0) return false;
    for (p += 7; p < end && *p == ' ';) ++p;
    token = {p, static_cast<size_t>(end - p)};
    for (; p < end; ++p) {
      if (!token_char(*p)) return false;
    }
    return token.size > 0;
  }

  static bool blank(char c) { return c == ' ' || c == '\t'; }
  static bool digit(char c) { return c >= '0' && c <= '9'; }

  static bool token_char(char c) {  // RFC 6750 §2.1
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || digit(c) ||
           (c && std::strchr("-._~+/=", c));
  }

  bool of_own_page(const Claims& claims) const {
    if (claims.origin.times != 1 || claims.host.times != 1) return false;
    Text origin = claims.origin.value;
    for (const char* scheme : {"http://", "https://"}) {
      const size_t size = std::strlen(scheme);
      if (origin.size <= size || !Text{origin.begin, size}.is(scheme, size)) continue;
      const Text &host = claims.host.value, named = {origin.begin + size, origin.size - size};
      return named.size == host.size && strncasecmp(named.begin, host.begin, host.size) == 0 &&
             (!tokens_.empty() || good_host(claims.host));
    }
    return false;
  }

  // Returns whether no page can make this name lead here: an address, localhost, a listed name.
  bool good_host(const Claim& claim) const {
    if (claim.times == 0) return true;  // no browser leaves it out
    if (claim.times > 1 || claim.value.size == 0) return false;
    const Text& text = claim.value;
    if (text.begin[0] == '[') return true;  // IPv6; such a name could not be looked up
    Claim name = claim;
    name.value.size = 0;
    bool number = true;  // what browsers take for an IPv4 address
    while (name.value.size < text.size && text.begin[name.value.size] != ':') {
      const char c = text.begin[name.value.size++];
      number = number && (digit(c) || c == '.');
    }
    return (number && name.value.size) || name.value.is("localhost", 9) || listed(hosts_, name);
  }

  // Texts are in lower case.
  static bool listed(const std::vector<std::string>& texts, const Claim& claim) {
    if (claim.times != 1) return false;
    for (const std::string& text : texts) {
      if (claim.value.is(text.data(), text.size())) return true;
    }
    return false;
  }

  std::vector<Token> tokens_;
  std::vector<std::string> hosts_, origins_;
};

}  // namespace kvd
