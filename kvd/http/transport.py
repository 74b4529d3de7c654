"""A client's socket with deadlines, without a trio cancel scope per wait.

One sweeping task compares every connection's `deadline` with the clock a few times per deadline;
when one has passed it sets `expired` and shuts the socket down, which wakes the waiting task. So
a request that arrives in one piece costs two attribute stores instead of a timer (5 µs), and what
a client sent before the deadline is still read.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum
from math import inf

import trio

from kvd.http.limits import HttpLimits, HttpStats

# Bytes received at once: above 128 KiB malloc maps fresh pages for every call, 17 µs instead of 3.
RECEIVE_BYTES = 64 * 1024


class Standing(IntEnum):
    """What is known of a client."""

    NEW = 0  # it has asked nothing yet
    STRANGER = 1  # what it has asked is answered to everybody
    KNOWN = 2  # it has been granted more


class Phase(Enum):
    """What a connection is waiting for; the value names its timeout counter in HttpStats."""

    HANDSHAKE = "handshakes_failed"  # of TLS
    IDLE = "idle_timeouts"  # the first byte of a request
    HEAD = "head_timeouts"
    BODY = "body_timeouts"
    WORKING = "handler_timeouts"  # a handler, which bounds itself
    SENDING = "send_timeouts"
    LINGERING = "linger_timeouts"


@dataclass(slots=True)
class Shared:
    """What the connections of one listener have in common."""

    limits: HttpLimits
    stats: HttpStats
    tick: float  # seconds between sweeps
    now: float = 0.0  # trio clock of the last sweep, seconds
    idle_deadline: float = 0.0  # of a connection that has just been served
    date_line: bytes = b""  # rendered, of the last sweep
    body_bytes: int = 0  # of bodies being received, beyond their first read
    stopping: bool = False

    def sweep(self, now: float, date_line: bytes) -> None:
        """Notes the time of a sweep."""
        self.now = now
        self.date_line = date_line
        self.idle_deadline = self.deadline(self.limits.idle_seconds)

    def deadline(self, seconds: float) -> float:
        """Returns when something that begins now is `seconds` old, or up to a sweep later."""
        return self.now + self.tick + seconds


class Transport:
    """Receives from and sends to one client."""

    scheme = "http"  # of its URLs

    __slots__ = (
        "_recv",
        "_send",
        "buffer",
        "deadline",
        "expired",
        "fd",
        "phase",
        "shared",
        "sock",
        "standing",
    )

    def __init__(self, sock: socket.socket, shared: Shared) -> None:
        self.sock = sock
        self.shared = shared
        self.buffer = b""  # received and not consumed: at most one receive and one head
        self.expired = False
        self.phase = Phase.IDLE
        self.standing = Standing.NEW
        self.deadline = inf
        self.fd = sock.fileno()
        self._recv: Callable[[int], bytes] = sock.recv
        self._send: Callable[[bytes | memoryview], int] = sock.send

    def client(self) -> tuple[str, int] | None:
        """Returns the client's host and port, None on a Unix socket; raises OSError if gone."""
        peer = self.sock.getpeername()
        return (peer[0], peer[1]) if isinstance(peer, tuple) else None

    def arm(self, phase: Phase, seconds: float) -> None:
        """Enters `phase`, which ends `seconds` from now, up to two sweeps late, never early."""
        self.phase = phase
        self.deadline = self.shared.deadline(seconds)

    def rest(self) -> None:
        """Enters the phase in which a handler bounds itself."""
        self.phase = Phase.WORKING
        self.deadline = inf

    def expire(self) -> None:
        """Ends the wait of a connection whose deadline has passed."""
        stats = self.shared.stats
        setattr(stats, self.phase.value, getattr(stats, self.phase.value) + 1)
        self.expired = self.phase is not Phase.IDLE  # idle: a request that just came is served
        self.deadline = inf
        writing = self.phase in (Phase.SENDING, Phase.HANDSHAKE)
        self._shut(socket.SHUT_RDWR if writing else socket.SHUT_RD)

    def dispensability(self) -> tuple[bool, int, float] | None:
        """Returns what sorts first who can be closed with the least harm; None: nobody may do so.

        Strangers come first; of these, and of the others, who is between two requests, who has not
        sent a whole head, who has been answered and goes on sending; and of these the oldest.
        """
        known = self.standing is Standing.KNOWN
        if self.phase is Phase.IDLE and self.standing is not Standing.NEW:
            order = 0
        elif self.phase in (Phase.IDLE, Phase.HANDSHAKE, Phase.HEAD):
            order = 1
        elif self.phase is Phase.LINGERING:
            order = 2
        elif self.phase is Phase.SENDING and not known:
            order = 3
        else:
            return None
        return known, order, self.deadline

    def give_way(self) -> None:
        """Ends a connection for another one; a request that has just come is still served."""
        self.deadline = inf
        self._shut(socket.SHUT_RD if self.phase is Phase.IDLE else socket.SHUT_RDWR)

    def note_granted(self, scope: int) -> None:
        """Notes that a request of this scope has been granted."""
        if self.standing is not Standing.KNOWN:
            self.standing = Standing.KNOWN if scope else Standing.STRANGER

    def close_if_idle(self) -> None:
        """Ends a connection that waits for a request, after serving what has arrived already."""
        if self.phase in (Phase.IDLE, Phase.HANDSHAKE):
            self._shut(socket.SHUT_RD)

    def _close(self) -> None:
        self.sock.close()

    def _unread(self) -> bool:
        """Returns whether something of the client's is here that nobody will look at."""
        if self.buffer:
            return True
        try:
            return bool(socket.socket.recv(self.sock, 1, socket.MSG_PEEK))
        except OSError:
            return False  # nothing there, or the client is gone

    def _shut(self, how: int) -> None:
        with contextlib.suppress(OSError):  # ENOTCONN: gone; its task is about to notice
            self.sock.shutdown(how)

    async def receive(self, size: int = RECEIVE_BYTES) -> bytes:
        """Returns what the client sent, nothing at its end or at the deadline; may not yield."""
        while not self.expired:
            try:
                return self._recv(size)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self.fd)
        return b""

    async def send(self, data: bytes) -> None:
        """Sends all of `data`; may not yield."""
        sent = self.send_now(data)
        if sent < len(data):
            await self.send_rest(data, sent)

    def send_now(self, data: bytes | memoryview) -> int:
        """Returns how many bytes of `data` the kernel took at once."""
        try:
            return self._send(data)
        except BlockingIOError:
            return 0

    async def send_rest(self, data: bytes, sent: int) -> None:
        """Sends `data[sent:]` as fast as the client reads.

        Raises:
            OSError: the client is gone, or made no progress until the deadline.
        """
        with memoryview(data) as view:
            while sent < len(data):
                self.arm(Phase.SENDING, self.shared.limits.send_seconds)
                await trio.lowlevel.wait_writable(self.fd)
                sent += self.send_now(view[sent:])
        self.rest()

    async def linger(self) -> None:
        """Sends the end of the stream and reads away what the client still sends.

        A socket closed with unread data resets the connection, which can destroy the response on
        its way (RFC 9112 §9.6).
        """
        self._shut(socket.SHUT_WR)
        self.arm(Phase.LINGERING, self.shared.limits.linger_seconds)
        while await self.receive():
            await trio.lowlevel.checkpoint()
