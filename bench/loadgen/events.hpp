// vLLM KV-event batches as msgpack: [timestamp, [event, ...], null]. Events are tagged arrays, or
// the tagged maps of newer versions.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#include "dataset.hpp"

namespace kvbench {

class MsgPack {
 public:
  void unsigned_integer(uint64_t value) {
    if (value < 0x80) big_endian(value, 1);
    else if (value <= 0xff) tagged(0xcc, value, 1);
    else if (value <= 0xffff) tagged(0xcd, value, 2);
    else if (value <= 0xffffffff) tagged(0xce, value, 4);
    else tagged(0xcf, value, 8);
  }
  void array(size_t length) {
    if (length < 16) big_endian(0x90 | length, 1);
    else if (length <= 0xffff) tagged(0xdc, length, 2);
    else tagged(0xdd, length, 4);
  }
  void map(size_t length) { big_endian(0x80 | length, 1); }  // up to 15 members
  void short_text(const char* text) {                        // up to 31 bytes: all that events need
    big_endian(0xa0 | std::strlen(text), 1);
    bytes_ += text;
  }
  void float64(double value) {
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    tagged(0xcb, bits, 8);
  }
  void nil() { big_endian(0xc0, 1); }
  void append(const MsgPack& other) { bytes_ += other.bytes_; }
  template <class Numbers>
  void numbers(const Numbers& values) {
    array(values.size());
    for (auto value : values) unsigned_integer(value);
  }

  std::string& bytes() { return bytes_; }

 private:
  void tagged(uint8_t tag, uint64_t value, int width) {
    bytes_.push_back(char(tag));
    big_endian(value, width);
  }
  void big_endian(uint64_t value, int width) {
    for (int i = width - 1; i >= 0; i--) bytes_.push_back(char(value >> (8 * i)));
  }

  std::string bytes_;
};

// Collects events into one batch.
class Batch {
 public:
  enum class Form { kArrays, kMaps };

  explicit Batch(Form form = Form::kArrays) : form_(form) {}

  void stored(const Hashes& hashes, const uint64_t* parent, const Tokens& tokens, long block_size) {
    begin("BlockStored", 7);
    name("block_hashes");
    events_.numbers(hashes);
    name("parent_block_hash");
    if (parent) events_.unsigned_integer(*parent);
    else events_.nil();
    name("token_ids");
    events_.numbers(tokens);
    name("block_size");
    events_.unsigned_integer(uint64_t(block_size));
    name("lora_id");
    events_.nil();
    name("medium");
    events_.short_text("GPU");
    blocks_ += hashes.size();
  }

  void removed(const Hashes& hashes) {
    begin("BlockRemoved", 3);
    name("block_hashes");
    events_.numbers(hashes);
    name("medium");
    events_.short_text("GPU");
  }

  void cleared() { begin("AllBlocksCleared", 1); }

  size_t events() const { return count_; }
  size_t blocks_stored() const { return blocks_; }

  // Returns the payload of all events so far, and empties the batch.
  std::string take() {
    MsgPack out;
    out.array(3);
    out.float64(1.5e9);  // timestamp: nobody reads it, a constant keeps runs equal
    out.array(count_);
    out.append(events_);
    out.nil();  // data-parallel rank: the registered one
    *this = Batch(form_);
    return std::move(out.bytes());
  }

 private:
  void begin(const char* type, size_t members) {
    if (form_ == Form::kMaps) events_.map(members);
    else events_.array(members);
    name("type");
    events_.short_text(type);
    count_++;
  }

  void name(const char* text) {
    if (form_ == Form::kMaps) events_.short_text(text);
  }

  Form form_;
  MsgPack events_;
  size_t count_ = 0;
  size_t blocks_ = 0;
};

}  // namespace kvbench
