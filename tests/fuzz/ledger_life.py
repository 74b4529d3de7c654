"""Interprets any bytes as steps of ledgers and their model, on a heap that is full now and then.

It runs in `fuzz_ledger.cpp`, which has the compiled ledger and the module `heap`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from kvd_core.ledger.ledger import Ledger, Loads
from tests.support.ledger_lives import Pair

if TYPE_CHECKING:
    leave: Callable[[int], None]
else:
    from heap import leave

ENDLESS = 2**64 - 1
CHANGES = ("add_rank", "remove_ranks", "add", "free", "output_block", "expire")


class Drawn(random.Random):
    """Random numbers taken from the fuzzer's bytes, zeros once these are used up."""

    def __init__(self, data: bytes) -> None:
        super().__init__(0)
        self.data = data
        self.at = 0

    def getrandbits(self, k: int) -> int:
        size = (k + 7) // 8
        piece = self.data[self.at : self.at + size]
        self.at += size
        return int.from_bytes(piece, "little") & (1 << k) - 1

    def random(self) -> float:
        return self.getrandbits(16) / 2**16


class Scarce:
    """A ledger for which every change is first tried with little memory.

    A change that fails must leave the ledger as it was, and succeed once there is memory again.
    """

    def __init__(self, ledger: Ledger, rng: random.Random) -> None:
        self.ledger = ledger
        self.rng = rng

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.ledger, name)
        return call if name not in CHANGES else lambda *args: self.change(call, args)

    def change(self, call: Callable[..., object], args: tuple[object, ...]) -> object:
        before = self.state()
        leave(self.rng.randrange(16))
        try:
            return call(*args)
        except MemoryError:
            pass  # tried again below
        finally:
            leave(ENDLESS)
        assert self.state() == before
        self.ledger.verify()
        return call(*args)

    def state(self) -> tuple[bytes, dict[str, object]]:
        """Returns what a failed change must not alter; memory and nodes may differ."""
        stats = {key: value for key, value in self.ledger.stats().items() if key != "bytes"}
        return self.ledger.render_loads(), {**stats, "nodes": None, "rank_refs": None}


class ScarcePair(Pair):
    def made(self, loads: Loads) -> Ledger:
        return cast("Ledger", Scarce(super().made(loads), self.rng))


def run(data: bytes) -> None:
    """Raises AssertionError if ledgers break an invariant or differ from the model."""
    drawn = Drawn(data)
    ranks = drawn.choice((1, 3, 12))
    stretch = 1500 if drawn.randrange(16) == 1 else 1  # longer than a node: slow
    pair = ScarcePair(drawn, ranks, owners=1 + drawn.randrange(3), stretch=stretch)
    while drawn.at < len(data):
        pair.step()
        pair.ledger.verify()
        pair.compare()
    pair.compare_requests()
    pair.end()
