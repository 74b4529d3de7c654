"""An event stream of an engine as others see it: status, health, position.

A listener reads the event stream of one (worker, rank). The task that owns the socket,
`kvd.net.listener.run_listener`, reports here what happens; four parts share what follows from it:

    EventStream ─┬─ link: StreamLink              what the socket does; status; who says nothing
                 ├─ identity: EngineIdentity      is the engine the same as before?
                 ├─ batches: AppliedBatches       what was applied, and what is missing for good
                 └─ catch_up: CatchUp             the batch held back, and its replay

A batch that is next in the stream is applied at once; any other is held back for `catch_up`.
Batches may name their publisher (`meet`): another one than before is another engine.

What a change of the connection means for the stream waits for its turn among the batches, some of
which may have come before (`subscribe`, `pass_over`).

`health` says whether the index can be believed for what the stream speaks of (docs/reliability.md):

    STALE         no connection for longer than `stale_after_s`
    RECOVERING    a batch is held, an engine asked, a long batch applied
    DEGRADED      there is a `loss`
    RECOVERING    nothing has come since the connection was made, or batches were missed
    EXACT         else

No clock, no sockets, no logging: moments come in as arguments (seconds, monotonic).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Flag, StrEnum, auto

from kvd.wire.applied_batches import AppliedBatches, BatchSink
from kvd.wire.catch_up import CatchUp
from kvd.wire.endpoints import Addresses
from kvd.wire.engine_identity import EngineIdentity, IdentityCheck, IdentityEvent
from kvd.wire.position import StreamPosition
from kvd.wire.stream_link import STALE_AFTER_S, ListenerStatus, Quiet, StreamLink
from kvd.wire.stream_stats import StreamStats

NO_CHECK = IdentityCheck.NONE  # compared for each batch: a name of its own is found faster


class StreamHealth(StrEnum):
    """How far the index can be believed for a stream, worst first."""

    STALE = "stale"  # disconnected for longer than `stale_after_s`
    DEGRADED = "degraded"  # batches are lost or were not understood; `EventStream.loss` says which
    # No batch since the connection was made, a gap is being replayed, or a long batch applied.
    RECOVERING = "recovering"
    EXACT = "exact"  # every batch of this engine process has been applied


class Change(Flag):
    """A change of the connection between two batches; of several at once, in this order."""

    LOST = auto()  # the connection
    JOINED = auto()  # another one was made
    MISSED = auto()  # batches have come that found no room


class EventStream:
    """One (worker, rank) stream: every batch that continues it goes to `stream`.

    `name` is for logs. `expected` is the number to continue from where a worker registers again:
    its blocks were dropped, so what came before that number is lost.
    """

    __slots__ = (
        "_is_broken",
        "_on_link",
        "_passed_joins",
        "_queue_change",
        "_stream",
        "batches",
        "catch_up",
        "cursor",
        "endpoint",
        "identity",
        "link",
        "name",
        "replay_endpoint",
        "restarted_at",
        "server_key",
        "stats",
    )

    def __init__(
        self,
        name: str,
        endpoint: str,
        stream: BatchSink,
        replay_endpoint: str | None = None,
        expected: int = 0,
        server_key: str | None = None,
        stale_after_s: float = STALE_AFTER_S,
        first: int = 0,
        on_link: Callable[[], None] = lambda: None,
    ) -> None:
        """The publisher's first batch has the number `first`, or a lower one.

        Calls `on_link` when `connected` has changed.
        """
        self.name = name
        self.endpoint = endpoint
        self.replay_endpoint = replay_endpoint
        self.server_key = server_key
        self.restarted_at: float | None = None  # when the engine was last found to be another
        self._stream = stream
        self._on_link = on_link
        self.stats = StreamStats()
        self.link = StreamLink(self.stats, stale_after_s)
        self.identity = EngineIdentity()
        self.batches = AppliedBatches(stream, self.identity, self.stats, expected, first)
        self.cursor = self.batches.cursor
        self.catch_up = CatchUp(self.batches, self.identity, self.link, self.stats)

        # In the order of the batches: the connection broke, and has not been made again.
        self._is_broken = False
        self._passed_joins = 0
        self._queue_change: Callable[[Change], None] | None = None  # see `subscribe`

    def take_over(self, position: StreamPosition) -> None:
        """Goes on where another process was with this stream, whose blocks the index has.

        That is before the first batch. The engine is to show that it is the same, and what it has
        published since is to be replayed.
        """
        assert not self.cursor.expected, "batches have been applied"
        self.batches.take_over(position)
        if not position.expected:
            return
        self._doubt()
        if position.publisher:  # an engine that names another one is another engine
            self.identity.name(position.publisher, 0)
        else:
            self.batches.await_proof(can_be_proved=self.replay_endpoint is not None)

    @property
    def addresses(self) -> Addresses:
        return Addresses(self.endpoint, self.replay_endpoint, self.server_key)

    @property
    def status(self) -> ListenerStatus:
        return self.link.status

    @property
    def connected(self) -> bool:
        return self.link.connected

    @property
    def unfinished(self) -> int | None:
        """The number of the batch that is not wholly applied yet."""
        return self.batches.unfinished

    def health(self, now: float) -> StreamHealth:
        if self.link.is_stale(now):
            return StreamHealth.STALE
        waits = self.catch_up.is_under_way or self.unfinished is not None
        # A publisher that only answers have named may be another than the one on this stream.
        waits = waits or self.identity.publisher not in (b"", self.identity.heard)
        if waits:
            return StreamHealth.RECOVERING
        # For good, unless an engine may yet prove itself: one that says nothing makes it no better.
        if self.loss and not (self.batches.unproved and not self.connected):
            return StreamHealth.DEGRADED
        return StreamHealth.RECOVERING if self.batches.may_lack_news else StreamHealth.EXACT

    @property
    def loss(self) -> str:
        """Returns why the stream is degraded, empty if it is not."""
        return self.batches.loss

    @property
    def ignored(self) -> Mapping[str, int]:
        """Events that were understood and had no effect, by reason."""
        return self._stream.ignored

    def check_quiet(self, now: float) -> Quiet | None:
        """Notes that nothing comes, if asked now and then; returns why once it has lasted."""
        # An idle engine that has shown to be the same is not waited for.
        waits = self.batches.may_lack_news or self.health(now) is StreamHealth.RECOVERING
        waits = waits and self.link.is_silent and not self.link.is_stale(now)
        return self.link.check_quiet(now, waits)

    # ---- batches

    def take(self, seq: int, payload: bytes) -> bool:
        """Applies the batch that is next; holds any other back and returns True.

        It does so, too, where it has left the batch unfinished.
        """
        stats = self.stats
        stats.messages += 1
        stats.payload_bytes += len(payload)
        if seq == self.cursor.expected and self.identity.check is NO_CHECK:
            return self.batches.apply(seq, payload)
        self.catch_up.hold(seq, payload)
        return True

    def meet(self, publisher: bytes) -> None:
        """Notes who has published the messages that come now, empty if they do not say."""
        identity = self.identity
        if publisher:
            if identity.publisher not in (b"", publisher):
                # An engine that came while another was in doubt may have gone before it is heard.
                if identity.is_unknown:
                    identity.advance(IdentityEvent.DOUBTED)
                self.batches.engine_restarted()
            identity.name(publisher, self.cursor.expected)
            identity.heard = publisher
        identity.speaker = publisher

    def refuse(self, reason: str) -> None:
        """Counts a message of a wrong shape; the stream's position stays as it is."""
        self.stats.refused += 1
        self.stats.bad_frames[reason] = self.stats.bad_frames.get(reason, 0) + 1

    def crashed(self) -> None:
        """Notes a bug: the batch it happened on is not applied, or not wholly."""
        self.batches.crashed()

    # ---- connections

    def connecting(self) -> None:
        self.link.connecting()

    def receiving(self) -> None:
        self.link.is_receiving = True

    def joined(self) -> None:
        self.link.joined()
        self._changed(Change.JOINED)
        self._on_link()

    def lost_connection(self, why: str, now: float) -> None:
        if self.link.lost(why, now):
            self._changed(Change.LOST)
            self._on_link()

    def not_reached(self, why: str) -> None:
        """Notes what an attempt to connect has met."""
        self.link.not_reached(why)

    def failed(self, why: str, now: float) -> None:
        """Drops the held batch, too: it shows as missing later, and may be replayed then."""
        if self.link.failed(why, now):
            self._changed(Change.LOST)
            self._on_link()
        self.catch_up.drop()

    def paused(self, now: float) -> None:
        self.link.paused(now)
        self.catch_up.drop()

    def _changed(self, change: Change) -> None:
        (self._queue_change or self.pass_over)(change)

    def subscribe(self, queue_change: Callable[[Change], None]) -> None:
        """Has `queue_change` take changes of the connection, which it has passed over in turn."""
        self._queue_change = queue_change

    def unsubscribe(self) -> None:
        """Passes over changes of the connection at once again."""
        self._queue_change = None

    def pass_over(self, change: Change) -> None:
        """Expects that further batches may come from another engine, or that some were lost."""
        if Change.LOST in change:
            self._is_broken = True
            self._doubt()
        if Change.JOINED in change:
            self._passed_joins += 1
            if self._passed_joins > 1:  # of what follows some may still be the last one's
                self.cursor.rejoined()
            if self._is_broken:  # an earlier proof may have been of one that had been queued
                self._is_broken = False
                self._doubt()
        if change & (Change.JOINED | Change.MISSED):
            self.batches.miss()

    def _doubt(self) -> None:
        """Has the engine asked who it is, where it can be asked."""
        if self.replay_endpoint is not None:
            self.identity.advance(IdentityEvent.DOUBTED)
