"""Permanent losses of a stream: the ranks that lack events, and on which tiers.

A stream may carry several ranks, and nothing says to which of them a missing batch belonged. So all
ranks lack it, even those that have not been heard yet. A clear says that a rank holds nothing on
some tiers, so losses there no longer matter; other ranks and tiers are not affected.

    a batch missing by its number    every rank lacks it on all tiers, ranks heard later, too
    a batch lost of a known rank     that rank lacks it on all tiers
    a clear                          that rank no longer lacks anything on the cleared tiers

Where batches name their ranks, further ranks may exist that have not been heard, though most
streams have one rank. So after all known ranks were cleared, a stream still counts as lacking
events until `HEARD_AFTER` more numbers have passed without a new rank.
"""

from __future__ import annotations

from kvd.wire.position import KeptLosses, StreamPosition
from kvd_core.index.prefix_index import ALL_TIERS

# Batches after a loss without a new rank after which no unheard rank is assumed any more. Engines
# publish for each working rank, some ten times a second: half a minute of work.
HEARD_AFTER = 1_000


class Losses:
    """The losses of one stream; `why` describes the last one."""

    __slots__ = ("_heard", "_lacking", "_named", "_unheard_since", "why")

    def __init__(self, kept: KeptLosses | None = None) -> None:
        """Begins with the losses that another process `kept` of the same stream, if any."""
        self.why = ""
        self._heard: set[int] = set()
        self._named = False  # batches name their ranks, so there may be unheard ones
        self._lacking: dict[int, int] = {}  # tiers as bits, never 0, by rank that has been heard
        self._unheard_since: int | None = None  # unheard ranks lack events before this number
        if kept is not None:
            self.why, self._named, self._unheard_since = kept.why, kept.named, kept.unheard_since
            self._heard.update(kept.heard)
            self._lacking.update(kept.lacking)

    def __bool__(self) -> bool:
        """Returns whether any rank, heard or not, may still lack events."""
        return bool(self._lacking) or self._unheard_since is not None

    def kept(self) -> KeptLosses:
        """Returns the losses for another process that goes on with the stream."""
        lacking = list(self._lacking.items())
        return KeptLosses(self.why, sorted(self._heard), self._named, lacking, self._unheard_since)

    @property
    def of_unheard(self) -> bool:
        """Returns whether ranks that have not been heard yet would lack events."""
        return self._unheard_since is not None

    def matter(self, expected: int) -> bool:
        """Returns whether a rank lacks events, or an unheard rank is still assumed to.

        `expected` is the number of the next batch.
        """
        if self._lacking or self._unheard_since is None or not self._heard:
            return bool(self)
        return self._named and expected - self._unheard_since < HEARD_AFTER

    def lose(self, why: str, expected: int) -> None:
        """Notes that every rank lacks events from before the number `expected`."""
        self.why = why
        self._lacking = dict.fromkeys(self._heard, ALL_TIERS)
        self._unheard_since = expected

    def lose_of(self, rank: int, why: str) -> None:
        """Notes that a rank lacks events that were lost without leaving a gap."""
        self.why = why
        self._lacking[rank] = ALL_TIERS

    def hear(self, rank: int, named: bool) -> None:
        """Notes a batch of a rank; a rank heard for the first time lacks all earlier losses.

        `named` says whether some batch, this one or another, has named its rank.
        """
        self._named = named
        if rank not in self._heard:
            self._heard.add(rank)
            if self._unheard_since is not None:
                self._lacking[rank] = ALL_TIERS

    def clear(self, rank: int, tiers: int) -> None:
        """Notes that a rank has emptied some tiers, so that it lacks nothing there."""
        left = self._lacking.pop(rank, 0) & ~tiers
        if left:
            self._lacking[rank] = left


def with_loss(position: StreamPosition, why: str) -> StreamPosition:
    """Returns a position whose stream lacks events from before it, if it had any."""
    if not position.expected:
        return position
    losses = Losses(position.losses)
    losses.lose(why, position.expected)
    return position._replace(losses=losses.kept())
