"""The limit of a unit test's CPU time fails no test that cannot be measured twice."""

from __future__ import annotations

from tests.unit.conftest import AGAIN, best_of, slowness


def test_a_test_over_the_limit_is_run_again() -> None:
    runs: list[None] = []
    assert best_of(lambda: runs.append(None)) >= 0
    assert len(runs) == AGAIN


def test_one_that_cannot_be_repeated_is_not_judged() -> None:
    runs = iter([None])
    assert best_of(lambda: next(runs)) == 0  # the second raises StopIteration


def test_the_limit_only_grows() -> None:
    assert slowness() >= 1
