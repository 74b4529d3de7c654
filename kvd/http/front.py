"""The HTTP/1.1 server of a face's plain port.

    accept ─ connection task ─ hot route: handler, one send
           ─ connection task ─ anything else: the ASGI application
    sweep:  deadlines of all connections, the date

Stock hypercorn costs 0.9-1.4 ms of CPU a request, never expires a keep-alive connection and dies
of one malformed upgrade; this server costs about 15 µs and keeps a connection's failure its own.
"""

from __future__ import annotations

import contextlib
import socket
from email.utils import formatdate

import trio

from kvd.http.asgi import AsgiApp
from kvd.http.connection import Connection, Service
from kvd.http.errors import error_body
from kvd.http.head import HeadCache
from kvd.http.limits import HttpLimits
from kvd.http.render import CLOSE_LINE, whole_response
from kvd.http.server import Server
from kvd.http.table import RouteTable
from kvd.http.transport import RECEIVE_BYTES, Shared
from kvd.http.types import Observer, Response, Route

_BUSY_BODY = error_body("too many connections")
_BUSY = Response(503, _BUSY_BODY)


class Front(Server[Connection]):
    """Serves the routes of one face."""

    def __init__(
        self,
        routes: tuple[Route, ...],
        app: AsgiApp,
        limits: HttpLimits,
        observe: Observer | None = None,
    ) -> None:
        """Takes the face's routes, and an application that serves at least the cold ones."""
        super().__init__(limits)
        self._service = Service(HeadCache(limits), RouteTable(routes), app, observe)
        self._shared = Shared(limits, self.stats, limits.tick_seconds(), now=0.0, date_line=b"")

    def _connect(self, sock: socket.socket) -> Connection:
        return Connection(sock, self._shared, self._service)

    def _turn_away(self, sock: socket.socket) -> None:
        lines = self._shared.date_line + CLOSE_LINE
        with sock, contextlib.suppress(OSError):
            sock.send(whole_response(_BUSY, _BUSY_BODY, lines, silent=False))
            sock.shutdown(socket.SHUT_WR)
            sock.recv(RECEIVE_BYTES)  # unread data would reset the connection, answer and all

    async def _watch(self) -> None:
        """Sweeps over the deadlines of all connections."""
        while True:
            self._shared.now = trio.current_time()
            self._shared.date_line = b"date: %b\r\n" % formatdate(usegmt=True).encode()
            for connection in self._running:
                if connection.deadline <= self._shared.now:
                    connection.expire()
            await trio.sleep(self._shared.tick)

    async def _drain(self) -> None:
        self._shared.stopping = True
        await super()._drain()
