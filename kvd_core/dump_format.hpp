// The two forms of a dump: what is written for a run of blocks that a rank holds.
//
//   text     {"worker_id":1,"storage_tier":"device","residency_domain":"worker","event":{
//            "event_id":0,"data":{"stored":{"parent_hash":null,"start_position":null,"blocks":[
//            {"block_hash":101,"tokens_hash":14643705804678351452,"mm_extra_info":null}, ..]}},
//            "dp_rank":0}}                                        one event a run, ~91 bytes a block
//
//   binary   'R' flags tier dp_rank parent worker n | name local | name local | ..
//                                                 one record or more a run, 16 bytes a block
//
// A binary record, little-endian and without padding:
//
//   u8  'R'       u8  flags   1 has a parent, 2 the worker's id is a text
//   u8  tier      u32 dp_rank
//   u64 parent    the rank's name of the block before the first; 0 without
//   u64 worker    the id, or the bytes of its text
//   u32 n         1 .. kRecordBlocks
//   [text of the worker's id, as a JSON text with its quotes]
//   n times       u64 name (engine hash), u64 local hash
//
// A longer run, and one that was left in the middle, goes on in another record whose parent is the
// last block of the one before.
#pragma once

#include <charconv>
#include <cstdint>
#include <cstring>
#include <string>

#include "index.hpp"
#include "worker.hpp"

namespace kvd {

constexpr uint8_t kRunTag = 'R';
constexpr uint8_t kHasParent = 1;
constexpr uint8_t kTextWorker = 2;
constexpr size_t kRunHead = 27;  // bytes before the worker's text
// Blocks of one record: a reader keeps at most one record, 64 KiB, before it takes it.
constexpr uint32_t kRecordBlocks = 4096;

constexpr const char* kTierNames[] = {"device", "host_pinned", "disk", "external"};

struct RunHead {
  const Worker* worker;
  uint32_t dp_rank;
  LayerId tier;
  bool has_parent;
  uint64_t parent;
};

class DumpFormat {
 public:
  virtual ~DumpFormat() = default;
  virtual void open(const RunHead& head, std::string& out) = 0;
  virtual void blocks(const uint64_t* names, const uint64_t* locals, size_t n, std::string& out) = 0;
  // What is written so far is handed out, though the run may go on.
  virtual void pause(std::string& out) = 0;
  virtual void close(std::string& out) = 0;
};

class TextFormat : public DumpFormat {
 public:
  void open(const RunHead& head, std::string& out) override {
    out.append(begun_ ? ",{\"worker_id\":" : "{\"worker_id\":").append(head.worker->number);
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

  void blocks(const uint64_t* names, const uint64_t* locals, size_t n, std::string& out) override {
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
  void open(const RunHead& head, std::string&) override {
    is_text_ = head.worker->number.front() == '"';
    worker_ = head.worker->number;
    number_ = is_text_ ? worker_.size() : std::stoull(worker_);
    tier_ = head.tier;
    dp_rank_ = head.dp_rank;
    has_parent_ = head.has_parent;
    parent_ = head.has_parent ? head.parent : 0;
  }

  void blocks(const uint64_t* names, const uint64_t* locals, size_t n, std::string& out) override {
    for (size_t i = 0; i < n; ++i) {
      if (count_ == 0) begin(out);
      put(out, names[i]);
      put(out, locals[i]);
      parent_ = names[i];
      if (++count_ == kRecordBlocks) end(out);
    }
  }

  void pause(std::string& out) override { end(out); }
  void close(std::string& out) override { end(out); }

 private:
  template <class T>
  static void put(std::string& out, T value) {
    char bytes[sizeof(T)];
    for (size_t i = 0; i < sizeof(T); ++i) bytes[i] = static_cast<char>(value >> (8 * i));
    out.append(bytes, sizeof(T));
  }

  void begin(std::string& out) {
    put<uint8_t>(out, kRunTag);
    put<uint8_t>(out, (has_parent_ ? kHasParent : 0) | (is_text_ ? kTextWorker : 0));
    put<uint8_t>(out, static_cast<uint8_t>(tier_));
    put<uint32_t>(out, dp_rank_);
    put<uint64_t>(out, parent_);
    put<uint64_t>(out, number_);
    count_at_ = out.size();
    put<uint32_t>(out, 0);
    if (is_text_) out.append(worker_);
  }

  void end(std::string& out) {
    if (count_ == 0) return;
    for (size_t i = 0; i < 4; ++i) out[count_at_ + i] = static_cast<char>(count_ >> (8 * i));
    has_parent_ = true;
    count_ = 0;
  }

  std::string worker_;
  uint64_t number_ = 0;
  bool is_text_ = false;
  LayerId tier_ = 0;
  uint32_t dp_rank_ = 0;
  bool has_parent_ = false;
  uint64_t parent_ = 0;
  size_t count_at_ = 0;
  uint32_t count_ = 0;
};

}  // namespace kvd
