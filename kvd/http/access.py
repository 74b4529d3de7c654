"""The access log: one line for each request, if enabled.

    event=request face=indexer method=POST path=/query status=200 duration_ms=0.142 bytes=312
        trace_id=4bf92f3577b34da6a3ce929d0e0e4736 request_id=...

No line has names of clients or engines, query values or bodies: `path` is the route's, or `-` if
no route has the path. Of a request that is refused for its head, `method` is `-` as well. The ids
are the client's, if they are well-formed: the trace id of its `traceparent` (W3C Trace Context,
level 1) and its `x-request-id`, which the answer repeats.
"""

from __future__ import annotations

import re

from kvd.http.messages import Headers
from kvd.telemetry.logs import get_logger

UNKNOWN = "-"
REQUEST_ID = b"x-request-id"
TRACEPARENT = b"traceparent"
_LOGGED = (REQUEST_ID, TRACEPARENT)

# Version, trace, parent, flags, and more in later versions; zeros are no trace, ff is no version.
_TRACEPARENT = re.compile(
    rb"(?!ff|00.{54})[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?"
)
# Fits UUIDs and the ids of proxies and gateways, but no text that has to be quoted anywhere.
_REQUEST_ID = re.compile(rb"[A-Za-z0-9_.:/@+=-]{1,128}")

log = get_logger("kvd.access")


class AccessLog:
    """Writes the access log of one face, while `enabled` is set."""

    __slots__ = ("enabled", "face")

    def __init__(self, face: str = "") -> None:
        self.face = face
        self.enabled = False

    def note(
        self,
        method: str,
        path: str | None,
        status: int,
        seconds: float,
        size: int,
        headers: Headers,
    ) -> Headers:
        """Writes a line; `size` is the answer body's in bytes, `path` is None without a route.

        Returns headers for the answer, which repeat the client's request id.
        """
        trace, request = _ids(headers)
        fields = {
            "face": self.face,
            "method": method,
            "path": path or UNKNOWN,
            "status": status,
            "duration_ms": round(seconds * 1000, 3),
            "bytes": 0 if method == "HEAD" else size,
        }
        if trace is not None:
            fields["trace_id"] = trace
        if request is not None:
            fields["request_id"] = request
        log.always("request", **fields)
        return _echoed(request)


def echoed(headers: Headers) -> Headers:
    """Returns headers for an answer, which repeat the request id in the request's `headers`."""
    return _echoed(_ids(headers)[1])


def logged(headers: Headers) -> Headers:
    """Returns the request headers from which a line is made."""
    return [each for each in headers if each[0] in _LOGGED]


def rendered(headers: Headers) -> bytes:
    """Returns header lines."""
    return b"".join(b"%b: %b\r\n" % header for header in headers)


def _echoed(request: str | None) -> Headers:
    return [] if request is None else [(REQUEST_ID, request.encode())]


def _ids(headers: Headers) -> tuple[str | None, str | None]:
    """Returns the trace id and the request id; None for one that is missing or malformed."""
    trace = request = None
    for name, value in headers:
        if name == TRACEPARENT and (match := _TRACEPARENT.fullmatch(value)):
            trace = match[1].decode()
        elif name == REQUEST_ID and _REQUEST_ID.fullmatch(value):
            request = value.decode()
    return trace, request
