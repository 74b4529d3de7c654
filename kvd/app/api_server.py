"""Serves one face: its addresses, with and without TLS, and the routes that every face has."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import trio

from kvd.config.binds import TLS_PREFIX, Bind, Binds, TcpBind
from kvd.config.errors import AddressError, StartError
from kvd.config.load import Config
from kvd.faces.common.openapi import with_document
from kvd.faces.common.schemas import Description
from kvd.http.access import AccessLog
from kvd.http.auth import Authorizer, is_local
from kvd.http.certificates import TlsCredentials, load_credentials
from kvd.http.cold import ColdApp
from kvd.http.context import ServerContext
from kvd.http.errors import PLAIN, Failures
from kvd.http.front import Front
from kvd.http.limits import GAUGES, LONG_BODY_LIMIT, STATS_HELP, HttpLimits
from kvd.http.listeners import file_remover, open_listeners
from kvd.http.options import TlsFiles, UnixRights
from kvd.http.routes import Route, WrongPath
from kvd.http.tls import TlsServer
from kvd.platform.activation import PassedSockets, address
from kvd.telemetry.metrics import (
    Family,
    RequestMetrics,
    Source,
    by_label,
    memory_families,
    stats_families,
)


class ApiServer:
    """One API on its addresses, with and without TLS."""

    def __init__(
        self,
        name: str,
        metrics_prefix: str,
        config: Config,
        description: Description,
        failures: Failures = PLAIN,
        *,
        for_pages: bool = False,
    ) -> None:
        """Takes the description of the face's routes for its document, and what words its failures.

        With `for_pages` pages of allowed origins may read its answers.
        """
        self.name = name
        self._description = description
        self.requests = RequestMetrics(metrics_prefix)
        self._front_families: list[Source] = []  # of the servers that run
        self._limits = config.http
        self._context = ServerContext(
            Authorizer(config.policy), self.requests.counts, failures, AccessLog(name), for_pages
        )
        self._credentials: TlsCredentials | None = None  # of TLS, if there is any
        self._servers: list[Front] = []
        self._sockets: list[socket.socket] = []
        self._tls_sockets: list[socket.socket] = []

    async def open(
        self, opened: ExitStack, config: Config, binds: Binds | None, passed: PassedSockets
    ) -> None:
        """Listens, so that an address in use is reported in one line; raises StartError.

        Sockets passed by the service manager go before `binds`. Those named after the face replace
        all addresses without TLS, and those named `FACE-tls` all addresses with TLS. Otherwise a
        passed socket replaces the bind that has its address.
        """
        if binds is None:
            return
        plain: list[Bind] = [bind for bind in binds.each if not bind.tls]
        secured: list[Bind] = [bind for bind in binds.each if bind.tls]
        rights = config.unix_rights
        self._sockets = await _open(opened, plain, rights, passed, self.name)
        self._tls_sockets = await _open(opened, secured, rights, passed, f"{self.name}-tls")
        if self._tls_sockets:
            assert config.tls is not None  # the configuration requires it for a bind with TLS
            self._credentials = read_files(config.tls)
        self._context.authorizer.add_hostnames(
            bind.host for bind in binds.each if isinstance(bind, TcpBind)
        )
        self.check_open(config)

    def check_open(self, config: Config) -> None:
        """Raises StartError if strangers could reach the face and use it without credentials."""
        if config.allow_unauthenticated or config.policy.tokens:
            return
        exposed = list(self._sockets)
        if config.tls is None or config.tls.client_ca is None:
            exposed += self._tls_sockets
        for sock in exposed:
            if not is_local(sock):
                raise StartError(
                    f"any client could use the {self.name} at {address(sock)}: an address "
                    "beyond this machine needs --tokens-file, tls: with --tls-client-ca, or "
                    "--allow-unauthenticated"
                )

    @property
    def authorizer(self) -> Authorizer:
        return self._context.authorizer

    def addresses(self) -> list[str]:
        """Returns where the face listens, in the form of bind addresses."""
        secured = [f"{TLS_PREFIX}{address(sock)}" for sock in self._tls_sockets]
        return [*map(address, self._sockets), *secured]

    def set_policy(self, config: Config) -> None:
        """Applies other tokens and names from the next request on."""
        self._context.authorizer.set_policy(config.policy)

    def set_limits(self, limits: HttpLimits) -> None:
        """Applies other limits from now on, to new waits and new connections."""
        self._limits = limits
        for server in self._servers:
            server.set_limits(limits)

    def set_credentials(self, credentials: TlsCredentials) -> None:
        """Applies other certificates to handshakes from now on."""
        if self._credentials is not None:
            self._credentials = credentials
        for server in self._servers:
            if isinstance(server, TlsServer):
                server.set_credentials(credentials)

    def log_requests(self, on: bool) -> None:
        """Switches the access log on or off; this takes effect within half a second."""
        self._context.access.enabled = on

    async def serve(
        self,
        routes: tuple[Route, ...],
        not_found: WrongPath,
        stop: trio.Event,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serves `routes`, and the document about them, until `stop` is set and all is answered."""
        routes = with_document(self.name, routes, self._description)
        routes = tuple(self._bounded(each) for each in routes)
        app = ColdApp(routes, self._limits, self._context, not_found)
        async with trio.open_nursery() as nursery:
            if self._sockets:
                front = Front(routes, app, self._limits, self._context)
                await self._start(nursery, front, self._sockets, stop, "kvd_http", "without TLS")
            if self._credentials is not None:
                server = TlsServer(routes, app, self._credentials, self._limits, self._context)
                await self._start(nursery, server, self._tls_sockets, stop, "kvd_https", "with TLS")
            task_status.started()

    def _bounded(self, route: Route) -> Route:
        """Returns a route with the configured limit of long bodies, if it takes long bodies."""
        if route.body_limit != LONG_BODY_LIMIT:
            return route
        return replace(route, body_limit=self._limits.body_bytes)

    async def _start(
        self,
        nursery: trio.Nursery,
        server: Front,
        sockets: list[socket.socket],
        stop: trio.Event,
        prefix: str,
        what: str,
    ) -> None:
        self._servers.append(server)
        helps = {name: f"{help}, on addresses {what}" for name, help in STATS_HELP.items()}
        self._front_families.append(lambda: stats_families(prefix, server.stats, helps, GAUGES))
        await nursery.start(server.serve, sockets, stop)

    def families(self) -> Iterator[Family | None]:
        """Yields the families of requests, connections, refusals and the process's memory."""
        yield from self.requests.families()
        yield from memory_families()
        help = "Number of requests refused as unauthorized, by reason"
        refused = self._context.authorizer.refused
        yield by_label("kvd_http_refusals_total", "counter", help, "reason", refused)
        for families in self._front_families:
            yield from families()


async def _open(
    opened: ExitStack, binds: list[Bind], rights: UnixRights, passed: PassedSockets, name: str
) -> list[socket.socket]:
    """Returns the passed sockets named `name` in place of these binds, else sockets for each."""
    sockets = passed.named(name) if binds else []
    for sock in sockets:
        opened.enter_context(sock)
    for bind in [] if sockets else binds:
        try:
            taken = passed.bound_to(bind.address)
            found = taken or await open_listeners(bind.address, rights)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise AddressError(str(why)) from None
        for sock in found:
            sockets.append(opened.enter_context(sock))
            if sock.family == socket.AF_UNIX and not taken:  # a passed socket's file is its owner's
                opened.callback(file_remover(sock))
    return sockets


def read_files(tls: TlsFiles) -> TlsCredentials:
    """Returns the credentials in the files; raises StartError if they cannot be used."""
    try:
        return load_credentials(tls)
    except ValueError as error:
        raise StartError(str(error)) from None
