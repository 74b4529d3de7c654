"""Sessions bound to ranks, so that requests find the blocks that earlier requests have cached.

    held     sessions with live requests                         kept as long as these live
    idle     sessions without, in the order in which they end    kept for the time to live

1. The first request of a session binds it to the rank on which the request is booked, and leases
   the binding. Every later request that goes there leases it too. When the last lease ends, the
   time to live begins.
2. A binding has a version: the time when it was made and the process that made it. Every replica
   keeps the binding with the larger version. The time is that of the wall clock, but always later
   than any version seen so far.
3. A lease belongs to one binding. If the session has been bound anew, the end of an old lease does
   not touch the new binding.

Costs: O(1); `expire` O(bindings that end).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvd.wire.affinity import Version

Key = TypeVar("Key", bound=Hashable)

# Bound sessions, some 500 bytes each. Beyond that the session that would end next is dropped.
MAX_SESSIONS = 262_144


@dataclass(slots=True, eq=False)
class Binding:
    """A session's rank."""

    worker_id: int
    dp_rank: int | None  # None: any rank of the worker
    version: Version
    leases: int = 0
    expiry: float = 0.0  # when it ends; it counts only without leases

    def means(self, worker_id: int, dp_rank: int | None) -> bool:
        return worker_id == self.worker_id and self.dp_rank in (None, dp_rank)


class Sessions(Generic[Key]):
    """The bindings of all sessions."""

    def __init__(self, ttl_s: float, max_sessions: int = MAX_SESSIONS) -> None:
        self.dropped = 0  # sessions at the bound
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._held: dict[Key, Binding] = {}
        self._idle: dict[Key, Binding] = {}
        self.newest = 0  # the largest sequence of all versions seen

    def __len__(self) -> int:
        return len(self._held) + len(self._idle)

    def find(self, key: Key, now: float) -> Binding | None:
        """Returns the binding of a session."""
        held = self._held.get(key)
        if held is not None:
            return held
        idle = self._idle.get(key)
        return idle if idle is not None and idle.expiry > now else None

    def bind(self, key: Key, worker_id: int, dp_rank: int, writer_id: int, wall_ns: int) -> Binding:
        """Binds a session anew, with one lease for the caller."""
        self.newest = max(self.newest + 1, wall_ns)
        binding = Binding(worker_id, dp_rank, Version(self.newest, writer_id))
        self._put(key, binding, 0.0)
        self.lease(key, binding)
        return binding

    def lease(self, key: Key, binding: Binding) -> None:
        """Keeps a binding alive until `release`."""
        binding.leases += 1
        if self._idle.pop(key, None) is not None:
            self._held[key] = binding

    def release(self, key: Key, binding: Binding, now: float) -> bool:
        """Ends a lease; False if the session has been bound anew meanwhile."""
        if self._held.get(key) is not binding:
            return False
        binding.leases -= 1
        if binding.leases == 0:
            del self._held[key]
            binding.expiry = now + self._ttl_s
            self._idle[key] = binding
        return True

    def apply(
        self, key: Key, worker_id: int, dp_rank: int | None, version: Version, now: float
    ) -> bool:
        """Applies a replica's binding; False if a newer one is known."""
        self.note(version)
        known = self.find(key, now)
        if known is not None and version < known.version:
            return False
        if known is not None and (known.worker_id, known.dp_rank) == (worker_id, dp_rank):
            known.version = version
            if known.leases == 0:
                self._put(key, known, now + self._ttl_s)
        else:
            self._put(key, Binding(worker_id, dp_rank, version), now + self._ttl_s)
        return True

    def note(self, version: Version) -> None:
        """Makes all later bindings of this process newer than a version."""
        self.newest = max(self.newest, version.sequence)

    def listed(self, now: float) -> Iterator[tuple[Key, Binding, float]]:
        """Yields the sessions that are bound now, with the start of their time to live.

        For a leased binding that is `now`. Bindings may change between two yields.
        """
        for key in [*self._idle, *self._held]:
            binding = self.find(key, now)
            if binding is not None:
                yield key, binding, now if binding.leases else binding.expiry - self._ttl_s

    def expire(self, now: float, limit: int) -> bool:
        """Forgets at most `limit` bindings that are too old; True while there may be more."""
        old: list[Key] = []
        for key, binding in self._idle.items():
            if len(old) == limit or binding.expiry > now:
                break
            old.append(key)
        for key in old:
            del self._idle[key]
        return len(old) == limit

    def _put(self, key: Key, binding: Binding, expiry: float) -> None:
        """Makes this the session's binding, and puts it last in the order of expiry."""
        self._held.pop(key, None)
        self._idle.pop(key, None)
        if len(self) >= self._max_sessions:
            rest = self._idle or self._held
            del rest[next(iter(rest))]
            self.dropped += 1
        binding.expiry = expiry
        self._idle[key] = binding
