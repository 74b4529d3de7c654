"""The weight of a request's output blocks when the length of its output is expected."""

from __future__ import annotations


def output_weight(blocks: int, block_size: int, expected_tokens: int) -> float:
    """Returns the weight after so many output blocks: it falls linearly from 1 to 0 at the end.

    A request that is nearly done will free its blocks soon, so they count for less than those of a
    request that has just begun.
    """
    return max(0.0, 1.0 - blocks * block_size / max(1, expected_tokens))
