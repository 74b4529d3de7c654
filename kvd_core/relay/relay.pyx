# distutils: language = c++
"""The relay for Python: what is begun, when its answer begins, what became of it.

    begin ──> READY: answer() says how it begins ──> forward ──> END: ending() says how it went
       └───────────────────────────────────────────────────────> END

A notice is one call of `on_notice(exchange)`: the exchange is ready or has ended, whichever `ready`
and `ended` say. What `begin` and `forward` bring about at once gives none: ask when they return.
Who began an exchange drops it, before the client's socket is closed.
"""
from collections import namedtuple
from enum import IntEnum

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t

cdef enum:
    kNothing
    kAll
    kSome

NOTHING, ALL, SOME = kNothing, kAll, kSome
NO_CLIENT = -1

# How an answer begins: `head` are its bytes to the empty line, `held` is payload without frames;
# `whole` says whether that is all of it, `events` whether it is a stream of server-sent events.
Answer = namedtuple("Answer", ("status", "head", "held", "whole", "events"))

# How an exchange went: `forwarded` bytes of payload in `receives` pieces, of which `tail` is the
# end.
Ending = namedtuple("Ending", ("outcome", "forwarded", "receives", "tail"))


class ExchangeOutcome(IntEnum):
    """The outcome of an exchange (relay/relay.hpp)."""

    UNDER_WAY = 0
    COMPLETE = 1
    UNREACHABLE = 2
    NO_ANSWER = 3
    BROKEN = 4
    MALFORMED = 5
    CLIENT_GONE = 6
    CONNECT_TIME = 7
    SILENCE = 8
    CLIENT_STALLED = 9
    NO_ROOM = 10
    CLOSED = 11


OUTCOMES = tuple(ExchangeOutcome)  # by number: to call the class takes 1 µs

cdef class Relay:
    """Exchanges between clients and engines, on an epoll set of their own."""

    def __cinit__(self, on_notice not None):
        self.core = new CRelay()
        self.bodies = {}
        self.on_notice = on_notice

    def __dealloc__(self):
        del self.core

    def fileno(self):
        """Returns a descriptor that is readable when `serve_ready` has something to do."""
        return self.core.fd()

    def __len__(self):
        return self.core.live()

    def set_limits(self, double connect_s, double silence_s, double client_s, double idle_s):
        """Has these hold for all exchanges: seconds to connect, without a byte of the engine's,
        without one taken by the client, and that a connection is kept.
        """
        self.core.limits.connect_ns = <int64_t>(connect_s * 1e9)
        self.core.limits.silence_ns = <int64_t>(silence_s * 1e9)
        self.core.limits.client_ns = <int64_t>(client_s * 1e9)
        self.core.limits.idle_ns = <int64_t>(idle_s * 1e9)

    def add_engine(self, str host not None, uint16_t port):
        """Takes an IP address and port, or a Unix socket's path or @NAME and 0.

        Returns the engine's number.

        Raises ValueError for any other host.
        """
        return self.core.add_engine(host.encode(), port)

    def move_engine(self, uint32_t engine, str host not None, uint16_t port):
        """Has the next connections go elsewhere; raises as `add_engine` does."""
        self.core.move_engine(engine, host.encode(), port)

    def remove_engine(self, uint32_t engine):
        """Forgets an engine, with which nothing is begun any more; what is under way goes on."""
        self.core.remove_engine(engine)

    def idle(self, uint32_t engine):
        """Returns how many connections are kept to an engine."""
        return self.core.idle(engine)

    def begin(self, uint32_t engine, int client_fd, bytes head not None, bytes body not None,
              size_t hold):
        """Sends a request; returns the exchange.

        The answer is held until its first event is there, if it is a stream with a client, else
        until it is whole; and at `hold` bytes of payload whatever it is.
        """
        cdef uint64_t exchange = self.core.begin(
            engine, client_fd, PyBytes_AS_STRING(head), PyBytes_GET_SIZE(head),
            PyBytes_AS_STRING(body), PyBytes_GET_SIZE(body), hold,
        )
        self.bodies[exchange] = body
        self.core.clear_notices()
        return exchange

    def ready(self, uint64_t exchange):
        """Returns whether an answer waits to be forwarded."""
        return self.known(exchange).phase == ExchangePhase.kReady

    def ended(self, uint64_t exchange):
        """Returns whether there is nothing more to come."""
        return self.known(exchange).phase == ExchangePhase.kEnded

    def answer(self, uint64_t exchange):
        """Returns how the answer of a ready exchange begins, as an Answer."""
        cdef const Exchange* x = self.known(exchange)
        return Answer(x.head.status, x.received, x.held, x.completes, x.head.events)

    def forward(self, uint64_t exchange, bytes head not None, bint chunked):
        """Sends a ready answer on behind this head, in chunks or as it is.

        What has been sent and received so far is forgotten.
        """
        if self.known(exchange).phase != ExchangePhase.kReady:
            raise ValueError("the exchange is not ready")
        cdef Framing framing = Framing.kChunks if chunked else Framing.kAsIs
        self.core.forward(exchange, PyBytes_AS_STRING(head), PyBytes_GET_SIZE(head), framing)
        del self.bodies[exchange]
        self.core.clear_notices()

    def fill(self, uint64_t exchange, bytes filler not None, double pause_s):
        """Has `filler` sent, between two events of a stream, when nothing came for so long."""
        self.known(exchange)
        cdef int64_t pause_ns = <int64_t>(pause_s * 1e9)
        self.core.fill(exchange, PyBytes_AS_STRING(filler), PyBytes_GET_SIZE(filler), pause_ns)

    def ending(self, uint64_t exchange):
        """Returns how an exchange went, as an Ending."""
        cdef const Exchange* x = self.known(exchange)
        return Ending(OUTCOMES[<int>x.outcome], x.tail.size(), x.receives, x.tail.text())

    def drop(self, uint64_t exchange):
        """Forgets an exchange; an engine that has not answered in full hears of it as an abort."""
        self.known(exchange)
        self.core.drop(exchange)
        self.bodies.pop(exchange, None)

    def serve_ready(self, int64_t budget_ns):
        """Moves what has come, until nothing is left or `budget_ns` nanoseconds have passed.

        Returns NOTHING if nothing had come, ALL, or SOME if more may be waiting.
        """
        cdef int served = <int>self.core.turn(budget_ns)
        self.deliver()
        return served

    def sweep(self):
        """Ends what has taken too long, and connections that were kept for too long."""
        self.core.sweep()
        self.deliver()

    def stats(self):
        """Returns the counters since the beginning, by name."""
        return self.core.stats

    cdef deliver(self):
        cdef size_t i
        cdef vector[Notice] notices = self.core.notices()
        self.core.clear_notices()
        for i in range(notices.size()):
            # An answer may have been noticed as ready and ended in one turn.
            if self.core.knows(notices[i].id):
                self.on_notice(notices[i].id)

    cdef const Exchange* known(self, uint64_t exchange) except NULL:
        if not self.core.knows(exchange):
            raise KeyError(exchange)
        return &self.core.exchange(exchange)
