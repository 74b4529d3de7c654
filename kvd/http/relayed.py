"""A request whose answer another part writes to the client's socket, as a relay does.

    read here ─> handler ─> lent: the socket is written elsewhere ─> back here, or the end

The borrower of the socket frames the answer as the head made here announces, so that the connection
can go on with the next request afterwards. With TLS it borrows one end of a socket pair; what it
writes there is encrypted and sent to the client.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar

import trio

from kvd.http.access import logged
from kvd.http.head import Head
from kvd.http.messages import Response
from kvd.http.render import (
    CHUNKED_LINE,
    LAST_CHUNK,
    chunk,
    framed_head,
    start_lines,
    whole_response,
)
from kvd.http.transport import RECEIVE_BYTES, ConnectionPhase, Transport
from kvd.http.untasked import in_task
from kvd.http.writer import connection_lines, persists_after

T = TypeVar("T")

_ANSWERED = Head()  # in place of every head that is not needed any more


class RelayedRequest:
    """One request, read whole, and the client that waits for its answer."""

    __slots__ = ("_head", "_transport", "body", "headers", "is_checked", "method", "sent_bytes",
                 "status", "target")  # fmt: skip

    def __init__(self, transport: Transport, head: Head, body: bytes, *, is_checked: bool) -> None:
        """Takes a request; `is_checked`: its client has sent one of this server's tokens."""
        self.is_checked = is_checked
        self.method = head.method
        self.target = head.path + (b"?" + head.query if head.query else b"")
        self.headers = head.headers
        self.body = body
        self.status = 0  # of the answer; 0: none has begun
        self.sent_bytes = 0  # of the answer's body; a borrower's count is added at its end
        self._head = head
        self._transport = transport

    def release(self) -> None:
        """Frees the request once nothing of it is to be sent again: the answer may take long."""
        self.target = self.body = b""
        self.headers = logged(self.headers)
        self._head = _ANSWERED

    async def respond(self, response: Response) -> bool:
        """Sends an answer of kvd's own; returns whether the connection persists."""
        assert isinstance(response.body, bytes)
        await in_task()
        shared = self._transport.shared
        self.status, self.sent_bytes = response.status, len(response.body)
        persists = persists_after(response.status, self._head, shared)
        lines = connection_lines(self._head, shared, persists)
        await self._transport.send(whole_response(response, response.body, lines, silent=False))
        return persists

    def answer_head(self, status: int, own: bytes, length: int | None) -> tuple[bytes, bool, bool]:
        """Returns a head, whether the body is chunked, and whether the connection persists.

        `own` are the lines of its headers, except those of the connection. `length` is that of the
        body in bytes, None if it is not known: an HTTP/1.0 connection ends with such a body.
        """
        shared = self._transport.shared
        chunked = length is None and self._head.http11
        persists = persists_after(status, self._head, shared) and (length is not None or chunked)
        lines = connection_lines(self._head, shared, persists)
        if chunked:
            lines += CHUNKED_LINE
        self.status = status
        head = framed_head(status, start_lines(status, b"") + own, length, lines)
        return head, chunked, persists

    async def send_piece(self, data: bytes, *, chunked: bool, head: bytes = b"") -> None:
        """Sends the last piece of a body, after what a borrower has sent of it, or all of it.

        `head` is sent before the piece.
        """
        await in_task()
        self.sent_bytes += len(data)
        await self._transport.send(head + (chunk(data) if chunked else data))

    async def send_end(self, *, chunked: bool) -> None:
        """Ends an answer of which a borrower has sent everything but the end."""
        await in_task()
        await self._transport.send(LAST_CHUNK if chunked else b"")

    def reset_at_end(self) -> None:
        """Makes the client's connection end with a reset, which shows that the answer is cut.

        Any other end would look like the end of the answer, where nothing else delimits it.
        """
        self._transport.stream.reset_at_end()

    async def unless_left(self, waiting: Awaitable[T]) -> T:
        """Awaits `waiting`, in a task, for as long as the client is there.

        Raises:
            OSError: the client has left, and `waiting` was cancelled.
        """
        came: list[T] = []
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._cancel_at_end, nursery.cancel_scope)
            try:
                came.append(await waiting)
            except Exception as error:
                failure = error  # raised below, where no nursery makes a group of it
            nursery.cancel_scope.cancel()
        if failure is not None:
            try:
                raise failure
            finally:
                failure = None  # its traceback has this frame: a cycle with the request
        if not came:
            raise ConnectionResetError("the client left before its answer")
        return came[0]

    async def _cancel_at_end(self, waiting: trio.CancelScope) -> None:
        await self._transport.stream.wait_for_end()
        waiting.cancel()

    def borrow(self, stall_s: float) -> AbstractAsyncContextManager[int]:
        """Lends the client's socket, which nobody else touches meanwhile.

        The borrower ends an answer of which the client takes nothing for `stall_s`. With TLS that
        is done here, because the borrower does not see what the client takes.
        """
        self._transport.enter(ConnectionPhase.WORKING)
        if self._transport.stream.parks:  # the socket carries the client's bytes as they are
            return _PlainSocket(self._transport.fd)
        return self._borrow_pair(stall_s)

    @asynccontextmanager
    async def _borrow_pair(self, stall_s: float) -> AsyncIterator[int]:
        """Lends one end of a socket pair."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.setblocking(False)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, ours)
                sent = trio.Event()
                nursery.start_soon(self._encrypt, ours, sent, stall_s)
                yield theirs.fileno()
                theirs.shutdown(socket.SHUT_WR)
                await sent.wait()
                nursery.cancel_scope.cancel()

    async def _encrypt(self, plain: socket.socket, sent: trio.Event, stall_s: float) -> None:
        """Sends what the borrower writes, until it has written all."""
        try:
            while True:
                try:
                    data = plain.recv(RECEIVE_BYTES)
                except BlockingIOError:
                    await trio.lowlevel.wait_readable(plain)
                    continue
                if not data:
                    break
                await self._transport.send(data, stall_s)
                await trio.lowlevel.checkpoint()
        except OSError:
            _leave(plain)  # to the borrower this looks like a client that leaves
        sent.set()

    async def _watch(self, plain: socket.socket) -> None:
        await self._transport.stream.wait_for_end()
        _leave(plain)


class _PlainSocket(AbstractAsyncContextManager[int]):
    """Lends a socket as it is."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    async def __aenter__(self) -> int:
        return self._fd

    async def __aexit__(self, *_: object) -> None:
        """Takes it back."""


def _leave(plain: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has been left already
        plain.shutdown(socket.SHUT_RDWR)
