# distutils: language = c++
"""The relay for Python: begins exchanges, says when an answer begins and how each has ended.

    begin ──> READY: answer() says how it begins ──> forward ──> END: ending() says how it went
       └───────────────────────────────────────────────────────> END

A notice is one call of `on_notice(exchange)`: the exchange is ready or has ended, as `ready` and
`ended` say. What `begin` and `forward` bring about themselves gives no notice: ask when they
return. The caller that began an exchange drops it, before it closes the client's socket.
"""
from collections import namedtuple
from enum import IntEnum

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t

from kvd_core.base.served cimport kAll, kNothing, kSome

NOTHING, ALL, SOME = kNothing, kAll, kSome
NO_CLIENT = -1

# How an answer begins: `head` has its bytes up to the empty line, `held` its payload without
# frames; `whole` says whether that is all of it, `events` whether it is a stream of server-sent
# events.
Answer = namedtuple("Answer", ("status", "head", "held", "whole", "events"))

# How an exchange went: `forwarded` bytes of payload came in `receives` pieces; `tail` is the end of
# the payload.
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


OUTCOMES = tuple(ExchangeOutcome)  # by number: calling the class takes 1 µs


def tune(int fd, double gone_s):
    """Makes the kernel send small pieces over a TCP socket at once, and end its connection if the
    other host gives no sign of life for `gone_s`, by whole seconds.
    """
    c_tune(fd, <int64_t>(gone_s * 1e9))


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

    def set_limits(self, double connect_s, double silence_s, double client_s, double idle_s,
                   double gone_s):
        """Sets the limits of all exchanges, in seconds: to connect, without a byte from the engine,
        without a byte taken by the client, for a connection to be kept, and without a sign of life
        of an engine's host.
        """
        self.core.limits.connect_ns = <int64_t>(connect_s * 1e9)
        self.core.limits.silence_ns = <int64_t>(silence_s * 1e9)
        self.core.limits.client_ns = <int64_t>(client_s * 1e9)
        self.core.limits.idle_ns = <int64_t>(idle_s * 1e9)
        self.core.limits.gone_ns = <int64_t>(gone_s * 1e9)

    def add_engine(self, str host not None, uint16_t port):
        """Adds an engine and returns its number.

        Takes an IP address and a port, or a Unix socket's path or @NAME and 0. ValueError for any
        other host.
        """
        return self.core.add_engine(host.encode(), port)

    def move_engine(self, uint32_t engine, str host not None, uint16_t port):
        """Lets the next connections go elsewhere; ValueError as from `add_engine`."""
        self.core.move_engine(engine, host.encode(), port)

    def remove_engine(self, uint32_t engine):
        """Forgets an engine that gets no further exchanges; those under way continue."""
        self.core.remove_engine(engine)

    def idle(self, uint32_t engine):
        """Returns the number of connections kept to an engine."""
        return self.core.idle(engine)

    def begin(self, uint32_t engine, int client_fd, bytes head not None, bytes body not None,
              size_t hold):
        """Sends a request; returns the exchange.

        A stream for a client is held until its first event is complete, any other answer until it
        is whole; either is ready at `hold` bytes of payload at the latest.
        """
        cdef uint64_t exchange = self.core.begin(
            engine, client_fd, PyBytes_AS_STRING(head), PyBytes_GET_SIZE(head),
            PyBytes_AS_STRING(body), PyBytes_GET_SIZE(body), hold,
        )
        cdef object number
        try:
            number = exchange
            self.bodies[number] = body
        except MemoryError:
            self.core.drop(exchange)  # or it would send the memory that the body had
            raise
        finally:
            self.core.clear_notices()
        return number

    def ready(self, uint64_t exchange):
        """Returns whether an answer waits to be forwarded."""
        return self.known(exchange).phase == ExchangePhase.kReady

    def ended(self, uint64_t exchange):
        """Returns whether the exchange has ended."""
        return self.known(exchange).phase == ExchangePhase.kEnded

    def answer(self, uint64_t exchange):
        """Returns how the answer of a ready exchange begins, as an Answer."""
        cdef const Exchange* x = self.known(exchange)
        return Answer(x.head.status, x.received, x.held, x.completes, x.head.events)

    def forward(self, uint64_t exchange, bytes head not None, bint chunked, bint marked=False):
        """Sends a ready answer to the client behind this head, in chunks or as it is.

        The stream of a `marked` one has a last event, [DONE]: without that it ends with CLOSED.

        The request, and all that was received of the answer, are forgotten.
        """
        if self.known(exchange).phase != ExchangePhase.kReady:
            raise ValueError("the exchange is not ready")
        cdef Framing framing = Framing.kChunks if chunked else Framing.kAsIs
        self.core.forward(exchange, PyBytes_AS_STRING(head), PyBytes_GET_SIZE(head), framing,
                          marked)
        del self.bodies[exchange]
        self.core.clear_notices()

    def fill(self, uint64_t exchange, bytes filler not None, double pause_s):
        """Sends `filler` between two events of a stream whenever nothing came for `pause_s`."""
        self.known(exchange)
        cdef int64_t pause_ns = <int64_t>(pause_s * 1e9)
        self.core.fill(exchange, PyBytes_AS_STRING(filler), PyBytes_GET_SIZE(filler), pause_ns)

    def ending(self, uint64_t exchange):
        """Returns how an exchange went, as an Ending."""
        cdef const Exchange* x = self.known(exchange)
        return Ending(OUTCOMES[<int>x.outcome], x.tail.size(), x.receives, x.tail.text())

    def drop(self, uint64_t exchange):
        """Forgets an exchange; to an engine that has not answered in full this is an abort."""
        self.known(exchange)
        self.core.drop(exchange)
        self.bodies.pop(exchange, None)

    def serve_ready(self, int64_t budget_ns):
        """Serves pending events until none is left or `budget_ns` nanoseconds have passed.

        Returns NOTHING if there were none, ALL, or SOME if more may be waiting.
        """
        cdef int served = <int>self.core.turn(budget_ns)
        self.deliver()
        return served

    def sweep(self):
        """Ends exchanges that have taken too long, and closes connections kept for too long."""
        self.core.sweep()
        self.deliver()

    def stats(self):
        """Returns the counters since the start, by name."""
        return self.core.stats

    cdef deliver(self):
        cdef size_t i
        cdef vector[Notice] notices = self.core.notices()
        self.core.clear_notices()
        for i in range(notices.size()):
            # One turn may give two notices of an exchange; the first call may drop it.
            if self.core.knows(notices[i].id):
                self.on_notice(notices[i].id)

    cdef const Exchange* known(self, uint64_t exchange) except NULL:
        if not self.core.knows(exchange):
            raise KeyError(exchange)
        return &self.core.exchange(exchange)
