// Any sequence of batches, sweeps, removals and questions for an index: its invariants hold after
// each step, and once all ranks are removed and swept, nothing is left.
//
//   clang++ -g -O1 -std=c++17 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all
//       -Ikvd_core tests/fuzz/fuzz_index.cpp -o fuzz_index
//   ./fuzz_index -max_len=8192 -max_total_time=120 CORPUS_FOLDER
//
// The input: a byte for the block size and the budget, then steps of [kind u8][length u16
// LE][length bytes].

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "index/answer.hpp"
#include "dump/dump.hpp"
#include "index/index.hpp"
#include "index/match.hpp"
#include "index/stream.hpp"
#include "index/verify.hpp"
#include "index/worker.hpp"

namespace {

constexpr uint32_t kBlockSizes[] = {1, 4, 16, 64};
constexpr uint64_t kBudgets[] = {UINT64_MAX, 3, 16, 100};
constexpr size_t kWorkers = 2, kStreams = 4;  // two ranks of each worker
constexpr double kTtl = 5;                    // calls of `book`
constexpr uint32_t kPredicted = 32;           // entries
constexpr uint32_t kSlice = 3;                // blocks swept, and bytes dumped, at a time

enum Kind : uint8_t { SWEEP = kStreams, RETIRE, ASK, DUMP, BOOK, kinds };

void require(bool holds) {
  if (!holds) std::abort();
}

class Life {
 public:
  Life(uint32_t block_size, uint64_t budget)
      : budget_(std::make_shared<kvd::Budget>()),
        index_(block_size, kvd::Tree::kMaxBlocks, budget_) {
    budget_->max = budget;
    index_.predict(kTtl, kPredicted, kPredicted / 2);
    for (size_t i = 0; i < kWorkers; ++i) {
      workers_[i].key = '"' + std::to_string(i) + '"';
      workers_[i].number = std::to_string(i);
    }
    for (size_t i = 0; i < kStreams; ++i) {
      streams_.emplace_back(
          new kvd::Stream(index_, workers_[i % kWorkers], i / kWorkers, counters_));
    }
  }

  void step(uint8_t kind, const uint8_t* data, size_t size) {
    if (kind < kStreams) batch(*streams_[kind], data, size);
    if (kind == SWEEP) index_.sweep(kSlice);
    if (kind == RETIRE) workers_[size % kWorkers].retire_all(index_);
    if (kind == ASK) ask(data, size / sizeof(uint64_t));
    if (kind == DUMP) dump();
    if (kind == BOOK) book(data, size / sizeof(uint64_t));
    kvd::Verifier(index_).run();
  }

  // Applies a batch in slices of one step, or in one slice.
  void batch(kvd::Stream& stream, const uint8_t* data, size_t size) {
    const uint32_t steps = size % 2 == 0 ? 1 : 1000;
    uint32_t shown = stream.apply(data, size, steps);
    while (shown == kvd::kUnfinished) {
      kvd::Verifier(index_).run();
      shown = stream.advance(steps);
    }
  }

  void end() {
    for (kvd::Worker& worker : workers_) worker.retire_all(index_);
    while (index_.sweep(kSlice)) kvd::Verifier(index_).run();
    while (index_.predicted()->prune(now_ + kTtl, kSlice)) kvd::Verifier(index_).run();
    require(index_.predicted()->size() == 0);
    kvd::Verifier(index_).run();
    require(index_.tree().block_count() == 0 && index_.parked_count() == 0);
    require(budget_->blocks == 0 && budget_->names == 0);
  }

 private:
  void ask(const uint8_t* data, size_t count) {
    std::vector<uint64_t> locals(count);
    if (count != 0) std::memcpy(locals.data(), data, count * sizeof(uint64_t));
    match_.reset(index_);
    match_.add(index_, locals.data(), count, kvd::Match::SaltFilter::kAll);
    std::string memory;
    const auto text = kvd::Answer(index_, match_).render({&workers_[0], &workers_[1]}, memory);
    require(text.front() == '{' && text.back() == '}');
  }

  // Predicts a prompt on one of the registered ranks, and lets some time pass.
  void book(const uint8_t* data, size_t count) {
    std::vector<uint64_t> locals(count);
    if (count != 0) std::memcpy(locals.data(), data, count * sizeof(uint64_t));
    const kvd::RankId rank = workers_[count % kWorkers].rank(index_, count / kWorkers % 2);
    index_.predicted()->add(rank, locals.data(), count, 0, now_++);
    std::vector<uint64_t> chained;
    index_.predicted()->chain(locals.data(), count, chained);
    const size_t most = count < kPredicted / 2 ? count : kPredicted / 2;
    require(index_.predicted()->reach(rank, chained, 0) >= most);
  }

  // Goes on with the dump in progress, or begins one.
  void dump() {
    if (dump_ == nullptr) dump_.reset(new kvd::Dump(index_, true));
    std::string text;
    if (!dump_->fill(owners(), text, kSlice)) dump_.reset();
  }

  std::vector<const std::string*> owners() const {
    std::vector<const std::string*> owners(index_.rank_end(), nullptr);
    for (const kvd::Worker& worker : workers_) {
      for (const auto& entry : worker.ranks) owners[entry.second] = &worker.number;
    }
    return owners;
  }

  std::shared_ptr<kvd::Budget> budget_;
  kvd::Index index_;
  kvd::IngestStats counters_;
  kvd::Worker workers_[kWorkers];
  kvd::Match match_;
  std::vector<std::unique_ptr<kvd::Stream>> streams_;
  std::unique_ptr<kvd::Dump> dump_;
  double now_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  Life life(kBlockSizes[*data % 4], kBudgets[*data / 4 % 4]);
  const uint8_t *at = data + 1, *end = data + size;
  while (end - at >= 3) {
    const uint8_t kind = at[0] % kinds;
    const size_t wanted = at[1] | at[2] << 8, left = static_cast<size_t>(end - at) - 3;
    const size_t length = wanted < left ? wanted : left;
    // A copy of exactly this size: the sanitizer sees a read of one byte too far.
    const std::unique_ptr<uint8_t[]> copy(new uint8_t[length]);
    std::memcpy(copy.get(), at + 3, length);
    life.step(kind, copy.get(), length);
    at += 3 + length;
  }
  life.end();
  return 0;
}
