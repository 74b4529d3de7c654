"""Ports with several ranks: a stream that is called exact is exact."""

from __future__ import annotations

from collections import Counter

from tests.simulation.oracle import Wrong
from tests.simulation.ports import live
from tests.support.budget import scaled

SEEDS = scaled(20)  # 80 ms each on an idle core
EVENTS = (
    "asked",
    "asked again",
    "other ids",
    "spoke late",
    "exact",
    "exact behind a loss",
    "lost",
    "not exact",
    "registered again",
    "replays[marker]",
    "replays[other_engine]",
    "replays[reached]",
    "replays[silent]",
    "restarts",
)


def test_what_is_called_exact_is() -> None:
    totals: Counter[str] = Counter()
    wrong = []
    for seed in range(SEEDS):
        try:
            totals += live(seed)
        except Wrong as error:
            wrong.append(f"seed {seed}: {error}")
    assert wrong == []
    assert [name for name in EVENTS if not totals[name]] == []
    print(*(f"{name}={count}" for name, count in sorted(totals.items())))
