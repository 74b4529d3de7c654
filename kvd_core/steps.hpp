// What a slice of long work may still do. A step is what takes 0.1 us at most; who works counts them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvd {

class Steps {
 public:
  explicit Steps(int64_t budget) : left_(budget) {}
  bool left() const { return left_ > 0; }
  int64_t rest() const { return left_; }  // negative when more was done
  void take(size_t steps) { left_ -= static_cast<int64_t>(steps); }

 private:
  int64_t left_;
};

}  // namespace kvd
