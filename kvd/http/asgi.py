"""Passes one request to an ASGI application and its response to the client.

The types of ASGI messages are those of `hypercorn.typing`, which Quart uses as well.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from math import inf
from typing import TYPE_CHECKING, TypeAlias, cast

import trio

from kvd.http.errors import INTERNAL_ERROR, TOO_SLOW, Refusal
from kvd.http.head import Head
from kvd.http.messages import Headers
from kvd.http.table import Found
from kvd.http.transport import Transport
from kvd.http.writer import ResponseWriter
from kvd.telemetry.logs import get_logger

if TYPE_CHECKING:
    from hypercorn.typing import (
        ASGIReceiveCallable,
        ASGIReceiveEvent,
        ASGISendCallable,
        ASGISendEvent,
        ConnectionState,
        HTTPResponseBodyEvent,
        HTTPResponseStartEvent,
        HTTPScope,
    )

log = get_logger(__name__)

# Keys in a request's ASGI state: Request.known; the route that the server has found, or None.
KNOWN = "kvd.known"
FOUND = "kvd.found"
# Quoted, because hypercorn is loaded only together with Quart (http/cold.py).
Receive: TypeAlias = "ASGIReceiveCallable"
Send: TypeAlias = "ASGISendCallable"
AsgiApp = Callable[["HTTPScope", Receive, Send], Awaitable[None]]


class AsgiExchange:
    """One request and response; the application may take `handler_s` between its messages."""

    def __init__(
        self, transport: Transport, head: Head, found: Found | None, body: bytes, *, known: bool
    ) -> None:
        self.writer = ResponseWriter(transport, head)
        self._transport = transport
        self._head = head
        self._body: bytes | None = body
        self._state = cast("ConnectionState", {KNOWN: known, FOUND: found})
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        self._lost: OSError | None = None

    async def run(self, app: AsgiApp) -> None:
        """Returns when the response is sent.

        Raises:
            Refusal: the application did not answer, or not in time.
            OSError: the client is gone, or the response broke off in the middle.
        """
        request = self._request()
        self._extend()
        with self._scope:
            try:
                await app(request, self._receive, self._send)
            except Exception:
                self._transport.shared.stats.handler_bugs += 1
                log.exception("application_failed", path=request["path"])
        if self._lost is not None:
            try:
                raise self._lost
            finally:
                self._lost = None  # its traceback has this frame: a cycle
        if self._ended.is_set():
            return
        if self._scope.cancelled_caught:
            self._transport.shared.stats.handler_timeouts += 1
        if self.writer.status:
            raise ConnectionAbortedError("the application broke off its response")
        if self._scope.cancelled_caught:
            raise Refusal(503, TOO_SLOW)
        raise Refusal(500, INTERNAL_ERROR)

    def _extend(self) -> None:
        self._scope.deadline = trio.current_time() + self._transport.shared.limits.handler_s

    def _request(self) -> HTTPScope:
        head = self._head
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1" if head.http11 else "1.0",
            "method": head.method,
            "scheme": self._transport.scheme,
            "path": head.decoded_path(),
            "raw_path": head.path,
            "query_string": head.query,
            "root_path": "",
            "headers": head.headers,
            "client": self._transport.client(),
            "server": None,
            "state": self._state,
            "extensions": {},
        }

    async def _receive(self) -> ASGIReceiveEvent:
        """Returns the request at first; then, but only once the response is sent, a disconnection.

        Quart-trio cancels its request when it hears of a disconnection, even while it sends.
        """
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self._ended.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: ASGISendEvent) -> None:
        if self._ended.is_set():
            raise RuntimeError("the response has ended")
        if message["type"] == "http.response.start":
            self._start(message)
        elif message["type"] == "http.response.body":
            await self._send_body(message)

    def _start(self, message: HTTPResponseStartEvent) -> None:
        content_type, length = b"", None
        headers: Headers = []
        for name, value in message["headers"]:
            name = name.lower()
            if name == b"content-type":
                content_type = value
            elif name == b"content-length":
                length = int(value)
            else:
                headers.append((name, value))
        self.writer.start(message["status"], content_type, headers, length)

    async def _send_body(self, message: HTTPResponseBodyEvent) -> None:
        self._scope.deadline = inf  # the transport bounds a send
        try:
            await self.writer.write(message.get("body", b""))
            if not message.get("more_body", False):
                await self.writer.end()
                self._ended.set()
        except OSError as error:
            # The application would take this for a failure of its own: cancel it instead.
            self._lost = error
            self._scope.cancel()
        self._extend()
        await trio.lowlevel.checkpoint()
