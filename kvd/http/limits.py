"""The bounds of an HTTP listener, and the plain counters that show when one was reached."""

from __future__ import annotations

from dataclasses import dataclass

# Longest body in bytes of a route without a limit of its own: the default of the peers' HTTP
# framework.
DEFAULT_BODY_LIMIT = 2 * 1024 * 1024
# Longest body in bytes of questions and lists of workers, as on the originals; a setting may
# replace it (HttpLimits.body_bytes).
LONG_BODY_LIMIT = 8 * 1024 * 1024
# Longest pause between two sweeps over idle connections, so that none stays much too long.
MAX_TICK_S = 0.5
MIN_TICK_S = 0.0025  # shortest pause between two sweeps over idle connections
# Sweeps within the shortest idle limit: a connection then ends at most a quarter of that too late.
TICKS_PER_DEADLINE = 4


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of one listener for its clients; a route may lower the limit of a body."""

    head_bytes: int = 16 * 1024  # nginx grants 8 KiB a line, h11 16 KiB in all
    headers: int = 100  # Apache's default; proxies and tracers add a dozen
    url_bytes: int = 8 * 1024  # the least RFC 9110 §4.1 asks for
    connections: int = 1024  # without those that wait in a handler, which has its own bound
    body_bytes: int = LONG_BODY_LIMIT  # 1.6 million token ids
    bodies_bytes: int = 512 * 1024 * 1024  # being received at once: 64 of the longest queries
    head_s: float = 5.0  # from the first byte (or the connect) to the end of the head
    body_s: float = 10.0  # 8 MiB at 7 Mbit/s; a body comes from the same data centre
    handler_s: float = 30.0  # asynchronous handlers: to the first byte, then between chunks
    send_s: float = 5.0  # without one byte of progress, beyond what the kernel buffers
    idle_s: float = 100.0  # above the 90 s of common client pools, which end first then
    linger_s: float = 2.0  # to read and drop what a refused client is still sending
    graceful_s: float = 10.0  # with the last snapshot's 30, below the units' TimeoutStopSec
    busy_wait_us: int = 0  # longest wait awake for the next request (kvd/http/busy_wait.pyx)

    def tick_s(self) -> float:
        """Returns the seconds between two sweeps over idle connections."""
        shortest = min(self.head_s, self.idle_s)
        return min(MAX_TICK_S, max(MIN_TICK_S, shortest / TICKS_PER_DEADLINE))


GAUGES = frozenset(("connections_open", "connections_waiting"))  # of HttpStats


@dataclass(slots=True)
class HttpStats:
    """Counts of events on one listener since its start, and the GAUGES."""

    connections_open: int = 0
    connections_waiting: int = 0  # of these, with a request whose handler waits for something
    connections_total: int = 0
    connections_refused: int = 0  # over `HttpLimits.connections`: answered 503
    connections_displaced: int = 0  # closed to accept others: idle, or without a whole head
    accept_pauses: int = 0  # the process had no descriptor or memory for another connection
    requests: int = 0  # heads understood
    requests_app: int = 0  # of these, passed to the ASGI application
    malformed: int = 0  # 400 by the server itself: not HTTP, or HTTP it refuses
    too_large: int = 0  # 413
    bodies_refused: int = 0  # over `HttpLimits.bodies_bytes`, or without memory: answered 503
    head_too_large: int = 0  # 414 and 431
    encoded: int = 0  # 415: bodies said to be compressed
    expectation_failed: int = 0  # 417
    head_timeouts: int = 0
    body_timeouts: int = 0
    handler_timeouts: int = 0
    send_timeouts: int = 0
    idle_timeouts: int = 0
    linger_timeouts: int = 0
    handshakes_failed: int = 0  # TLS: no TLS, no certificate where one is needed, too slow
    client_gone: int = 0  # reset or closed while a request or response was under way
    cut_at_stop: int = 0  # connections still busy when the graceful deadline passed
    handler_bugs: int = 0  # exceptions no handler should raise: answered 500
    bugs: int = 0  # exceptions in the server's own code

    def count(self, name: str) -> None:
        """Adds 1 to the count of this name."""
        setattr(self, name, getattr(self, name) + 1)


# The HELP of each number of HttpStats.
STATS_HELP = {
    "connections_open": "Number of open connections",
    "connections_waiting": "Number of open connections whose request waits for its handler",
    "connections_total": "Number of connections accepted",
    "connections_refused": "Number of connections answered 503 at the limit http_connections",
    "connections_displaced": "Number of idle connections closed to accept new ones",
    "accept_pauses": "Number of pauses in accepting for lack of file descriptors or memory",
    "requests": "Number of request heads understood",
    "requests_app": "Number of requests passed to the ASGI application",
    "malformed": "Number of malformed requests answered 400",
    "too_large": "Number of requests answered 413 for their body's size",
    "bodies_refused": "Number of requests answered 503 at the limit http_bodies_bytes, or for lack "
    "of memory for their bodies",
    "head_too_large": "Number of requests answered 414 or 431 for their head's size",
    "encoded": "Number of requests answered 415 for a compressed body",
    "expectation_failed": "Number of requests answered 417",
    "head_timeouts": "Number of connections closed after http_head_s",
    "body_timeouts": "Number of requests ended after http_body_s",
    "handler_timeouts": "Number of requests ended after http_handler_s",
    "send_timeouts": "Number of connections closed after http_send_s",
    "idle_timeouts": "Number of connections closed after http_idle_s",
    "linger_timeouts": "Number of connections closed after http_linger_s",
    "handshakes_failed": "Number of TLS handshakes failed",
    "client_gone": "Number of clients that left during a request or a response",
    "cut_at_stop": "Number of connections cut after http_graceful_s",
    "handler_bugs": "Number of requests answered 500 for a bug in a handler",
    "bugs": "Number of bugs in the HTTP server",
}
