"""Shares the loop's time between all listeners and everything else."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns

import trio

# Time of all listeners together in one pass of the loop; it adds to the latency of a query.
ROUND_NS = 1_500_000

# Least time of a turn outside of a task, where rows of turns are bounded (kvd.net.arrivals): enough
# for a few messages.
LEAST_NS = 200_000

# Messages that one listener applies in a turn: small ones take 0.1 ms, the turn itself 8 µs.
MAX_TURN_MESSAGES = 128

# Messages taken off a link in a turn: small ones take 0.5 ms. So many more than are applied in it
# that messages which come faster than they are applied wait in the inbox, where they are counted.
MAX_TAKEN_IN = 1024


class Turns:
    """A budget of time that all listeners share, renewed in a later pass of the loop.

    One listener holds up the loop for no longer than its turn, but hundreds that had messages at
    the same moment held it up for a tenth of a second. Once the budget is used up, listeners
    queue, first come first served, and in every other pass the first of them renews it.
    """

    __slots__ = ("_left_ns", "_queue", "_started_ns", "clock_ns", "round_ns")

    def __init__(
        self, round_ns: int = ROUND_NS, clock_ns: Callable[[], int] = perf_counter_ns
    ) -> None:
        """`clock_ns` measures turns; a simulation passes a clock of its own and endless rounds."""
        self.round_ns = round_ns
        self.clock_ns = clock_ns
        self._left_ns = round_ns
        self._queue = trio.Lock()
        self._started_ns = 0

    async def begin(self) -> int:
        """Begins a turn; returns how many nanoseconds it may take. Yields only to wait for time."""
        if self._left_ns <= 0:
            async with self._queue:
                await trio.lowlevel.checkpoint()
                self._left_ns = self.round_ns
        self._started_ns = self.clock_ns()
        return self._left_ns

    def begin_now(self) -> int:
        """Begins a turn like `begin`, outside of a task, even if the budget is used up."""
        self._started_ns = self.clock_ns()
        return max(self._left_ns, LEAST_NS)

    def end(self) -> None:
        """Ends the turn that was begun last; the caller awaits nothing between the two calls."""
        self._left_ns -= self.clock_ns() - self._started_ns
