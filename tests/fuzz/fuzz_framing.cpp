// libFuzzer over the framing of engines' answers: nothing outside an answer is read, and in pieces
// of any size it gives the same result as in one piece.
//
//   byte 0: size of the pieces; byte 1: whether the rest begins an event stream or is an answer

#include <cstdlib>
#include <memory>
#include <string>

#include "relay/framing.hpp"

using namespace kvd::relay;

namespace {

void demand(bool condition) {
  if (!condition) std::abort();
}

// Copies the text into memory of exactly its size, so that the sanitizer sees a read beyond it.
std::unique_ptr<char[]> copied(const std::string& text) {
  std::unique_ptr<char[]> bytes(new char[text.size()]);
  if (!text.empty()) std::memcpy(bytes.get(), text.data(), text.size());
  return bytes;
}

struct Decoded {
  bool wrong = false;
  bool complete = false;
  size_t used = 0;
  std::string payload;

  Decoded(const AnswerHead& head, const std::string& text, size_t step) {
    Body body;
    body.begin(head);
    for (size_t at = 0; at < text.size() && !body.complete(); at += step) {
      const std::string piece = text.substr(at, step);
      const auto bytes = copied(piece);
      size_t payload_size = 0, taken = 0;
      if (!body.decode(bytes.get(), piece.size(), payload_size, taken)) {
        wrong = true;
        return;
      }
      demand(payload_size <= taken && taken <= piece.size());
      demand(taken == piece.size() || body.complete());
      payload.append(bytes.get(), payload_size);
      used += taken;
    }
    complete = body.complete();
  }
};

void check_answer(const std::string& text, size_t step) {
  AnswerHead head;
  size_t size = 0;
  const Parsed parsed = parse_head(copied(text).get(), text.size(), head, size);
  bool decided = false;  // bytes that cannot become a head may be refused before their end
  for (size_t n = 0; n < text.size(); n += step) {
    AnswerHead part;
    size_t part_size = 0;
    const Parsed before = parse_head(copied(text.substr(0, n)).get(), n, part, part_size);
    decided = decided || before != Parsed::kPart || (size != 0 && n >= size);
    demand(before == (decided ? parsed : Parsed::kPart));
    demand(!decided || n >= size || parsed == Parsed::kWrong);
  }
  if (parsed != Parsed::kWhole) return;
  demand(size <= text.size() && text.compare(size - 4, 4, "\r\n\r\n") == 0);
  demand(head.status >= 100 && head.status <= 999);
  const std::string body = text.substr(size);
  const Decoded whole(head, body, body.size() + 1), pieces(head, body, step);
  demand(whole.wrong == pieces.wrong);
  if (whole.wrong) return;
  demand(whole.complete == pieces.complete && whole.used == pieces.used);
  demand(whole.payload == pieces.payload);
  if (head.delimiter == Delimiter::kLength) demand(whole.payload.size() <= head.length);
}

void check_event(const std::string& text) {
  const size_t end = first_event(copied(text).get(), text.size());
  demand(end <= text.size());
  const size_t before = end == 0 ? text.size() : end - 1;
  demand(first_event(copied(text.substr(0, before)).get(), before) == 0);
  if (end == 0) return;
  demand(first_event(copied(text.substr(0, end)).get(), end) == end);
  demand(text.find("data:") < end);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const std::string text(reinterpret_cast<const char*>(data) + 2, size - 2);
  if (data[1] & 1) {
    check_event(text);
  } else {
    check_answer(text, 1 + data[0]);
  }
  return 0;
}
