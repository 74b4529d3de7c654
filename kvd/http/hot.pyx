# distutils: language = c++
"""The handler of a hot route: compiled, and the only one that the route has.

    fast path   bytes in the receive buffer ──> answer ──> bytes, sent from there
    task path   Request (TLS, chunked, keyed, with a query ...) ──> __call__ ──> answer ──> Response

Both paths call `answer`, so each rule of a route is written once. For a bad request it raises a
KvdError, whose text is written in Python (`kvd.faces.common.bodies`, and `members` or `prompts` of
a face).
"""
from urllib.parse import unquote_to_bytes

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE

from kvd.http.permits cimport Text

from kvd.http.messages import Response


cdef class HotHandler:
    """Answers one route's requests; the data sheet says what a subclass defines."""

    def __cinit__(self):
        self.status = 200

    def __call__(self, request not None):
        """Returns the response to a Request, or an awaitable of it if the request has to wait.

        Raises KvdError for a bad request.
        """
        cdef bytes body = request.body
        cdef bytes captured = unquote_to_bytes(request.captured)
        cdef Text segment
        segment.begin = PyBytes_AS_STRING(captured)
        segment.size = PyBytes_GET_SIZE(captured)
        if request.ahead is not None:
            self.scanner.adopt(request.ahead)
        try:
            answer = self.answer(PyBytes_AS_STRING(body), PyBytes_GET_SIZE(body), segment, request)
        finally:
            if request.ahead is not None:
                self.scanner.disown()
        if answer is None:
            return self.waiting(request)
        return Response(self.status, answer, undo=self.undoing() if self.adds_request else None)

    def ahead(self, bytes body not None):
        """Returns a ScanAhead of a long body, for `Request.ahead`; None if it would not be used."""
        return None if self.scanner is None else self.scanner.ahead(body)

    cdef bytes answer(self, const char* body, size_t size, Text captured, request):
        raise NotImplementedError

    cdef undoing(self):
        raise NotImplementedError

    cdef waiting(self, request):
        raise NotImplementedError
