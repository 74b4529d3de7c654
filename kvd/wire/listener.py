"""What is known about one listener: its counters, its place in the stream, its status and health.

A listener reads the event stream of one (worker, rank). This is the part of it that others look
at; the task that owns the socket, `kvd.net.listener.run_listener`, tells it what happens:

    told              effect                              documented status
    ---------------   ---------------------------------   ---------------------------------------
    (nothing yet)                                         pending
    connecting()      a new socket                        pending; failed and paused are over
    joined()          the worker answers; error is over   active once the gate is open, too
    receiving()       the gate is open                    active once joined, too
    lost(why)         the connection broke, or broke      unchanged: a worker that was there once
                      off early; libzmq tries again       stays active, last_error says the rest
    failed(why)       the socket is of no more use        failed
    paused()          nobody listens, by request          paused

A batch that is next in the stream is applied at once. Any other is held back, and the task settles
it before it takes another one:

    take ── next ──> applied
      └─ held ── judge ── stale ──────────────────────────────> ignored
                   └─ gap or restart ─ take_replayed .. settle ─> applied; what did not come is lost

A long batch is applied in slices. Whatever has begun to apply one leaves it `unfinished`, and the
task calls `go_on` as long as it is, with others in between, before anything else of the stream. If
the task ends before that, the rest waits for the next one, or goes with the registration.

`health` says whether the index can be believed for what the stream speaks of (docs/reliability.md).
No clock, no sockets, no logging: moments come in as arguments (seconds, monotonic).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from kvd.wire.counts import StreamCounts
from kvd.wire.cursor import Cursor, Verdict
from kvd.wire.endpoints import Addresses
from kvd.wire.replay import ReplayEnd
from kvd_core.index import EMPTIED, FLAWED, NO_ROOM, UNFINISHED

# A rolling restart or a network that is rewired takes seconds; an engine that is away for longer
# has most likely lost its cache, and evicts or stores unheard in any case.
STALE_AFTER_S = 30.0

UNKNOWN = "not known to be the same engine"
CLEARED_UNKNOWN = "not known to be cleared by the same engine"

MAX_HOLES_SHOWN = 8  # ranges of lost numbers that a text names; all of them are counted


class ListenerStatus(StrEnum):
    """The documented states of a listener."""

    PENDING = "pending"
    ACTIVE = "active"
    PAUSED = "paused"
    FAILED = "failed"


class StreamHealth(StrEnum):
    """How far the index can be believed for a stream, worst first."""

    STALE = "stale"  # disconnected for longer than `stale_after_s`
    DEGRADED = "degraded"  # batches are lost or were not understood; `Listener.loss` says which
    # No batch since the connection was made, a gap is being replayed, or a long batch applied.
    RECOVERING = "recovering"
    EXACT = "exact"  # every batch of this engine process has been applied


class Stream(Protocol):
    """Where batches go; `kvd_core.index.Stream` is one."""

    def apply(self, payload: bytes) -> int:
        """Applies a batch and returns what it has shown, as bits: EMPTIED, FLAWED, NO_ROOM.

        Or only begins to, because it is long, and returns UNFINISHED.
        """

    def go_on(self) -> int:
        """Applies some more of an UNFINISHED batch; returns what `apply` does."""

    def flaw(self) -> str:
        """Says why the last batch was FLAWED."""

    def clear(self) -> None:
        """Drops all that earlier batches have stored, and the rest of an UNFINISHED one."""

    def restored(self) -> bool:
        """Says whether its ranks hold blocks of a dump that no batch has spoken for since."""

    def goes_on(self, payload: bytes) -> bool:
        """Says whether a batch, not yet applied, speaks of blocks that only a dump has told of."""

    def drop_restored(self) -> bool:
        """Drops those; returns whether there were any."""


class Listener(StreamCounts):
    """One (worker, rank) stream: every batch that continues it goes to `stream`.

    `name` is for logs. `expected` is the number to continue from where a worker registers again:
    its blocks were dropped, so what came before that number is lost.
    """

    __slots__ = (
        "_apply",
        "_broken",
        "_confirming",
        "_failed",
        "_holes",
        "_joined",
        "_joined_at",
        "_paused",
        "_proving",
        "_receiving",
        "_restored",
        "_stream",
        "_unknown",
        "_unproved",
        "connected",
        "cursor",
        "disconnected_since",
        "endpoint",
        "held",
        "last_error",
        "last_flaw",
        "loss",
        "name",
        "replay_endpoint",
        "server_key",
        "stale_after_s",
        "unfinished",
    )

    def __init__(
        self,
        name: str,
        endpoint: str,
        stream: Stream,
        replay_endpoint: str | None = None,
        expected: int = 0,
        server_key: str | None = None,
        stale_after_s: float = STALE_AFTER_S,
    ) -> None:
        super().__init__()
        self.stale_after_s = stale_after_s
        self.name = name
        self.endpoint = endpoint
        self.replay_endpoint = replay_endpoint
        self.server_key = server_key
        self.cursor = Cursor(expected)
        self._stream = stream
        self._apply = stream.apply

        self.held: tuple[int, bytes] | None = None  # number and payload of the batch held back
        self.unfinished: int | None = None  # number of the batch that is not wholly applied yet
        self.loss = "registered again" if expected else ""  # why degraded, empty if not
        self.last_flaw: tuple[int, str] | None = None  # the last batch not understood, and why
        self._holes: list[range] = []  # numbers lost before the held batch
        self._restored = False  # what came before the first batch is a dump's word
        self._joined_at = expected  # what was expected when the connection was made, -1 is over
        self._broken = False  # the connection did, and has not been made again
        self._unproved = False  # the engine may be another one since the connection broke,
        self._proving = False  # and the held batch's replay is to tell by the last number,
        self._confirming = False  # and whose the held batch is by its own
        self._unknown = False  # the engine has been asked, and has not shown that it is the same

        self.connected = False
        self.disconnected_since: float | None = None  # seconds, monotonic; None = never connected
        self.last_error: str | None = None
        self._joined = False
        self._receiving = False
        self._failed = False
        self._paused = False

    @property
    def addresses(self) -> Addresses:
        return Addresses(self.endpoint, self.replay_endpoint, self.server_key)

    @property
    def status(self) -> ListenerStatus:
        if self._paused:
            return ListenerStatus.PAUSED
        if self._failed:
            return ListenerStatus.FAILED
        if self._joined and self._receiving:
            return ListenerStatus.ACTIVE
        return ListenerStatus.PENDING

    def health(self, now: float) -> StreamHealth:
        since = self.disconnected_since
        if since is not None and now - since > self.stale_after_s:
            return StreamHealth.STALE
        waits = self.held is not None or self.unfinished is not None
        if waits or self.cursor.expected == self._joined_at:
            return StreamHealth.RECOVERING
        return StreamHealth.DEGRADED if self.loss else StreamHealth.EXACT

    # ---- batches

    def take(self, seq: int, payload: bytes) -> bool:
        """Applies the batch that is next; holds any other back and returns True.

        It does so, too, where it has left the batch unfinished.
        """
        self.messages += 1
        self.payload_bytes += len(payload)
        cursor = self.cursor
        if seq == cursor.expected and not self._unproved:
            if seq == 0:
                self._begin(payload)
            cursor.accept(seq, payload)
            shown = self._apply(payload)
            if shown:
                self._learn(seq, shown)
                return self.unfinished is not None
            return False
        self.held = seq, payload
        return True

    def go_on(self) -> None:
        """Applies some more of the batch that is unfinished."""
        seq, self.unfinished = self.unfinished, None  # over, too, if a bug ends it
        assert seq is not None
        self._learn(seq, self._stream.go_on())

    def judge(self) -> Verdict:
        """Judges the batch held back; it is dropped if it is stale, all blocks are at a restart."""
        seq, payload = self._held()
        verdict = self.cursor.judge(seq, payload)
        if verdict is Verdict.STALE:
            self.stale += 1
            self.held = None
            return verdict
        self._confirming = self._unproved or self._unknown
        self._proving = self._confirming and self.cursor.last is not None
        self._unproved = False
        if verdict is Verdict.RESTART:
            self._restart()
        self.gaps += seq > self.cursor.expected
        return verdict

    def wanted(self) -> range:
        """Returns the numbers that a replay should bring before the held batch.

        After a broken connection the last accepted number is among them: a new engine may have
        come as far meanwhile, and then its batch of that number is another one. So is the held
        batch's: it may have waited in the queue since before, and be the old engine's.
        """
        seq, _ = self._held()
        return range(self.cursor.expected - self._proving, seq + self._confirming)

    def take_replayed(self, seq: int, payload: bytes) -> ReplayEnd | None:
        """Applies a replayed batch if it is wanted; returns why the replay is over if it is."""
        wanted = self.wanted()
        known = self.cursor.holds(seq, payload)
        if seq not in wanted or (known and seq >= self.cursor.expected):
            self.strays += 1  # one that is known and yet to come was the last engine's
            return ReplayEnd.REACHED if seq >= wanted.stop else None
        if seq == self._held()[0]:
            return self._confirm(seq, payload)
        if seq >= self.cursor.expected:
            if self._proving:
                self._give_up_proof()
            self.replayed += 1
            self._continue(seq, payload)
        elif known:
            self._proved()
        else:
            self._restart()
            return ReplayEnd.OTHER_ENGINE
        self._proving = False
        return ReplayEnd.REACHED if seq + 1 == wanted.stop else None

    def replay_ended(self, end: ReplayEnd) -> None:
        self.replays[end] = self.replays.get(end, 0) + 1
        answered = end in (ReplayEnd.REACHED, ReplayEnd.MARKER)
        if answered and (self._proving or self._confirming):
            self._give_up_proof()

    def settle(self) -> str:
        """Applies the batch held back and returns which numbers before it are lost, if any."""
        seq, payload = self._held()
        self.held = None
        self._unknown = self._unknown or self._proving or self._confirming
        self._proving = self._confirming = False
        self._continue(seq, payload)
        lost = _ranges(self._holes)
        self._holes.clear()
        return lost

    def refuse(self, reason: str) -> None:
        """Counts a message of a wrong shape; the stream's place stays where it is."""
        self.refused += 1
        self.bad_frames[reason] = self.bad_frames.get(reason, 0) + 1

    def _held(self) -> tuple[int, bytes]:
        assert self.held is not None
        return self.held

    def _continue(self, seq: int, payload: bytes) -> None:
        """Applies a batch that is next, or lies behind numbers that will not come any more."""
        hole = range(self.cursor.expected, seq)
        if seq == 0:
            self._begin(payload)
        if hole:
            self.lost += hole.stop - hole.start  # len() fails from 2^63 on
            self._holes.append(hole)
            self._restored = self._restored or self._stream.restored()
            behind = ", restored from a peer" if self._restored else ""
            self.loss = f"missing {_ranges(self._holes)}{behind}"
        self.cursor.accept(seq, payload)
        self._learn(seq, self._apply(payload))

    def _begin(self, payload: bytes) -> None:
        """The engine tells everything from its beginning: what a dump said of it may be of another.

        Nothing of it is lost, if it was of this one: all of that is told again. Only a batch that
        goes on with the dump's blocks is no beginning, whatever its number.
        """
        if not self._stream.restored():
            return
        if self._stream.goes_on(payload):
            self._restored = True
            self.loss = "restored from a peer"
        else:
            self.superseded += self._stream.drop_restored()

    def _confirm(self, seq: int, payload: bytes) -> ReplayEnd:
        """Takes the engine's own batch for the held one, which another may have left in the queue;
        then more of that other's may follow.
        """
        if self._proving:
            self._give_up_proof()
        self._confirming = False
        if payload != self._held()[1]:
            self.held = seq, payload
            self._unproved = True
        return ReplayEnd.REACHED

    def _give_up_proof(self) -> None:
        """The engine has answered, and does not hold what would show that it is the same."""
        self._proving = self._confirming = False
        self._unknown = True
        self.loss = UNKNOWN
        self.cursor.rejoined()

    def _proved(self) -> None:
        """The last batch is the engine's own; if it was a clear, nothing of another is left."""
        self._unknown = False
        if self.loss == CLEARED_UNKNOWN:
            self.loss = ""

    def _learn(self, seq: int, shown: int) -> None:
        if shown & UNFINISHED:
            self.unfinished = seq
            return
        if shown & EMPTIED:
            # One of another engine, that was queued, says nothing about what comes behind it.
            in_doubt = bool(self.loss) and self._unknown
            self._unproved = self._unproved or in_doubt
            self.loss = CLEARED_UNKNOWN if in_doubt else ""
            self._restored = False
        if shown & NO_ROOM:
            self.loss = f"batch {seq} found no room"
        if shown & FLAWED:
            self.flawed += 1
            self.last_flaw = seq, self._stream.flaw()
            self.loss = f"batch {seq} not understood"

    def _restart(self) -> None:
        """Another engine speaks: nothing that the last one cached is there any more."""
        self.restarts += 1
        self._stream.clear()
        self.cursor.restart()
        self._holes.clear()
        self._proving = self._restored = self._unknown = False
        self._joined_at = -1
        self.loss = ""

    # ---- connections

    def connecting(self) -> None:
        self._failed = self._joined = self._receiving = self.connected = self._paused = False

    def receiving(self) -> None:
        self._receiving = True

    def joined(self) -> None:
        self.joins += 1
        self._joined = self.connected = True
        self.disconnected_since = self.last_error = None
        if self.joins > 1:  # what was queued before, perhaps of another engine, comes first
            self.cursor.rejoined()
        if self._broken:  # an earlier proof may have been of one that had been queued
            self._unproved = self.replay_endpoint is not None
            self._broken = False
        self._joined_at = self.cursor.expected

    def lost_connection(self, why: str, now: float) -> None:
        self.last_error = why
        if self.connected:
            self.losses += 1
            self._disconnected(now)
            self._broken = True
            self._unproved = self.replay_endpoint is not None

    def failed(self, why: str, now: float) -> None:
        """Drops the held batch, too: it shows as missing later, and may be replayed then."""
        self.lost_connection(why, now)
        self.failures += 1
        self._forget_held()
        self._failed = True

    def crashed(self) -> None:
        """Notes a bug: the batch it happened on is not applied, or not wholly."""
        self.crashes += 1
        self.unfinished = None
        self.loss = "an internal error"

    def paused(self, now: float) -> None:
        self._disconnected(now)
        self._forget_held()
        self._paused = True

    def _forget_held(self) -> None:
        """Drops the held batch; what its replay was to prove is still to be proved."""
        if self.held is not None:
            self._unproved = self._unproved or self._proving or self._confirming
            self._proving = self._confirming = False
            self.held = None

    def _disconnected(self, now: float) -> None:
        if self.connected:
            self.connected = False
            self.disconnected_since = now


def _ranges(numbers: list[range]) -> str:
    shown = [
        f"{some.start}..{some.stop - 1}" if some.stop - some.start > 1 else str(some.start)
        for some in numbers[:MAX_HOLES_SHOWN]
    ]
    return ",".join(shown + ["..."] * (len(numbers) > MAX_HOLES_SHOWN))
