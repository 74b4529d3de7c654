"""Long random lives of an index, compared step by step with the plain-Python model."""

from __future__ import annotations

import random

import pytest

from kvd_core.index.prefix_index import IngestStats, PrefixIndex
from tests.support.budget import scaled
from tests.support.index_pairs import Pair


def assert_empty(index: PrefixIndex, start: dict[str, object]) -> None:
    while index.sweep(1000):
        pass
    index.verify()
    stats = index.stats()
    for size in ("blocks", "chains", "records", "exceptions", "parked_now", "held"):
        assert stats[size] == start[size], size


@pytest.mark.parametrize("seed", range(scaled(5)))
def test_index_equals_model(seed: int) -> None:
    pair = Pair(random.Random(seed))
    start = pair.index.stats()
    for _ in range(150):
        pair.step()
        pair.index.verify()
        pair.compare()
    for worker in pair.workers.values():
        worker.remove()
    assert_empty(pair.index, start)


@pytest.mark.slow("the model walks each block")
@pytest.mark.parametrize("seed", range(scaled(1)))
def test_index_equals_model_on_long_chains(seed: int) -> None:
    pair = Pair(random.Random(seed), stretch=230)
    for _ in range(40):
        pair.step()
        pair.index.verify()
    pair.compare()


def test_memory_returns_to_its_start() -> None:
    index = PrefixIndex(16, IngestStats())
    empty = index.stats()["bytes"]
    rng = random.Random(7)
    worker = index.add_worker(1)
    for round_ in range(3):
        names: list[int] = []
        for chain in range(50):
            local = [rng.randrange(2**64) for _ in range(200)]
            run = [(round_ << 48) + (chain << 32) + i for i in range(1, 201)]
            worker.store(0, run, local)
            names += run
        assert index.stats()["bytes"] > 4 * empty
        rng.shuffle(names)
        worker.drop(0, names)
        while index.sweep(100):
            index.verify()
        assert index.stats()["blocks"] == 0
        assert index.stats()["bytes"] <= empty + 4096
    worker.remove()
    assert_empty(index, PrefixIndex(16, IngestStats()).stats())


def test_deletes_of_unknown_blocks_leave_nothing_behind() -> None:
    index = PrefixIndex(16, IngestStats())
    worker = index.add_worker(1)
    worker.store(0, [1, 2], [10, 20])
    for start in range(10, 1_000_000, 100_000):
        worker.drop(0, range(start, start + 100_000))
    assert index.stats()["removed_unknown"] == 1_000_000
    assert index.match([10, 20]) == ({(1, 0): (2, 2, 2)}, [1, 1])


def test_thousands_of_ranks_share_a_prefix() -> None:
    index = PrefixIndex(16, IngestStats())
    local = list(range(100, 400))
    workers = [index.add_worker(i) for i in range(2000)]
    for i, worker in enumerate(workers):
        for start in range(0, 300, 100):
            parent = None if start == 0 else start
            names = list(range(start + 1, start + 101))
            worker.store(0, names, local[start : start + 100], parent)
        worker.store(0, [1000 + i], [5000 + i], 300)
    found, holders = index.match([*local, 5007])
    assert found[7, 0] == (301, 301, 301)
    assert all(found[i, 0][0] == 300 for i in range(2000) if i != 7)
    assert holders == [2000] * 300 + [1]
    assert index.stats()["chains"] == 2001
    for worker in workers:
        worker.remove()
    assert_empty(index, PrefixIndex(16, IngestStats()).stats())


def test_churn_at_a_branch_leaves_no_fragments() -> None:
    index = PrefixIndex(16, IngestStats())
    worker = index.add_worker(1)
    worker.store(0, list(range(1, 201)), list(range(1, 201)))
    for i in range(200, 0, -1):
        worker.store(0, [10_000 + i], [77], parent=i)
        index.verify()
        worker.drop(0, [10_000 + i])
        index.verify()
    assert index.stats()["chains"] == 1


def test_parked_blocks_are_bounded_and_the_oldest_go_first() -> None:
    index = PrefixIndex(16, IngestStats())
    worker = index.add_worker(1)
    for name in range(1, 70_001):
        worker.store(0, [name], [1], parent=1_000_000 + name)
    stats = index.stats()
    assert stats["parked_now"] == 65_536
    assert stats["parked_dropped"] == 70_000 - 65_536
    worker.store(0, [1_000_001, 1_070_000], [8, 9])
    assert index.match([8, 9, 1])[0] == {(1, 0): (3, 3, 3)}  # the newest is linked
    assert index.match([8, 1])[0] == {(1, 0): (1, 1, 1)}  # the oldest was dropped
    index.verify()


def test_dropped_names_of_an_offloading_rank_are_remembered_for_a_while() -> None:
    index = PrefixIndex(16, IngestStats())
    worker = index.add_worker(1)
    worker.store(0, list(range(1, 6001)), list(range(1, 6001)))
    worker.store_named(0, [1], tier=1)
    worker.drop(0, range(6000, 0, -1))
    worker.store_named(0, [2, 3], tier=1)
    assert index.match([1, 2, 3])[0] == {(1, 0): (0, 3, 3)}
    index.verify()
    assert index.stats()["blocks"] <= 4096 + 3
    worker.clear(0)
    assert_empty(index, PrefixIndex(16, IngestStats()).stats())


@pytest.mark.parametrize(
    "names, parent", [([1, 1], None), ([1, 2, 1], None), ([3], 3), ([4, 3], 3)]
)
def test_a_store_that_refers_to_itself_is_refused(names: list[int], parent: int | None) -> None:
    index = PrefixIndex(16, IngestStats())
    worker = index.add_worker(1)
    worker.store(0, [3], [30])
    worker.store(0, names, list(range(len(names))), parent)
    assert index.stats()["self_references"] == 1
    assert index.stats()["blocks"] == 1
