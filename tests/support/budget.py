"""Scales the random tests: `make soak` sets KVD_TEST_BUDGET=75, for 75 times as much."""

from __future__ import annotations

import os

BUDGET = float(os.environ.get("KVD_TEST_BUDGET", "1"))


def scaled(usual: int) -> int:
    """Returns how many examples, seeds or steps to try where `usual` is the normal number."""
    return max(1, round(usual * BUDGET))
