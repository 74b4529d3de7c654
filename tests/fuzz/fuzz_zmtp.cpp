// libFuzzer over kvd's own ZMTP: it reads nothing outside its input, input in pieces of any size
// gives the same messages as in one piece, and the bytes to be sent stay few.
//
//   byte 0: size of the pieces; byte 1: 0 if the rest begins with the greeting, else it follows the
//   handshake

#include <cstdlib>
#include <memory>
#include <string>

#include "zmq/zmtp.hpp"

using kvd::ZmtpSubscriber;

namespace {

void demand(bool condition) {
  if (!condition) std::abort();
}

const std::string& handshake() {
  static const std::string text = [] {
    std::string greeting(64, '\0');
    greeting[0] = '\xff', greeting[9] = '\x7f', greeting[10] = 3, greeting[11] = 1;
    greeting.replace(12, 4, "NULL");
    return greeting + std::string("\4\x19\5READY\x0bSocket-Type\0\0\0\3PUB", 27);
  }();
  return text;
}

struct Heard {
  std::string messages;
  std::string fault;

  Heard(const std::string& text, size_t step) {
    constexpr size_t kLimit = 1000, kMostUnsent = 4096;
    ZmtpSubscriber speech(kLimit, {"", "kv"});
    std::string kept;
    for (size_t at = 0; at < text.size() && fault.empty(); at += step) {
      kept += text.substr(at, step);
      // Exactly as long as the text, so that the sanitizer sees a read beyond it.
      std::unique_ptr<uint8_t[]> view(new uint8_t[kept.size()]);
      memcpy(view.get(), kept.data(), kept.size());
      for (;;) {
        const auto got = speech.next(view.get(), kept.size());
        demand(speech.unused_from() <= kept.size());
        demand(speech.unsent().size() <= kMostUnsent);
        speech.unsent().clear();
        if (got == ZmtpSubscriber::Step::more) break;
        if (got == ZmtpSubscriber::Step::broken) {
          demand(speech.fault() != nullptr && !speech.joined());
          fault = speech.fault();
          break;
        }
        if (got == ZmtpSubscriber::Step::joined) {
          demand(speech.joined());
          continue;
        }
        messages += '[';
        speech.each_frame(view.get(), [&](const uint8_t* data, size_t size) {
          demand(size <= kLimit);
          messages.append(reinterpret_cast<const char*>(data), size) += '|';
        });
        messages += ']';
      }
      kept.erase(0, speech.unused_from());
      speech.moved();
    }
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const std::string rest(reinterpret_cast<const char*>(data) + 2, size - 2);
  const std::string text = data[1] ? handshake() + rest : rest;
  const Heard whole(text, text.size() + 1), pieces(text, 1 + data[0]);
  demand(whole.messages == pieces.messages);
  demand(whole.fault == pieces.fault);
  return 0;
}
