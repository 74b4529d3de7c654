"""Predicted blocks of ranks without events, against a list that is searched for every question."""

from __future__ import annotations

from itertools import count
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvd_core.base.hashing import sequence_hashes
from kvd_core.index.predictions import Predictions
from kvd_core.index.prefix_index import IngestStats, PrefixIndex
from kvd_core.ledger.ledger import Ledger
from kvd_core.selector.selector import Candidate, Pool
from kvd_core.selector.settings import Settings
from tests.support.budget import scaled
from tests.support.hashes import packed

TTL_S = 10.0
MAX_BLOCKS = 12
RATIO = 0.5
DEFAULTS = Settings()
RANKS = (0, 1)

PATHS = st.lists(st.integers(1, 2), max_size=5)
STEPS = st.one_of(
    st.tuples(st.just("book"), st.sampled_from(RANKS), PATHS),
    st.tuples(st.just("wait"), st.sampled_from([0.0, 1.0, 4.0, 10.0])),
    st.tuples(st.just("prune"), st.integers(1, 6)),
    st.tuples(st.just("forget"), st.sampled_from(RANKS)),
)


class Fleet:
    """Workers 0 and 1 with one rank each, and no events."""

    def __init__(self, ttl_s: float = TTL_S, max_blocks: int = MAX_BLOCKS) -> None:
        self.predictions = Predictions(ttl_s, max_blocks, RATIO)
        ledger = Ledger()
        for _ in range(7):  # so that ranks and workers have different numbers
            ledger.add_rank(100, _)
        self.ranks = [ledger.add_rank(worker, 0) for worker in RANKS]
        candidates = [Candidate(worker, 0, None, self.ranks[worker]) for worker in RANKS]
        self.pool = Pool(None, ledger, 4, candidates, self.predictions)

    def match(self, path: list[int]) -> None:
        self.pool.match(packed(path), packed(sequence_hashes(path)), 4 * len(path))

    def reserve(self, rank: int, path: list[int], now: float) -> None:
        self.match(path)
        self.pool.predict(rank, now)

    def reach(self, path: list[int]) -> list[int]:
        self.match(path)
        return [each.device_blocks for each in self.pool.explain(DEFAULTS)]


class Model:
    """Blocks as (rank, path, expiry), in order of booking, the deepest of each booking first."""

    def __init__(self) -> None:
        self.blocks: list[tuple[int, tuple[int, ...], float]] = []
        self.excess = 0
        self.gone = count(100)  # names for forgotten ranks

    def reserve(self, rank: int, path: list[int], now: float) -> None:
        depths = [tuple(path[:depth]) for depth in range(1, min(len(path), MAX_BLOCKS) + 1)]
        self.blocks = [each for each in self.blocks if each[0] != rank or each[1] not in depths]
        self.blocks += [(rank, depth, now + TTL_S) for depth in reversed(depths)]
        if len(self.blocks) > MAX_BLOCKS:
            self.excess = len(self.blocks) - int(MAX_BLOCKS * RATIO)
        self.prune(now, 2 * len(depths))

    def prune(self, now: float, limit: int) -> bool:
        due = max(sum(expiry <= now for *_, expiry in self.blocks), self.excess)
        gone = min(due, limit)
        self.blocks = self.blocks[gone:]
        self.excess = max(0, self.excess - gone)
        return due > gone

    def forget(self, rank: int) -> None:
        name = next(self.gone)
        self.blocks = [(name if of == rank else of, *rest) for of, *rest in self.blocks]  # type: ignore[misc]

    def reach(self, path: list[int]) -> list[int]:
        known = {(rank, of) for rank, of, _ in self.blocks}
        depths = range(len(path))
        missing = [
            [depth for depth in depths if (rank, tuple(path[: depth + 1])) not in known]
            for rank in RANKS
        ]
        return [min(each, default=len(path)) for each in missing]


@settings(max_examples=scaled(30))
@given(st.lists(STEPS, max_size=40))
def test_they_are_what_the_model_says(steps: list[tuple[Any, ...]]) -> None:
    fleet, model, now = Fleet(), Model(), 100.0
    asked: list[list[int]] = [[]]
    for kind, *what in steps:
        if kind == "book":
            fleet.reserve(*what, now)
            model.reserve(*what, now)
            asked = [*asked, what[1] + [1], what[1][:2]]
        elif kind == "wait":
            now += what[0]
        elif kind == "prune":
            assert fleet.predictions.prune(now, what[0]) == model.prune(now, what[0])
        else:
            fleet.predictions.forget(fleet.ranks[what[0]])
            model.forget(what[0])
        assert len(fleet.predictions) == len(model.blocks)
        for path in asked:
            assert fleet.reach(path) == model.reach(path)


def test_of_a_prompt_known_in_part_a_prefix_is_known() -> None:
    fleet = Fleet(max_blocks=4)
    fleet.reserve(0, [1, 2, 3], 0.0)
    fleet.reserve(0, [7, 8], 1.0)  # one block too many, so only two stay
    assert len(fleet.predictions) == 2
    assert [fleet.reach(path)[0] for path in ([1, 2, 3], [7, 8])] == [0, 2]


def test_a_time_to_live_of_zero_keeps_nothing() -> None:
    fleet = Fleet(ttl_s=0.0)
    fleet.reserve(0, [1, 2], 5.0)
    assert fleet.reach([1, 2]) == [0, 0] and len(fleet.predictions) == 0


def test_a_rank_that_is_not_heard_caches_nothing_until_it_is() -> None:
    fleet = Fleet()
    fleet.reserve(0, [1, 2], 5.0)
    for heard, depth in ((False, 0), (True, 2)):
        fleet.pool.set_heard(0, heard)
        assert fleet.reach([1, 2]) == [depth, 0]


def test_workers_with_and_without_events_stand_side_by_side() -> None:
    """One worker announces its blocks, the other's are predicted; the first has no predictions."""
    index, ledger = PrefixIndex(4, IngestStats()), Ledger()
    predictions = Predictions(TTL_S, MAX_BLOCKS, RATIO)
    announcing, silent = index.add_worker(1), None
    announcing.register(0)
    announcing.store(0, [1, 2], [1, 2])
    ranks = [ledger.add_rank(worker, 0) for worker in (1, 2)]
    candidates = [Candidate(1, 0, announcing, ranks[0]), Candidate(2, 0, silent, ranks[1])]
    pool = Pool(index, ledger, 4, candidates, predictions)

    def reach(path: list[int]) -> list[int]:
        pool.match(packed(path), packed(sequence_hashes(path)), 4 * len(path))
        return [each.device_blocks for each in pool.explain(DEFAULTS)]

    assert reach([1, 2, 3]) == [2, 0]
    for candidate in (0, 1):
        pool.predict(candidate, 5.0)
    assert reach([1, 2, 3]) == [2, 3]
    assert len(predictions) == 3
    index.predict(TTL_S, MAX_BLOCKS, RATIO)  # from now on also beside events
    pool.predict(0, 6.0)
    assert reach([1, 2, 3, 4]) == [3, 3]
    assert (len(predictions), index.predicted()) == (3, 1)  # announced blocks are not predicted
