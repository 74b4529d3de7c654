// Checks every numbered invariant of index/tree.hpp, index/ranksets.hpp, index/names.hpp and
// index/index.hpp. For tests and debug builds: O(everything).
#pragma once

#include <algorithm>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "index/index.hpp"

namespace kvd {

class Verifier {
 public:
  explicit Verifier(const Index& index) : index_(index), tree_(index.tree()) {}

  // Throws std::logic_error with the first violation.
  void run() {
    check_nodes();
    check_sets();
    check_names();
    check_parked();
    if (index_.predicted() != nullptr) check_predicted(*index_.predicted());
    if (index_.sequences() != nullptr) check_sequences(*index_.sequences());
  }

  // Checks a part that is built on the index and has its own `verify`.
  template <class Part>
  void run(const Part& part) {
    part.verify([](bool holds, const char* what) { require(holds, what); });
  }

 private:
  static void require(bool holds, const std::string& what) {
    if (!holds) throw std::logic_error("kvd_core invariant broken: " + what);
  }

  void check_nodes() {
    uint32_t nodes = 0, blocks = 0;
    for (NodeId id = tree_.successor(Tree::kRoot); id != kNone; id = tree_.successor(id)) {
      const Node& n = tree_.node(id);
      ++nodes;
      blocks += n.chain.len();
      require(n.chain.len() >= 1, "tree 2: a node holds a block");
      require(n.chain.len() <= Tree::kMaxChain, "tree: chains are bounded");
      for (uint32_t i = 0; i < n.chain.len(); ++i) {
        const Block& b = tree_.block(n.chain.block()[i]);
        require(b.node == id && b.offset == i, "tree 1: a block knows its place");
      }
      require(tree_.child(n.parent, n.chain.local()[0]) == id, "tree 2: children are found");
      const Node& above = tree_.node(n.parent);
      require(n.depth == above.depth + above.chain.len(), "tree 6: a node knows its depth");
      check_shape(n);
      check_runs(n);
    }
    require(tree_.is_spread(), "tree: children are near their homes");
    require(nodes == tree_.node_count(), "tree: every node is reachable");
    require(blocks == tree_.block_count(), "tree 1: every block is in a chain");
  }

  void check_sequences(const Sequences& sequences) {
    uint32_t known = 0;
    for (NodeId id = tree_.successor(Tree::kRoot); id != kNone; id = tree_.successor(id)) {
      const Chain& chain = tree_.node(id).chain;
      for (uint32_t i = 0; i < chain.len(); ++i) {
        const BlockId block = chain.block()[i];
        const uint64_t own = sequences.sequence_of(block);
        if (sequences.key_of(block) == 0) continue;
        ++known;
        require(sequences.find(sequences.key_of(block)) == block,
                "sequences 1: a key leads to its block");
        const BlockId above = tree_.parent_of(block);
        require(above == kNone || (sequences.key_of(above) != 0 &&
                                   sequences.space_of(above) == sequences.space_of(block)),
                "sequences 3: what lies before a known block is known");
        if (sequences.space_of(block) != 0 || sequences.seed() != kBaseSeed) continue;
        const uint64_t local = chain.local()[i];
        const uint64_t last = above == kNone ? 0 : sequences.sequence_of(above);
        require(own == (above == kNone ? local : sequences.next(last, local)),
                "sequences: those of the base model follow from local hashes");
      }
    }
    require(sequences.is_spread(), "sequences: keys are near their homes");
    require(known == sequences.size(), "sequences 1: no keys of blocks that are no more");
  }

  void check_shape(const Node& n) {
    uint32_t children = 0;
    for (NodeId c = n.first_child; c != kNone; c = tree_.node(c).next) ++children;
    require(children == n.children, "tree: children are counted");
    if (children == 1) {
      const uint32_t sum = n.chain.len() + tree_.node(n.first_child).chain.len();
      require(sum > Tree::kMaxChain, "tree 3: an only child is merged with its parent");
    }
  }

  void check_runs(const Node& n) {
    uint32_t held = 0;
    for (size_t i = 0; i < n.runs.size(); ++i) {
      const Run& run = n.runs[i];
      const bool first = starts_layer(n.runs, i);
      const bool last = i + 1 == n.runs.size() || starts_layer(n.runs, i + 1);
      const uint32_t start = start_of(n.runs, i);
      require(run.end <= n.chain.len() && run.end > start, "runs 1: ends ascend");
      require(i == 0 || n.runs[i - 1].layer <= run.layer, "runs 1: layers ascend");
      require(first || n.runs[i - 1].set != run.set, "runs 2: neighbours differ");
      require(!last || run.set != RankSets::kEmptySet, "runs 2: the last one is held");
      held = std::max(held, run.end);
      if (run.set != RankSets::kEmptySet) ++refs_[run.set];
      expand(n, start, run);
    }
    require(n.children != 0 || held == n.chain.len(), "tree 4: a leaf ends in a held block");
  }

  void expand(const Node& n, uint32_t from, const Run& run) {
    for (const RankId rank : tree_.sets().members(run.set)) {
      for (uint32_t i = from; i < run.end; ++i) {
        held_.insert({n.chain.block()[i], rank, run.layer});
      }
    }
  }

  void check_sets() {
    require(refs_.size() == tree_.sets().count(), "sets 2: every set is named by a run");
    require(tree_.sets().is_spread(), "sets: they are near their homes");
    std::set<std::vector<RankId>> distinct;
    for (const auto& [id, refs] : refs_) {
      const auto& members = tree_.sets().members(id);
      require(tree_.sets().refs(id) == refs, "sets 2: references are counted");
      require(std::is_sorted(members.begin(), members.end()), "sets 1: members ascend");
      require(distinct.insert(members).second, "sets 1: sets are distinct");
    }
  }

  void check_names() {
    for (RankId id = 0; id < index_.rank_end(); ++id) {
      if (index_.rank(id).live) {
        check_live(id);
      } else {
        check_retired(id);
      }
    }
    require(records_ == index_.record_count(), "names 1: every record is some rank's");
    check_counts();
    const Budget& budget = index_.budget();  // others may share it
    require(budget.names >= named_by_live_, "index 7: names of live ranks count in the budget");
    require(budget.blocks >= tree_.block_count(), "index 7: blocks count in the budget");
    check_presence();
    check_counters();
  }

  void check_live(RankId id) {
    const Rank& rank = index_.rank(id);
    uint32_t count = 0;
    for (uint32_t slot = 0; slot < rank.names.capacity(); ++slot) {
      const uint32_t value = rank.names.value(slot);
      if (value == Names::kAbsent) continue;
      ++count;
      records_ += (value & NameKeys::kRecordBit) != 0;
      check_name(id, slot, value);
      for (LayerId layer = 0; layer < kMaxLayers; ++layer) {
        if ((index_.keys().layers(value) >> layer & 1) != 0) {
          ++named_[{index_.keys().block(value), id, layer}];
        }
      }
    }
    require(count == rank.names.size(), "names: entries are counted");
    require(rank.names.is_spread(index_.keys()), "names: entries are near their homes");
    named_by_live_ += count;
    check_copies(rank);
  }

  // Checks that what is still to be swept can be found through the names that are left.
  void check_retired(RankId id) {
    const Rank& rank = index_.rank(id);
    std::set<BlockId> hinted;
    for (uint32_t slot = rank.sweep_at; slot < rank.names.capacity(); ++slot) {
      const uint32_t value = rank.names.value(slot);
      if (value == Names::kAbsent) continue;
      records_ += (value & NameKeys::kRecordBit) != 0;
      hinted.insert(index_.keys().block(value));
    }
    for (const auto& [block, rank_of, layer] : held_) {
      if (rank_of != id) continue;
      require(hinted.count(block) != 0, "index 6: a retired rank's names lead to its blocks");
    }
    const bool waits = std::count(index_.retired_.begin(), index_.retired_.end(), id) == 1;
    const bool is_free = std::count(index_.free_ranks_.begin(), index_.free_ranks_.end(), id) == 1;
    require(waits != is_free, "index 6: a rank that is not live waits for its sweep or is free");
    require(!is_free || (rank.names.capacity() == 0 && rank.presence() == 0),
            "index 6: nothing is left of a free rank");
  }

  void check_name(RankId id, uint32_t slot, uint32_t value) {
    const Rank& rank = index_.rank(id);
    const uint64_t name = index_.keys().name(value);
    const LayerMask layers = index_.keys().layers(value);
    require(rank.names.find(name, index_.keys()) == slot, "names 1: a name is found where it is");
    require(layers != 0, "names 1: a name has layers");
    const Block& b = tree_.block(index_.keys().block(value));
    require(tree_.node(b.node).chain.len() > b.offset, "names 2: a name means a live block");
    if ((layers >> kGhostLayer & 1) != 0) {
      require(layers == 1u << kGhostLayer, "index 3: a ghost has no other layer");
      require(rank.rare != nullptr, "index 3: a ghost is in the ring");
      const auto& ring = rank.rare->ghosts;
      require(std::find(ring.begin(), ring.end(), name) != ring.end(),
              "index 3: a ghost is in the ring");
    }
  }

  void check_presence() {
    std::map<RankId, size_t> shared;
    for (const auto& [key, names] : named_) {
      const auto [block, id, layer] = key;
      require(held_.count({block, id, layer}) == 1, "index 1: a named block is held");
      if (names == 1) continue;
      ++shared[id];
      require(index_.rank(id).has_shared(), "index 1: further names are counted");
      const auto& counts = index_.rank(id).rare->shared;
      require(counts.get(block, layer, index_.counts_) == names - 1,
              "index 1: further names are counted");
    }
    for (RankId id = 0; id < index_.rank_end(); ++id) {
      const Rank& rank = index_.rank(id);
      if (!rank.live || rank.rare == nullptr) continue;
      require(rank.rare->shared.size() == shared[id], "index 1: no stale counts of further names");
    }
  }

  void check_counters() {
    std::map<std::pair<RankId, size_t>, uint64_t> counted;
    for (const auto& [block, id, layer] : held_) {
      ++counted[{id, index_.counter(layer)}];
      require(!index_.rank(id).live || named_.count({block, id, layer}) == 1,
              "index 1: a live rank has a name for what it holds");
    }
    uint64_t totals[kTierLayers] = {};
    for (RankId id = 0; id < index_.rank_end(); ++id) {
      const Rank& rank = index_.rank(id);
      for (size_t i = 0; i < Rank::kCounters; ++i) {
        require(rank.held[i] == counted[std::make_pair(id, i)], "index 5: held blocks are counted");
        if (rank.live && i < kTierLayers) totals[i] += rank.held[i];
      }
    }
    for (LayerId tier = 0; tier < kTierLayers; ++tier) {
      require(totals[tier] == index_.held(tier), "index 5: totals are those of the live ranks");
    }
  }

  void check_copies(const Rank& rank) {
    if (rank.rare == nullptr) return;
    const CountArena& arena = index_.counts_;
    require(rank.rare->copies.is_spread(arena) && rank.rare->shared.is_spread(arena),
            "index 2: copied names are near their homes");
    rank.rare->copies.each(arena, [&](const Count& copies) {
      const uint32_t slot = rank.names.find(copies.id, index_.keys());
      require(slot != Names::kAbsent && copies.count != 0 &&
                  (index_.keys().layers(rank.names.value(slot)) >> copies.layer & 1) != 0,
              "index 2: a copied name is held");
    });
  }

  void check_counts() {
    std::set<const Count*> counts;
    size_t met = 0;
    for (RankId id = 0; id < index_.rank_end(); ++id) {
      if (index_.rank(id).rare == nullptr) continue;
      for (const Counts* table : {&index_.rank(id).rare->copies, &index_.rank(id).rare->shared}) {
        table->each(index_.counts_, [&](const Count& count) {
          counts.insert(&count);
          ++met;
        });
      }
    }
    require(met == counts.size() && met == index_.counts_.live(),
            "counts 2: the arena has the entries of the tables");
  }

  void check_parked() {
    size_t parked = 0, known = 0;
    for (RankId id = 0; id < index_.rank_end(); ++id) {
      const Rank& rank = index_.rank(id);
      if (rank.rare == nullptr) continue;
      rank.rare->parked.each(index_.parked_blocks_, [&](const Parked&) { ++known; });
      if (!rank.live) continue;
      parked += rank.parked();
      check_parked_of(id);
    }
    require(parked == index_.parked_count(), "index 4: parked blocks are counted");
    require(parked <= index_.max_parked_, "index 4: parked blocks are bounded");
    require(known == index_.parked_blocks_.live(), "parked 2: the arena has those of the tables");
    size_t queued = 0;
    index_.order_.each(
        [&](const auto& entry) { queued += index_.is_parked(entry.at, entry.stamp); });
    require(queued == parked, "index 4: parked blocks are in the queue");
  }

  void check_parked_of(RankId id) {
    const Rank& rank = index_.rank(id);
    const ParkedArena& arena = index_.parked_blocks_;
    const ParkedBlocks& blocks = rank.rare->parked;
    size_t waiting = 0;
    require(blocks.is_spread(arena), "parked: names and parents are near their homes");
    blocks.each(arena, [&](const Parked& p) {
      waiting += p.waits;
      require(p.waits == (p.has_content && !rank.published),
              "index 4: a block that lacks its parent waits for it");
      require(p.rank == id && &arena[blocks.find(p.name, arena)] == &p,
              "parked 1: a block is found by its rank and name");
      require(rank.names.find(p.name, index_.keys()) == Names::kAbsent,
              "index 4: a parked name is unknown");
      // A conductor's blocks wait for a parent in their namespace, by the hash that was announced.
      require(!p.has_content || p.hash != 0 || !index_.placed_.empty() ||
                  rank.names.find(p.parent, index_.keys()) == Names::kAbsent,
              "index 4: a parked block's parent is unknown");
    });
    blocks.each_newest(arena, [&](const Parked& newest) {
      uint32_t newer = kNone;
      for (uint32_t at = blocks.newest(newest.parent, arena); at != kNone; --waiting) {
        const Parked& p = arena[at];
        require(p.waits && p.parent == newest.parent && p.newer == newer,
                "parked 1: children are linked");
        newer = at;
        at = p.older;
      }
    });
    require(waiting == 0, "parked 1: children are found by their parent");
  }

  void check_predicted(const Predicted& p) {
    uint32_t count = 0, contents = 0, before = Predicted::kNoEntry;
    for (uint32_t id = p.oldest_; id != Predicted::kNoEntry; id = p.entries_[id].newer) {
      const auto& entry = p.entries_[id];
      require(entry.older == before, "predicted 1: the order of expiry is linked both ways");
      require(before == Predicted::kNoEntry || p.entries_[before].expiry <= entry.expiry,
              "predicted 1: the oldest goes first");
      require(p.find(entry.owner, entry.hash) == id, "predicted 1: an entry is found");
      check_content(p, id);
      contents += entry.before == Predicted::kNoEntry;
      require(entry.owner < p.next_owner_, "predicted 2: an owner was given out");
      before = id;
      ++count;
    }
    require(p.exact_.is_spread(Predicted::ByHash{p}) && p.content_.is_spread(Predicted::ByLocal{p}),
            "predicted: entries are near their homes");
    require(before == p.newest_, "predicted 1: the order has an end");
    require(count == p.size() && count == p.exact_.size(), "predicted 1: entries are distinct");
    require(contents == p.content_.size(), "predicted 1: each content is found once");
  }

  void check_content(const Predicted& p, uint32_t id) {
    const auto& entry = p.entries_[id];
    const uint32_t at = p.slot_of_content(entry.owner, entry.local);
    require(at != ProbeTable::kEmpty, "predicted 1: a content is found");
    if (entry.before == Predicted::kNoEntry) {
      require(p.content_.at(at) == id, "predicted 1: a list is found by its first entry");
    } else {
      const auto& neighbour = p.entries_[entry.before];
      require(
          neighbour.after == id && neighbour.owner == entry.owner && neighbour.local == entry.local,
          "predicted 1: a list is of one content, and linked both ways");
    }
  }

  const Index& index_;
  const Tree& tree_;
  std::map<SetId, uint32_t> refs_;
  std::set<std::tuple<BlockId, RankId, LayerId>> held_;             // by the runs
  std::map<std::tuple<BlockId, RankId, LayerId>, uint32_t> named_;  // by the live ranks' names
  size_t records_ = 0;
  uint64_t named_by_live_ = 0;
};

// A build with KVD_VERIFY checks everything after every applied batch.
inline void verify_if_debug([[maybe_unused]] const Index& index) {
#ifdef KVD_VERIFY
  Verifier(index).run();
#endif
}

}  // namespace kvd
