from __future__ import annotations

import pytest

from kvd.descriptors import ENOUGH, MAX_LISTENERS, listeners_within


@pytest.mark.parametrize(
    ("limit", "listeners"),
    [(64, 8), (1024, 128), (65_536, 15_488), (ENOUGH, MAX_LISTENERS), (10**9, MAX_LISTENERS)],
)
def test_descriptors_are_shared_out(limit: int, listeners: int) -> None:
    assert listeners_within(limit) == listeners
