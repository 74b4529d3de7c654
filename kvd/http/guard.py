"""What an ASGI application needs around it: `observed`, `admitted`, `logged`.

Under hypercorn besides: `guarded`, and `restricted`, as the front asks who may ask by itself.
"""

from __future__ import annotations

from math import inf
from time import perf_counter
from typing import Any

import trio

from kvd.http.access import AccessLog, echoed
from kvd.http.asgi import KNOWN, AsgiApp, Message
from kvd.http.errors import Failures, Refusal
from kvd.http.permits import Permits, is_loopback
from kvd.http.table import RouteTable
from kvd.http.types import Headers, Observer


def observed(app: AsgiApp, table: RouteTable, observe: Observer) -> AsgiApp:
    """Returns `app` with `observe` told of every request to a path of `table`."""

    async def observed_app(scope: Any, receive: Any, send: Any) -> None:
        started = perf_counter()
        answered = False

        def note(status: int) -> None:
            nonlocal answered
            answered = True
            if path := table.label(scope.get("raw_path", b"")):
                observe(path, scope["method"], status, perf_counter() - started)

        async def noting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                note(message["status"])
            await send(message)

        try:
            await app(scope, receive, noting_send)
        finally:
            if not answered:  # the server answers in its place
                note(503)

    return observed_app


def logged(app: AsgiApp, table: RouteTable, access: AccessLog) -> AsgiApp:
    """Returns `app` with a line of the log for every request, while `access` is on."""

    async def logged_app(scope: Any, receive: Any, send: Any) -> None:
        if not access.on or scope["type"] != "http":
            await app(scope, receive, send)
            return
        started = perf_counter()
        headers = list(scope["headers"])
        status, size = 503, 0  # the server answers in its place if it does not

        async def counting_send(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *echoed(headers)]
            size += len(message.get("body", b""))
            await send(message)

        try:
            await app(scope, receive, counting_send)
        finally:
            path = table.label(scope.get("raw_path", b""))
            access.note(scope["method"], path, status, perf_counter() - started, size, headers)

    return logged_app


def admitted(app: AsgiApp, table: RouteTable, failures: Failures) -> AsgiApp:
    """Returns `app` with the bounds that routes of `table` have on requests under way.

    Here and not in the handler, because only the server knows when a streamed answer has ended,
    in whatever way.
    """

    async def admitted_app(scope: Any, receive: Any, send: Any) -> None:
        found = table.find(scope.get("method", ""), scope.get("raw_path", b""))
        admission = None if found is None else found.route.admission
        if admission is None:
            await app(scope, receive, send)
        elif admission.inside >= admission.limit:
            admission.refused += 1
            await _send_refusal(send, failures, Refusal(503, admission.text))
        else:
            admission.inside += 1
            try:
                await app(scope, receive, send)
            finally:
                admission.inside -= 1

    return admitted_app


def restricted(
    app: AsgiApp,
    table: RouteTable,
    permits: Permits,
    failures: Failures,
    observe: Observer | None,
    access: AccessLog,
    *,
    checks_host: bool,
) -> AsgiApp:
    """Returns `app` for those who may ask; the others are refused before a body is read.

    With `checks_host` requests to the loopback interface are, that are for another host.
    """

    async def restricted_app(scope: Any, receive: Any, send: Any) -> None:
        found = table.find(scope["method"], scope["raw_path"])
        server = scope.get("server")
        loopback = checks_host and server is not None and is_loopback(server[0])
        route = None if found is None else found.route
        refusal = permits.refusal(list(scope["headers"]), route, loopback)
        if refusal is None:
            known = permits.knows(list(scope["headers"]), loopback)
            await app({**scope, "state": {KNOWN: known}}, receive, send)
            return
        if observe is not None and route is not None:
            observe(route.path, scope["method"], refusal.status, 0.0)
        if access.on:
            path = None if route is None else route.path
            told = scope["method"], path, refusal.status, 0.0, 0, list(scope["headers"])
            refusal.headers = [*refusal.headers, *access.note(*told)]
        await _send_refusal(send, failures, refusal, (b"connection", b"close"))

    return restricted_app


def guarded(app: AsgiApp, handler_seconds: float, failures: Failures) -> AsgiApp:
    """Returns `app` fit for hypercorn: bounded in time, and HTTP requests only."""

    async def guarded_app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close"})  # hypercorn answers the handshake 403
            return
        await _Exchange(receive, send, handler_seconds, failures).run(app, scope)

    return guarded_app


class _Exchange:
    """One request; the application has `handler_seconds` between its messages."""

    def __init__(self, receive: Any, send: Any, handler_seconds: float, failures: Failures) -> None:
        self._failures = failures
        self._receive = receive
        self._send = send
        self._handler_seconds = handler_seconds
        self._scope = trio.CancelScope()
        self._started = False
        self._ended = trio.Event()

    async def run(self, app: AsgiApp, scope: Message) -> None:
        self._scope.deadline = trio.current_time() + self._handler_seconds
        with self._scope:
            await app(scope, self.receive, self.send)
        if self._scope.cancelled_caught and not self._started:
            closing = (b"connection", b"close")
            refusal = Refusal(503, "the request took too long")
            await _send_refusal(self._send, self._failures, refusal, closing)

    async def receive(self) -> Message:
        """Withholds the disconnection until the response is sent.

        Quart-trio cancels its request when it hears of one, and with it the end of hypercorn's
        last send, which restarts the keep-alive timer.
        """
        message: Message = await self._receive()
        if message["type"] == "http.disconnect":
            await self._ended.wait()
        return message

    async def send(self, message: Message) -> None:
        self._started = True
        self._scope.deadline = inf  # the connection bounds a send
        await self._send(message)
        self._scope.deadline = trio.current_time() + self._handler_seconds
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._ended.set()


async def _send_refusal(
    send: Any, failures: Failures, refusal: Refusal, *more: tuple[bytes, bytes]
) -> None:
    response = failures.refused(refusal)
    assert isinstance(response.body, bytes)
    headers: Headers = [
        (b"content-type", response.content_type),
        (b"content-length", b"%d" % len(response.body)),
        *response.headers,
        *more,
    ]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body})
