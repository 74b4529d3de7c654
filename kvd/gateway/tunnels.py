"""TLS to engines: passes each of the relay's connections to an engine on, encrypted.

    relay ── abstract Unix socket of this process ── a task per connection ── TLS ──> engine

The relay moves bytes between plain sockets, and all its rules hold here as well: if a connection
ends without a byte, another engine may be tried; if it is not read, the engine has to wait; if the
relay closes it, the request is aborted. So a tunnel sends nothing of its own: where there is no
engine, or its certificate is not valid, the connection just ends. `problem` says why, and
`unanswered` is the outcome that a plain connection with this fault would have.

Unix sockets have no reset. So where the engine has ended its side as TLS demands, by a
close_notify, the tunnel ends its own side and waits for the relay; where the engine was reset or
its bytes just stop, the tunnel closes both sides. The relay takes that for a reset.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import trio

from kvd.gateway.exchanges import RelayLimits
from kvd.http.certificates import load_pair
from kvd.wire.urls import Target
from kvd_core.relay.relay import ExchangeOutcome, tune

RECEIVE_BYTES = 64 * 1024  # bytes that a tunnel receives in one piece, as the relay does
BACKLOG = 1024  # connections that wait to be accepted: as many as the relay keeps to one engine
CREDENTIALS = struct.Struct("3i")  # of a peer: process, user, group
# Errors of a connection that this machine has no room for: they say nothing about the engine.
LACKS_ROOM = frozenset(
    (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM)
)


@dataclass(frozen=True, slots=True)
class UpstreamTls:
    """The settings by which the gateway verifies engines, and identifies itself to them."""

    ca_file: Path | None = None  # None: the system's authorities
    certfile: Path | None = None  # shown to engines that ask for one
    keyfile: Path | None = None
    server_name: str | None = None  # None: the host of the URL
    insecure: bool = False  # any certificate will do
    # Digests of the files by the names of their settings: they show whether a file has changed.
    digests: Mapping[str, bytes] = field(default_factory=dict, compare=False, repr=False)

    def context(self) -> ssl.SSLContext:
        """Reads the files; raises ValueError, which names them and their settings."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ValueError) as error:
            raise ValueError(f"upstream_tls_ca: cannot use {self.ca_file}: {error}") from None
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # Some builds of Python set it, and take bytes that just stop for a close_notify.
        context.options &= ~ssl.OP_IGNORE_UNEXPECTED_EOF
        context.set_alpn_protocols(["http/1.1"])
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.certfile is not None:
            try:
                load_pair(context, self.certfile, self.keyfile)
            except ValueError as error:
                raise ValueError(f"upstream_tls_certfile: {error}") from None
        return context


class Tunnel:
    """The way to one engine behind TLS."""

    def __init__(
        self, target: Target, context: ssl.SSLContext, server_name: str, limits: RelayLimits
    ) -> None:
        """A connection with its handshake may take `limits.connect_s`.

        Raises OSError without a socket.
        """
        self.address = target.host  # the engine's IP address is set before anything connects
        self.problem: str | None = None  # why the last connection has failed
        # Why a connection ends without a byte, which the relay cannot tell.
        self.unanswered = ExchangeOutcome.NO_ANSWER
        self._port = target.port
        self._context = context
        self._server_name = server_name
        self._limits = limits
        self._listening = trio.CancelScope()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind("")  # Linux chooses an unused abstract name
        self._socket.listen(BACKLOG)

    @property
    def name(self) -> str:
        """The address at which the relay connects."""
        name: bytes = self._socket.getsockname()
        return "@" + name[1:].decode()

    async def run(self) -> None:
        """Passes bytes on until `leave` is called and the last connection has ended."""
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(self._socket))
        async with trio.open_nursery() as connections, listener:
            with self._listening:
                await trio.serve_listeners(self._serve, [listener], handler_nursery=connections)

    def leave(self) -> None:
        """Accepts no new connections."""
        self._listening.cancel()

    async def _serve(self, near: trio.SocketStream) -> None:
        async with near:
            if not _is_ours(near):
                return
            try:
                far = await self._connected()
            except (OSError, trio.BrokenResourceError, trio.TooSlowError) as error:
                self.problem, self.unanswered = _reason(error), outcome_of(error)
                return
            self.problem, self.unanswered = None, ExchangeOutcome.NO_ANSWER
            is_ended = False
            try:
                async with trio.open_nursery() as both:
                    both.start_soon(_send, near, far, both.cancel_scope)
                    is_ended = await _pass_on(far, near)
                    both.cancel_scope.cancel()
            finally:
                await trio.aclose_forcefully(far)
            if is_ended:
                await _end(near)

    async def _connected(self) -> trio.SSLStream[trio.abc.Stream]:
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        plain = trio.socket.socket(family, socket.SOCK_STREAM)
        try:
            tune(plain.fileno(), self._limits.gone_s)
            with trio.fail_after(self._limits.connect_s):
                await plain.connect((self.address, self._port))
                below = trio.SocketStream(plain)
                stream = trio.StapledStream(_Sending(below), below)
                far = trio.SSLStream[trio.abc.Stream](
                    stream, self._context, server_hostname=self._server_name
                )
                await far.do_handshake()
                return far
        except BaseException:
            plain.close()
            raise


class _Sending(trio.abc.SendStream):
    """Sends to an engine, and drops what it takes no more.

    An engine that refuses a request before it has read all of it ends its connection by a reset.
    The answer that it has sent before is still to be received, but a TLS stream of trio that could
    not send receives nothing either. Only receiving shows how the connection has ended.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        with suppress(trio.BrokenResourceError):
            await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._stream.aclose()


async def _send(
    near: trio.SocketStream, far: trio.SSLStream[trio.abc.Stream], both: trio.CancelScope
) -> None:
    """Passes requests on; where the relay sends no more, the tunnel is over."""
    await _pass_on(near, far)
    both.cancel()


async def _pass_on(source: trio.abc.ReceiveStream, sink: trio.abc.SendStream) -> bool:
    """Passes bytes on; returns whether the source has ended, False if either side is broken."""
    try:
        while data := await source.receive_some(RECEIVE_BYTES):
            await sink.send_all(data)
    except trio.BrokenResourceError:
        return False  # the relay counts how the exchange has ended
    return True


async def _end(near: trio.SocketStream) -> None:
    """Ends this side of the relay's connection, and waits until the relay has closed it."""
    with suppress(trio.BrokenResourceError):
        await near.send_eof()
        while await near.receive_some(RECEIVE_BYTES):
            pass  # the rest of a request that the engine has answered without it


def _is_ours(near: trio.SocketStream) -> bool:
    """Returns whether this process has connected: others would use the gateway's certificate."""
    credentials = near.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    assert isinstance(credentials, bytes)
    return bool(CREDENTIALS.unpack(credentials)[0] == os.getpid())


def _reason(error: Exception) -> str:
    """Returns what is wrong with an engine, for operators."""
    cause = error.__cause__ if isinstance(error, trio.BrokenResourceError) else error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"TLS: its certificate is not valid: {cause.verify_message}"
    if isinstance(cause, trio.TooSlowError):
        return "TLS: no connection was made in time"
    if isinstance(cause, ssl.SSLError):
        return f"TLS: {cause.reason or cause}"
    if isinstance(cause, OSError):
        return f"unreachable: {cause.strerror or cause}"
    return "TLS: the connection was closed during the handshake"


def outcome_of(error: Exception) -> ExchangeOutcome:
    """Returns the relay's outcome for a plain connection that fails in the same way."""
    if isinstance(error, trio.TooSlowError):
        return ExchangeOutcome.CONNECT_TIME
    if not isinstance(error, OSError) or isinstance(error, ssl.SSLError):
        return ExchangeOutcome.NO_ANSWER
    lacks_room = error.errno in LACKS_ROOM
    return ExchangeOutcome.NO_ROOM if lacks_room else ExchangeOutcome.UNREACHABLE
