// Reads what distinguishes blocks of equal tokens: a cache salt, and the images or sounds in them.
//
//   extra_keys      [nil, ["adapter", ["<64 hex digits>", -12], "salt"], ...]    one entry a block
//   block_mm_infos  [nil, {"mm_objects": [{"mm_hash": u64}, ...]}, ...]          likewise
//        ──▶ event.salt, and mm[mm_begin[i] .. mm_begin[i + 1]) for block i
//
// Invariants
//  1. Objects come from block_mm_infos if it names any, else from extra_keys. The salt comes from a
//     member of its own if given, else from the first block's extra_keys. These never salt a block
//     below a parent, whose chain has its salt already.
//  2. mm_begin is made only if some block has an object. Lists may be longer or shorter than the
//     hashes; a block without an entry has no object.
//  3. A list of another form leaves the vectors as they were.
// Cost: one byte compared a block if all entries are nil, as for plain text.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "events/scratch.hpp"
#include "base/hash.hpp"
#include "base/msgpack.hpp"

namespace kvd {
namespace decoding {

constexpr std::string_view kDynamoSaltTag = "dynamo-cache-salt:";
constexpr size_t kDigestDigits = 64;  // hex digits of a multimodal item's blake3 or sha256 digest

class BlockIdentity {
 public:
  BlockIdentity(const uint8_t* end, Scratch& scratch, PendingStored& pending)
      : end_(end), scratch_(scratch), pending_(pending), event_(pending.event) {}

  // Takes the heads of lists that are complete, nullptr for none; returns false if one has another
  // form. A list from the tail of an array event need not be mm_infos; then it is ignored.
  bool read(const uint8_t* mm_infos, bool infos_from_tail, const uint8_t* extra_keys) {
    if (mm_infos != nullptr) {
      const auto take_info = [this](Cursor& in, bool) { return read_mm_info(in); };
      if (!each_block(mm_infos, take_info) && !infos_from_tail) return false;
    }
    if (extra_keys == nullptr) return true;
    const auto take_keys = [this, has_infos = pending_.has_mm](Cursor& in, bool first) {
      return read_keys(in, first, has_infos);
    };
    return each_block(extra_keys, take_keys);
  }

 private:
  // Calls read(cursor, is_first) for each block's entry; it appends the block's objects to mm.
  template <class Read>
  bool each_block(const uint8_t* list, Read read) {
    Cursor in(list, end_);
    uint32_t count = 0;
    in.array(&count);
    if (all_nil(in.at(), count)) return true;
    std::vector<uint64_t>& mm = scratch_.mm;
    const size_t mm_before = mm.size(), begin_before = scratch_.mm_begin.size();
    bool good = true;
    for (uint32_t i = 0; i < event_.n_hashes && good; ++i) {
      const size_t from = mm.size();
      scratch_.mm_begin.push_back(static_cast<uint32_t>(from));
      good = i >= count || read(in, i == 0);
      std::sort(mm.begin() + static_cast<ptrdiff_t>(from), mm.end());
    }
    if (good && mm.size() != mm_before) {
      scratch_.mm_begin.push_back(static_cast<uint32_t>(mm.size()));
      pending_.mm_at = begin_before;
      pending_.has_mm = true;
    } else {
      scratch_.mm_begin.resize(begin_before);
      mm.resize(mm_before);
    }
    return good;
  }

  static bool all_nil(const uint8_t* entries, uint32_t count) {  // the list is complete
    return std::all_of(entries, entries + count, [](uint8_t tag) { return tag == wire::NIL; });
  }

  // {"mm_objects": [{"mm_hash": u64, ...}, ...]} or nil
  bool read_mm_info(Cursor& in) {
    if (in.nil()) return true;
    return each_member(in, "mm_objects", [this](Cursor& list) { return read_mm_objects(list); });
  }

  bool read_mm_objects(Cursor& in) {
    uint32_t count;
    if (!in.array(&count)) return false;
    bool good = true;
    for (; count != 0 && good; --count) {
      const size_t one_more = scratch_.mm.size() + 1;
      good = each_member(in, "mm_hash", [this](Cursor& hash) { return read_mm_hash(hash); }) &&
             scratch_.mm.size() == one_more;
    }
    return good;
  }

  bool read_mm_hash(Cursor& in) {
    Integer number;
    if (!in.integer(&number)) return false;
    scratch_.mm.push_back(number.bits);
    return true;
  }

  // Takes a map; calls `read` at the value of `name`, unless it is nil, and skips other members.
  template <class Read>
  static bool each_member(Cursor& in, std::string_view name, Read read) {
    uint32_t count;
    if (!in.map(&count)) return false;
    for (; count != 0; --count) {
      std::string_view key;
      if (!in.text(&key)) {
        in.skip(2);
      } else if (key != name) {
        in.skip();
      } else if (!in.nil() && !read(in)) {
        return false;
      }
    }
    return true;
  }

  // Reads vLLM's list of a block, in this order: adapter, [item id, offset]..., salt (block 0
  // only). A list with anything but texts and such pairs is ignored: it is not vLLM's, and its
  // bare texts need not be salts.
  bool read_keys(Cursor& in, bool first, bool has_infos) {
    uint32_t count;
    if (in.nil()) return true;
    if (!in.array(&count)) return false;
    const size_t before = scratch_.mm.size();
    std::string_view adapter = event_.lora_name, bare, tagged, text;
    bool plain = true;
    for (; count != 0; --count) {
      if (in.text(&text)) {
        if (!adapter.empty() && text == adapter) {
          adapter = {};  // once only, as a salt may equal the adapter's name
        } else if (is_digest(text)) {
          scratch_.mm.push_back(item_hash(text));
        } else if (text.substr(0, kDynamoSaltTag.size()) == kDynamoSaltTag) {
          tagged = text.substr(kDynamoSaltTag.size());
        } else if (bare.empty()) {
          bare = text;
        }
      } else if (take_item(in, &text)) {
        scratch_.mm.push_back(item_hash(text));
      } else {
        plain = false;
      }
    }
    if (!plain || has_infos) scratch_.mm.resize(before);
    if (plain && first && !event_.has_parent && event_.salt.empty()) {
      event_.salt = tagged.empty() ? bare : tagged;
    }
    return true;
  }

  // Takes [id, offset]; skips any other value and returns false.
  static bool take_item(Cursor& in, std::string_view* id) {
    const uint8_t* start = in.at();
    uint32_t count;
    Integer offset;
    if (in.array(&count) && count == 2 && in.text(id) && in.integer(&offset)) return true;
    in.back_to(start);
    in.skip();
    return false;
  }

  static int hex_digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
  }

  static bool is_digest(std::string_view text) {
    return text.size() == kDigestDigits &&
           std::all_of(text.begin(), text.end(), [](char c) { return hex_digit(c) >= 0; });
  }

  // Newer Dynamo uses the first 16 digits of a digest; for other ids there is no common rule.
  static uint64_t item_hash(std::string_view id) {
    if (!is_digest(id)) return xxh3(id.data(), id.size(), 0);
    uint64_t hash = 0;
    for (const char c : id.substr(0, 16)) hash = hash << 4 | static_cast<uint64_t>(hex_digit(c));
    return hash;
  }

  const uint8_t* end_;  // of the payload
  Scratch& scratch_;
  PendingStored& pending_;
  StoredEvent& event_;  // in it
};

}  // namespace decoding
}  // namespace kvd
