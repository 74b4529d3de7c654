"""Tells from sequence numbers whether a stream of event batches is complete.

Every message of an engine carries a number one higher than the one before; PUB/SUB may lose some.
A cursor holds the number that should come next and judges each number that does come:

    expected   seq                     verdict   missing            the batch is
    --------   ---------------------   -------   ----------------   ------------
    0          0                       FIRST     -                  applied
    0          > 0                     GAP       0 .. seq-1         applied
    n > 0      n                       NEXT      -                  applied
    n > 0      > n                     GAP       n .. seq-1         applied
    n > 0      < n                     STALE     -                  ignored

Nothing accepted yet and 0 expected are the same state. Source: the peer, Dynamo's standalone
indexer 1.6.1, was seen to do exactly this. Judging changes nothing; the cursor moves by `accept`
only, so that a caller may first fetch what a gap is missing and then judge the same number again.
"""

from __future__ import annotations

from enum import Enum


class Verdict(Enum):
    """What a sequence number means for the batch that carries it."""

    FIRST = "first"
    NEXT = "next"
    GAP = "gap"
    STALE = "stale"


class Cursor:
    """The place in one stream of batches; outlives the connections it is read over."""

    __slots__ = ("expected",)

    def __init__(self) -> None:
        self.expected = 0  # the sequence number that continues the stream; 0 = nothing accepted yet

    @property
    def last(self) -> int | None:
        """The highest accepted sequence number, None before the first."""
        return self.expected - 1 if self.expected else None

    def observe(self, seq: int) -> Verdict:
        """Judges a sequence number (0 .. 2^64-1) without moving."""
        expected = self.expected
        if seq == expected:
            return Verdict.NEXT if expected else Verdict.FIRST
        return Verdict.GAP if seq > expected else Verdict.STALE

    def missing(self, seq: int) -> range:
        """Returns the numbers between the stream's end and `seq`: empty unless that is a gap."""
        return range(self.expected, seq)

    def accept(self, seq: int) -> None:
        """Moves behind `seq`: its batch counts as applied, and whatever is missing as lost."""
        self.expected = seq + 1
