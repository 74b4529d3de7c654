// Any bytes into the batch decoder: it does not crash, it reads nothing outside the payload, and
// what it passes to a sink keeps the promises of events.hpp.
//
//   clang++ -g -O1 -std=c++17 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all
//       -Ikvd_core tests/fuzz/fuzz_decoder.cpp -o fuzz_decoder
//   ./fuzz_decoder -max_total_time=120 CORPUS_FOLDER
//
// tests/fuzz/corpus.py writes a corpus that starts from real batches.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "events/events.hpp"
#include "events/split.hpp"

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

// Reads everything it is passed and checks what events.hpp promises about it.
class StrictSink {
 public:
  uint32_t kept = 0;  // events
  uint32_t refused = 0;
  uint32_t broken = 0;  // refusals of the batch, not of an event
  bool begun = false;
  uint64_t digest = 0;

  void begin(bool has_rank, uint32_t rank) {
    require(!begun && kept == 0 && refused + broken == 0);
    require(has_rank ? rank <= INT32_MAX : rank == 0);
    begun = true;
    note(rank);
  }

  void stored(const kvd::StoredEvent& e) {
    take_event();
    take_hashes(e.hashes, e.n_hashes);
    for (uint32_t i = 0; i < e.n_tokens; ++i) note(e.tokens[i]);
    require(!e.pairs || e.n_tokens >= 2);
    require(e.group >= -1 && e.window >= 0);
    take_text(e.lora_name);
    take_text(e.salt);
    if (e.mm_begin != nullptr) take_objects(e);
  }

  void removed(const kvd::RemovedEvent& e) {
    take_event();
    take_hashes(e.hashes, e.n_hashes);
    require(e.group >= -1);
  }

  void cleared(const kvd::ClearedEvent& e) {
    take_event();
    note(static_cast<uint64_t>(e.tier) << 1 | e.has_tier);
  }

  void bad(kvd::Reason reason) {
    const bool of_event = reason >= kvd::Reason::EVENT_SHAPE;
    ++(of_event ? refused : broken);
    require(static_cast<size_t>(reason) < kvd::kReasons);
    note(static_cast<uint64_t>(reason));
  }

 private:
  void take_event() {
    require(begun && refused + broken == 0);
    ++kept;
  }

  void take_hashes(const uint64_t* hashes, uint32_t count) {
    for (uint32_t i = 0; i < count; ++i) note(hashes[i]);
  }

  void take_text(std::string_view text) { note(kvd::xxh3(text.data(), text.size(), 0)); }

  void take_objects(const kvd::StoredEvent& e) {
    require(e.mm_begin[e.n_hashes] > e.mm_begin[0]);
    for (uint32_t i = 0; i < e.n_hashes; ++i) {
      require(e.mm_begin[i] <= e.mm_begin[i + 1]);
      require(std::is_sorted(e.mm + e.mm_begin[i], e.mm + e.mm_begin[i + 1]));
      take_hashes(e.mm + e.mm_begin[i], e.mm_begin[i + 1] - e.mm_begin[i]);
    }
  }

  void note(uint64_t value) { digest = digest * 31 + value; }
};

StrictSink decode(const uint8_t* payload, size_t size, kvd::Scratch& scratch) {
  StrictSink sink;
  const kvd::BatchResult result = kvd::decode_batch(payload, size, scratch, sink);
  require(result.bad == sink.refused + sink.broken);
  require(sink.broken <= 1);
  require(sink.begun || (sink.kept == 0 && sink.broken == 1 && result.events == 0));
  require(result.events == sink.kept + sink.refused + result.ignored);
  return sink;
}

// Checks that a payload splits into whole events, one behind the other, and at most kMost of them.
void take_apart(const uint8_t* payload, size_t size) {
  constexpr size_t kMost = 5;
  kvd::Split split;
  split.read(payload, size, kMost);
  if (split.fault != nullptr) return;
  require(split.events.size() <= kMost && (split.beyond == 0 || split.events.size() == kMost));
  size_t at = 0;
  for (const kvd::Split::Event& event : split.events) {
    require(at <= event.from && event.from < event.to && event.to <= size);
    at = event.to;
    kvd::Cursor in(payload + event.from, payload + event.to);
    in.skip();
    require(!in.broken() && in.left() == 0);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static kvd::Scratch used;  // what earlier payloads left in it must not matter
  kvd::Scratch fresh;
  // A copy of exactly this size: the sanitizer sees a read of one byte too far.
  const std::unique_ptr<uint8_t[]> payload(new uint8_t[size]);
  std::copy_n(data, size, payload.get());
  const StrictSink first = decode(payload.get(), size, fresh);
  require(decode(payload.get(), size, used).digest == first.digest);
  take_apart(payload.get(), size);

  const size_t half = size / 2;
  const std::unique_ptr<uint8_t[]> cut(new uint8_t[half]);
  std::copy_n(data, half, cut.get());
  require(decode(cut.get(), half, used).kept <= first.kept || !first.begun);
  return 0;
}
