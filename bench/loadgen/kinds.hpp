// The values of `--kind`, and the requests of each kind as connections send them.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "bodies.hpp"
#include "dataset.hpp"
#include "http.hpp"
#include "slots.hpp"

namespace kvbench {

// Returns `count` distinct prompts.
inline std::vector<Tokens> make_prompts(const Options& options, long count) {
  const DataSet data(options);
  const long blocks = options.integer("tokens", 1) / data.block_size;
  const long hits = std::lround(double(blocks) * std::min(1.0, options.number("hit")));
  std::vector<Tokens> prompts;
  for (long i = 0; i < count; i++) prompts.push_back(data.prompt(uint64_t(i), blocks, hits));
  return prompts;
}

// Enough prompts that short ones do not stay in the server's processor caches, and at most about
// 2 MB in all, so that they stay in the client's.
inline long default_prompt_count(const Options& options) {
  constexpr long kLeast = 8, kMost = 256, kAllBytes = 2000000, kBytesPerToken = 7;
  const long prompt_bytes = options.integer("tokens", 1) * kBytesPerToken;
  return std::min(kMost, std::max(kLeast, kAllBytes / prompt_bytes));
}

using BodyMaker = std::function<std::string(const Bodies&, const Tokens&, size_t block_size)>;

struct PromptKind {
  const char* path;
  BodyMaker body;
};

// Kinds of requests that are made from a prompt of tokens; a new kind is a line here.
inline const std::map<std::string, PromptKind>& prompt_kinds() {
  static const std::map<std::string, PromptKind> kinds = {
      {"query",
       {"/query",
        [](const Bodies& bodies, const Tokens& tokens, size_t) { return bodies.query(tokens); }}},
      {"query_by_hash",
       {"/query_by_hash",
        [](const Bodies& bodies, const Tokens& tokens, size_t block_size) {
          return bodies.query_by_hash(local_hashes(tokens, block_size));
        }}},
      {"query_tiered_by_hash",
       {"/query_tiered_by_hash",
        [](const Bodies& bodies, const Tokens& tokens, size_t block_size) {
          return bodies.query_tiered_by_hash(local_hashes(tokens, block_size));
        }}},
      {"select",
       {"/select", [](const Bodies& bodies, const Tokens& tokens,
                      size_t block_size) { return bodies.select(tokens, block_size); }}},
      {"select_tokens",
       {"/select",
        [](const Bodies& bodies, const Tokens& tokens, size_t) { return bodies.query(tokens); }}},
  };
  return kinds;
}

inline const PromptKind& prompt_kind(const std::string& name) {
  const auto found = prompt_kinds().find(name);
  if (found == prompt_kinds().end()) throw std::runtime_error("unknown --kind " + name);
  return found->second;
}

// Kinds of script for slot trackers; a new kind is a line here.
using ScriptMaker = Script (SlotRequests::*)(long number) const;

inline const std::map<std::string, ScriptMaker>& slot_kinds() {
  static const std::map<std::string, ScriptMaker> kinds = {
      {"life", &SlotRequests::life},
      {"potential_loads", &SlotRequests::question},
  };
  return kinds;
}

inline std::vector<Script> make_slot_scripts(const Options& options, long count) {
  const ScriptMaker make = slot_kinds().at(options.text("kind"));
  const SlotRequests requests(options);
  std::vector<Script> scripts;
  for (long number = 0; number < count; number++) scripts.push_back((requests.*make)(number));
  return scripts;
}

inline std::vector<Script> make_prompt_scripts(const Options& options, long count) {
  const PromptKind& kind = prompt_kind(options.text("kind"));
  const Bodies bodies(options);
  const size_t block_size = size_t(options.integer("block-size", 1));
  std::vector<Script> scripts;
  for (const Tokens& prompt : make_prompts(options, count))
    scripts.push_back({{kind.path, kind.body(bodies, prompt, block_size)}});
  return scripts;
}

// Returns a script for each prompt: the whole life of a reservation of the selection service.
inline std::vector<Script> make_reserve_scripts(const Options& options, long count) {
  const Bodies bodies(options);
  const size_t block_size = size_t(options.integer("block-size", 1));
  std::vector<Script> scripts;
  for (const Tokens& prompt : make_prompts(options, count)) {
    const std::string id = request_id(scripts.size());
    const std::string path = "/reservations/" + id;
    scripts.push_back({{"/select_and_reserve", bodies.reserve(id, prompt, block_size)},
                       {path + "/prefill_complete", ""},
                       {path, "", "DELETE"}});
  }
  return scripts;
}

inline bool is_reserve_kind(const Options& options) { return options.text("kind") == "reserve"; }

inline bool is_slot_kind(const Options& options) {
  return slot_kinds().count(options.text("kind")) != 0;
}

inline std::vector<Script> default_scripts(const Options& options) {
  const long connections = options.integer("conns", 1);
  if (is_reserve_kind(options)) {
    const long blocks = options.integer("tokens", 1) / options.integer("block-size", 1);
    const long count = named_script_count(connections, 2 * blocks * kBytesPerHash);
    return make_reserve_scripts(options, count);
  }
  if (is_slot_kind(options))
    return make_slot_scripts(options, SlotRequests(options).script_count(connections));
  return make_prompt_scripts(options, default_prompt_count(options));
}

// Returns `count` scripts of the kind.
inline std::vector<Script> make_scripts(const Options& options, long count) {
  if (is_reserve_kind(options)) return make_reserve_scripts(options, count);
  return is_slot_kind(options) ? make_slot_scripts(options, count)
                               : make_prompt_scripts(options, count);
}

// Rendered scripts: requests in the order in which one connection sends them.
using Requests = std::vector<std::string>;

inline std::vector<Requests> make_requests(const Options& options) {
  const std::string& kind = options.text("kind");
  if (kind == "get") return {{get_request(options.text("path"))}};
  if (kind == "raw") return {{post_request(options.text("path"), options.text("body"))}};
  std::vector<Requests> all;
  for (const Script& script : default_scripts(options)) {
    all.emplace_back();
    for (const Post& post : script) all.back().push_back(render(post));
  }
  return all;
}

}  // namespace kvbench
