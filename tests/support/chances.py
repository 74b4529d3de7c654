"""Checks that random draws come up as often as they should."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from math import sqrt

FEW = 5.0  # with fewer expected draws the statistic is not a chi-square
SIGMAS = 4.75  # one fair test in a million fails


def assert_drawn(drawn: Counter[Hashable], chances: Mapping[Hashable, float]) -> None:
    """Fails if the frequencies differ from the chances by more than chance explains."""
    assert drawn.keys() <= chances.keys()
    total = drawn.total()
    expected = {each: total * chance for each, chance in chances.items()}
    rare = [each for each, count in expected.items() if count < FEW]
    cells = [(drawn[each], count) for each, count in expected.items() if count >= FEW]
    if rare:
        cells.append((sum(drawn[each] for each in rare), sum(expected[each] for each in rare)))
    statistic = sum((seen - count) ** 2 / max(count, FEW) for seen, count in cells)
    assert statistic < _highest(len(cells) - 1), (drawn, expected)


def _highest(degrees: int) -> float:
    """Returns the bound of a chi-square statistic (Wilson and Hilferty's approximation)."""
    part = 2 / (9 * max(degrees, 1))
    return max(degrees, 1) * (1 - part + SIGMAS * sqrt(part)) ** 3
