"""The growth of counters over the last minutes."""

from __future__ import annotations

from kvd.diagnosis.growth import STEP_S, Growth


def test_all_counts_until_there_have_been_two_steps() -> None:
    growth: Growth[str] = Growth(0.0)
    assert not growth.is_due(STEP_S - 1) and growth.is_due(STEP_S)
    assert growth.grown({"a": 3}) == {"a": 3}
    growth.take({"a": 3}, STEP_S)
    assert growth.grown({"a": 4}) == {"a": 4} and growth.since_s(STEP_S + 1) == STEP_S + 1
    growth.take({"a": 4}, 2 * STEP_S)
    assert growth.grown({"a": 4, "b": 1}) == {"a": 1, "b": 1}
    assert growth.since_s(2 * STEP_S) == STEP_S
    growth.take({"a": 4}, 3 * STEP_S)
    assert growth.grown({"a": 4}) == {"a": 0}


def test_what_began_anew_counts_from_zero() -> None:
    growth: Growth[str] = Growth(0.0)
    growth.take({"a": 10}, STEP_S)
    growth.take({"a": 10}, 2 * STEP_S)
    assert growth.grown({"a": 2}) == {"a": 2}
