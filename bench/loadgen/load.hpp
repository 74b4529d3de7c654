// Modes `http` (closed-loop load over keep-alive connections, one epoll loop) and `bodies` (print
// the bodies that load would send).
#pragma once

#include <fcntl.h>
#include <sys/epoll.h>

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "bodies.hpp"
#include "http.hpp"
#include "measure.hpp"

namespace kvbench {

// Distinct prompts of the kinds that ask about prompts: enough of them to get past the server's
// caches for short ones, at most ~2 MB in all so that they do not flush the client's own.
inline std::vector<Tokens> make_prompts(const Options& options, long count) {
    const DataSet data(options);
    const long blocks = options.integer("tokens", 1) / data.block_size;
    const long hits = std::lround(double(blocks) * std::min(1.0, options.number("hit")));
    std::vector<Tokens> prompts;
    for (long i = 0; i < count; i++) prompts.push_back(data.prompt(uint64_t(i), blocks, hits));
    return prompts;
}

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

// Kinds of request made from a prompt; a new kind is a line here.
inline const std::map<std::string, PromptKind>& prompt_kinds() {
    static const std::map<std::string, PromptKind> kinds = {
        {"query",
         {"/query", [](const Bodies& bodies, const Tokens& tokens, size_t) {
              return bodies.query(tokens);
          }}},
        {"query_by_hash",
         {"/query_by_hash", [](const Bodies& bodies, const Tokens& tokens, size_t block_size) {
              return bodies.query_by_hash(local_hashes(tokens, block_size));
          }}},
    };
    return kinds;
}

inline const PromptKind& prompt_kind(const std::string& name) {
    const auto found = prompt_kinds().find(name);
    if (found == prompt_kinds().end()) throw std::runtime_error("unknown --kind " + name);
    return found->second;
}

inline std::vector<std::string> make_bodies(const Options& options, long count) {
    const PromptKind& kind = prompt_kind(options.text("kind"));
    const Bodies bodies(options);
    const size_t block_size = size_t(options.integer("block-size", 1));
    std::vector<std::string> out;
    for (const Tokens& prompt : make_prompts(options, count))
        out.push_back(kind.body(bodies, prompt, block_size));
    return out;
}

inline std::vector<std::string> make_requests(const Options& options) {
    const std::string& kind = options.text("kind");
    if (kind == "get") return {get_request(options.text("path"))};
    if (kind == "raw") return {post_request(options.text("path"), options.text("body"))};
    std::vector<std::string> requests;
    for (const std::string& body : make_bodies(options, default_prompt_count(options)))
        requests.push_back(post_request(prompt_kind(kind).path, body));
    return requests;
}

inline int run_bodies(const Options& options) {
    for (const std::string& body : make_bodies(options, options.integer("count", 1)))
        std::printf("%s\n", body.c_str());
    return 0;
}

// One connection with at most one request under way.
class Connection {
public:
    Connection(const std::string& url, size_t first_request)
        : request(first_request), fd_(connect_to(url)) {
        fcntl(fd_, F_SETFL, O_NONBLOCK);
    }
    ~Connection() { close(fd_); }
    Connection(const Connection&) = delete;

    int fd() const { return fd_; }
    bool busy() const { return unsent_ != nullptr; }
    const ResponseReader& response() const { return reader_; }
    double seconds_since_start() const { return now() - started_; }

    void start(const std::string& bytes) {
        unsent_ = &bytes;
        sent_ = 0;
        reader_.reset();
        started_ = now();
        send_more();
    }

    // Sends what the socket takes; the loop calls again when it takes more.
    void send_more() {
        while (unsent_ && sent_ < unsent_->size()) {
            const ssize_t more =
                send(fd_, unsent_->data() + sent_, unsent_->size() - sent_, MSG_NOSIGNAL);
            if (more < 0 && errno == EAGAIN) return;
            if (more < 0) fail_errno("sending a request");
            sent_ += size_t(more);
        }
    }

    // Reads what is there; true when that completed the response.
    bool receive() {
        static char piece[1 << 18];
        bool complete = false;
        while (true) {
            const ssize_t got = recv(fd_, piece, sizeof piece, 0);
            if (got < 0 && errno == EAGAIN) break;
            if (got < 0) fail_errno("waiting for a response");
            if (got == 0) throw std::runtime_error("server closed a connection under load");
            complete = reader_.feed(piece, size_t(got));
            // A short read has emptied the socket; later bytes raise a new edge.
            if (size_t(got) < sizeof piece) break;
        }
        if (complete) unsent_ = nullptr;
        return complete;
    }

    size_t request;  // index of the request it sends next

private:
    int fd_;
    const std::string* unsent_ = nullptr;  // request under way; null: none
    size_t sent_ = 0;
    ResponseReader reader_;
    double started_ = 0;
};

// Closed loop: every connection sends its next request as soon as it has its response.
class Load {
public:
    Load(const Options& options, std::vector<std::string> requests)
        : requests_(std::move(requests)),
          server_(options.integer("pid", 0)),
          warm_(options.number("warm")),
          seconds_(options.number("secs")),
          epoll_(epoll_create1(0)) {
        const long count = options.integer("conns", 1);
        for (long i = 0; i < count; i++) add_connection(options.text("url"), size_t(i));
        latencies_.reserve(1 << 20);  // no reallocation while the clock runs
    }
    ~Load() { close(epoll_); }

    void run() {
        for (auto& connection : connections_) begin(*connection);
        run_for(warm_);
        latencies_.clear();
        const Usage before = server_.usage();
        const double own_before = own_cpu_seconds(), start = now();
        run_for(seconds_);
        elapsed_ = now() - start;
        const Usage after = server_.usage();
        own_cpu_ = own_cpu_seconds() - own_before;
        user_ = after.user_s - before.user_s;
        system_ = after.system_s - before.system_s;
        rss_ = after.rss_bytes;
        finish();
    }

    void print(const Options& options) {
        const double requests = double(latencies_.size()), per = requests ? 1e6 / requests : 0;
        JsonLine line;
        line.text("mode", "http").text("kind", options.text("kind"));
        line.count("conns", connections_.size()).count("request_bytes", requests_[0].size());
        line.count("requests", latencies_.size()).number("rps", requests / elapsed_);
        line.number("p50_us", quantile(latencies_, 0.50));
        line.number("p99_us", quantile(latencies_, 0.99));
        line.number("max_us", quantile(latencies_, 1.0));
        line.number("client_cpu_us", own_cpu_ * per);
        if (server_.known()) {
            line.number("cpu_us", (user_ + system_) * per);
            line.number("user_us", user_ * per).number("system_us", system_ * per);
            line.number("rss_mib", double(rss_) / (1 << 20));
        }
        line.print();
    }

private:
    static constexpr double kStall = 60;  // seconds without any response that are an error

    void add_connection(const std::string& url, size_t number) {
        connections_.push_back(std::make_unique<Connection>(url, number % requests_.size()));
        epoll_event event{};
        // Edge-triggered: long requests need EPOLLOUT now and then, and no call to turn it on.
        event.events = EPOLLIN | EPOLLOUT | EPOLLET;
        event.data.ptr = connections_.back().get();
        if (epoll_ctl(epoll_, EPOLL_CTL_ADD, connections_.back()->fd(), &event))
            fail_errno("epoll_ctl");
    }

    void begin(Connection& connection) {
        connection.start(requests_[connection.request]);
        // Connections stride through the requests so that they do not all send the same one.
        connection.request = (connection.request + connections_.size()) % requests_.size();
    }

    void run_for(double seconds) {
        const double end = now() + seconds;
        while (now() < end) turn(true);
    }

    // Waits for the responses under way, so that the server is idle when the next run starts.
    void finish() {
        const auto busy = [](const auto& connection) { return connection->busy(); };
        while (std::any_of(connections_.begin(), connections_.end(), busy)) turn(false);
    }

    // One epoll round; `again` sends a new request where a response came in.
    void turn(bool again) {
        epoll_event events[64];
        const int ready = epoll_wait(epoll_, events, 64, int(kStall * 1000));
        if (ready < 0) fail_errno("epoll_wait");
        if (ready == 0) throw std::runtime_error("server stalled");
        for (int i = 0; i < ready; i++) {
            auto& connection = *static_cast<Connection*>(events[i].data.ptr);
            connection.send_more();
            if (!(events[i].events & ~uint32_t(EPOLLOUT)) || !connection.receive()) continue;
            // The end of a run is no reason to count what the run did not wait for.
            if (again) latencies_.push_back(float(connection.seconds_since_start() * 1e6));
            check(connection.response());
            if (again) begin(connection);
        }
    }

    static void check(const ResponseReader& response) {
        if (response.status() / 100 == 2) return;
        throw std::runtime_error("status " + std::to_string(response.status()) + " under load: " +
                                 response.body().substr(0, 300));
    }

    std::vector<std::string> requests_;
    std::vector<std::unique_ptr<Connection>> connections_;
    std::vector<float> latencies_;  // microseconds
    ServerProcess server_;
    double warm_, seconds_;
    int epoll_;
    double elapsed_ = 0, own_cpu_ = 0, user_ = 0, system_ = 0;
    long rss_ = 0;
};

inline int run_http(const Options& options) {
    Load load(options, make_requests(options));
    load.run();
    load.print(options);
    return 0;
}

}  // namespace kvbench
