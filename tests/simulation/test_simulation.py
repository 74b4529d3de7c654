"""A few lives of a simulated fleet; `python -m tests.simulation` runs thousands more."""

from __future__ import annotations

import collections
import logging
from collections.abc import Iterator

import pytest

from tests.simulation.__main__ import count
from tests.simulation.world import run_seed
from tests.support.budget import scaled

SEEDS = range(scaled(3))  # 0.5 s each
EVENTS = (
    "compared",
    "compared_restored",
    "dumps[peer not exact]",
    "gaps",
    "lost",
    "recovered",
    "replayed",
    "replays_behind_wrap",
    "restarts",
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silences the log: connections are lost all the time here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_what_is_called_exact_is() -> None:
    totals: collections.Counter[str] = collections.Counter()
    for seed in SEEDS:
        count(run_seed(seed), totals)
    assert [name for name in EVENTS if not totals[name]] == []


def test_a_seed_always_has_the_same_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.simulation.world.STEPS", 100)
    traces: list[list[str]] = [[], []]
    totals: list[collections.Counter[str]] = [collections.Counter(), collections.Counter()]
    for lines, sums in zip(traces, totals, strict=True):
        count(run_seed(3, lines.append), sums)
    assert traces[0] == traces[1]
    assert totals[0] == totals[1]
    assert totals[0]["compared"] > 100
