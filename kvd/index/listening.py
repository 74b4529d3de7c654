"""What registrations of ranks and of publishers share: the capacity, and listeners' start and end.

Registrations of all faces count against one `ListenerCapacity`; each names its listeners by keys
of its own.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from kvd.errors import Unavailable
from kvd.index.capacity import ListenerCapacity
from kvd.index.partitions import State
from kvd.wire.curve import check_server_key
from kvd.wire.egress import EgressPolicy
from kvd.wire.endpoints import Addresses
from kvd.wire.event_stream import EventStream
from kvd.wire.stream_link import STALE_AFTER_S
from kvd.wire.stream_stats import StreamStats


class Listeners(Protocol):
    """Starts and stops listeners; `kvd.net` provides it."""

    def start(self, key: Hashable, listener: EventStream) -> None:
        """Starts the listener's task; KeyError while `key` has one."""

    async def stop(self, key: Hashable) -> bool:
        """Returns True when the listener's task has ended; False, and at once, without one."""


class ListenedRegistrations:
    """Registrations that each have a listener."""

    def __init__(
        self,
        state: State,
        listeners: Listeners,
        capacity: ListenerCapacity | None = None,
        outgoing: EgressPolicy | None = None,
        stale_after_s: float = STALE_AFTER_S,
    ) -> None:
        """Without a rule about addresses the default one holds."""
        self._stale_after_s = stale_after_s
        self.outgoing = outgoing or EgressPolicy()
        self._state = state
        self._listeners = listeners
        self._capacity = capacity or ListenerCapacity()
        self.left_stats = StreamStats()  # of listeners that are no more
        self.refused = 0  # at the capacity
        self.changes = 0  # registrations that have come and gone

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
        """Notes that a registration has gone, whose listener has stopped."""
        self._capacity.give_back()
        self.left_stats.add(listener.stats)
