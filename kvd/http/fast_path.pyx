# distutils: language = c++
"""Serves plain requests of hot routes without waking a task.

    parked ──> receive ──> may it be answered here? ── yes ──> whole? ── yes ──> answer ──> parked
                 ^              │ no                             │ no              │ not all sent
                 │ readable     v                                v                 v
                 │          woken with what was received      arriving           woken with the rest
                 │                                               │
                 └───────────────────────────────────────────────┘

A connection between two requests is *parked* here: one epoll set watches all parked connections,
while their tasks sleep. A request is answered on the spot if it is plain (http/plain_head.hpp), is
for a hot route and is granted (http/permits.hpp). The route's HotHandler answers it straight from
the receive buffer; where it cannot, `serve` calls the handler, or turns what it has raised into a
response. For everything else the connection's task is woken. So this module knows nothing of error
texts, refusals, deadlines or unusual HTTP.

A request whose head has come but not all of its body is *arriving*: it is kept in memory of its own
until the rest comes. One that is still arriving at the second sweep goes on in its task, which sets
a deadline for it.

1. A parked connection has no bytes that were received and not consumed, but those of an arriving
   request, nor any left to receive. An arriving request belongs to a parked connection.
2. Nothing is lost: bytes that were received and not served are handed to the task, in order.
3. The set is edge-triggered: an edge on a connection that is not parked is ignored, and `park`
   receives what came meanwhile. A receive that leaves room in the buffer has emptied the socket,
   unless it stopped at urgent data; only these and the end of the stream may have come with the
   data, and the same edge reports them.
4. Connections take turns: one request each, in the order in which they have asked, however long the
   requests are. Only `park`, and what comes with urgent data or the end, serve a short row.

Costs per request, beside the answer: two system calls, a share of an epoll_wait, under 1 µs.
"""
from collections import namedtuple

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.errno cimport EAGAIN, ECONNRESET, errno
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from posix.unistd cimport close, write

import os

from kvd.http.busy_wait cimport pollfd
from kvd.http.hot cimport HotHandler
from kvd.http.permits cimport Verdict
from kvd.telemetry.counts cimport RequestCounts
from kvd.telemetry.stretches cimport enter, kFastPath, leave, now_ns
from kvd_core.base.served cimport kAll, kNothing, kSome

from kvd.http.permits import ClientTrust

cdef extern from "<sys/epoll.h>" nogil:
    enum:
        EPOLL_CLOEXEC
        EPOLL_CTL_ADD
        EPOLL_CTL_MOD
        EPOLLIN
        EPOLLPRI
        EPOLLERR
        EPOLLHUP
        EPOLLRDHUP
        EPOLLET
    int epoll_create1(int flags)
    int epoll_ctl(int epfd, int op, int fd, epoll_event* event)
    int epoll_wait(int epfd, epoll_event* events, int maxevents, int timeout)

cdef extern from "<sys/eventfd.h>" nogil:
    enum:
        EFD_CLOEXEC
        EFD_NONBLOCK
    int eventfd(unsigned int initval, int flags)

cdef extern from "<poll.h>" nogil:
    enum:
        POLLERR
        POLLHUP
        POLLRDHUP
    int poll(pollfd* fds, unsigned long count, int timeout_ms)

cdef extern from "<sys/socket.h>" nogil:
    enum:
        MSG_DONTWAIT
        MSG_NOSIGNAL
    ssize_t recv(int fd, void* buffer, size_t length, int flags)
    ssize_t send(int fd, const void* buffer, size_t length, int flags)

cdef extern from "<string.h>" nogil:
    void* memcpy(void* to, const void* source, size_t n)
    int memcmp(const void* a, const void* b, size_t n)
    void* memchr(const void* text, int c, size_t n)

cdef extern from "json/text.hpp" namespace "kvd" nogil:
    char* put_text "kvd::put"(char* to, const char* text)
    char* put_number "kvd::put"(char* to, uint64_t value)


# What a connection's task is woken with: the bytes `received` and not consumed, the `unsent` bytes
# of a response, whether the connection may carry another request (not once the client has ended
# its stream), a function to call if the response cannot be sent, or None, and the rest of a relayed
# request (kvd.http.untasked), an answer in pieces (kvd.http.serving), or None.
Handoff = namedtuple(
    "Handoff", ("received", "unsent", "persists", "undo", "rest"), defaults=(None, None)
)
# A whole request that was granted, for a route whose answers are relayed.
PlainRequest = namedtuple("PlainRequest", ("route", "path", "query", "headers", "body"))

_LEFT = object()  # the request is left to the connection's task
_TAKEN = object()  # a relay has the connection: it is not parked, and its task sleeps on
_KNOWN = ClientTrust.KNOWN

cdef enum:
    kMaxTurnNs = 500 * 1000  # of a turn in which requests are long: then it leaves connections out
    kEvents = 16  # edges taken from the set at once
    kStreak = 8  # requests of one connection in a row before others have their turn
    # Bytes of one receive, and of the longest request served here: room for 260,000 token ids. Only
    # what requests have filled is resident.
    kBuffer = 2 * 1024 * 1024
    kMaxArriving = 32 * 1024 * 1024  # bytes of arriving requests; further ones go to their tasks
    kLengthLine = 48  # most bytes of a head's last line
    kCreated = 201


cdef bytes as_bytes(const Text& text):
    return PyBytes_FromStringAndSize(text.begin, text.size) if text.size else b""


cdef Text as_text(bytes data):
    cdef Text text
    text.begin = PyBytes_AS_STRING(data)
    text.size = PyBytes_GET_SIZE(data)
    return text


cdef list headers_of(const PlainHead& head):
    cdef size_t i
    return [
        (as_bytes(head.headers[i].name).lower(), as_bytes(head.headers[i].value))
        for i in range(head.n_headers)
    ]


def plain_head(bytes data not None):
    """Reads the plain head at the start of `data`; returns None if there is none.

    Returns its size, `METHOD /path`, the query, the headers, the length of the body, whether the
    body is JSON, and whether there is an Idempotency-Key.
    """
    cdef PlainHead head
    if not read_plain_head(PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data), head):
        return None
    route, query = as_bytes(head.route), as_bytes(head.query)
    return head.size, route, query, headers_of(head), head.length, head.json, head.keyed


cdef bint _left(int fd) noexcept:
    cdef pollfd client
    client.fd = fd
    client.events = POLLRDHUP
    return poll(&client, 1, 0) > 0 and client.revents & (POLLRDHUP | POLLHUP | POLLERR)


def has_left(int fd):
    """Returns whether a client has ended its stream, even if bytes before the end are unread."""
    return _left(fd)


def names_host(bytes value not None):
    """Returns whether every reader takes a value for the same host (http/plain_head.hpp)."""
    return host_is_named(as_text(value))


cdef class _Arriving:
    """A request that has not come whole: `got` bytes of `size`."""

    def __cinit__(self, size_t size):
        self.data = <char*>malloc(size)
        if self.data == NULL:
            raise MemoryError
        self.size = size

    def __dealloc__(self):
        free(self.data)


cdef class Parkable:
    """What the fast path reads and writes of a connection; the base of `Transport`.

    checks_host  whether requests must name this server as their host (http/permits.hpp)
    since        when the phase began, or up to a tick earlier: seconds of trio's clock
    trust        a ClientTrust
    """

    def __init__(self, bint checks_host):
        self.checks_host = checks_host
        self.trust = ClientTrust.NEW

    cpdef note_granted(self, unsigned scope):
        """Notes that a request of this scope has been granted."""
        if self.trust is not _KNOWN:
            self.trust = _KNOWN if scope else ClientTrust.UNKNOWN


cdef class _HotRoute:
    """A hot route, with its members as each request needs them."""

    def __cinit__(self, route not None):
        self.route = route
        self.method = route.method
        self.path = route.path
        self.scope = route.scope
        self.body_limit = route.body_limit
        self.relays = route.relays is not None
        self.waits = route.waits
        self.handler = route.handler if isinstance(route.handler, HotHandler) else None


cdef class FastPath:
    """The parked connections of one listener."""

    def __cinit__(self, dict routes not None, list patterns not None, serve not None, log not None,
                  wake not None, relay not None, PermitRules permits not None, shared not None,
                  RequestCounts counts not None):
        """Takes hot routes by the beginning of their requests (`POST /query`).

        A request that has to wait, or that `permits` do not grant, is left to the connection's
        task, which refuses the latter.

        patterns   the hot routes with a placeholder: the text before it, the text after it, the
                   route
        serve(connection, route, captured, query, headers, body, error)
                   calls a handler that is no HotHandler or needs the whole Request, or words the
                   `error` that a HotHandler has raised (else None). Returns the response, whether
                   the connection persists, and None or a function that undoes what was done, to be
                   called if the client has left or cannot be sent the response; or a Handoff to
                   wake the task with
        log(connection, route, status, seconds, size, headers)
                   is called with each answer of a HotHandler while `logged` is set; returns further
                   lines for the head of the answer
        wake(connection, outcome)
                   wakes the task of a connection that is parked no more
        relay(connection, PlainRequest)
                   begins to serve a request whose answer is relayed. Returns what to wake the task
                   with, or None: then the end of the relay parks the connection again
        shared     what connections share: `now`, and `stats` with their `requests`
        counts     counts the answers of each HotHandler
        """
        self._routes = {begin: _HotRoute(route) for begin, route in routes.items()}
        self._patterns = [(begin, end, _HotRoute(route)) for begin, end, route in patterns]
        self._serve = serve
        self._shared = shared
        self._counts = counts
        self._log = log
        self._wake = wake
        self._relay = relay
        self._permits = permits
        self._parked = {}
        self._arriving = {}
        self._buffer = <char*>malloc(kBuffer)
        if self._buffer == NULL:
            raise MemoryError
        self._epoll = epoll_create1(EPOLL_CLOEXEC)
        if self._epoll < 0:
            raise OSError(errno, os.strerror(errno))
        self._reminder = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
        if self._reminder < 0:
            raise OSError(errno, os.strerror(errno))
        self._watch(EPOLL_CTL_ADD, self._reminder)

    def __dealloc__(self):
        self.close()
        free(self._buffer)

    def close(self):
        """Forgets all connections, without closing them."""
        if self._epoll >= 0:
            close(self._epoll)
            self._epoll = -1
        if self._reminder >= 0:
            close(self._reminder)
            self._reminder = -1

    def fileno(self):
        """Returns a descriptor that is readable when `serve_ready` has something to do."""
        return self._epoll

    def add(self, int fd):
        """Watches a connected socket until it is closed."""
        self._watch(EPOLL_CTL_ADD, fd)

    cdef int _watch(self, int operation, int fd) except -1:
        cdef epoll_event event
        event.events = EPOLLIN | EPOLLPRI | EPOLLRDHUP | EPOLLET
        event.data.fd = fd
        if epoll_ctl(self._epoll, operation, fd, &event) < 0:
            raise OSError(errno, os.strerror(errno))
        return 0

    def park(self, Parkable connection not None, int fd):
        """Takes over a connection whose task is idle; returns None, or what to wake the task with.

        Requests that have come already are served first, kStreak of them at most.
        """
        outcome = self._exhaust(connection, fd)
        if outcome is None:
            self._parked[fd] = connection
        return None if outcome is _TAKEN else outcome

    cdef _exhaust(self, Parkable connection, int fd):
        """Serves until the socket is empty; returns None then, else what `_step` does."""
        cdef int left = kStreak
        cdef int64_t end = now_ns() + kMaxTurnNs
        while left > 0 and now_ns() < end:
            outcome = self._step(connection, fd)
            if outcome is not None or self._dry:
                return outcome
            left -= 1
        return Handoff(b"", b"", True)

    def unpark(self, int fd):
        """Gives a connection back to its task, without what has come of an arriving request."""
        self._parked.pop(fd, None)
        self._forget(fd)

    def is_arriving(self, int fd):
        """Returns whether a part of a request has come and is kept here."""
        return fd in self._arriving

    def sweep(self):
        """Hands requests that were already arriving at the last sweep to their tasks."""
        cdef _Arriving request
        for fd, request in list(self._arriving.items()):
            if request.swept:
                self._forget(fd)
                self._wake(self._parked.pop(fd), _received(request.data, request.got))
            request.swept = True

    cdef int _forget(self, int fd) except -1:
        cdef _Arriving request = self._arriving.pop(fd, None)
        if request is not None:
            self._arriving_bytes -= request.size
        return 0

    def serve_ready(self, int64_t budget_ns):
        """Serves what has come, until nothing is left or `budget_ns` nanoseconds have passed.

        Returns what the turn has come to (base/served.pxd).
        """
        cdef int64_t now = enter(kFastPath)
        try:
            return self._serve_until(now + budget_ns)
        finally:
            leave()

    cdef int _serve_until(self, int64_t end) except -1:
        cdef epoll_event events[kEvents]
        cdef int count, i, rest, done
        cdef size_t served = 0
        cdef int64_t late = end + kMaxTurnNs
        while served < self._postponed.size():
            self._serve_edge(self._postponed[served])
            served += 1
            if now_ns() >= late:
                self._postponed.erase(self._postponed.begin(), self._postponed.begin() + served)
                return kSome
        self._postponed.clear()
        done = kAll if served else kNothing
        while True:
            count = epoll_wait(self._epoll, events, kEvents, 0)
            if count <= 0:
                return done
            done = kAll
            for i in range(count):
                self._serve_edge(events[i])
                if i + 1 < count and now_ns() >= late:
                    for rest in range(i + 1, count):
                        self._postponed.push_back(events[rest])
                    self._remind()
                    return kSome
            if count < kEvents:
                return kAll
            if now_ns() >= end:
                return kSome

    cdef int _serve_edge(self, const epoll_event& edge) except -1:
        """Serves one request of a reported connection, or all if it has reported more than data."""
        cdef int fd = edge.data.fd
        cdef Parkable connection = self._parked.get(fd)
        if connection is None:
            return 0
        outcome = self._step(connection, fd)
        if outcome is None and edge.events & ~<uint32_t>EPOLLIN:
            # Urgent data, before which a receive stops, or the end of the stream.
            outcome = self._exhaust(connection, fd)
        elif outcome is None and not self._emptied:
            self._watch(EPOLL_CTL_MOD, fd)  # reports it again, behind all others, if more has come
        if outcome is not None:
            self._parked.pop(fd, None)
            if outcome is not _TAKEN:
                self._wake(connection, outcome)
        return 0

    cdef int _remind(self) except -1:
        """Makes the set readable, until it is waited on, though it reports no connection."""
        cdef uint64_t one = 1
        if write(self._reminder, &one, sizeof(one)) < 0:
            raise OSError(errno, os.strerror(errno))
        return 0

    cdef _step(self, Parkable connection, int fd):
        """Receives once and serves that; returns None, _TAKEN, or what to wake the task with."""
        cdef ssize_t got
        if self._arriving:
            request = self._arriving.get(fd)
            if request is not None:
                return self._receive_rest(connection, fd, request)
        got = recv(fd, self._buffer, kBuffer, MSG_DONTWAIT)
        self._dry = got < 0 and errno == EAGAIN
        # After a full buffer the socket may have more, which no further edge would report.
        self._emptied = got < kBuffer
        if self._dry:
            return None
        if got <= 0:  # the end, or a reset while no request is under way
            return Handoff(b"", b"", False)
        return self._take(connection, fd, self._buffer, got)

    cdef _receive_rest(self, Parkable connection, int fd, _Arriving request):
        """Receives what has come of an arriving request; serves it once it is whole."""
        cdef ssize_t got = 1
        while got > 0 and request.got < request.size:
            got = recv(fd, request.data + request.got, request.size - request.got, MSG_DONTWAIT)
            request.got += max(got, 0)
        self._dry = self._emptied = got < 0 and errno == EAGAIN
        if self._dry:
            return None
        self._forget(fd)
        if got <= 0:  # the client has left: its task finds the same
            return _received(request.data, request.got)
        return self._take(connection, fd, request.data, request.got)

    cdef _take(self, Parkable connection, int fd, const char* data, size_t got):
        """Serves what was received, or keeps it until the rest comes; returns what `_step` does."""
        cdef _HotRoute route
        cdef Text captured
        cdef size_t size
        if not read_plain_head(data, got, self._head):
            return _received(data, got)
        captured.begin = NULL
        captured.size = 0
        route = self._routes.get(as_bytes(self._head.route))
        if route is None and self._patterns:
            route = self._find(&captured)
        size = self._head.size + self._head.length
        if (
            route is None
            or not got <= size <= kBuffer
            or self._head.length > route.body_limit
            or self._permits.core.judge(
                self._head.claims, route.scope, connection.checks_host
            ) != Verdict.granted
        ):
            return _received(data, got)
        if got < size:
            if self._arriving_bytes + size > kMaxArriving:
                return _received(data, got)
            return self._receive_rest(connection, fd, self._keep(fd, data, got, size))
        self._body = data + self._head.size
        outcome = self._answer(connection, fd, route, captured)
        return _received(data, got) if outcome is _LEFT else outcome

    cdef _Arriving _keep(self, int fd, const char* data, size_t got, size_t size):
        """Keeps the beginning of a request of `size` bytes."""
        cdef _Arriving request = _Arriving(size)
        memcpy(request.data, data, got)
        request.got = got
        self._arriving[fd] = request
        self._arriving_bytes += size
        return request

    cdef _HotRoute _find(self, Text* captured):
        """Returns the route with a placeholder that matches the head's path, or None."""
        cdef Text path = self._head.route
        cdef bytes begin, end
        cdef size_t before, after
        cdef _HotRoute route
        for begin, end, route in self._patterns:
            before, after = PyBytes_GET_SIZE(begin), PyBytes_GET_SIZE(end)
            if path.size <= before + after or memcmp(path.begin, PyBytes_AS_STRING(begin), before):
                continue
            if memcmp(path.begin + path.size - after, PyBytes_AS_STRING(end), after):
                continue
            captured.begin = path.begin + before
            captured.size = path.size - before - after
            if memchr(captured.begin, c"/", captured.size) == NULL:
                return route
        return None

    cdef _answer(self, Parkable connection, int fd, _HotRoute route, Text captured):
        """Answers a whole request; returns what `_step` does, or _LEFT."""
        cdef bytes response
        cdef int64_t started = now_ns()
        cdef HotHandler handler = route.handler
        if route.relays:
            return self._relayed(connection, route)
        try:
            if handler is None or not self._suits(handler, captured):
                if route.waits:
                    return _LEFT
                return self._serve_other(connection, fd, route, captured, None)
            try:
                response = handler.answer(self._body, self._head.length, captured, None)
            except Exception as error:
                return self._serve_other(connection, fd, route, captured, error)
            if response is None:
                return _LEFT
            seconds = (now_ns() - started) * 1e-9
            try:
                lines = self._reported(connection, route, handler.status, seconds, response)
            except BaseException:
                _undo(handler)
                raise
            return self._send_answer(fd, lines, response, handler)
        except Exception as error:  # a bug: the connection's task reports it and ends
            return error

    cdef _relayed(self, Parkable connection, _HotRoute route):
        """Hands a whole request to the relay; returns _TAKEN, or what to wake the task with."""
        cdef Text path = self._head.route
        cdef size_t method = <const char*>memchr(path.begin, c" ", path.size) + 1 - path.begin
        path.begin += method
        path.size -= method
        body = PyBytes_FromStringAndSize(self._body, self._head.length)
        query = as_bytes(self._head.query)
        outcome = self._relay(
            connection,
            PlainRequest(route.route, as_bytes(path), query, headers_of(self._head), body),
        )
        return _TAKEN if outcome is None else outcome

    cdef bytes _reported(self, Parkable connection, _HotRoute route, int status, double seconds,
                         bytes response):
        """Counts and logs an answer that is about to be sent; returns the lines of its head."""
        stats = self._shared.stats
        stats.requests += 1
        connection.since = self._shared.now
        connection.note_granted(route.scope)
        self._counts.observe(route.path, route.method, status, seconds)
        lines = self.created_lines if status == kCreated else self.lines
        if self.logged:
            size = PyBytes_GET_SIZE(response)
            lines += self._log(
                connection, route.route, status, seconds, size, headers_of(self._head)
            )
        return lines

    cdef _serve_other(self, Parkable connection, int fd, _HotRoute route, Text captured, error):
        """Lets `serve` make the answer, or word the `error` that the handler raised; sends it."""
        cdef bytes response
        outcome = self._serve(
            connection,
            route.route,
            as_bytes(captured),
            as_bytes(self._head.query),
            headers_of(self._head),
            PyBytes_FromStringAndSize(self._body, self._head.length),
            error,
        )
        if isinstance(outcome, Handoff):
            return outcome
        response, persists, undo = outcome
        return self._send(
            fd, PyBytes_AS_STRING(response), PyBytes_GET_SIZE(response), persists, undo
        )

    cdef bint _suits(self, HotHandler handler, const Text& captured):
        """Returns whether a handler can answer the request without a Request object."""
        if self.lines is None or self._head.keyed or self._head.query.size:
            return False
        if captured.size and memchr(captured.begin, c"%", captured.size) != NULL:
            return False
        return self._head.length == 0 if handler.bodiless else self._head.json

    cdef _send_answer(self, int fd, bytes head, bytes body, HotHandler handler):
        cdef size_t lines = PyBytes_GET_SIZE(head), size = PyBytes_GET_SIZE(body)
        cdef char* out = self._buffer
        undoing = handler if handler.adds_request else None
        if lines + kLengthLine + size > kBuffer:  # a long one: its task sends it in pieces
            response = b"%bcontent-length: %d\r\n\r\n%b" % (head, size, body)
            return Handoff(b"", response, True, None if undoing is None else handler.undoing())
        memcpy(out, PyBytes_AS_STRING(head), lines)
        out += lines
        out = put_text(put_number(put_text(out, b"content-length: "), size), b"\r\n\r\n")
        memcpy(out, PyBytes_AS_STRING(body), size)
        return self._send(fd, self._buffer, out + size - self._buffer, True, undoing)

    cdef _send(self, int fd, const char* data, size_t size, bint persists, undoing):
        """Sends a response; `undoing` is a HotHandler that adds a request, a function or None."""
        cdef ssize_t sent = -1
        cdef int failure = ECONNRESET
        if undoing is None or not _left(fd):
            sent = send(fd, data, size, MSG_DONTWAIT | MSG_NOSIGNAL)
            failure = errno
        if <size_t>sent == size and persists:
            return None
        undo = (<HotHandler>undoing).undoing() if isinstance(undoing, HotHandler) else undoing
        if sent < 0 and failure != EAGAIN:
            if undo is not None:
                undo()
            return OSError(failure, os.strerror(failure))
        sent = max(sent, 0)
        unsent = PyBytes_FromStringAndSize(data + sent, size - sent)
        return Handoff(b"", unsent, persists, undo if unsent else None)


cdef _received(const char* data, size_t size):
    """Returns what a task is woken with that is to serve received bytes itself."""
    return Handoff(PyBytes_FromStringAndSize(data, size), b"", True)


cdef int _undo(HotHandler handler) except -1:
    """Takes back what a handler's last answer has done, if that can be undone."""
    undo = handler.undoing() if handler.adds_request else None
    if undo is not None:
        undo()
    return 0
