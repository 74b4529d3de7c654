"""What an ASGI application needs around it: `observed`, `admitted`, `logged`."""

from __future__ import annotations

from time import perf_counter

from hypercorn.typing import ASGISendEvent, HTTPScope

from kvd.http.access import AccessLog, echoed
from kvd.http.asgi import AsgiApp, Receive, Send
from kvd.http.errors import Failures, Refusal
from kvd.http.table import RouteTable
from kvd.http.types import Headers, Observer


def observed(app: AsgiApp, table: RouteTable, observe: Observer) -> AsgiApp:
    """Returns `app` with `observe` told of every request to a path of `table`."""

    async def observed_app(scope: HTTPScope, receive: Receive, send: Send) -> None:
        started = perf_counter()
        answered = False

        def note(status: int) -> None:
            nonlocal answered
            answered = True
            if path := table.label(scope.get("raw_path", b"")):
                observe(path, scope["method"], status, perf_counter() - started)

        async def noting_send(message: ASGISendEvent) -> None:
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

    async def logged_app(scope: HTTPScope, receive: Receive, send: Send) -> None:
        if not access.on or scope["type"] != "http":
            await app(scope, receive, send)
            return
        started = perf_counter()
        headers = list(scope["headers"])
        status, size = 503, 0  # the server answers in its place if it does not

        async def counting_send(message: ASGISendEvent) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *echoed(headers)]
            elif message["type"] == "http.response.body":
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

    async def admitted_app(scope: HTTPScope, receive: Receive, send: Send) -> None:
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


async def _send_refusal(send: Send, failures: Failures, refusal: Refusal) -> None:
    response = failures.refused(refusal)
    assert isinstance(response.body, bytes)
    headers: Headers = [
        (b"content-type", response.content_type),
        (b"content-length", b"%d" % len(response.body)),
        *response.headers,
    ]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": False})
