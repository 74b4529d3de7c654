"""A budget of blocks: which stores are refused, what stays correct, what makes room again."""

from __future__ import annotations

import gc
from itertools import pairwise

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd_core.conductor.conductor import Conductor
from kvd_core.index.prefix_index import (
    NEW_RANK,
    NO_ROOM,
    Budget,
    IngestStats,
    PrefixIndex,
    Worker,
)

LIMIT = 200
RUN = 20  # blocks of a prompt


def make(budget: Budget) -> tuple[PrefixIndex, Worker]:
    index = PrefixIndex(1, IngestStats(), budget=budget)
    return index, index.add_worker(1)


def prompt(number: int) -> range:
    """Returns the names of one prompt's blocks, which are also their contents."""
    return range(number * 1000 + 1, number * 1000 + 1 + RUN)


def depth(index: PrefixIndex, number: int) -> int:
    depths, _ = index.match(prompt(number))
    return max((device for device, _, _ in depths.values()), default=0)


def sweep(*indexes: PrefixIndex) -> None:
    for index in indexes:
        while index.sweep(1000):
            pass
        index.verify()


def test_ten_times_as_many_are_refused_and_what_is_held_stays_right() -> None:
    budget = Budget(LIMIT)
    index, worker = make(budget)
    prompts = 10 * LIMIT // RUN
    kept = [number for number in range(prompts) if worker.store(0, prompt(number), prompt(number))]
    assert kept == list(range(LIMIT // RUN))
    assert (budget.blocks, budget.pairs, budget.refused) == (LIMIT, LIMIT, 9 * LIMIT)
    assert [depth(index, number) for number in range(prompts)] == [RUN] * 10 + [0] * 90
    index.verify()
    worker.drop(0, prompt(3))
    assert worker.store(0, prompt(50), prompt(50))
    assert (depth(index, 3), depth(index, 50), budget.blocks) == (0, RUN, LIMIT)
    assert not worker.store(0, prompt(51), prompt(51))


def test_what_is_told_again_needs_no_room() -> None:
    budget = Budget(RUN)
    index, worker = make(budget)
    names = prompt(0)
    assert worker.store(0, names, names)
    assert worker.store(0, names, names)
    assert worker.store(0, names[-1:], names[-1:], names[-2])  # a second copy
    assert worker.store_named(0, names[:2], 1)  # held on the host as well
    worker.drop(0, names)
    index.verify()
    assert index.stats()["copies"] == 1 and budget.refused == 0
    assert not worker.store_named(0, [999], 1)  # nothing is parked, either
    assert (index.stats()["parked_now"], budget.refused) == (0, 1)


def test_ranks_that_share_blocks_share_what_is_left() -> None:
    budget = Budget(2 * RUN)
    index, worker = make(budget)
    for rank in range(3):
        assert worker.store(rank, prompt(0), prompt(0)) == (rank < 2)
    assert (budget.blocks, budget.pairs) == (RUN, 2 * RUN)
    assert index.match(prompt(0))[0].keys() == {(1, 0), (1, 1)}


def test_indexes_share_a_budget_and_give_it_back() -> None:
    budget = Budget(2 * RUN)
    (one, first), (two, second) = make(budget), make(budget)
    assert first.store(0, prompt(0), prompt(0)) and second.store(0, prompt(0), prompt(0))
    assert not first.store(0, prompt(1), prompt(1)) and not second.store(0, prompt(1), prompt(1))
    first.remove()
    sweep(one)
    assert second.store(0, prompt(1), prompt(1)) and budget.pairs == 2 * RUN
    del two, second
    gc.collect()
    assert (budget.blocks, budget.pairs) == (0, 0)


def test_a_cleared_rank_makes_room_at_once() -> None:
    """There is room for as many blocks as it had, before anything is swept.

    A store frees old chains as it meets their names in a table, in an unknown order. So chains are
    long here, to make sure that the work of one store always meets another one.
    """
    blocks = 400
    budget = Budget(5 * blocks)
    index, worker = make(budget)
    for generation in range(3):
        for number in range(5):
            first = (10 * generation + number) * 1000 + 1
            tokens = range(first, first + blocks)
            assert worker.store(0, tokens, tokens)
        worker.clear(0)
    assert budget.refused == 0 and budget.blocks <= 5 * blocks
    sweep(index)
    assert (budget.blocks, budget.pairs) == (0, 0)


def test_a_lower_bound_drops_nothing_and_none_takes_all() -> None:
    budget = Budget()
    index, worker = make(budget)
    assert worker.store(0, prompt(0), prompt(0)) and budget.max_blocks == 0
    budget.max_blocks = 5
    assert not worker.store(0, prompt(1), prompt(1)) and depth(index, 0) == RUN
    worker.drop(0, prompt(0)[4:])
    assert worker.store(0, prompt(1)[:1], prompt(1)[:1])
    budget.max_blocks = 0
    assert worker.store(0, prompt(1), prompt(1)) and depth(index, 1) == RUN


def test_names_of_what_was_dropped_leave_room() -> None:
    """An offloading rank's dropped names are remembered until their room is needed."""
    budget = Budget(LIMIT)
    index, worker = make(budget)
    worker.store_named(0, [], 1)
    for round_ in range(5):
        for number in range(LIMIT // RUN):
            tokens = prompt(100 * round_ + number)
            assert worker.store(0, tokens, tokens)
        for number in range(LIMIT // RUN):
            worker.drop(0, prompt(100 * round_ + number))
    index.verify()
    assert 0 < budget.pairs <= LIMIT and budget.refused == 0


def stored(names: range, parent: int | None = None) -> list[object]:
    return ["BlockStored", list(names), parent, [name % 2**32 for name in names], 1, None]


def test_a_stream_says_that_it_has_found_no_room() -> None:
    index, worker = make(Budget(RUN))
    stream = worker.stream(0)
    whole, more = stored(prompt(0)), stored(prompt(1))
    assert stream.apply(msgpack.packb([0.0, [whole]])) == NEW_RANK
    assert stream.apply(msgpack.packb([0.0, [more]])) == NO_ROOM
    assert stream.apply(msgpack.packb([0.0, [stored(prompt(1), 5)]])) == NO_ROOM  # unknown parent
    assert index.counters.as_dict()["ignored"]["full"] == 2
    cleared = ["AllBlocksCleared"]
    assert stream.apply(msgpack.packb([0.0, [more, cleared]])) & NO_ROOM == 0
    assert stream.apply(msgpack.packb([0.0, [more]])) == 0


def test_publishers_share_it() -> None:
    budget = Budget(RUN)
    index, worker = make(budget)
    conductor = Conductor(index)
    source = conductor.add_source("a", "", "", 0, False)
    names = list(prompt(0))
    tokens = [name % 2**32 for name in names]
    source_rank = 0, 0, "GPU"
    assert source.store(*source_rank, names, tokens, None, 0) == "placed"
    assert source.store(*source_rank, names, tokens, None, 0) == "placed"
    assert source.store(*source_rank, [7], [7], None, 0) == "full"
    assert source.store(*source_rank, [7], [7], 999, 0) == "full"  # its parent is unknown
    assert source.store_named(*source_rank, [7], 0) == "full"
    assert source.store_named(0, 0, "CPU", names[:1], 0) == "placed"
    assert not worker.store(0, [7], [7])
    assert budget.refused == 4
    events = source.engine_events("", "")
    assert events.full() == 0
    assert events.apply(msgpack.packb([0.0, [["BlockStored", [8], None, [8], 1, None]], 0]))
    assert events.full() == 1
    source.remove_all()
    sweep(index)
    assert (budget.blocks, budget.pairs) == (0, 0)


PATHS = [(1, 2, 3, 4, 5, 6), (1, 2, 7, 8), (9, 10, 11), (12,)]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(("store", "store", "store", "branch", "rename", "drop", "clear", "sweep")),
        st.integers(0, 2),  # rank
        st.sampled_from(PATHS),
        st.integers(0, 5),
        st.integers(1, 6),
    ),
    max_size=40,
)


def step(index: PrefixIndex, worker: Worker, what: str, rank: int, path: tuple[int, ...],
         begin: int, length: int) -> None:  # fmt: skip
    blocks = path[begin : begin + length]
    parent = path[begin - 1] if 0 < begin <= len(path) else None
    if what == "store":
        worker.store(rank, blocks, blocks, parent)
    elif what == "branch":
        worker.store(rank, [each + 100 for each in blocks], blocks, parent)
    elif what == "rename":  # the same names mean other blocks from now on
        worker.store(rank, blocks, [each + 50 for each in blocks], parent)
    elif what == "drop":
        worker.drop(rank, blocks)
    elif what == "clear":
        worker.clear(rank)
    else:
        index.sweep(length)


@given(bound=st.integers(1, 12), steps=STEPS)
def test_nothing_is_credited_that_an_index_without_bound_does_not_credit(
    bound: int, steps: list[tuple[str, int, tuple[int, ...], int, int]]
) -> None:
    budget = Budget(bound)
    (bounded, some), (whole, all_) = make(budget), make(Budget())
    for each in steps:
        step(bounded, some, *each)
        step(whole, all_, *each)
        assert budget.blocks == bounded.stats()["blocks"]
        # Blocks that were parked while there was room come on top.
        beyond = bounded.stats()["unparked"]
        assert max(budget.blocks, budget.pairs) <= bound + beyond
    for path in (*PATHS, *([each + 50 for each in path] for path in PATHS)):
        held, allowed = bounded.match(path)[0], whole.match(path)[0]
        for rank, (device, _, _) in held.items():
            assert device <= allowed[rank][0]
    bounded.verify()
    some.remove()
    sweep(bounded)
    assert (budget.blocks, budget.pairs) == (0, 0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_pairs_are_counted_by_rank(ranks: int) -> None:
    budget = Budget()
    _, worker = make(budget)
    seen = []
    for rank in range(ranks):
        worker.store(rank, prompt(0), prompt(0))
        seen.append(budget.pairs)
    assert all(after - before == RUN for before, after in pairwise([0, *seen]))
