"""A prompt's trace agrees with a model that remembers everything."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest

from kvd_core.base.hashing import sequence_hashes
from kvd_core.index.chronicle import BYTES_A_CHANGE, Chronicle
from kvd_core.index.prefix_index import IngestStats, PrefixIndex, Worker
from kvd_core.index.trace import Trace, Traced, recalled
from tests.models.prefix_model import GHOST, ModelRank, Path
from tests.support.budget import scaled
from tests.support.hashes import packed

RANKS = ((7, 0), (7, 1), (9, 0))
TIERS = 4
BLOCKS = 4  # different blocks at a depth
DEEPEST = 7  # blocks of a prompt at most, so that a key has all of them
MOST = 1000  # steps of a trace that are kept


def name_of(path: Path) -> int:
    return hash(("name", path)) % 2**64


@dataclass
class Remembered:
    """A rank, with everything that has happened to its blocks."""

    rank: ModelRank = field(default_factory=ModelRank)
    # By tier and path: why the block went and when, None while it is held.
    last_changes: dict[tuple[int, Path], tuple[str, float] | None] = field(default_factory=dict)
    runs: list[tuple[int, Path, float]] = field(default_factory=list)  # in the order of stores
    clears: list[tuple[int, float]] = field(default_factory=list)

    def held(self) -> set[tuple[int, Path]]:
        return {
            (int(str(tier)), known.path)
            for known in self.rank.names.values()
            for tier in known.tiers
            if tier != GHOST
        }

    def note(self, before: set[tuple[int, Path]], why: str, now: float) -> None:
        after = self.held()
        for each in after - before:
            self.last_changes[each] = None
        for each in before - after:
            self.last_changes[each] = why, now

    def why(self, prompt: Path, tier: int, depth: int) -> tuple[str, float | None]:
        """Returns why a block of a prompt is not held, and since when if it was lost."""
        if depth == len(prompt):
            return "end_of_prompt", None
        place = tier, prompt[: depth + 1]
        if place in self.held():  # behind blocks of lower tiers only
            return "not_reusable", None
        return self.last_changes.get(place) or ("never_stored", None)

    def is_left_in_doubt(self, prompt: Path, tier: int, depth: int) -> bool:
        """Returns whether the prompt leaves, or ends in, a cleared run that reaches beyond a block.

        Then the chronicle may not know the reason for that block.
        """
        return any(
            len(run) > depth
            and run != prompt[: len(run)]
            and run[0] == prompt[0]
            and any(cleared == tier and at >= stored for cleared, at in self.clears)
            for kind, run, stored in self.runs
            if kind == tier
        )


class Twin:
    """An index with a chronicle, and the model of its ranks."""

    def __init__(self, seed: int, capacity: int = 10_000) -> None:
        self.chance = Random(seed)
        self.chronicle = Chronicle(capacity)
        self.index = PrefixIndex(16, IngestStats(), chronicle=self.chronicle)
        self.workers: dict[int, Worker] = {}
        self.ranks = {place: Remembered() for place in RANKS}
        self.now = 0.0
        for worker_id, dp_rank in RANKS:
            worker = self.workers.get(worker_id) or self.index.add_worker(worker_id)
            self.workers[worker_id] = worker
            worker.register(dp_rank)

    def path(self) -> Path:
        depth = self.chance.randint(1, DEEPEST)
        return tuple(100 * at + self.chance.randrange(BLOCKS) for at in range(depth))

    def step(self) -> None:
        self.now += 1.0
        self.chronicle.set_time(self.now)
        place = self.chance.choice(RANKS)
        worker, model = self.workers[place[0]], self.ranks[place]
        before = model.held()
        kind = self.chance.choices(("store", "drop", "clear", "named"), (6, 8, 1, 2))[0]
        tier = self.chance.choice((0, 0, 0, 1, 2, 3))
        held = sorted(before)
        if kind == "store":
            self.store(worker, place[1], model, tier)
        elif kind == "drop" and held:
            tier, path = self.chance.choice(held)
            worker.drop(place[1], [name_of(path)], tier)
            model.rank.drop(name_of(path), tier)
        elif kind == "named" and held:
            _, path = self.chance.choice(held)
            worker.store_named(place[1], [name_of(path)], tier, offload=False)
            model.rank.store_named([name_of(path)], tier)
        elif kind == "clear" and self.chance.random() < 0.5:
            tiers = self.chance.choice(({0}, {1}, {0, 1, 2, 3}))
            for each in tiers:
                model.clears.append((each, self.now))
            worker.clear(place[1], None if len(tiers) == TIERS else min(tiers))
            model.rank.clear(tiers)
        model.note(before, "cleared" if kind == "clear" else "evicted", self.now)

    def store(self, worker: Worker, dp_rank: int, model: Remembered, tier: int) -> None:
        path = self.path()
        known = {name.path for name in model.rank.names.values()}
        begin = max((at for at in range(len(path)) if path[:at] in known or at == 0), default=0)
        begin = self.chance.choice((0, begin))
        names = [name_of(path[: at + 1]) for at in range(begin, len(path))]
        parent = name_of(path[:begin]) if begin else None
        worker.store(dp_rank, names, list(path[begin:]), parent, tier)
        model.rank.store(names, list(path[begin:]), parent, tier)
        model.runs.append((tier, path, self.now))

    def trace(self, prompt: Path, slice_: int = 10_000) -> dict[tuple[int | str, int], Traced]:
        trace = Trace(self.index, packed(prompt), None, MOST)
        for worker_id, dp_rank in RANKS:
            trace.add(self.workers[worker_id], dp_rank)
        while trace.advance(slice_):
            pass
        assert trace.left_out == 0
        return trace.rows()


@pytest.mark.slow("a random life of three ranks for each seed")
@pytest.mark.parametrize("seed", range(scaled(12)))
def test_why_it_ends_agrees_with_the_model(seed: int) -> None:
    twin = Twin(seed)
    doubts = announced = 0
    for _ in range(40):
        for _ in range(5):
            twin.step()
        twin.index.sweep(10_000)
        twin.index.verify()
        prompt = twin.path()
        rows = twin.trace(prompt, slice_=twin.chance.choice((1, 7, 10_000)))
        for place, model in twin.ranks.items():
            row = rows[place]
            device, host, deepest = model.rank.depths(list(prompt))
            assert (row.tiers[0].depth, row.tiers[1].depth, row.tiers[3].depth) == (
                *(device, host, deepest),
            )
            assert row.all.depth == deepest
            for tier, end in enumerate(row.tiers):
                expected = model.why(prompt, tier, end.depth)
                announced += 1
                if end.why == "unknown":
                    assert model.is_left_in_doubt(prompt, tier, end.depth)
                    doubts += 1
                else:
                    assert (end.why, end.at) == expected
            check_all(model, prompt, row)
    assert doubts < announced / 10


def check_all(model: Remembered, prompt: Path, row: Traced) -> None:
    """Checks the end across all tiers: its reason is the last loss on any tier, if there is one."""
    reasons = [model.why(prompt, tier, row.all.depth) for tier in range(TIERS)]
    if row.all.depth == len(prompt):
        assert row.all.why == "end_of_prompt"
        return
    if any(why == "not_reusable" for why, _ in reasons):
        assert row.all.why == "not_reusable"
        return
    lost = [at for _, at in reasons if at is not None]
    if row.all.at is not None:
        assert (row.all.why, row.all.at) in reasons
    if row.all.why == "never_stored":
        assert not lost
    if lost and row.all.why != "unknown":
        assert row.all.at is not None and row.all.at <= max(lost)


def cold_index(capacity: int = 100) -> tuple[PrefixIndex, Worker, Chronicle]:
    chronicle = Chronicle(capacity)
    index = PrefixIndex(16, IngestStats(), chronicle=chronicle)
    worker = index.add_worker(1)
    worker.register(0)
    return index, worker, chronicle


def traced(index: PrefixIndex, worker: Worker, prompt: list[int], most: int = MOST) -> Trace:
    trace = Trace(index, packed(prompt), None, most)
    trace.add(worker, 0)
    while trace.advance(1000):
        pass
    return trace


def ended(index: PrefixIndex, worker: Worker, prompt: list[int]) -> tuple[int, str, float | None]:
    end = traced(index, worker, prompt).rows()[1, 0].all
    return end.depth, end.why, end.at


def test_a_block_lives() -> None:
    index, worker, chronicle = cold_index()
    assert ended(index, worker, [1, 2]) == (0, "never_stored", None)
    chronicle.set_time(1.0)
    worker.store(0, [11, 12], [1, 2])
    assert ended(index, worker, [1, 2]) == (2, "end_of_prompt", None)
    assert ended(index, worker, [1, 2, 3]) == (2, "never_stored", None)
    chronicle.set_time(2.5)
    worker.drop(0, [12])
    assert ended(index, worker, [1, 2, 3]) == (1, "evicted", 2.5)
    worker.store(0, [12], [2], 11)
    assert ended(index, worker, [1, 2, 3]) == (2, "never_stored", None)
    chronicle.set_time(3.0)
    worker.clear(0)
    assert ended(index, worker, [1, 2]) == (0, "cleared", 3.0)
    happened = traced(index, worker, [1, 2]).happened()
    assert [(each.kind, each.begin, each.end, each.at) for each in happened] == [
        ("stored", 0, 2, 1.0),
        ("evicted", 1, 2, 2.5),
        ("stored", 1, 2, 2.5),
        ("cleared", 0, 0, 3.0),
    ]


def test_a_restarted_engine_has_lost_what_it_held() -> None:
    index, worker, chronicle = cold_index()
    worker.store(0, [11], [1])
    chronicle.set_time(4.0)
    worker.stream(0).clear()
    assert ended(index, worker, [1]) == (0, "restarted", 4.0)
    assert ended(index, worker, [5]) == (0, "never_stored", None)


def test_what_was_overwritten_is_not_known() -> None:
    index, worker, chronicle = cold_index(4)
    worker.store(0, [11], [1])
    worker.drop(0, [11])
    assert ended(index, worker, [1]) == (0, "evicted", 0.0)
    for name in range(20, 23):
        worker.store(0, [name], [name])
    assert (chronicle.capacity, chronicle.noted, chronicle.overwritten) == (4, 5, 1)
    assert ended(index, worker, [1]) == (0, "evicted", 0.0)  # though its store is overwritten
    worker.store(0, [23], [23])
    assert ended(index, worker, [1]) == (0, "unknown", None)
    quiet = index.add_worker(2)
    quiet.register(0)
    trace = Trace(index, packed([1]), None, MOST)
    trace.add(quiet, 0)
    trace.advance(1000)
    assert trace.rows()[2, 0].all.why == "never_stored"  # whatever other ranks do


def test_equal_blocks_behind_other_prompts_are_others() -> None:
    index, worker, _ = cold_index()
    worker.store(0, [11, 12], [1, 5])
    worker.store(0, [21], [2])
    worker.drop(0, [12])
    assert ended(index, worker, [1, 5]) == (1, "evicted", 0.0)
    assert ended(index, worker, [2, 5]) == (1, "never_stored", None)


def test_blocks_are_told_apart_in_long_chains() -> None:
    index, worker, _ = cold_index()
    blocks = list(range(1, 41))
    worker.store(0, [1000 + each for each in blocks], blocks)
    worker.store(0, [2000], [99], 1020)  # splits the chain
    worker.drop(0, [1000 + each for each in reversed(blocks[10:])])
    assert ended(index, worker, blocks) == (10, "evicted", 0.0)
    other = [*blocks[:10], 77]
    assert ended(index, worker, other) == (10, "never_stored", None)
    index.verify()


def test_a_prompt_that_leaves_a_cleared_run_is_in_doubt_behind_it() -> None:
    index, worker, _ = cold_index()
    worker.store(0, [11, 12, 13], [1, 2, 3])
    worker.clear(0)
    worker.store(0, [11], [1])
    assert ended(index, worker, [1, 2, 3])[:2] == (1, "cleared")
    assert ended(index, worker, [1, 7, 3])[:2] == (1, "unknown")


def test_a_prompt_held_in_part_by_lower_tiers() -> None:
    index, worker, _ = cold_index()
    worker.store(0, [11, 12], [1, 2])
    worker.store(0, [11, 12, 13], [1, 2, 3], tier=1)
    worker.drop(0, [12])
    row = traced(index, worker, [1, 2, 3, 4]).rows()[1, 0]
    assert [(end.depth, end.why) for end in row.tiers] == [
        (1, "evicted"),
        (3, "never_stored"),
        (3, "never_stored"),
        (3, "never_stored"),
    ]


def test_the_newest_steps_are_kept() -> None:
    index, worker, chronicle = cold_index()
    for at in range(10):
        chronicle.set_time(float(at))
        worker.store(0, [11], [1])
        worker.drop(0, [11])
    trace = traced(index, worker, [1], most=3)
    assert trace.left_out == 17
    assert [(each.kind, each.at) for each in trace.happened()] == [
        ("evicted", 8.0),
        ("stored", 9.0),
        ("evicted", 9.0),
    ]


def test_without_a_chronicle_nothing_is_known() -> None:
    index = PrefixIndex(16, IngestStats())
    worker = index.add_worker(1)
    worker.register(0)
    assert ended(index, worker, [1]) == (0, "unknown", None)
    assert ended(index, worker, []) == (0, "end_of_prompt", None)


def test_bounds() -> None:
    with pytest.raises(ValueError, match="room for at least one change"):
        Chronicle(0)
    assert BYTES_A_CHANGE == 32
    index, worker, _ = cold_index()
    with pytest.raises(ValueError, match="as many salted hashes"):
        Trace(index, packed([1]), packed([1, 2]), 1)
    with pytest.raises(KeyError):
        Trace(index, packed([1]), None, 1).add(worker, 5)


def test_a_prompt_is_recalled_as_far_as_the_tree_goes() -> None:
    index, worker, _ = cold_index()
    prompt = list(range(1, 12))
    sequences = packed(sequence_hashes(prompt))
    assert recalled(index, sequences) == b""
    worker.store(0, [100 + each for each in prompt[:8]], prompt[:8])
    worker.store(0, [300], [77], 104)  # another continuation
    assert recalled(index, sequences) == packed(prompt[:8])
    other = [*prompt[:4], 77, 78]
    assert recalled(index, packed(sequence_hashes(other))) == packed(other[:5])
