// Reads what distinguishes blocks of equal tokens: a cache salt, and the images, sounds or
// embeddings in them.
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
//  4. Reading stops between two blocks when the slice's steps are used up.
// Cost: one byte compared a block if all entries are nil, as for plain text.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

#include "events/scratch.hpp"
#include "base/hash.hpp"
#include "base/msgpack.hpp"
#include "base/steps.hpp"

namespace kvd {
namespace decoding {

constexpr std::string_view kDynamoSaltTag = "dynamo-cache-salt:";
constexpr size_t kDigestDigits = 64;  // hex digits of a multimodal item's blake3 or sha256 digest
// Longest entry of a block, and map in place of an adapter's name: hundreds of images, or a salt of
// some pages. Events with longer ones are refused.
constexpr size_t kMaxEntryBytes = size_t{64} << 10;

class BlockIdentity {
 public:
  explicit BlockIdentity(Scratch& scratch) : scratch_(scratch) {}

  // Begins with the heads of lists that are complete, nullptr for none. A list from the tail of an
  // array event need not be mm_infos; then it is ignored.
  void begin(const uint8_t* end, PendingStored& pending, const uint8_t* mm_infos,
             bool infos_from_tail, const uint8_t* extra_keys) {
    end_ = end;
    pending_ = &pending;
    infos_ = mm_infos;
    infos_from_tail_ = infos_from_tail;
    keys_ = extra_keys;
    good_ = true;
    open_ = false;
  }

  // Whether all lists have the form that they should have; known once they are read.
  bool good() const { return good_; }

  // Reads on, some blocks at least; false when some are left.
  bool read(Steps& steps) {
    if (infos_ != nullptr) {
      const auto take_info = [this](Cursor& in, bool) { return read_mm_info(in); };
      if (!each_block(infos_, take_info, steps)) return false;
      infos_ = nullptr;
      good_ = good_ || infos_from_tail_;
    }
    if (keys_ != nullptr && good_) {
      const auto take_keys = [this](Cursor& in, bool first) { return read_keys(in, first); };
      if (!each_block(keys_, take_keys, steps)) return false;
    }
    return true;
  }

 private:
  static constexpr uint32_t kEntriesAtOnce = 64;   // entries read between two checks of the steps
  static constexpr ptrdiff_t kBytesAtOnce = 4096;  // bytes of entries read between two such checks
  static constexpr ptrdiff_t kBytesAStep = 16;
  static constexpr size_t kObjectBytes = 3;  // of the shortest object: an array of a text and 0

  // Calls read(cursor, is_first) for each block's entry; it appends the block's objects to mm.
  // Returns false when the steps are used up, and continues when it is called again.
  template <class Read>
  [[gnu::noinline]] bool each_block(const uint8_t* list, Read read, Steps& steps) {
    if (!open_ && !open(list)) return true;
    std::vector<uint64_t>& mm = scratch_.mm;
    const uint8_t* from = in_.at();
    for (uint32_t n = 0; block_ < pending_->event.n_hashes && good_; ++block_, ++n) {
      if (n == kEntriesAtOnce || in_.at() - from >= kBytesAtOnce) {
        steps.take(1 + static_cast<size_t>((in_.at() - from) / kBytesAStep));
        if (!steps.left()) return false;
        from = in_.at();
        n = 0;
      }
      const size_t first = mm.size();
      scratch_.mm_begin.push_back(static_cast<uint32_t>(first));
      if (block_ < count_) {
        Cursor entry = in_.short_part(kMaxEntryBytes);
        good_ = read(entry, block_ == 0) && !entry.broken();
        in_.back_to(entry.at());
      }
      std::sort(mm.begin() + static_cast<ptrdiff_t>(first), mm.end());
    }
    close();
    return true;
  }

  // Begins a list; false if it says nothing.
  bool open(const uint8_t* list) {
    in_ = Cursor(list, end_);
    in_.array(&count_);
    if (all_nil(in_.at(), std::min(count_, pending_->event.n_hashes))) return false;
    open_ = true;
    block_ = 0;
    mm_before_ = scratch_.mm.size();
    begin_before_ = scratch_.mm_begin.size();
    Scratch::expect(scratch_.mm_begin, size_t{pending_->event.n_hashes} + 1);
    Scratch::expect(scratch_.mm, in_.left() / kObjectBytes);
    return true;
  }

  void close() {
    open_ = false;
    if (good_ && scratch_.mm.size() != mm_before_) {
      scratch_.mm_begin.push_back(static_cast<uint32_t>(scratch_.mm.size()));
      pending_->mm_at = begin_before_;
      pending_->has_mm = true;
    } else {
      scratch_.mm_begin.resize(begin_before_);
      scratch_.mm.resize(mm_before_);
    }
  }

  static bool all_nil(const uint8_t* entries, uint32_t count) {  // the list is complete
    return count == 0 ||
           (entries[0] == wire::NIL && std::memcmp(entries, entries + 1, count - 1) == 0);
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
    for (; count != 0 && !in.broken(); --count) {
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
  // only), digest of the block's prompt embeddings. A list with anything but texts, such pairs and
  // bytes is ignored: it is not vLLM's, and its bare texts need not be salts.
  bool read_keys(Cursor& in, bool first) {
    uint32_t count;
    if (in.nil()) return true;
    if (!in.array(&count)) return false;
    const size_t before = scratch_.mm.size();
    StoredEvent& event = pending_->event;
    std::string_view adapter = event.lora_name, bare, tagged, text;
    Integer offset;
    bool plain = true;
    for (; count != 0 && !in.broken(); --count) {
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
      } else if (in.bin(&text)) {
        scratch_.mm.push_back(item_hash(text));
      } else if (take_item(in, &text, &offset)) {
        // Where a hash covers tokens behind its block, vLLM also names what begins in these.
        if (offset.negative || offset.bits < event.block_size)
          scratch_.mm.push_back(item_hash(text));
      } else {
        plain = false;
      }
    }
    if (!plain || pending_->has_mm) scratch_.mm.resize(before);  // mm_infos have named them already
    if (plain && first && !event.has_parent && event.salt.empty()) {
      event.salt = tagged.empty() ? bare : tagged;
    }
    return true;
  }

  // Takes [id, offset]; skips any other value and returns false.
  static bool take_item(Cursor& in, std::string_view* id, Integer* offset) {
    const uint8_t* start = in.at();
    uint32_t count;
    if (in.array(&count) && count == 2 && in.text(id) && in.integer(offset)) return true;
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

  // Newer Dynamo uses the first 16 digits of a digest; for other ids, and for bytes, there is no
  // common rule.
  static uint64_t item_hash(std::string_view id) {
    if (!is_digest(id)) return xxh3(id.data(), id.size(), 0);
    uint64_t hash = 0;
    for (const char c : id.substr(0, 16)) hash = hash << 4 | static_cast<uint64_t>(hex_digit(c));
    return hash;
  }

  Scratch& scratch_;
  const uint8_t* end_ = nullptr;  // of the payload
  PendingStored* pending_ = nullptr;
  const uint8_t* infos_ = nullptr;  // the lists that are still to be read
  const uint8_t* keys_ = nullptr;   //
  bool infos_from_tail_ = false;
  bool good_ = true;

  bool open_ = false;  // a list is being read
  Cursor in_{nullptr, nullptr};
  uint32_t count_ = 0;  // entries of the list
  uint32_t block_ = 0;  // the next one
  size_t mm_before_ = 0;
  size_t begin_before_ = 0;
};

}  // namespace decoding
}  // namespace kvd
