// vLLM KV-event batches as msgpack: [timestamp, [event, ...], null], events as tagged arrays.
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
  void short_text(const char* text) {  // up to 31 bytes: all that events need
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

// Collects events and gives them out as one batch.
class Batch {
 public:
  void stored(const Hashes& hashes, const uint64_t* parent, const Tokens& tokens, long block_size) {
    events_.array(7);
    events_.short_text("BlockStored");
    events_.numbers(hashes);
    if (parent) events_.unsigned_integer(*parent);
    else events_.nil();
    events_.numbers(tokens);
    events_.unsigned_integer(uint64_t(block_size));
    events_.nil();  // lora_id
    events_.short_text("GPU");
    count_++;
    blocks_ += hashes.size();
  }

  void removed(const Hashes& hashes) {
    events_.array(3);
    events_.short_text("BlockRemoved");
    events_.numbers(hashes);
    events_.short_text("GPU");
    count_++;
  }

  void cleared() {
    events_.array(1);
    events_.short_text("AllBlocksCleared");
    count_++;
  }

  size_t events() const { return count_; }
  size_t blocks_stored() const { return blocks_; }

  // The payload of all events so far; the batch starts anew.
  std::string take() {
    MsgPack out;
    out.array(3);
    out.float64(1.5e9);  // timestamp: nobody reads it, a constant keeps runs equal
    out.array(count_);
    out.append(events_);
    out.nil();  // data-parallel rank: the registered one
    *this = Batch();
    return std::move(out.bytes());
  }

 private:
  MsgPack events_;
  size_t count_ = 0;
  size_t blocks_ = 0;
};

}  // namespace kvbench
