"""The one place where a failure becomes a response: always JSON, always `{"error": text}`."""

from __future__ import annotations

import json
from collections.abc import Mapping

from kvd.errors import KvdError, Unavailable
from kvd.http.types import Headers, Response

INTERNAL_ERROR = "internal error"  # all a client learns about a bug; the log has the traceback


class Refusal(Exception):
    """The server itself refuses a request and closes the connection; `str()` is for the client."""

    def __init__(self, status: int, text: str, headers: Headers | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers or []

    def response(self) -> Response:
        return Response(self.status, error_body(str(self)), headers=self.headers)


def error_body(text: str, details: Mapping[str, object] | None = None) -> bytes:
    """Returns the body every failure of every face has, and what a face says besides."""
    return json.dumps({"error": text, **(details or {})}).encode()


def error_response(status: int, text: str, details: Mapping[str, object] | None = None) -> Response:
    """Returns a response with that body."""
    return Response(status, error_body(text, details))


def too_large(limit: int) -> Response:
    """Returns the response to a body of more than `limit` bytes."""
    return error_response(413, f"the body is longer than {limit} bytes")


def failure_response(failure: KvdError) -> Response:
    """Returns the response to an expected failure of a handler."""
    response = error_response(failure.status, str(failure), failure.details)
    if isinstance(failure, Unavailable) and failure.retry_after_s is not None:
        response.headers.append((b"retry-after", b"%d" % failure.retry_after_s))
    return response
