"""Checks connected links for silence, each at its own times, in one task for all.

A task for each, or a cancel scope around its wait, would cost every link 1 to 3 KB.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import NoReturn

import trio

from kvd.net.per_run import OnePerRun

AT_ONCE = 32  # checks between two checkpoints: a ping takes some 10 us

# Is given the time; returns the time of the next check, which may be infinite. It must not raise.
Check = Callable[[float], float]


class Heartbeats:
    """The checks of one trio run."""

    __slots__ = ("_checks", "_due", "_last", "_rest")

    def __init__(self) -> None:
        self._checks: dict[int, Check] = {}  # by number
        self._due: list[tuple[float, int]] = []  # a heap of times and numbers, some of them removed
        self._last = 0
        self._rest = trio.CancelScope()

    async def run(self) -> NoReturn:
        while True:
            with trio.CancelScope(deadline=self._next) as self._rest:
                await trio.sleep_forever()
            now = trio.current_time()
            for _ in range(AT_ONCE):
                if self._next > now:
                    break
                self._check_next(now)

    def add(self, check: Check, when: float) -> int:
        """Has `check` called at that time; returns its number, for `remove`."""
        self._last += 1
        self._checks[self._last] = check
        self._plan(when, self._last)
        return self._last

    def remove(self, number: int) -> None:
        self._checks.pop(number, None)

    @property
    def _next(self) -> float:
        return self._due[0][0] if self._due else math.inf

    def _plan(self, when: float, number: int) -> None:
        heappush(self._due, (when, number))
        self._rest.deadline = self._due[0][0]

    def _check_next(self, now: float) -> None:
        _, number = heappop(self._due)
        check = self._checks.get(number)
        if check is not None and (when := check(now)) < math.inf:
            self._plan(when, number)


heartbeats = OnePerRun(Heartbeats)
