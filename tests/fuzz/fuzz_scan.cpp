// libFuzzer over the body scanner: it reads no byte outside the body, its results are consistent,
// its two readers of arrays agree, and a scan in steps finds the same.
//
//   clang++ -std=c++17 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all
//       -Ikvd_core tests/fuzz/fuzz_scan.cpp -o fuzz_scan && ./fuzz_scan -max_total_time=120 corpus/
//
// With -U__SSE2__ the portable reader is tested.

#include <cstdlib>
#include <memory>
#include <string>

#include "json/scan.hpp"

using kvd::scanning::BodyScan;
using kvd::scanning::Element;
using kvd::scanning::ScanResult;
using kvd::scanning::Value;
using kvd::scanning::ValueKind;

namespace {

constexpr size_t ARRAYS = 2, FIELDS = 2;  // "t" holds u32, "h" hashes; "m" and "n" are fields

void demand(bool condition) {
  if (!condition) std::abort();
}

struct Scanned {
  BodyScan scan;
  ScanResult result;

  // `step`: bytes of a step, 0: all in one.
  explicit Scanned(const std::string& text, size_t step = 0) {
    scan.add_array("t", Element::u32);
    scan.add_array("h", Element::hash64);
    scan.add_field("m");
    scan.add_field("n");
    // Exactly as long as the text, so that the sanitizer sees a read beyond it.
    body_.reset(new uint8_t[text.size()]);
    std::memcpy(body_.get(), text.data(), text.size());
    if (step == 0) {
      result = scan.scan(body_.get(), text.size());
    } else {
      scan.begin(body_.get(), text.size());
      while (!scan.advance(step)) {}
      result = scan.result();
    }
    end_ = body_.get() + text.size();
  }

  std::string text(size_t field) {
    const Value& value = scan.value(field);
    if (value.kind == ValueKind::absent) return "absent";
    demand(body_.get() <= value.begin && value.begin <= value.end && value.end <= end_);
    if (value.kind == ValueKind::escaped) return scan.unescaped(value);
    if (value.kind == ValueKind::nested) return "nested";  // with_blanks may have changed its text
    return std::string(value.begin, value.end);
  }

 private:
  std::unique_ptr<uint8_t[]> body_;
  const uint8_t* end_ = nullptr;
};

// Puts a blank before every comma between values: the JSON means the same, but the reader of whole
// blocks cannot read it.
std::string with_blanks(const std::string& text) {
  std::string result;
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '"') quoted = !quoted;
    if (text[i] == ',' && !quoted) result += ' ';
    result += text[i];
    if (text[i] == '\\' && quoted && i + 1 < text.size()) result += text[++i];
  }
  return result;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string body(reinterpret_cast<const char*>(data), size);
  Scanned one(body), two(with_blanks(body)), steps(body, 1 + size % 40);

  demand(one.result == steps.result && one.scan.message() == steps.scan.message());
  demand(one.result == two.result);
  if (one.result == ScanResult::wrong) demand(one.scan.message() == two.scan.message());
  demand((one.result == ScanResult::ok) == one.scan.message().empty());
  demand(one.scan.message().size() < 160);
  for (size_t i = 0; i < ARRAYS; ++i) {
    const auto &narrow = one.scan.narrow(i), &narrow_two = two.scan.narrow(i);
    const auto &wide = one.scan.wide(i), &wide_two = two.scan.wide(i);
    demand(narrow.size() == narrow_two.size() && wide.size() == wide_two.size());
    demand(narrow.size() == steps.scan.narrow(i).size());
    demand(wide.size() == steps.scan.wide(i).size());
    for (size_t k = 0; k < narrow.size(); ++k) demand(narrow.data()[k] == narrow_two.data()[k]);
    for (size_t k = 0; k < wide.size(); ++k) demand(wide.data()[k] == wide_two.data()[k]);
    demand(one.scan.present(i) == two.scan.present(i));
    if (one.result != ScanResult::ok)
      demand(!one.scan.present(i) && narrow.size() + wide.size() == 0);
  }
  for (size_t i = 0; i < FIELDS; ++i) {
    demand(one.text(i) == two.text(i) && one.text(i) == steps.text(i));
    demand(one.result == ScanResult::ok || one.text(i) == "absent");
  }
  return 0;
}
