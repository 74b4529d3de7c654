// What every instance holds of a prompt, counted by medium and rank, and its JSON.
//
//   prompt        b0 b1 b2 b3 b4      rank 0: b0-b2 on GPU, b1 on CPU     no rank: b3 on CPU
//   rank 0         x  x  x  .  .      reaches 4 blocks with b3, which is held for all ranks
//                                     GPU 3, CPU 2, its own 3
//
//   {"default":{"a":{"longest_matched":16,"GPU":12,"CPU":8,"DISK":0,"DP":{"0":12}}}}
//
// A rank reaches as far as every block is held on some medium, by the rank itself or by a holder of
// the instance without a rank. Within that, blocks are counted for each medium, and separately
// those that are the rank's own. An instance shows the largest of its ranks' figures, each by
// itself. All figures are tokens.
//
// The device blocks of a rank with window groups (hybrid models) end where the groups say, as in
// index/match.hpp: at the deepest block where each group still holds the blocks that it must.
//
// The tree's path is matched first, chain by chain as in index/match.hpp. Behind its end, blocks
// whose tokens nobody has announced are looked up one by one, up to the first that nobody holds.
//
// Costs: path O(blocks), runs on the path x their members, rows; one look-up for each block behind
// the path while anything waits. A query changes the index's counts of queries, and places blocks
// whose tokens nobody has announced where a prompt shows them (Conductor::place_by_prompt).
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "conductor/conductor.hpp"
#include "index/path.hpp"

namespace kvd {

class Holdings {
 public:
  // Matches a prompt by its tokens' local hashes in a namespace. `plain` returns its n hashes by
  // the seed of sequence hashes, if they are needed.
  template <class Plain>
  void by_tokens(Conductor& conductor, const uint64_t* locals, size_t n, uint64_t space,
                 Plain&& plain) {
    reset(conductor, n);
    const Tree& tree = conductor.index().tree();
    path_.find(tree, locals, n);
    size_t met = path_.met();
    const uint64_t* own = met != n && conductor.anything_waits() ? plain() : nullptr;
    if (own != nullptr && conductor.place_by_prompt(path_.last(tree), locals, own, met, n, space)) {
      path_.find(tree, locals, n);
      met = path_.met();
    }
    take_runs(conductor);
    if (met == n || !conductor.anything_waits()) return;
    sequences_.resize(n);
    for (size_t i = 0; i < n; ++i) {
      sequences_[i] = i == 0 ? own[0] : conductor.sequences().next(sequences_[i - 1], own[i]);
    }
    take_waiting(conductor, sequences_.data(), met, n, space);
  }

  // The same by token ids.
  void by_token_ids(Conductor& conductor, const uint32_t* tokens, size_t n_tokens, uint64_t space) {
    const size_t size = conductor.index().block_size(), n = size == 0 ? 0 : n_tokens / size;
    const uint64_t seed = kBaseSeed + space, own = conductor.seed();
    locals_.resize(n);
    local_hashes(tokens, n, size, seed, locals_.data());
    by_tokens(conductor, locals_.data(), n, space, [&]() -> const uint64_t* {
      if (own == seed) return locals_.data();
      plain_.resize(n);
      local_hashes(tokens, n, size, own, plain_.data());
      return plain_.data();
    });
  }

  // The same by sequence hashes from the root.
  void by_sequences(const Conductor& conductor, const uint64_t* sequences, size_t n,
                    uint64_t space) {
    reset(conductor, n);
    find_sequences(conductor, sequences, n, space);
    const size_t met = path_.met();
    take_runs(conductor);
    if (met != n && conductor.anything_waits()) take_waiting(conductor, sequences, met, n, space);
  }

  // Renders the instances of the conductor, or one, then the workers of the index that belong to
  // none of them. `tenant` and `only` are JSON texts; an empty `only` means all.
  void render(const Conductor& conductor, const std::vector<const Worker*>& workers,
              std::string_view tenant, std::string_view only, std::string& out) {
    out.assign("{").append(tenant).append(":{");
    first_ = true;
    each_shown(conductor, workers, only, [&](auto& shown) { row(conductor, shown, out); });
    out.append("}}");
  }

  // How far a rank reaches tier by tier, in blocks: each tier continues where the one above ends.
  struct Reaches {
    uint32_t dp_rank;
    uint32_t device;
    uint32_t own_host;  // with its own host memory only
    uint32_t host;
    uint32_t disk;  // and external
  };
  struct TierRow {
    std::string key;  // of the instance, a JSON text
    std::vector<Reaches> ranks;
  };

  // The rows of the workers, and of those instances that have an engine of the adapter registered
  // or hold the beginning of the prompt.
  std::vector<TierRow> tiers(const Conductor& conductor, const std::vector<const Worker*>& workers,
                             uint64_t adapter, std::string_view only) {
    std::vector<TierRow> rows;
    each_shown(conductor, workers, only, [&](auto& shown) {
      TierRow row{shown.key, {}};
      bool reaches = false;
      each_rank(conductor, shown, [&](uint32_t dp_rank) {
        row.ranks.push_back(walk(dp_rank));
        reaches = reaches || row.ranks.back().disk != 0;
      });
      if (reaches || serves(shown, adapter)) rows.push_back(std::move(row));
    });
    return rows;
  }

 private:
  struct Span {  // blocks of the prompt that a rank holds on a layer
    LayerId layer;
    uint32_t from, to;
    uint32_t next;  // of the same rank, kNone at the end
  };
  struct Piece {
    uint32_t from, to;
    LayerId layer;
    bool own;
  };
  struct Reach {
    uint32_t longest = 0;
    uint32_t own = 0;
  };

  void reset(const Conductor& conductor, size_t n) {
    counts_ = n != 0;
    for (const RankId id : touched_) head_[id] = kNone;
    touched_.clear();
    spans_.clear();
    const Index& index = conductor.index();
    index_ = &index;
    if (head_.size() < index.rank_end()) head_.resize(index.rank_end(), kNone);
    counted_ = (1u << kTierLayers) - 1;
    groups_ = 0;
    for (LayerId layer = kFirstGroupLayer; layer < kMaxLayers && index.has_layer(layer); ++layer) {
      if (index.tier_of(layer) >= kFirstMedium) counted_ |= 1u << layer;
      if (index.tier_of(layer) == kDeviceLayer) groups_ |= 1u << layer;
    }
  }

  void find_sequences(const Conductor& conductor, const uint64_t* sequences, size_t n,
                      uint64_t space) {
    const Tree& tree = conductor.index().tree();
    const Sequences& known = conductor.sequences();
    path_.find(
        tree, n,
        [&](NodeId above, size_t start) {
          const BlockId block = known.find(known.key(space, sequences[start]));
          if (block == kNone) return kNone;
          const Block& at = tree.block(block);
          return at.offset == 0 && tree.node(at.node).parent == above ? at.node : kNone;
        },
        [&](const Node& node, size_t start, size_t most) {
          const BlockId* blocks = node.chain.block();
          size_t met = 1;
          while (met < most &&
                 known.key_of(blocks[met]) == known.key(space, sequences[start + met]))
            ++met;
          return met;
        });
  }

  void take_runs(const Conductor& conductor) {
    const Index& index = conductor.index();
    const Tree& tree = index.tree();
    for (LayerId layer = 0; layer < kMaxLayers; ++layer) {
      if (((counted_ | groups_) >> layer & 1) == 0) continue;
      const bool grouped = (groups_ >> layer & 1) != 0;
      path_.each_run(tree, layer, [&](SetId set, uint32_t from, uint32_t to) {
        for (const RankId id : tree.sets().members(set)) {
          const Rank& rank = index.rank(id);
          if (rank.live && (!grouped || !rank.windows.empty())) add(id, layer, from, to);
        }
        return true;
      });
    }
  }

  void take_waiting(const Conductor& conductor, const uint64_t* sequences, size_t from, size_t n,
                    uint64_t space) {
    for (size_t i = from; i < n; ++i) {
      bool held = false;
      conductor.each_credit(
          conductor.sequences().key(space, sequences[i]), [&](RankId id, LayerMask layers) {
            for (LayerId layer = 0; layer < kMaxLayers; ++layer) {
              if ((layers & counted_ & 1u << layer) == 0) continue;
              held = true;
              add(id, layer, static_cast<uint32_t>(i), static_cast<uint32_t>(i + 1));
            }
          });
      if (!held) break;
    }
  }

  void add(RankId id, LayerId layer, uint32_t from, uint32_t to) {
    if (head_[id] == kNone) touched_.push_back(id);
    for (uint32_t at = head_[id]; at != kNone; at = spans_[at].next) {
      if (spans_[at].layer != layer) continue;
      if (spans_[at].to == from) {
        spans_[at].to = to;
        return;
      }
      break;  // further spans of the layer lie before it
    }
    spans_.push_back({layer, from, to, head_[id]});
    head_[id] = static_cast<uint32_t>(spans_.size() - 1);
  }

  // ---- counting

  // Collects what a holder has of the prompt; returns whether it has the first block.
  bool collect(RankId id, bool own) {
    if (head_[id] == kNone) return false;
    const std::vector<Window>& windows = index_->rank(id).windows;
    const uint32_t most = windows.empty() ? kNone : reusable(id, windows);
    bool first = false;
    for (uint32_t at = head_[id]; at != kNone; at = spans_[at].next) {
      const Span& span = spans_[at];
      const uint32_t to = span.layer == kDeviceLayer ? std::min(span.to, most) : span.to;
      if ((counted_ >> span.layer & 1) == 0 || span.from >= to) continue;
      pieces_.push_back({span.from, to, span.layer, own});
      first = first || span.from == 0;
    }
    return first;
  }

  // How much of a prompt's beginning on the device a rank's window groups let it reuse.
  uint32_t reusable(RankId id, const std::vector<Window>& windows) const {
    uint32_t most = deepest(id, {kDeviceLayer, kNone}, kNone), before;
    do {  // a smaller depth for one group may break the condition of another
      before = most;
      for (const Window& window : windows) most = deepest(id, window, most);
    } while (most != before);
    return most;
  }

  // The deepest length <= `limit` whose last window.blocks blocks the rank holds on a layer.
  uint32_t deepest(RankId id, const Window& window, uint32_t limit) const {
    uint32_t best = 0;
    for (uint32_t at = head_[id]; at != kNone; at = spans_[at].next) {
      const Span& span = spans_[at];
      const uint32_t length = std::min(span.to, limit);
      if (span.layer != window.layer || length <= span.from) continue;
      if (span.from == 0 || length - span.from >= window.blocks) best = std::max(best, length);
    }
    return best;
  }

  // Counts `pieces_` and raises each medium's figure in `most_` to the count if that is larger.
  Reach count() {
    if (pieces_.empty()) return {};
    if (pieces_.size() == 1) {
      const Piece& only = pieces_[0];
      if (only.from != 0) return {};
      raise(only.layer, only.to);
      return {only.to, only.own ? only.to : 0};
    }
    std::sort(pieces_.begin(), pieces_.end(),
              [](const Piece& a, const Piece& b) { return a.from < b.from; });
    Reach reach;
    for (const Piece& piece : pieces_) {
      if (piece.from > reach.longest) break;
      reach.longest = std::max(reach.longest, piece.to);
    }
    std::array<uint32_t, kMaxLayers> end{}, blocks{};
    LayerMask seen = 0;
    uint32_t own_end = 0;
    for (const Piece& piece : pieces_) {
      if (piece.from >= reach.longest) break;
      const uint32_t to = std::min(piece.to, reach.longest);
      if (to > end[piece.layer]) {
        blocks[piece.layer] += to - std::max(piece.from, end[piece.layer]);
        end[piece.layer] = to;
        seen |= 1u << piece.layer;
      }
      if (piece.own && to > own_end) {
        reach.own += to - std::max(piece.from, own_end);
        own_end = to;
      }
    }
    for (LayerId layer = 0; seen != 0; ++layer, seen >>= 1) {
      if ((seen & 1) != 0) raise(layer, blocks[layer]);
    }
    return reach;
  }

  void raise(LayerId layer, uint32_t blocks) {
    most_[layer] = std::max(most_[layer], blocks);
    shown_ |= 1u << layer;
  }

  // ---- tier by tier

  static bool serves(const Instance& instance, uint64_t adapter) {
    return std::any_of(instance.sources.begin(), instance.sources.end(), [&](const Source* each) {
      return !each->store && each->adapter == adapter;
    });
  }

  static bool serves(const Worker&, uint64_t) { return true; }  // only events name its adapters

  // Takes `pieces_` as those of one rank. As in index/match.hpp, no tier continues on one above.
  Reaches walk(uint32_t dp_rank) {
    constexpr LayerId kHost = 1, kDisk = 2, kExternal = 3;
    std::sort(pieces_.begin(), pieces_.end(),
              [](const Piece& a, const Piece& b) { return a.from < b.from; });
    const uint32_t device = along(0, kDeviceLayer, false);
    const uint32_t host = along(device, kHost, false);
    return {dp_rank, device, along(device, kHost, true), host,
            along(along(host, kDisk, false), kExternal, false)};
  }

  // How far `pieces_` of a layer continue from a block: all of them, or the rank's own.
  uint32_t along(uint32_t at, LayerId layer, bool own) const {
    for (const Piece& piece : pieces_) {
      if (piece.from > at) break;
      if (piece.layer == layer && (piece.own || !own)) at = std::max(at, piece.to);
    }
    return at;
  }

  // ---- rows

  void number(uint64_t value, std::string& out) {
    char digits[20];
    const auto end = std::to_chars(digits, digits + sizeof digits, value).ptr;
    out.append(digits, end);
  }

  void begin_row() {
    most_.fill(0);
    shown_ = 0;
    longest_ = 0;
    dp_.clear();
  }

  // Calls visit(instance) and visit(worker) for all that have a row, or for the one in `only`.
  template <class Visit>
  void each_shown(const Conductor& conductor, const std::vector<const Worker*>& workers,
                  std::string_view only, Visit&& visit) {
    if (conductor.common() != nullptr) conductor.common()->asked += counts_;
    for (const auto& instance : conductor.instances()) {
      if (instance.get() == conductor.common()) continue;
      if (only.empty() || only == instance->key) visit(*instance);
    }
    for (const Worker* worker : workers) {
      if (worker->shared || !(only.empty() || only == worker->key)) continue;
      if (is_shown(conductor.index(), *worker)) visit(*worker);
    }
  }

  // Takes `pieces_` as those of one rank.
  void take_rank(uint64_t block_size, uint32_t dp_rank) {
    const Reach reach = count();
    longest_ = std::max<uint64_t>(longest_, reach.longest);
    dp_.append(dp_.empty() ? "\"" : ",\"");
    number(dp_rank, dp_);
    dp_.append("\":");
    number(reach.own * block_size, dp_);
  }

  template <class Shown>
  void row(const Conductor& conductor, Shown& shown, std::string& out) {
    begin_row();
    const uint64_t size = conductor.index().block_size();
    each_rank(conductor, shown, [&](uint32_t dp_rank) { take_rank(size, dp_rank); });
    end_row(conductor, shown.key, out);
  }

  // Calls visit(dp_rank) for every rank of an instance, with the rank's blocks in `pieces_`.
  template <class Visit>
  void each_rank(const Conductor& conductor, Instance& instance, Visit&& visit) {
    instance.asked += counts_;
    const Worker* worker = instance.worker;
    size_t at = 0;
    const auto& others = worker == nullptr ? kNoRanks : worker->ranks;
    for (const Instance::InstanceRank& each : instance.rows) {
      for (; at < others.size() && others[at].first < each.dp_rank; ++at) {
        worker_rank(conductor, instance, others[at], visit);
      }
      pieces_.clear();
      for (const RankId id : each.ids) {
        if (collect(id, true)) conductor.note_match(id);
      }
      if (at < others.size() && others[at].first == each.dp_rank)
        collect(others[at++].second, true);
      for (const RankId id : instance.shared) {
        if (collect(id, false)) conductor.note_match(id);
      }
      collect_common(conductor);
      visit(each.dp_rank);
    }
    for (; at < others.size(); ++at) worker_rank(conductor, instance, others[at], visit);
  }

  template <class Visit>
  void worker_rank(const Conductor& conductor, const Instance& instance,
                   const std::pair<uint32_t, RankId>& rank, Visit&& visit) {
    if (!conductor.index().rank(rank.second).listed && head_[rank.second] == kNone) return;
    pieces_.clear();
    collect(rank.second, true);
    for (const RankId id : instance.shared) collect(id, false);
    collect_common(conductor);
    visit(rank.first);
  }

  // Blocks of stores that serve every instance are no rank's own, whatever rank they name.
  void collect_common(const Conductor& conductor) {
    if (conductor.common() == nullptr) return;
    for (const Source* source : conductor.common()->sources) {
      for (const Holder& holder : source->holders) {
        if (collect(holder.id, false)) conductor.note_match(holder.id);
      }
    }
  }

  bool is_shown(const Index& index, const Worker& worker) const {
    return std::any_of(worker.ranks.begin(), worker.ranks.end(), [&](const auto& rank) {
      return index.rank(rank.second).listed || head_[rank.second] != kNone;
    });
  }

  template <class Visit>
  void each_rank(const Conductor& conductor, const Worker& worker, Visit&& visit) {
    for (const auto& rank : worker.ranks) {
      pieces_.clear();
      collect(rank.second, true);
      collect_common(conductor);
      visit(rank.first);
    }
  }

  void end_row(const Conductor& conductor, const std::string& key, std::string& out) {
    static constexpr std::string_view kAlways[] = {",\"GPU\":", ",\"CPU\":", ",\"DISK\":"};
    const Index& index = conductor.index();
    const uint64_t size = index.block_size();
    if (!first_) out.push_back(',');
    first_ = false;
    out.append(key).append(":{\"longest_matched\":");
    number(longest_ * size, out);
    for (LayerId tier = 0; tier < 3; ++tier) {
      out.append(kAlways[tier]);
      number(most_[tier] * size, out);
    }
    for (LayerId layer = 3; shown_ >> 3 != 0 && layer < kMaxLayers; ++layer) {
      if (most_[layer] == 0) continue;
      out.append(",").append(
          layer == 3 ? "\"EXTERNAL\"" : conductor.media()[index.tier_of(layer) - kFirstMedium].key);
      out.append(":");
      number(most_[layer] * size, out);
    }
    out.append(",\"DP\":{").append(dp_).append("}}");
  }

  static inline const std::vector<std::pair<uint32_t, RankId>> kNoRanks{};

  Path path_;
  std::vector<uint32_t> head_;  // by rank: its last span, kNone if it has none
  std::vector<RankId> touched_;
  std::vector<Span> spans_;
  std::vector<uint64_t> locals_, plain_, sequences_;
  const Index* index_ = nullptr;  // of the query in progress
  LayerMask counted_ = 0;         // layers that are media
  LayerMask groups_ = 0;          // cache groups of the device
  bool counts_ = false;           // the query is about a block or more

  // Of the row in progress.
  std::vector<Piece> pieces_;
  std::array<uint32_t, kMaxLayers> most_{};
  LayerMask shown_ = 0;
  uint64_t longest_ = 0;
  std::string dp_;
  bool first_ = true;
};

}  // namespace kvd
