"""Catches a stream up: holds a batch back, and applies the replayed batches before it.

A batch that is not next is held back, and the task resolves it before it takes another one:

    hold ── judge ── stale ──> ignored
              └─ gap, restart, or an engine in doubt ─ take .. apply_held ──> applied; numbers
                                                                              still missing are lost

An engine that is connected again and publishes nothing is asked, while no batch is held (`asks`):

    ask ── take .. ─┬─ the last batch, and those behind it ──> the same engine: applied
                    ├─ another batch of that number ─────────> another engine: asked from 0
                    ├─ any batch of another publisher ───────> another engine: asked from 0
                    └─ nothing but the end ──────────────────> another engine: asked from 0

A replay consists of one or more answers: `begin` each, `take` its batches, check `wants_more`; then
`end`. Only an engine that is asked while no batch is held may turn out to be another one; in other
replays, batches of another engine are ignored. `kvd.wire.engine_identity` tracks what is asked for
(`IdentityCheck`).
"""

from __future__ import annotations

from kvd.wire.applied_batches import AppliedBatches
from kvd.wire.cursor import Verdict
from kvd.wire.engine_identity import EngineIdentity, IdentityCheck, IdentityEvent
from kvd.wire.replay import END_SEQ, ReplayEnd
from kvd.wire.stream_link import StreamLink
from kvd.wire.stream_stats import StreamStats

# An answer of at most so many batches cannot have been cut by the bound of any socket.
FEW = 100


class CatchUp:
    """The held batch of one stream and its replay."""

    __slots__ = (
        "_answered",
        "_answering_at",
        "_asked_at",
        "_asked_from",
        "_batches",
        "_brought",
        "_cursor",
        "_identity",
        "_link",
        "_stats",
        "held",
    )

    def __init__(
        self,
        batches: AppliedBatches,
        identity: EngineIdentity,
        link: StreamLink,
        stats: StreamStats,
    ) -> None:
        self._batches = batches
        self._cursor = batches.cursor
        self._identity = identity
        self._link = link
        self._stats = stats
        self.held: tuple[int, bytes] | None = None  # number and payload of the batch held back
        self._asked_at = 0  # number of connections lost so far when the replay began
        self._asked_from = 0  # number from which an idle engine was asked for batches
        self._answering_at = 0  # number of connections lost so far when the present answer began
        self._answered = False  # the present answer has brought a batch,
        self._brought = 0  # and so many useful ones

    @property
    def is_under_way(self) -> bool:
        """Returns whether a batch is held or an engine asked."""
        return self.held is not None or self._identity.is_asking

    # ---- the held batch

    def hold(self, seq: int, payload: bytes) -> None:
        self.held = seq, payload

    def judge(self, lost: bool = False) -> Verdict:
        """Judges the held batch: drops it if it is stale, and all blocks if it shows a restart.

        `lost` says that the batch's connection is known to be lost. Then the replay may be
        answered by another engine than the one that sent the batch, so it has to prove itself.
        """
        seq, payload = self._held()
        identity, cursor = self._identity, self._cursor
        speaker = identity.speaker
        is_same = bool(speaker) and identity.is_named(cursor.expected)
        verdict = cursor.judge(seq, payload, same=is_same)
        if verdict is Verdict.STALE:
            self._stats.stale += 1
            if cursor.suspects_another:
                self._batches.met_another(seq)
            self.held = None
            return verdict
        self._asked_at = self._answering_at = self._stats.losses
        if lost:
            identity.advance(IdentityEvent.DOUBTED)
        if identity.is_in_doubt:
            self._begin_check()
        if verdict is Verdict.RESTART:
            self._batches.engine_restarted()
            identity.name(speaker, cursor.expected)
            identity.speaker = speaker
        hole = self._batches.hole_before(seq)
        self._stats.gaps += hole.stop > hole.start  # len() fails from 2^63 on
        return verdict

    def _begin_check(self) -> None:
        has_last = self._cursor.last is not None
        event = IdentityEvent.HELD_BEHIND if has_last else IdentityEvent.HELD_FIRST
        self._identity.advance(event)

    def apply_held(self) -> str:
        """Applies the held batch; returns the numbers lost before it, as a text, "" for none."""
        seq, payload = self._held()
        self.held = None
        if self._identity.wants_held:
            self._identity.advance(IdentityEvent.GIVEN_UP)
        self._batches.apply(seq, payload)
        return self._batches.take_holes()

    def drop(self) -> None:
        """Drops the held batch; a proof of identity that its replay was to bring stays due."""
        self._identity.advance(IdentityEvent.DROPPED)
        self.held = None

    def _held(self) -> tuple[int, bytes]:
        assert self.held is not None
        return self.held

    # ---- an idle engine

    @property
    def asks(self) -> bool:
        """Returns whether to ask a reconnected engine whether it is the same.

        An idle engine that is another one would have the previous one's blocks credited to it
        until its first batch.
        """
        if self._identity.check is not IdentityCheck.DUE:  # asked after each turn of messages
            return False
        waits = self.held is not None or self._batches.unfinished is not None
        return self._link.connected and not waits and self._cursor.last is not None

    def ask(self) -> None:
        """Begins to ask an idle engine, by a replay from the last batch on; `end` ends that."""
        self._identity.advance(IdentityEvent.ASKED)
        self._asked_at = self._answering_at = self._stats.losses
        self._asked_from = self._cursor.expected

    # ---- the replay

    def wanted(self) -> range:
        """Returns the numbers that a replay should bring before the held batch.

        After a broken connection they include the last accepted number: another engine may have
        reached it meanwhile, with another batch. They include the held batch's number, too, as
        that batch may have been queued before, by the previous engine.
        """
        identity = self._identity
        first = self._cursor.expected - identity.wants_last
        if identity.is_asking:
            return range(first, END_SEQ)
        return range(first, self._held()[0] + identity.wants_held)

    def begin(self) -> None:
        """Notes that another answer begins, to a request for the numbers `wanted` now.

        If the connection was lost since the first request, another engine may answer, so it has
        to prove itself.
        """
        self._answered = False
        self._brought = 0
        self._answering_at = self._stats.losses
        if self._asked_at != self._stats.losses:
            self._check_again()

    def _check_again(self) -> None:
        identity = self._identity
        if self.held is not None:
            identity.advance(IdentityEvent.DROPPED)
            identity.advance(IdentityEvent.DOUBTED)
            self._begin_check()
            identity.advance(IdentityEvent.DOUBTED)  # batches behind the held one are in doubt, too
        elif self._cursor.last is not None:  # without one, any engine is heard from its beginning
            identity.advance(IdentityEvent.DROPPED)
            identity.advance(IdentityEvent.ASKED)

    @property
    def _is_outdated(self) -> bool:
        """Returns whether the connection was lost since the present answer was requested."""
        return self._answering_at != self._stats.losses

    def wants_more(self, end: ReplayEnd) -> bool:
        """Returns whether to request another answer: this one was useful and may be incomplete.

        Also if the connection was lost meanwhile, so that another engine may have answered; `take`
        then ends the answer with HOLE.
        """
        if self._is_outdated and end is ReplayEnd.HOLE:
            return True
        if not self._brought or end not in (ReplayEnd.HOLE, ReplayEnd.MARKER, ReplayEnd.SILENT):
            return False
        if self._identity.is_asking:  # no end is wanted: batches published meanwhile come live, too
            return end is ReplayEnd.HOLE or self._brought > FEW
        return bool(self.wanted())

    def take(self, seq: int, payload: bytes, publisher: bytes = b"") -> ReplayEnd | None:
        """Applies a replayed batch if it is wanted; returns why the answer ends with it, if so."""
        if self._is_outdated:
            return ReplayEnd.HOLE
        self._answered = True
        identity, cursor = self._identity, self._cursor
        if publisher and identity.publisher not in (b"", publisher):
            return self._take_foreign(publisher)
        if publisher:
            identity.name(publisher, cursor.expected)
        wanted = self.wanted()
        if wanted and seq > cursor.expected and self._brought:
            return ReplayEnd.HOLE
        known = cursor.holds(seq, payload)
        if seq not in wanted or (known and seq >= cursor.expected and not publisher):
            self._stats.strays += 1  # a known batch of a coming number is the previous engine's
            return ReplayEnd.REACHED if seq >= wanted.stop else None
        if self.held is not None and seq == self.held[0]:
            return self._confirm(seq, payload)
        is_same = bool(publisher) and identity.is_named(cursor.expected)
        if seq >= cursor.expected:
            if identity.wants_last:
                self._batches.engine_unknown()
            if identity.is_asking and seq != cursor.expected:
                return ReplayEnd.REACHED  # the next live batch will show the gap
            self._stats.replayed += 1
            self._batches.apply(seq, payload)
        elif known and (payload or is_same):
            self._batches.engine_proved()
        elif is_same or not payload:  # a contradiction of itself; an empty batch proves nothing
            self._stats.strays += 1
            return None
        else:
            return self._restart(publisher)
        self._brought += 1
        return ReplayEnd.REACHED if seq + 1 == wanted.stop else None

    def _take_foreign(self, publisher: bytes) -> ReplayEnd | None:
        """Handles a replayed batch whose publisher is another than the stream's."""
        if self._identity.check is not IdentityCheck.ASKING:
            self._stats.strays += 1
            return None
        return self._restart(publisher)

    def _restart(self, publisher: bytes) -> ReplayEnd:
        self._batches.engine_restarted()
        self._identity.name(publisher, self._cursor.expected)
        return ReplayEnd.OTHER_ENGINE

    def _confirm(self, seq: int, payload: bytes) -> ReplayEnd:
        """Compares the held batch with the engine's own batch of that number.

        If they differ, the held one was queued by a previous engine: it is replaced, and the
        batches behind it are in doubt.
        """
        if self._identity.wants_last:
            self._batches.engine_unknown()
        else:
            self._identity.advance(IdentityEvent.CONFIRMED)
        if payload != self._held()[1]:
            self.held = seq, payload
            self._identity.advance(IdentityEvent.DOUBTED)
        return ReplayEnd.REACHED

    def end(self, end: ReplayEnd) -> ReplayEnd:
        """Notes why a replay ended; returns the reason, or OTHER_ENGINE if the answer shows it."""
        if self._identity.is_asking:
            end = self._conclude(end)
        elif end in (ReplayEnd.REACHED, ReplayEnd.MARKER) and self._identity.wants_held:
            self._batches.engine_unknown()
        self._stats.replays[end] = self._stats.replays.get(end, 0) + 1
        return end

    def _conclude(self, end: ReplayEnd) -> ReplayEnd:
        """Concludes whether an idle engine is the same from its answer.

        An engine keeps its last batches, so one without the last batch is another engine.
        """
        identity, batches, cursor = self._identity, self._batches, self._cursor
        is_marked = end is ReplayEnd.MARKER
        if is_marked and identity.check is IdentityCheck.ASKING and not self._answered:
            batches.engine_restarted()
            end = ReplayEnd.OTHER_ENGINE
        if end is ReplayEnd.OTHER_ENGINE:
            self._asked_from = 0  # the new engine is asked for all its batches
            return end
        # If the connection was made again meanwhile, it may lead to yet another engine.
        is_same_link = self._link.connected and self._asked_at == self._stats.losses
        identity.advance(IdentityEvent.ENDED if is_same_link else IdentityEvent.DROPPED)
        is_same = identity.check is IdentityCheck.NONE
        # An engine that has proved nothing may keep no batches: only its next one tells more.
        if is_same and is_marked and self._brought <= FEW and cursor.last is not None:
            batches.complete()
        else:
            batches.miss()
        cursor.brought = range(self._asked_from, cursor.expected)
        return end
