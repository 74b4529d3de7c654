// Any sequence of publishers' events, registrations, links to a worker, sweeps, questions, and
// slices of the state kept for another process: all invariants hold after each step, also in the
// process that restores that state; once all holders are gone and swept, nothing is left.
//
//   clang++ -g -O1 -std=c++17 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all
//       -Ikvd_core tests/fuzz/fuzz_conductor.cpp -o fuzz_conductor
//   ./fuzz_conductor -max_len=4096 -max_total_time=120 CORPUS_FOLDER
//
// The input: steps of one byte and their arguments. Hashes and tokens come from a few values, so
// that names collide, and from the standard, so that sequence hashes do.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "index/answer.hpp"
#include "conductor/conductor.hpp"
#include "conductor/engine_events.hpp"
#include "base/hash.hpp"
#include "conductor/holdings.hpp"
#include "conductor/kept_holdings.hpp"
#include "dump/binary.hpp"
#include "index/match.hpp"
#include "index/verify.hpp"

namespace {

constexpr uint32_t kBlockSize = 2;
constexpr size_t kSources = 4, kMaxBlocks = 6;
constexpr kvd::LayerId kLayers[] = {0, 1, 2, 5};

void require(bool holds) {
  if (!holds) std::abort();
}

class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}
  bool left() const { return at_ != end_; }
  uint8_t next() { return left() ? *at_++ : 0; }
  uint8_t below(uint8_t bound) { return static_cast<uint8_t>(next() % bound); }
  const uint8_t* rest(size_t* size) {
    *size = std::min<size_t>(*size, static_cast<size_t>(end_ - at_));
    const uint8_t* from = at_;
    at_ += *size;
    return from;
  }

 private:
  const uint8_t* at_;
  const uint8_t* end_;
};

class Life {
 public:
  Life(uint64_t seed, Bytes& in) : index_(kBlockSize), conductor_(index_, seed) {
    worker_.key = "\"7\"";
    worker_.number = "7";
    other_.key = "\"8\"";
    other_.number = "8";
    begin(in);
    for (size_t i = 0; i < kSources; ++i) enter(i, static_cast<uint8_t>(i));
    require(conductor_.medium("CXL", "\"CXL\"") == 5);
  }

  void step(Bytes& in) {
    const size_t i = in.below(kSources);
    switch (in.below(14)) {
      case 0:
      case 1:
      case 2:
        store(in, i);
        break;
      case 3:
      case 4:
        named(in, i);
        break;
      case 5:
        remove(in, i);
        break;
      case 6:
        clear(in, i);
        break;
      case 7:
        again(in, i);
        break;
      case 8:
        batch(in, i);
        break;
      case 9:
        store_or_remove(in);
        break;
      case 10:
        grouped(in, i);
        break;
      case 11:
        conductor_.drop_idle(sources_[i]);
        break;
      case 12:
        keep(in);
        break;
      default:
        index_.sweep(in.next());
        break;
    }
    ask(in);
    kvd::Verifier verifier(index_);
    verifier.run();
    verifier.run(conductor_);
  }

  void end() {
    kept_.reset();
    for (size_t i = 0; i < kSources; ++i) leave(i);
    worker_.retire_all(index_);
    other_.retire_all(index_);
    while (index_.sweep(100)) {}
    kvd::Verifier(index_).run();
    require(index_.tree().block_count() == 0 && index_.parked_count() == 0);
    require(index_.sequences()->size() == 0 && conductor_.instances().empty());
  }

 private:
  struct Prompt {
    std::vector<uint32_t> tokens;
    std::vector<uint64_t> plain, sequences;
  };

  // Workers hold blocks before the first question by sequence hashes, and store and lose blocks
  // while the sequence hashes are being computed.
  void begin(Bytes& in) {
    for (uint8_t left = in.below(8); left != 0; --left) store_or_remove(in);
    for (uint8_t left = in.below(32); left != 0; --left) {
      conductor_.sequence(in.below(4));
      store_or_remove(in);
      kvd::Verifier(index_).run();
    }
  }

  // Has a worker store a prompt's blocks or lose them.
  void store_or_remove(Bytes& in) {
    const Prompt of = prompt(in);
    std::vector<uint64_t> names, locals(of.plain.size());
    kvd::local_hashes(of.tokens.data(), locals.size(), kBlockSize, kvd::kBaseSeed, locals.data());
    for (size_t k = 0; k < of.plain.size(); ++k) names.push_back(5000 + of.sequences[k] % 100000);
    const kvd::RankId id = other_.rank(index_, 0);
    if (in.below(3) != 0) {
      kvd::Store run{
          names.data(), locals.data(), static_cast<uint32_t>(names.size()), false, 0, 0, 0};
      if (conductor_.seed() != kvd::kBaseSeed) run.plain = of.plain.data();
      index_.store(id, run);
    } else {
      for (const uint64_t name : names) index_.remove(id, name, 0);
    }
  }

  // Returns a prompt of few tokens, with its hashes by the seed of sequence hashes.
  Prompt prompt(Bytes& in) {
    Prompt made;
    const size_t n = 1 + in.below(kMaxBlocks);
    for (size_t i = 0; i < n * kBlockSize; ++i) made.tokens.push_back(in.below(2));
    made.plain.resize(n);
    const uint64_t seed = conductor_.seed();
    const kvd::Sequences hashes(seed);
    kvd::local_hashes(made.tokens.data(), n, kBlockSize, seed, made.plain.data());
    for (size_t i = 0; i < n; ++i) {
      made.sequences.push_back(i == 0 ? made.plain[0]
                                      : hashes.next(made.sequences[i - 1], made.plain[i]));
    }
    return made;
  }

  uint64_t hash(Bytes& in, const Prompt& of, size_t i) {
    const uint8_t how = in.next();
    return how % 3 == 0   ? of.sequences[i]
           : how % 3 == 1 ? 100 + how % 40
                          : 1000 + of.sequences[i] % 1000;
  }

  uint64_t space(Bytes& in) {
    static constexpr uint64_t kSpaces[] = {0, 0, 0, 77};
    return kSpaces[in.below(4)];
  }

  kvd::RankId holder(Bytes& in, size_t i) {
    const uint8_t who = in.next();
    return conductor_.holder(sources_[i], who & 1, (who & 2) != 0, who >> 2 & 1);
  }

  void store(Bytes& in, size_t i) {
    const Prompt of = prompt(in);
    const size_t from = in.below(static_cast<uint8_t>(of.plain.size()));
    std::vector<uint64_t> hashes;
    for (size_t k = from; k < of.plain.size(); ++k) hashes.push_back(hash(in, of, k));
    kvd::StoredBlocks blocks{};
    blocks.hashes = hashes.data();
    blocks.n = static_cast<uint32_t>(hashes.size());
    blocks.has_parent = from != 0;
    if (from != 0) blocks.parent = hash(in, of, from - 1);
    blocks.tokens = of.tokens.data() + from * kBlockSize;
    blocks.layer = kLayers[in.below(4)];
    blocks.space = space(in);
    blocks.inherits = in.below(2) != 0;
    blocks.by_engine = in.below(2) != 0;
    conductor_.store(sources_[i], holder(in, i), blocks);
    settle(in);
  }

  // Does the work that the step has caused, at once or in slices, or leaves it to later steps.
  void settle(Bytes& in) {
    for (uint8_t slices = in.below(4); slices != 0; --slices) {
      kvd::Steps steps(slices == 3 ? INT64_MAX : 1);
      conductor_.resolve_waiting(steps);
    }
  }

  void named(Bytes& in, size_t i) {
    const Prompt of = prompt(in);
    std::vector<uint64_t> hashes;
    for (size_t k = 0; k < of.plain.size(); ++k) hashes.push_back(hash(in, of, k));
    const kvd::LayerId layer = kLayers[in.below(4)];
    const kvd::RankId id = holder(in, i);
    kvd::Steps steps(INT64_MAX);
    conductor_.store_named(sources_[i], id, hashes.data(), 0, static_cast<uint32_t>(hashes.size()),
                           layer, space(in), in.below(2) != 0, in.below(2) != 0, steps);
    settle(in);
  }

  void remove(Bytes& in, size_t i) {
    const Prompt of = prompt(in);
    const kvd::LayerMask mask = in.below(2) != 0 ? kvd::kAllLayers : 1u << kLayers[in.below(4)];
    const kvd::RankId id = holder(in, i);
    for (size_t k = 0; k < of.plain.size(); ++k) {
      conductor_.remove(sources_[i], id, hash(in, of, k), mask, space(in), in.below(2) != 0);
    }
  }

  void clear(Bytes& in, size_t i) {
    const kvd::LayerMask mask = in.below(2) != 0 ? kvd::kAllLayers : 1u << kLayers[in.below(4)];
    const kvd::RankId id = holder(in, i);
    conductor_.clear(sources_[i], id, mask, space(in), in.below(2) != 0);
  }

  // Ends a registration and makes another one in its place, linked to the worker or not.
  void again(Bytes& in, size_t i) {
    leave(i);
    if (in.below(4) == 0) worker_.retire_all(index_);
    enter(i, in.next());
  }

  void enter(size_t i, uint8_t how) {
    const bool serves_all = (how & 40) == 40;
    const std::string key = serves_all ? "\"*\"" : (how & 1) != 0 ? "\"7\"" : "\"a\"";
    sources_[i] =
        conductor_.add_source(key, (how & 2) != 0 ? 77 : 0, 0, how >> 2 & 1, (how & 8) != 0);
    kvd::Instance* instance = conductor_.find("\"7\"");
    if (instance != nullptr) conductor_.link(instance, (how & 16) != 0 ? nullptr : &worker_);
    engines_[i] = std::make_unique<kvd::EngineEvents>(conductor_, sources_[i], "", "");
  }

  void leave(size_t i) {
    conductor_.remove_source(sources_[i]);
    if (kvd::Instance* instance = conductor_.find("\"7\""))
      conductor_.link(instance, instance->worker);
  }

  void batch(Bytes& in, size_t i) {
    using Progress = kvd::EngineEvents::Progress;
    const uint32_t steps = in.below(4) == 0 ? 1 : 1000;
    size_t size = in.next();
    const uint8_t* data = in.rest(&size);
    if (engines_[i]->apply(data, size, steps) != Progress::UNFINISHED) return;
    while (engines_[i]->advance(steps) == Progress::UNFINISHED) {}
  }

  // Applies an engine's own event, about one of its cache groups or all.
  void grouped(Bytes& in, size_t i) {
    static constexpr kvd::GroupKind kKinds[] = {kvd::GroupKind::NONE, kvd::GroupKind::FULL,
                                                kvd::GroupKind::WINDOW};
    const Prompt of = prompt(in);
    const size_t from = in.below(static_cast<uint8_t>(of.plain.size()));
    std::vector<uint64_t> hashes;
    for (size_t k = from; k < of.plain.size(); ++k) hashes.push_back(1000 + of.sequences[k] % 1000);
    const uint8_t how = in.next();
    const int32_t group = static_cast<int32_t>(how % 4) - 1;
    const kvd::GroupKind kind = kKinds[in.below(3)];
    const std::string_view medium = (how & 16) != 0 ? "CPU" : "";
    const auto n = static_cast<uint32_t>(hashes.size());
    kvd::Steps steps(INT64_MAX);
    engines_[i]->begin((how & 32) != 0, how >> 6 & 1);
    if ((how & 4) == 0) {
      kvd::StoredEvent e{};
      e.hashes = hashes.data();
      e.n_hashes = n;
      e.has_parent = from != 0;
      if (from != 0) e.parent = 1000 + of.sequences[from - 1] % 1000;
      e.tokens = of.tokens.data() + from * kBlockSize;
      e.n_tokens = (how & 8) != 0 ? 0 : n * kBlockSize;
      e.kind = kind;
      e.group = group;
      e.window = in.below(8);
      e.medium = medium;
      for (uint32_t at = 0; at < n;) at = engines_[i]->stored(e, at, steps);
    } else if ((how & 8) == 0) {
      kvd::RemovedEvent e{};
      e.hashes = hashes.data();
      e.n_hashes = n;
      e.kind = kind;
      e.group = group;
      e.medium = medium;
      engines_[i]->removed(e, 0, steps);
    } else if ((how & 128) != 0) {
      engines_[i]->forget();
    } else {
      engines_[i]->cleared({kvd::Tier::DEVICE, (how & 64) != 0, medium}, steps);
    }
    settle(in);
  }

  // Writes a slice of the state for another process, or begins anew; once all of it is written,
  // another process restores it.
  void keep(Bytes& in) {
    if (kept_ == nullptr) {
      kept_ = std::make_unique<kvd::KeptHoldings>(index_, conductor_);
      kept_text_ = std::string(kvd::DumpBinary::kMagic) + 'P' + '\2' + std::string(11, '\0');
    }
    const size_t enough = 1 + in.next();
    std::string piece;
    const bool more = kept_->fill({sources_, sources_ + kSources}, piece, enough);
    kept_text_ += piece;
    if (more) return;
    kept_text_ += 'E';
    kvd::put<uint64_t>(kept_text_, kept_->blocks_written());
    kept_.reset();
    bring_back(enough);
  }

  void bring_back(size_t at_once) {
    kvd::Stage stage({UINT64_MAX, UINT64_MAX, 1, UINT64_MAX}, true);
    kvd::DumpBinary reader(stage);
    reader.feed(reinterpret_cast<const uint8_t*>(kept_text_.data()), kept_text_.size());
    reader.finish();
    kvd::Index index(kBlockSize);
    kvd::Conductor conductor(index, conductor_.seed());
    std::vector<kvd::Source*> sources;
    for (const kvd::Source* source : sources_) {
      sources.push_back(conductor.add_source(source->instance->key, source->home, source->adapter,
                                             source->dp_rank, source->store));
    }
    kvd::RestoreHoldings restore(index, conductor, stage, stage.entries().front());
    for (bool more = true; more;) {
      kvd::Steps steps(static_cast<int64_t>(at_once));
      more = restore.apply(sources, steps);
      kvd::Verifier verifier(index);
      verifier.run();
      verifier.run(conductor);
    }
  }

  void ask(Bytes& in) {
    const Prompt of = prompt(in);
    const uint64_t where = space(in);
    const std::vector<const kvd::Worker*> workers{&worker_, &other_};
    holdings_.by_token_ids(conductor_, of.tokens.data(), of.tokens.size(), where);
    holdings_.render(conductor_, workers, "\"\"", "", by_tokens_);
    while (!conductor_.sequence(1000)) {}
    holdings_.by_sequences(conductor_, of.sequences.data(), of.sequences.size(), where);
    holdings_.render(conductor_, workers, "\"\"", "", by_hashes_);
    match_.reset(index_);
    match_.add(index_, of.plain.data(), of.plain.size(), kvd::Match::SaltFilter::kAll);
    kvd::Answer(index_, match_).render(workers, answer_);
  }

  kvd::Index index_;
  kvd::Conductor conductor_;
  kvd::Worker worker_;
  kvd::Worker other_;  // never linked
  kvd::Source* sources_[kSources];
  std::unique_ptr<kvd::EngineEvents> engines_[kSources];
  kvd::Holdings holdings_;
  kvd::Match match_;
  std::unique_ptr<kvd::KeptHoldings> kept_;  // being written
  std::string kept_text_;
  std::string by_tokens_, by_hashes_, answer_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Bytes in(data, size);
  Life life(in.below(2) == 0 ? kvd::kBaseSeed : 42, in);
  while (in.left()) life.step(in);
  life.end();
  return 0;
}
