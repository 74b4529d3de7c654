"""The layer around the Quart application: finds a request's route, bounds, counts and logs it.

Handlers cannot do this, because only the server knows when a streamed answer has ended, in whatever
way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from hypercorn.typing import ASGISendEvent, ConnectionState, HTTPScope

from kvd.http.access import echoed
from kvd.http.asgi import FOUND, AsgiApp, Receive, Send
from kvd.http.context import ServerContext
from kvd.http.errors import TOO_SLOW
from kvd.http.messages import Headers, Response
from kvd.http.routes import ConcurrencyLimit
from kvd.http.table import Found, RouteTable


def surrounded(app: AsgiApp, table: RouteTable, context: ServerContext) -> AsgiApp:
    """Returns `app` with every request reported to the context, and bounded as its route says."""

    async def surrounded_app(scope: HTTPScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        state = scope.setdefault("state", ConnectionState({}))
        if FOUND not in state:  # another server than this package's calls the application
            state[FOUND] = table.find(scope["method"], scope["raw_path"])
        found: Found | None = state[FOUND]
        path = table.label(scope["raw_path"]) if found is None else found.route.path
        with _observed(context, scope, path, send) as observed_send, _admitted(found) as refused:
            if refused is None:
                await app(scope, receive, observed_send)
            else:
                text = refused.text
                await _send_whole(observed_send, context.failures.response(503, text))

    return surrounded_app


@contextmanager
def _admitted(found: Found | None) -> Iterator[ConcurrencyLimit | None]:
    """Counts a request while it is under way; yields the bound that it would exceed, or None."""
    admission = None if found is None else found.route.admission
    if admission is None:
        yield None
    elif admission.inside >= admission.limit:
        admission.refused += 1
        yield admission
    else:
        admission.inside += 1
        try:
            yield None
        finally:
            admission.inside -= 1


@contextmanager
def _observed(
    context: ServerContext, scope: HTTPScope, path: str | None, send: Send
) -> Iterator[Send]:
    """Reports a request when its answer begins, and logs it when the answer has ended.

    Only requests to a path that some route has are counted.
    """
    counts, access = context.counts, context.access
    logs, headers = access.enabled, list(scope["headers"])
    started = perf_counter()
    status, size = 0, 0

    def answered(with_status: int) -> None:
        nonlocal status
        status = with_status
        if path is not None:
            counts.observe(path, scope["method"], status, perf_counter() - started)

    async def observed_send(message: ASGISendEvent) -> None:
        nonlocal size
        if message["type"] == "http.response.start":
            answered(message["status"])
            if logs:
                message["headers"] = [*message["headers"], *echoed(headers)]
        elif message["type"] == "http.response.body":
            size += len(message.get("body", b""))
        await send(message)

    try:
        yield observed_send
    finally:
        if not status:
            answered(503)  # the server answers instead of the application
            size = len(_body(context.failures.response(503, TOO_SLOW)))
        if logs:
            access.note(scope["method"], path, status, perf_counter() - started, size, headers)


async def _send_whole(send: Send, response: Response) -> None:
    body = _body(response)
    headers: Headers = [
        (b"content-type", response.content_type),
        (b"content-length", b"%d" % len(body)),
    ]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _body(response: Response) -> bytes:
    assert isinstance(response.body, bytes)
    return response.body
