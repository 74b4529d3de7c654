# distutils: language = c++
"""Data sheet of hot handlers: how the fast path and the task path ask one."""
from kvd.http.permits cimport Text


cdef class HotHandler:
    cdef bint bodiless      # it serves requests without a body
    cdef bint adds_request  # an answer adds one, which `undoing` takes back if its client has left
    cdef public bint waits  # it may leave a request to its task, which calls the handler and awaits
    cdef int status         # of the last answer: 200 or 201

    # The JSON of the answer, or None if the request has to wait: then nothing has changed. Raises
    # what is wrong with the request.
    #
    # `body` is followed by readable memory only up to `size`. `captured` is what stands in the path
    # for the route's placeholder, percent-decoded. `request` is the whole Request on a task's path.
    # On the fast path it is None: there is no query, no Idempotency-Key, and the body is JSON.
    cdef bytes answer(self, const char* body, size_t size, Text captured, request)

    # Of a handler that adds a request: a function that takes back what the last answer has done,
    # or None where there is nothing to take back.
    cdef undoing(self)

    # Of a handler that `waits`: the response to a request that `answer` has left, or an awaitable
    # of it.
    cdef waiting(self, request)
