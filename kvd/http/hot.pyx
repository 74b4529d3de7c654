# distutils: language = c++
"""The handler of a hot route: compiled, and the only one that the route has.

    fast path   bytes in the receive buffer ──> answer ──> bytes, sent from there
    task path   Request (TLS, chunked, keyed, with a query ...) ──> __call__ ──> answer ──> Response

Both ways lead through `answer`, so a rule of a route stands once. What is wrong with a request is
raised as a KvdError, with words that are written in Python (`kvd.faces.common.bodies`, and
`members` or `prompts` of a face).
"""
from urllib.parse import unquote_to_bytes

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE

from kvd.http.permits cimport Text

from kvd.http.messages import Response


cdef class HotHandler:
    """Answers one route's requests; see the data sheet for what a subclass says."""

    def __cinit__(self):
        self.status = 200

    def __call__(self, request not None):
        """Returns the response to a Request; one that waits is returned as an awaitable.

        Raises KvdError for what is wrong with the request.
        """
        cdef bytes body = request.body
        cdef bytes captured = unquote_to_bytes(request.captured)
        cdef Text segment
        segment.begin = PyBytes_AS_STRING(captured)
        segment.size = PyBytes_GET_SIZE(captured)
        answer = self.answer(PyBytes_AS_STRING(body), PyBytes_GET_SIZE(body), segment, request)
        if answer is None:
            return self.waiting(request)
        return Response(self.status, answer, undo=self.undoing() if self.adds_request else None)

    cdef bytes answer(self, const char* body, size_t size, Text captured, request):
        raise NotImplementedError

    cdef undoing(self):
        raise NotImplementedError

    cdef waiting(self, request):
        raise NotImplementedError
