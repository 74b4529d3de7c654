"""A rank's table of names while it grows: its entries are in two arrays then (base/arena.hpp).

`tests/fuzz/fuzz_table.cpp` drives the table by itself, and lets its entries collide.
"""

from __future__ import annotations

import random
from itertools import pairwise

from kvd_core.index.prefix_index import IngestStats, PrefixIndex
from tests.support.dumps import entry_text, rows, text_of

FULL = 8192 * 4 // 5  # names of a table that takes its next array at one more
GROWN = FULL + 8192 // 16 + 1  # names by which all are in it
MIDDLE = (FULL + GROWN) // 2
OTHER = 1 << 32  # names of the rank under test: the blocks' own ones and this


class Growing:
    """A rank in the middle of the growth, whose names are not those of the first holder."""

    def __init__(self) -> None:
        self.index = PrefixIndex(16, IngestStats())
        self.first, self.rank = (self.index.add_worker(worker_id) for worker_id in (1, 2))
        blocks = list(range(1, GROWN + 1))
        self.first.store(0, blocks, blocks)
        self.names: set[int] = set()
        self.store(1, FULL)
        self.store(FULL + 1, MIDDLE)

    def store(self, first: int, last: int) -> None:
        names = list(range(OTHER + first, OTHER + last + 1))
        parent = None if first == 1 else names[0] - 1
        self.rank.store(0, names, list(range(first, last + 1)), parent)
        self.names.update(names)

    def drop(self, name: int) -> None:
        self.rank.drop(0, [name])
        self.names.discard(name)

    def sweep(self) -> None:
        while self.index.sweep(1 << 20):
            pass

    def check(self) -> None:
        self.index.verify()
        assert names_in(text_of(self.index)) == self.names


def names_in(text: bytes) -> set[int]:
    """Returns the names that the second worker has in a dump."""
    return {name for worker, *_, blocks in rows(text) if worker == "2" for name, _ in blocks}


def test_a_growth_ends_some_inserts_after_it_began() -> None:
    growing = Growing()
    sizes = []
    for block in range(MIDDLE + 1, GROWN + 1):
        growing.store(block, block)
        sizes.append(growing.index.stats()["bytes"])
    assert [before - after > 16_384 for before, after in pairwise(sizes)].count(True) == 1
    growing.check()


def test_names_are_found_wherever_they_are() -> None:
    growing = Growing()
    growing.check()
    rng = random.Random(1)
    for at, name in enumerate(rng.sample(sorted(growing.names), len(growing.names))):
        growing.drop(name)
        if at % 1000 == 5:
            growing.check()
    growing.check()


def test_names_come_and_go() -> None:
    growing = Growing()
    for block in range(MIDDLE + 1, GROWN + 1):
        growing.store(block, block)
        growing.drop(OTHER + block - MIDDLE)
        if block % 64 == 0:
            growing.check()


def test_a_table_is_cleared() -> None:
    growing = Growing()
    growing.rank.clear(0)
    growing.names.clear()
    growing.check()
    growing.sweep()
    growing.check()
    growing.store(1, MIDDLE)
    growing.check()


def test_a_tier_is_cleared() -> None:
    """The walk erases names from both arrays."""
    growing = Growing()
    kept = [*range(OTHER + 7, OTHER + 40), *range(OTHER + MIDDLE - 40, OTHER + MIDDLE)]
    growing.rank.store_named(0, kept, 1)
    growing.rank.clear(0, 0)
    growing.names = set(kept)
    growing.check()


def test_a_dump_in_parts_misses_no_name() -> None:
    """Entries are moved between the parts, from slots that were not read yet."""
    growing = Growing()
    before = set(growing.names)
    dump = growing.index.dump()
    text = b""
    block = MIDDLE
    while not dump.done:
        text += dump.read(1)
        if block < GROWN:
            block += 1
            growing.store(block, block)
    assert before <= names_in(entry_text(text))
    growing.check()
