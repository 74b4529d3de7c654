"""The ledgers of all faces: each has its own, and those of the same ranks share their loads.

    slot tracker ──> Ledger: its ranks, its requests ──┐
                                                       ├──> Loads of (model, tenant), block size
    selection    ──> Ledger: its ranks, its requests ──┘

So what is booked through one face weighs on the choices and loads of the others, while each lists,
finds and ends only what came through itself. Blocks of different sizes cannot be compared: then
nothing is shared.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

from kvd.model import PartitionKey
from kvd_core.ledger.ledger import MAX_BLOCKS, MAX_REQUESTS, Ledger, Loads


class Ledgers:
    """What a process knows of the loads of its ranks, as long as any ledger of theirs lives."""

    def __init__(self, max_requests: int = MAX_REQUESTS, max_blocks: int = MAX_BLOCKS) -> None:
        """A ledger has so many requests; with those that it shares loads with, so many blocks."""
        self._bounds = max_requests, max_blocks
        self._loads: WeakValueDictionary[tuple[PartitionKey, int], Loads] = WeakValueDictionary()

    def open(self, key: PartitionKey, block_size: int) -> Ledger:
        """Returns a new ledger, which weighs on the others of the same place and block size."""
        loads = self._loads.get((key, block_size))
        if loads is None:
            loads = self._loads[key, block_size] = Loads()
        return Ledger(*self._bounds, loads=loads)
