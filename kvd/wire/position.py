"""The position of a stream, as one process hands it over to its successor."""

from __future__ import annotations

from typing import NamedTuple

from kvd_core.base.recent import Recent


class KeptLosses(NamedTuple):
    """The losses of a stream, as `Losses` keeps them."""

    why: str
    heard: list[int]  # ranks
    named: bool
    lacking: list[tuple[int, int]]  # rank, tiers
    unheard_since: int | None


class StreamPosition(NamedTuple):
    """A stream's position, by which a process recognises its next batch and its engine."""

    expected: int  # number of the next batch
    digests: bytes  # of the last batches, see kvd_core/base/recent.hpp
    publisher: bytes  # id of their publisher, b"" if they named none
    losses: KeptLosses


# The position of a stream from which no batch has come.
NOWHERE = StreamPosition(0, Recent().digests(), b"", KeptLosses("", [], False, [], None))
