// The parts of an index besides the tree and the names: its layers and bounds, the state of a rank,
// the arguments of a store, and the interface that is called for each placed block.
//
//   rank 7 ─┬─ traits    what its stream has shown: cache groups, windows, salts; outlive a clear
//           ├─ names     engine hash -> block (index/names.hpp)
//           ├─ held      numbers of blocks by tier and kind of layer
//           └─ rare      made when the rank first needs one of these:
//                          copies    (name, layer)  -> further copies
//                          shared    (block, layer) -> further names
//                          parked    blocks that have no place yet (index/parked_blocks.hpp)
//                          ghosts    names dropped lately, oldest first
//
//   layer   0 1 2 3 | 4     | 5 .. 31
//           tiers   | ghost | (tier, cache group) pairs and other media, as they come
//
// The invariants that join these with the tree are in index/index.hpp.
//
// Costs: O(1); `credited` and `presence` add up a rank's counters.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <numeric>
#include <vector>

#include "events/types.hpp"
#include "base/hash.hpp"
#include "index/counts.hpp"
#include "index/names.hpp"
#include "index/parked_blocks.hpp"
#include "index/ranksets.hpp"
#include "base/steps.hpp"
#include "index/tree.hpp"

namespace kvd {

constexpr LayerId kTierLayers = 4;  // DEVICE, HOST, DISK, EXTERNAL: the layer is the tier
constexpr LayerId kGhostLayer = 4;
constexpr LayerId kFirstGroupLayer = 5;
// Layers of a partition: bits of a LayerMask, 27 of them for (tier, group) pairs.
constexpr LayerId kMaxLayers = 32;
constexpr LayerMask kAllLayers = 0xffffffffu;
// Media that are not tiers take layers as cache groups do; they are numbered as tiers from here on.
constexpr uint32_t kFirstMedium = 16;
// Values of `RankTraits::alias_of` besides the id of a rank: which ranks a conductor's rank counts
// as.
constexpr RankId kMany = 0xfffffffeu;  // each of `Index::aliases_of`
constexpr RankId kAll = 0xfffffffdu;   // every rank of every worker

// Parked blocks of one partition. 64 Ki blocks are ~8 MB: minutes of a broken stream, not hours.
constexpr size_t kMaxParked = 65536;
// Dropped names remembered per rank that offloads: an offload event names its block by hash
// alone and may come after the device copy went; engines keep them a few steps apart.
constexpr size_t kMaxGhosts = 4096;
// Cache groups remembered per rank. A hybrid model has a handful.
constexpr size_t kMaxGroups = 64;
// A cache with at most this many names is cleared at once, in some microseconds: no more than a new
// rank costs.
constexpr uint32_t kClearAtOnce = 64;

// What the indexes that share this budget may hold together, and what they do hold. Names are
// counted for live ranks, as (rank, block) pairs. Blocks are counted even where nobody holds them
// any more but held blocks lie behind them. With a budget of n there are at most n of each, plus
// what was parked before the budget was used up.
struct Budget {
  uint64_t max = UINT64_MAX;  // bounds the blocks, and likewise the names
  uint64_t blocks = 0;
  uint64_t names = 0;
  uint64_t refused = 0;  // announced blocks that found no room
  uint64_t crowded = 0;  // of these, blocks refused because too many wait to be placed

  bool fits(uint64_t new_blocks, uint64_t new_names) const {
    return fit(blocks, new_blocks) && fit(names, new_names);
  }
  bool fits(uint64_t n) const { return fits(n, n); }
  // Whether enough is left to remember names that mean nothing any more (ghosts).
  bool ample() const { return names <= max - max / 8; }

 private:
  bool fit(uint64_t used, uint64_t n) const { return n == 0 || (used <= max && n <= max - used); }
};

// The layer that a stored event's blocks count on. Blocks announced without content count by name
// alone.
struct StoreTarget {
  LayerId layer;
  bool by_name;
};

constexpr StoreTarget kNowhere{kNone, false};

// What has happened since the index was made, in blocks unless said otherwise.
struct IndexStats {
  uint64_t stored = 0;           // gained by a rank on a layer
  uint64_t refreshed = 0;        // announced again, held already
  uint64_t copies = 0;           // second and further copies
  uint64_t rebound = 0;          // names that came back with other content
  uint64_t removed = 0;          // lost by a rank on a layer
  uint64_t removed_copies = 0;   // removals that a further copy survived
  uint64_t removed_unknown = 0;  // removals of names not held
  uint64_t parked = 0;           // set aside: parent or content unknown
  uint64_t unparked = 0;         // placed after all
  uint64_t parked_dropped = 0;   // the bound on parked blocks dropped the oldest
  uint64_t parked_unsalted = 0;  // of `unparked`: hashed without the salt of their prompt
  uint64_t self_references = 0;  // events refused: a name repeated, or equal to its parent
};

// What a stream has said about one of its cache groups.
struct CacheGroup {
  int32_t id;
  GroupKind kind;
  int64_t window;  // tokens, 0 unknown
};

struct Window {
  LayerId layer;
  uint32_t blocks;  // blocks that the group must hold at the end of a reusable prefix
};

// State that few ranks have, or that is small where they have it.
struct RareState {
  Counts copies;                // name and layer -> further copies
  Counts shared;                // block and layer -> further names
  ParkedBlocks parked;          // by name, and by the parent that they wait for
  std::deque<uint64_t> ghosts;  // names, oldest first
};

// What a rank's stream has shown, besides its blocks. The members that a match reads of every rank
// it meets lie together from the start of a cache line on, with `Rank::live` behind them: with
// hundreds of ranks, the number of cache lines touched decides how long a match takes.
struct RankTraits {
  std::vector<CacheGroup> groups;
  int32_t main_group = -1;      // the full-attention group whose blocks are the prefix
  bool numbers_groups = false;  // its stream numbers cache groups
  bool plain = false;           // its stream has stored blocks without numbering groups
  bool listed = false;          // registered, so answers list it even without a match
  bool offloads = false;        // its stream names lower-tier blocks by hash alone
  uint32_t dp_rank = 0;
  uint32_t heard_from = kNone;  // the dp rank whose stream has spoken for it
  uint32_t owner = kNone;       // its number in the chronicle (index/chronicle.hpp)
  uint64_t noted = 0;           // its changes noted there, overwritten ones included
  bool settling = false;        // took blocks from a dump; its stream may announce them again
  bool restored = false;        // took blocks from a dump, and no batch has spoken for it since
  bool alias_only = false;      // exists only as what a conductor's rank counts as (worker.hpp)

  alignas(64) std::vector<Window> windows;
  // As what a conductor's rank counts for workers: a rank, kMany, kAll, or kNone for nothing.
  RankId alias_of = kNone;
  // Blocks that its engine moves to and loads from lower tiers as one unit; 0 unknown, 1 each by
  // itself.
  uint32_t chunk = 0;
  bool salted = false;     // its stream says which blocks carry a cache salt
  bool hidden = false;     // counts for no worker
  bool published = false;  // a conductor's; the conductor knows what its parked blocks wait for
};

struct Rank : RankTraits {
  // In this order: the tiers of the main group; the ghosts; for each tier its other groups; media.
  static constexpr size_t kCounters = kFirstGroupLayer + kTierLayers + 1;

  bool live = false;      // false: retired, invisible, waiting for its sweep
  uint32_t sweep_at = 0;  // the slot of `names` where the sweep of a retired rank continues
  Names names;
  std::unique_ptr<RareState> rare;
  uint64_t held[kCounters] = {};

  RareState& rare_state() {
    if (rare == nullptr) rare = std::make_unique<RareState>();
    return *rare;
  }
  bool has_shared() const { return rare != nullptr && !rare->shared.empty(); }
  bool has_copies() const { return rare != nullptr && !rare->copies.empty(); }
  size_t parked() const { return rare == nullptr ? 0 : rare->parked.size(); }
  size_t ghosts() const { return rare == nullptr ? 0 : rare->ghosts.size(); }

  // Blocks that a query can credit.
  uint64_t credited() const { return std::accumulate(held, held + kTierLayers, uint64_t{0}); }
  uint64_t presence() const { return std::accumulate(held, held + kCounters, uint64_t{0}); }
};

struct Store {
  const uint64_t* names;
  const uint64_t* locals;
  uint32_t n;
  bool has_parent;
  uint64_t parent;
  LayerId layer;
  uint64_t term;  // what the prompt's first block adds to the seed of local hashes, or 0
  // For sequence hashes: local hashes by their own seed (null if `locals` are), and the namespace.
  const uint64_t* plain = nullptr;
  uint64_t space = 0;
  Origin origin = Origin::UNKNOWN;
  const uint64_t* sequences = nullptr;  // sequence hashes known to another process, 0 unknown
};

// Notified of blocks as they are placed, while sequence hashes are kept.
class Placements {
 public:
  virtual ~Placements() = default;
  virtual void placed(const Store& s, const BlockId* blocks) = 0;
  // Blocks placed earlier have just been given their sequence hashes, where they can have any.
  virtual void sequenced(const BlockId* blocks, uint32_t n) = 0;
  // Continues placing blocks that waited for these; false while there is more.
  virtual bool resolve_waiting(Steps& steps) = 0;
  // A query has matched its prompt up to block `from`; `last` is the last block met (kNone: none).
  // Places the blocks behind it that were known by sequence hash alone; false if there are none.
  virtual bool place_by_prompt(BlockId last, const uint64_t* locals, size_t from, size_t n) = 0;
};

}  // namespace kvd
