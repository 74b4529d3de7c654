// What a slice of long work may still do: steps, and time.
//
// A step is what takes 0.1 us at most; who works counts them. So what a slice does is the same on
// every machine, and small work never reads a clock. But a count is as good as what a step really
// takes: where that is far more (input that nobody has thought of), the slice ends when it has
// taken kSlack times as long as its steps should. No sum of steps can stop everybody else. The time
// is the thread's own: what others take of the core is none of the work, and how it is cut does not
// depend on them.
//
// Costs: a clock read, some 0.2 us, each kCheckEvery steps.
#pragma once

#include <time.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace kvd {

class Steps {
 public:
  // INT64_MAX: all there is, however long it takes.
  explicit Steps(int64_t budget)
      : budget_(budget), left_(budget), check_at_(budget - kCheckEvery) {}
  bool left() const { return left_ > 0; }
  int64_t rest() const { return left_; }  // negative when more was done

  void take(size_t steps) {
    left_ -= static_cast<int64_t>(steps);
    if (left_ <= check_at_ && budget_ != INT64_MAX) check_clock();
  }

 private:
  static constexpr int64_t kCheckEvery = 512;
  // Times that a slice may take of what its steps should take, before the clock ends it.
  static constexpr int64_t kSlack = 5;
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
  int64_t until_ = 0;  // thread's time
};

}  // namespace kvd
