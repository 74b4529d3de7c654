"""A slice ends after its steps, or by the clock if these take far longer than they should."""

from __future__ import annotations

import time

from kvd_core.index.prefix_index import Slice

STEP_NS = 100
SLACK = 2
LOOK = 512  # steps between two readings of the clock


def pass_time(ns: int) -> None:
    until = time.thread_time_ns() + ns
    while time.thread_time_ns() < until:
        pass


def test_steps_end_a_slice() -> None:
    slice = Slice(10)
    assert [slice.take(3) for _ in range(5)] == [False, False, False, True, True]


def test_time_ends_a_slice_whose_steps_are_not_used_up() -> None:
    steps = 100 * LOOK
    slice = Slice(steps)
    assert not slice.take(LOOK)  # the clock is running
    pass_time(SLACK * steps * STEP_NS)
    assert slice.take(LOOK)
    assert slice.take(0)


def test_work_of_few_steps_never_looks_at_the_clock() -> None:
    slice = Slice(LOOK)
    assert not slice.take(0)
    pass_time(SLACK * LOOK * STEP_NS)
    assert not slice.take(LOOK - 1)
    assert slice.take(1)


def test_what_has_no_bound_of_steps_has_none_of_time() -> None:
    slice = Slice(2**63 - 1)
    for _ in range(3):
        assert not slice.take(LOOK)
        pass_time(LOOK * STEP_NS)
