// Questions of a gateway's clients: the turns of conversations, as bodies of chat completions.
//
//   system prompt p | user 0 | assistant 0 | user 1 | ...      turn t ends with user t
//
// Words are letters and blanks, so that a body has about kTokenBytes bytes for each of its tokens.
#pragma once

#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "options.hpp"
#include "prefix_cache.hpp"

namespace kvbench {

// Returns a text of `size` bytes; each `number` has another one.
inline std::string words(uint64_t number, size_t size) {
  std::mt19937_64 random(number);
  std::string text;
  text.reserve(size + 12);
  while (text.size() < size) {
    for (uint64_t bits = random(), n = 3 + bits % 8; n > 0; n--, bits >>= 5)
      text.push_back(char('a' + (bits >> 8) % 26));
    text.push_back(' ');
  }
  text.resize(size);
  return text;
}

inline std::string message(const char* role, const std::string& content) {
  return std::string("{\"role\":\"") + role + "\",\"content\":\"" + content + "\"}";
}

// Returns a body that asks for an answer of `frames` frames to these messages.
inline std::string chat_body(const Options& options, long frames, const std::string& messages) {
  return "{\"model\":\"" + options.text("model") +
         "\",\"stream\":true,\"max_tokens\":" + std::to_string(frames) +
         ",\"seed\":" + std::to_string(options.integer("pace-us", 0)) + ",\"messages\":[" +
         messages + "]}";
}

// Source of request bodies. `next` returns false if no body is due yet, or all have been sent.
class Questions {
 public:
  virtual ~Questions() = default;
  virtual bool next(std::string& body) = 0;
  virtual void answered() {}
  virtual bool ended() const { return false; }
};

// First one turn of each conversation, then without end the second turn of each, always with other
// texts. A server that has seen the first turns knows all but the last two messages of each body.
class FollowUps : public Questions {
 public:
  explicit FollowUps(const Options& options)
      : options_(options),
        frames_(options.integer("frames", 1)),
        first_(uint64_t(options.integer("seed", 0)) << 40) {
    const size_t bytes = size_t(options.integer("body-bytes", 512)) - kRest;
    for (long chat = 0; chat < options.integer("chats", 1); chat++)
      known_.push_back(message("system", words(first_ + uint64_t(2 * chat), bytes / 2)) + "," +
                       message("user", words(first_ + uint64_t(2 * chat + 1), bytes / 2)));
  }

  bool introduced() const { return asked_ >= known_.size() && open_ == 0; }

  bool next(std::string& body) override {
    const std::string& known = known_[asked_ % known_.size()];
    const bool first = asked_ < known_.size();
    if (!first && !introduced_ && !(introduced_ = introduced())) return false;
    asked_++;
    open_++;
    body = first ? chat_body(options_, 1, known)
                 : chat_body(options_, frames_,
                             known + "," + message("assistant", words(first_ - 2 * asked_, 60)) +
                                 "," + message("user", words(first_ - 2 * asked_ - 1, 100)));
    return true;
  }

  void answered() override { open_--; }

 private:
  static constexpr size_t kRest = 400;  // approximate bytes of a body beside the known messages

  const Options& options_;
  long frames_;
  uint64_t first_;  // lowest number of its texts
  std::vector<std::string> known_;
  size_t asked_ = 0, open_ = 0;
  bool introduced_ = false;
};

// Every turn of every conversation once: all first turns in random order, then all second ones, and
// so on. So the cached blocks of a conversation have to outlive a turn of all others.
class Rounds : public Questions {
 public:
  explicit Rounds(const Options& options)
      : options_(options),
        frames_(options.integer("frames", 1)),
        turns_(options.integer("turns", 1)),
        message_bytes_(size_t(options.integer("turn-tokens", 1)) * kTokenBytes),
        first_(uint64_t(options.integer("seed", 0)) << 40),
        random_(first_),
        order_(size_t(options.integer("chats", 1))) {
    const long prompts = options.integer("prompts", 1);
    const size_t bytes = size_t(options.integer("system-tokens", 1)) * kTokenBytes;
    for (size_t chat = 0; chat < order_.size(); chat++)
      chats_.push_back(message("system", words(first_ + chat % size_t(prompts), bytes)));
    std::iota(order_.begin(), order_.end(), size_t(0));
  }

  bool next(std::string& body) override {
    if (at_ == order_.size()) {
      if (open_ > 0) return false;
      at_ = 0;
      turn_++;
    }
    if (ended()) return false;
    if (at_ == 0) std::shuffle(order_.begin(), order_.end(), random_);
    const size_t chat = order_[at_++];
    std::string& messages = chats_[chat];
    const uint64_t number = first_ + ((chat + 1) << 20) + (uint64_t(turn_) << 1);
    if (turn_ > 0) messages += "," + message("assistant", words(number, message_bytes_));
    messages += "," + message("user", words(number + 1, message_bytes_));
    body = chat_body(options_, frames_, messages);
    open_++;
    return true;
  }

  void answered() override { open_--; }
  bool ended() const override {
    return turn_ == turns_ || (turn_ == turns_ - 1 && at_ == order_.size() && open_ == 0);
  }

 private:
  const Options& options_;
  long frames_, turns_, turn_ = 0;
  size_t message_bytes_;
  uint64_t first_;  // lowest number of its texts
  std::mt19937_64 random_;
  std::vector<size_t> order_;
  std::vector<std::string> chats_;  // messages so far
  size_t at_ = 0, open_ = 0;
};

}  // namespace kvbench
