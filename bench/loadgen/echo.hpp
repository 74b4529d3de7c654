// Mode `echo`: a server that only answers, on one connection after the other. Its round trip is the
// shortest that any server has on the machine: asleep until a request comes, or awake.
#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>

#include "http.hpp"
#include "options.hpp"

namespace kvbench {

// Answers each receive, as requests of this generator's kind `get` come whole, until the client
// leaves.
inline void answer_each(int client, bool awake) {
  constexpr char kAnswer[] =
      "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}";
  char request[4096];
  pollfd readable{client, POLLIN, 0};
  for (;;) {
    while (poll(&readable, 1, awake ? 0 : -1) == 0) continue;
    if (recv(client, request, sizeof request, 0) <= 0) return;
    if (send(client, kAnswer, sizeof kAnswer - 1, MSG_NOSIGNAL) < 0) return;
  }
}

// Serves until the process is ended.
inline int run_echo(const Options& options) {
  const int listener = listen_on(options.integer("port", 1), 0);
  const bool awake = options.integer("awake", 0) != 0;
  for (;;) {
    const int client = accept(listener, nullptr, nullptr), on = 1;
    if (client < 0) fail_errno("accept");
    setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    answer_each(client, awake);
    close(client);
  }
}

}  // namespace kvbench
