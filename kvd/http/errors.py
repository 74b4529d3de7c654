"""The one place where a failure becomes a response: always JSON, always `{"error": text}`.

Clients of some faces are promised a code besides, `"reason"`, whoever refuses: the handler, which
says it itself, or the server, which has one for each status then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType

from kvd.errors import KvdError, Unavailable
from kvd.http.types import Headers, Response

INTERNAL_ERROR = "internal error"  # all a client learns about a bug; the log has the traceback


class Refusal(Exception):
    """The server itself refuses a request and closes the connection; `str()` is for the client."""

    def __init__(self, status: int, text: str, headers: Headers | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers or []
        self.silent = False  # for a HEAD, whose answer has no body


class Failures:
    """Words the failures of one face; `reasons` are its codes by status, of a face without none."""

    def __init__(self, reasons: Mapping[int, str] = MappingProxyType({})) -> None:
        self._reasons = reasons

    def body(self, status: int, text: str, details: Mapping[str, object] | None = None) -> bytes:
        """Returns the body of a failure; `details` are further members, and go before the code."""
        members: dict[str, object] = {"error": text}
        if status in self._reasons:
            members["reason"] = self._reasons[status]
        return json.dumps(members | dict(details or {})).encode()

    def response(
        self, status: int, text: str, details: Mapping[str, object] | None = None
    ) -> Response:
        """Returns a response with that body."""
        return Response(status, self.body(status, text, details))

    def refused(self, refusal: Refusal) -> Response:
        """Returns the response to what the server itself refuses."""
        response = self.response(refusal.status, str(refusal))
        response.headers.extend(refusal.headers)
        return response

    def too_large(self, limit: int) -> Response:
        """Returns the response to a body of more than `limit` bytes."""
        return self.response(413, f"the body is longer than {limit} bytes")

    def expected(self, failure: KvdError) -> Response:
        """Returns the response to an expected failure of a handler."""
        response = self.response(failure.status, str(failure), failure.details)
        if isinstance(failure, Unavailable) and failure.retry_after_s is not None:
            response.headers.append((b"retry-after", b"%d" % failure.retry_after_s))
        return response


PLAIN = Failures()  # of a face without codes
