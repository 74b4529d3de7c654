"""The HTTP/1.1 server of a face's addresses without TLS; `kvd.http.tls` builds on it.

    accept ─ connection task ─ hot route: handler, one send
                             ─ anything else: the ASGI application
    fast path:  requests of hot routes on connections whose task sleeps
    sweep:      ends connections that wait too long for a request, renews the date

Stock hypercorn costs 0.9-1.4 ms of CPU a request, never expires a keep-alive connection and dies
of one malformed upgrade. This server costs about 15 µs, and the failure of one connection affects
no other.
"""

from __future__ import annotations

import contextlib
import socket
import time

import trio

from kvd.http.asgi import AsgiApp
from kvd.http.auth import is_local
from kvd.http.connection import Connection, listener_context
from kvd.http.context import ServerContext
from kvd.http.idle_poll import Turn, polled_when_idle
from kvd.http.limits import HttpLimits
from kvd.http.messages import JSON, Response
from kvd.http.render import CLOSE_LINE, start_lines, whole_response
from kvd.http.routes import Route
from kvd.http.rows import SOME
from kvd.http.server import Server
from kvd.http.table import RouteTable
from kvd.http.transport import RECEIVE_BYTES, Shared, SocketStream

# Time for which the fast path serves requests before other tasks run: some twenty requests.
TURN_NS = 500_000


# In English whatever the locale; the package that formats such dates takes 0.4 MB.
DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def date_line(seconds: float) -> bytes:
    """Returns the line of the `date` header for a time since the epoch (RFC 9110 §5.6.7)."""
    now = time.gmtime(seconds)
    day, month = DAYS[now.tm_wday], MONTHS[now.tm_mon - 1]
    text = time.strftime(f"{day}, %d {month} %Y %H:%M:%S GMT", now)
    return f"date: {text}\r\n".encode()


class Front(Server):
    """Serves the routes of one face."""

    def __init__(
        self,
        routes: tuple[Route, ...],
        app: AsgiApp,
        limits: HttpLimits,
        context: ServerContext,
    ) -> None:
        """Takes the face's routes, and an application that serves at least the cold ones."""
        super().__init__(limits)
        self._busy_body = context.failures.body(503, "too many connections")
        self._shared = Shared(limits, self.stats, limits.tick_s())
        self._listener = listener_context(RouteTable(routes), app, context, self._shared)

    def set_limits(self, limits: HttpLimits) -> None:
        super().set_limits(limits)
        self._shared.limits, self._shared.tick = limits, limits.tick_s()

    def _connect(self, sock: socket.socket) -> Connection:
        loopback = sock.family != socket.AF_UNIX and is_local(sock)
        stream = SocketStream(sock)
        return Connection(stream, self._shared, self._listener, checks_host=loopback)

    def _turn_away(self, sock: socket.socket) -> None:
        lines = self._shared.date_line + CLOSE_LINE
        with sock, contextlib.suppress(OSError):
            busy = Response(503, self._busy_body)
            sock.send(whole_response(busy, self._busy_body, lines, silent=False))
            sock.shutdown(socket.SHUT_WR)
            sock.recv(RECEIVE_BYTES)  # unread data would reset the connection and lose the answer

    async def _watch(self, *, task_status: trio.TaskStatus[None]) -> None:
        self._tick()
        task_status.started()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._sweep)
                nursery.start_soon(self._run_fast_path)
        finally:
            self._listener.fast_path.close()

    async def _run_fast_path(self) -> None:
        """Serves what comes on parked connections."""
        fast_path = self._listener.fast_path
        with polled_when_idle(
            fast_path, Turn.REQUESTS, TURN_NS, self.limits.busy_wait_us
        ) as between:
            while True:
                await trio.lowlevel.wait_readable(fast_path.fileno())
                between.warm = True
                while between.serve_row() == SOME:
                    await trio.lowlevel.checkpoint()

    async def _sweep(self) -> None:
        while True:
            await trio.sleep(self._shared.tick)
            self._tick()

    def _tick(self) -> None:
        """Ends connections that have waited too long for a request; renews the date of answers."""
        shared, fast_path = self._shared, self._listener.fast_path
        shared.now, shared.date_line = trio.current_time(), date_line(time.time())
        fast_path.logged = self._listener.access.enabled
        if not shared.stopping:
            fast_path.lines = start_lines(200, JSON) + shared.date_line
            fast_path.created_lines = start_lines(201, JSON) + shared.date_line
        fast_path.sweep()
        soonest = shared.now - min(self.limits.head_s, self.limits.idle_s)
        for connection in self._running:
            if connection.since < soonest:
                connection.end_if_idle_for_long()

    async def _drain(self) -> None:
        self._shared.stopping = True
        self._listener.fast_path.lines = None  # responses now announce the end of the connection
        await super()._drain()
