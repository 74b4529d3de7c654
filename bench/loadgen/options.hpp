// Command-line options: one table of all options, with their defaults and meanings.
//
// An unknown option is an error: with a misspelt --conns the default would be measured, and the
// figures would look like a result.
#pragma once

#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace kvbench {

struct OptionSpec {
  const char* name;
  const char* fallback;
  const char* help;
};

inline constexpr OptionSpec kOptions[] = {
    {"url", "127.0.0.1:8090",
     "server: HOST:PORT or unix:/path; of ingest, hold and streams also several, by commas"},
    {"pid", "0", "process of the server, for its CPU and RSS; 0 leaves those figures out"},
    {"model", "bench", "model name to register and to ask for"},
    // data set
    {"workers", "8", "workers (one engine socket each)"},
    {"pairs", "1000000", "(worker, block) pairs in all"},
    {"depth", "1024", "blocks in a chain"},
    {"prefix", "256", "leading blocks of a chain or prompt: system prompt shared by all workers"},
    {"block-size", "16", "tokens in a block"},
    {"replicated", "0", "1: every worker holds the same chains"},
    {"seed", "1", "number the token ids are derived from"},
    // ingest and hold
    {"face", "indexer", "indexer | select: the service that is filled"},
    {"event-blocks", "8", "blocks in an event"},
    {"batch-events", "1", "events in a batch (one ZMQ message)"},
    {"rest", "0", "seconds between the last applied event and the look at RSS"},
    {"window", "0", "blocks published but not yet seen applied, at most; 0: no bound"},
    {"timeout", "120", "seconds until an unapplied event is an error"},
    // admit, and http and bodies of the kinds life and potential_loads
    {"live", "32", "requests that stay live, over all workers"},
    // http
    {"kind", "query",
     "query | query_by_hash | query_tiered_by_hash | select | select_tokens | reserve | life | "
     "potential_loads | get | raw"},
    {"tokens", "2048", "tokens in a prompt"},
    {"hit", "0.5", "leading share of a prompt that is indexed, or live"},
    {"conns", "1", "connections"},
    {"secs", "3", "measured seconds"},
    {"warm", "0.5", "seconds before the measurement starts"},
    {"spaces", "0", "1: JSON arrays with \", \" between items, as Python's json.dumps writes them"},
    {"path", "/health", "path of kinds get and raw"},
    {"body", "{}", "body of kind raw (POST, application/json)"},
    // echo and notice
    {"awake", "0", "1: polls for what comes next in place of sleeping until it comes"},
    {"samples", "2000", "events of notice"},
    // engine and echo
    {"port", "8000", "port on 127.0.0.1"},
    {"cache-blocks", "65536", "blocks in its prefix cache"},
    {"prefill-us", "0", "microseconds for each token of a prompt that is not cached"},
    // streams and conversations
    {"rate", "0", "requests a second; 0: a connection asks again as soon as it is answered"},
    {"chats", "64", "conversations"},
    {"body-bytes", "2048", "bytes of a request's body, about"},
    {"frames", "1", "frames of an answer's stream, 200 bytes each"},
    {"pace-us", "0", "microseconds between two frames; 0: as fast as they are taken"},
    {"turns", "6", "turns of a conversation"},
    {"prompts", "8", "system prompts that conversations share"},
    {"system-tokens", "976", "tokens of a system prompt"},
    {"turn-tokens", "64", "tokens of a message of a user, and of an answer"},
    // bodies
    {"count", "16", "prompts whose bodies to print"},
};

class Options {
 public:
  // Reads `--name value` pairs from argv[first] on; throws on anything else.
  Options(int argc, char** argv, int first) {
    for (const OptionSpec& spec : kOptions) values_[spec.name] = spec.fallback;
    for (int i = first; i < argc; i += 2) {
      const std::string flag = argv[i];
      const std::string name = flag.rfind("--", 0) == 0 ? flag.substr(2) : "";
      if (!values_.count(name)) throw std::runtime_error("unknown option " + flag);
      if (i + 1 == argc) throw std::runtime_error("no value for " + flag);
      values_[name] = argv[i + 1];
    }
  }

  const std::string& text(const std::string& name) const { return values_.at(name); }

  // The parts of a text between its commas, at least one.
  std::vector<std::string> list(const std::string& name) const {
    std::vector<std::string> parts(1);
    for (char c : values_.at(name)) {
      if (c == ',') parts.emplace_back();
      else parts.back().push_back(c);
    }
    return parts;
  }

  // A whole number >= `least`.
  long integer(const std::string& name, long least) const {
    char* end = nullptr;
    const std::string& text = values_.at(name);
    const long value = std::strtol(text.c_str(), &end, 10);
    if (text.empty() || *end || value < least) bad(name, text);
    return value;
  }

  // A number >= 0.
  double number(const std::string& name) const {
    char* end = nullptr;
    const std::string& text = values_.at(name);
    const double value = std::strtod(text.c_str(), &end);
    if (text.empty() || *end || !(value >= 0)) bad(name, text);
    return value;
  }

 private:
  [[noreturn]] static void bad(const std::string& name, const std::string& text) {
    throw std::runtime_error("bad value for --" + name + ": " + text);
  }

  std::map<std::string, std::string> values_;
};

}  // namespace kvbench
