// Slot tracker: prompts as sequence hashes, the requests made of them, and mode `admit`, which
// registers workers and leaves live requests behind.
//
//   live request n     [== system prompt ==][------ own blocks ------]      on worker n mod W
//   question           [== system prompt ==][- of a live one -][novel]      `hit` of it is live
//   passing request    [== system prompt ==][------ own blocks ------]      add, complete, free
//
// The system prompt, `prefix` blocks, is the same in all. Every other request of a worker has
// completed its prefill. Hashes are well-mixed numbers, since a tracker never sees their tokens.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "bodies.hpp"
#include "dataset.hpp"
#include "http.hpp"
#include "measure.hpp"

namespace kvbench {

struct Post {
  std::string path, body;
  const char* method = "POST";
};

constexpr long kBytesPerHash = 20;  // in a body

// Requests that one connection sends in order, each once the one before is answered.
using Script = std::vector<Post>;

// Returns an id in the form of a UUID, as routers name their requests.
inline std::string request_id(uint64_t source) {
  char text[40];
  const uint64_t high = scramble(source), low = scramble(~source);
  std::snprintf(text, sizeof text, "%08x-%04x-%04x-%04x-%012llx", unsigned(high >> 32),
                unsigned(high >> 16 & 0xffff), unsigned(high & 0xffff), unsigned(low >> 48),
                low & 0xffffffffffffULL);
  return text;
}

// Returns the number of distinct scripts for `connections`: 2 MB in all, as for the other kinds. A
// script names its request, so that no two connections may run it at once: the number is a multiple
// of `connections`.
inline long named_script_count(long connections, long body_bytes) {
  constexpr long kMost = 256, kAllBytes = 2000000;
  const long wanted = std::min(kMost, kAllBytes / body_bytes);
  return (std::max(1L, wanted) + connections - 1) / connections * connections;
}

class SlotRequests {
 public:
  explicit SlotRequests(const Options& options)
      : workers(options.integer("workers", 1)),
        live(options.integer("live", 1)),
        block_size(options.integer("block-size", 1)),
        blocks_(options.integer("tokens", block_size) / block_size),
        prefix_(std::min(blocks_, options.integer("prefix", 0))),
        hits_(std::lround(double(blocks_) * std::min(1.0, options.number("hit")))),
        bodies_(options) {}

  Post registration(long worker) const {
    return {"/register", bodies_.slot_worker(worker + 1, block_size)};
  }

  // Books live request `number`, and completes its prefill if it is to be in decode.
  Script admission(long number) const {
    Script script{add(uint64_t(number), number % workers)};
    if (number / workers % 2 == 0) script.push_back(complete(uint64_t(number)));
    return script;
  }

  // The whole life of a request that is not among the live ones.
  Script life(long number) const {
    const uint64_t source = kPassing + uint64_t(number);
    const long worker = long(scramble(source) % uint64_t(workers));
    return {
        add(source, worker), complete(source), {"/free", bodies_.slot_step(request_id(source))}};
  }

  Script question(long number) const {
    const uint64_t asked = kAsked + uint64_t(number);
    Hashes hashes = prompt(scramble(asked) % uint64_t(live), hits_);
    for (long block = hits_; block < blocks_; block++) hashes.push_back(own(asked, block));
    return {{"/potential_loads", bodies_.projection(hashes, (blocks_ - hits_) * block_size)}};
  }

  long script_count(long connections) const {
    return named_script_count(connections, blocks_ * kBytesPerHash);
  }

  const long workers, live, block_size;

 private:
  // Numbers from which hashes and ids are drawn; live request n draws from n itself.
  static constexpr uint64_t kPassing = 1ULL << 40, kAsked = 2ULL << 40, kSystem = 3ULL << 40;

  static uint64_t own(uint64_t source, long block) {
    return scramble(scramble(source) + uint64_t(block));
  }

  // Returns the first `count` hashes of a request's prompt.
  Hashes prompt(uint64_t source, long count) const {
    Hashes hashes;
    for (long block = 0; block < count; block++)
      hashes.push_back(own(block < prefix_ ? kSystem : source, block));
    return hashes;
  }

  // The system prompt counts as cached, all other tokens as new.
  Post add(uint64_t source, long worker) const {
    const Hashes hashes = prompt(source, blocks_);
    const long new_tokens = (blocks_ - prefix_) * block_size;
    return {"/add", bodies_.booking(request_id(source), worker + 1, hashes, new_tokens)};
  }

  Post complete(uint64_t source) const {
    return {"/prefill_complete", bodies_.slot_step(request_id(source))};
  }

  long blocks_, prefix_, hits_;
  Bodies bodies_;
};

inline std::string render(const Post& post) {
  if (!post.body.empty()) return post_request(post.path, post.body);
  return bodiless_request(post.method, post.path);
}

inline int run_admit(const Options& options) {
  const SlotRequests requests(options);
  const ServerProcess server(options.integer("pid", 0));
  Caller caller(options.text("url"));
  for (long worker = 0; worker < requests.workers; worker++)
    caller.call(render(requests.registration(worker)));
  const Usage before = server.usage();
  const double start = now();
  for (long number = 0; number < requests.live; number++)
    for (const Post& post : requests.admission(number)) caller.call(render(post));
  JsonLine line;
  line.text("mode", "admit").count("live", size_t(requests.live));
  line.number("wall_s", now() - start);
  if (server.known()) {
    const double settled = double(server.settled_rss_bytes());
    line.number("rss_after_mib", settled / (1 << 20));
    line.number("rss_kib_per_request",
                (settled - double(before.rss_bytes)) / double(requests.live) / 1024);
  }
  line.print();
  return 0;
}

}  // namespace kvbench
