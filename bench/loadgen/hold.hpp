// Mode `hold`: fill a server as `ingest` does, then keep the engines alive and obey commands on
// standard input.
#pragma once

#include <deque>
#include <iostream>
#include <sstream>
#include <vector>

#include "ingest.hpp"

namespace kvbench {

// Steady state of a busy cache: it stores new root chains, and removes the oldest ones again.
class Churn {
 public:
  Churn(Fleet& fleet, const DataSet& data) : fleet_(fleet), data_(data) {}

  // Calls `store` and prints its result.
  void run(double rate, double seconds, long chain_blocks) {
    const double start = now();
    const Stored done = store(rate, seconds, chain_blocks);
    JsonLine line;
    line.text("mode", "churn").count("stored", done.blocks).count("late", done.late);
    line.number("blocks_per_s", double(done.blocks) / (now() - start)).print();
  }

  struct Stored {
    size_t blocks = 0, late = 0;
  };

  // Stores `rate` blocks per second in chains of `chain_blocks`, for `seconds`.
  Stored store(double rate, double seconds, long chain_blocks) {
    constexpr double kLate = 0.05;  // seconds behind schedule that count as not keeping up
    const double start = now();
    Stored done;
    while (now() - start < seconds) {
      store_chain(chain_blocks);
      done.blocks += size_t(chain_blocks);
      const double wait = start + double(done.blocks) / rate - now();
      if (wait < -kLate) done.late++;
      sleep_seconds(wait);
    }
    return done;
  }

 private:
  struct Chain {
    long worker;
    Hashes hashes;
  };

  void store_chain(long blocks) {
    constexpr size_t kHeld = 2000;  // chains; a few seconds' worth, as in a full GPU cache
    Tokens tokens;
    const uint64_t number = scramble(++chains_stored_);
    for (long i = 0; i < blocks * data_.block_size; i++)
      tokens.push_back(kChurnTokens + uint32_t(scramble(number + uint64_t(i)) % kVocabulary));
    Chain chain{long(number % uint64_t(data_.workers)),
                sequence_hashes(tokens, size_t(data_.block_size), nullptr)};
    Batch batch;
    batch.stored(chain.hashes, nullptr, tokens, data_.block_size);
    fleet_.publish(chain.worker, batch.take());
    held_.push_back(std::move(chain));
    if (held_.size() > kHeld) remove_oldest();
  }

  void remove_oldest() {
    Batch batch;
    batch.removed(held_.front().hashes);
    fleet_.publish(held_.front().worker, batch.take());
    held_.pop_front();
  }

  Fleet& fleet_;
  const DataSet& data_;
  std::deque<Chain> held_;
  uint64_t chains_stored_ = 0;
};

// Measures the time from publishing one block to finding it, `samples` times: on an idle server, or
// in between chains of `chain_blocks` blocks at `rate` blocks/s.
inline void measure_fresh(Fleet& fleet, const DataSet& data, Churn& churn, long samples,
                          double rate, long chain_blocks) {
  constexpr double kApart = 0.003;  // seconds, after which both ends have gone back to sleep
  std::vector<float> micros;
  for (long i = 0; i < samples; i++) {
    if (rate > 0) churn.store(rate, kApart, chain_blocks);
    else sleep_seconds(kApart);
    micros.push_back(float(fleet.publish_and_find(i % data.workers) * 1e6));
  }
  JsonLine line;
  line.text("mode", "fresh").count("samples", size_t(samples));
  line.number("p50_us", quantile(micros, 0.50)).number("p99_us", quantile(micros, 0.99)).print();
}

inline void measure_sync(Fleet& fleet) {
  const double start = now();
  fleet.wait_applied();
  JsonLine().text("mode", "sync").number("seconds", now() - start).print();
}

// Obeys the lines `churn RATE SECONDS BLOCKS`, `fresh SAMPLES [RATE BLOCKS]`, `sync`, `quit`. All
// but the last are answered by one line.
inline void obey(Fleet& fleet, const DataSet& data) {
  Churn churn(fleet, data);
  for (std::string line; std::getline(std::cin, line) && line != "quit";) {
    std::istringstream words(line);
    std::string command;
    double rate = 0, seconds = 0;
    long count = 0;
    words >> command;
    fleet.reconnect();
    if (command == "churn" && words >> rate >> seconds >> count && rate > 0 && count > 0)
      churn.run(rate, seconds, count);
    else if (command == "fresh" && words >> count && count > 0) {
      long blocks = 0;
      words >> rate >> blocks;
      measure_fresh(fleet, data, churn, count, rate, blocks);
    } else if (command == "sync") measure_sync(fleet);
    else throw std::runtime_error("unknown command: " + line);
  }
}

inline int run_hold(const Options& options) {
  const DataSet data(options);
  std::vector<Message> messages = build_messages(data, options);
  Fleet fleet(options, data);
  const ServerProcess server(options.integer("pid", 0));
  print_fill(fill(fleet, data, std::move(messages), options), data.workers, server);
  obey(fleet, data);
  return 0;
}

}  // namespace kvbench
