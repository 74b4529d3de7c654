"""Decides by sequence numbers whether a stream of event batches is complete, and whose it is.

Every message of an engine carries a number one higher than the one before; PUB/SUB may lose some.
An engine that is started again begins anew at 0, and nothing else says that its cache is another.
A cursor holds the number that should come next (`expected`). EventStream.take applies a batch with
that number without asking, unless its engine is in doubt; each other one is judged here:

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

"Other" is what cannot be shown to be an old batch of this engine. How many in a row, numbered one
by one, decide:

    over a connection made since         1    numbers do not go back within one engine's life, and a
                                              publisher repeats nothing to who connects again
    beginning with the number 0 or 1     2    a restart behind a proxy, which hides it; one alone
                                              may be any stray message
    else                                 3    late duplicates of long ago come in rows, too, but
                                              nothing the engines do makes even one

Where batches name their publisher, that decides: another one is another engine, whatever the number
(`EventStream.meet`), and the same one never is: what it says with a number that was passed is old.

Whatever else comes between them, a duplicate too, ends a row. A restart that was none costs a
replay from 0; one not seen would credit a dead cache, so what is in doubt counts as one.
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

    __slots__ = ("_doubt_below", "_recent", "_row", "_row_at", "brought", "expected")

    def __init__(self, expected: int = 0) -> None:
        """Begins before the number `expected`, where an earlier cursor left off; 0 is anew."""
        self.expected = expected
        self._recent = Recent()
        self._row = range(0)  # the numbers of the others that came last
        self._row_at = 0  # what was expected when they came
        self._doubt_below = expected + SIZE if expected else 0
        self.brought = range(0)  # by a replay, up to the last number; they may still come live

    def digests(self, below: int) -> bytes:
        """Returns what is remembered of the batches with lower numbers; for `take_over`.

        `below` is `expected`, or one less.
        """
        if below == self.expected:
            return self._recent.digests()
        before = Recent()
        before.recall(self._recent.digests())
        before.skip(below, self.expected)
        return before.digests()

    def take_over(self, expected: int, digests: bytes) -> None:
        """Goes on where another process's cursor was, before anything has been accepted here."""
        self.expected = expected
        self._recent.recall(digests)
        self.rejoined()

    @property
    def last(self) -> int | None:
        """The highest accepted number, None before the first."""
        return self.expected - 1 if self.expected else None

    def judge(self, seq: int, payload: bytes, same: bool = False) -> Verdict:
        """Judges a batch by its number (0 .. 2^64-1) and content; call it once per batch.

        `same` says that it is known to be this engine's.
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

    def accept(self, seq: int, payload: bytes) -> None:
        """Moves behind `seq`: its batch counts as applied, and what it skips as lost."""
        if seq != self.expected:
            if self._in_doubt():  # numbers that nobody has heard do not end it
                self._doubt_below += seq - self.expected
            self._recent.skip(self.expected, seq)
        self.expected = seq + 1
        self._recent.note(seq, payload)

    def holds(self, seq: int, payload: bytes) -> bool:
        """Returns whether this very batch was accepted, as far as the last 128 are remembered.

        Those of the engine before a restart are, until the new one's replace them.
        """
        return self._recent.holds(seq, payload)

    def rejoined(self) -> None:
        """Notes that from some batch on, all come over another connection than those before.

        Those before may be waiting still, so the doubt goes only with as many as are remembered.
        """
        self._doubt_below = self.expected + SIZE
        self.brought = range(0)

    def restart(self) -> None:
        """Begins anew: another engine speaks."""
        self.expected = self._doubt_below = 0
        self._row = self.brought = range(0)

    def _is_other(self, seq: int, payload: bytes) -> bool:
        if self.holds(seq, payload) or self._was_brought(seq):
            return False
        late = seq >= self.expected - SIZE and self._recent.skipped(seq)
        return self._in_doubt() or not late

    def _was_brought(self, seq: int) -> bool:
        """Returns whether a replay has brought it, too long ago to be remembered by its content."""
        if self.expected != self.brought.stop or seq >= self.expected - SIZE:
            return False
        was = seq in self.brought
        if was:
            self.brought = range(seq + 1, self.expected)  # live ones come one after the other
        return was

    def _needed(self) -> int:
        if self._in_doubt():
            return RUN_AFTER_JOIN
        return RUN_FROM_START if self._row.start in FIRST_NUMBERS else RUN_ANYWHERE

    def _in_doubt(self) -> bool:
        return self.expected < self._doubt_below
