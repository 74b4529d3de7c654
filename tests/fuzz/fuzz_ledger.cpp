// Any sequence of the ledger's operations: its invariants hold after every one of them, depths are
// those of a plain search, rows fit into their room, and nothing is left in the end.
//
//   clang++ -g -O1 -std=c++17 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all
//       -Ikvd_core tests/fuzz/fuzz_ledger.cpp -o fuzz_ledger
//   ./fuzz_ledger -max_len=2048 -max_total_time=120 CORPUS_FOLDER
//
// The input is read byte by byte: an operation, then what it needs. Prompts are runs of 1 or 1,500
// equal hashes out of four, so that they share, part, and exceed the longest node.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ledger.hpp"
#include "ledger_rows.hpp"
#include "ledger_verify.hpp"

namespace {

using namespace kvd::ledger;
using Prompt = std::vector<uint64_t>;

constexpr uint32_t kRanks = 4, kLongRun = 1500, kIds = 16;
constexpr double kFractions[] = {0, 0.1, 0.5, 1};

enum Kind : uint8_t { ADD, FREE, COMPLETE, OUTPUT, DECAY, EXPIRE, REMOVE, ASK, kinds };

void require(bool holds) {
  if (!holds) std::abort();
}

class Input {
 public:
  Input(const uint8_t* at, const uint8_t* end) : at_(at), end_(end) {}

  bool more() const { return at_ != end_; }
  uint8_t byte() { return more() ? *at_++ : 0; }

  Prompt prompt() {
    Prompt hashes;
    for (uint8_t runs = byte() % 8; runs != 0; --runs) {
      const uint8_t run = byte();
      hashes.insert(hashes.end(), (run & 0xf0) == 0xf0 ? kLongRun : 1, run % 4);
    }
    return hashes;
  }

 private:
  const uint8_t *at_, *end_;
};

Limits small() {
  Limits limits;
  limits.requests = 12;
  limits.blocks = 30'000;
  limits.outputs = 5;
  return limits;
}

class Life {
 public:
  explicit Life(Input input) : input_(input), ledger_(small()), start_(ledger_.bytes()) {}

  void run() {
    while (input_.more()) {
      step(static_cast<Kind>(input_.byte() % kinds));
      Verifier(ledger_).run();
    }
    while (ledger_.requests().oldest() != kNone) drop(ledger_.requests().oldest());
    Verifier(ledger_).run();
    require(ledger_.trie().node_count() == 0 && ledger_.output_count() == 0);
    while (!ledger_.order().empty()) ledger_.remove_rank(ledger_.order().front().rank);
    require(ledger_.bytes() == start_);
  }

 private:
  void step(Kind kind) {
    if (kind == ADD) return add();
    if (kind == ASK) return ask();
    if (kind == EXPIRE) return expire();
    if (kind == REMOVE) return remove();
    const RequestId request = ledger_.requests().find(id());
    if (request == kNone) return;
    if (kind == FREE) drop(request);
    if (kind == COMPLETE) ledger_.complete_prefill(request);
    if (kind == OUTPUT) ledger_.add_output(request);
    if (kind == DECAY) ledger_.decay(request, kFractions[input_.byte() % 4]);
  }

  std::string id() { return std::string(1, static_cast<char>('a' + input_.byte() % kIds)); }

  RankId rank() { return ledger_.add_rank(input_.byte() % kRanks, 0); }

  void add() {
    const std::string name = id(), key(input_.byte() % 2, 'k');
    const RankId to = rank();
    const Prompt prompt = input_.prompt();
    const uint64_t tokens = uint64_t{1} << input_.byte() % 55;
    now_ += input_.byte() % 2;
    const Outcome outcome =
        ledger_.add({name, key, to, prompt.data(), prompt.size(), tokens, now_});
    require((outcome == OVERFLOWN) == (tokens > kMaxTokens));
    require((outcome == ADDED) <= (live_.count(name) == 0));
    if (outcome == REPEATED) require(live_.at(name) == std::make_pair(to, prompt) && !key.empty());
    if (outcome == ADDED) live_[name] = {to, prompt};
  }

  void drop(RequestId request) {
    live_.erase(std::string(ledger_.requests()[request].id()));
    ledger_.free(request);
  }

  void expire() {
    const double before = now_ - input_.byte() % 8;
    for (RequestId request; (request = ledger_.requests().oldest()) != kNone; drop(request)) {
      if (ledger_.requests()[request].admitted >= before) return;
    }
  }

  void remove() {
    const RankId gone = rank();
    while (ledger_.rank(gone).chain.first != kNone) drop(ledger_.rank(gone).chain.first);
    ledger_.remove_rank(gone);
  }

  void ask() {
    const Prompt prompt = input_.prompt();
    const uint32_t* depths = ledger_.depths(prompt.data(), prompt.size());
    std::map<RankId, size_t> expected;
    for (const auto& [name, held] : live_) {
      const size_t most = std::min(prompt.size(), held.second.size());
      size_t depth = 0;
      while (depth < most && prompt[depth] == held.second[depth]) ++depth;
      expected[held.first] = std::max(expected[held.first], depth);
    }
    for (RankId id = 0; id < ledger_.rank_end(); ++id) require(depths[id] == expected[id]);
    const Rows rows(ledger_);
    const std::unique_ptr<char[]> room(new char[rows.room(3)]);
    rows.loads(room.get(), "\"\":");
    rows.projection(room.get(), depths, prompt.size(), kMaxTokens);
  }

  Input input_;
  Ledger ledger_;
  size_t start_;
  double now_ = 0;
  std::map<std::string, std::pair<RankId, Prompt>> live_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Life(Input(data, data + size)).run();
  return 0;
}
