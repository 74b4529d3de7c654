"""Predicted blocks beside blocks from events, by example and against a model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from kvd_core.base.hashing import sequence_hashes
from kvd_core.index.prefix_index import IngestStats, PrefixIndex, Worker
from kvd_core.ledger.ledger import Ledger
from kvd_core.selector.selector import Candidate, Pool
from kvd_core.selector.settings import Settings
from tests.support.budget import scaled
from tests.support.hashes import packed

TTL_S = 10.0
DEFAULTS = Settings()


class Fleet:
    """Workers 0, 1, ... with one rank each; prompts are lists of local hashes."""

    def __init__(
        self,
        ranks: int = 2,
        max_entries: int = 1000,
        ratio: float = 0.5,
        bound: float = math.inf,
    ) -> None:
        self.now = 0.0
        self.index = PrefixIndex(4, IngestStats())
        self.index.predict(TTL_S, max_entries, ratio)
        self.workers: list[Worker] = []
        self.ledger = ledger = Ledger()
        candidates = []
        for number in range(ranks):
            worker = self.index.add_worker(number)
            worker.register(0)
            self.workers.append(worker)
            candidates.append(Candidate(number, 0, worker, ledger.add_rank(number, 0)))
        self.pool = Pool(self.index, ledger, 4, candidates, None, bound)

    def match(self, prompt: list[int]) -> None:
        self.pool.match(packed(prompt), packed(prompt), 4 * len(prompt))

    def reserve(self, rank: int, prompt: list[int]) -> None:
        self.match(prompt)
        self.pool.predict(rank, self.now)

    def withdraw(self, rank: int, prompt: list[int], then: float | None = None) -> None:
        self.match(prompt)
        self.pool.withdraw(rank, self.now if then is None else then)

    def device(self, prompt: list[int]) -> list[int]:
        self.match(prompt)
        return [each.device_blocks for each in self.pool.explain(DEFAULTS)]

    def store(self, rank: int, prompt: list[int], tier: int = 0) -> None:
        self.workers[rank].store(0, sequence_hashes(prompt), prompt, None, tier)

    def drop(self, rank: int, prompt: list[int], *blocks: int) -> None:
        names = sequence_hashes(prompt)
        self.workers[rank].drop(0, [names[at] for at in blocks])


def test_a_booked_prompt_counts_on_its_rank() -> None:
    fleet = Fleet()
    fleet.reserve(1, [1, 2, 3])
    assert fleet.device([1, 2, 3, 4]) == [0, 3]
    assert fleet.device([1, 2]) == [0, 2]
    assert fleet.device([2, 3]) == [0, 0]
    assert fleet.index.predicted() == 3


def test_predictions_are_in_no_other_answer() -> None:
    fleet = Fleet()
    before = fleet.index.dump().read(1 << 20), fleet.index.stats()["held"]
    fleet.reserve(1, [1, 2, 3])
    assert (fleet.index.dump().read(1 << 20), fleet.index.stats()["held"]) == before
    assert fleet.index.match([1, 2, 3]) == ({}, [])
    assert fleet.index.stats()["blocks"] == 0


def test_the_larger_depth_counts() -> None:
    fleet = Fleet()
    fleet.reserve(0, [1, 2, 3])
    fleet.store(0, [1, 2])
    assert fleet.device([1, 2, 3, 4]) == [3, 0]
    fleet.store(0, [1, 2, 3, 4])
    assert fleet.device([1, 2, 3, 4, 5]) == [4, 0]


def test_what_events_tell_is_not_predicted() -> None:
    fleet = Fleet()
    fleet.store(0, [1, 2])
    fleet.reserve(0, [1, 2, 3])
    assert fleet.index.predicted() == 1
    assert fleet.device([1, 2, 3]) == [3, 0]
    fleet.drop(0, [1, 2, 3], 1)
    assert fleet.device([1, 2, 3]) == [1, 0]


def test_beyond_the_bound_only_events_count() -> None:
    fleet = Fleet(bound=1.25)
    fleet.store(0, [1])
    for rank in (0, 1):
        fleet.reserve(rank, [1, 2, 3])
    for number in range(3):  # the mean is 1.5 requests, which allows 3.125
        fleet.ledger.add(f"{number}", 0, b"", 1, 0.0)
    assert fleet.device([1, 2, 3]) == [3, 3]
    fleet.ledger.add("another", 0, b"", 1, 0.0)
    assert fleet.device([1, 2, 3]) == [1, 3]
    fleet.ledger.free("another")
    assert fleet.device([1, 2, 3]) == [3, 3]


def test_lower_tiers_keep_their_depth() -> None:
    fleet = Fleet(1)
    prompt = [1, 2, 3, 4, 5]
    fleet.store(0, prompt[:1])
    names = sequence_hashes(prompt)
    fleet.workers[0].store(0, names[1:3], prompt[1:3], names[0], 1)
    fleet.workers[0].store(0, names[3:4], prompt[3:4], names[2], 2)
    fleet.match(prompt)
    row = fleet.pool.explain(DEFAULTS)[0]
    assert (row.device_blocks, row.host_blocks, row.disk_blocks) == (1, 2, 1)
    fleet.reserve(0, prompt[:2])
    fleet.match(prompt)
    row = fleet.pool.explain(DEFAULTS)[0]
    assert (row.device_blocks, row.host_blocks, row.disk_blocks) == (2, 1, 1)
    fleet.reserve(0, prompt)
    fleet.match(prompt)
    row = fleet.pool.explain(DEFAULTS)[0]
    assert (row.device_blocks, row.host_blocks, row.disk_blocks) == (5, 0, 0)


def test_an_eviction_ends_a_prediction() -> None:
    fleet = Fleet()
    for rank in (0, 1):
        fleet.reserve(rank, [1, 2, 3])
    fleet.store(0, [1, 2, 3])
    fleet.drop(0, [1, 2, 3], 2)
    assert fleet.device([1, 2, 3]) == [2, 3]
    fleet.drop(0, [1, 2, 3], 1)
    assert fleet.device([1, 2, 3]) == [1, 3]


def test_an_eviction_of_a_lower_tier_ends_none() -> None:
    fleet = Fleet(1)
    fleet.reserve(0, [1, 2])
    fleet.store(0, [1, 2], tier=1)
    fleet.workers[0].drop(0, sequence_hashes([1, 2]), 1)
    assert fleet.device([1, 2]) == [2]


def test_a_block_evicted_behind_another_prompt_ends_one_too() -> None:
    fleet = Fleet(1)
    fleet.reserve(0, [1, 2, 3])
    fleet.store(0, [7, 2])
    fleet.drop(0, [7, 2], 1)
    assert fleet.device([1, 2, 3]) == [1]


def test_a_removal_that_leaves_a_copy_ends_none() -> None:
    fleet = Fleet(1)
    fleet.reserve(0, [1, 2])
    for _ in range(2):
        fleet.store(0, [1])
        names = sequence_hashes([1, 2])
        fleet.workers[0].store(0, names[1:], [2], names[0])
    fleet.drop(0, [1, 2], 1)
    assert fleet.device([1, 2]) == [2]
    fleet.drop(0, [1, 2], 1)
    assert fleet.device([1, 2]) == [1]


def test_cleared_and_removed_ranks_lose_theirs() -> None:
    fleet = Fleet(3)
    for rank in range(3):
        fleet.reserve(rank, [1, 2])
    fleet.workers[0].clear(0)
    fleet.workers[1].clear(0, 1)  # another tier
    stream = fleet.workers[2].stream(0)
    stream.clear()
    assert fleet.device([1, 2]) == [0, 2, 0]
    fleet.reserve(0, [1])
    assert fleet.device([1, 2]) == [1, 2, 0]
    fleet.workers[1].unregister(0)
    while fleet.index.sweep(1000):
        pass
    fleet.workers[1].register(0)  # may reuse the old rank's slot, but has none of its blocks
    assert fleet.device([1, 2]) == [1, 0, 0]
    fleet.index.verify()


def test_they_end_with_their_time_the_oldest_first() -> None:
    fleet = Fleet(1)
    fleet.reserve(0, [1, 2])
    fleet.now = 4.0
    fleet.reserve(0, [3, 4])
    fleet.now = 5.0
    fleet.reserve(0, [1])  # renews its prediction
    assert not fleet.index.forget_predicted(TTL_S - 0.1, 10)
    assert fleet.index.predicted() == 4
    assert not fleet.index.forget_predicted(TTL_S, 10)
    assert fleet.device([1, 2]) == [1]
    assert fleet.index.forget_predicted(TTL_S + 4, 1)  # [3, 4], its deepest block first
    assert fleet.device([3, 4]) == [1]
    assert not fleet.index.forget_predicted(TTL_S + 5, 10)
    assert fleet.index.predicted() == 0


def test_too_many_make_the_oldest_go() -> None:
    fleet = Fleet(1, max_entries=10, ratio=0.5)
    for number in range(10):
        fleet.reserve(0, [100 + number])
    assert fleet.index.predicted() == 10
    fleet.reserve(0, [200])
    while fleet.index.forget_predicted(0.0, 2):
        pass
    assert fleet.index.predicted() == 5
    assert [fleet.device([at]) for at in (104, 105, 106, 109, 200)] == [[0], [0], [1], [1], [1]]


def test_evictions_make_fewer_go_because_of_too_many() -> None:
    fleet = Fleet(1, max_entries=10, ratio=0.5)
    for number in range(11):  # the last one ends the two oldest; four more have to go
        fleet.reserve(0, [100 + number])
    assert fleet.index.predicted() == 9
    for local in (102, 103, 104):
        fleet.store(0, [local])
        fleet.drop(0, [local], 0)
    assert fleet.index.predicted() == 6
    assert not fleet.index.forget_predicted(0.0, 10)
    assert fleet.index.predicted() == 5
    fleet.index.verify()


def test_a_longer_prompt_than_there_is_room_for_counts_in_part() -> None:
    fleet = Fleet(1, max_entries=4, ratio=1.0)
    fleet.reserve(0, list(range(1, 9)))
    assert fleet.index.predicted() == 4
    assert fleet.device(list(range(1, 9))) == [4]


def test_a_prompt_that_repeats_a_block() -> None:
    fleet = Fleet(1)
    fleet.reserve(0, [5] * 100)
    assert fleet.device([5] * 200) == [100]
    fleet.store(0, [5])
    fleet.drop(0, [5], 0)  # ends 64 predictions; the deepest were noted first
    assert fleet.index.predicted() == 36
    assert fleet.device([5] * 200) == [0]


def test_a_refused_prompt_leaves_no_prediction() -> None:
    fleet = Fleet()
    fleet.reserve(1, [1, 2])
    fleet.now = 1.0
    fleet.store(1, [1])
    fleet.reserve(1, [1, 2, 3, 4])
    fleet.withdraw(1, [1, 2, 3, 4])
    assert fleet.device([1, 2, 3, 4]) == [0, 2]  # an earlier prompt predicts the second block
    for _ in range(2):
        fleet.reserve(1, [5, 6])
        fleet.withdraw(1, [5, 6])
        assert fleet.index.predicted() == 2
    fleet.reserve(1, [5, 6, 7])
    then, fleet.now = fleet.now, 2.0
    fleet.reserve(1, [5, 6, 8])
    fleet.withdraw(1, [5, 6, 7], then)
    assert fleet.device([5, 6, 7]) == [0, 2]  # a later prompt does
    assert fleet.device([5, 6, 8]) == [0, 3]
    fleet.withdraw(0, [5, 6, 8])
    assert fleet.device([5, 6, 8]) == [0, 3]
    fleet.index.verify()


def test_without_predictions_nothing_is_kept() -> None:
    index = PrefixIndex(4, IngestStats())
    worker = index.add_worker(1)
    worker.register(0)
    ledger = Ledger()
    pool = Pool(index, ledger, 4, [Candidate(1, 0, worker, ledger.add_rank(1, 0))])
    pool.match(packed([1]), packed([1]), 4)
    pool.predict(0, 0.0)
    assert index.predicted() == 0
    assert not index.forget_predicted(1e9, 10)
    pool.match(packed([1]), packed([1]), 4)
    assert pool.explain(DEFAULTS)[0].device_blocks == 0


@dataclass
class Model:
    """Predictions as a plain dictionary."""

    expiries: dict[tuple[int, tuple[int, ...]], float] = field(default_factory=dict)

    def reserve(self, rank: int, prompt: list[int], now: float) -> None:
        for depth in range(1, len(prompt) + 1):
            self.expiries[rank, tuple(prompt[:depth])] = now + TTL_S
        self.expire(now)

    def expire(self, now: float) -> None:
        self.expiries = {key: at for key, at in self.expiries.items() if at > now}

    def evict(self, rank: int, local: int) -> None:
        self.expiries = {
            key: at for key, at in self.expiries.items() if (key[0], key[1][-1]) != (rank, local)
        }

    def forget(self, rank: int) -> None:
        self.expiries = {key: at for key, at in self.expiries.items() if key[0] != rank}

    def reach(self, rank: int, prompt: list[int], depth: int) -> int:
        while depth < len(prompt) and (rank, tuple(prompt[: depth + 1])) in self.expiries:
            depth += 1
        return depth


PROMPTS = st.lists(st.integers(1, 4), min_size=1, max_size=5)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(("book", "book", "store", "evict", "clear", "wait")),
        st.integers(0, 2),
        PROMPTS,
    ),
    max_size=40,
)


@settings(max_examples=scaled(30))
@given(STEPS)
def test_it_does_what_the_model_does(steps: list[tuple[str, int, list[int]]]) -> None:
    fleet = Fleet(3)
    model = Model()
    held: list[set[tuple[int, ...]]] = [set(), set(), set()]
    for step, rank, prompt in steps:
        if step == "book":
            fleet.reserve(rank, prompt)
            model.reserve(rank, prompt, fleet.now)
        elif step == "store":
            fleet.store(rank, prompt)
            held[rank] |= {tuple(prompt[:depth]) for depth in range(1, len(prompt) + 1)}
        elif step == "evict":
            # Evict only leaves, and none with a second copy.
            if tuple(prompt) in held[rank] and len(prompt) > 1:
                fleet.workers[rank].clear(0)
                held[rank].clear()
                model.forget(rank)
                fleet.store(rank, prompt)
                fleet.drop(rank, prompt, len(prompt) - 1)
                held[rank] |= {tuple(prompt[:depth]) for depth in range(1, len(prompt))}
                model.evict(rank, prompt[-1])
        elif step == "clear":
            fleet.workers[rank].clear(0)
            held[rank].clear()
            model.forget(rank)
        else:
            fleet.now += 3.0
            fleet.index.forget_predicted(fleet.now, 1000)
            model.expire(fleet.now)
        wanted = []
        for number in range(3):
            depth = 0
            while depth < len(prompt) and tuple(prompt[: depth + 1]) in held[number]:
                depth += 1
            wanted.append(model.reach(number, prompt, depth))
        assert fleet.device(prompt) == wanted
    fleet.index.verify()
