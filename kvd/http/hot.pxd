# distutils: language = c++
"""Data sheet of hot handlers: how the fast path and the task path call one."""
from kvd.http.permits cimport Text
from kvd_core.json.scan cimport BodyScanner


cdef class HotHandler:
    cdef bint bodiless      # it serves requests without a body
    cdef BodyScanner scanner  # reads its bodies; None: they are short
    cdef bint adds_request  # it adds a request, which `undoing` takes back if the client has left
    cdef public bint waits  # it may leave a request to the connection's task, which awaits it
    cdef int status         # of the last answer: 200 or 201

    # Returns the JSON of the answer, or None if the request has to wait or its answer is long: then
    # nothing has changed. Raises KvdError for a bad request.
    #
    # `body` is readable up to `size` only. `captured` is the path segment in place of the route's
    # placeholder, percent-decoded. `request` is the whole Request on the task path. On the fast
    # path it is None: there is no query, no Idempotency-Key, and the body is JSON.
    cdef bytes answer(self, const char* body, size_t size, Text captured, request)

    # If the handler `adds_request`: returns a function that takes back what the last answer has
    # done, or None if there is nothing to take back.
    cdef undoing(self)

    # Returns the response to a request for which `answer` has just returned None; if the handler
    # `waits`, or an awaitable of it.
    cdef waiting(self, request)
