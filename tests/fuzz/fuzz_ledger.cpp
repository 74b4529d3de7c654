// Any sequence of operations on two ledgers that share their loads: their invariants hold after every
// one of them, depths are those of a plain search, what one does changes nothing that is the other's,
// and nothing is left in the end.
//
//   clang++ -g -O1 -std=c++17 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all
//       -Ikvd_core tests/fuzz/fuzz_ledger.cpp -o fuzz_ledger
//   ./fuzz_ledger -max_len=2048 -max_total_time=120 CORPUS_FOLDER
//
// The input is read byte by byte: an operation, then what it needs. Prompts are runs of 1 or 1,500
// equal hashes out of four, so that they share, branch, and exceed the longest node.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ledger/ledger.hpp"
#include "ledger/verify.hpp"

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
  explicit Life(Input input) : input_(input), loads_(std::make_shared<Loads>()) {
    for (Side& side : sides_) side.ledger = std::make_unique<Ledger>(small(), loads_);
    start_ = loads_->bytes();
  }

  void run() {
    while (input_.more()) {
      const uint8_t byte = input_.byte();
      side_ = &sides_[byte / kinds % 2];
      step(static_cast<Kind>(byte % kinds));
      Verifier(*loads_).run();
      for (const Side& side : sides_) {
        require(side.ledger->requests().size() == side.live.size());
        for (const auto& [name, held] : side.live) {
          require(side.ledger->requests().find(name) != kNone && side.ledger->has(held.first));
        }
      }
    }
    side_ = &sides_[0];
    while (ledger().requests().oldest() != kNone) drop(ledger().requests().oldest());
    require(ledger().output_count() == 0);
    while (!ledger().order().empty()) ledger().remove_rank(ledger().order().front().rank);
    Verifier(*loads_).run();
    sides_[1].ledger.reset();  // takes with it what it has
    Verifier(*loads_).run();
    require(loads_->trie().node_count() == 0 && loads_->bytes() == start_);
  }

 private:
  struct Side {
    std::unique_ptr<Ledger> ledger;
    std::map<std::string, std::pair<RankId, Prompt>> live;
  };

  Ledger& ledger() { return *side_->ledger; }

  void step(Kind kind) {
    if (kind == ADD) return add();
    if (kind == ASK) return ask();
    if (kind == EXPIRE) return expire();
    if (kind == REMOVE) return remove();
    const RequestId request = ledger().requests().find(id());
    if (request == kNone) return;
    if (kind == FREE) drop(request);
    if (kind == COMPLETE) ledger().complete_prefill(request);
    if (kind == OUTPUT) ledger().add_output(request);
    if (kind == DECAY) ledger().decay(request, kFractions[input_.byte() % 4]);
  }

  std::string id() { return std::string(1, static_cast<char>('a' + input_.byte() % kIds)); }

  RankId rank() { return ledger().add_rank(input_.byte() % kRanks, 0); }

  void add() {
    const std::string name = id(), key(input_.byte() % 2, 'k');
    const RankId to = rank();
    const Prompt prompt = input_.prompt();
    const uint64_t tokens = uint64_t{1} << input_.byte() % 55;
    now_ += input_.byte() % 2;
    const Outcome outcome =
        ledger().add({name, key, to, prompt.data(), prompt.size(), tokens, now_});
    require((outcome == OVERFLOWN) == (tokens > kMaxTokens));
    auto& live = side_->live;
    require((outcome == ADDED) <= (live.count(name) == 0));
    if (outcome == REPEATED) require(live.at(name) == std::make_pair(to, prompt) && !key.empty());
    if (outcome == ADDED) live[name] = {to, prompt};
  }

  void drop(RequestId request) {
    side_->live.erase(std::string(ledger().requests()[request].id()));
    ledger().free(request);
  }

  void expire() {
    const double before = now_ - input_.byte() % 8;
    for (RequestId request; (request = ledger().requests().oldest()) != kNone; drop(request)) {
      if (ledger().requests()[request].admitted >= before) return;
    }
  }

  void remove() {
    const RankId gone = rank();
    while (ledger().chain(gone).first != kNone) drop(ledger().chain(gone).first);
    ledger().remove_rank(gone);
  }

  void ask() {
    const Prompt prompt = input_.prompt();
    const uint32_t* depths = loads_->depths(prompt.data(), prompt.size());
    std::map<RankId, size_t> expected;
    for (const Side& side : sides_) {
      for (const auto& [name, held] : side.live) {
        const size_t most = std::min(prompt.size(), held.second.size());
        size_t depth = 0;
        while (depth < most && prompt[depth] == held.second[depth]) ++depth;
        expected[held.first] = std::max(expected[held.first], depth);
      }
    }
    for (RankId id = 0; id < loads_->rank_end(); ++id) require(depths[id] == expected[id]);
  }

  Input input_;
  std::shared_ptr<Loads> loads_;
  Side sides_[2];
  Side* side_ = sides_;
  size_t start_;
  double now_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Life(Input(data, data + size)).run();
  return 0;
}
