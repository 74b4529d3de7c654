// Speaks ZMTP 3 as a subscriber, without a socket: bytes in, messages and replies out.
//
//   engine                                 kvd
//   greeting, 64 bytes    ───────────>  <───────────   greeting: version 3.1, mechanism NULL
//   READY, Socket-Type    ───────────>  <───────────   READY, then one subscription per topic
//   messages, PING        ───────────>  <───────────   PONG; PING if the engine has been silent
//
//   a frame   [flags: 1 more, 2 long, 4 command][size: 1 byte, 8 if long][body]
//   a message [frame, more] ... [frame]; a command is a frame of its own, and libzmq sends PING
//             between the frames of a message, too
//
// All received bytes are in one view. Bytes from `begin_` on are unused. The first `scanned_` of
// these are whole frames of a message that is not complete yet; they are not scanned again.
//
//   used    │ frame frame │ part of a frame
//           ^ begin_      ^ begin_ + scanned_
//
// Invariants
//   1. No frame's header is scanned twice, so the cost of a message of many frames stays linear.
//   2. A message beyond its bound, together with the commands between its frames, ends the
//      connection at the first header that shows it; claimed lengths allocate nothing.
//   3. Unsent bytes are bounded: greeting, READY and subscriptions are sent once, and a PONG or
//      PING is only added when all bytes before it have been sent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvd {

class ZmtpSubscriber {
 public:
  // Faults of a connection that ended, or was too slow, without violating the protocol.
  static constexpr const char* kLost = "connection lost";
  static constexpr const char* kNoHandshake = "handshake failed";
  static constexpr const char* kTooLarge = "message too large";  // for the bound of its size

  enum class Step {
    more,     // more bytes are needed; all usable ones are used
    joined,   // the handshake is done
    message,  // a whole message is in the view (each_frame)
    broken,   // fault() says why
  };

  static constexpr size_t kGreeting = 64;
  static constexpr size_t kMaxCommand = 64 * 1024;  // bytes of one command, at most
  // Bytes of a message beside its largest frame, with the commands between its frames.
  static constexpr size_t kMaxBesides = 64 * 1024;

  ZmtpSubscriber(size_t max_frame, std::vector<std::string> topics)
      : max_frame_(max_frame), topics_(std::move(topics)) {
    std::string greeting(kGreeting, '\0');
    greeting[0] = '\xff', greeting[9] = '\x7f', greeting[10] = 3, greeting[11] = 1;
    greeting.replace(12, 4, "NULL");
    unsent_ = std::move(greeting);
  }

  bool joined() const { return phase_ == Phase::open; }
  const char* fault() const { return fault_; }  // null while nothing is wrong
  bool is_too_large() const { return fault_ == kTooLarge; }
  bool answers_pings() const { return minor_ >= 1; }
  std::string& unsent() { return unsent_; }

  // The position in the view where unused bytes begin; a returned message counts as used.
  size_t unused_from() const { return whole_ ? begin_ + scanned_ : begin_; }

  // Notes that the view has moved, and begins with the unused bytes now.
  void moved() {
    if (whole_) whole_ = false, scanned_ = frames_ = 0;
    begin_ = 0;
  }

  // Continues in the view, which is that of the last call, moved or with more bytes at its end.
  Step next(const uint8_t* view, size_t size) {
    if (whole_) whole_ = false, begin_ += scanned_, scanned_ = frames_ = 0;
    while (phase_ != Phase::broken) {
      const uint8_t* at = view + begin_ + scanned_;
      const size_t left = size - begin_ - scanned_;
      if (phase_ == Phase::greeting) {
        if (!greet(at, left)) break;
        continue;
      }
      Frame frame;
      if (!header(at, left, frame)) break;
      if (!fits(frame)) {
        fail(joined() && !frame.command && frame.size != kNoSize ? kTooLarge : kProtocol);
        break;
      }
      if (left < frame.header + frame.size) break;
      if (frame.command) {
        if (frames_) scanned_ += frame.whole();  // it stays among the message's frames, unread
        else begin_ += frame.whole();
        if (command(at + frame.header, frame.size)) return Step::joined;
        continue;
      }
      if (phase_ != Phase::open) {
        fail(kHandshake);
        break;
      }
      ++frames_;
      scanned_ += frame.whole();
      if (!frame.more) return whole_ = true, Step::message;
    }
    return phase_ == Phase::broken ? Step::broken : Step::more;
  }

  // Calls `take(data, size)` with each frame of the whole message in the view.
  template <class Take>
  void each_frame(const uint8_t* view, Take&& take) const {
    const uint8_t* at = view + begin_;
    const uint8_t* end = at + scanned_;
    while (at < end) {
      Frame frame;
      header(at, size_t(end - at), frame);
      if (!frame.command) take(at + frame.header, frame.size);
      at += frame.whole();
    }
  }

  void ping() {
    if (unsent_.empty()) append_command("PING", std::string_view("\0\0", 2));
  }

  void unsubscribe() {
    for (const std::string& topic : topics_) append_topic(topic, false);
  }

  void lost() { fail(joined() ? kLost : kNoHandshake); }

 private:
  enum class Phase { greeting, ready, open, broken };
  struct Frame {
    size_t header = 0, size = 0;
    bool more = false, command = false;
    size_t whole() const { return header + size; }
  };

  static constexpr size_t kNoSize = SIZE_MAX - 16;  // of a frame with unknown flags: fits nowhere
  static constexpr const char* kHandshake = "protocol error in the handshake";
  static constexpr const char* kProtocol = "protocol error";

  void fail(const char* why) {
    if (!fault_) fault_ = why;
    phase_ = Phase::broken;
  }

  // Reads a header; false if it is incomplete. Unknown flags make a frame that fits nowhere.
  static bool header(const uint8_t* at, size_t left, Frame& frame) {
    if (left < 2) return false;
    const uint8_t flags = at[0];
    frame.more = flags & 1;
    frame.command = flags & 4;
    frame.header = flags & 2 ? 9 : 2;
    if (flags & ~7 || (frame.more && frame.command)) {
      frame.size = kNoSize;
      return true;
    }
    if (left < frame.header) return false;
    if (flags & 2) frame.size = size_t(number(at + 1, 8));
    else frame.size = at[1];
    return true;
  }

  bool fits(const Frame& frame) const {
    if (frame.size > (frame.command ? kMaxCommand : max_frame_)) return false;
    return scanned_ == 0 || scanned_ + frame.whole() <= max_frame_ + kMaxBesides;
  }

  static uint64_t number(const uint8_t* at, size_t bytes) {
    uint64_t value = 0;
    for (size_t i = 0; i < bytes; ++i) value = value << 8 | at[i];
    return value;
  }

  // Checks as much of the greeting as has come: a foreign protocol may send less than all of it.
  bool greet(const uint8_t* at, size_t left) {
    const bool wrong =
        (left > 0 && at[0] != 0xff) || (left > 9 && !(at[9] & 1)) || (left > 10 && at[10] < 3);
    if (wrong) return fail(kHandshake), false;
    if (left < kGreeting) return false;
    if (memcmp(at + 12, "NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 20)) return fail(kHandshake), false;
    minor_ = at[10] > 3 ? 1 : at[11];
    begin_ += kGreeting;
    phase_ = Phase::ready;
    append_command("READY", std::string_view("\x0bSocket-Type\0\0\0\3SUB", 19));
    return true;
  }

  // Handles a command; returns whether it completes the handshake.
  bool command(const uint8_t* body, size_t size) {
    const uint8_t* end = body + size;
    const std::string_view name =
        size && body[0] < size ? std::string_view(reinterpret_cast<const char*>(body) + 1, body[0])
                               : std::string_view();
    const uint8_t* rest = body + 1 + name.size();
    if (name.empty()) return fail(joined() ? kProtocol : kHandshake), false;
    if (phase_ == Phase::ready) {
      if (name == "ERROR") return fail("authentication failed in the handshake"), false;
      if (name != "READY" || !publishes(rest, end)) return fail(kHandshake), false;
      phase_ = Phase::open;
      for (const std::string& topic : topics_) append_topic(topic, true);
      return true;
    }
    constexpr size_t kTtl = 2, kContext = 16;
    if (name == "PING") {
      const size_t given = size_t(end - rest);
      if (given < kTtl || given > kTtl + kContext) return fail(kProtocol), false;
      const std::string_view context(reinterpret_cast<const char*>(rest) + kTtl, given - kTtl);
      if (unsent_.empty()) append_command("PONG", context);
    }
    return false;
  }

  // Whether the properties of READY are those of a publishing socket.
  static bool publishes(const uint8_t* at, const uint8_t* end) {
    bool found = false;
    while (at < end) {
      const size_t name_size = *at++;
      if (size_t(end - at) < name_size + 4) return false;
      const std::string_view name(reinterpret_cast<const char*>(at), name_size);
      const size_t size = size_t(number(at + name_size, 4));
      at += name_size + 4;
      if (size_t(end - at) < size) return false;
      const std::string_view value(reinterpret_cast<const char*>(at), size);
      if (same_name(name, "socket-type")) found = value == "PUB" || value == "XPUB";
      at += size;
    }
    return found;
  }

  static bool same_name(std::string_view name, std::string_view lower) {
    if (name.size() != lower.size()) return false;
    for (size_t i = 0; i < name.size(); ++i) {
      const char c = name[i] >= 'A' && name[i] <= 'Z' ? char(name[i] + 32) : name[i];
      if (c != lower[i]) return false;
    }
    return true;
  }

  void append_topic(const std::string& topic, bool wanted) {
    if (answers_pings()) append_command(wanted ? "SUBSCRIBE" : "CANCEL", topic);
    else append_frame(0, std::string(1, wanted ? '\1' : '\0') + topic);
  }

  void append_command(std::string_view name, std::string_view body) {
    std::string all(1, char(name.size()));
    all.append(name).append(body);
    append_frame(4, all);
  }

  void append_frame(uint8_t flags, std::string_view body) {
    const bool is_long = body.size() > 255;
    unsent_ += char(flags | (is_long ? 2 : 0));
    for (int shift = is_long ? 56 : 0; shift >= 0; shift -= 8)
      unsent_ += char(uint64_t(body.size()) >> shift);
    unsent_.append(body);
  }

  const size_t max_frame_;
  const std::vector<std::string> topics_;
  std::string unsent_;
  size_t begin_ = 0;
  size_t scanned_ = 0;
  size_t frames_ = 0;   // scanned frames of the present message
  bool whole_ = false;  // the message is complete and was returned
  Phase phase_ = Phase::greeting;
  uint8_t minor_ = 0;
  const char* fault_ = nullptr;
};

}  // namespace kvd
