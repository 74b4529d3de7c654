// Mode `ingest`: engines publish a data set to a server. Measures how fast the server applies it,
// and at what cost.
#pragma once

#include <vector>

#include "fleet.hpp"

namespace kvbench {

struct Message {
  long worker;
  size_t blocks;
  std::string payload;
};

// All messages of one worker: first its system prompts, whose blocks are the parents of the others,
// then its chains, `kInterleaved` at a time. An engine runs several requests at once, and an index
// that got one whole chain after the other would have less work than with a real engine.
class WorkerFeed {
 public:
  WorkerFeed(const DataSet& data, long worker, long event_blocks, long batch_events)
      : data_(data), worker_(worker), event_blocks_(event_blocks), batch_events_(batch_events) {}

  std::vector<Message> build() {
    for (long prompt = 0; prompt < data_.prompts(); prompt++) {
      Run run = start(prompt);
      while (run.at < data_.prefix) emit(run, data_.prefix);
      prompt_ends_.push_back(run.last_hash);
    }
    constexpr long kInterleaved = 8;
    for (long first = 0; first < data_.chains(); first += kInterleaved)
      emit_chains(first, std::min(first + kInterleaved, data_.chains()));
    flush();
    return std::move(messages_);
  }

 private:
  // A chain while it is written: blocks before `at` are written, the last of them is `last_hash`.
  struct Run {
    long chain, at;
    uint64_t last_hash;
  };

  static Run start(long chain) { return {chain, 0, 0}; }

  Run start_after_prompt(long chain) const {
    if (prompt_ends_.empty()) return start(chain);
    return {chain, data_.prefix, prompt_ends_[size_t(data_.prompt_of(chain))]};
  }

  void emit_chains(long first, long end) {
    std::vector<Run> runs;
    for (long chain = first; chain < end; chain++) runs.push_back(start_after_prompt(chain));
    while (runs.front().at < data_.depth)  // all runs are equally long
      for (Run& run : runs) emit(run, data_.depth);
  }

  void emit(Run& run, long end) {
    const long count = std::min(event_blocks_, end - run.at);
    const Tokens tokens = data_.tokens(worker_, run.chain, run.at, count);
    const uint64_t* parent = run.at ? &run.last_hash : nullptr;
    const Hashes hashes = sequence_hashes(tokens, size_t(data_.block_size), parent);
    batch_.stored(hashes, parent, tokens, data_.block_size);
    run.last_hash = hashes.back();
    run.at += count;
    if (long(batch_.events()) >= batch_events_) flush();
  }

  void flush() {
    if (!batch_.events()) return;
    const size_t blocks = batch_.blocks_stored();
    messages_.push_back({worker_, blocks, batch_.take()});
  }

  const DataSet& data_;
  long worker_, event_blocks_, batch_events_;
  Batch batch_;
  std::vector<uint64_t> prompt_ends_;
  std::vector<Message> messages_;
};

// Returns the messages of all workers, one of each in turn.
inline std::vector<Message> build_messages(const DataSet& data, const Options& options) {
  const long event_blocks = options.integer("event-blocks", 1);
  const long batch_events = options.integer("batch-events", 1);
  std::vector<std::vector<Message>> feeds;
  for (long worker = 0; worker < data.workers; worker++)
    feeds.push_back(WorkerFeed(data, worker, event_blocks, batch_events).build());
  std::vector<Message> messages;
  for (size_t i = 0; i < feeds[0].size(); i++)  // all feeds are equally long
    for (auto& feed : feeds) messages.push_back(std::move(feed[i]));
  return messages;
}

struct Fill {
  size_t messages = 0, blocks = 0, bytes = 0;
  double seconds = 0;
  Usage fresh, before, after;  // before the workers are registered, before and after the events
  long settled_rss = 0;
};

// Publishes all messages and waits until they are applied. At most `window` blocks are published
// ahead of the server (0: no bound).
inline void publish_all(Fleet& fleet, const std::vector<Message>& messages, size_t window) {
  size_t ahead = 0;
  for (const Message& message : messages) {
    fleet.publish(message.worker, message.payload);
    ahead += message.blocks;
    if (!window || ahead < window) continue;
    fleet.wait_applied();
    ahead = 0;
  }
  fleet.wait_applied();
}

// Sentinels prove that the server has seen all events; this proves, for two chains of each worker,
// that it has kept their blocks.
inline void check_filled(Fleet& fleet, const DataSet& data) {
  for (long worker = 0; worker < data.workers; worker++)
    for (long chain : {0L, data.chains() - 1}) fleet.check_chain(worker, chain);
}

// Takes the messages, as they need much memory. They are built before there is a fleet, since a
// server closes a connection that asks for nothing meanwhile.
inline Fill fill(Fleet& fleet, const DataSet& data, const std::vector<Message> messages,
                 const Options& options) {
  constexpr double kTickSettle = 0.02;  // seconds: two clock ticks, so that used CPU is counted
  const ServerProcess server(options.integer("pid", 0));
  Fill fill;
  fill.messages = messages.size();
  for (const Message& message : messages) {
    fill.blocks += message.blocks;
    fill.bytes += message.payload.size();
  }
  fill.fresh = server.usage();
  fleet.register_all();
  fleet.wait_applied();  // so that the set-up by the first requests and events is not measured
  sleep_seconds(kTickSettle);
  fill.before = server.usage();
  const double start = now();
  publish_all(fleet, messages, size_t(options.integer("window", 0)));
  fill.seconds = now() - start;
  sleep_seconds(kTickSettle);
  fill.after = server.usage();
  sleep_seconds(double(options.integer("rest", 0)));
  if (server.known()) fill.settled_rss = server.settled_rss_bytes();
  check_filled(fleet, data);
  return fill;
}

inline void print_fill(const Fill& fill, long workers, const ServerProcess& server) {
  const double blocks = double(fill.blocks);
  JsonLine line;
  line.text("mode", "ingest").count("blocks", fill.blocks).count("messages", fill.messages);
  line.count("bytes", fill.bytes).number("wall_s", fill.seconds);
  line.number("blocks_per_s", blocks / fill.seconds);
  if (server.known()) {
    const double cpu = fill.after.cpu_s() - fill.before.cpu_s();
    const double grown = double(fill.settled_rss - fill.before.rss_bytes);
    line.number("cpu_s", cpu).number("cpu_us_per_block", cpu / blocks * 1e6);
    line.number("user_s", fill.after.user_s - fill.before.user_s);
    line.number("system_s", fill.after.system_s - fill.before.system_s);
    line.number("rss_before_mib", double(fill.before.rss_bytes) / (1 << 20));
    line.number("rss_after_mib", double(fill.settled_rss) / (1 << 20));
    line.number("rss_bytes_per_pair", grown / blocks);
    const double of_all = double(fill.settled_rss - fill.fresh.rss_bytes);
    line.number("rss_kib_per_worker", of_all / double(workers) / 1024);
  }
  line.print();
}

inline int run_ingest(const Options& options) {
  const DataSet data(options);
  std::vector<Message> messages = build_messages(data, options);
  Fleet fleet(options, data);
  const ServerProcess server(options.integer("pid", 0));
  print_fill(fill(fleet, data, std::move(messages), options), data.workers, server);
  return 0;
}

}  // namespace kvbench
