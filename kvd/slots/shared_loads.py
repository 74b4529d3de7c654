"""The ledgers of all faces: each face has its own; ledgers of the same ranks share their loads.

    slot tracker ──> Ledger: its ranks, its requests ──┐
                                                       ├──> Loads of (model, tenant), block size
    selection    ──> Ledger: its ranks, its requests ──┘

A booking through one face therefore weighs on the choices and loads of the others, while each face
lists, finds and ends only its own requests. Ledgers of different block sizes share nothing, since
their blocks cannot be compared.
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
    """The loads of ranks in this process, kept as long as any ledger that uses them lives."""

    def __init__(
        self,
        max_requests: int = MAX_REQUESTS,
        max_blocks: int = MAX_BLOCKS,
        journals: Sequence[Journal] = (),
    ) -> None:
        """Bounds the requests of each ledger, and the blocks of ledgers that share loads.

        All steps of requests are recorded in each of the `journals`, two at most.
        """
        self._bounds = max_requests, max_blocks
        self._journals = journals
        self._opened = 0  # ledgers so far; this numbers them
        self._loads: WeakValueDictionary[tuple[PartitionKey, int], Loads] = WeakValueDictionary()

    def open(self, face: Face, key: PartitionKey, block_size: int) -> Ledger:
        """Returns a face's new ledger; it shares loads with others of its key and block size."""
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
        """Records the face, key and block size of a ledger, which a journal knows by number."""
        journal.put(LEDGER, msgpack.packb([ledger.number, face.value, *key, block_size]))
