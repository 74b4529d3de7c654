"""Runs several replays at once, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from typing import Protocol

from kvd.replay.figures import Figures, measure
from kvd.replay.recording import ReplayError
from kvd.replay.routers import Routing
from kvd.replay.simulation import SimulatedFleet, replay
from kvd.replay.traffic import Traffic

POLLED_S = 0.1  # pause between two checks how far the processes of `kvd replay` are

# In a process that replays: the requests that all of these processes have replayed.
_served: Synchronized[int]


class Replay(Protocol):
    """A replay that a process can run."""

    def run(self, report: Callable[[int], None]) -> Figures: ...


@dataclass(frozen=True, slots=True)
class Case:
    """One replay of a policy; cases with the same seed have the same requests."""

    traffic: Traffic
    fleet: SimulatedFleet
    routing: Routing
    seed: int

    def run(self, report: Callable[[int], None]) -> Figures:
        """Returns its figures; raises ReplayError."""
        requests = self.traffic.requests(self.seed)
        router = self.routing.router(self.fleet, self.seed)
        try:
            outcome = replay(requests, self.fleet, router, report)
        except ValueError as error:  # a prompt needs more than an engine has
            raise ReplayError(str(error)) from None
        return measure(outcome, self.traffic.counts)


def run_all(cases: Sequence[Replay], jobs: int, report: Callable[[int], None]) -> list[Figures]:
    """Returns the figures of all cases, replayed by up to `jobs` processes; raises ReplayError.

    `report` is called with how many more requests have been replayed.
    """
    if jobs == 1 or len(cases) == 1:
        return [case.run(report) for case in cases]
    served: Synchronized[int] = multiprocessing.Value("q", 0)
    reported = 0
    with ProcessPoolExecutor(min(jobs, len(cases)), initializer=_begin, initargs=(served,)) as pool:
        left = futures = [pool.submit(_run, case) for case in cases]
        try:
            while left:
                left = list(wait(left, POLLED_S).not_done)
                now = served.value
                report(now - reported)
                reported = now
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _begin(served: Synchronized[int]) -> None:
    global _served
    _served = served
    # The parent handles an interrupt: it cancels the cases that have not begun.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _run(case: Replay) -> Figures:
    return case.run(_count)


def _count(more: int) -> None:
    with _served.get_lock():
        _served.value += more
