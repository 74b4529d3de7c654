// The budget of a slice of long work, in steps and in time.
//
// A step is work of at most 0.1 us; the worker counts its steps. So a slice does the same work on
// every machine, and small work never reads a clock. But a count is only as good as its steps:
// where they take far longer (with input that nobody has thought of), the slice ends once it has
// taken kSlack times as long as its steps should. So no slice can hold up the loop for long. Only
// the thread's own CPU time counts, so that other processes on the core do not change where work is
// divided.
//
// Costs: a clock read, some 0.2 us, every kCheckEvery steps.
#pragma once

#include <time.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace kvd {

class Steps {
 public:
  // INT64_MAX: no limit, neither of steps nor of time.
  explicit Steps(int64_t budget)
      : budget_(budget), left_(budget), check_at_(budget - kCheckEvery) {}
  bool left() const { return left_ > 0; }
  int64_t rest() const { return left_; }  // negative when more was taken

  void take(size_t steps) {
    left_ -= static_cast<int64_t>(steps);
    if (left_ <= check_at_ && budget_ != INT64_MAX) check_clock();
  }

 private:
  static constexpr int64_t kCheckEvery = 512;
  // Factor by which a slice may exceed the time of its steps before the clock ends it: the longest
  // slices, of 2 ms, then end before the 5 ms that a request may have to wait.
  static constexpr int64_t kSlack = 2;
  static constexpr int64_t kLongest = int64_t{1} << 32;  // steps; seven minutes
  static constexpr int64_t kStepNs = 100;

  void check_clock() {
    check_at_ = left_ - kCheckEvery;
    const int64_t now = thread_ns();
    if (!began_) {
      began_ = true;
      until_ = now + std::min(budget_, kLongest) * kSlack * kStepNs;
    } else if (now >= until_) {
      left_ = std::min<int64_t>(left_, 0);
    }
  }

  static int64_t thread_ns() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
  }

  int64_t budget_, left_, check_at_;
  bool began_ = false;
  int64_t until_ = 0;  // in the thread's CPU time
};

}  // namespace kvd
