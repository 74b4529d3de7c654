"""Permanent losses of a stream: the ranks that lack something, and on which tiers.

A port may carry several ranks, and nothing says whose a missing batch was: so all of them lack it,
those too that have not been heard yet. A clear says that a rank holds nothing on some tiers, so
what was missed there no longer matters; to other ranks and tiers it says nothing.

    lost, by its number     every rank, all tiers          ranks heard later, too
    lost, of a known rank   that rank, all tiers
    cleared                 that rank: not these tiers any more

Whether there are ranks that have not been heard is not known, where batches name theirs: most ports
have one rank. So a stream whose known ranks all were cleared still lacks what was lost until
`HEARD_AFTER` more numbers have passed without a new rank.
"""

from __future__ import annotations

from kvd.wire.position import KeptLosses
from kvd_core.index.prefix_index import ALL_TIERS

# Batches behind a loss after which a rank that nobody has heard counts as absent. Engines publish
# for each working rank, some ten times a second: half a minute of work.
HEARD_AFTER = 1_000


class Losses:
    """The losses of one stream; `why` names the last one."""

    __slots__ = ("_heard", "_lacking", "_named", "_unheard_since", "why")

    def __init__(self, kept: KeptLosses | None = None) -> None:
        """Goes on with what another process knew of the same stream, if that is given."""
        self.why = ""
        self._heard: set[int] = set()
        self._named = False  # batches name their ranks, so there may be others
        self._lacking: dict[int, int] = {}  # of ranks heard: tiers as bits, never none
        self._unheard_since: int | None = None  # ranks not heard lack something before this number
        if kept is not None:
            self.why, self._named, self._unheard_since = kept.why, kept.named, kept.unheard_since
            self._heard.update(kept.heard)
            self._lacking.update(kept.lacking)

    def __bool__(self) -> bool:
        """Returns whether anything has been lost that some rank may still lack."""
        return bool(self._lacking) or self._unheard_since is not None

    def kept(self) -> KeptLosses:
        """Returns what another process has to know to go on."""
        lacking = list(self._lacking.items())
        return KeptLosses(self.why, sorted(self._heard), self._named, lacking, self._unheard_since)

    @property
    def of_unheard(self) -> bool:
        """Returns whether ranks not heard yet may lack something."""
        return self._unheard_since is not None

    def matter(self, expected: int) -> bool:
        """Returns whether a rank lacks something, or one may that has not been heard.

        `expected` is the number of the next batch.
        """
        if self._lacking or self._unheard_since is None or not self._heard:
            return bool(self)
        return self._named and expected - self._unheard_since < HEARD_AFTER

    def lose(self, why: str, expected: int) -> None:
        """Notes that every rank lacks something from before the number `expected`."""
        self.why = why
        self._lacking = dict.fromkeys(self._heard, ALL_TIERS)
        self._unheard_since = expected

    def lose_of(self, rank: int, why: str) -> None:
        """Notes that a rank lacks something that was lost without leaving a gap."""
        self.why = why
        self._lacking[rank] = ALL_TIERS

    def hear(self, rank: int, named: bool) -> None:
        """Notes a batch of a rank, which lacks what was lost before the first one.

        `named` says whether some batch has named a rank, this one or another.
        """
        self._named = named
        if rank not in self._heard:
            self._heard.add(rank)
            if self._unheard_since is not None:
                self._lacking[rank] = ALL_TIERS

    def clear(self, rank: int, tiers: int) -> None:
        """Notes that a rank has emptied some tiers, so that nothing is lacking there."""
        left = self._lacking.pop(rank, 0) & ~tiers
        if left:
            self._lacking[rank] = left
