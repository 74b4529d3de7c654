"""The ledgers of all faces: each has its own, and those of the same ranks share their loads.

    slot tracker ──> Ledger: its ranks, its requests ──┐
                                                       ├──> Loads of (model, tenant), block size
    selection    ──> Ledger: its ranks, its requests ──┘

So what is booked through one face weighs on the choices and loads of the others, while each lists,
finds and ends only what came through itself. Blocks of different sizes cannot be compared: then
nothing is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary

import msgpack

from kvd.model import PartitionKey
from kvd.wire.lifecycle import Face
from kvd_core.ledger.journal import Journal
from kvd_core.ledger.ledger import MAX_BLOCKS, MAX_REQUESTS, Ledger, Loads

LEDGER = ord("L")  # kind of a journal's record that says which ledger has a number


class Ledgers:
    """The loads of ranks in this process, kept as long as any ledger of theirs lives."""

    def __init__(
        self,
        max_requests: int = MAX_REQUESTS,
        max_blocks: int = MAX_BLOCKS,
        journals: Sequence[Journal] = (),
    ) -> None:
        """A ledger has so many requests; with those that it shares loads with, so many blocks.

        All steps of requests are recorded in each of the `journals`, two at most.
        """
        self._bounds = max_requests, max_blocks
        self._journals = journals
        self._opened = 0  # ledgers so far, each of which has its number
        self._loads: WeakValueDictionary[tuple[PartitionKey, int], Loads] = WeakValueDictionary()

    def open(self, face: Face, key: PartitionKey, block_size: int) -> Ledger:
        """Returns a face's new ledger, which weighs on others of the same key and block size."""
        loads = self._loads.get((key, block_size))
        if loads is None:
            loads = self._loads[key, block_size] = Loads()
        ledger = Ledger(*self._bounds, loads=loads)
        self._opened += 1
        if self._journals:
            ledger.record_in(self._opened, *self._journals)
            for journal in self._journals:
                self.introduce(journal, ledger, face, key, block_size)
        return ledger

    def introduce(
        self, journal: Journal, ledger: Ledger, face: Face, key: PartitionKey, block_size: int
    ) -> None:
        """Records which ledger it is that a journal knows by its number."""
        journal.put(LEDGER, msgpack.packb([ledger.number, face.value, *key, block_size]))
