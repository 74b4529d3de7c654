// Engines and the servers that they are registered with: register, publish, wait until applied.
#pragma once

#include <deque>
#include <string>

#include "bodies.hpp"
#include "dataset.hpp"
#include "engines.hpp"
#include "events.hpp"
#include "http.hpp"
#include "measure.hpp"

namespace kvbench {

// Returns how often a reply holds `part`. Blanks do not count, as JSON writers place them freely.
inline long occurrences(const std::string& reply, const std::string& part) {
  std::string dense;
  for (char c : reply)
    if (c != ' ') dense.push_back(c);
  long count = 0;
  for (size_t at = dense.find(part); at != std::string::npos; at = dense.find(part, at + 1))
    count++;
  return count;
}

class Fleet {
 public:
  Fleet(const Options& options, const DataSet& data)
      : data_(data),
        bodies_(options),
        engines_(data.workers),
        selects_(options.text("face") == "select"),
        timeout_(options.number("timeout")) {
    for (const std::string& url : options.list("url")) servers_.emplace_back(url);
  }

  void register_all() {
    for (Caller& server : servers_)
      for (long worker = 0; worker < engines_.count(); worker++) server.call(registration(worker));
    engines_.wait_subscribed(servers_.size());
  }

  void publish(long worker, const std::string& payload) { engines_.publish(worker, payload); }

  // Waits until everything published so far is applied by all servers. A server applies each
  // worker's events in order, so it is enough to publish a sentinel block on every worker and to
  // wait for all of them.
  void wait_applied() {
    const Sentinel sentinel = next_sentinel();
    for (long worker = 0; worker < engines_.count(); worker++) publish(worker, sentinel.payload);
    // Long enough that these queries cost the server next to nothing beside applying events, and
    // short against a run of a second.
    constexpr double kPollEvery = 0.005;
    for (Caller& server : servers_) wait_visible(server, sentinel, engines_.count(), kPollEvery);
  }

  // Publishes one block on `worker` and asks the first server for it without pauses; returns the
  // seconds until it is found.
  double publish_and_find(long worker) {
    const Sentinel sentinel = next_sentinel();
    const double start = now();
    publish(worker, sentinel.payload);
    wait_visible(servers_.front(), sentinel, 1, 0);
    return now() - start;
  }

  // Asks all servers for a whole chain; throws unless at least one worker holds all of it.
  void check_chain(long worker, long chain) {
    const Tokens tokens = data_.tokens(worker, chain, 0, data_.depth);
    for (Caller& server : servers_) {
      const std::string reply = server.call(question(tokens));
      if (!occurrences(reply, found(data_.depth)))
        throw std::runtime_error("chain " + std::to_string(chain) + " of worker " +
                                 std::to_string(worker + 1) +
                                 " is not indexed in full: " + reply.substr(0, 300));
    }
  }

  // To be called after a long pause.
  void reconnect() {
    for (Caller& server : servers_) server.reconnect();
  }

 private:
  struct Sentinel {
    std::string payload, request;
  };

  Sentinel next_sentinel() {
    Tokens tokens;
    for (long slot = 0; slot < data_.block_size; slot++)
      tokens.push_back(kSentinelTokens + uint32_t(sentinels_ * data_.block_size + slot));
    sentinels_++;
    Batch batch;
    batch.stored(local_hashes(tokens, size_t(data_.block_size)), nullptr, tokens, data_.block_size);
    return {batch.take(), question(tokens)};
  }

  void wait_visible(Caller& server, const Sentinel& sentinel, long workers, double poll_every) {
    const double deadline = now() + timeout_;
    while (occurrences(server.call(sentinel.request), found(1)) < workers) {
      if (now() > deadline) throw std::runtime_error("events were not applied in time");
      sleep_seconds(poll_every);
    }
  }

  std::string registration(long worker) const {
    const std::string& endpoint = engines_.endpoint(worker);
    if (selects_)
      return post_request("/workers",
                          bodies_.catalog_worker(worker + 1, endpoint, data_.block_size));
    return post_request("/register", bodies_.registration(worker + 1, endpoint, data_.block_size));
  }

  std::string question(const Tokens& tokens) const {
    return post_request(selects_ ? "/overlap_scores" : "/query", bodies_.query(tokens));
  }

  // Returns the part of a reply that shows that a worker holds all `blocks` blocks asked for.
  std::string found(long blocks) const {
    if (selects_) return "\"device_blocks\":" + std::to_string(blocks) + ",";
    return "\"longest_matched\":" + std::to_string(blocks * data_.block_size);
  }

  const DataSet& data_;
  Bodies bodies_;
  std::deque<Caller> servers_;
  Engines engines_;
  bool selects_;  // the server is a selection service, else an indexer
  double timeout_;
  long sentinels_ = 0;
};

}  // namespace kvbench
