// What prompts have said of themselves: those that questions were about, and those that engines
// have told of. Where the two sides differ, nothing matches, and here is how they differ.
//
//   prompts   all of them, by their tokens; questions by hash say nothing
//   salted    of these, with a cache salt       adapted   of these, with an adapter
//   telling   of these, by engines that would have told of a salt
//   first     of the last kKept, their first tokens, one after the other round the array
//
// Costs: `note` one store and three additions a prompt.
#pragma once

#include <cstdint>

namespace kvd {

struct Said {
  // First tokens kept: enough to tell a template of one side from that of the other.
  static constexpr uint32_t kKept = 16;

  uint64_t prompts = 0;
  uint64_t salted = 0;
  uint64_t adapted = 0;
  uint64_t telling = 0;
  uint32_t first[kKept] = {};

  void note(uint32_t token, bool is_salted, bool is_adapted, bool tells_salts) noexcept {
    first[prompts % kKept] = token;
    ++prompts;
    salted += is_salted;
    adapted += is_adapted;
    telling += tells_salts;
  }
};

}  // namespace kvd
