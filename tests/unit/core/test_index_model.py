"""Long random lives of an index, compared step by step with the plain-Python model."""

from __future__ import annotations

import random

import pytest

from kvd_core.index.prefix_index import IngestStats, PrefixIndex, Worker
from tests.models.prefix_model import ModelRank, frequencies
from tests.support.budget import scaled

TIERS = (0, 1, 2, 3)
SLICES = (1, 2, 5, 20, 100, 1000)  # steps of a sweep
VOCABULARY = 3  # local hashes: few, so that prompts share prefixes and branch often


class Pair:
    """An index and its model, driven by the same operations."""

    def __init__(self, rng: random.Random, stretch: int = 1) -> None:
        self.rng = rng
        self.stretch = stretch  # how many times longer runs are than in the short lives
        self.index = PrefixIndex(16, IngestStats())
        self.workers: dict[int, Worker] = {}
        self.ranks: dict[tuple[int, int], ModelRank] = {}

    def rank(self) -> tuple[Worker, int, ModelRank]:
        worker_id, dp_rank = self.rng.randrange(4), self.rng.choice((0, 0, 0, 1, 5))
        if worker_id not in self.workers:
            self.workers[worker_id] = self.index.add_worker(worker_id)
        model = self.ranks.setdefault((worker_id, dp_rank), ModelRank())
        return self.workers[worker_id], dp_rank, model

    def store(self) -> None:
        worker, dp_rank, model = self.rank()
        names, local, parent = self.run(worker, model)
        tier = self.rng.choice((0, 0, 0, 1, 2, 3))
        worker.store(dp_rank, names, local, parent, tier)
        model.store(names, local, parent, tier)

    def run(self, worker: Worker, model: ModelRank) -> tuple[list[int], list[int], int | None]:
        """A run of blocks: mostly below a known name, mostly with consistent names."""
        length = self.rng.choice((1, 1, 2, 3, 5, 9)) * self.rng.choice((1, self.stretch))
        local = [self.rng.randrange(VOCABULARY) for _ in range(length)]
        if length > 9:  # long runs of one value meet again
            local = local[:1] * length
        kind = self.rng.random()
        if kind < 0.35 or not model.names:
            base: tuple[int, ...] = ()
            parent = None
        elif kind < 0.9:
            parent = self.rng.choice(list(model.names))
            base = model.names[parent].path
        else:
            parent = self.rng.randrange(1, 400)  # often unknown
            base = (99, parent)
        names = [self.name(worker, base + tuple(local[: i + 1])) for i in range(length)]
        return names, local, parent

    def name(self, worker: Worker, path: tuple[int, ...]) -> int:
        """Two engines agree, one has hashes of its own, one changes them; some are noise."""
        if self.rng.random() < 0.03:
            return self.rng.randrange(1, 400)
        engine = {0: 0, 1: 0, 2: 2, 3: 3 + self.rng.randrange(2)}[worker.worker_id]
        return random.Random(repr((engine, path))).randrange(1, 2**64)

    def store_named(self) -> None:
        worker, dp_rank, model = self.rank()
        names = [self.some_name(model) for _ in range(self.rng.choice((1, 2)))]
        tier = self.rng.choice((1, 2, 3))
        model.offloads = True
        worker.store_named(dp_rank, names, tier)
        model.store_named(names, tier)

    def some_name(self, model: ModelRank) -> int:
        known = list(model.names) + list(model.parked)
        if known and self.rng.random() < 0.9:
            return self.rng.choice(known)
        return self.rng.randrange(1, 400)

    def drop(self) -> None:
        worker, dp_rank, model = self.rank()
        tier = self.rng.choice((0, 0, 1, 2, 3))
        names = [self.some_name(model) for _ in range(self.rng.choice((1, 1, 4)))]
        worker.drop(dp_rank, names, tier)
        for name in names:
            model.drop(name, tier)

    def clear(self) -> None:
        worker, dp_rank, model = self.rank()
        tier = self.rng.choice((None, 0, 1))
        worker.clear(dp_rank, tier)
        model.clear(set(TIERS) if tier is None else {tier})

    def unregister(self) -> None:
        worker, dp_rank, _ = self.rank()
        if self.rng.random() < 0.5:
            worker.remove()
            del self.workers[worker.worker_id]
            self.ranks = {key: m for key, m in self.ranks.items() if key[0] != worker.worker_id}
        else:
            worker.register(dp_rank)
            worker.unregister(dp_rank)
            del self.ranks[worker.worker_id, dp_rank]

    def clear_and_store(self) -> None:
        """What comes right behind a clear meets the old blocks, which are still being swept."""
        worker, dp_rank, model = self.rank()
        local = [self.rng.randrange(VOCABULARY) for _ in range(3 * self.stretch)]
        if model.names and self.rng.random() < 0.7:
            local = list(self.rng.choice(list(model.names.values())).path)
        worker.clear(dp_rank)
        model.clear(set(TIERS))
        self.index.sweep(self.rng.choice(SLICES))
        names = [self.name(worker, tuple(local[: i + 1])) for i in range(len(local))]
        worker.store(dp_rank, names, local)
        model.store(names, local, None, 0)

    def restart(self) -> None:
        """Another engine process: nothing of the rank is left, nor what its stream has told."""
        worker, dp_rank, _ = self.rank()
        worker.stream(dp_rank).clear()
        self.ranks[worker.worker_id, dp_rank] = ModelRank()

    def sweep(self) -> None:
        self.index.sweep(self.rng.choice(SLICES))

    def step(self) -> None:
        weights = {
            self.store: 60,
            self.drop: 40,
            self.store_named: 8,
            self.clear: 1,
            self.clear_and_store: 1,
            self.unregister: 0.7,
            self.restart: 0.5,
            self.sweep: 6,
        }
        self.rng.choices(list(weights), weights=list(weights.values()))[0]()

    def compare(self) -> None:
        local = self.question()
        expected = {key: depths for key, m in self.ranks.items() if any(depths := m.depths(local))}
        found, holders = self.index.match(local)
        assert found == expected, local
        assert holders == frequencies(list(self.ranks.values()), local)

    def question(self) -> list[int]:
        paths = [name.path for m in self.ranks.values() for name in m.names.values()]
        if paths and self.rng.random() < 0.9:
            path = list(self.rng.choice(paths))
            return path + [self.rng.randrange(VOCABULARY) for _ in range(self.rng.randrange(3))]
        return [self.rng.randrange(VOCABULARY) for _ in range(self.rng.randrange(6))]


def assert_empty(index: PrefixIndex, start: dict[str, object]) -> None:
    while index.sweep(1000):
        pass
    index.verify()
    stats = index.stats()
    for size in ("blocks", "chains", "records", "exceptions", "parked_now", "held"):
        assert stats[size] == start[size], size


@pytest.mark.parametrize("seed", range(scaled(6)))
def test_index_equals_model(seed: int) -> None:
    pair = Pair(random.Random(seed))
    start = pair.index.stats()
    for _ in range(300):
        pair.step()
        pair.index.verify()
        pair.compare()
    for worker in pair.workers.values():
        worker.remove()
    assert_empty(pair.index, start)


@pytest.mark.slow("the model walks each block")
@pytest.mark.parametrize("seed", range(scaled(2)))
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
    worker.store(0, list(range(1, 501)), list(range(1, 501)))
    for i in range(500, 0, -1):
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
