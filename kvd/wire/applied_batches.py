"""Applies the batches of one stream to the index, each once and in order, and tracks losses.

    apply ── next, or behind a gap that stays ───> index ──> done
                                                     └─────> unfinished ── advance ──> done
                                                                   └──<───────┘

A long batch is applied in slices. `apply` leaves it `unfinished`, and the task calls `advance`
until it is not, before anything else of the stream; other tasks run in between. If the task ends
before that, the next task of the stream finishes the batch, or the registration ends and drops it.

Four methods report what was found out about the engine: `engine_proved`, `engine_unknown`,
`met_another` and `engine_restarted`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kvd.wire.cursor import Cursor
from kvd.wire.engine_identity import EngineIdentity, IdentityEvent
from kvd.wire.in_order import Applier
from kvd.wire.losses import Losses
from kvd.wire.position import StreamPosition
from kvd.wire.stream_stats import StreamStats
from kvd_core.index.prefix_index import CLEARED, FLAWED, NEW_RANK, NO_ROOM, UNFINISHED

UNKNOWN = "not known to be the same engine"
CLEARED_UNKNOWN = "not known to be cleared by the same engine"

MAX_HOLES_SHOWN = 8  # most ranges of lost numbers that a text names; all lost numbers are counted


class BatchSink(Protocol):
    """Receives batches; `kvd_core.index.prefix_index.Stream` is one."""

    def apply(self, payload: bytes) -> int:
        """Applies a batch; returns bits of CLEARED, FLAWED, NEW_RANK and NO_ROOM.

        Of a long batch it applies a first slice and returns UNFINISHED.
        """

    def advance(self) -> int:
        """Applies the next slice of an UNFINISHED batch; returns the same bits as `apply`."""

    def flaw(self) -> str:
        """Returns why the last batch was FLAWED."""

    def rank(self) -> int | None:
        """Returns the rank of the last batch, None where that is not known."""

    def names_ranks(self) -> bool:
        """Returns whether batches name their ranks, so that further ranks may appear."""

    def cleared(self) -> int:
        """Returns the tiers that the last batch has CLEARED, as bits."""

    def clear(self) -> None:
        """Drops all blocks that earlier batches stored, and the rest of an UNFINISHED batch."""

    def restored(self) -> bool:
        """Returns whether its ranks hold blocks of a dump that no batch has confirmed since."""

    def names_restored(self, payload: bytes) -> bool:
        """Returns whether a batch, not yet applied, names blocks known only from a dump."""

    def drop_restored(self) -> bool:
        """Drops blocks known only from a dump; returns whether there were any."""

    @property
    def ignored(self) -> Mapping[str, int]:
        """Events that were understood and had no effect, by reason."""

    def misfit(self) -> str:
        """Returns why the index can use no event of the stream as registered, "" if it can."""


class AppliedBatches(Applier):
    """Tracks how far a stream has been applied, and which losses the index has for good."""

    __slots__ = (
        "_cleared_in_doubt",
        "_first",
        "_holes",
        "_identity",
        "_joined_at",
        "_losses",
        "_restored",
        "_stats",
        "_stream",
        "cursor",
        "last_flaw",
        "passed",
        "unfinished",
        "unproved",
    )

    def __init__(
        self,
        stream: BatchSink,
        identity: EngineIdentity,
        stats: StreamStats,
        expected: int,
        first: int,
    ) -> None:
        self._stream = stream
        self._identity = identity
        self._stats = stats
        self._first = first
        self.cursor = Cursor(expected)
        super().__init__(self.cursor.recent, stream.apply)
        self.passed: int | None = None  # last number of the engine before the present one
        self.unfinished: int | None = None  # number of the batch that is not wholly applied yet
        self.last_flaw: tuple[int, str] | None = None  # the last batch not understood, and why
        # The number expected when the connection was made or batches were missed; -1 since a
        # replay showed that there was none to come.
        self._joined_at = expected
        self._holes: list[range] = []  # numbers lost before the held batch
        self._restored = False  # blocks from before the first batch are known only from a dump
        self.unproved = False  # the engine has yet to prove that it is the previous process's
        self._losses = Losses()
        if expected:
            self._losses.lose("registered again", expected)
        # Number, rank and tiers of a clear that counts once the engine has proved its identity.
        self._cleared_in_doubt: tuple[int, int, int] | None = None

    def position(self) -> StreamPosition:
        """Returns the position from which another process goes on, with the index as it is now.

        A batch that is not wholly applied has to be applied again.
        """
        expected = self.cursor.expected if self.unfinished is None else self.unfinished
        digests = self.cursor.digests(expected)
        return StreamPosition(expected, digests, self._identity.publisher, self._losses.kept())

    def take_over(self, position: StreamPosition) -> None:
        """Goes on from another process's position; called before the first batch is applied.

        The index has the blocks of that process.
        """
        self.cursor.take_over(position.expected, position.digests)
        self._joined_at = position.expected
        self._losses = Losses(position.losses)

    @property
    def loss(self) -> str:
        """Returns why the stream is degraded, empty if it is not."""
        losses = self._losses
        if not losses:
            return UNKNOWN if self.unproved else self._stream.misfit()
        restored = losses.of_unheard and self._stream.restored()
        if not restored and not losses.matter(self.cursor.expected):
            return self._stream.misfit()
        doubted = self._cleared_in_doubt
        in_doubt = doubted is not None and doubted[0] == self.cursor.last
        return CLEARED_UNKNOWN if in_doubt else losses.why

    # ---- what is complete

    def miss(self) -> None:
        """Notes that batches may have been missed; the stream is incomplete until one comes."""
        self._joined_at = self.cursor.expected

    def complete(self) -> None:
        """Notes that no batch was missed, without waiting for another one."""
        self._joined_at = -1

    @property
    def may_lack_batches(self) -> bool:
        """Returns whether batches may have been missed and none has come since."""
        return self.cursor.expected == self._joined_at

    # ---- batches

    def hole_before(self, seq: int) -> range:
        """Returns the numbers that are missing before a batch."""
        expected = self.cursor.expected
        return range(expected or min(self._first, seq), seq)

    def come_to(self, seq: int, payload: bytes) -> None:
        """Does what has to be done before a batch that is the first, or not the next."""
        if seq != self.cursor.expected:
            self._lose_before(seq)
            self.cursor.skip_to(seq)
        else:
            self._begin(payload)

    def advance(self) -> None:
        """Applies the next slice of the unfinished batch."""
        seq, self.unfinished = self.unfinished, None  # reset here, in case a bug raises below
        assert seq is not None
        if shown := self._stream.advance():
            self.learn(seq, shown)

    def take_holes(self) -> str:
        """Returns the numbers that were lost since the last call, as a text."""
        lost = _ranges(self._holes)
        self._holes.clear()
        return lost

    def crashed(self) -> None:
        """Notes a bug: the batch that it hit is not applied, or only a part of it."""
        self._stats.crashes += 1
        self.unfinished = None
        self._losses.lose("an internal error", self.cursor.expected)

    def _lose_before(self, seq: int) -> None:
        hole = self.hole_before(seq)
        if not hole:
            return
        self._stats.lost += hole.stop - hole.start  # len() fails from 2^63 on
        self._holes.append(hole)
        self._restored = self._restored or self._stream.restored()
        behind = ", restored from a peer" if self._restored else ""
        self._losses.lose(f"missing {_ranges(self._holes)}{behind}", seq)

    def _begin(self, payload: bytes) -> None:
        """Drops restored blocks at the engine's first batch.

        An engine that begins with number 0 announces everything again, so blocks restored from a
        dump may be those of an earlier process. A batch that names blocks of the dump is not the
        engine's first one, whatever its number.
        """
        if not self._stream.restored():
            return
        if self._stream.names_restored(payload):
            self._restored = True
            self._losses.lose("restored from a peer", self.cursor.expected)
        else:
            self.drop_restored()

    def drop_restored(self) -> None:
        """Drops blocks of the stream's ranks that are known only from a dump."""
        self._stats.superseded += self._stream.drop_restored()

    def learn(self, seq: int, shown: int) -> bool:
        """Notes what a batch, or a slice of it, has shown; returns whether it is unfinished."""
        if shown & UNFINISHED:
            self.unfinished = seq
            return True
        rank = self._stream.rank()
        if shown & NEW_RANK and rank is not None:
            self._losses.hear(rank, self._stream.names_ranks())
        if shown & CLEARED and rank is not None:
            self._clear(seq, rank, self._stream.cleared())
        if shown & NO_ROOM:
            self._lose_of(rank, f"the index had no room for batch {seq}")
        if shown & FLAWED:
            self._stats.flawed += 1
            self.last_flaw = seq, self._stream.flaw()
            self._lose_of(rank, f"batch {seq} could not be decoded")
        return False

    def _clear(self, seq: int, rank: int, tiers: int) -> None:
        if self._losses and self._identity.is_unknown:
            # The clear may have been queued from another engine, and then ends no loss of this one.
            self._cleared_in_doubt = seq, rank, tiers
            self._identity.advance(IdentityEvent.DOUBTED)
        else:
            self._losses.clear(rank, tiers)
            self._restored = self._restored and bool(self.loss)

    def _lose_of(self, rank: int | None, why: str) -> None:
        if rank is None:
            self._losses.lose(why, self.cursor.expected)
        else:
            self._losses.lose_of(rank, why)

    # ---- engines

    def engine_proved(self) -> None:
        """Notes that the last batch was the engine's own; so a clear in it ends losses."""
        self._identity.advance(IdentityEvent.PROVED)
        self.unproved = False
        if self._cleared_in_doubt is not None:
            seq, rank, tiers = self._cleared_in_doubt
            if seq == self.cursor.last:
                self._losses.clear(rank, tiers)
            self._cleared_in_doubt = None

    def engine_unknown(self) -> None:
        """Notes that the engine answered without the batch that would prove it the same."""
        self._identity.advance(IdentityEvent.GIVEN_UP)
        self.unproved = False
        self._losses.lose(UNKNOWN, self.cursor.expected)
        self.cursor.rejoined()

    def met_another(self, seq: int) -> None:
        """Notes a batch that is not the engine's, as when two publish at one address.

        What that one caches is unknown. If it turns out to have taken the engine's place,
        `engine_restarted` forgets the loss.
        """
        self._losses.lose(f"batch {seq} is of another engine", self.cursor.expected)

    def await_proof(self, *, can_be_proved: bool) -> None:
        """Notes that the engine has yet to prove that it is the one of the previous process.

        If it cannot, the stream counts as having lost batches.
        """
        if can_be_proved:
            self.unproved = True
        else:
            self._losses.lose(UNKNOWN, self.cursor.expected)

    def engine_restarted(self) -> None:
        """Notes that another engine publishes: the blocks of the previous one are gone."""
        self._stats.restarts += 1
        self.passed = self.cursor.last
        self._identity.advance(IdentityEvent.RESTARTED)
        self.unproved = False
        self._stream.clear()
        self.cursor.restart()
        self._holes.clear()
        self._restored = False
        self.complete()
        self._losses = Losses()
        self._cleared_in_doubt = None


def _ranges(numbers: list[range]) -> str:
    shown = [
        f"{some.start}..{some.stop - 1}" if some.stop - some.start > 1 else str(some.start)
        for some in numbers[:MAX_HOLES_SHOWN]
    ]
    return ",".join(shown + ["..."] * (len(numbers) > MAX_HOLES_SHOWN))
