// A rank's names for the blocks it holds: engine hash -> block, and the layers it is held on.
//
//   slots     [ 17 | .. | R3 | .. | 902 | 18 | .. ]        4 bytes each, open addressing
//               │         │
//               │         └─ record 3: { name 0xbeef, block 40, layers HOST|DISK }
//               └─ block 17, whose own name is this rank's name for it, held on DEVICE only
//
// Most ranks call a block what its first holder called it, and hold it on the device: such an entry
// is just the block's id, and its key is read back from the block. Everything else (another
// engine's hashes for the same tokens, lower tiers, window groups) takes a record.
//
// Invariants
//   1. the names of one rank are distinct; a name has one block and a non-empty set of layers;
//   2. an entry without the record bit is a live block, held by the rank on DEVICE under the
//      block's own name.
//
// Costs: find, insert, erase O(1); 4 bytes a slot at most 4/5 full, 16 bytes a record.
#pragma once

#include <cstdint>

#include "base/arena.hpp"
#include "base/keyed.hpp"
#include "index/tree.hpp"

namespace kvd {

struct Record {
  uint64_t name;
  BlockId block;
  LayerMask layers;

  uint32_t& free_link() { return block; }
};

constexpr LayerId kDeviceLayer = 0;
constexpr LayerMask kDeviceOnly = 1u << kDeviceLayer;

// Reads the name, block and layers of a slot's value back from where they live.
struct NameKeys {
  const Tree& tree;
  const Arena<Record>& records;
  const KeyedHash& hash;

  static constexpr uint32_t kRecordBit = 0x80000000u;

  uint64_t name(uint32_t value) const {
    return (value & kRecordBit) != 0 ? records[value & ~kRecordBit].name : tree.block(value).name;
  }
  BlockId block(uint32_t value) const {
    return (value & kRecordBit) != 0 ? records[value & ~kRecordBit].block : value;
  }
  LayerMask layers(uint32_t value) const {
    return (value & kRecordBit) != 0 ? records[value & ~kRecordBit].layers : kDeviceOnly;
  }
  uint64_t hash_of(uint32_t value) const { return hash(name(value)); }

  // Whether the records reach as far as a value's record, which may have been freed meanwhile.
  bool is_there(uint32_t value) const { return (value & ~kRecordBit) < records.end(); }
};

class Names {
 public:
  static constexpr uint32_t kAbsent = ProbeTable::kEmpty;

  uint32_t size() const { return table_.size(); }
  uint32_t capacity() const { return table_.capacity(); }
  uint32_t value(uint32_t slot) const { return table_.at(slot); }
  size_t bytes() const { return table_.bytes(); }

  // Slot of a name, or kAbsent. Slots are valid until the next insert or erase.
  uint32_t find(uint64_t name, const NameKeys& keys) const {
    return table_.find(keys.hash(name), [&](uint32_t value) { return keys.name(value) == name; });
  }

  void insert(uint64_t name, BlockId block, LayerMask layers, const NameKeys& keys,
              Arena<Record>& records) {
    const bool plain = layers == kDeviceOnly && keys.tree.block(block).name == name;
    table_.insert(keys.hash(name), plain ? block : record(name, block, layers, records), keys);
  }

  void set_layers(uint32_t slot, LayerMask layers, const NameKeys& keys, Arena<Record>& records) {
    const uint32_t value = table_.at(slot);
    if ((value & NameKeys::kRecordBit) != 0) {
      records[value & ~NameKeys::kRecordBit].layers = layers;
    } else {
      table_.set(slot, record(keys.name(value), value, layers, records));
    }
  }

  void erase(uint32_t slot, const NameKeys& keys, Arena<Record>& records) {
    const uint32_t value = table_.at(slot);
    table_.erase(slot, keys);
    if ((value & NameKeys::kRecordBit) != 0) records.give(value & ~NameKeys::kRecordBit);
  }

  // Makes room for this many names in an empty table; does nothing in any other.
  void reserve(uint32_t count) {
    if (size() == 0 && count != 0) table_.reserve(count);
  }

  bool is_spread(const NameKeys& keys) const { return table_.is_spread(keys); }
  void shrink(const NameKeys& keys) { table_.shrink(keys); }

 private:
  static uint32_t record(uint64_t name, BlockId block, LayerMask layers, Arena<Record>& records) {
    const uint32_t id = records.take();
    records[id] = {name, block, layers};
    return id | NameKeys::kRecordBit;
  }

  ProbeTable table_;
};

}  // namespace kvd
