"""The base of the servers: accepting connections, the bound on them, the graceful end."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from heapq import nsmallest
from itertools import islice
from math import inf
from operator import itemgetter

import trio

from kvd.http.accept import accept_connections
from kvd.http.connection import LAST_REQUEST_S, Connection
from kvd.http.limits import HttpLimits, HttpStats
from kvd.platform.sockets import probe_host
from kvd.telemetry.stretches import REQUESTS

# Unsent bytes that the kernel holds for a client. It wakes us at half of that, so a slow reader
# shows progress within the send deadline, and a silent one occupies no more memory.
UNSENT_BYTES = 256 * 1024

# Connections that one search selects to be ended for others; a search among 1,024 takes 0.2 ms.
DISPLACED_AT_ONCE = 64
# Pause after a search that has found no connection to end for others, so that a flood does not
# cause a search for each new connection.
CHECK_AGAIN_S = 0.05


class Server(ABC):
    """Runs a task per connection; `stats` counts what happens."""

    def __init__(self, limits: HttpLimits) -> None:
        self.stats = HttpStats()
        self.limits = limits
        self._running: dict[Connection, float] = {}  # when each was accepted
        self._displaced: set[Connection] = set()  # of these, those that end to make room for others
        # Connections that could make room, as of the last search; the first to end comes last.
        self._dispensable: list[tuple[tuple[bool, int, float], Connection]] = []
        self._check_after = -inf

    def set_limits(self, limits: HttpLimits) -> None:
        """Applies other limits from now on; deadlines that are set already stay."""
        self.limits = limits

    async def serve(
        self,
        listeners: Sequence[socket.socket],
        stop: trio.Event,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serves until `stop` is set and every connection has ended; closes the listeners.

        After `stop` no connection is accepted. Idle connections end at once, busy ones after their
        response. New ones, and those whose response did not announce the end, have LAST_REQUEST_S
        for a request before. Those that are left `graceful_s` later are cut off.
        """
        for listener in listeners:
            _set_options(listener)
        try:
            async with trio.open_nursery() as watching:
                await watching.start(self._watch)
                async with trio.open_nursery() as serving:
                    async with trio.open_nursery() as accepting:
                        for listener in listeners:
                            accepting.start_soon(self._accept, listener, serving)
                        task_status.started()
                        await stop.wait()
                        accepting.cancel_scope.cancel()
                    _close_all(listeners)
                    await self._drain()
                    watching.start_soon(self._cut_off, serving.cancel_scope)
                    watching.start_soon(self._close_new)
                watching.cancel_scope.cancel()
        finally:
            _close_all(listeners)

    @abstractmethod
    def _connect(self, sock: socket.socket) -> Connection:
        """Returns the connection that serves `sock`."""

    @abstractmethod
    def _turn_away(self, sock: socket.socket) -> None:
        """Closes a connection over the bound, without waiting."""

    @abstractmethod
    async def _watch(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Runs beside the connections, until it is cancelled; none is accepted before it starts."""

    async def _drain(self) -> None:
        """Ends idle connections at once, unless they are new; busy ones after their response."""
        latest = trio.current_time() - LAST_REQUEST_S
        for connection, accepted in self._running.items():
            if accepted <= latest:
                connection.close_if_idle()

    async def _close_new(self) -> None:
        await trio.sleep(LAST_REQUEST_S)
        for connection in self._running:
            connection.close_if_idle()

    async def _accept(self, listener: socket.socket, serving: trio.Nursery) -> None:
        admit = partial(self._admit, serving)
        await accept_connections(listener, self.stats, admit, self._make_room)

    def _admit(self, serving: trio.Nursery, sock: socket.socket) -> None:
        self.stats.connections_total += 1
        counted = len(self._running) - self.stats.connections_waiting - len(self._displaced)
        if counted >= self.limits.connections and not self._make_room():
            self.stats.connections_refused += 1
            self._turn_away(sock)
            return
        connection = self._connect(sock)
        self._running[connection] = trio.current_time()
        self.stats.connections_open += 1
        serving.start_soon(self._run, connection)

    def _make_room(self) -> bool:
        """Ends the connection whose end does the least harm; returns False if none may be ended."""
        connection = self._next_dispensable()
        if connection is None and trio.current_time() >= self._check_after:
            self._find_dispensable()
            connection = self._next_dispensable()
        if connection is None:
            return False
        self._displaced.add(connection)
        self.stats.connections_displaced += 1
        connection.give_way()
        return True

    def _next_dispensable(self) -> Connection | None:
        while self._dispensable:
            rank, connection = self._dispensable.pop()
            if (
                connection in self._running
                and connection.dispensability() == rank
                and not connection.is_asked()  # a relayed request would be lost
            ):
                return connection
        return None

    def _find_dispensable(self) -> None:
        ranked = (
            (rank, connection)
            for connection in self._running
            if (rank := connection.dispensability()) and connection not in self._displaced
        )
        found = nsmallest(DISPLACED_AT_ONCE, ranked, key=itemgetter(0))
        # Known clients are ended one at a time: strangers that come meanwhile are ended first.
        unknown = [each for each in found if not each[0][0]]
        idle = (each for each in found if not each[1].is_asked())
        self._dispensable = (unknown or list(islice(idle, 1)))[::-1]
        self._check_after = -inf if found else trio.current_time() + CHECK_AGAIN_S

    async def _run(self, connection: Connection) -> None:
        try:
            await REQUESTS.steps_of(connection.run())
        finally:
            self._displaced.discard(connection)
            del self._running[connection]
            self.stats.connections_open -= 1

    async def _cut_off(self, serving: trio.CancelScope) -> None:
        await trio.sleep(self.limits.graceful_s)
        self.stats.cut_at_stop += len(self._running)
        serving.cancel()


def _set_options(listener: socket.socket) -> None:
    """Sets the options that the kernel copies to every accepted connection."""
    if listener.family != socket.AF_UNIX:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        probe_host(listener)  # clients whose answer takes long would be waited on in vain


def _close_all(listeners: Sequence[socket.socket]) -> None:
    for listener in listeners:
        listener.close()
