"""The base of registrations of ranks and of publishers: capacity, start and end of listeners.

Registrations of all faces count against one `ListenerCapacity`; ranks and publishers identify their
listeners by keys of their own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import trio

from kvd.errors import Unavailable
from kvd.index.capacity import ListenerCapacity
from kvd.index.partitions import State
from kvd.wire.curve import check_server_key
from kvd.wire.egress import EgressPolicy
from kvd.wire.endpoints import Addresses
from kvd.wire.event_stream import EventStream
from kvd.wire.stream_link import STALE_AFTER_S
from kvd.wire.stream_stats import StreamStats

# Registrations that begin to end in one pass of the loop: each takes 0.4 ms there and in the next
# passes, until its connection is closed.
ENDED_AT_ONCE = 2


class Listeners(Protocol):
    """Starts and stops listeners; `kvd.net` provides it."""

    def start(self, key: Hashable, listener: EventStream) -> None:
        """Starts the listener's task; KeyError while `key` has one."""

    async def stop(self, key: Hashable) -> bool:
        """Ends a listener's task and returns True; without one returns False at once."""


@dataclass(frozen=True, slots=True)
class ListeningRules:
    """What holds for the listeners of all faces together."""

    capacity: ListenerCapacity = field(default_factory=ListenerCapacity)
    outgoing: EgressPolicy = field(default_factory=EgressPolicy)  # the addresses they may have
    stale_after_s: float = STALE_AFTER_S


class ListenedRegistrations:
    """Registrations that each have a listener."""

    def __init__(
        self, state: State, listeners: Listeners, rules: ListeningRules | None = None
    ) -> None:
        """Without `rules` the default ones hold, for these registrations alone."""
        rules = rules or ListeningRules()
        self._stale_after_s = rules.stale_after_s
        self.outgoing = rules.outgoing
        self._state = state
        self._listeners = listeners
        self._capacity = rules.capacity
        self.left_stats = StreamStats()  # sums over ended listeners
        self.refused = 0  # registrations beyond the capacity
        self.changes = 0  # how often a registration has come or gone

    def _check_addresses(self, addresses: Addresses) -> None:
        """Raises BadRequest on an address or a key that cannot be listened to."""
        endpoint, replay_endpoint, server_key = addresses
        self.outgoing.check_endpoint(endpoint)
        if replay_endpoint is not None:
            self.outgoing.check_replay_endpoint(replay_endpoint)
        check_server_key(server_key)

    def _check_capacity(self, count: int = 1) -> None:
        """Raises Unavailable if so many more listeners would exceed the capacity."""
        if not self._capacity.has(count):
            self.refused += 1
            raise Unavailable(self._capacity.refusal)

    def _start(self, key: Hashable, listener: EventStream) -> None:
        """Starts the listener of a new registration."""
        self.changes += 1
        self._capacity.take()
        self._listeners.start(key, listener)

    def _end(self, listener: EventStream) -> None:
        """Notes that a registration has gone; its listener must have stopped."""
        self._capacity.give_back()
        self.left_stats.add(listener.stats)

    async def _end_all(self, ends: Iterable[Callable[[], Awaitable[None]]]) -> None:
        """Ends registrations side by side, as each waits for its listener, a few in each pass."""
        async with trio.open_nursery() as nursery:
            for number, end in enumerate(ends, 1):
                nursery.start_soon(end)
                if number % ENDED_AT_ONCE == 0:
                    await trio.lowlevel.checkpoint()
