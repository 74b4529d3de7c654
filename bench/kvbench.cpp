// kvbench: load generator for indexers, slot trackers, selection services and gateways. A run has
// one mode, and prints each result as one line of JSON.
//
//   ingest   engines publish a data set; rate, server CPU and RSS until all of it is queryable
//   hold     the same, then the engines stay up and obey commands on standard input
//   admit    registers workers and live requests with a slot tracker; RSS per request
//   http     closed-loop HTTP load; rate, latencies, server CPU per request
//   engine   a simulated engine with OpenAI's API, for use behind a gateway
//   streams  next turns of conversations, with streamed answers; latencies, gateway CPU
//   rounds   every turn of every conversation once
//   echo     a server that only answers: the shortest round trip on this machine
//   notice   the shortest time from an event to an answer that shows it
//   bodies   prints request bodies, one a line, as `http` would send them
//
// README.md explains the figures.
#include <cstdio>
#include <cstring>
#include <exception>

#include "loadgen/echo.hpp"
#include "loadgen/hold.hpp"
#include "loadgen/ingest.hpp"
#include "loadgen/load.hpp"
#include "loadgen/notice.hpp"
#include "loadgen/options.hpp"
#include "loadgen/sim_engine.hpp"
#include "loadgen/slots.hpp"
#include "loadgen/streams.hpp"

namespace {

using namespace kvbench;

struct Mode {
  const char* name;
  int (*run)(const Options&);
};

constexpr Mode kModes[] = {
    {"ingest", run_ingest}, {"hold", run_hold},       {"admit", run_admit},   {"http", run_http},
    {"engine", run_engine}, {"streams", run_streams}, {"rounds", run_rounds}, {"echo", run_echo},
    {"notice", run_notice}, {"bodies", run_bodies},
};

int usage() {
  std::fprintf(stderr,
               "usage: kvbench ingest|hold|admit|http|engine|streams|rounds|echo|notice|bodies "
               "[--option value]...\n");
  for (const OptionSpec& option : kOptions)
    std::fprintf(stderr, "  --%-14s %s (%s)\n", option.name, option.help, option.fallback);
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  for (const Mode& mode : kModes) {
    if (argc < 2 || std::strcmp(argv[1], mode.name)) continue;
    try {
      return mode.run(Options(argc, argv, 2));
    } catch (const std::exception& error) {
      std::fprintf(stderr, "kvbench %s: %s\n", mode.name, error.what());
      return 1;
    }
  }
  return usage();
}
