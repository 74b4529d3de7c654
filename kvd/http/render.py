"""Renders response heads and chunks of HTTP/1.1. No I/O."""

from __future__ import annotations

from functools import lru_cache
from http import HTTPStatus

from kvd.http.messages import Headers, Response

CLOSE_LINE = b"connection: close\r\n"
KEEP_ALIVE_LINE = b"connection: keep-alive\r\n"  # HTTP/1.0 clients expect a close without it
CHUNKED_LINE = b"transfer-encoding: chunked\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"

BODILESS = frozenset((204, 304))  # statuses whose responses end with the head
_KNOWN_STATUSES = frozenset(int(status) for status in HTTPStatus)
# The connection alone decides on framing and persistence, whatever an application says of them.
_HOP_BY_HOP = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"upgrade"))


@lru_cache(maxsize=256)  # faces use a few dozen pairs of status and content type
def start_lines(status: int, content_type: bytes) -> bytes:
    """Returns the lines every response head of this kind begins with."""
    phrase = HTTPStatus(status).phrase if status in _KNOWN_STATUSES else ""
    start = f"HTTP/1.1 {status} {phrase}\r\n".encode()
    return start + b"content-type: %b\r\n" % content_type if content_type else start


def response_head(
    status: int,
    content_type: bytes,
    headers: Headers,
    length: int | None,
    lines: bytes,
) -> bytes:
    """Returns a response head with its empty line.

    `length` is that of the body in bytes, or None when the body is chunked or ends with the
    connection. `lines` are the rendered header lines of the date and of the connection.
    """
    further = b"".join(b"%b: %b\r\n" % header for header in headers if header[0] not in _HOP_BY_HOP)
    return framed_head(status, start_lines(status, content_type) + further, length, lines)


def framed_head(status: int, head: bytes, length: int | None, lines: bytes) -> bytes:
    """Does what `response_head` does, from a `head` of rendered status line and headers."""
    if length is None or status in BODILESS:
        return b"%b%b\r\n" % (head, lines)
    return b"%bcontent-length: %d\r\n%b\r\n" % (head, length, lines)


def whole_response(response: Response, body: bytes, lines: bytes, silent: bool) -> bytes:
    """Returns head and body in one piece; only the head if `silent`, as for a HEAD request."""
    head = response_head(response.status, response.content_type, response.headers, len(body), lines)
    return head if silent else head + body


def chunk(data: bytes) -> bytes:
    """Returns `data`, which must not be empty, as one chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)
