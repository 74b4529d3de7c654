"""Serves one face: its plain port, its TLS port, and /metrics over all that is known of it."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from types import MappingProxyType

import trio

from kvd.config import StartError, TlsListener
from kvd.faces.monitoring import metrics_route
from kvd.http.app import build_app
from kvd.http.errors import Failures
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

    def __init__(
        self,
        name: str,
        metrics_prefix: str,
        limits: HttpLimits,
        reasons: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """Takes the codes that this face's failures have besides their text, by status."""
        self.name = name
        self.stats = HttpStats()  # of the plain port, once that is served
        self.requests = RequestMetrics(metrics_prefix)
        self.sources: list[Source] = [self.requests.families, memory_families]
        self._limits = limits
        self._failures = Failures(reasons)
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

    async def serve(
        self,
        routes: tuple[Route, ...],
        stop: trio.Event,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serves `routes` and /metrics until `stop` is set and what is under way is answered."""
        routes = (*routes, metrics_route(self.sources))
        told = self._limits, self.requests.observe, self._failures
        app = build_app(routes, *told)
        front = Front(routes, app, *told)
        self._servers.append(front)
        self.stats = front.stats
        self.sources.append(lambda: _families("kvd_http", "HTTP server, plain port", front.stats))
        async with trio.open_nursery() as nursery:
            await nursery.start(front.serve, self._sockets, stop)
            if self._tls is not None:
                tls = self._tls
                server = TlsServer(app, tls.certfile, tls.keyfile, self._limits, self._failures)
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
