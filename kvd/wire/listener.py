"""What is known about one listener: its counters, its place in the stream and its status.

A listener reads the event stream of one (worker, rank). This is the part of it that others look
at; the task that owns the socket, `kvd.net.listener.run_listener`, tells it what happens:

    told              effect                              documented status
    ---------------   ---------------------------------   ---------------------------------------
    (nothing yet)                                         pending
    connecting()      a new socket                        pending; failed is over
    joined()          the worker answers; error is over   active once the gate is open, too
    receiving()       the gate is open                    active once joined, too
    lost(why)         the connection broke, or broke      unchanged: a worker that was there once
                      off early; libzmq tries again       stays active, last_error says the rest
    failed(why)       the socket is of no more use        failed

No clock, no sockets, no logging: moments come in as arguments (seconds, monotonic).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from kvd.wire.cursor import Cursor, Verdict


class ListenerStatus(StrEnum):
    """The documented states of a listener."""

    PENDING = "pending"
    ACTIVE = "active"
    PAUSED = "paused"
    FAILED = "failed"


class Listener:
    """One (worker, rank) stream: every payload that continues it goes to `apply`.

    `name` is for logs. `cursor` is given where the place in the stream outlives the listener (a
    worker that registers again). All counters are plain ints that only grow.
    """

    __slots__ = (
        "_apply",
        "_failed",
        "_joined",
        "_receiving",
        "bad_frames",
        "bytes",
        "connected",
        "cursor",
        "disconnected_since",
        "endpoint",
        "failures",
        "gaps",
        "joins",
        "last_error",
        "losses",
        "messages",
        "missing",
        "name",
        "refused",
        "stale",
    )

    def __init__(
        self, name: str, endpoint: str, apply: Callable[[bytes], None], cursor: Cursor | None = None
    ) -> None:
        self.name = name
        self.endpoint = endpoint
        self.cursor = cursor or Cursor()
        self._apply = apply

        self.messages = 0  # well-formed ones, stale ones included
        self.bytes = 0  # payload bytes of these
        self.gaps = 0  # times that messages were missing
        self.missing = 0  # messages that were missing
        self.stale = 0  # messages ignored because their number had been passed
        self.refused = 0  # messages of a wrong shape
        self.bad_frames: dict[str, int] = {}  # the same per reason
        self.joins = 0  # connections on which the worker answered
        self.losses = 0  # of these, how many broke
        self.failures = 0  # sockets that could not be connected or had to be given up

        self.connected = False
        self.disconnected_since: float | None = None  # seconds, monotonic; None = never connected
        self.last_error: str | None = None
        self._joined = False
        self._receiving = False
        self._failed = False

    @property
    def status(self) -> ListenerStatus:
        if self._failed:
            return ListenerStatus.FAILED
        if self._joined and self._receiving:
            return ListenerStatus.ACTIVE
        return ListenerStatus.PENDING

    def take(self, seq: int, payload: bytes) -> None:
        """Applies one batch, unless its number was passed before; a gap before it is counted."""
        self.messages += 1
        self.bytes += len(payload)
        cursor = self.cursor
        verdict = cursor.observe(seq)
        if verdict is Verdict.STALE:
            self.stale += 1
            return
        if verdict is Verdict.GAP:
            self.gaps += 1
            gap = cursor.missing(seq)
            self.missing += gap.stop - gap.start  # len() fails from 2^63 on
        cursor.accept(seq)
        self._apply(payload)

    def refuse(self, reason: str) -> None:
        """Counts a message of a wrong shape; the stream's place stays where it is."""
        self.refused += 1
        self.bad_frames[reason] = self.bad_frames.get(reason, 0) + 1

    def connecting(self) -> None:
        self._failed = self._joined = self._receiving = self.connected = False

    def receiving(self) -> None:
        self._receiving = True

    def joined(self) -> None:
        self.joins += 1
        self._joined = self.connected = True
        self.disconnected_since = self.last_error = None

    def lost(self, why: str, now: float) -> None:
        self.last_error = why
        if self.connected:
            self.losses += 1
            self.connected = False
            self.disconnected_since = now

    def failed(self, why: str, now: float) -> None:
        self.lost(why, now)
        self.failures += 1
        self._failed = True
