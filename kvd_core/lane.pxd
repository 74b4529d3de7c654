# distutils: language = c++
"""Data sheet of the fast lane: what answers requests there, and what receives and sends them."""
from libc.stdint cimport int64_t


cdef class Answerer:
    # The JSON of a 200 answer to the request body, None to leave the request to its handler.
    # `body` is followed by readable memory only up to `size`. Changes nothing that can be seen.
    cdef bytes answer(self, const char* body, size_t size)


cdef class Lane:
    cdef int _epoll
    cdef char* _buffer
    cdef dict _heads, _parked
    cdef object _serve, _note
    cdef public bytes lines  # of the head of a 200 answer, before its length; None: ask `serve`

    cdef _step(self, connection, int fd)
    cdef _answer(self, connection, int fd, head, size_t head_size, size_t body_size)
    cdef _send_answer(self, int fd, bytes body)
    cdef _send(self, int fd, const char* data, size_t size, bint persists)
