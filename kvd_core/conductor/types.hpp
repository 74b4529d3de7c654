// What a conductor is made of: its bounds, who has registered and holds blocks, an event
// understood.
//
//   instance "a"   sources   vLLM, rank 0 ── holders   ("", rank 0) id 5
//                            Mooncake     ── holders   ("pool-a", no rank) id 6
//                                                      ("pool-b", rank 1) id 9
//                  rows      0: [ 5 ]   1: [ 9 ]       ids by data-parallel rank
//                  shared    [ 6 ]                     who holds blocks for all of them
//
// Invariants (conductor/sources.hpp keeps them)
//   1. holders of a source ascend by backend, those without a rank first, then by rank;
//   2. `rows` has every rank that is registered or has a holder, once and ascending; `rows` and
//      `shared` together have every holder of the instance, once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "index/index.hpp"
#include "index/worker.hpp"

namespace kvd {

// Blocks of a partition announced without tokens or parent, once it has publishers of the standard:
// a store alone, without its engines, announces nothing else. Some 300 MB. More are refused.
constexpr size_t kMaxWaiting = size_t{1} << 20;
// Backends and ranks of one source; those that hold nothing are forgotten when there are more. The
// bound keeps a mad publisher from making one a number.
constexpr size_t kMaxHolders = 4096;
// Steps of making sequence hashes at the first source, two a block: 1 to 1.5 ms.
constexpr uint32_t kSequencedAtOnce = 8192;
// Blocks that a question gives their places, and steps of what that sets off: 0.2 ms. The next
// question goes on.
constexpr uint32_t kExplainedAtOnce = 256;
constexpr uint32_t kStepsExplained = 1024;
// Steps of a slice (base/steps.hpp), of 0.1 us.
constexpr size_t kStepsACredit = 20;  // a hash without tokens
constexpr size_t kStepsAWaiter = 20;  // at something that waits

// The instance id, as a JSON member name, of stores that serve every instance and have no row.
constexpr std::string_view kCommonKey = "\"*\"";

struct Holder {
  uint32_t backend;
  bool ranked;
  uint32_t dp_rank;  // 0 without one
  RankId id;
  uint64_t space = 0;    // the namespace of its blocks
  bool used = false;     // it has had any
  bool several = false;  // in more than one namespace

  std::pair<uint64_t, uint32_t> order() const { return {uint64_t{backend} << 1 | ranked, dp_rank}; }

  void note(uint64_t in) {
    several = several || (used && space != in);
    space = in;
    used = true;
  }
};

struct Medium {
  std::string name;  // upper case
  std::string key;   // as a JSON member name, quotes included
};

struct Instance;

struct Source {
  Instance* instance;
  // Of questions, to find out why none finds what it holds.
  uint64_t matched;       // that have found their first block with it
  uint64_t last_matched;  // `Instance::asked` at the last of them
  uint64_t asked_before;  // `Instance::asked` as it came
  uint64_t home;          // namespace of the registration
  uint64_t adapter;       // the same without its salt
  uint32_t dp_rank;       // registered
  bool store;
  std::vector<Holder> holders;  // by `order`
};

struct Instance {
  // A data-parallel rank, and who holds blocks for it.
  struct InstanceRank {
    uint32_t dp_rank;
    std::vector<RankId> ids;
  };

  std::string key;  // its id as a JSON member name, quotes included
  std::vector<Source*> sources;
  Worker* worker = nullptr;        // of the same id, if there can be one
  std::vector<InstanceRank> rows;  // ascending by rank
  std::vector<RankId> shared;      // who holds blocks for all of them
  uint64_t asked = 0;              // questions about a block or more that have shown it
};

// A stored event, understood.
struct StoredBlocks {
  const uint64_t* hashes;
  uint32_t n;
  bool has_parent;
  uint64_t parent;
  const uint32_t* tokens;
  LayerId layer;
  uint64_t space;
  bool inherits;   // the parent's namespace goes before `space`
  bool by_engine;  // no standard event: hashes mean what they mean to the engine, in any namespace
  const uint32_t* mm_begin;  // n + 1 offsets into mm; nullptr without objects
  const uint64_t* mm;
};

}  // namespace kvd
