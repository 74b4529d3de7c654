// Takes a dump in its binary form into a stage.
//
//   "KVDDUMP1"                                     the last byte is the version
//   'P' u32 block_size  u32 n [model]  u32 n [tenant]             an entry; its runs follow
//   'K' ..  'R' ..                                a rank's traits, a run (`dump/format.hpp`)
//   'W' ..  'M' ..                                of publishers: a waiting block, a medium
//   'E' u64 blocks                                                the end, and the number of blocks
//
// Costs: one copy of 16 bytes a block, 24 for publishers; memory one record.
#pragma once

#include <cstdint>
#include <cstring>
#include <iterator>
#include <string>

#include "dump/staged.hpp"

namespace kvd {

class DumpBinary {
 public:
  static constexpr char kMagic[] = "KVDDUMP1";
  static constexpr size_t kMagicBytes = 8;
  // Longest name of a model, tenant or worker, in bytes.
  static constexpr size_t kMaxName = 64 * 1024;

  explicit DumpBinary(Stage& stage) : stage_(stage) {}

  void feed(const uint8_t* p, size_t n) {
    kept_.append(reinterpret_cast<const char*>(p), n);
    const uint8_t* const begin = reinterpret_cast<const uint8_t*>(kept_.data());
    const uint8_t* const end = begin + kept_.size();
    const uint8_t* at = begin;
    while (const uint8_t* const after = record(at, end)) at = after;
    kept_.erase(0, static_cast<size_t>(at - begin));
  }

  void finish() {
    if (!ended_ || !kept_.empty()) Stage::refuse("the dump is cut off");
  }

 private:
  template <class T>
  static T get(const uint8_t* p) {
    T value = 0;
    for (size_t i = 0; i < sizeof(T); ++i) value |= static_cast<T>(T{p[i]} << (8 * i));
    return value;
  }

  // The end of the record at p, or null if the record extends beyond `end`.
  const uint8_t* record(const uint8_t* p, const uint8_t* end) {
    const size_t n = static_cast<size_t>(end - p);
    if (n == 0) return nullptr;
    if (ended_) Stage::refuse("something follows the end of the dump");
    if (!begun_) return magic(p, n);
    switch (*p) {
      case 'P':
        return entry(p, n);
      case kRunTag:
        return run(p, n);
      case kRankTag:
        return rank(p, n);
      case kWaitingTag:
        return waiting(p, n);
      case kMediumTag:
        return medium(p, n);
      case 'E':
        return last(p, n);
      default:
        Stage::refuse("an unknown record");
    }
  }

  const uint8_t* magic(const uint8_t* p, size_t n) {
    if (n < kMagicBytes) return nullptr;
    if (std::memcmp(p, kMagic, kMagicBytes) != 0) Stage::refuse("not a dump of a known version");
    begun_ = true;
    return p + kMagicBytes;
  }

  const uint8_t* entry(const uint8_t* p, size_t n) {
    if (n < 9) return nullptr;
    const size_t model = name_bytes(get<uint32_t>(p + 5));
    if (n < 9 + model + 4) return nullptr;
    const size_t tenant = name_bytes(get<uint32_t>(p + 9 + model));
    if (n < 13 + model + tenant) return nullptr;
    stage_.begin_entry();
    StagedEntry& made = stage_.entries().back();
    made.block_size = get<uint32_t>(p + 1);
    made.model.assign(reinterpret_cast<const char*>(p + 9), model);
    made.tenant.assign(reinterpret_cast<const char*>(p + 13 + model), tenant);
    made.has_model = made.has_tenant = true;
    return p + 13 + model + tenant;
  }

  const uint8_t* run(const uint8_t* p, size_t n) {
    if (n < kRunHead) return nullptr;
    const uint8_t flags = p[1], tier = p[2];
    const bool is_text = (flags & kTextWorker) != 0;
    const uint64_t worker = get<uint64_t>(p + 27);
    const uint32_t blocks = get<uint32_t>(p + 35);
    const bool sequences = (flags & kSequences) != 0;
    if (stage_.entries().empty() || flags > (kHasParent | kTextWorker | kSequences) ||
        sequences != stage_.sequences() || !(sequences || tier < kTierLayers) || blocks == 0 ||
        blocks > kRecordBlocks) {
      Stage::refuse("a run that cannot be");
    }
    const size_t text = is_text ? name_bytes(worker) : 0;
    const size_t block = 8 * stage_.words();
    if (n < kRunHead + text + (sequences ? 8 : 0) + block * blocks) return nullptr;
    const std::string id = worker_id(p + kRunHead, text, is_text, worker);
    RunOf of{get<uint32_t>(p + 7), tier};
    of.group = get<uint32_t>(p + 3);
    of.has_parent = (flags & kHasParent) != 0;
    of.parent = get<uint64_t>(p + 11);
    of.term = get<uint64_t>(p + 19);
    stage_.begin_run();
    p += kRunHead + text;
    if (sequences) {
      of.above = get<uint64_t>(p);
      p += 8;
    }
    for (uint32_t i = 0; i < blocks; ++i, p += block)
      stage_.add_block(get<uint64_t>(p), get<uint64_t>(p + 8),
                       sequences ? get<uint64_t>(p + 16) : 0);
    stage_.end_run(id, of);
    return p;
  }

  const uint8_t* rank(const uint8_t* p, size_t n) {
    if (n < kRankHead) return nullptr;
    const uint8_t flags = p[1], groups = p[18], windows = p[19];
    const bool is_text = (flags & kTextWorker) != 0;
    const uint64_t worker = get<uint64_t>(p + 10);
    constexpr uint8_t kAll = kTextWorker | kSalted | kOffloads | kNumbersGroups;
    if (stage_.entries().empty() || (flags & ~kAll) != 0 || groups > kMaxGroups ||
        windows > kMaxLayers) {
      Stage::refuse("a rank that cannot be");
    }
    const size_t text = is_text ? name_bytes(worker) : 0;
    const size_t size = kRankHead + text + groups * kGroupBytes + windows * kWindowBytes;
    if (n < size) return nullptr;
    StagedRank staged;
    staged.dp_rank = get<uint32_t>(p + 2);
    staged.salted = (flags & kSalted) != 0;
    staged.offloads = (flags & kOffloads) != 0;
    staged.numbers_groups = (flags & kNumbersGroups) != 0;
    staged.main_group = static_cast<int32_t>(get<uint32_t>(p + 6));
    const uint8_t* at = p + kRankHead + text;
    for (uint32_t i = 0; i < groups; ++i, at += kGroupBytes) {
      if (at[4] > static_cast<uint8_t>(GroupKind::OTHER))
        Stage::refuse("a cache group of an unknown kind");
      const int64_t window = static_cast<int64_t>(get<uint64_t>(at + 5));
      staged.groups.push_back(
          {static_cast<int32_t>(get<uint32_t>(at)), static_cast<GroupKind>(at[4]), window});
    }
    for (uint32_t i = 0; i < windows; ++i, at += kWindowBytes) {
      staged.windows.push_back({get<uint32_t>(at), get<uint32_t>(at + 4)});
    }
    stage_.add_rank(worker_id(p + kRankHead, text, is_text, worker), std::move(staged));
    return p + size;
  }

  const uint8_t* waiting(const uint8_t* p, size_t n) {
    if (n < kWaitingHead) return nullptr;
    const uint8_t flags = p[1];
    const uint64_t text = name_bytes(get<uint64_t>(p + 11));
    if (stage_.entries().empty() || !stage_.sequences() ||
        flags > (kHasContent | kByEngine | kCertain))
      Stage::refuse("a block without a place that cannot be");
    if (n < kWaitingHead + text) return nullptr;
    StagedWaiting staged;
    staged.has_content = (flags & kHasContent) != 0;
    staged.by_engine = (flags & kByEngine) != 0;
    staged.certain = (flags & kCertain) != 0;
    staged.tier = p[2];
    staged.group = get<uint32_t>(p + 3);
    staged.dp_rank = get<uint32_t>(p + 7);
    uint64_t* const fields[] = {&staged.name,  &staged.hash,  &staged.space,   &staged.parent,
                                &staged.local, &staged.plain, &staged.sequence};
    for (size_t i = 0; i < std::size(fields); ++i) *fields[i] = get<uint64_t>(p + 19 + 8 * i);
    stage_.add_waiting(worker_id(p + kWaitingHead, text, true, 0), staged);
    return p + kWaitingHead + text;
  }

  const uint8_t* medium(const uint8_t* p, size_t n) {
    if (n < kMediumHead) return nullptr;
    const size_t name = name_bytes(get<uint32_t>(p + 2)), key = name_bytes(get<uint32_t>(p + 6));
    if (stage_.entries().empty() || !stage_.sequences()) Stage::refuse("a medium that cannot be");
    if (n < kMediumHead + name + key) return nullptr;
    const char* const text = reinterpret_cast<const char*>(p) + kMediumHead;
    stage_.entries().back().media.push_back(
        {p[1], std::string(text, name), std::string(text + name, key)});
    return p + kMediumHead + name + key;
  }

  static std::string worker_id(const uint8_t* text, size_t n, bool is_text, uint64_t number) {
    if (!is_text) return std::to_string(number);
    if (n < 2 || text[0] != '"') Stage::refuse("a worker's id that is no text");
    return std::string(reinterpret_cast<const char*>(text), n);
  }

  const uint8_t* last(const uint8_t* p, size_t n) {
    if (n < 9) return nullptr;
    if (get<uint64_t>(p + 1) != stage_.blocks()) Stage::refuse("blocks are missing");
    ended_ = true;
    return p + 9;
  }

  static size_t name_bytes(uint64_t n) {
    if (n > kMaxName) Stage::refuse("a name is too long");
    return static_cast<size_t>(n);
  }

  Stage& stage_;
  std::string kept_;
  bool begun_ = false;
  bool ended_ = false;
};

}  // namespace kvd
