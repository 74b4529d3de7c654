// Stand-ins for inference engines: one XPUB socket a worker, messages in vLLM's frames.
#pragma once

#include <zmq.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace kvbench {

// Throws when a libzmq call reports failure.
inline void zmq_check(bool ok, const char* what) {
  if (!ok) throw std::runtime_error(std::string(what) + ": " + zmq_strerror(zmq_errno()));
}

struct ContextCloser {
  void operator()(void* context) const { zmq_ctx_term(context); }
};
struct SocketCloser {
  void operator()(void* socket) const { zmq_close(socket); }
};

class Engines {
 public:
  explicit Engines(long count) : context_(zmq_ctx_new()) {
    zmq_ctx_set(context_.get(), ZMQ_MAX_SOCKETS, int(count) + 16);
    for (long i = 0; i < count; i++) engines_.push_back(bind_engine());
  }

  long count() const { return long(engines_.size()); }

  const std::string& endpoint(long engine) const { return engines_[size_t(engine)].endpoint; }

  // Waits until all servers have subscribed to every engine, which XPUB shows. Without this wait
  // the first messages would be published to nobody.
  void wait_subscribed(size_t servers) {
    for (size_t i = 0; i < servers * engines_.size(); i++) {
      const Engine& engine = engines_[i % engines_.size()];
      char message[64];
      const int length = zmq_recv(engine.socket.get(), message, sizeof message, 0);
      if (length < 1 || message[0] != 1)
        throw std::runtime_error("server did not subscribe to " + engine.endpoint);
    }
  }

  void publish(long engine, const std::string& payload) {
    Engine& from = engines_[size_t(engine)];
    char sequence[8];
    for (int i = 0; i < 8; i++) sequence[i] = char(from.next_sequence >> (8 * (7 - i)));
    from.next_sequence++;
    send_frame(from, "", 0, ZMQ_SNDMORE);
    send_frame(from, sequence, sizeof sequence, ZMQ_SNDMORE);
    send_frame(from, payload.data(), payload.size(), 0);
  }

 private:
  struct Engine {
    std::unique_ptr<void, SocketCloser> socket;
    std::string endpoint;
    uint64_t next_sequence = 0;
  };

  Engine bind_engine() {
    constexpr int kSubscribeTimeout = 30000;  // ms; a server may retry a connect for seconds
    Engine engine{{zmq_socket(context_.get(), ZMQ_XPUB), {}}, {}, 0};
    void* socket = engine.socket.get();
    zmq_check(socket, "zmq_socket");
    set(socket, ZMQ_SNDHWM, 0);        // unbounded: a publisher that drops would measure nothing
    set(socket, ZMQ_XPUB_VERBOSE, 1);  // shows each subscription, not only the first
    set(socket, ZMQ_LINGER, 0);
    set(socket, ZMQ_RCVTIMEO, kSubscribeTimeout);
    zmq_check(!zmq_bind(socket, "tcp://127.0.0.1:*"), "zmq_bind");
    char endpoint[128];
    size_t length = sizeof endpoint;
    zmq_check(!zmq_getsockopt(socket, ZMQ_LAST_ENDPOINT, endpoint, &length), "last endpoint");
    engine.endpoint = endpoint;
    return engine;
  }

  static void set(void* socket, int option, int value) {
    zmq_check(!zmq_setsockopt(socket, option, &value, sizeof value), "zmq_setsockopt");
  }

  static void send_frame(Engine& engine, const void* data, size_t size, int flags) {
    zmq_check(zmq_send(engine.socket.get(), data, size, flags) >= 0, "zmq_send");
  }

  std::unique_ptr<void, ContextCloser> context_;  // outlives the sockets below
  std::vector<Engine> engines_;
};

}  // namespace kvbench
