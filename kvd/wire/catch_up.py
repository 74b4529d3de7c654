"""Catches a stream up: holds a batch back, and applies what a replay brings before it.

A batch that is not next is held back, and the task resolves it before it takes another one:

    hold ── judge ── stale ──> ignored
              └─ gap, restart, or an engine in doubt ─ take .. apply_held ──> applied;
                                                                              the rest is lost

An engine that has come back and says nothing is asked, while no batch waits (`asks`):

    ask ── take .. ─┬─ the last batch, and those behind it ──> the same: applied
                    ├─ another one of that number ───────────> another: asked from 0
                    ├─ any batch of another publisher ───────> another: asked from 0
                    └─ nothing but the end ──────────────────> another: asked from 0

A replay is one or more answers: `begin` each, `take` what it brings, `wants_more`; then `end`. In
replays only an engine that is asked while no batch waits may be another one; what else comes of
another one is no answer. What is being asked is the `IdentityCheck` of `kvd.wire.engine_identity`.
"""

from __future__ import annotations

from kvd.wire.applied_batches import AppliedBatches
from kvd.wire.cursor import Verdict
from kvd.wire.engine_identity import EngineIdentity, IdentityCheck, IdentityEvent
from kvd.wire.replay import END_SEQ, ReplayEnd
from kvd.wire.stream_link import StreamLink
from kvd.wire.stream_stats import StreamStats

# Batches of a replay up to which no bound of a socket can have cut the answer.
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
        self._asked_at = 0  # the engine was asked, or will be, after so many lost connections
        self._asked_from = 0  # an idle one: for the batches from this number on
        self._answering_at = 0  # the answer that is being read, after so many
        self._answered = False  # the answer that is being read has held a batch,
        self._brought = 0  # and so many of use

    @property
    def is_under_way(self) -> bool:
        """Returns whether a batch is held or an engine asked."""
        return self.held is not None or self._identity.is_asking

    # ---- the held batch

    def hold(self, seq: int, payload: bytes) -> None:
        self.held = seq, payload

    def judge(self, lost: bool = False) -> Verdict:
        """Judges the batch held back; it is dropped if it is stale, all blocks are at a restart.

        `lost` says that its connection is known to be lost: it had queued before, and what a replay
        brings may be another engine's, so that is to prove itself.
        """
        seq, payload = self._held()
        identity, cursor = self._identity, self._cursor
        speaker = identity.speaker
        is_same = bool(speaker) and identity.is_named(cursor.expected)
        verdict = cursor.judge(seq, payload, same=is_same)
        if verdict is Verdict.STALE:
            self._stats.stale += 1
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
        """Applies the batch held back and returns which numbers before it are lost, if any."""
        seq, payload = self._held()
        self.held = None
        if self._identity.wants_held:
            self._identity.advance(IdentityEvent.GIVEN_UP)
        self._batches.apply(seq, payload)
        return self._batches.take_holes()

    def drop(self) -> None:
        """Drops the held batch; what its replay was to prove is still to be proved."""
        self._identity.advance(IdentityEvent.DROPPED)
        self.held = None

    def _held(self) -> tuple[int, bytes]:
        assert self.held is not None
        return self.held

    # ---- an idle engine

    @property
    def asks(self) -> bool:
        """Returns whether an engine that has come back is to be asked whether it is the same.

        One that is idle would have the last one's blocks credited until it speaks.
        """
        is_due = self._identity.check is IdentityCheck.DUE
        waits = self.held is not None or self._batches.unfinished is not None
        return is_due and self._link.connected and not waits and self._cursor.last is not None

    def ask(self) -> None:
        """Begins to ask it, with a replay of all from the last batch on; `end` ends it."""
        self._identity.advance(IdentityEvent.ASKED)
        self._asked_at = self._answering_at = self._stats.losses
        self._asked_from = self._cursor.expected

    # ---- the replay

    def wanted(self) -> range:
        """Returns the numbers that a replay should bring before the held batch.

        After a broken connection the last accepted number is among them: a new engine may have
        come as far meanwhile, and then its batch of that number is another one. So is the held
        batch's: it may have waited in the queue since before, and be the old engine's.
        """
        identity = self._identity
        first = self._cursor.expected - identity.wants_last
        if identity.is_asking:
            return range(first, END_SEQ)
        return range(first, self._held()[0] + identity.wants_held)

    def begin(self) -> None:
        """Notes that `take` is about another answer from now on, to what is `wanted` then.

        Where the connection was lost since the first one was asked for, this may be another
        engine's, and is to prove itself.
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
            identity.advance(IdentityEvent.DOUBTED)  # what comes behind the held batch is, too
        elif self._cursor.last is not None:  # else it is heard from its beginning
            identity.advance(IdentityEvent.DROPPED)
            identity.advance(IdentityEvent.ASKED)

    @property
    def _is_outdated(self) -> bool:
        """Returns whether the connection was lost since the answer being read was asked for."""
        return self._answering_at != self._stats.losses

    def wants_more(self, end: ReplayEnd) -> bool:
        """Returns whether an answer that ended so brought something, and may be incomplete.

        Or it may be of another engine than was asked: then it has ended in a hole.
        """
        if self._is_outdated and end is ReplayEnd.HOLE:
            return True
        if not self._brought or end not in (ReplayEnd.HOLE, ReplayEnd.MARKER, ReplayEnd.SILENT):
            return False
        if self._identity.is_asking:  # what comes meanwhile comes live as well, without an end
            return end is ReplayEnd.HOLE or self._brought > FEW
        return bool(self.wanted())

    def take(self, seq: int, payload: bytes, publisher: bytes = b"") -> ReplayEnd | None:
        """Applies a replayed batch if it is wanted; returns why the replay is over if it is."""
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
            self._stats.strays += 1  # one that is known and yet to come was the last engine's
            return ReplayEnd.REACHED if seq >= wanted.stop else None
        if self.held is not None and seq == self.held[0]:
            return self._confirm(seq, payload)
        is_same = bool(publisher) and identity.is_named(cursor.expected)
        if seq >= cursor.expected:
            if identity.wants_last:
                self._batches.engine_unknown()
            if identity.is_asking and seq != cursor.expected:
                return ReplayEnd.REACHED  # a live batch is to show that there is a gap
            self._stats.replayed += 1
            self._batches.apply(seq, payload)
        elif known and (payload or is_same):
            self._batches.engine_proved()
        elif is_same or not payload:  # that says otherwise: nobody's word; this could be anybody's
            self._stats.strays += 1
            return None
        else:
            return self._restart(publisher)
        self._brought += 1
        return ReplayEnd.REACHED if seq + 1 == wanted.stop else None

    def _take_foreign(self, publisher: bytes) -> ReplayEnd | None:
        """Notes a replayed batch of another engine than the one that is listened to."""
        if self._identity.check is not IdentityCheck.ASKING:
            self._stats.strays += 1
            return None
        return self._restart(publisher)

    def _restart(self, publisher: bytes) -> ReplayEnd:
        self._batches.engine_restarted()
        self._identity.name(publisher, self._cursor.expected)
        return ReplayEnd.OTHER_ENGINE

    def _confirm(self, seq: int, payload: bytes) -> ReplayEnd:
        """Takes the engine's own batch for the held one, which another may have left in the queue;
        then more of that other's may follow.
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
        """Notes why a replay is over, and returns it: what did not come may say more than that."""
        if self._identity.is_asking:
            end = self._conclude(end)
        elif end in (ReplayEnd.REACHED, ReplayEnd.MARKER) and self._identity.wants_held:
            self._batches.engine_unknown()
        self._stats.replays[end] = self._stats.replays.get(end, 0) + 1
        return end

    def _conclude(self, end: ReplayEnd) -> ReplayEnd:
        """Concludes from an answer to what has been asked without a held batch.

        An engine keeps its last batches, so one that has nothing from the last one on is another.
        """
        identity, batches, cursor = self._identity, self._batches, self._cursor
        is_marked = end is ReplayEnd.MARKER
        if is_marked and identity.check is IdentityCheck.ASKING and not self._answered:
            batches.engine_restarted()
            end = ReplayEnd.OTHER_ENGINE
        if end is ReplayEnd.OTHER_ENGINE:
            self._asked_from = 0  # this one is asked for all that it has
            return end
        # A connection that was made again meanwhile may lead to another one still.
        is_same_link = self._link.connected and self._asked_at == self._stats.losses
        identity.advance(IdentityEvent.ENDED if is_same_link else IdentityEvent.DROPPED)
        is_same = identity.check is IdentityCheck.NONE
        # An engine that has shown nothing may have kept nothing: only its next batch says more.
        if is_same and is_marked and self._brought <= FEW and cursor.last is not None:
            batches.complete()
        else:
            batches.miss()
        cursor.brought = range(self._asked_from, cursor.expected)
        return end
