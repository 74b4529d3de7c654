"""One epoll set for all ZMTP links, served between two passes of trio's loop, too.

    wait ── the descriptor ──> epoll set ── something has come ──> serve ── False ──> wait returns
                                   ^                                 │
                                   └────────────── True ─────────────┘

A message for a resting listener is applied right where the epoll set reports it, without waking
the listener's task. While requests are served without trio (`kvd.http.idle_poll`), messages are
served as well, and before requests: so a client that asks again and again sees each published
event as soon as it has come.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from time import perf_counter_ns
from typing import NoReturn

import trio

from kvd.http.idle_poll import Turn, polled_when_idle
from kvd.http.rows import ALL, NOTHING, SOME
from kvd.net.per_run import OnePerRun
from kvd.net.turns import Turns

# Longest time for which messages are served in a row before other tasks run.
ROW_NS = 500_000
# Longest time for handshakes in one pass of the loop; each takes 0.1 ms.
HANDSHAKES_NS = 500_000
AT_ONCE = 64  # ready descriptors fetched by one call of epoll; the rest comes with the next call

Serve = Callable[[], bool]


class Arrivals:
    """Serves or wakes the waiting links of one trio run when their descriptors become readable."""

    __slots__ = ("_connecting", "_epoll", "_waiting", "handshakes")

    def __init__(self) -> None:
        self._connecting = trio.Lock()
        self.handshakes = Turns(HANDSHAKES_NS)  # hundreds may be answered at the same moment
        self._epoll = select.epoll()
        self._waiting: dict[int, _Wait] = {}

    async def run(self) -> NoReturn:
        with self._epoll, polled_when_idle(self, Turn.EVENTS, ROW_NS) as between:
            while True:
                await trio.lowlevel.wait_readable(self.fileno())
                between.warm = True
                while between.serve_row() == SOME:
                    await trio.lowlevel.checkpoint()

    async def take_turn(self) -> None:
        """Returns when a link may connect again: one may begin to in every other pass of the loop.

        Hundreds may be lost at the same moment, and each takes 0.1 ms until it is connected again.
        """
        async with self._connecting:
            await trio.lowlevel.checkpoint()

    async def wait(self, fd: int, serve: Serve) -> None:
        """Calls `serve` whenever the descriptor is readable, and returns when it returns False.

        `serve` may end this wait and close the descriptor; it must not raise.
        """
        assert fd not in self._waiting
        waiting = self._waiting[fd] = _Wait(self, fd, trio.lowlevel.current_task(), serve)
        self._epoll.register(fd, select.EPOLLIN)
        await trio.lowlevel.wait_task_rescheduled(waiting.abort)

    def end(self, fd: int) -> None:
        """Makes the wait for a descriptor return, if there is one."""
        if (waiting := self._waiting.get(fd)) is not None:
            self.forget(fd)
            trio.lowlevel.reschedule(waiting.task)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def serve_ready(self, budget_ns: int, /) -> int:
        """Serves ready descriptors for about `budget_ns` at most; returns NOTHING, ALL or SOME."""
        end_ns = perf_counter_ns() + budget_ns
        ready = self._epoll.poll(0, AT_ONCE)
        for fd, _ in ready:
            waiting = self._waiting.get(fd)  # None if serving an earlier one has ended its wait
            if waiting is not None and not waiting.serve() and self._waiting.get(fd) is waiting:
                self.end(fd)
            if perf_counter_ns() > end_ns:
                return SOME
        if not ready:
            return NOTHING
        return SOME if len(ready) == AT_ONCE else ALL

    def forget(self, fd: int) -> None:
        del self._waiting[fd]
        self._epoll.unregister(fd)


class _Wait:
    """A waiting task. A closure in its place would take twice the memory per rank."""

    __slots__ = ("_arrivals", "_fd", "serve", "task")

    def __init__(self, arrivals: Arrivals, fd: int, task: trio.lowlevel.Task, serve: Serve) -> None:
        self._arrivals = arrivals
        self._fd = fd
        self.task = task
        self.serve = serve

    def abort(self, _: object) -> trio.lowlevel.Abort:
        self._arrivals.forget(self._fd)
        return trio.lowlevel.Abort.SUCCEEDED


arrivals = OnePerRun(Arrivals)
