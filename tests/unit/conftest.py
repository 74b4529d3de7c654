"""Keeps unit tests from processes and sockets, and with `--quick` within 0.25 s of CPU time.

Wall-clock time depends on how busy the machine is. CPU time does so a little, too: it grows with
whatever shares caches and cores, and a virtual machine may count time in which it did not run. So a
test over the limit is run again, its best run counts, and the limit grows by the factor by which a
fixed piece of work has become slower. A test whose first run is within the limit is not run again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from time import thread_time

import pytest

from tests.support.budget import BUDGET
from tests.support.tiers import PROCESSES, SOCKETS, forbidding

LIMIT_S = 0.25
AGAIN = 2  # further runs of a test over the limit
ADVICE = "do less in it, or mark it @pytest.mark.slow(reason); see docs/contributing.md"

WORK_S = 0.010  # time of `work` on the machine where LIMIT_S was chosen, when nothing else ran
# Failures of a repeated run. It is not judged then: the first run may have left state behind.
CANNOT_REPEAT = (Exception, pytest.fail.Exception, pytest.skip.Exception)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    with forbidding((*PROCESSES, *SOCKETS)):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    begun = thread_time()
    with forbidding((*PROCESSES, *SOCKETS)):
        yield
    if is_held(item) and thread_time() - begun > LIMIT_S:
        best_s, limit_s = best_of(item.runtest), LIMIT_S * slowness()
        if best_s > limit_s:
            pytest.fail(f"{best_s:.2f} s of CPU time, the limit is {limit_s:.2f} s: {ADVICE}")


def is_held(item: pytest.Item) -> bool:
    """Whether the limit applies: not to slow tests, longer runs or debug builds."""
    usual = BUDGET == 1 and os.environ.get("KVD_DEBUG") != "1"
    return usual and item.config.getoption("quick") and item.get_closest_marker("slow") is None


def best_of(run: Callable[[], object]) -> float:
    """Returns the least CPU time of several runs, 0 if one fails although the first one passed."""
    try:
        return min(cpu_s(run) for _ in range(AGAIN))
    except CANNOT_REPEAT:
        return 0.0


def slowness() -> float:
    """Returns how many times slower the machine is now than when LIMIT_S was chosen, at least 1."""
    return max(1.0, best_of(work) / WORK_S)


def work() -> object:
    return {str(number): number for number in range(50_000)}


def cpu_s(run: Callable[[], object]) -> float:
    begun = thread_time()
    run()
    return thread_time() - begun
