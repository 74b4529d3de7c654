"""The growth of counters in the last minutes: what was wrong last week is no finding.

    time      ───┼────────────┼────────────┼─── now
              before        middle        (the next step)
    grown     since `before`, one to two steps ago; since the start until two steps have passed

Costs: one dict of counters each step, and another one for a diagnosis.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

STEP_S = 300.0  # from one sample of counters to the next: findings last for two steps at most

Name = TypeVar("Name", bound=Hashable)


class Growth(Generic[Name]):
    """Counters that only grow, as they were one step and two steps ago."""

    def __init__(self, now: float) -> None:
        """Times are in monotonic seconds."""
        self._before: Mapping[Name, int] = {}
        self._middle: Mapping[Name, int] = {}
        self._before_at = self._middle_at = now

    def is_due(self, now: float) -> bool:
        """Returns whether `take` is to be called."""
        return now - self._middle_at >= STEP_S

    def take(self, totals: Mapping[Name, int], now: float) -> None:
        """Takes the counters of this moment."""
        self._before, self._before_at = self._middle, self._middle_at
        self._middle, self._middle_at = totals, now

    def since_s(self, now: float) -> float:
        """Returns the seconds that `grown` covers."""
        return now - self._before_at

    def grown(self, totals: Mapping[Name, int]) -> dict[Name, int]:
        """Returns by how much each counter has grown; one that was reset counts from 0."""
        before = self._before
        found = {}
        for name, total in totals.items():
            earlier = before.get(name, 0)
            found[name] = total - earlier if total >= earlier else total
        return found
