"""One client connection: requests in, responses out, one after the other.

    receive -> head -> body -> route -> handler -> one send            hot routes
                                     -> ASGI application (asgi.py)     everything else

What the server itself refuses (Refusal) is answered and ends the connection, because what follows
on it cannot be trusted to be a request. Everything a client can do wrong ends here; what leaves
`run` is cancellation.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from time import perf_counter

import trio

from kvd.http.answer import answer_now
from kvd.http.asgi import AsgiApp, AsgiExchange
from kvd.http.body import read_body
from kvd.http.errors import Refusal, error_body, error_response
from kvd.http.head import HEAD_END, Head, HeadCache, HeadParser
from kvd.http.render import CLOSE_LINE, whole_response
from kvd.http.stream import stream
from kvd.http.table import RouteTable
from kvd.http.transport import Phase, Shared, Transport
from kvd.http.types import DEFAULT_BODY_LIMIT, Observer, Request, Route
from kvd.http.writer import connection_lines, persists_after
from kvd.logs import get_logger

log = get_logger(__name__)

# Requests served in a row before other tasks run, when no other connection is awake; about 80 µs.
# With others awake it is one: at 16 connections that halves the p99 and costs nothing, because
# the client's next request has arrived by the time its turn comes.
YIELD_REQUESTS = 8

_REFUSAL_COUNTERS = {
    400: "malformed",
    413: "too_large",
    414: "head_too_large",
    417: "expectation_failed",
    431: "head_too_large",
}


@dataclass(frozen=True, slots=True)
class Service:
    """What a listener serves."""

    heads: HeadCache
    table: RouteTable
    app: AsgiApp
    observe: Observer | None


class Connection(Transport):
    """Serves one client until it leaves, misbehaves or the listener stops."""

    __slots__ = ("_service", "_streak")

    def __init__(self, sock: socket.socket, shared: Shared, service: Service) -> None:
        super().__init__(sock, shared)
        self._service = service
        self._streak = 0  # requests served since other tasks ran

    async def run(self) -> None:
        """Serves the connection and closes its socket; raises nothing but cancellation."""
        shared = self.shared
        shared.awake += 1
        try:
            await self._serve()
        except* OSError:  # reset, or a send without progress: nobody is left to tell
            shared.stats.client_gone += 1
        except* Exception:
            shared.stats.bugs += 1
            log.exception("connection_failed")
        finally:
            shared.awake -= 1
            self.sock.close()

    async def _serve(self) -> None:
        limits = self.shared.limits
        self.arm(Phase.IDLE, limits.head_seconds)
        try:
            while (head := await self._read_head()) is not None:
                if not await self._serve_request(head):
                    break
                self.arm(Phase.IDLE, limits.idle_seconds)
                self._streak += 1
                if self.shared.awake > 1 or self._streak >= YIELD_REQUESTS:
                    self._streak = 0
                    await trio.lowlevel.checkpoint()
            if self.buffer:  # sent by a client that did not expect this to be the end
                await self.linger()
        except Refusal as refusal:
            await self._refuse(refusal)

    async def _read_head(self) -> Head | None:
        """Returns the next head, None when the client has left."""
        limits = self.shared.limits
        data = self.buffer or await self.receive()
        end = data.find(HEAD_END) + len(HEAD_END)
        if not len(HEAD_END) <= end <= limits.head_bytes or data[0] in b"\r\n":
            return await self._read_head_in_pieces(data)
        self.buffer = data[end:]
        return self._service.heads.parse(data[:end])

    async def _read_head_in_pieces(self, piece: bytes) -> Head | None:
        """Reads a head that is not all there, and refuses it at its first wrong byte."""
        limits = self.shared.limits
        self.arm(Phase.HEAD, limits.head_seconds)
        self.buffer = b""
        parser = HeadParser()
        data = b""
        while piece:
            parsed = len(data)
            data = data + piece if data else piece.lstrip(b"\r\n")  # RFC 9112 §2.2: empty lines
            end = data.find(HEAD_END, max(0, parsed - len(HEAD_END) + 1))
            end = len(data) if end < 0 else end + len(HEAD_END)
            if end > limits.head_bytes:
                raise Refusal(431, f"the request head is longer than {limits.head_bytes} bytes")
            parser.feed(data[parsed:end])
            if data.endswith(HEAD_END, 0, end):
                self.buffer = data[end:]
                return parser.finish(limits)
            piece = await self.receive()
        if self.expired:
            raise Refusal(408, "the request head took too long")
        self.shared.stats.client_gone += bool(data)
        return None

    async def _serve_request(self, head: Head) -> bool:
        """Serves one request; returns whether the connection persists."""
        self.shared.stats.requests += 1
        route = self._service.table.find(head.method, head.path)
        body = b""
        if head.length:
            limit = DEFAULT_BODY_LIMIT if route is None else route.body_limit
            try:
                body = await read_body(self, head, limit)
            except Refusal as refusal:
                self._observe(head, route, refusal.status, perf_counter())
                raise
        if route is not None and route.hot:
            return await self._serve_hot(head, route, body)
        return await self._serve_app(head, body)

    async def _serve_hot(self, head: Head, route: Route, body: bytes) -> bool:
        started = perf_counter()
        request = Request(head.method, route.path, head.query, head.headers, body)
        response = answer_now(route, request)
        self._observe(head, route, response.status, started)
        self.shared.stats.handler_bugs += response.status == 500
        if isinstance(response.body, bytes):
            persists = persists_after(response.status, head, self.shared)
            lines = connection_lines(head, self.shared, persists)
            data = whole_response(response, response.body, lines, head.method == "HEAD")
            if (sent := self.send_now(data)) < len(data):
                await self.send_rest(data, sent)
        else:
            persists = await stream(self, head, response, response.body)
        return persists

    async def _serve_app(self, head: Head, body: bytes) -> bool:
        self.shared.stats.requests_app += 1
        self.rest()
        exchange = AsgiExchange(self, head, body)
        await exchange.run(self._service.app)
        self.shared.stats.handler_bugs += exchange.writer.status == 500
        return exchange.writer.persists

    def _observe(self, head: Head, route: Route | None, status: int, started: float) -> None:
        if route is not None and self._service.observe is not None:
            seconds = perf_counter() - started
            self._service.observe(route.path, head.method, status, seconds)

    async def _refuse(self, refusal: Refusal) -> None:
        stats = self.shared.stats
        if counter := _REFUSAL_COUNTERS.get(refusal.status):
            setattr(stats, counter, getattr(stats, counter) + 1)
        response = error_response(refusal.status, str(refusal))
        lines = self.shared.date_line + CLOSE_LINE
        await self.send(whole_response(response, error_body(str(refusal)), lines, silent=False))
        await self.linger()
