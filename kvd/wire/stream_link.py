"""The connection to one engine: its state, its documented status, its silence.

    state      means                                         status      connected
    --------   -------------------------------------------   ---------   ---------
    PENDING    the engine has not answered on this socket    pending     no
    JOINED     it answers                                    active *    yes
    BROKEN     it did; the link tries to connect again       active *    no
    FAILED     the socket can no longer be used              failed      no
    PAUSED     nobody listens, by request                    paused      no

    * pending until the gate is open

                                          ┌──── joined ────┐
                                          v                │
    connecting ──> PENDING ── joined ──> JOINED ── lost ──> BROKEN
        ^             │                   │                │
        │             └───────────────────┴────────────────┴──> FAILED, PAUSED ──┐
        └────────────────────────────────────────────────────────────────────────┘

A loss without a connection, in PENDING or BROKEN, changes nothing but the last error.
`LINK_AFTER` has all of it; what has no row there is a bug, and raises KeyError. Beside the state
stand the gate (`is_receiving`), the last error, and since when there is no connection.
"""

from __future__ import annotations

from enum import Enum, StrEnum

from kvd.wire.stream_stats import StreamStats

# Time without a connection after which a stream is stale. A rolling restart or a network that is
# rewired takes seconds; an engine that is away for longer has most likely lost its cache, and
# evicts or stores unheard in any case.
STALE_AFTER_S = 30.0


class ListenerStatus(StrEnum):
    """The documented states of a listener."""

    PENDING = "pending"
    ACTIVE = "active"
    PAUSED = "paused"
    FAILED = "failed"


class Quiet(StrEnum):
    """The reason why nothing has come for `stale_after_s`, where something should have."""

    UNREACHABLE = "unreachable"  # there is no connection
    SILENT = "silent"  # there is one, and no message has come over it


class LinkState(Enum):
    """The state of a listener's socket."""

    PENDING = "pending"
    JOINED = "joined"
    BROKEN = "broken"
    FAILED = "failed"
    PAUSED = "paused"


class LinkEvent(Enum):
    """An event of a listener's socket."""

    CONNECTING = "connecting"  # there is a new socket
    JOINED = "joined"  # the engine answers
    LOST = "lost"  # the connection broke, or broke off early; the link tries again
    FAILED = "failed"  # the socket can no longer be used
    PAUSED = "paused"  # nobody listens any more, by request


LINK_AFTER: dict[tuple[LinkState, LinkEvent], LinkState] = {
    (LinkState.PENDING, LinkEvent.CONNECTING): LinkState.PENDING,
    (LinkState.PENDING, LinkEvent.JOINED): LinkState.JOINED,
    (LinkState.PENDING, LinkEvent.LOST): LinkState.PENDING,
    (LinkState.PENDING, LinkEvent.FAILED): LinkState.FAILED,
    (LinkState.PENDING, LinkEvent.PAUSED): LinkState.PAUSED,
    # A link reports each loss before the next connection; without it, that is still a new one.
    (LinkState.JOINED, LinkEvent.JOINED): LinkState.JOINED,
    (LinkState.JOINED, LinkEvent.LOST): LinkState.BROKEN,
    (LinkState.JOINED, LinkEvent.FAILED): LinkState.FAILED,
    (LinkState.JOINED, LinkEvent.PAUSED): LinkState.PAUSED,
    (LinkState.BROKEN, LinkEvent.JOINED): LinkState.JOINED,
    (LinkState.BROKEN, LinkEvent.LOST): LinkState.BROKEN,
    (LinkState.BROKEN, LinkEvent.FAILED): LinkState.FAILED,
    (LinkState.BROKEN, LinkEvent.PAUSED): LinkState.PAUSED,
    (LinkState.FAILED, LinkEvent.CONNECTING): LinkState.PENDING,
    (LinkState.FAILED, LinkEvent.FAILED): LinkState.FAILED,  # no socket could be had, again
    (LinkState.FAILED, LinkEvent.PAUSED): LinkState.PAUSED,
    (LinkState.PAUSED, LinkEvent.CONNECTING): LinkState.PENDING,
    (LinkState.PAUSED, LinkEvent.PAUSED): LinkState.PAUSED,  # by two requests at once
}

STATUS: dict[LinkState, ListenerStatus] = {
    LinkState.PENDING: ListenerStatus.PENDING,
    LinkState.JOINED: ListenerStatus.ACTIVE,
    LinkState.BROKEN: ListenerStatus.ACTIVE,
    LinkState.FAILED: ListenerStatus.FAILED,
    LinkState.PAUSED: ListenerStatus.PAUSED,
}


class StreamLink:
    """The connection of one listener. Moments are seconds, monotonic."""

    __slots__ = (
        "_heard_at_join",
        "_quiet",
        "_stats",
        "disconnected_since",
        "is_receiving",
        "last_error",
        "quiet",
        "quiet_since",
        "stale_after_s",
        "state",
    )

    def __init__(self, stats: StreamStats, stale_after_s: float = STALE_AFTER_S) -> None:
        self._stats = stats
        self.stale_after_s = stale_after_s
        self.state = LinkState.PENDING
        self.is_receiving = False  # the gate is open, and messages are taken
        self.disconnected_since: float | None = None  # None: never connected, or connected
        self.last_error: str | None = None
        self._heard_at_join = 0  # messages before the connection was made
        self._quiet: Quiet | None = None  # as `check_quiet` has found it the last time
        self.quiet_since = 0.0  # when that began
        self.quiet: Quiet | None = None  # the same, if it has lasted for `stale_after_s`

    @property
    def connected(self) -> bool:
        return self.state is LinkState.JOINED

    @property
    def status(self) -> ListenerStatus:
        status = STATUS[self.state]
        if status is ListenerStatus.ACTIVE and not self.is_receiving:
            return ListenerStatus.PENDING
        return status

    def is_stale(self, now: float) -> bool:
        """Returns whether there has been no connection for longer than `stale_after_s`."""
        since = self.disconnected_since
        return since is not None and now - since > self.stale_after_s

    def connecting(self) -> None:
        self._advance(LinkEvent.CONNECTING)
        self.is_receiving = False

    def joined(self) -> None:
        self._advance(LinkEvent.JOINED)
        self._stats.joins += 1
        self._heard_at_join = self._heard
        self.disconnected_since = self.last_error = None

    def lost(self, why: str, now: float) -> bool:
        """Returns whether there was a connection."""
        return self._broke(LinkEvent.LOST, why, now)

    def failed(self, why: str, now: float) -> bool:
        """Returns whether there was a connection."""
        was_connected = self._broke(LinkEvent.FAILED, why, now)
        self._stats.failures += 1
        return was_connected

    def paused(self, now: float) -> None:
        if self.connected:
            self.disconnected_since = now
        self._advance(LinkEvent.PAUSED)

    def not_reached(self, why: str) -> None:
        """Notes what an attempt to connect has met."""
        if not self.connected:
            self.last_error = why

    def _broke(self, event: LinkEvent, why: str, now: float) -> bool:
        was_connected = self.connected
        self._advance(event)
        self.last_error = why
        if was_connected:
            self._stats.losses += 1
            self.disconnected_since = now
        return was_connected

    def _advance(self, event: LinkEvent) -> None:
        self.state = LINK_AFTER[self.state, event]

    @property
    def is_silent(self) -> bool:
        """Returns whether nothing has come over this connection, where it could."""
        return self.connected and self.is_receiving and self._heard == self._heard_at_join

    def check_quiet(self, now: float, is_waited_for: bool) -> Quiet | None:
        """Notes that nothing comes, if asked now and then; returns why once it has lasted.

        A silent engine counts only while it is waited for.
        """
        quiet = self._quiet_now(is_waited_for)
        if quiet is not self._quiet:
            self._quiet, self.quiet_since, self.quiet = quiet, now, None
        if quiet is self.quiet or now - self.quiet_since < self.stale_after_s:
            return None
        self.quiet = quiet
        self._stats.unreachable += quiet is Quiet.UNREACHABLE
        self._stats.silent += quiet is Quiet.SILENT
        return quiet

    def _quiet_now(self, is_waited_for: bool) -> Quiet | None:
        if self.state is LinkState.PAUSED:
            return None
        if not self.connected:
            return Quiet.UNREACHABLE
        return Quiet.SILENT if self.is_silent and is_waited_for else None

    @property
    def _heard(self) -> int:
        """Messages that have come, of whatever shape."""
        return self._stats.messages + self._stats.refused
