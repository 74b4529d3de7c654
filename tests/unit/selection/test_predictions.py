"""Predicted blocks against a list that is searched anew for every question."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvd.selection.predictions import Predictions

TTL = 10.0
MAX_BLOCKS = 12
RATIO = 0.5
RANKS = ("a", "b")

# Prompts as paths: a block is named by the whole of its prefix.
PATHS = st.lists(st.integers(1, 2), max_size=5)
STEPS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(RANKS), PATHS),
    st.tuples(st.just("wait"), st.sampled_from([0.0, 1.0, 4.0, 10.0])),
    st.tuples(st.just("outdated"), st.integers(1, 6)),
    st.tuples(st.just("forget"), st.sets(st.sampled_from(RANKS))),
)


def names(path: list[int]) -> list[int]:
    """Rolling names of a path's blocks, the root's first."""
    rolling = [0]
    for step in path:
        rolling.append(rolling[-1] * 3 + step)
    return rolling[1:]


class Model:
    """Blocks as (rank, name, expiry), in order of booking, the deepest of each booking first."""

    def __init__(self) -> None:
        self.blocks: list[tuple[str, int, float]] = []
        self.excess = 0

    def known(self, rank: str) -> set[int]:
        return {name for of, name, _ in self.blocks if of == rank}

    def add(self, rank: str, path: list[int], now: float) -> int:
        known = len(self.known(rank).intersection(path))
        self.blocks = [
            block for block in self.blocks if not (block[0] == rank and block[1] in path)
        ]
        self.blocks += [(rank, name, now + TTL) for name in reversed(path)]
        return known

    def outdated(self, now: float, limit: int) -> list[tuple[str, int]]:
        if len(self.blocks) > MAX_BLOCKS:
            self.excess = len(self.blocks) - int(MAX_BLOCKS * RATIO)
        due = max(sum(expiry <= now for *_, expiry in self.blocks), self.excess)
        gone = self.blocks[: min(due, limit)]
        self.blocks = self.blocks[len(gone) :]
        self.excess = max(0, self.excess - len(gone))
        return [(rank, name) for rank, name, _ in gone]

    def forget(self, ranks: set[str]) -> None:
        self.blocks = [block for block in self.blocks if block[0] not in ranks]
        self.excess = min(self.excess, max(0, len(self.blocks) - int(MAX_BLOCKS * RATIO)))


@given(st.lists(STEPS, max_size=40))
def test_any_row_of_steps_goes_as_with_a_list(steps: list[tuple[Any, ...]]) -> None:
    predictions: Predictions[str] = Predictions(TTL, MAX_BLOCKS, RATIO)
    model = Model()
    now = 100.0
    for kind, *rest in steps:
        if kind == "add":
            path = names(rest[1])
            assert predictions.add(rest[0], path, now) == model.add(rest[0], path, now)
        elif kind == "wait":
            now += rest[0]
        elif kind == "outdated":
            assert predictions.outdated(now, rest[0]) == model.outdated(now, rest[0])
        else:
            predictions.forget(rest[0])
            model.forget(rest[0])
        assert len(predictions) == len(model.blocks)
        for rank in RANKS:
            check_prefixes(model.known(rank))


def check_prefixes(known: set[int]) -> None:
    """Of every block that is known all before it are."""
    assert all((name - 1) // 3 in known for name in known if name > 2)


def all_outdated(predictions: Predictions[str], now: float, limit: int = 64) -> list[int]:
    gone = [name for _, name in predictions.outdated(now, limit)]
    assert predictions.outdated(now, limit) == [] or len(gone) == limit
    return gone


def test_blocks_live_as_long_as_they_are_sent_again() -> None:
    predictions: Predictions[str] = Predictions(10.0, 100, 0.8)
    assert predictions.add("a", [1, 2, 3], 0.0) == 0
    assert predictions.add("a", [1, 2], 6.0) == 2
    assert all_outdated(predictions, 9.9) == []
    assert all_outdated(predictions, 10.0) == [3]
    assert all_outdated(predictions, 15.9) == []
    assert all_outdated(predictions, 16.0) == [2, 1]


def test_too_many_go_down_to_the_ratio_and_the_deepest_first() -> None:
    predictions: Predictions[str] = Predictions(10.0, 10, 0.8)
    predictions.add("a", list(range(10)), 0.0)
    assert all_outdated(predictions, 1.0) == []
    predictions.add("b", [0], 0.0)
    assert all_outdated(predictions, 1.0) == [9, 8, 7]
    assert len(predictions) == 8


def test_what_is_too_much_goes_in_slices() -> None:
    predictions: Predictions[str] = Predictions(10.0, 10, 0.5)
    predictions.add("a", list(range(11)), 0.0)
    slices = [len(predictions.outdated(1.0, 4)) for _ in range(3)]
    assert slices == [4, 2, 0] and len(predictions) == 5


def test_a_rank_that_goes_takes_its_excess_along() -> None:
    predictions: Predictions[str] = Predictions(10.0, 10, 0.5)
    predictions.add("a", list(range(8)), 0.0)
    predictions.add("b", list(range(5)), 0.0)
    assert len(predictions.outdated(1.0, 1)) == 1  # of eight
    predictions.forget({"a"})
    assert predictions.outdated(1.0, 64) == [] and len(predictions) == 5


def test_a_time_to_live_of_zero_keeps_nothing() -> None:
    predictions: Predictions[str] = Predictions(0.0, 10, 0.5)
    predictions.add("a", [1, 2], 5.0)
    assert all_outdated(predictions, 5.0) == [2, 1]
