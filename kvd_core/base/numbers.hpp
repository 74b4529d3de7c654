// Numbers of things with dense 32-bit ids, of which many or all may have none.
//
//   ids      0 .. 255     256 .. 511     512 .. 767
//   pages   [ . 7 . 7 ]       -         [ 9 9 . .. ]        0: none; no page where none has one
//
// A page comes with the first number in it and goes with the last. No entry is copied as the ids
// grow, as in a hash table, so no call takes a time that grows with their number.
//
// Costs: get, set O(1); 8 bytes an id in pages that are there, and 8 for 256 ids once any is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace kvd {

class Numbers {
 public:
  // The number of an id, 0 without one.
  uint64_t operator[](uint32_t id) const {
    const size_t page = id / kPage;
    return page < pages_.size() && pages_[page] != nullptr ? at(id) : 0;
  }

  // The same for ids that have a number.
  uint64_t at(uint32_t id) const { return pages_[id / kPage]->numbers[id % kPage]; }

  // `number`: not 0.
  void set(uint32_t id, uint64_t number) {
    if (id / kPage >= pages_.size()) pages_.resize(id / kPage + 1);
    std::unique_ptr<Page>& page = pages_[id / kPage];
    if (page == nullptr) {
      page = std::make_unique<Page>();
      ++used_pages_;
    }
    uint64_t& known = page->numbers[id % kPage];
    page->count += known == 0;
    size_ += known == 0;
    known = number;
  }

  void erase(uint32_t id) {
    if ((*this)[id] == 0) return;
    std::unique_ptr<Page>& page = pages_[id / kPage];
    page->numbers[id % kPage] = 0;
    --size_;
    if (--page->count != 0) return;
    page.reset();
    if (--used_pages_ == 0) pages_.clear();
  }

  size_t size() const { return size_; }
  size_t bytes() const {
    return used_pages_ * sizeof(Page) + pages_.capacity() * sizeof(std::unique_ptr<Page>);
  }

 private:
  static constexpr uint32_t kPage = 256;

  struct Page {
    uint64_t numbers[kPage];
    uint32_t count;  // numbers that are not 0
  };

  std::vector<std::unique_ptr<Page>> pages_;
  size_t used_pages_ = 0;
  size_t size_ = 0;
};

}  // namespace kvd
