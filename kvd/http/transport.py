"""Moves a client's bytes both ways, and bounds how long the client may take.

    Transport ── holds ── Stream      SocketStream: the socket as it is
      phases, bounds,                 kvd.http.tls.TlsStream: TLS over it
      what is known of a client

Each wait of a task has a trio deadline; a request that the fast path serves needs none. Only the
wait between two requests has no deadline: a timer for each would cost 5 µs, so one task checks all
connections a few times per time limit. It ends a connection by shutting its socket down for
receiving, so bytes that the client sent before are still read.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from math import inf

import trio

from kvd.http.fast_path import Parkable, has_left
from kvd.http.limits import HttpLimits, HttpStats
from kvd.http.permits import ClientTrust

FORGETFUL = struct.pack("ii", 1, 0)  # SO_LINGER: a close is a reset
# Bytes received at once: above 128 KiB malloc maps fresh pages for every call, 17 µs instead of 3.
RECEIVE_BYTES = 64 * 1024
# Bytes that the kernel is given, or that are encrypted, in one go: 0.1 to 0.3 ms.
SEND_BYTES = 256 * 1024
# Pause between two checks whether a client has left that has sent more while its request waits: its
# slot in the queue is freed that much later, and a check is one system call.
END_PAUSE_S = 0.1


class ConnectionPhase(Enum):
    """The phase of a connection; the value names its timeout counter in HttpStats."""

    HANDSHAKE = "handshakes_failed"  # of TLS
    IDLE = "idle_timeouts"  # until the first byte of a request
    HEAD = "head_timeouts"
    BODY = "body_timeouts"
    WORKING = "handler_timeouts"  # while a handler runs, which has its own bound
    SENDING = "send_timeouts"
    LINGERING = "linger_timeouts"


@dataclass(slots=True)
class Shared:
    """The state that all connections of one listener share."""

    limits: HttpLimits
    stats: HttpStats
    tick: float  # seconds between two sweeps over idle connections
    now: float = 0.0  # trio clock of the last sweep, seconds
    date_line: bytes = b""  # the rendered `date` header of the last sweep
    body_bytes: int = 0  # of bodies that tasks are receiving
    stopping: bool = False


class ByteStream(ABC):
    """A client's bytes both ways. Nothing here waits but `open` and `wait_for_end`."""

    scheme: str  # of its URLs
    parks: bool  # whether the socket carries them as they are, so that the fast path may read it

    __slots__ = ("sock",)

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    @abstractmethod
    async def open(self) -> None:
        """Gets ready for the first byte; raises OSError if there will be none."""

    @abstractmethod
    def receive_now(self, size: int) -> bytes:
        """Returns up to `size` bytes, nothing at the client's end.

        Raises:
            BlockingIOError: nothing is there yet.
            OSError: the client is gone, or has sent bytes that make no sense.
        """

    @abstractmethod
    def send_now(self, data: bytes | memoryview) -> int:
        """Sends a part of `data`; returns how many bytes were taken. Call again with the rest.

        Raises:
            BlockingIOError: no byte could be taken.
            OSError: the client is gone.
        """

    @abstractmethod
    def finish(self) -> None:
        """Announces that nothing more will be sent; what is received after that is ignored."""

    def reset_at_end(self) -> None:
        """Makes the connection end with a reset when the socket is closed."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, FORGETFUL)

    @abstractmethod
    def has_left(self) -> bool:
        """Returns whether the client has ended its stream; may read and keep data before it."""

    async def wait_for_end(self) -> None:
        """Returns once the client has ended its stream, even if data before the end is unread."""
        while True:
            await trio.lowlevel.wait_readable(self.sock)
            if self.has_left():
                return
            # Data before the end keeps the socket readable, so the end cannot be waited for.
            await trio.sleep(END_PAUSE_S)

    @abstractmethod
    def has_more(self) -> bool:
        """Returns whether something was received that `receive_now` has not returned yet."""


class SocketStream(ByteStream):
    """The socket as it is."""

    scheme = "http"
    parks = True

    __slots__ = ()

    async def open(self) -> None:
        """Does nothing: the socket is ready."""

    def receive_now(self, size: int) -> bytes:
        return self.sock.recv(size)

    def send_now(self, data: bytes | memoryview) -> int:
        if len(data) <= SEND_BYTES:
            return self.sock.send(data)
        with memoryview(data) as view:
            return self.sock.send(view[:SEND_BYTES])

    def finish(self) -> None:
        """Does nothing: the end of the socket is the end of the stream."""

    def has_left(self) -> bool:
        return has_left(self.sock.fileno())

    def has_more(self) -> bool:
        return False


class Transport(Parkable):
    """Receives from and sends to one client."""

    __slots__ = ("buffer", "fd", "phase", "shared", "stream")

    def __init__(self, stream: ByteStream, shared: Shared, checks_host: bool) -> None:
        super().__init__(checks_host)
        self.stream = stream
        self.shared = shared
        self.buffer = b""  # received and not consumed: at most one receive and one head
        self.phase = ConnectionPhase.IDLE
        self.since = shared.now
        self.fd = stream.sock.fileno()

    @property
    def scheme(self) -> str:
        """The scheme of the client's URLs."""
        return self.stream.scheme

    def client(self) -> tuple[str, int] | None:
        """Returns the client's host and port, None on a Unix socket; raises OSError if gone."""
        peer = self.stream.sock.getpeername()
        return (peer[0], peer[1]) if isinstance(peer, tuple) else None

    def enter(self, phase: ConnectionPhase) -> None:
        """Begins a phase without a deadline."""
        self.phase = phase
        self.since = self.shared.now

    @contextmanager
    def within(self, phase: ConnectionPhase, seconds: float) -> Iterator[None]:
        """Enters `phase`; after `seconds` in it counts a timeout and raises TooSlowError."""
        self.enter(phase)
        try:
            with trio.fail_after(seconds):
                yield
        except trio.TooSlowError:
            self.shared.stats.count(self.phase.value)
            raise

    def end_if_idle_for_long(self) -> None:
        """Ends a wait for a request after its limit, up to two ticks late, unless one has come."""
        limits = self.shared.limits
        new = self.trust is ClientTrust.NEW
        seconds = limits.head_s if new else limits.idle_s
        if (
            self.phase is ConnectionPhase.IDLE
            and self.since + self.shared.tick + seconds <= self.shared.now
            and not self._unread()
        ):
            late = ConnectionPhase.HEAD if new else ConnectionPhase.IDLE
            self.shared.stats.count(late.value)
            self.since = inf
            self._shut(socket.SHUT_RD)

    def dispensability(self) -> tuple[bool, int, float] | None:
        """Returns a sort key, lowest where an end does the least harm; None: it must not be closed.

        Strangers sort before known clients. Among each, connections between two requests come
        first, then those without a whole head, then refused ones that go on sending, then strangers
        that are being sent an answer; the oldest first.
        """
        known = self.trust is ClientTrust.KNOWN
        if self.phase is ConnectionPhase.IDLE and self.trust is not ClientTrust.NEW:
            order = 0
        elif self.phase in (ConnectionPhase.IDLE, ConnectionPhase.HANDSHAKE, ConnectionPhase.HEAD):
            order = 1
        elif self.phase is ConnectionPhase.LINGERING:
            order = 2
        elif self.phase is ConnectionPhase.SENDING and not known:
            order = 3
        else:
            return None
        return known, order, self.since

    def is_asked(self) -> bool:
        """Returns whether a request has come, the first one or a further one, and is not read."""
        return self.phase is ConnectionPhase.IDLE and self._unread()

    def give_way(self) -> None:
        """Ends a connection for another one; a request that has just come is still served."""
        self.since = inf
        self._shut(socket.SHUT_RD if self.phase is ConnectionPhase.IDLE else socket.SHUT_RDWR)

    def close_if_idle(self) -> None:
        """Ends an idle connection; if a request has just arrived, its answer ends it instead."""
        if self.phase is ConnectionPhase.HANDSHAKE or (
            self.phase is ConnectionPhase.IDLE and not self._unread()
        ):
            self._shut(socket.SHUT_RD)

    def _unread(self) -> bool:
        """Returns whether the client has sent bytes that have not been read."""
        if self.buffer or self.stream.has_more():
            return True
        try:
            return bool(self.stream.sock.recv(1, socket.MSG_PEEK))
        except OSError:
            return False  # nothing there, or the client is gone

    def _shut(self, how: int) -> None:
        with contextlib.suppress(OSError):  # ENOTCONN: gone; its task is about to notice
            self.stream.sock.shutdown(how)

    async def receive(self, size: int = RECEIVE_BYTES) -> bytes:
        """Returns bytes of the client, none at its end; may return without a checkpoint."""
        while True:
            try:
                return self.stream.receive_now(size)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self.fd)

    async def send(self, data: bytes, stall_s: float | None = None) -> None:
        """Sends all of `data`, as fast as the client reads; may return without a checkpoint.

        Raises:
            OSError: the client is gone, or has taken nothing for `stall_s`; None: for `send_s`.
        """
        sent = self._send_now(data)
        if sent == len(data):
            return
        if stall_s is None:
            stall_s = self.shared.limits.send_s
        with memoryview(data) as view:
            while sent < len(data):
                try:
                    with self.within(ConnectionPhase.SENDING, stall_s):
                        await trio.lowlevel.wait_writable(self.fd)
                except trio.TooSlowError:
                    raise ConnectionAbortedError("the client does not read") from None
                sent += self._send_now(view[sent:])
        self.enter(ConnectionPhase.WORKING)

    def _send_now(self, data: bytes | memoryview) -> int:
        try:
            return self.stream.send_now(data)
        except BlockingIOError:
            return 0

    async def linger(self) -> None:
        """Sends the end of the stream, and reads and drops what the client still sends.

        A socket closed with unread data resets the connection, which can destroy the response on
        its way (RFC 9112 §9.6).
        """
        self.stream.finish()
        self._shut(socket.SHUT_WR)
        with (
            contextlib.suppress(trio.TooSlowError),
            self.within(ConnectionPhase.LINGERING, self.shared.limits.linger_s),
        ):
            while await self.receive():
                await trio.lowlevel.checkpoint()
