"""Copies as engines report them: `origin` of a store, `remaining_copy_counts` of a removal."""

from __future__ import annotations

import random
from typing import Any

import msgpack
import pytest

from kvd_core.base.hashing import local_hashes
from kvd_core.index.prefix_index import FLAWED, IngestStats, PrefixIndex

BLOCK = 4
CHAIN = [1, 2, 3]  # names, and the token that each block repeats


class Held:
    """A rank of one worker, fed by a stream."""

    def __init__(self) -> None:
        self.index = PrefixIndex(BLOCK, IngestStats())
        self.worker = self.index.add_worker(1)
        self.worker.register(0)
        self.stream = self.worker.stream(0)

    def apply(self, *events: dict[str, Any]) -> None:
        assert not self.stream.apply(msgpack.packb([1.5, list(events), None])) & FLAWED
        self.index.verify()

    def holds(self, name: int) -> bool:
        """Returns whether the index's dump has a block of that name."""
        return b'"block_hash":%d,' % name in self.index.dump().read(1 << 20)


def stored(names: list[int], parent: int | None = None, **members: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": parent,
        "token_ids": [name for name in names for _ in range(BLOCK)],
        "block_size": BLOCK,
        **members,
    }


def removed(names: list[int], **members: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": names, **members}


def removals_until_gone(held: Held, name: int) -> int:
    for count in range(10):
        if not held.holds(name):
            return count
        held.apply(removed([name]))
    raise AssertionError("it stays")


@pytest.mark.parametrize(
    ("again", "removals"),
    [
        (stored([3], 2), 2),
        (stored([3], 2, origin="REUSED"), 1),
        (stored([3], 2, origin="NEW"), 2),
        (stored(CHAIN), 1),
        (stored(CHAIN, origin="REUSED"), 1),
        (stored(CHAIN, origin="NEW"), 2),
        (stored([3, 4], 2), 2),  # one of them is new
        (stored([3, 4], 2, origin="REUSED"), 1),
        (stored([3], token_ids=[], block_size=0, origin="NEW"), 2),
        (stored([3], 2, token_ids=[], block_size=0, origin="REUSED"), 1),
        *((stored([3], 2, origin=other), 2) for other in (None, "", "new", 1, [], {}, b"NEW")),
        *((stored(CHAIN, origin=other), 1) for other in (None, "", "new", 1, [], {}, b"NEW")),
    ],
    ids=str,
)
def test_what_a_held_block_is_when_it_is_told_again(again: dict[str, Any], removals: int) -> None:
    held = Held()
    held.apply(stored(CHAIN))
    held.apply(again)
    assert removals_until_gone(held, 3) == removals


def test_a_window_group_believes_it_too() -> None:
    for origin, removals in (({}, 2), ({"origin": "REUSED"}, 1), ({"origin": "NEW"}, 2)):
        held = Held()
        window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
        window["kv_cache_spec_sliding_window"] = 2 * BLOCK
        held.apply(stored(CHAIN, group_idx=0, kv_cache_spec_kind="full_attention"))
        held.apply(stored(CHAIN, **window))
        held.apply(stored(CHAIN, **window, **origin))
        gone = removed([3], group_idx=1, kv_cache_spec_kind="sliding_window")
        for _ in range(removals):
            assert held.index.match(hashes(CHAIN))[0] == {(1, 0): (3, 3, 3)}
            held.apply(gone)
        assert held.index.match(hashes(CHAIN))[0] != {(1, 0): (3, 3, 3)}


def hashes(names: list[int]) -> list[int]:
    return list(local_hashes([name for name in names for _ in range(BLOCK)], BLOCK))


@pytest.mark.parametrize(
    ("stores", "counts", "left"),
    [
        (1, [2], 2),
        (1, [1], 1),
        (3, [0], 0),
        (3, [1], 1),
        (3, [5], 5),
        (2, None, 1),
        (2, [], 1),
        (2, [1, 1], 1),
        (2, 1, 1),
        (2, "1", 1),
        (2, b"\0", 1),
        (2, {0: 1}, 1),
        (2, [-1], 1),
        (2, [2**32], 1),
        (2, [1.0], 1),
        (2, [None], 1),
        (2, [True], 1),
        (2, ["1"], 1),
    ],
)
def test_what_is_left_after_a_removal(stores: int, counts: object, left: int) -> None:
    held = Held()
    held.apply(stored(CHAIN))
    for _ in range(stores - 1):
        held.apply(stored([3], 2))
    held.apply(removed([3], remaining_copy_counts=counts))
    assert removals_until_gone(held, 3) == left
    assert held.holds(2)


def test_each_name_has_its_own_count() -> None:
    held = Held()
    held.apply(stored(CHAIN), stored([3], 2), stored([9]))
    held.apply(removed([3, 9, 1, 77, 78], remaining_copy_counts=[0, 2, 1, 0, 3]))
    assert [removals_until_gone(held, name) for name in (1, 3, 9)] == [1, 0, 2]


def test_what_is_parked_stays_so_while_copies_are_left() -> None:
    held = Held()
    held.apply(stored([3], 2))  # its parent is unknown
    held.apply(removed([3], remaining_copy_counts=[1]), stored([1, 2]))
    assert held.holds(3)
    other = Held()
    other.apply(stored([3], 2))
    other.apply(removed([3], remaining_copy_counts=[0]), stored([1, 2]))
    assert not other.holds(3)


@pytest.mark.parametrize("seed", range(20))
def test_counts_of_the_engine_win_whatever_was_missed(seed: int) -> None:
    """Random copies, some of whose events are lost: each count that comes corrects the index."""
    chance = random.Random(seed)
    held, copies = Held(), dict.fromkeys(range(1, 6), 0)
    unsure: set[int] = set()
    for _ in range(300):
        name = chance.randrange(1, 6)
        heard = chance.random() < 0.8
        if copies[name] and chance.random() < 0.5:
            copies[name] -= 1
            event = removed([name], remaining_copy_counts=[copies[name]])
        else:
            copies[name] += 1
            event = stored([name], origin="NEW")
        if heard:
            held.apply(event)
        if event["type"] == "BlockStored":
            unsure |= set() if heard else {name}
        elif heard and (held.holds(name) or not copies[name]):
            unsure.discard(name)
        else:
            unsure.add(name)
        for each, count in copies.items():
            if each not in unsure:
                assert held.holds(each) == (count > 0)


def test_an_empty_payload_and_empty_batches_tell_nothing() -> None:
    held = Held()
    held.apply(stored(CHAIN))
    counters = held.index.counters
    before = counters.as_dict()
    for _ in range(1000):
        assert held.stream.apply(b"") == 0
        held.apply()
    after = counters.as_dict()
    assert after.pop("batches") == before.pop("batches") + 2000
    assert after == before
    assert held.stream.flaw() == ""
    assert held.holds(3)
