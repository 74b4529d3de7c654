"""The TLS listener of a face: hypercorn's HTTP/1.1 over connections of our own.

hypercorn's own connection (0.18) shields its sends, so that a client that does not read blocks the
shutdown, leaks what a pipelining client leaves behind, and lets any exception reach the server's
nursery. Here a connection has one cancel scope, whose deadline moves whenever bytes do.
"""

from __future__ import annotations

import socket
import ssl
from typing import Any

import h11
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr

from kvd.http.asgi import AsgiApp
from kvd.http.guard import guarded, restricted
from kvd.http.limits import HttpLimits
from kvd.http.options import TlsFiles
from kvd.http.reception import Reception
from kvd.http.server import Server
from kvd.http.table import RouteTable
from kvd.http.transport import RECEIVE_BYTES
from kvd.http.types import Route
from kvd.logs import RateLimit, get_logger

log = get_logger(__name__)

FAILURE_LOG_SECONDS = 10.0  # between two lines about the same kind of failure
UNLIMITED_REQUESTS = 2**63  # hypercorn closes a connection after 1,000


class TlsServer(Server["TlsConnection"]):
    """Serves an ASGI application over TLS, to those who may ask."""

    def __init__(
        self,
        routes: tuple[Route, ...],
        app: AsgiApp,
        files: TlsFiles,
        limits: HttpLimits,
        reception: Reception,
    ) -> None:
        """Loads the certificate; raises OSError if a file is unreadable or no PEM."""
        super().__init__(limits)
        self.config = _config(files, limits)
        self.context = WorkerContext(max_requests=None)
        table = RouteTable(routes)
        # Who shows a certificate is no browser that a page has led here.
        checks_host = files.client_ca is None
        app = restricted(app, table, reception, checks_host=checks_host)
        self.app = ASGIWrapper(guarded(app, limits.handler_seconds, reception.failures))
        ssl_context = self.config.create_ssl_context()
        assert ssl_context is not None  # a certificate and a key are set
        self._ssl_context = ssl_context
        self._lines = RateLimit(FAILURE_LOG_SECONDS)

    def log_failure(self, error: Exception) -> None:
        """Logs what ended a connection, seldom: clients can cause it at will."""
        if self._lines.admit(type(error).__name__, trio.current_time()) is not None:
            log.warning("tls_connection_failed", error=repr(error))

    def _connect(self, sock: socket.socket) -> TlsConnection:
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        secured = trio.SSLStream(stream, self._ssl_context, server_side=True, https_compatible=True)
        return TlsConnection(secured, self)

    def _turn_away(self, sock: socket.socket) -> None:
        sock.close()  # an answer would need a handshake first

    async def _watch(self) -> None:
        await trio.sleep_forever()  # every connection watches itself

    async def _drain(self) -> None:
        await self.context.terminated.set()
        await super()._drain()


def _config(files: TlsFiles, limits: HttpLimits) -> Config:
    config = Config()
    config.certfile = str(files.certfile)
    config.keyfile = str(files.keyfile)
    if files.client_ca is not None:
        config.ca_certs = str(files.client_ca)
        config.verify_mode = ssl.CERT_REQUIRED
    config.alpn_protocols = ["http/1.1"]
    config.include_server_header = False
    config.h11_max_incomplete_size = limits.head_bytes
    config.keep_alive_max_requests = UNLIMITED_REQUESTS
    config.errorlog = None
    return config


class TlsConnection:
    """One client: a read loop, and a task for each request that hypercorn starts."""

    def __init__(self, stream: trio.SSLStream[trio.SocketStream], server: TlsServer) -> None:
        self._stream = stream
        self._server = server
        self._scope = trio.CancelScope()
        self._sending = trio.Lock()
        self._idle = True

    async def run(self) -> None:
        """Serves the connection and closes it; raises nothing but cancellation."""
        stats = self._server.stats
        try:
            with self._scope:
                await self._serve()
            if self._scope.cancelled_caught and not self._server.context.terminated.is_set():
                stats.idle_timeouts += 1
        except* (OSError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            stats.client_gone += 1
        except* Exception as errors:
            stats.malformed += 1  # hypercorn raises on what it did not expect of a client
            self._server.log_failure(errors.exceptions[0])
        finally:
            await trio.aclose_forcefully(self._stream)

    def close_if_idle(self) -> None:
        """Ends the connection if no request is under way."""
        if self._idle:
            self._scope.cancel()

    async def _serve(self) -> None:
        try:
            with trio.fail_after(self._server.limits.head_seconds):  # hypercorn grants 60
                await self._stream.do_handshake()
        except (trio.BrokenResourceError, trio.TooSlowError):
            self._server.stats.handshakes_failed += 1
            raise
        sock = self._stream.transport_stream.socket
        async with TaskGroup() as requests:
            self._protocol = _Http11(
                self._server.app,
                self._server.config,
                self._server.context,
                requests,
                ConnectionState({}),
                True,
                parse_socket_addr(sock.family, sock.getpeername()),
                parse_socket_addr(sock.family, sock.getsockname()),
                self._send,
            )
            self._scope.deadline = trio.current_time() + self._server.limits.head_seconds
            while data := await self._receive():
                await self._protocol.handle(RawData(data))
            await self._protocol.handle(Closed())

    def _extend(self) -> None:
        """Moves the deadline of the connection: idle, or without a byte while busy."""
        limits = self._server.limits
        busy = limits.body_seconds + limits.handler_seconds + limits.send_seconds
        self._scope.deadline = trio.current_time() + (limits.idle_seconds if self._idle else busy)

    async def _receive(self) -> bytes:
        try:
            data = await self._stream.receive_some(RECEIVE_BYTES)
        except trio.ClosedResourceError:  # by _send
            return b""
        if not self._idle:
            self._extend()
        return bytes(data)

    async def _send(self, event: Event) -> None:
        if isinstance(event, RawData):
            await self._send_bytes(event.data)
        elif isinstance(event, Closed):
            await self._close()
        elif isinstance(event, Updated):
            self._idle = event.idle
            self._server.stats.requests += not event.idle
            self._extend()

    async def _send_bytes(self, data: bytes) -> None:
        try:
            async with self._sending:
                with trio.fail_after(self._server.limits.send_seconds):
                    await self._stream.send_all(data)
            self._extend()
        except trio.TooSlowError:
            self._server.stats.send_timeouts += 1
            await self._close()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await self._close()

    async def _close(self) -> None:
        await self._stream.aclose()
        await self._protocol.handle(Closed())


class _Parser(h11.Connection):
    """Reads requests up to the last one of a connection.

    What follows that would be an error, on which hypercorn closes the connection, while the last
    answer is on its way, or with a 400 in its place.
    """

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        return h11.NEED_DATA if self.their_state is h11.MUST_CLOSE else super().next_event()


class _Http11(H11Protocol):
    def __init__(self, app: ASGIWrapper, config: Config, *more: Any) -> None:
        super().__init__(app, config, *more)
        self.connection = _Parser(
            h11.SERVER, max_incomplete_event_size=config.h11_max_incomplete_size
        )

    async def handle(self, event: Event) -> None:
        """Takes what has come; behind the last request it is not kept."""
        if not isinstance(event, RawData) or self.connection.their_state is not h11.MUST_CLOSE:
            await super().handle(event)

    async def _check_protocol(self, event: object) -> None:
        """Declines every upgrade; a malformed one to HTTP/2 would end in an exception."""
