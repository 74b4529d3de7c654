"""Serves one face: its plain port, its TLS port, and /metrics over all that is known of it."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack

import trio

from kvd.config import StartError, TlsListener
from kvd.faces.monitoring import metrics_route
from kvd.http.access import AccessLog
from kvd.http.app import build_app
from kvd.http.front import Front
from kvd.http.limits import HttpLimits, HttpStats
from kvd.http.listeners import open_listeners
from kvd.http.tls import TlsServer
from kvd.http.types import Route
from kvd.metrics import Family, RequestMetrics, Source, memory_families, stats_families
from kvd.net.activation import Passed, address
from kvd.parsers import Bind


class FaceServer:
    """One API on its ports. `sources` say what /metrics shows; more may be added."""

    def __init__(self, name: str, metrics_prefix: str, limits: HttpLimits) -> None:
        self.name = name
        self.stats = HttpStats()  # of the plain port, once that is served
        self.requests = RequestMetrics(metrics_prefix)
        self.sources: list[Source] = [self.requests.families, memory_families]
        self._access = AccessLog(name)
        self._limits = limits
        self._tls: TlsListener | None = None
        self._servers: list[Front | TlsServer] = []
        self._sockets: list[socket.socket] = []
        self._tls_sockets: list[socket.socket] = []

    async def open(
        self, opened: ExitStack, bind: Bind, tls: TlsListener | None, passed: Passed
    ) -> None:
        """Listens, so that an address in use is one line at the start; raises StartError.

        Sockets of the service manager go before `bind`: those named after the face, or with `-tls`
        behind that, and those on the same address.
        """
        self._sockets = await _open(opened, bind, passed.take(self.name, str(bind)))
        if tls is not None:
            _check_certificate(tls)
            given = passed.take(f"{self.name}-tls", str(tls.bind))
            self._tls_sockets = await _open(opened, tls.bind, given)
            self._tls = tls

    def addresses(self) -> list[str]:
        """Returns where the plain port listens, in the form of a bind address."""
        return [address(sock) for sock in self._sockets]

    def limit(self, limits: HttpLimits) -> None:
        """Has other limits hold from now on, for waits that begin and connections that come."""
        self._limits = limits
        for server in self._servers:
            server.limit(limits)

    def log_requests(self, on: bool) -> None:
        """Has each request be a line of the log, or none, half a second from now at the latest."""
        self._access.on = on

    async def serve(
        self,
        routes: tuple[Route, ...],
        stop: trio.Event,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serves `routes` and /metrics until `stop` is set and what is under way is answered."""
        routes = (*routes, metrics_route(self.sources))
        app = build_app(routes, self._limits, self.requests.observe, self._access)
        front = Front(routes, app, self._limits, self.requests.observe, self._access)
        self._servers.append(front)
        self.stats = front.stats
        self.sources.append(lambda: _families("kvd_http", "HTTP server, plain port", front.stats))
        async with trio.open_nursery() as nursery:
            await nursery.start(front.serve, self._sockets, stop)
            if self._tls is not None:
                server = TlsServer(app, self._tls.certfile, self._tls.keyfile, self._limits)
                self._servers.append(server)
                help = "HTTP server, TLS port"
                self.sources.append(lambda: _families("kvd_https", help, server.stats))
                await nursery.start(server.serve, self._tls_sockets, stop)
            task_status.started()


async def _open(opened: ExitStack, bind: Bind, given: list[socket.socket]) -> list[socket.socket]:
    try:
        sockets = given or await open_listeners(str(bind))
    except (OSError, ValueError) as error:
        raise StartError(str(error.strerror if isinstance(error, OSError) else error)) from None
    for sock in sockets:
        opened.enter_context(sock)
    return sockets


def _check_certificate(tls: TlsListener) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.certfile, tls.keyfile)
    except OSError as error:
        raise StartError(f"cannot use {tls.certfile} with {tls.keyfile}: {error}") from None


def _families(prefix: str, help: str, stats: HttpStats) -> Iterator[Family]:
    yield from stats_families(prefix, stats, help, frozenset({"connections_open"}))
