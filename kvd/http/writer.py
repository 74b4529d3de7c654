"""Sends one response whose body comes in pieces, with as few sends as the pieces allow."""

from __future__ import annotations

from kvd.http.head import Head
from kvd.http.messages import Headers
from kvd.http.render import (
    BODILESS,
    CHUNKED_LINE,
    CLOSE_LINE,
    KEEP_ALIVE_LINE,
    LAST_CHUNK,
    chunk,
    response_head,
)
from kvd.http.transport import Shared, Transport


def persists_after(status: int, head: Head, shared: Shared) -> bool:
    """Returns whether the connection may carry another request after this response."""
    return head.keep_alive and status != 500 and not shared.stopping


def connection_lines(head: Head, shared: Shared, persists: bool) -> bytes:
    """Returns the rendered header lines that every response has."""
    lines = head.lines + shared.date_line
    if not persists:
        return lines + CLOSE_LINE
    return lines if head.http11 else lines + KEEP_ALIVE_LINE


class ResponseWriter:
    """The response to the request `head`; call `start` once, `write` any number of times, `end`."""

    __slots__ = ("_chunked", "_head", "_missing", "_pending", "_silent", "_transport", "persists",
                 "status")  # fmt: skip

    def __init__(self, transport: Transport, head: Head) -> None:
        self.status = 0  # 0: not started
        self.persists = False
        self._transport = transport
        self._head = head
        self._pending = b""  # the response head until there is something to send with it
        self._chunked = False
        self._silent = False  # the response has no body, whatever is written
        self._missing: int | None = None  # bytes still owed of an announced length

    def start(self, status: int, content_type: bytes, headers: Headers, length: int | None) -> None:
        """Prepares the head and sends nothing yet; `length` is the body's, None if not known."""
        head, shared = self._head, self._transport.shared
        self.status = status
        self._missing = length
        self._silent = head.method == "HEAD" or status in BODILESS
        self._chunked = length is None and head.http11
        delimited = length is not None or head.http11 or self._silent
        self.persists = delimited and persists_after(status, head, shared)
        lines = connection_lines(head, shared, self.persists)
        if self._chunked and status not in BODILESS:
            lines += CHUNKED_LINE
        self._pending = response_head(status, content_type, headers, length, lines)

    async def write(self, piece: bytes) -> None:
        """Sends a piece of the body; raises OSError when the client is gone or does not read."""
        if self._silent or not piece:
            return
        if self._missing is not None:
            self._missing -= len(piece)
            if self._missing < 0:
                raise ValueError("more body than the announced content-length")
        await self._transport.send(self._pending + (chunk(piece) if self._chunked else piece))
        self._pending = b""

    async def end(self) -> None:
        """Sends what is left to send; raises as `write` does."""
        if self._missing and not self._silent:
            raise ValueError("less body than the announced content-length")
        rest = self._pending + (LAST_CHUNK if self._chunked and not self._silent else b"")
        self._pending = b""
        if rest:
            await self._transport.send(rest)
