// The parts of a conductor: its bounds, registrations and holders, and an event that has been
// understood.
//
//   instance "a"   sources   vLLM, rank 0 ── holders   ("", rank 0) id 5
//                            Mooncake     ── holders   ("pool-a", no rank) id 6
//                                                      ("pool-b", rank 1) id 9
//                  rows      0: [ 5 ]   1: [ 9 ]       ids by data-parallel rank
//                  shared    [ 6 ]                     holders without a rank, for all ranks
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

// Waiting blocks of a partition that has publishers of the standard: blocks announced without
// tokens or parent. A store whose engines do not publish announces all of its blocks so. Some
// 300 MB. More are refused.
constexpr size_t kMaxWaiting = size_t{1} << 20;
// Backends and ranks of one source. When there are more, those that hold nothing are forgotten. The
// bound keeps a mad publisher from making a holder of every number.
constexpr size_t kMaxHolders = 4096;
// Steps of making sequence hashes when the first source comes, two a block: 1 to 1.5 ms.
constexpr uint32_t kSequencedAtOnce = 8192;
// Blocks that a query places, and the steps for what that sets off: 0.2 ms. The next query
// continues.
constexpr uint32_t kExplainedAtOnce = 256;
constexpr uint32_t kStepsExplained = 1024;
// Steps of a slice (base/steps.hpp), of 0.1 us.
constexpr size_t kStepsACredit = 20;  // a hash without tokens
constexpr size_t kStepsAWaiter = 20;  // a waiting block that is tried

// The instance id, as a JSON member name, of the stores that serve every instance. It has no row.
constexpr std::string_view kCommonKey = "\"*\"";

struct Holder {
  uint32_t backend;
  bool ranked;
  uint32_t dp_rank;  // 0 without a rank
  RankId id;
  uint64_t space = 0;    // the namespace of its latest blocks
  bool used = false;     // it has had blocks
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
  // Counts of queries, to find out why none finds the source's blocks.
  uint64_t matched;       // queries whose first block it held
  uint64_t last_matched;  // `Instance::asked` at the last of these
  uint64_t asked_before;  // `Instance::asked` when the source came
  uint64_t home;          // the namespace of the registration
  uint64_t adapter;       // the same without the salt
  uint32_t dp_rank;       // as registered
  bool store;
  std::vector<Holder> holders;  // by `order`
};

struct Instance {
  // A data-parallel rank, and the holders that hold blocks for it.
  struct InstanceRank {
    uint32_t dp_rank;
    std::vector<RankId> ids;
  };

  std::string key;  // its id as a JSON member name, quotes included
  std::vector<Source*> sources;
  Worker* worker = nullptr;        // the worker with the same id, if there can be one
  std::vector<InstanceRank> rows;  // ascending by rank
  std::vector<RankId> shared;      // holders without a rank, which hold blocks for all rows
  uint64_t asked = 0;              // queries of a block or more that have shown it
};

// A stored event that has been understood.
struct StoredBlocks {
  const uint64_t* hashes;
  uint32_t n;
  bool has_parent;
  uint64_t parent;
  const uint32_t* tokens;
  LayerId layer;
  uint64_t space;
  bool inherits;             // a known parent's namespace takes precedence over `space`
  bool by_engine;            // an engine's own event: its hashes mean the same in every namespace
  const uint32_t* mm_begin;  // n + 1 offsets into mm; nullptr without objects
  const uint64_t* mm;
};

}  // namespace kvd
