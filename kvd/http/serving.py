"""Calls the handlers of hot routes for connections, and renders, counts and logs their answers.

A long answer is not rendered here: its connection sends it in pieces.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from time import perf_counter
from typing import NamedTuple, TypeAlias

import trio

from kvd.http.access import rendered
from kvd.http.answer import answer, answer_now
from kvd.http.asgi import AsgiApp
from kvd.http.context import ServerContext
from kvd.http.errors import TOO_SLOW
from kvd.http.fast_path import FastPath
from kvd.http.head import Head
from kvd.http.messages import Headers, Request, Response
from kvd.http.render import whole_response
from kvd.http.routes import Scope
from kvd.http.table import Found, RouteTable
from kvd.http.transport import Shared
from kvd.http.writer import connection_lines, persists_after
from kvd_core.json.scan import ScanAhead

Undo = Callable[[], None] | None


class Streamed(NamedTuple):
    """An answer that is counted, but not logged, and has to be sent in pieces."""

    head: Head  # the request's
    path: str  # the route's
    response: Response
    body: AsyncGenerator[bytes, None]  # the response's


# The rendered response, whether the connection persists, and a function to call if the client has
# left or cannot be sent the response (or None); or an answer in pieces.
Served: TypeAlias = tuple[bytes, bool, Undo] | Streamed


class ListenerContext:
    """The routes of a listener, and the fast path in which its connections are parked."""

    def __init__(
        self, table: RouteTable, app: AsgiApp, context: ServerContext, fast_path: FastPath
    ) -> None:
        self.table = table
        self.app = app
        self.context = context
        self.fast_path = fast_path
        self.failures = context.failures
        self._too_long = self.failures.response(503, TOO_SLOW)
        self.counts = context.counts
        self.access = context.access

    def serve(
        self,
        shared: Shared,
        head: Head,
        found: Found,
        body: bytes,
        checks_host: bool,
        raised: Exception | None = None,
        ahead: ScanAhead | None = None,
    ) -> Served:
        """Calls a handler that does not wait, unless it has already `raised` an exception."""
        started = perf_counter()
        request = self._request(head, found, body, checks_host, ahead)
        response = answer_now(found.route, request, self.failures, raised)
        return self._rendered(shared, head, found, response, started)

    async def serve_waiting(
        self,
        shared: Shared,
        head: Head,
        found: Found,
        body: bytes,
        checks_host: bool,
        ahead: ScanAhead | None = None,
    ) -> Served:
        """Does what `serve` does for an asynchronous handler, which may take `handler_s`."""
        started = perf_counter()
        response = self._too_long
        with trio.move_on_after(shared.limits.handler_s) as scope:
            request = self._request(head, found, body, checks_host, ahead)
            response = await answer(found.route, request, self.failures)
        shared.stats.handler_timeouts += scope.cancelled_caught
        return self._rendered(shared, head, found, response, started)

    def note(
        self,
        method: str,
        path: str | None,
        status: int,
        seconds: float,
        size: int,
        headers: Headers,
    ) -> bytes:
        """Counts and logs a request; returns header lines for its answer.

        `path` is its route's, None without a route. `status` 0: no answer was begun. The body of
        the answer has `size` bytes.
        """
        if path is not None:
            self.counts.observe(path, method, status, seconds)
        if not self.access.enabled:
            return b""
        return rendered(self.access.note(method, path, status, seconds, size, headers))

    def _request(
        self, head: Head, found: Found, body: bytes, checks_host: bool, ahead: ScanAhead | None
    ) -> Request:
        route, captured = found
        known = route.scope == Scope.OPEN and self.context.authorizer.knows(
            head.headers, checks_host
        )
        return Request(
            head.method, route.path, head.query, head.headers, body, captured, known, ahead
        )

    def _rendered(
        self, shared: Shared, head: Head, found: Found, response: Response, started: float
    ) -> Served:
        try:
            status, body = response.status, response.body
            seconds = perf_counter() - started
            if not isinstance(body, bytes):
                self.counts.observe(found.route.path, head.method, status, seconds)
                return Streamed(head, found.route.path, response, body)
            shared.stats.handler_bugs += status == 500
            persists = persists_after(status, head, shared)
            lines = connection_lines(head, shared, persists) + self.note(
                head.method, found.route.path, status, seconds, len(body), head.headers
            )
            data = whole_response(response, body, lines, head.method == "HEAD")
            return data, persists, response.undo
        except BaseException:  # a bug: the client will not receive the answer
            if response.undo is not None:
                response.undo()
            raise
