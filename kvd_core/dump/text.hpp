// Takes a dump in its text form (`dump/format.hpp`) into a stage.
//
//   { "m:default": { "block_size": 16, "events": [ { "worker_id": .., "event": { "data":
//   ENTRIES        ENTRY                         EVENTS RUN                 EVENT      DATA
//        { "stored": { "parent_hash": .., "blocks": [ { "block_hash": .., "tokens_hash": .. } ] } }
//        } } ] } }
//          STORED                         BLOCKS    BLOCK
//
// Members come in any order and unknown ones are skipped, as in Dynamo's own reader. Every known
// member must come once, with the right type and in range, else the whole dump is refused.
#pragma once

#include <charconv>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "json/stream.hpp"
#include "dump/staged.hpp"

namespace kvd {

class DumpText {
 public:
  explicit DumpText(Stage& stage) : stage_(stage) {}

  void feed(const uint8_t* p, size_t n) { json_.feed(p, n, *this); }

  void finish() {
    if (!json_.complete()) Stage::refuse("the dump is cut off");
  }

  // ---- called by the JSON reader

  void open(bool object) {
    const Nesting next = below(object);
    if (nesting() != Nesting::SKIPPED) take_member();
    nesting_.push_back(next);
    member_ = DumpMember::OTHER;
    switch (next) {
      case Nesting::ENTRY:
        begin_entry();
        break;
      case Nesting::RUN:
        begin_run();
        break;
      case Nesting::EVENT:
        seen_[1] = 0;
        break;
      case Nesting::DATA:
        seen_[2] = 0;
        break;
      case Nesting::STORED:
        seen_[3] = 0;
        break;
      case Nesting::BLOCK:
        seen_[4] = 0;
        break;
      default:
        break;
    }
  }

  void close(bool) {
    const Nesting left = nesting();
    nesting_.pop_back();
    switch (left) {
      case Nesting::ENTRY:
        end_entry();
        break;
      case Nesting::RUN:
        end_run();
        break;
      case Nesting::DATA:
        require(2, DumpMember::STORED, "event data other than `stored`");
        break;
      case Nesting::STORED:
        require(3, DumpMember::BLOCKS, "an event without blocks");
        break;
      case Nesting::EVENT:
        require(1, DumpMember::DATA, "an event without data");
        break;
      case Nesting::BLOCK:
        end_block();
        break;
      default:
        break;
    }
    member_ = DumpMember::OTHER;
  }

  void key(std::string_view name) {
    if (nesting() == Nesting::ENTRIES) key_ = name;
    member_ = member_of(nesting(), name);
  }

  void number(std::string_view digits) {
    if (nesting() == Nesting::SKIPPED) return;
    take_member();
    switch (member_) {
      case DumpMember::OTHER:
        elsewhere();
        break;
      case DumpMember::BLOCK_HASH:
        name_ = hash(digits);
        break;
      case DumpMember::TOKENS_HASH:
        local_ = hash(digits);
        break;
      case DumpMember::PARENT:
        parent_ = hash(digits), has_parent_ = true;
        break;
      case DumpMember::DP_RANK:
        dp_rank_ = static_cast<uint32_t>(unsigned_of(digits, 0xffffffffu));
        break;
      case DumpMember::WORKER:
        worker_ = std::to_string(unsigned_of(digits, ~uint64_t{0}));
        break;
      case DumpMember::BLOCK_SIZE:
        entry().block_size = static_cast<uint32_t>(unsigned_of(digits, 0xffffffffu));
        break;
      default:
        Stage::refuse("a number in the wrong place");
    }
  }

  void text(std::string_view chars) {
    if (nesting() == Nesting::SKIPPED) return;
    take_member();
    switch (member_) {
      case DumpMember::OTHER:
        elsewhere();
        break;
      case DumpMember::WORKER:
        worker_ = quoted(chars);
        break;
      case DumpMember::TIER:
        tier_ = tier_of(chars);
        break;
      case DumpMember::MODEL:
        entry().model = chars, entry().has_model = true;
        break;
      case DumpMember::TENANT:
        entry().tenant = chars, entry().has_tenant = true;
        break;
      case DumpMember::FAILED:
        Stage::refuse("the peer could not dump all of its indexes");
      default:
        Stage::refuse("a text in the wrong place");
    }
  }

  void word(std::string_view chars) {
    if (nesting() == Nesting::SKIPPED) return;
    take_member();
    const bool optional = member_ == DumpMember::PARENT || member_ == DumpMember::DP_RANK ||
                          member_ == DumpMember::TIER;
    if (member_ == DumpMember::OTHER) {
      elsewhere();
    } else if (chars != "null" || !optional) {
      Stage::refuse("a value of the wrong type");
    }
  }

 private:
  enum class Nesting : uint8_t {
    OUTSIDE,
    ENTRIES,
    ENTRY,
    EVENTS,
    RUN,
    EVENT,
    DATA,
    STORED,
    BLOCKS,
    BLOCK,
    SKIPPED
  };
  enum class DumpMember : uint8_t {
    OTHER,
    BLOCK_SIZE,
    MODEL,
    TENANT,
    EVENTS,
    FAILED,
    WORKER,
    TIER,
    EVENT,
    DATA,
    DP_RANK,
    STORED,
    PARENT,
    BLOCKS,
    BLOCK_HASH,
    TOKENS_HASH
  };

  Nesting nesting() const { return nesting_.back(); }
  StagedEntry& entry() { return stage_.entries().back(); }

  static DumpMember member_of(Nesting nesting, std::string_view name) {
    switch (nesting) {
      case Nesting::BLOCK:
        if (name == "block_hash") return DumpMember::BLOCK_HASH;
        if (name == "tokens_hash") return DumpMember::TOKENS_HASH;
        return DumpMember::OTHER;
      case Nesting::ENTRY:
        if (name == "block_size") return DumpMember::BLOCK_SIZE;
        if (name == "events") return DumpMember::EVENTS;
        if (name == "model_name") return DumpMember::MODEL;
        if (name == "tenant_id") return DumpMember::TENANT;
        if (name == "error") return DumpMember::FAILED;
        return DumpMember::OTHER;
      case Nesting::RUN:
        if (name == "worker_id") return DumpMember::WORKER;
        if (name == "storage_tier") return DumpMember::TIER;
        if (name == "event") return DumpMember::EVENT;
        return DumpMember::OTHER;
      case Nesting::EVENT:
        if (name == "data") return DumpMember::DATA;
        if (name == "dp_rank") return DumpMember::DP_RANK;
        return DumpMember::OTHER;
      case Nesting::DATA:
        return name == "stored" ? DumpMember::STORED : DumpMember::OTHER;
      case Nesting::STORED:
        if (name == "parent_hash") return DumpMember::PARENT;
        if (name == "blocks") return DumpMember::BLOCKS;
        return DumpMember::OTHER;
      default:
        return DumpMember::OTHER;
    }
  }

  // The kind of a container that opens here.
  Nesting below(bool object) const {
    switch (nesting()) {
      case Nesting::OUTSIDE:
        return want(object, Nesting::ENTRIES);
      case Nesting::ENTRIES:
        return want(object, Nesting::ENTRY);
      case Nesting::EVENTS:
        return want(object, Nesting::RUN);
      case Nesting::BLOCKS:
        return want(object, Nesting::BLOCK);
      default:
        break;
    }
    switch (member_) {
      case DumpMember::OTHER:
        return Nesting::SKIPPED;
      case DumpMember::EVENTS:
        return want(!object, Nesting::EVENTS);
      case DumpMember::BLOCKS:
        return want(!object, Nesting::BLOCKS);
      case DumpMember::EVENT:
        return want(object, Nesting::EVENT);
      case DumpMember::DATA:
        return want(object, Nesting::DATA);
      case DumpMember::STORED:
        return want(object, Nesting::STORED);
      default:
        Stage::refuse("an object or array in the wrong place");
    }
  }

  static Nesting want(bool right, Nesting nesting) {
    if (!right) Stage::refuse("an object or array in the wrong place");
    return nesting;
  }

  // A scalar that is no known member is allowed only as a member of an object.
  void elsewhere() const {
    switch (nesting()) {
      case Nesting::OUTSIDE:
      case Nesting::ENTRIES:
      case Nesting::EVENTS:
      case Nesting::BLOCKS:
        Stage::refuse("a value of the wrong type");
      default:
        break;
    }
  }

  // Refuses a known member that comes twice in its object.
  void take_member() {
    if (member_ == DumpMember::OTHER) return;
    uint32_t& seen = seen_at(nesting());
    const uint32_t bit = 1u << static_cast<uint32_t>(member_);
    if ((seen & bit) != 0) Stage::refuse("a member is given twice");
    seen |= bit;
  }

  uint32_t& seen_at(Nesting nesting) {
    switch (nesting) {
      case Nesting::RUN:
        return seen_[0];
      case Nesting::EVENT:
        return seen_[1];
      case Nesting::DATA:
        return seen_[2];
      case Nesting::STORED:
        return seen_[3];
      case Nesting::BLOCK:
        return seen_[4];
      default:
        return seen_[5];  // ENTRY
    }
  }

  void require(size_t level, DumpMember member, const char* otherwise) const {
    if ((seen_[level] >> static_cast<uint32_t>(member) & 1) == 0) Stage::refuse(otherwise);
  }

  void begin_entry() {
    seen_[5] = 0;
    stage_.begin_entry();
    entry().key = key_;
  }

  void end_entry() {
    require(5, DumpMember::BLOCK_SIZE, "an entry without a block size");
    require(5, DumpMember::EVENTS, "an entry without events");
  }

  void begin_run() {
    seen_[0] = 0;
    dp_rank_ = 0;
    tier_ = 0;
    has_parent_ = false;
    parent_ = 0;
    stage_.begin_run();
  }

  void end_run() {
    require(0, DumpMember::WORKER, "an event without a worker");
    require(0, DumpMember::EVENT, "an event without content");
    RunOf of{dp_rank_, tier_};
    of.has_parent = has_parent_;
    of.parent = parent_;
    stage_.end_run(worker_, of);
  }

  void end_block() {
    require(4, DumpMember::BLOCK_HASH, "a block without its hash");
    require(4, DumpMember::TOKENS_HASH, "a block without the hash of its tokens");
    stage_.add_block(name_, local_);
  }

  static uint64_t unsigned_of(std::string_view digits, uint64_t maximum) {
    uint64_t value = 0;
    const auto end = digits.data() + digits.size();
    const auto read = std::from_chars(digits.data(), end, value);
    if (read.ec != std::errc() || read.ptr != end || value > maximum)
      Stage::refuse("a number out of range");
    return value;
  }

  // A negative hash is the two's complement of the unsigned one, as everywhere.
  static uint64_t hash(std::string_view digits) {
    if (digits[0] != '-') return unsigned_of(digits, ~uint64_t{0});
    return ~unsigned_of(digits.substr(1), uint64_t{1} << 63) + 1;
  }

  static uint8_t tier_of(std::string_view name) {
    for (uint8_t tier = 0; tier < kTierLayers; ++tier) {
      if (name == kTierNames[tier]) return tier;
    }
    Stage::refuse("an unknown storage tier");
  }

  // Writes a text as JSON in a form that is unique.
  static std::string quoted(std::string_view chars) {
    std::string out = "\"";
    for (const char c : chars) {
      if (c == '"' || c == '\\') out.push_back('\\');
      if (static_cast<unsigned char>(c) < ' ')
        Stage::refuse("a control character in a worker's id");
      out.push_back(c);
    }
    out.push_back('"');
    return out;
  }

  Stage& stage_;
  JsonStream<DumpText> json_;
  std::vector<Nesting> nesting_{Nesting::OUTSIDE};
  DumpMember member_ = DumpMember::OTHER;
  uint32_t seen_[6] = {};  // members of the object in progress: RUN EVENT DATA STORED BLOCK ENTRY

  std::string key_;
  std::string worker_;
  uint32_t dp_rank_ = 0;
  uint8_t tier_ = 0;
  bool has_parent_ = false;
  uint64_t parent_ = 0;
  uint64_t name_ = 0;
  uint64_t local_ = 0;
};

}  // namespace kvd
