"""One engine's event stream as a whole: its status, health and position.

A listener reads the event stream of one (worker, rank). Its task,
`kvd.net.listener.run_listener`, reports messages and connection changes here; four parts share the
work:

    EventStream ─┬─ link: StreamLink              the connection, its status, its silence
                 ├─ identity: EngineIdentity      the check whether the engine is the same
                 ├─ batches: AppliedBatches       the applied batches and the permanent losses
                 └─ catch_up: CatchUp             the held batch and its replay

A batch that is next in the stream is applied at once (`kvd.wire.in_order`); any other is held back
for `catch_up`.
Batches may name their publisher (`meet`): another publisher than before is another engine.

A change of the connection takes its turn among the batches, since some of them were received before
it and still wait (`subscribe`, `pass_over`).

`health` says how far the index can be believed for this stream (docs/reliability.md); the first
line that applies decides:

    STALE         no connection for longer than `stale_after_s`
    RECOVERING    a batch is held, an engine asked, or a long batch applied
    DEGRADED      there is a `loss`
    RECOVERING    no batch has come since the connection was made or batches were missed
    EXACT         otherwise

No clock, no sockets, no logging: moments come in as arguments (seconds, monotonic).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Flag, StrEnum, auto

from kvd.wire.applied_batches import AppliedBatches, BatchSink
from kvd.wire.catch_up import CatchUp
from kvd.wire.endpoints import Addresses
from kvd.wire.engine_identity import EngineIdentity, IdentityEvent
from kvd.wire.in_order import Taker
from kvd.wire.position import StreamPosition
from kvd.wire.stream_link import STALE_AFTER_S, ListenerStatus, Quiet, StreamLink
from kvd.wire.stream_stats import StreamStats


class StreamHealth(StrEnum):
    """How far the index can be believed for a stream, worst first."""

    STALE = "stale"  # disconnected for longer than `stale_after_s`
    DEGRADED = "degraded"  # batches were lost or not understood; `EventStream.loss` says which
    # No batch since the connection was made, a gap is being replayed, or a long batch applied.
    RECOVERING = "recovering"
    EXACT = "exact"  # every batch of this engine process has been applied


class Change(Flag):
    """A change between two batches; several may come at once, and happened in this order."""

    LOST = auto()  # the connection was lost
    JOINED = auto()  # a new connection was made
    MISSED = auto()  # batches were dropped, as the inbox had no room


class EventStream(Taker):
    """One (worker, rank) stream: every batch that continues it goes to `stream`.

    `name` is for logs. If a worker registers again, `expected` is the number to continue from: its
    blocks were dropped, so all batches before that number count as lost.
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
        self.restarted_at: float | None = None  # when the last restart of the engine was noticed
        self._stream = stream
        self._on_link = on_link
        self.stats = StreamStats()
        self.link = StreamLink(self.stats, stale_after_s)
        self.identity = EngineIdentity()
        self.batches = AppliedBatches(stream, self.identity, self.stats, expected, first)
        super().__init__(self.stats, self.batches, self.identity)
        self.cursor = self.batches.cursor
        self.catch_up = CatchUp(self.batches, self.identity, self.link, self.stats)

        # The connection broke and was not made again, as of the batch handed over last.
        self._is_broken = False
        self._passed_joins = 0
        self._queue_change: Callable[[Change], None] | None = None  # see `subscribe`

    def take_over(self, position: StreamPosition) -> None:
        """Goes on where another process was with this stream; called before the first batch.

        The index has the blocks of that process. The engine has to prove that it is the same, and
        the batches that it has published since are replayed.
        """
        assert not self.cursor.expected, "batches have been applied"
        self.batches.take_over(position)
        if not position.expected:
            return
        self._doubt()
        if position.publisher:  # if the engine names another publisher, it is another engine
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
        # A publisher that only replays have named may not be the one that sends live batches.
        waits = waits or self.identity.publisher not in (b"", self.identity.heard)
        if waits:
            return StreamHealth.RECOVERING
        # A loss is permanent, but an engine that is not connected yet may still prove its identity.
        if self.loss and not (self.batches.unproved and not self.connected):
            return StreamHealth.DEGRADED
        return StreamHealth.RECOVERING if self.batches.may_lack_batches else StreamHealth.EXACT

    @property
    def loss(self) -> str:
        """Returns why the stream is degraded, empty if it is not."""
        return self.batches.loss

    @property
    def ignored(self) -> Mapping[str, int]:
        """Events that were understood and had no effect, by reason."""
        return self._stream.ignored

    def check_quiet(self, now: float) -> Quiet | None:
        """Notes that nothing comes, when called now and then; returns why, once it has lasted."""
        # An idle engine that has proved to be the same is not waited for.
        waits = self.batches.may_lack_batches or self.health(now) is StreamHealth.RECOVERING
        waits = waits and self.link.is_silent and not self.link.is_stale(now)
        return self.link.check_quiet(now, waits)

    # ---- batches

    def hold(self, seq: int, payload: bytes) -> None:
        """Holds a batch back: it is not next, or may be another engine's."""
        self.catch_up.hold(seq, payload)

    def meet(self, publisher: bytes) -> None:
        """Notes the publisher of the messages that follow, b"" if they do not name any."""
        identity = self.identity
        if publisher:
            if identity.publisher not in (b"", publisher):
                # The connection may already lead to yet another engine than this message's.
                if identity.is_unknown:
                    identity.advance(IdentityEvent.DOUBTED)
                self.batches.engine_restarted()
            identity.name(publisher, self.cursor.expected)
            identity.heard = publisher
        identity.speaker = publisher

    def refuse(self, reason: str) -> None:
        """Counts a malformed message; the stream's position stays as it is."""
        self.stats.refused += 1
        self.stats.bad_frames[reason] = self.stats.bad_frames.get(reason, 0) + 1

    def crashed(self) -> None:
        """Notes a bug: the batch that it hit is not applied, or only a part of it."""
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
        """Notes why an attempt to connect failed."""
        self.link.not_reached(why)

    def failed(self, why: str, now: float) -> None:
        """Also drops the held batch: it will show as missing, and may be replayed then."""
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
        """Has `queue_change` take connection changes, and call `pass_over` for each in its turn."""
        self._queue_change = queue_change

    def unsubscribe(self) -> None:
        """Applies connection changes at once again."""
        self._queue_change = None

    def pass_over(self, change: Change) -> None:
        """Applies a change: later batches may be another engine's, or batches were missed."""
        if Change.LOST in change:
            self._is_broken = True
            self._doubt()
        if Change.JOINED in change:
            self._passed_joins += 1
            if self._passed_joins > 1:  # the next batches may still be the previous engine's
                self.cursor.rejoined()
            if self._is_broken:  # an earlier proof may have come from a batch that was queued
                self._is_broken = False
                self._doubt()
        if change & (Change.JOINED | Change.MISSED):
            self.batches.miss()

    def _doubt(self) -> None:
        """Demands a proof of the engine's identity, if it has a replay server to ask."""
        if self.replay_endpoint is not None:
            self.identity.advance(IdentityEvent.DOUBTED)
