"""The coming events of a simulated network, ordered by time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

import trio


class Agenda:
    """Calls functions at virtual moments; those of the same moment in the order they were added."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._count = itertools.count()
        self._wake = trio.Event()

    def after(self, seconds: float, call: Callable[[], object]) -> None:
        heapq.heappush(self._due, (trio.current_time() + seconds, next(self._count), call))
        self._wake.set()

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            self._wake = trio.Event()
            moment = self._due[0][0] if self._due else trio.current_time() + 3600
            with trio.move_on_at(moment):
                await self._wake.wait()
            while self._due and self._due[0][0] <= trio.current_time():
                heapq.heappop(self._due)[2]()


def decide_order(seed: int) -> None:
    """Has a seed decide which task runs first, in the way of trio's own support for Hypothesis."""
    runner = trio._core._run
    runner._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    runner._r.seed(seed)
