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
    not_reached(why)  what an attempt to connect met      unchanged, last_error says it
    failed(why)       the socket is of no more use        failed
    paused()          nobody listens, by request          paused

What that means for the stream waits for its turn among the batches, some of which may have come
before (`place`, `pass_over`).

A batch that is next in the stream is applied at once. Any other is held back, and the task settles
it before it takes another one:

    take ── next ──> applied
      └─ held ── judge ── stale ──> ignored
                   └─ gap or restart ─ take_replayed .. apply_held ──> applied; the rest is lost

Batches may name their publisher (`meet`): another one than before is another engine, and `restart`
comes at once. In replays only an engine that is asked while no batch waits may be another one; what
else comes of another one is no answer.

An engine that has come back and says nothing is asked, while no batch waits (`asks`):

    ask ── take_replayed .. ─┬─ the last batch, and those behind it ──> the same: applied
                             ├─ another one of that number ───────────> another: asked from 0
                             ├─ any batch of another publisher ───────> another: asked from 0
                             └─ nothing but the end ──────────────────> another: asked from 0

A long batch is applied in slices. Whatever has begun to apply one leaves it `unfinished`, and the
task calls `go_on` as long as it is, with others in between, before anything else of the stream. If
the task ends before that, the rest waits for the next one, or goes with the registration.

`health` says whether the index can be believed for what the stream speaks of (docs/reliability.md).
No clock, no sockets, no logging: moments come in as arguments (seconds, monotonic).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Flag, StrEnum, auto
from typing import Protocol

from kvd.wire.counts import StreamCounts
from kvd.wire.cursor import Cursor, Verdict
from kvd.wire.endpoints import Addresses
from kvd.wire.losses import Losses
from kvd.wire.replay import END_SEQ, ReplayEnd
from kvd_core.index.prefix_index import CLEARED, FLAWED, NEW_RANK, NO_ROOM, UNFINISHED

# Time without a connection after which a stream is stale. A rolling restart or a network that is
# rewired takes seconds; an engine that is away for longer has most likely lost its cache, and
# evicts or stores unheard in any case.
STALE_AFTER_S = 30.0


class Quiet(StrEnum):
    """Why nothing has come for `stale_after_s`, where something should have."""

    UNREACHABLE = "unreachable"  # there is no connection
    SILENT = "silent"  # there is one, and no message has come over it


UNKNOWN = "not known to be the same engine"
CLEARED_UNKNOWN = "not known to be cleared by the same engine"

# Batches of a replay up to which no bound of a socket can have cut the answer.
FEW = 100

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
    DEGRADED = "degraded"  # batches are lost or were not understood; `EventStream.loss` says which
    # No batch since the connection was made, a gap is being replayed, or a long batch applied.
    RECOVERING = "recovering"
    EXACT = "exact"  # every batch of this engine process has been applied


class Change(Flag):
    """What has changed between two batches; of several at once, in this order."""

    LOST = auto()  # the connection
    JOINED = auto()  # another one was made
    MISSED = auto()  # batches have come that found no room


class Stream(Protocol):
    """Where batches go; `kvd_core.index.prefix_index.Stream` is one."""

    def apply(self, payload: bytes) -> int:
        """Applies a batch and returns what it has shown, as bits: CLEARED, FLAWED, NEW_RANK,
        NO_ROOM.

        Or only begins to, because it is long, and returns UNFINISHED.
        """

    def go_on(self) -> int:
        """Applies some more of an UNFINISHED batch; returns what `apply` does."""

    def flaw(self) -> str:
        """Says why the last batch was FLAWED."""

    def rank(self) -> int | None:
        """Returns the rank that the last batch has spoken for, None where that is not known."""

    def names_ranks(self) -> bool:
        """Says whether batches name their ranks, so that others may follow."""

    def cleared(self) -> int:
        """Returns the tiers that the last batch has CLEARED, as bits."""

    def clear(self) -> None:
        """Drops all that earlier batches have stored, and the rest of an UNFINISHED one."""

    def restored(self) -> bool:
        """Says whether its ranks hold blocks of a dump that no batch has spoken for since."""

    def goes_on(self, payload: bytes) -> bool:
        """Says whether a batch, not yet applied, speaks of blocks that only a dump has told of."""

    def drop_restored(self) -> bool:
        """Drops those; returns whether there were any."""

    @property
    def ignored(self) -> Mapping[str, int]:
        """Events that were understood and had no effect, by reason."""

    def misfit(self) -> str:
        """Says why nothing that comes is of use as it is registered, "" if something is."""


class EventStream(StreamCounts):
    """One (worker, rank) stream: every batch that continues it goes to `stream`.

    `name` is for logs. `expected` is the number to continue from where a worker registers again:
    its blocks were dropped, so what came before that number is lost.
    """

    __slots__ = (
        "_answered",
        "_apply",
        "_asked_at",
        "_asked_from",
        "_asking",
        "_broken",
        "_brought",
        "_cleared_in_doubt",
        "_confirming",
        "_failed",
        "_first",
        "_heard",
        "_heard_at_join",
        "_holes",
        "_joined",
        "_joined_at",
        "_losses",
        "_named_at",
        "_on_link",
        "_passed_joins",
        "_paused",
        "_place",
        "_proving",
        "_quiet",
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
        "name",
        "passed",
        "publisher",
        "quiet",
        "quiet_since",
        "replay_endpoint",
        "server_key",
        "speaker",
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
        first: int = 0,
        on_link: Callable[[], None] = lambda: None,
    ) -> None:
        """The publisher's first batch has the number `first`, or a lower one.

        Calls `on_link` when `connected` has changed.
        """
        super().__init__()
        self._first = first
        self.stale_after_s = stale_after_s
        self.name = name
        self.endpoint = endpoint
        self.replay_endpoint = replay_endpoint
        self.server_key = server_key
        self.cursor = Cursor(expected)
        self._stream = stream
        self._apply = stream.apply

        # Who publishes, as 16 bytes, and who has published the message at hand; empty: not said.
        self.publisher = self.speaker = b""
        self._heard = b""  # the publisher that messages named last
        self._named_at = 0  # what was expected when the publisher was heard of
        self.passed: int | None = None  # the last number of the engine before this one
        self.held: tuple[int, bytes] | None = None  # number and payload of the batch held back
        self.unfinished: int | None = None  # number of the batch that is not wholly applied yet
        self._losses = Losses()
        if expected:
            self._losses.lose("registered again", expected)
        self.last_flaw: tuple[int, str] | None = None  # the last batch not understood, and why
        self._holes: list[range] = []  # numbers lost before the held batch
        self._restored = False  # what came before the first batch is a dump's word
        # What was expected when the connection was made, or batches were missed; -1 is over.
        self._joined_at = expected
        self._broken = False  # the connection did, and has not been made again
        self._unproved = False  # the engine may be another one since the connection broke,
        self._proving = False  # and the held batch's replay is to tell by the last number,
        self._confirming = False  # and whose the held batch is by its own
        self._asking = False  # it is being asked that, without a held batch,
        self._asked_at = 0  # since so many lost connections,
        self._asked_from = 0  # for the batches from this number on
        self._answered = False  # the answer that is being read has held a batch,
        self._brought = 0  # and so many of use
        self._unknown = False  # the engine has been asked, and has not shown that it is the same
        # Number, rank and tiers of a clear that counts once the engine has shown it.
        self._cleared_in_doubt: tuple[int, int, int] | None = None

        self.connected = False
        self.disconnected_since: float | None = None  # seconds, monotonic; None = never connected
        self.last_error: str | None = None
        self._on_link = on_link
        self._joined = False
        self._receiving = False
        self._failed = False
        self._paused = False
        self._passed_joins = 0
        self._heard_at_join = 0  # messages before the connection was made
        self._quiet: Quiet | None = None  # as `look` has found it the last time
        self.quiet_since = 0.0  # seconds, monotonic; when that began
        self.quiet: Quiet | None = None  # the same, if it has lasted for `stale_after_s`
        self._place: Callable[[Change], None] | None = None  # see `place_changes`

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
        waits = self._asking or self.held is not None or self.unfinished is not None
        # One that only answers have named may be another than the one that is listened to.
        waits = waits or self.publisher not in (b"", self._heard)
        if waits or self.cursor.expected == self._joined_at:
            return StreamHealth.RECOVERING
        return StreamHealth.DEGRADED if self.loss else StreamHealth.EXACT

    @property
    def loss(self) -> str:
        """Why the stream is degraded, empty if it is not."""
        losses = self._losses
        if not losses:
            return self._stream.misfit()
        restored = losses.of_unheard and self._stream.restored()
        if not restored and not losses.matter(self.cursor.expected):
            return self._stream.misfit()
        doubted = self._cleared_in_doubt
        in_doubt = doubted is not None and doubted[0] == self.cursor.last
        return CLEARED_UNKNOWN if in_doubt else losses.why

    @property
    def ignored(self) -> Mapping[str, int]:
        """Events that were understood and had no effect, by reason."""
        return self._stream.ignored

    def check_quiet(self, now: float) -> Quiet | None:
        """Notes that nothing comes, if asked now and then; returns why once it has lasted."""
        quiet = self._quiet_now(now)
        if quiet is not self._quiet:
            self._quiet, self.quiet_since, self.quiet = quiet, now, None
        if quiet is self.quiet or now - self.quiet_since < self.stale_after_s:
            return None
        self.quiet = quiet
        self.unreachable += quiet is Quiet.UNREACHABLE
        self.silent += quiet is Quiet.SILENT
        return quiet

    def _quiet_now(self, now: float) -> Quiet | None:
        if self._paused:
            return None
        if not self.connected:
            return Quiet.UNREACHABLE
        # An idle engine that has shown to be the same is not waited for.
        has_heard = self.messages + self.refused != self._heard_at_join
        if has_heard or not self._receiving or self.health(now) is not StreamHealth.RECOVERING:
            return None
        return Quiet.SILENT

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

    def meet(self, publisher: bytes) -> None:
        """Notes who has published the messages that come now, empty if they do not say."""
        if publisher:
            if self.publisher not in (b"", publisher):
                # One that came while another was in doubt may have gone before it is heard.
                self._unproved = self._unproved or self._unknown
                self._restart()
            self._name(publisher)
            self._heard = publisher
        self.speaker = publisher

    def _name(self, publisher: bytes) -> None:
        """Notes who publishes, from the next batch on: that does not say who has before."""
        if not self.publisher:
            self._named_at = self.cursor.expected
            self.publisher = publisher

    def _is_named(self) -> bool:
        """Whether some batch has been applied since it is known who publishes."""
        return bool(self.publisher) and self.cursor.expected != self._named_at

    def go_on(self) -> None:
        """Applies some more of the batch that is unfinished."""
        seq, self.unfinished = self.unfinished, None  # over, too, if a bug ends it
        assert seq is not None
        self._learn(seq, self._stream.go_on())

    def judge(self) -> Verdict:
        """Judges the batch held back; it is dropped if it is stale, all blocks are at a restart."""
        seq, payload = self._held()
        speaker = self.speaker
        verdict = self.cursor.judge(seq, payload, same=bool(speaker) and self._is_named())
        if verdict is Verdict.STALE:
            self.stale += 1
            self.held = None
            return verdict
        self._confirming = self._unproved or self._unknown
        self._proving = self._confirming and self.cursor.last is not None
        self._unproved = False
        if verdict is Verdict.RESTART:
            self._restart()
            self._name(speaker)
            self.speaker = speaker
        hole = self._hole_before(seq)
        self.gaps += hole.stop > hole.start  # len() fails from 2^63 on
        return verdict

    def _hole_before(self, seq: int) -> range:
        """Returns the numbers that are missing before a batch."""
        expected = self.cursor.expected
        return range(expected or min(self._first, seq), seq)

    def wanted(self) -> range:
        """Returns the numbers that a replay should bring before the held batch.

        After a broken connection the last accepted number is among them: a new engine may have
        come as far meanwhile, and then its batch of that number is another one. So is the held
        batch's: it may have waited in the queue since before, and be the old engine's.
        """
        first = self.cursor.expected - self._proving
        return range(first, END_SEQ if self._asking else self._held()[0] + self._confirming)

    @property
    def asks(self) -> bool:
        """Whether an engine that has come back is to be asked whether it is the same.

        One that is idle would have the last one's blocks credited until it speaks.
        """
        waits = self.held is not None or self.unfinished is not None
        return self._unproved and self.connected and not waits and self.cursor.last is not None

    def ask(self) -> None:
        """Begins to ask it, with a replay of all from the last batch on; `replay_ended` ends it."""
        self._asking = self._proving = True
        self._asked_at = self.losses
        self._asked_from = self.cursor.expected

    def answer_begins(self) -> None:
        """Notes that `take_replayed` is about another answer from now on."""
        self._answered = False
        self._brought = 0

    def wants_more(self, end: ReplayEnd) -> bool:
        """Whether an answer that ended so has brought something, and may not be all there is."""
        if not self._brought or end not in (ReplayEnd.HOLE, ReplayEnd.MARKER, ReplayEnd.SILENT):
            return False
        if self._asking:  # what comes meanwhile comes live as well, and would go on for ever
            return end is ReplayEnd.HOLE or self._brought > FEW
        return bool(self.wanted())

    def take_replayed(self, seq: int, payload: bytes, publisher: bytes = b"") -> ReplayEnd | None:
        """Applies a replayed batch if it is wanted; returns why the replay is over if it is."""
        self._answered = True
        if publisher and self.publisher not in (b"", publisher):
            return self._take_foreign(publisher)
        if publisher:
            self._name(publisher)
        is_same = bool(publisher) and self._is_named()
        wanted = self.wanted()
        if wanted and seq > self.cursor.expected and self._brought:
            return ReplayEnd.HOLE
        known = self.cursor.holds(seq, payload)
        if seq not in wanted or (known and seq >= self.cursor.expected and not publisher):
            self.strays += 1  # one that is known and yet to come was the last engine's
            return ReplayEnd.REACHED if seq >= wanted.stop else None
        if self.held is not None and seq == self.held[0]:
            return self._confirm(seq, payload)
        if seq >= self.cursor.expected:
            if self._proving:
                self._give_up_proof()
            if self._asking and seq != self.cursor.expected:
                return ReplayEnd.REACHED  # a live batch is to show that there is a gap
            self.replayed += 1
            self._continue(seq, payload)
        elif known and (payload or is_same):
            self._proved()
        elif is_same or not payload:  # that says otherwise: nobody's word; this could be anybody's
            self.strays += 1
            return None
        else:
            self._restart()
            self._name(publisher)
            return ReplayEnd.OTHER_ENGINE
        self._proving = False
        self._brought += 1
        return ReplayEnd.REACHED if seq + 1 == wanted.stop else None

    def _take_foreign(self, publisher: bytes) -> ReplayEnd | None:
        """Notes a replayed batch of another engine than the one that is listened to."""
        if not (self._asking and self._proving):
            self.strays += 1
            return None
        self._restart()
        self._name(publisher)
        return ReplayEnd.OTHER_ENGINE

    def replay_ended(self, end: ReplayEnd) -> ReplayEnd:
        """Notes why a replay is over, and returns it: what did not come may say more than that."""
        if self._asking:
            end = self._asked(end)
        answered = end in (ReplayEnd.REACHED, ReplayEnd.MARKER)
        if answered and (self._proving or self._confirming):
            self._give_up_proof()
        self.replays[end] = self.replays.get(end, 0) + 1
        return end

    def _asked(self, end: ReplayEnd) -> ReplayEnd:
        """Concludes from an answer to what has been asked without a held batch.

        An engine keeps its last batches, so one that has nothing from the last one on is another.
        """
        is_marked = end is ReplayEnd.MARKER
        if is_marked and self._proving and not self._answered:
            self._restart()
            end = ReplayEnd.OTHER_ENGINE
        if end is ReplayEnd.OTHER_ENGINE:
            self._asked_from = 0  # this one is asked for all that it has
            return end
        # A connection that was made again meanwhile may lead to another one still.
        is_same = self.connected and self._asked_at == self.losses and not self._proving
        # One that has shown nothing may have kept nothing: only what it says next tells.
        is_whole = is_marked and self._brought <= FEW and self.cursor.last is not None
        self._unproved = not is_same
        self._joined_at = -1 if is_same and is_whole else self.cursor.expected
        self._asking = self._proving = False
        self.cursor.brought = range(self._asked_from, self.cursor.expected)
        return end

    def apply_held(self) -> str:
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
        hole = self._hole_before(seq)
        if seq == 0:
            self._begin(payload)
        if hole:
            self.lost += hole.stop - hole.start  # len() fails from 2^63 on
            self._holes.append(hole)
            self._restored = self._restored or self._stream.restored()
            behind = ", restored from a peer" if self._restored else ""
            self._losses.lose(f"missing {_ranges(self._holes)}{behind}", seq)
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
            self._losses.lose("restored from a peer", self.cursor.expected)
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
        self._losses.lose(UNKNOWN, self.cursor.expected)
        self.cursor.rejoined()

    def _proved(self) -> None:
        """The last batch is the engine's own; if it was a clear, nothing of another is left."""
        self._unknown = False
        if self._cleared_in_doubt is not None:
            seq, rank, tiers = self._cleared_in_doubt
            if seq == self.cursor.last:
                self._losses.clear(rank, tiers)
            self._cleared_in_doubt = None

    def _learn(self, seq: int, shown: int) -> None:
        if shown & UNFINISHED:
            self.unfinished = seq
            return
        if not shown:
            return
        rank = self._stream.rank()
        if shown & NEW_RANK and rank is not None:
            self._losses.hear(rank, self._stream.names_ranks())
        if shown & CLEARED and rank is not None:
            self._clear(seq, rank, self._stream.cleared())
        if shown & NO_ROOM:
            self._lose_of(rank, f"the index had no room for batch {seq}")
        if shown & FLAWED:
            self.flawed += 1
            self.last_flaw = seq, self._stream.flaw()
            self._lose_of(rank, f"batch {seq} could not be decoded")

    def _clear(self, seq: int, rank: int, tiers: int) -> None:
        if self._losses and self._unknown:
            # One of another engine, that was queued, says nothing about what comes behind it.
            self._cleared_in_doubt = seq, rank, tiers
            self._unproved = True
        else:
            self._losses.clear(rank, tiers)
            self._restored = self._restored and bool(self.loss)

    def _lose_of(self, rank: int | None, why: str) -> None:
        if rank is None:
            self._losses.lose(why, self.cursor.expected)
        else:
            self._losses.lose_of(rank, why)

    def _restart(self) -> None:
        """Another engine speaks: nothing that the last one cached is there any more."""
        self.restarts += 1
        self.passed = self.cursor.last
        self.publisher = self.speaker = b""
        self._stream.clear()
        self.cursor.restart()
        self._holes.clear()
        self._proving = self._restored = self._unknown = False
        self._joined_at = -1
        self._losses = Losses()
        self._cleared_in_doubt = None

    # ---- connections

    def connecting(self) -> None:
        self._failed = self._joined = self._receiving = self.connected = self._paused = False

    def receiving(self) -> None:
        self._receiving = True

    def joined(self) -> None:
        self.joins += 1
        self._joined = self.connected = True
        self._heard_at_join = self.messages + self.refused
        self.disconnected_since = self.last_error = None
        self._changed(Change.JOINED)
        self._on_link()

    def lost_connection(self, why: str, now: float) -> None:
        self.last_error = why
        if self.connected:
            self.losses += 1
            self._disconnected(now)
            self._changed(Change.LOST)
            self._on_link()

    def not_reached(self, why: str) -> None:
        """Notes what an attempt to connect has met."""
        if not self.connected:
            self.last_error = why

    def _changed(self, change: Change) -> None:
        (self._place or self.pass_over)(change)

    def place_changes(self, place: Callable[[Change], None] | None) -> None:
        """Gives changes of the connection to `place`, which calls `pass_over` in their turn.

        None calls that at once again.
        """
        self._place = place

    def pass_over(self, change: Change) -> None:
        """What comes from here on may be another engine's, or is not all that there was."""
        if Change.LOST in change:
            self._broken = True
            self._unproved = self.replay_endpoint is not None
        if Change.JOINED in change:
            self._passed_joins += 1
            if self._passed_joins > 1:  # of what follows some may still be the last one's
                self.cursor.rejoined()
            if self._broken:  # an earlier proof may have been of one that had been queued
                self._unproved = self.replay_endpoint is not None
                self._broken = False
        if change & (Change.JOINED | Change.MISSED):
            self._joined_at = self.cursor.expected

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
        self._losses.lose("an internal error", self.cursor.expected)

    def paused(self, now: float) -> None:
        self._disconnected(now)
        self._forget_held()
        self._paused = True

    def _forget_held(self) -> None:
        """Drops the held batch; what its replay was to prove is still to be proved."""
        self._unproved = self._unproved or self._proving or self._confirming
        self._asking = self._proving = self._confirming = False
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
