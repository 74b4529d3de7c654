// Mode `engine`: OpenAI's API over a prefix cache, for use behind a proxy, as cheap as possible.
//
//   request ──> tokens, cache, KV events ──> head and first frame ──> frame ... ──> [DONE]
//                                               prefill later          pace, or as fast as taken
//
// One epoll loop serves all. Each frame is a chunk and a send of its own, as with real engines; the
// last one is sent together with the end. The request defines its answer by members that every
// proxy passes on: it has `max_tokens` frames, `seed` microseconds apart. The engine describes
// itself in the form of vLLM and SGLang. `POST /bench/reset` empties the cache, `GET /bench/stats`
// shows how many requests and tokens there were, and how many tokens were cached.
#pragma once

#include <fcntl.h>
#include <sys/epoll.h>

#include <functional>
#include <map>
#include <memory>
#include <queue>

#include "engines.hpp"
#include "http.hpp"
#include "measure.hpp"
#include "prefix_cache.hpp"

namespace kvbench {

constexpr size_t kFrameBytes = 200;  // bytes of a stream's event, with its blank line

// Returns one event of a stream, padded to kFrameBytes.
inline std::string stream_frame(const std::string& model) {
  std::string frame =
      "data: "
      "{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"" +
      model + "\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"";
  const std::string end = "\"},\"finish_reason\":null}]}\n\n";
  return frame + std::string(kFrameBytes - frame.size() - end.size(), 'x') + end;
}

inline std::string as_chunk(const std::string& data) {
  char line[20];
  std::snprintf(line, sizeof line, "%zx\r\n", data.size());
  return line + data + "\r\n";
}

// Returns the number behind a member's name, `otherwise` if the body has no such member.
inline long member(const std::string& body, const char* name, long otherwise) {
  const std::string key = std::string("\"") + name + "\":";
  const size_t at = body.find(key);
  return at == std::string::npos ? otherwise : std::atol(body.c_str() + at + key.size());
}

// Calls `each(begin, size)` for the text behind each of a member's names.
template <class Each>
void each_text(const std::string& body, const char* name, Each each) {
  const std::string key = std::string("\"") + name + "\":";
  for (size_t at = body.find(key); at != std::string::npos; at = body.find(key, at)) {
    at = body.find_first_not_of(' ', at + key.size());
    if (at == std::string::npos || body[at] != '"') continue;
    const size_t end = body.find('"', ++at);  // texts of benchmarks have no escapes
    if (end == std::string::npos) return;
    each(body.data() + at, end - at);
    at = end;
  }
}

class SimEngine {
 public:
  explicit SimEngine(const Options& options)
      : model_(options.text("model")),
        block_size_(size_t(options.integer("block-size", 1))),
        blocks_(size_t(options.integer("cache-blocks", 1))),
        prefill_us_(options.number("prefill-us")),
        port_(options.integer("port", 1)),
        cache_(blocks_, block_size_),
        publisher_(1),
        epoll_(epoll_create1(0)),
        listener_(listen_on(port_, SOCK_NONBLOCK)),
        frame_(as_chunk(stream_frame(model_))),
        end_(as_chunk("data: [DONE]\n\n") + "0\r\n\r\n") {
    watch(listener_, EPOLLIN);
  }

  // Serves until the process is ended.
  [[noreturn]] void run() {
    epoll_event events[256];
    for (;;) {
      const int ready = epoll_wait(epoll_, events, 256, fast_.empty() ? wait_ms() : 0);
      for (int i = 0; i < ready; i++) {
        const int fd = events[i].data.fd;
        if (fd == listener_) accept_all();
        else if (const auto found = clients_.find(fd); found != clients_.end())
          on_client(*found->second, events[i].events);
      }
      send_due();
      send_fast();
    }
  }

 private:
  struct Client {
    int fd;
    uint64_t number;  // of the connection, since descriptors are reused
    std::string received;
    std::string unsent;
    long left = 0;  // frames of the answer under way
    double pace_s = 0;
    bool begun = false;  // its head has been sent
  };
  struct Due {
    double at;
    int fd;
    uint64_t number;
    bool operator<(const Due& other) const { return at > other.at; }  // the earliest on top
  };

  void watch(int fd, uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.fd = fd;
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event)) fail_errno("epoll_ctl");
  }

  void accept_all() {
    for (int fd; (fd = accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK)) >= 0;) {
      const int on = 1;
      setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
      clients_[fd] = std::make_unique<Client>(Client{fd, ++accepted_, {}, {}});
      watch(fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET);
    }
  }

  void leave(Client& client) {
    close(client.fd);
    clients_.erase(client.fd);
  }

  void on_client(Client& client, uint32_t events) {
    if (events & (EPOLLHUP | EPOLLERR | EPOLLRDHUP)) return leave(client);
    if (!flush(client)) return leave(client);
    static char piece[1 << 18];
    for (;;) {
      const ssize_t got = recv(client.fd, piece, sizeof piece, 0);
      if (got < 0 && errno == EAGAIN) break;
      if (got <= 0) return leave(client);
      client.received.append(piece, size_t(got));
      if (size_t(got) < sizeof piece) break;
    }
    if (!serve(client)) leave(client);
  }

  // Serves a request once it is complete; returns false if the client is gone.
  bool serve(Client& client) {
    const size_t end = client.received.find("\r\n\r\n");
    if (end == std::string::npos || client.left > 0) return true;
    const size_t length = length_of(client.received.c_str(), end);
    if (client.received.size() < end + 4 + length) return true;
    const size_t space = client.received.find(' ');
    std::string path =
        client.received.substr(space + 1, client.received.find(' ', space + 1) - space - 1);
    path.resize(std::min(path.size(), path.find('?')));
    const std::string body = client.received.substr(end + 4, length);
    client.received.clear();  // no client here pipelines
    if (path == "/v1/chat/completions") return generate(client, body);
    const std::string* answer = answer_to(path, body);
    return answer ? send_answer(client, 200, *answer) : send_answer(client, 404, "{}");
  }

  static size_t length_of(const char* head, size_t size) {
    static const std::string name = "\ncontent-length:";
    for (const char* at = head;
         (at = static_cast<const char*>(memchr(at, '\n', size - size_t(at - head)))) != nullptr;
         at++)
      if (!strncasecmp(at, name.c_str(), name.size()))
        return std::strtoull(at + name.size(), nullptr, 10);
    return 0;
  }

  // ---- how engines describe themselves

  const std::string* answer_to(const std::string& path, const std::string& body) {
    if (path == "/tokenize") return &(answer_ = tokenized(body));
    if (path == "/bench/stats") return &(answer_ = stats());
    if (path == "/bench/reset") {
      reset();
      return &(answer_ = "{}");
    }
    static const std::map<std::string, std::function<std::string(SimEngine&)>> kAnswers = {
        {"/health", [](SimEngine&) { return "{}"; }},
        {"/ready", [](SimEngine&) { return "{}"; }},
        {"/version", [](SimEngine&) { return "{\"version\":\"0.33.0\"}"; }},
        {"/v1/models",
         [](SimEngine& e) {
           return "{\"object\":\"list\",\"data\":[{\"id\":\"" + e.model_ +
                  "\",\"object\":\"model\",\"created\":1,\"owned_by\":\"vllm\",\"root\":\"" +
                  e.model_ + "\",\"parent\":null,\"max_model_len\":131072}]}";
         }},
        {"/metrics",
         [](SimEngine& e) {
           return "vllm:cache_config_info{block_size=\"" + std::to_string(e.block_size_) +
                  "\",engine=\"0\",num_gpu_blocks=\"" + std::to_string(e.blocks_) + "\"} 1.0\n";
         }},
        {"/kv_event_sources",
         [](SimEngine& e) {
           return "{\"0\":{\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\"topic\":\"\","
                  "\"endpoint\":\"" +
                  e.publisher_.endpoint(0) + "\",\"replay_endpoint\":null}}";
         }},
    };
    const auto found = kAnswers.find(path);
    return found == kAnswers.end() ? nullptr : &(answer_ = found->second(*this));
  }

  Tokens tokens_of(const std::string& body) const {
    Tokens tokens;
    tokens.reserve(body.size() / kTokenBytes);
    each_text(body, "content", [&](const char* text, size_t size) {
      tokens.push_back(kVocabulary);  // where a message begins
      append_tokens(tokens, text, size);
    });
    tokens.push_back(kVocabulary);  // where the answer begins
    return tokens;
  }

  std::string tokenized(const std::string& body) {
    const Tokens tokens = tokens_of(body);
    std::string ids;
    for (uint32_t token : tokens) ids += (ids.empty() ? "" : ",") + std::to_string(token);
    questions_++;
    return "{\"count\":" + std::to_string(tokens.size()) +
           ",\"max_model_len\":131072,\"tokens\":[" + ids + "]}";
  }

  std::string stats() const {
    return "{\"requests\":" + std::to_string(requests_) +
           ",\"questions\":" + std::to_string(questions_) +
           ",\"prompt_tokens\":" + std::to_string(prompt_tokens_) +
           ",\"cached_tokens\":" + std::to_string(cached_tokens_) + "}";
  }

  void reset() {
    cache_.clear();
    requests_ = questions_ = prompt_tokens_ = cached_tokens_ = 0;
    Batch batch(Batch::Form::kMaps);
    batch.cleared();
    publisher_.publish(0, batch.take());
  }

  // ---- generation

  bool generate(Client& client, const std::string& body) {
    const Tokens tokens = tokens_of(body);
    Batch batch(Batch::Form::kMaps);
    const size_t cached = cache_.serve(tokens, batch) * block_size_;
    if (batch.events()) publisher_.publish(0, batch.take());
    requests_++;
    prompt_tokens_ += tokens.size();
    cached_tokens_ += cached;
    const long frames = std::max(1L, member(body, "max_tokens", 1));
    if (body.find("\"stream\":true") == std::string::npos &&
        body.find("\"stream\": true") == std::string::npos)
      return send_answer(client, 200, whole_answer());
    client.left = frames;
    client.pace_s = double(member(body, "seed", 0)) * 1e-6;
    client.begun = false;
    const double prefill_s = double(tokens.size() - cached) * prefill_us_ * 1e-6;
    if (prefill_s == 0) return advance(client);
    computing_until_ = std::max(now(), computing_until_) + prefill_s;  // one prefill at a time
    due_.push({computing_until_, client.fd, client.number});
    return true;
  }

  std::string whole_answer() const {
    return "{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion\",\"created\":1,\"model\":\"" +
           model_ +
           "\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"x\"},"
           "\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":1,"
           "\"total_tokens\":2}}";
  }

  bool send_answer(Client& client, int status, const std::string& body) {
    return put(client, "HTTP/1.1 " + std::to_string(status) +
                           " OK\r\ncontent-type: application/json\r\ncontent-length: " +
                           std::to_string(body.size()) + "\r\n\r\n" + body);
  }

  // Sends the next frame and schedules the one after it; returns false if the client is gone.
  bool advance(Client& client) {
    if (!send_frame(client)) return false;
    if (client.left == 0) return true;
    if (client.pace_s > 0) due_.push({now() + client.pace_s, client.fd, client.number});
    else fast_.push_back({0, client.fd, client.number});
    return true;
  }

  bool send_frame(Client& client) {
    static const std::string head =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        "transfer-encoding: chunked\r\n\r\n";
    client.left--;
    if (client.begun && client.left > 0) return put(client, frame_);
    const bool begins = !client.begun;
    client.begun = true;
    return put(client, (begins ? head : "") + frame_ + (client.left == 0 ? end_ : ""));
  }

  void send_due() {
    if (due_.empty()) return;
    const double current = now();
    while (!due_.empty() && due_.top().at <= current) {
      const Due due = due_.top();
      due_.pop();
      Client* client = find(due);
      if (client && !advance(*client)) leave(*client);
    }
  }

  // Sends one frame to each client whose frames have no pace.
  void send_fast() {
    std::vector<Due> turn;
    turn.swap(fast_);
    for (const Due& each : turn) {
      Client* client = find(each);
      if (!client) continue;
      if (!client->unsent.empty()) fast_.push_back(each);
      else if (!advance(*client)) leave(*client);
    }
    if (!turn.empty() && stuck()) sleep_seconds(50e-6);
  }

  // Returns whether none of these clients takes anything at the moment.
  bool stuck() {
    for (const Due& each : fast_)
      if (const Client* client = find(each); client && client->unsent.empty()) return false;
    return true;
  }

  Client* find(const Due& due) {
    const auto found = clients_.find(due.fd);
    const bool same = found != clients_.end() && found->second->number == due.number;
    return same ? found->second.get() : nullptr;
  }

  int wait_ms() const {
    if (due_.empty()) return -1;
    return int(std::max(0.0, (due_.top().at - now()) * 1e3)) + 1;
  }

  bool put(Client& client, const std::string& bytes) {
    if (!client.unsent.empty()) {
      client.unsent += bytes;
      return true;
    }
    const ssize_t sent = send(client.fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN) return false;
    if (sent < ssize_t(bytes.size()))
      client.unsent = bytes.substr(size_t(std::max(sent, ssize_t(0))));
    return true;
  }

  bool flush(Client& client) {
    if (client.unsent.empty()) return true;
    std::string rest;
    rest.swap(client.unsent);
    return put(client, rest);
  }

  std::string model_;
  size_t block_size_, blocks_;
  double prefill_us_;
  long port_;
  PrefixCache cache_;
  Engines publisher_;
  int epoll_, listener_;
  std::string frame_, end_, answer_;
  std::unordered_map<int, std::unique_ptr<Client>> clients_;
  std::priority_queue<Due> due_;  // answers whose next frame waits for its time
  std::vector<Due> fast_;         // answers whose frames are sent as fast as clients take them
  uint64_t accepted_ = 0;
  double computing_until_ = 0;
  uint64_t requests_ = 0, questions_ = 0, prompt_tokens_ = 0, cached_tokens_ = 0;
};

inline int run_engine(const Options& options) {
  SimEngine engine(options);
  engine.run();
}

}  // namespace kvbench
