"""Output blocks weigh less and less towards the expected end of a request."""

from __future__ import annotations

import pytest

from kvd.selection.decay import output_weight


@pytest.mark.parametrize(
    ("blocks", "expected", "weight"),
    [(0, 100, 1.0), (1, 100, 0.84), (5, 100, 0.2), (6, 96, 0.0), (7, 96, 0.0), (1, 0, 0.0)],
)
def test_weight(blocks: int, expected: int, weight: float) -> None:
    assert output_weight(blocks, 16, expected) == pytest.approx(weight)
