// Reads messages from a ZMQ socket through the libzmq that pyzmq has loaded.
//
//   libzmq's pipe of the socket          MessageReader                 the inbox (zmq/inbox.hpp)
//   +-------+-----+---------+            frames_[0]  topic  ignored
//   | topic | seq | payload |  next() -> frames_[1]  8 bytes, BE  ->  seq; 16 more  ->  publisher
//   +-------+-----+---------+            frames_[2]  msgpack      ->  payload, size
//   | ...   more messages   |            frames_[3]  any further frame, overwritten by the next
//
// `next_of_any_shape` reads messages that are not engines' events frame by frame.
//
// Invariants
//   1. Never waits: every receive is ZMQ_DONTWAIT.
//   2. A message is taken whole or not at all (libzmq hands multipart messages over atomically), so
//      after next() the socket is at the start of a message, whatever the shape of the last one.
//   3. payload() is valid until the following next(); nothing is copied.
//   4. After ReceiveOutcome::empty libzmq has handled all its commands, so the socket's
//      edge-triggered ZMQ_FD becomes readable with the next message: only then may the owner wait
//      for it.
//
// Cost: 0.4 to 0.6 us of CPU per queued message of 200 bytes (3 zmq_msg_recv), without an
// allocation of our own. pyzmq's recv_multipart takes 6.2 us for the same.
//
// There is no zmq.h at build time and no second libzmq at run time: dlsym finds the functions
// through pyzmq's extension module, in the libzmq which that module is linked with.
#pragma once

#include <dlfcn.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "events/publisher.hpp"

namespace kvd {

class Inbox;

// zmq_msg_t of libzmq 4.1 and later: 64 opaque bytes, aligned like a pointer (zmq.h).
struct alignas(void*) ZmqMessage {
  unsigned char opaque[64];
};

constexpr int ZMQ_DONTWAIT_FLAG = 1;  // zmq.h: ZMQ_DONTWAIT
constexpr size_t SEQ_BYTES = 8;
constexpr size_t NAMED_SEQ_BYTES = SEQ_BYTES + kPublisherBytes;
constexpr int EVENT_FRAMES = 3;
constexpr uint64_t NO_NUMBER = UINT64_MAX;  // the end of a replay has it, and no batch

// The functions of libzmq's C interface that are used here.
struct Libzmq {
  void (*version)(int* major, int* minor, int* patch) = nullptr;
  int (*msg_init)(ZmqMessage*) = nullptr;
  int (*msg_recv)(ZmqMessage*, void* socket, int flags) = nullptr;
  void* (*msg_data)(ZmqMessage*) = nullptr;
  size_t (*msg_size)(const ZmqMessage*) = nullptr;
  int (*msg_more)(const ZmqMessage*) = nullptr;
  int (*msg_close)(ZmqMessage*) = nullptr;

  // Finds the functions through a module that is loaded already; returns the fault, or null.
  const char* load(const char* module_path) {
    void* module = dlopen(module_path, RTLD_NOW | RTLD_NOLOAD);
    if (!module) return "pyzmq's extension module is not loaded";
    bool found =
        resolve(module, "zmq_version", version) && resolve(module, "zmq_msg_init", msg_init) &&
        resolve(module, "zmq_msg_recv", msg_recv) && resolve(module, "zmq_msg_data", msg_data) &&
        resolve(module, "zmq_msg_size", msg_size) && resolve(module, "zmq_msg_more", msg_more) &&
        resolve(module, "zmq_msg_close", msg_close);
    dlclose(module);  // releases our reference; pyzmq's own keeps the library in memory
    if (!found) return "libzmq's functions cannot be found through pyzmq's extension module";
    int major = 0, minor = 0, patch = 0;
    version(&major, &minor, &patch);
    return major == 4 && minor >= 1 ? nullptr : "libzmq is not 4.1 or a later 4.x";
  }

 private:
  template <class Function>
  static bool resolve(void* module, const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(dlsym(module, name));
    return function != nullptr;
  }
};

enum class ReceiveOutcome {
  empty,            // no message is waiting
  later,            // a message may be waiting, but this turn has done enough
  event,            // seq, publisher, payload and size are those of a well-formed message
  bad_frame_count,  // a message of another number of frames than 3
  bad_sequence,     // a message whose second frame is neither 8 nor 24 bytes long
  bad_number,       // a message with the number that marks the end of a replay
  too_large,        // a message beyond its bound, which ends the connection; reported once
  failed,           // libzmq refused; errno says why
};

// A source of messages, which are taken one by one, without waiting.
class MessageSource {
 public:
  virtual ~MessageSource() = default;

  // Takes the next message.
  virtual ReceiveOutcome next() = 0;

  // Takes the next message, whatever its shape, as `packed`: each frame behind its length. If it
  // has more than `most` frames (at least 1), only `most` + 1 of them are taken; the others are
  // lost, and the source can no longer be used: ReceiveOutcome::bad_frame_count.
  virtual ReceiveOutcome next_of_any_shape(int most, std::string& packed) = 0;

  // Has the inbox keep the event that was taken last, without copying it, if there is room there.
  // False if its bytes do not lie in a mapping of their own: then they have to be copied.
  virtual bool hand_over(Inbox&) { return false; }

  // The payload of the event that was taken last, valid until the next call.
  virtual const char* payload() = 0;
  virtual size_t size() = 0;

  uint64_t seq() {
    const uint8_t* bytes = second();
    uint64_t value = 0;
    for (size_t i = 0; i < SEQ_BYTES; ++i) value = value << 8 | bytes[i];
    return value;
  }
  // The 16 bytes of the publisher's id behind the number, or null.
  const uint8_t* publisher() {
    return second_size() == NAMED_SEQ_BYTES ? second() + SEQ_BYTES : nullptr;
  }

 protected:
  virtual const uint8_t* second() = 0;  // frame
  virtual size_t second_size() = 0;

  // Checks a message of so many frames, whose second one is second().
  ReceiveOutcome checked(int frames) {
    if (frames != EVENT_FRAMES) return ReceiveOutcome::bad_frame_count;
    const size_t size = second_size();
    if (size != SEQ_BYTES && size != NAMED_SEQ_BYTES) return ReceiveOutcome::bad_sequence;
    return seq() == NO_NUMBER ? ReceiveOutcome::bad_number : ReceiveOutcome::event;
  }

  static void pack(std::string& packed, const void* data, size_t bytes) {
    const uint32_t size = static_cast<uint32_t>(bytes);
    packed.append(reinterpret_cast<const char*>(&size), sizeof size);
    packed.append(static_cast<const char*>(data), size);
  }
};

class MessageReader final : public MessageSource {
 public:
  MessageReader(const Libzmq& zmq, void* socket) : zmq_(zmq), socket_(socket) {
    for (ZmqMessage& frame : frames_) zmq_.msg_init(&frame);
  }
  ~MessageReader() override {
    for (ZmqMessage& frame : frames_) zmq_.msg_close(&frame);
  }
  MessageReader(const MessageReader&) = delete;
  MessageReader& operator=(const MessageReader&) = delete;

  ReceiveOutcome next() override {
    int count = 0;
    do {
      ZmqMessage& frame = frames_[count < EVENT_FRAMES ? count : EVENT_FRAMES];
      int rc = receive(frame);
      if (rc < 0)
        return count == 0 && errno == EAGAIN ? ReceiveOutcome::empty : ReceiveOutcome::failed;
      if (count <= EVENT_FRAMES) ++count;
      more_ = zmq_.msg_more(&frame);
    } while (more_);
    return checked(count);
  }

  ReceiveOutcome next_of_any_shape(int most, std::string& packed) override {
    packed.clear();
    int count = 0;
    do {
      ZmqMessage& frame = frames_[0];
      if (receive(frame) < 0)
        return count == 0 && errno == EAGAIN ? ReceiveOutcome::empty : ReceiveOutcome::failed;
      pack(packed, zmq_.msg_data(&frame), zmq_.msg_size(&frame));
      if (++count > most) return ReceiveOutcome::bad_frame_count;
    } while (zmq_.msg_more(&frames_[0]));
    return ReceiveOutcome::event;
  }

  const char* payload() override { return static_cast<const char*>(zmq_.msg_data(&frames_[2])); }
  size_t size() override { return zmq_.msg_size(&frames_[2]); }

 protected:
  const uint8_t* second() override {
    return static_cast<const uint8_t*>(zmq_.msg_data(&frames_[1]));
  }
  size_t second_size() override { return zmq_.msg_size(&frames_[1]); }

 private:
  int receive(ZmqMessage& frame) {
    int rc;
    do rc = zmq_.msg_recv(&frame, socket_, ZMQ_DONTWAIT_FLAG);
    while (rc < 0 && errno == EINTR);
    return rc;
  }

  const Libzmq& zmq_;
  void* socket_;
  ZmqMessage frames_[EVENT_FRAMES + 1];
  int more_ = 0;
};

// The time until which one drain may hold the thread.
class Deadline {
 public:
  explicit Deadline(int64_t budget_ns) : end_(Clock::now() + std::chrono::nanoseconds(budget_ns)) {}
  bool passed() const { return Clock::now() >= end_; }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point end_;
};

}  // namespace kvd
