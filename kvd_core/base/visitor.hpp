// A visitor for callers without lambdas: a function and the state to call it with.
#pragma once

#include <cstdint>

namespace kvd {

template <class State>
class Visitor {
 public:
  using Call = void (*)(State*, uint32_t, double);

  Visitor(State* state, Call call) : state_(state), call_(call) {}

  void operator()(uint32_t count, double value) const { call_(state_, count, value); }

 private:
  State* state_;
  Call call_;
};

}  // namespace kvd
