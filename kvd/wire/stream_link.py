"""The connection to one engine: its state, its documented status, its silence.

    state      means                                         status      connected
    --------   -------------------------------------------   ---------   ---------
    PENDING    the engine has not answered on this link      pending     no
    JOINED     it has answered: the link is connected        active *    yes
    BROKEN     the connection broke; the link reconnects     active *    no
    FAILED     the link can no longer be used                failed      no
    PAUSED     a request has paused the listener             paused      no

    * pending until the gate is open

                                          ┌──── joined ────┐
                                          v                │
    connecting ──> PENDING ── joined ──> JOINED ── lost ──> BROKEN
        ^             │                   │                │
        │             └───────────────────┴────────────────┴──> FAILED, PAUSED ──┐
        └────────────────────────────────────────────────────────────────────────┘

A loss without a connection, in PENDING or BROKEN, changes only the last error. `LINK_AFTER` is the
complete table; an event without a row there is a bug, and raises KeyError. Kept beside the state
are the gate (`is_receiving`), the last error, and the time since which there is no connection.
"""

from __future__ import annotations

from enum import Enum, StrEnum

from kvd.wire.stream_stats import StreamStats

# Time without a connection after which a stream is stale. A rolling restart or a rerouted network
# takes seconds. An engine that is away for longer has most likely lost its cache; if not, it stores
# and evicts blocks unnoticed.
STALE_AFTER_S = 30.0


class ListenerStatus(StrEnum):
    """The documented states of a listener."""

    PENDING = "pending"
    ACTIVE = "active"
    PAUSED = "paused"
    FAILED = "failed"


class Quiet(StrEnum):
    """The reason why no message has come for `stale_after_s` although one was expected."""

    UNREACHABLE = "unreachable"  # there is no connection
    SILENT = "silent"  # there is a connection, but no message has come over it


class LinkState(Enum):
    """The state of a listener's link."""

    PENDING = "pending"
    JOINED = "joined"
    BROKEN = "broken"
    FAILED = "failed"
    PAUSED = "paused"


class LinkEvent(Enum):
    """An event of a listener's link."""

    CONNECTING = "connecting"  # there is a new link
    JOINED = "joined"  # the engine has answered
    LOST = "lost"  # the connection, or its handshake, broke off; the link reconnects
    FAILED = "failed"  # the link can no longer be used
    PAUSED = "paused"  # a request has paused the listener


LINK_AFTER: dict[tuple[LinkState, LinkEvent], LinkState] = {
    (LinkState.PENDING, LinkEvent.CONNECTING): LinkState.PENDING,
    (LinkState.PENDING, LinkEvent.JOINED): LinkState.JOINED,
    (LinkState.PENDING, LinkEvent.LOST): LinkState.PENDING,
    (LinkState.PENDING, LinkEvent.FAILED): LinkState.FAILED,
    (LinkState.PENDING, LinkEvent.PAUSED): LinkState.PAUSED,
    # A link reports each loss before the next connection. If it ever did not, this would still
    # count as a new connection.
    (LinkState.JOINED, LinkEvent.JOINED): LinkState.JOINED,
    (LinkState.JOINED, LinkEvent.LOST): LinkState.BROKEN,
    (LinkState.JOINED, LinkEvent.FAILED): LinkState.FAILED,
    (LinkState.JOINED, LinkEvent.PAUSED): LinkState.PAUSED,
    (LinkState.BROKEN, LinkEvent.JOINED): LinkState.JOINED,
    (LinkState.BROKEN, LinkEvent.LOST): LinkState.BROKEN,
    (LinkState.BROKEN, LinkEvent.FAILED): LinkState.FAILED,
    (LinkState.BROKEN, LinkEvent.PAUSED): LinkState.PAUSED,
    (LinkState.FAILED, LinkEvent.CONNECTING): LinkState.PENDING,
    (LinkState.FAILED, LinkEvent.FAILED): LinkState.FAILED,  # no link could be made, again
    (LinkState.FAILED, LinkEvent.PAUSED): LinkState.PAUSED,
    (LinkState.PAUSED, LinkEvent.CONNECTING): LinkState.PENDING,
    (LinkState.PAUSED, LinkEvent.PAUSED): LinkState.PAUSED,  # two requests at once
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
        self.is_receiving = False  # the gate is open, and messages are applied
        self.disconnected_since: float | None = None  # None: never connected, or connected now
        self.last_error: str | None = None
        self._heard_at_join = 0  # number of messages before the connection was made
        self._quiet: Quiet | None = None  # as the last `check_quiet` found it
        self.quiet_since = 0.0  # when `_quiet` last changed
        self.quiet: Quiet | None = None  # `_quiet`, once it has lasted for `stale_after_s`

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
        """Notes why an attempt to connect failed."""
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
        """Returns whether the link is connected and open, and no message has come over it."""
        return self.connected and self.is_receiving and self._heard == self._heard_at_join

    def check_quiet(self, now: float, is_waited_for: bool) -> Quiet | None:
        """Notes that nothing comes, when called now and then; returns why, once it has lasted.

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
        """The number of messages that have come, malformed ones included."""
        return self._stats.messages + self._stats.refused
