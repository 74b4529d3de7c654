"""Ends of requests that are read before their beginnings, as another replica announced them."""

from __future__ import annotations

from dataclasses import replace

import pytest

import kvd.wire.early_ends
from kvd.model import PartitionKey
from kvd.wire.early_ends import EARLY_STEPS_S, EarlySteps
from kvd.wire.lifecycle import Lifecycle, Step

ADD = Lifecycle(PartitionKey("m", "t"), 16, "r", 7, 0, Step.ADD, router_id=1)
FREE = replace(ADD, step=Step.FREE, router_id=2)
COMPLETE = replace(FREE, step=Step.PREFILL_COMPLETE)


@pytest.mark.parametrize(
    ("ends", "met"),
    [
        ([], None),
        ([FREE], Step.FREE),
        ([COMPLETE], Step.PREFILL_COMPLETE),
        ([COMPLETE, FREE], Step.FREE),
        ([FREE, COMPLETE], Step.FREE),
        ([FREE, FREE], Step.FREE),
    ],
)
def test_an_end_meets_its_beginning_once(ends: list[Lifecycle], met: Step | None) -> None:
    early = EarlySteps()
    for end in ends:
        early.note(end, 5.0)
    assert early.meet(ADD, 6.0) == met
    assert early.meet(ADD, 6.0) is None
    assert len(early) == 0


@pytest.mark.parametrize(
    "other",
    [
        {"request_id": "s"},
        {"worker_id": 8},
        {"dp_rank": 1},
        {"partition": PartitionKey("m", "u")},
        {"router_id": 2},  # the replica that freed it has booked another request since
    ],
)
def test_an_end_meets_no_other_beginning(other: dict[str, object]) -> None:
    early = EarlySteps()
    early.note(FREE, 5.0)
    assert early.meet(replace(ADD, **other), 6.0) is None
    assert early.meet(ADD, 6.0) is Step.FREE


def test_an_old_end_is_forgotten() -> None:
    early = EarlySteps()
    early.note(FREE, 5.0)
    assert early.meet(ADD, 5.5 + EARLY_STEPS_S) is None
    assert len(early) == 0 and early.forgotten == 0


def test_the_oldest_goes_first_at_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvd.wire.early_ends, "MAX_EARLY_STEPS", 3)
    early = EarlySteps()
    for name in "abcad":
        early.note(replace(FREE, request_id=name), 5.0)
    met = [name for name in "abcd" if early.meet(replace(ADD, request_id=name), 6.0)]
    assert met == ["a", "c", "d"] and early.forgotten == 1
