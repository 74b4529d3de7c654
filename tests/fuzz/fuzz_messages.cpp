// libFuzzer over the reader of messages: of any bytes, it reads nothing outside them and returns
// elements in order; of well-formed JSON it returns the elements that a plain reader finds.

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "json/scan.hpp"
#include "prompts/messages.hpp"

namespace {

using Elements = std::vector<std::string>;

void demand(bool condition) {
  if (!condition) std::abort();
}

bool is_array(const std::string& text) {
  kvd::scanning::BodyScan scan;
  scan.add_field("m");
  const std::string body = "{\"m\":" + text + "}";
  const auto* bytes = reinterpret_cast<const uint8_t*>(body.data());
  if (scan.scan(bytes, body.size()) != kvd::scanning::ScanResult::ok) return false;
  const kvd::scanning::Value& value = scan.value(0);
  const size_t first = text.find_first_not_of(" \t\r\n");
  const size_t last = text.find_last_not_of(" \t\r\n");
  // The text may also end the member and begin another one; then it does not count.
  return text[first] == '[' && value.end == bytes + std::strlen("{\"m\":") + last + 1;
}

// Splits an array byte by byte.
Elements plain(const std::string& text) {
  Elements found;
  std::string element;
  int depth = 0;
  bool quoted = false, escaped = false;
  for (const char c : text) {
    const bool blank = c == ' ' || c == '\t' || c == '\r' || c == '\n';
    const bool ends = !quoted && depth == 1 && (c == ',' || c == ']');
    if (ends) {
      const size_t last = element.find_last_not_of(" \t\r\n");
      if (last != std::string::npos) found.push_back(element.substr(0, last + 1));
      element.clear();
    } else if (depth >= 1 && !(blank && element.empty())) {
      element += c;
    }
    if (quoted) {
      if (!escaped && c == '"') quoted = false;
      escaped = !escaped && c == '\\';
    } else {
      if (c == '"') quoted = true;
      if (c == '[' || c == '{') ++depth;
      if (c == ']' || c == '}') --depth;
    }
  }
  return found;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // Exactly as long as the text, so that the sanitizer sees a read beyond it.
  const std::unique_ptr<char[]> bytes(new char[size]);
  if (size != 0) std::memcpy(bytes.get(), data, size);
  const char *begin = bytes.get(), *end = begin + size, *last = begin;
  Elements found;
  kvd::prompts::each_element(begin, end, [&](const char* from, const char* to) {
    demand(last <= from && from < to && to <= end);
    last = to;
    found.emplace_back(from, to);
  });
  kvd::prompts::has_media(begin, end);
  demand(kvd::prompts::data_bytes(begin, end) <= size);
  const std::string text(begin, size);
  if (is_array(text)) demand(found == plain(text));
  return 0;
}
