"""CPU time of calls in this process."""

from __future__ import annotations

import time
from collections.abc import Callable

Call = Callable[[int], object]  # gets its number in the round, from 0 on


def round_us(call: Call, calls: int) -> float:
    """Returns the CPU microseconds of a call, in one round of so many."""
    begun = time.process_time_ns()
    for number in range(calls):
        call(number)
    return (time.process_time_ns() - begun) / 1000 / calls


def lowest_us(call: Call, calls: int, rounds: int) -> float:
    """Returns the CPU microseconds of a call, in the fastest round."""
    return min(round_us(call, calls) for _ in range(rounds))
