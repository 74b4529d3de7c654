// The two forms of a dump: how a run of blocks that a rank holds is written.
//
//   text     {"worker_id":1,"storage_tier":"device","residency_domain":"worker","event":{
//            "event_id":0,"data":{"stored":{"parent_hash":null,"start_position":null,"blocks":[
//            {"block_hash":101,"tokens_hash":14643705804678351452,"mm_extra_info":null}, ..]}},
//            "dp_rank":0}}                                    one event a run, ~91 bytes a block
//
//   binary   'K' ..                             before a rank's first run: its traits
//            'R' flags tier group dp_rank parent term worker n | name local | name local | ..
//                                                 one record or more a run, 16 bytes a block
//
// Binary records are little-endian, without padding; a worker's text is JSON with its quotes:
//
//   u8  'R'       u8  flags   1 has a parent, 2 the worker's id is a text, 4 has sequence hashes
//   u8  tier      u32 group   the cache group, kNone for the main one, whose blocks are the prefix
//   u32 dp_rank
//   u64 parent    the rank's name of the block before the first; 0 without a parent
//   u64 term      what the prompt's first block adds to the seed of local hashes (salt); or 0
//   u64 worker    the id, or the length of its text in bytes
//   u32 n         1 .. kRecordBlocks
//   [text]
//   n times       u64 name (engine hash), u64 local hash
//
// Flag 4 is for what a conductor's publishers hold. Then `term` is the namespace of the blocks;
// behind the text is u64, the sequence hash of the block before the first (0 unknown or none); and
// each block has its own sequence hash behind its local hash. The tier may be a medium. Behind the
// runs of a partition:
//
//   u8  'W'       u8  flags   1 its content is known, 2 an engine's own event has announced it,
//                             4 its sequence hash is certain
//   u8  tier      u32 group   of a block that has no place yet, or a further name of one that has
//   u32 dp_rank   u64 length of the worker's text in bytes
//   u64 name, announced hash, namespace, announced parent, local hash, local hash by the seed of
//       sequence hashes, sequence hash (0 unknown)
//   [text]
//
//   u8  'M'       u8  tier    u32 n, u32 m: a medium beyond the tiers
//   [name, n bytes]  [the same as a JSON member name, m bytes]
//
//   u8  'K'       u8  flags   2 as above, 4 names salts, 8 names offloaded blocks,
//                           16 numbers groups
//   u32 dp_rank   u32 main group, kNone unknown
//   u64 worker    as above
//   u8  groups    u8  windows
//   [text]
//   groups times  u32 group, u8 kind (1 full attention, 2 window, 3 other), u64 window in tokens
//   windows times u32 group, u32 blocks that the group must hold on the device at the end of a
//                 reusable prefix
//
// A longer run, one whose term changes, and one that was left in the middle continue in another
// record, whose parent is the last block of the one before. A rank without traits has no 'K'.
#pragma once

#include <charconv>
#include <cstdint>
#include <cstring>
#include <string>

#include "index/index.hpp"

namespace kvd {

constexpr uint8_t kRunTag = 'R';
constexpr uint8_t kRankTag = 'K';
constexpr uint8_t kHasParent = 1;
constexpr uint8_t kTextWorker = 2;
constexpr uint8_t kSequences = 4;  // flag of a run
constexpr uint8_t kSalted = 4;     // flag of a rank, like the next two
constexpr uint8_t kOffloads = 8;
constexpr uint8_t kNumbersGroups = 16;
constexpr uint8_t kWaitingTag = 'W';
constexpr uint8_t kMediumTag = 'M';
constexpr uint8_t kHasContent = 1;  // flag of a waiting block, like the next two
constexpr uint8_t kByEngine = 2;
constexpr uint8_t kCertain = 4;
constexpr size_t kRunHead = 39;      // bytes before the worker's text
constexpr size_t kRankHead = 20;     // the same
constexpr size_t kWaitingHead = 75;  // the same
constexpr size_t kMediumHead = 10;   // bytes before the texts
constexpr size_t kGroupBytes = 13;
constexpr size_t kWindowBytes = 8;
// Blocks of one record. A reader keeps at most one record, 64 KiB, before it processes it.
constexpr uint32_t kRecordBlocks = 4096;

constexpr const char* kTierNames[] = {"device", "host_pinned", "disk", "external"};

// Appends a number in the form of binary records.
template <class T>
inline void put(std::string& out, T value) {
  char bytes[sizeof(T)];
  for (size_t i = 0; i < sizeof(T); ++i) bytes[i] = static_cast<char>(value >> (8 * i));
  out.append(bytes, sizeof(T));
}

struct RunHead {
  const std::string* owner;  // the worker's id as JSON
  uint32_t dp_rank;
  LayerId tier;
  uint32_t group;
  bool has_parent;
  uint64_t parent;
  BlockId before;  // the block that `parent` names
};

class DumpFormat {
 public:
  virtual ~DumpFormat() = default;
  // A rank's traits (index/types.hpp), before its first run.
  virtual void rank(const std::string& owner, const RankTraits& traits, std::string& out) = 0;
  virtual void open(const RunHead& head, std::string& out) = 0;
  // Blocks of one run.
  virtual void blocks(const BlockId* ids, const uint64_t* names, const uint64_t* locals, size_t n,
                      std::string& out) = 0;
  // Called when what is written so far is handed out, though the run may continue.
  virtual void pause(std::string& out) = 0;
  virtual void close(std::string& out) = 0;
};

class TextFormat : public DumpFormat {
 public:
  void rank(const std::string&, const RankTraits&, std::string&) override {}

  void open(const RunHead& head, std::string& out) override {
    out.append(begun_ ? ",{\"worker_id\":" : "{\"worker_id\":").append(*head.owner);
    out.append(",\"storage_tier\":\"").append(kTierNames[head.tier]);
    out.append("\",\"residency_domain\":\"worker\",\"event\":{\"event_id\":");
    number(event_id_[head.tier]++, out);
    out.append(",\"data\":{\"stored\":{\"parent_hash\":");
    if (head.has_parent) {
      number(head.parent, out);
    } else {
      out.append("null");
    }
    out.append(",\"start_position\":null,\"blocks\":[");
    begun_ = true;
    first_ = true;
    dp_rank_ = head.dp_rank;
  }

  void blocks(const BlockId*, const uint64_t* names, const uint64_t* locals, size_t n,
              std::string& out) override {
    for (size_t i = 0; i < n; ++i) {
      out.append(first_ ? "{\"block_hash\":" : ",{\"block_hash\":");
      first_ = false;
      number(names[i], out);
      out.append(",\"tokens_hash\":");
      number(locals[i], out);
      out.append(",\"mm_extra_info\":null}");
    }
  }

  void pause(std::string&) override {}

  void close(std::string& out) override {
    out.append("]}},\"dp_rank\":");
    number(dp_rank_, out);
    out.append("}}");
  }

 private:
  static void number(uint64_t value, std::string& out) {
    char digits[20];
    out.append(digits, std::to_chars(digits, digits + sizeof digits, value).ptr);
  }

  bool begun_ = false;
  bool first_ = true;
  uint32_t dp_rank_ = 0;
  uint64_t event_id_[kTierLayers] = {};
};

class BinaryFormat : public DumpFormat {
 public:
  // With `sequences`, blocks come with their namespaces and sequence hashes.
  explicit BinaryFormat(const Index& index, const Sequences* sequences = nullptr)
      : index_(index), sequences_(sequences) {}

  void rank(const std::string& owner, const RankTraits& traits, std::string& out) override {
    const uint8_t flags = (traits.salted ? kSalted : 0) | (traits.offloads ? kOffloads : 0) |
                          (traits.numbers_groups ? kNumbersGroups : 0);
    if (flags == 0 && traits.groups.empty() && traits.windows.empty() && traits.main_group < 0)
      return;
    name(owner);
    put<uint8_t>(out, kRankTag);
    put<uint8_t>(out, flags | (is_text_ ? kTextWorker : 0));
    put<uint32_t>(out, traits.dp_rank);
    put<uint32_t>(out, static_cast<uint32_t>(traits.main_group));
    put<uint64_t>(out, number_);
    put<uint8_t>(out, static_cast<uint8_t>(traits.groups.size()));
    put<uint8_t>(out, static_cast<uint8_t>(traits.windows.size()));
    if (is_text_) out.append(worker_);
    for (const CacheGroup& group : traits.groups) {
      put<uint32_t>(out, static_cast<uint32_t>(group.id));
      put<uint8_t>(out, static_cast<uint8_t>(group.kind));
      put<uint64_t>(out, static_cast<uint64_t>(group.window));
    }
    for (const Window& window : traits.windows) {
      put<uint32_t>(out, index_.group_of(window.layer));
      put<uint32_t>(out, window.blocks);
    }
  }

  void open(const RunHead& head, std::string&) override {
    name(*head.owner);
    tier_ = head.tier;
    group_ = head.group;
    dp_rank_ = head.dp_rank;
    has_parent_ = head.has_parent;
    parent_ = head.has_parent ? head.parent : 0;
    above_ = head.before == kNone ? 0 : sequence_of(head.before);
  }

  void blocks(const BlockId* ids, const uint64_t* names, const uint64_t* locals, size_t n,
              std::string& out) override {
    for (size_t i = 0; i < n; ++i) {
      const uint64_t term = sequences_ ? sequences_->space_of(ids[i]) : index_.term_at(ids[i]);
      if (term != term_) end(out);
      term_ = term;
      if (count_ == 0) begin(out);
      put<uint64_t>(out, names[i]);
      put<uint64_t>(out, locals[i]);
      parent_ = names[i];
      if (sequences_ != nullptr) put<uint64_t>(out, above_ = sequence_of(ids[i]));
      if (++count_ == kRecordBlocks) end(out);
    }
  }

  void pause(std::string& out) override { end(out); }
  void close(std::string& out) override { end(out); }

 private:
  uint64_t sequence_of(BlockId id) const {
    return sequences_ == nullptr ? 0 : sequences_->sequence_of(id);
  }

  void name(const std::string& owner) {
    is_text_ = owner.front() == '"';
    worker_ = owner;
    number_ = is_text_ ? worker_.size() : std::stoull(worker_);
  }

  void begin(std::string& out) {
    put<uint8_t>(out, kRunTag);
    put<uint8_t>(out, (has_parent_ ? kHasParent : 0) | (is_text_ ? kTextWorker : 0) |
                          (sequences_ != nullptr ? kSequences : 0));
    put<uint8_t>(out, static_cast<uint8_t>(tier_));
    put<uint32_t>(out, group_);
    put<uint32_t>(out, dp_rank_);
    put<uint64_t>(out, parent_);
    put<uint64_t>(out, term_);
    put<uint64_t>(out, number_);
    count_at_ = out.size();
    put<uint32_t>(out, 0);
    if (is_text_) out.append(worker_);
    if (sequences_ != nullptr) put(out, above_);
  }

  void end(std::string& out) {
    if (count_ == 0) return;
    for (size_t i = 0; i < 4; ++i) out[count_at_ + i] = static_cast<char>(count_ >> (8 * i));
    has_parent_ = true;
    count_ = 0;
  }

  const Index& index_;
  const Sequences* const sequences_;
  std::string worker_;
  uint64_t number_ = 0;
  bool is_text_ = false;
  LayerId tier_ = 0;
  uint32_t group_ = kNone;
  uint64_t term_ = 0;
  uint32_t dp_rank_ = 0;
  bool has_parent_ = false;
  uint64_t parent_ = 0;
  uint64_t above_ = 0;  // sequence hash of the block that `parent_` names
  size_t count_at_ = 0;
  uint32_t count_ = 0;
};

}  // namespace kvd
