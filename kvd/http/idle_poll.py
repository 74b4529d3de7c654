"""Serves a process's fast paths and relays between two passes of trio.

                   ┌───────── serves its pollables ──────────┐
                   v                                         │
    trio ──> about to sleep ──> sleeps on trio's epoll set ──┤ a request, bytes to relay
      ^                                                      │
      └───────── anything else, a deadline, no request ──────┘

While tasks can run, as a dump does, a row of turns comes before each poll of trio, unless the pass
has had one: so a request waits for the step under way alone, not for those of the next pass.

A pass of trio costs a sleeping process some 30 µs of CPU beside the system calls, because the
caches are cold; a request needs 15. So while requests come one by one and no task can run, the
process sleeps here, on trio's epoll set, and serves its pollables. A pollable is anything with a
set of its own, for which a task waits: the fast paths of HTTP, the relay of a gateway, the links to
engines. They take turns, so that a client that asks again at once keeps no event waiting.
Events go before requests, so that an answer reflects all events that came before its question.
Answers of engines go before both: their clients have waited for a whole prefill, and events come
with them.

1. Nothing is late: any other descriptor, a deadline, or a task that a request has made runnable
   ends the stay here, and trio polls everything anew.
2. A process for which nothing comes never stays here: trio sleeps as usual.
3. Nothing depends on it: if trio renames the internals used here, requests wake trio instead.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from operator import attrgetter
from typing import NoReturn, Protocol

import trio

from kvd.http.busy_wait import BusyWait
from kvd.http.rows import serve_before, serve_between, serve_row
from kvd.telemetry.logs import get_logger
from kvd.telemetry.metrics import Family, by_label

# Time without a request after which trio waits again: clients that ask less often wake trio.
LINGER_S = 0.05

# Trio has no public names for its set of descriptors, for the function that ends a wait on that set
# at once (`run_sync_soon` costs more, as it runs a task), and for its runnable tasks.
EPOLL = "_core._run.GLOBAL_RUN_CONTEXT.runner.io_manager._epoll"
WAKE = "_core._run.GLOBAL_RUN_CONTEXT.runner.io_manager.force_wakeup"
RUNNABLE = "_core._run.GLOBAL_RUN_CONTEXT.runner.runq"

log = get_logger(__name__)

_current: trio.lowlevel.RunVar[IdlePoller | None] = trio.lowlevel.RunVar("idle_poller", None)


class Turn(IntEnum):
    """The order in which pollables are served that are ready at the same time."""

    ANSWERS = 0  # of engines, which are relayed
    EVENTS = 1
    REQUESTS = 2


class Pollable(Protocol):
    """A thing with an epoll set of its own."""

    def fileno(self) -> int:
        """Returns a descriptor that is readable when something has come."""

    def serve_ready(self, budget_ns: int, /) -> int:
        """Serves what has come, for `budget_ns` at most; returns NOTHING, ALL or SOME."""


class IdlePoller(trio.abc.Instrument):
    """Polls for all pollables of a run of trio; added as an instrument only if it is usable."""

    def __init__(self, budget_ns: int) -> None:
        try:
            self._others = attrgetter(EPOLL)(trio).fileno()
            self._wake = attrgetter(WAKE)(trio)
            self._runnable = attrgetter(RUNNABLE)(trio)
            self.usable = True
        except AttributeError as error:
            self.usable, self._runnable = False, ()
            log.warning("idle_poller_off", reason=error, trio=trio.__version__)
        self._token = trio.lowlevel.current_trio_token()
        self._budget_ns = budget_ns
        self.awake = BusyWait()
        self.pollables: list[Pollable] = []  # in the order of their turns
        self.turns: list[Turn] = []
        self._row: int | None = None  # what the row in the pass of trio under way has returned
        self.warm = False  # something has been served since the last stay that served nothing

    def serve_row(self) -> int:
        """Serves all pollables, once in a pass of trio; returns NOTHING, ALL or SOME.

        Each pollable has a task that calls this, and rows of all of them would add up.
        """
        if self._row is None:
            row = serve_row(self.pollables, self._budget_ns, self._runnable)
            if not self.usable:
                return row
            self._row = row
        return self._row

    def before_io_wait(self, timeout: float) -> None:
        """Serves pollables for `timeout` seconds at most; one row if tasks are runnable."""
        had_row, self._row = self._row is not None, None
        if not self.warm:
            return
        awake = timeout <= 0  # trio polls and does not sleep
        try:
            if awake:
                if not had_row:
                    serve_before(self.pollables, self._budget_ns, self._runnable)
                return
            self.warm, awake = serve_between(
                self.pollables,
                self._others,
                self._runnable,
                self.awake,
                timeout,
                LINGER_S,
                self._budget_ns,
            )
        except Exception as error:
            # Trio would log a bug in here and go on without the instrument.
            self._token.run_sync_soon(_crash, error)
        if not awake:  # trio would sleep for `timeout`, which is out of date
            self._wake()


@contextmanager
def polled_when_idle(
    pollable: Pollable, turn: Turn, budget_ns: int, busy_wait_us: int = 0
) -> Iterator[IdlePoller]:
    """Serves `pollable` between the passes of this run of trio, until the context ends.

    No row of requests takes much longer than `budget_ns` nanoseconds. The poller may wait awake for
    the next request for `busy_wait_us` microseconds.
    """
    here = _current.get()
    if here is None:
        here = IdlePoller(budget_ns)
        _current.set(here)
        if here.usable:
            trio.lowlevel.add_instrument(here)
    here.awake.allow(busy_wait_us)
    at = bisect(here.turns, turn)
    here.turns.insert(at, turn)
    here.pollables.insert(at, pollable)
    try:
        yield here
    finally:
        at = here.pollables.index(pollable)
        del here.pollables[at], here.turns[at]
        if not here.pollables:
            if here.usable:
                trio.lowlevel.remove_instrument(here)
            _current.set(None)


def busy_wait_families() -> Iterator[Family]:
    """Yields how long this run of trio has waited awake for the next request."""
    here = _current.get()
    if here is not None:
        help = "Time spent awake until the next request came, or in vain, in seconds, by outcome"
        spent = {"found": here.awake.found_ns * 1e-9, "lost": here.awake.lost_ns * 1e-9}
        yield by_label("kvd_busy_wait_seconds_total", "counter", help, "outcome", spent)


def _crash(error: Exception) -> NoReturn:
    raise error
