"""Partitions come and go: their memory is freed, and leaving costs the same among many others."""

from __future__ import annotations

import gc
import sys
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest

from kvd.index.partitions import Partition, State
from kvd.model import PartitionKey, RankKey

KEY = PartitionKey("m", "default")
BLOCKS = 1000  # blocks of a prompt; a slice of a sweep frees fewer than a few prompts have


def filled(state: State, key: PartitionKey = KEY) -> Partition:
    """Returns a partition with one rank, whose cache has been cleared."""
    state.add_rank(RankKey(key, 1, 0), 16)
    partition = state.partitions[key]
    worker = partition.workers[1]
    for number in range(20):
        names = range(number * BLOCKS + 1, (number + 1) * BLOCKS + 1)
        worker.store(0, names, names)
    worker.clear(0)
    return partition


@pytest.mark.parametrize("others", [0, 3])
def test_a_partition_that_has_ended_is_freed_in_slices(others: int) -> None:
    """To free all of a large index at once would hold up the loop."""
    state = State()
    for number in range(others):
        state.add_rank(RankKey(PartitionKey(f"other {number}", "default"), 1, 0), 16)
    filled(state)
    assert state.sweep(10) and state.budget.blocks > 0
    state.remove_rank(RankKey(KEY, 1, 0))
    assert len(state.sized) == others
    gc.collect()
    left = [state.budget.blocks]
    while state.sweep(10):
        left.append(state.budget.blocks)
    assert left[0] > BLOCKS and left[-1] == 0
    assert all(before - after <= BLOCKS for before, after in pairwise(left))


def test_one_that_is_made_anew_during_a_sweep_is_swept() -> None:
    state = State()
    filled(state)
    assert state.sweep(10)
    state.remove_rank(RankKey(KEY, 1, 0))
    filled(state)
    while state.sweep(8192):
        pass
    gc.collect()
    assert state.budget.blocks == 0


def lines_of_leaving(ranks: int) -> int:
    """Returns how many lines of Python run when one of so many ranks leaves."""
    state = State()
    for number in range(ranks):
        state.add_rank(RankKey(KEY, number // 4, number % 4), 16)
    partition = state.partitions[KEY]
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        assert not state.strays(5, *KEY)
        assert partition.ranks_of(5, 2) == {2} and partition.ranks_of(5, None) == {0, 1, 2, 3}
        assert partition.has_rank(5, 2) and partition.is_registered(5)
        for dp_rank in range(4):
            state.remove_rank(RankKey(KEY, 5, dp_rank))
    finally:
        sys.settrace(before)
    assert not partition.is_registered(5) and not partition.ranks_of(5, None)
    return lines


def test_a_rank_leaves_a_crowd_as_quickly_as_a_few() -> None:
    assert lines_of_leaving(2000) == lines_of_leaving(40)
