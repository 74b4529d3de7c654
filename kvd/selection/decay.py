"""The weight of a request's output blocks when the length of its output is expected."""

from __future__ import annotations


def output_weight(blocks: int, block_size: int, expected_tokens: int) -> float:
    """Returns what so many filled blocks weigh: from 1 at the beginning linearly to 0 at the end.

    A request that is nearly done frees its blocks soon, so they count for less than those of one
    that has just begun.
    """
    return max(0.0, 1.0 - blocks * block_size / max(1, expected_tokens))
