"""Keys that outsiders craft against a well-known mixer collide in no table of the core.

`crafted` numbers would share one slot of a table whose hash is the finalizer of splitmix64, and
`multiples` one bucket of a table that takes numbers as they are. `verify` demands that all entries
are near their home slots, which 5,000 colliding ones could not be.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from itertools import pairwise

import msgpack
import pytest

from kvd_core.conductor.conductor import Conductor
from kvd_core.index.prefix_index import UNFINISHED, IngestStats, PrefixIndex
from kvd_core.ledger.ledger import ADDED, Ledger

KEYS = 5000
U64 = 2**64
BUCKETS = 5_087 * 10_273  # bucket counts of the standard library's table at KEYS, and of the next


def undo_shift(value: int, bits: int) -> int:
    """Returns x where value = x ^ x >> bits."""
    found = value
    for _ in range(64 // bits):
        found = value ^ found >> bits
    return found


def crafted(count: int = KEYS) -> list[int]:
    """Returns numbers whose mixed values differ only in bits that do not choose the slot."""
    found = []
    for low in range(count):
        value = undo_shift(0x1234567 << 32 | low, 31) * pow(0x94D049BB133111EB, -1, U64) % U64
        value = undo_shift(value, 27) * pow(0xBF58476D1CE4E5B9, -1, U64) % U64
        found.append(undo_shift(value, 30))
    return found


def multiples() -> list[int]:
    return [BUCKETS * number for number in range(1, KEYS + 1)]


def stored(names: list[int], parent: int | None = None, medium: str = "GPU") -> list[object]:
    tokens = list(range(len(names))) if medium == "GPU" else []
    return ["BlockStored", names, parent, tokens, 1, None, medium]


def index_of(*events: list[object]) -> PrefixIndex:
    """Returns an index of one rank that has published these events."""
    return index_of_ranks(list(events))


def index_of_ranks(*batches: list[list[object]]) -> PrefixIndex:
    """Returns an index of ranks, each of which has published a batch of events."""
    index = PrefixIndex(1, IngestStats())
    worker = index.add_worker(1)
    for rank, events in enumerate(batches):
        worker.register(rank)
        stream = worker.stream(rank)
        outcome = stream.apply(msgpack.packb([0.0, events, rank]))
        while outcome == UNFINISHED:
            outcome = stream.advance()
    return index


@pytest.mark.parametrize("keys", [crafted, multiples])
def test_names_of_a_batch(keys: Callable[[], list[int]]) -> None:
    index = index_of(stored(keys()))
    assert index.stats()["blocks"] == KEYS
    index.verify()


@pytest.mark.parametrize("keys", [crafted, multiples])
def test_blocks_that_wait_and_what_they_wait_for(keys: Callable[[], list[int]]) -> None:
    names = keys()
    index = index_of(*(stored([name], parent) for name, parent in pairwise(names)))
    assert index.stats()["parked_now"] == KEYS - 1
    index.verify()


def test_names_without_content() -> None:
    index = index_of(stored(crafted(), medium="CPU"))
    assert index.stats()["parked_now"] == KEYS
    index.verify()


def test_children_of_a_block_and_their_sequence_hashes() -> None:
    index = PrefixIndex(1, IngestStats())
    worker = index.add_worker(1)
    for number, local in enumerate(crafted()):
        worker.store(0, [number + 1], [local])
    index.verify()
    conductor = Conductor(index)
    while not conductor.sequence(8192):
        pass
    index.verify()


@pytest.mark.slow("a flood is large")
def test_sets_of_ranks() -> None:
    """A set's hash is the xor of its ranks' hashes: if these are known, elimination finds sets."""
    kernel = dependent([known_mix(rank + 1) for rank in range(80)])
    rng = random.Random(1)
    batches: list[list[list[object]]] = [[] for _ in range(80)]
    for block in range(1, KEYS + 1):
        members = 0
        while not members:
            for each in kernel:
                members ^= each * rng.getrandbits(1)
        event = ["BlockStored", [block], None, [block], 1, None, "GPU"]
        for rank, batch in enumerate(batches):
            if members >> rank & 1:
                batch.append(event)
    index = index_of_ranks(*batches)
    assert index.stats()["blocks"] == KEYS
    index.verify()


def known_mix(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % U64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % U64
    return value ^ value >> 31


def dependent(hashes: list[int]) -> list[int]:
    """Returns masks of hashes whose xor is 0; all other such masks are sums of these."""
    rows: dict[int, tuple[int, int]] = {}  # by highest bit
    found = []
    for number, value in enumerate(hashes):
        mask = 1 << number
        while value and (row := rows.get(value.bit_length())):
            value, mask = value ^ row[0], mask ^ row[1]
        if value:
            rows[value.bit_length()] = value, mask
        else:
            found.append(mask)
    return found


def test_prompts_of_live_requests() -> None:
    ledger = Ledger()
    rank = ledger.add_rank(1, 0)
    for number, key in enumerate(crafted()):
        first = array("Q", [key ^ U64 - 1]).tobytes()  # the root's number is all ones
        assert ledger.add(f"r{number}", rank, first, 1, 0.0) == ADDED
    ledger.verify()


@pytest.mark.parametrize("keys", [crafted, multiples])
def test_blocks_told_to_a_conductor_by_hash_alone(keys: Callable[[], list[int]]) -> None:
    index = PrefixIndex(1, IngestStats())
    conductor = Conductor(index)
    source = conductor.add_source("a", "", "", 0, True)
    assert source.store_named(0, None, "CPU", keys(), 0) == "placed"
    index.verify()
    conductor.verify()
