"""Shares the loop's time between all listeners and everything else."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns

import trio

# Time of all listeners together in one pass of the loop, which they add to a query's latency.
ROUND_NS = 2_000_000

# Messages of one listener in a turn: small ones take 0.1 ms, the turn itself 8 µs.
MAX_TURN_MESSAGES = 64

# Messages taken off a link in a turn, 0.5 ms of small ones. These are so many more than are
# applied in it that what comes in faster waits where it is counted.
MAX_TAKEN_IN = 1024


class Turns:
    """A budget of time that listeners use up together, renewed once a pass of the loop.

    Each listener on its own would hold up the loop for no longer than a turn; hundreds that have
    messages at the same moment did so for a tenth of a second. When the budget is used up they
    queue, first come first served, and in every other pass the first of them renews it.
    """

    __slots__ = ("_left_ns", "_queue", "_started_ns", "clock_ns", "round_ns")

    def __init__(
        self, round_ns: int = ROUND_NS, clock_ns: Callable[[], int] = perf_counter_ns
    ) -> None:
        """`clock_ns` measures turns; a simulation has its own, and rounds that do not end by it."""
        self.round_ns = round_ns
        self.clock_ns = clock_ns
        self._left_ns = round_ns
        self._queue = trio.Lock()
        self._started_ns = 0

    async def begin(self) -> int:
        """Returns how many nanoseconds the caller's turn may take; yields only to wait for that."""
        if self._left_ns <= 0:
            async with self._queue:
                await trio.lowlevel.checkpoint()
                self._left_ns = self.round_ns
        return self.begin_now()

    def begin_now(self) -> int:
        """Returns as `begin`, or 0 where that would wait: then there is no turn."""
        if self._left_ns <= 0:
            return 0
        self._started_ns = self.clock_ns()
        return self._left_ns

    def end(self) -> None:
        """Ends the turn that was begun last; nothing is awaited between the two."""
        self._left_ns -= self.clock_ns() - self._started_ns
