"""An index and the plain-Python model of it, driven alike by random operations."""

from __future__ import annotations

import random

from kvd_core.index.prefix_index import IngestStats, PrefixIndex, Worker
from tests.models.prefix_model import ModelRank, frequencies

TIERS = (0, 1, 2, 3)
SLICES = (1, 2, 5, 20, 100, 1000)  # steps of a sweep
VOCABULARY = 3  # local hashes: few, so that prompts share prefixes and branch often


class Pair:
    """An index and its model, driven by the same operations."""

    def __init__(self, rng: random.Random, stretch: int = 1) -> None:
        self.rng = rng
        self.stretch = stretch  # how many times longer some runs are
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
        """Returns a run of blocks, mostly below a known block, mostly with consistent names."""
        length = self.rng.choice((1, 1, 2, 3, 5, 9)) * self.rng.choice((1, self.stretch))
        local = [self.rng.randrange(VOCABULARY) for _ in range(length)]
        if length > 9:  # so that long runs match one another
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
        """Names a block: two engines agree, one has its own names, one varies; some are noise."""
        if self.rng.random() < 0.03:
            return self.rng.randrange(1, 400)
        engine = {0: 0, 1: 0, 2: 2, 3: 3 + self.rng.randrange(2)}[worker.worker_id]
        return hash((engine, path)) % 2**64 or 1  # hashes of numbers do not vary by process

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
        """Stores right behind a clear, while the old blocks are still being swept."""
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
        """A new engine process: the rank's blocks and its stream's state are gone."""
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
