"""Judges batches by their numbers: whether some are missing, and whether the engine restarted.

Every message of an engine carries a number one higher than the one before; PUB/SUB may lose some.
A restarted engine begins at 0 again, and nothing else shows that its cache is a new one. A cursor
holds the number that should come next (`expected`). `EventStream.take` applies a batch with that
number at once, unless its engine is in doubt; every other batch is judged here:

    seq           the batch is                                  verdict   it is to be
    -----------   -------------------------------------------   -------   ------------------------
    = expected                                                  NEXT      applied
    > expected                                                  GAP       applied after the missing
    < expected    one of the last 128, unchanged: a duplicate   STALE     ignored
    < expected    of the last 128, skipped: it comes late       STALE     ignored
    < expected    brought by a replay, not yet heard live       STALE     ignored
    < expected    said to be this engine's, see below           STALE     ignored
    < expected    other, and not yet enough of these in a row   STALE     ignored
    < expected    other, and the one that decides               RESTART   applied after `restart`

A batch is "other" if it cannot be shown to be an old batch of this engine. It takes so many other
batches in a row, with consecutive numbers, to conclude a restart:

    over a connection made since         1    numbers never go back within one engine's life, and a
                                              publisher repeats nothing to a new subscriber
    beginning with the number 0 or 1     2    a restart behind a proxy, which hides it; a single
                                              batch may be any stray message
    else                                 3    old duplicates could come in rows, too, but nothing
                                              that engines do makes even one

Where batches name their publisher, the name decides: another publisher is another engine, whatever
the number (`EventStream.meet`), and a passed number of the same publisher is always an old batch.

Any other batch between them, even a duplicate, ends a row. While no restart is concluded, an
"other" batch degrades the stream: two engines may publish behind one address. A restart concluded
in error costs a replay from 0, while an unnoticed one would credit a dead cache; so doubt counts as
a restart.
"""

from __future__ import annotations

from enum import Enum

from kvd_core.base.recent import SIZE, Recent

RUN_AFTER_JOIN = 1
RUN_FROM_START = 2
RUN_ANYWHERE = 3

FIRST_NUMBERS = (0, 1)  # engines begin with 0; Mooncake, and SGLang for late subscribers, with 1


class Verdict(Enum):
    """The meaning of a batch's number and content."""

    NEXT = "next"
    GAP = "gap"
    STALE = "stale"
    RESTART = "restart"


class Cursor:
    """The position in one engine's stream of batches."""

    __slots__ = ("_doubt_below", "_row", "_row_at", "brought", "recent")

    def __init__(self, expected: int = 0) -> None:
        """Begins at the number `expected`, where an earlier cursor left off; 0 begins anew."""
        self.recent = Recent()
        self.recent.expected = expected
        self._row = range(0)  # the numbers of the present row of "other" batches
        self._row_at = 0  # `expected` when they came
        self._doubt_below = expected + SIZE if expected else 0
        self.brought = range(0)  # numbers that a replay brought and that may still come live

    @property
    def expected(self) -> int:
        """The number that should come next."""
        return self.recent.expected

    def digests(self, below: int) -> bytes:
        """Returns the digests of the batches with numbers below `below`, for `take_over`.

        `below` is `expected`, or one less.
        """
        if below == self.expected:
            return self.recent.digests()
        before = Recent()
        before.recall(self.recent.digests())
        before.skip(below, self.expected)
        return before.digests()

    def take_over(self, expected: int, digests: bytes) -> None:
        """Goes on where another process's cursor was; called before any batch is accepted here."""
        self.recent.expected = expected
        self.recent.recall(digests)
        self.rejoined()

    @property
    def last(self) -> int | None:
        """The highest accepted number, None before the first."""
        return self.expected - 1 if self.expected else None

    def judge(self, seq: int, payload: bytes, same: bool = False) -> Verdict:
        """Judges a batch by its number (0 .. 2^64-1) and content; call it once per batch.

        `same` says that the batch is known to be this engine's.
        """
        if seq == self.expected:
            return Verdict.NEXT
        if seq > self.expected:
            return Verdict.GAP
        if same or not self._is_other(seq, payload):
            self._row = range(0)
            return Verdict.STALE
        if self._row_at == self.expected and seq == self._row.stop and self._row:
            self._row = range(self._row.start, seq + 1)
        else:
            self._row, self._row_at = range(seq, seq + 1), self.expected
        decided = seq + 1 - self._row.start >= self._needed()
        return Verdict.RESTART if decided else Verdict.STALE

    @property
    def suspects_another(self) -> bool:
        """Whether the batch judged last, if stale, can be no old batch of this engine."""
        return bool(self._row)

    def skip_to(self, seq: int) -> None:
        """Counts the numbers before `seq` as lost; then `recent` is to note its batch."""
        if self._in_doubt():  # numbers that never came do not shorten the doubt
            self._doubt_below += seq - self.expected
        self.recent.skip(self.expected, seq)

    def holds(self, seq: int, payload: bytes) -> bool:
        """Returns whether this very batch is among the last 128 accepted ones.

        After a restart, these include batches of the previous engine until the new one's replace
        them.
        """
        return self.recent.holds(seq, payload)

    def rejoined(self) -> None:
        """Notes that from some batch on, all come over a new connection.

        Batches of the previous connection may still be waiting, so the doubt lasts for as many
        batches as are remembered.
        """
        self._doubt_below = self.expected + SIZE
        self.brought = range(0)

    def restart(self) -> None:
        """Begins anew, for another engine."""
        self.recent.expected = self._doubt_below = 0
        self._row = self.brought = range(0)

    def _is_other(self, seq: int, payload: bytes) -> bool:
        if self.holds(seq, payload) or self._was_brought(seq):
            return False
        late = seq >= self.expected - SIZE and self.recent.skipped(seq)
        return self._in_doubt() or not late

    def _was_brought(self, seq: int) -> bool:
        """Returns whether a replay brought the number, and its digest is no longer remembered."""
        if self.expected != self.brought.stop or seq >= self.expected - SIZE:
            return False
        was = seq in self.brought
        if was:
            self.brought = range(seq + 1, self.expected)  # live batches come in ascending order
        return was

    def _needed(self) -> int:
        if self._in_doubt():
            return RUN_AFTER_JOIN
        return RUN_FROM_START if self._row.start in FIRST_NUMBERS else RUN_ANYWHERE

    def _in_doubt(self) -> bool:
        return self.expected < self._doubt_below
