"""Blocks that ranks are thought to cache because prompts were booked on them.

Where workers publish no KV events the selection service goes by its own bookings: what was sent
to a rank is cached there, until it has not been sent again for the time to live, or until there
are too many such blocks in all.

    oldest ─────────────────────────────────────────────────> newest
    (rank 2, c4) (rank 2, c3) (rank 2, c2) (rank 2, c1)  (rank 1, c9) (rank 1, c8)
     └── one booking: its deepest block first ───────┘

1. Blocks are in order of their expiry; of one booking the deepest comes first. So of every prompt
   that is known in part, a prefix is known.
2. A block is named by the rolling hash of its prefix.

Costs: O(blocks) dictionary operations a booking, and one for each block that goes.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence
from typing import Generic, TypeVar

Rank = TypeVar("Rank", bound=Hashable)


class Predictions(Generic[Rank]):
    """The blocks of all ranks of one fleet."""

    def __init__(self, ttl_s: float, max_blocks: int, prune_target_ratio: float) -> None:
        """Blocks live `ttl_s` seconds; beyond `max_blocks` the oldest go, down to the ratio."""
        self._ttl_s = ttl_s
        self._max_blocks = max_blocks
        self._target = int(max_blocks * prune_target_ratio)
        self._expiries: dict[tuple[Rank, int], float] = {}  # oldest first
        self._excess = 0  # of these, how many are to go because there were too many

    def __len__(self) -> int:
        return len(self._expiries)

    def add(self, rank: Rank, names: Sequence[int], now: float) -> int:
        """Notes the blocks of a booked prompt; returns how many of them, leading, were known."""
        expiries = self._expiries
        known = 0
        for name in names:
            if expiries.pop((rank, name), None) is None:
                break
            known += 1
        expiry = now + self._ttl_s
        for name in reversed(names):
            expiries.pop((rank, name), None)
            expiries[rank, name] = expiry
        return known

    def outdated(self, now: float, limit: int) -> list[tuple[Rank, int]]:
        """Forgets at most `limit` blocks that are too old or too many, and returns them.

        There may be more when as many as `limit` came.
        """
        if len(self._expiries) > self._max_blocks:
            self._excess = len(self._expiries) - self._target
        gone: list[tuple[Rank, int]] = []
        for key, expiry in self._expiries.items():
            if len(gone) == limit or (expiry > now and len(gone) >= self._excess):
                break
            gone.append(key)
        for key in gone:
            del self._expiries[key]
        self._excess = max(0, self._excess - len(gone))
        return gone

    def forget(self, ranks: Container[Rank]) -> None:
        """Forgets what ranks that go are thought to cache. O(all blocks)."""
        self._expiries = {key: at for key, at in self._expiries.items() if key[0] not in ranks}
        self._excess = min(self._excess, max(0, len(self._expiries) - self._target))
