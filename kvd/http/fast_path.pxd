# distutils: language = c++
"""Data sheet of the fast path, which receives requests, answers them and sends the answers."""
from libc.stdint cimport int64_t, uint32_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from kvd.http.hot cimport HotHandler
from kvd.http.permits cimport Claims, PermitRules, Text
from kvd.telemetry.counts cimport RequestCounts

cdef extern from "<sys/epoll.h>" nogil:
    ctypedef union epoll_data_t:
        int fd
    struct epoll_event:
        uint32_t events
        epoll_data_t data

cdef extern from "http/plain_head.hpp" namespace "kvd" nogil:
    cppclass PlainHeader:
        Text name
        Text value

    cppclass PlainHead:
        size_t size         # bytes, with the empty line
        Text route          # method and path with the space between them
        Text query          # behind the question mark
        size_t n_headers
        PlainHeader* headers
        size_t length       # of the body
        cbool json          # the body is announced as exactly application/json
        cbool keyed         # there is an Idempotency-Key
        Claims claims       # of the client

    cbool read_plain_head(const char* data, size_t n, PlainHead& head)
    bint host_is_named "kvd::names_host" (const Text& text)


cdef class Parkable:
    cdef public bint checks_host
    cdef public double since
    cdef public object trust

    cpdef note_granted(self, unsigned scope)


cdef class _HotRoute:
    cdef object route         # of http/routes.py
    cdef str method, path
    cdef unsigned scope
    cdef size_t body_limit    # bytes
    cdef bint relays, waits
    cdef HotHandler handler   # None if the route's is not compiled


cdef class _Arriving:
    cdef char* data
    cdef size_t size, got
    cdef bint swept  # it was there at the last sweep


cdef class FastPath:
    cdef int _epoll
    cdef char* _buffer
    cdef dict _routes
    cdef dict _parked, _arriving  # connections, and the requests of some of them, by descriptor
    cdef size_t _arriving_bytes
    # Taken from the set, but the last turn had no time for them; the next one begins with them, so
    # that none comes behind those that have asked again meanwhile.
    cdef vector[epoll_event] _postponed
    cdef int _reminder  # an eventfd in the set
    cdef list _patterns  # (beginning, end, route) of routes with a placeholder
    cdef PlainHead _head  # of the request being served
    cdef const char* _body  # of the same
    cdef object _serve, _log, _wake, _relay, _shared
    cdef PermitRules _permits
    cdef RequestCounts _counts
    cdef bint _dry  # the last receive found nothing
    cdef bint _emptied  # the last receive has left nothing
    # Start of the head of a 200 and of a 201 answer, up to its length; None: `serve` answers.
    cdef public bytes lines, created_lines
    cdef public bint logged  # whether answers are reported to `log` as well

    cdef int _watch(self, int operation, int fd) except -1
    cdef int _serve_until(self, int64_t end) except -1
    cdef int _serve_edge(self, const epoll_event& edge) except -1
    cdef int _remind(self) except -1
    cdef _exhaust(self, Parkable connection, int fd)
    cdef _step(self, Parkable connection, int fd)
    cdef int _forget(self, int fd) except -1
    cdef _receive_rest(self, Parkable connection, int fd, _Arriving request)
    cdef _take(self, Parkable connection, int fd, const char* data, size_t got)
    cdef _Arriving _keep(self, int fd, const char* data, size_t got, size_t size)
    cdef _answer(self, Parkable connection, int fd, _HotRoute route, Text captured)
    cdef _relayed(self, Parkable connection, _HotRoute route)
    cdef bytes _reported(self, Parkable connection, _HotRoute route, int status, double seconds,
                         bytes response)
    cdef _serve_other(self, Parkable connection, int fd, _HotRoute route, Text captured, error)
    cdef _HotRoute _find(self, Text* captured)
    cdef bint _suits(self, HotHandler handler, const Text& captured)
    cdef _send_answer(self, int fd, bytes head, bytes body, HotHandler handler)
    cdef _send(self, int fd, const char* data, size_t size, bint persists, undoing)
