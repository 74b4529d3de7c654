"""Sends the requests of a session to the rank that served the session before.

A booking binds its session to its rank, and later selections follow the binding. A request with a
pinned worker or an affinity target ignores its session and leaves the binding as it is. Constraints
that exclude the session's rank affect their own request alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import msgpack

from kvd.model import Observers, PartitionKey
from kvd.selection.candidates import Candidates
from kvd.selection.requests import SelectRequest
from kvd.selection.sessions import MAX_SESSIONS, Binding, Sessions
from kvd.wire.affinity import Bound
from kvd.wire.lifecycle import Outcome
from kvd_core.ledger.journal import Journal

MAX_SESSION_ID_BYTES = 256  # longest session id, as in Dynamo

# Least difference at which a replica's clock counts as ahead of ours: clocks that follow NTP agree
# within milliseconds.
LEAST_LEAD_S = 0.1
# Nanoseconds above the newest version up to which a version says nothing of its writer's clock: a
# replica whose clock is behind that version counts on from it.
COUNTED_ON_NS = 10_000

LEASED = ord("S")  # kind of a journal's record of a session: its binding, and who leases it

Key = tuple[PartitionKey, str]


class Affinity:
    """The bindings of sessions to ranks, and the reservations that keep them alive."""

    def __init__(
        self,
        candidates: Mapping[PartitionKey, Candidates],
        ttl_s: float,
        writer_id: int,
        clock: Callable[[], float],
        wall_ns: Callable[[], int],
        max_sessions: int = MAX_SESSIONS,
        journal: Journal | None = None,
    ) -> None:
        """Records changes of bindings in the `journal`, if there is one."""
        self.sessions: Sessions[Key] = Sessions(ttl_s, max_sessions)
        self.leases: dict[str, tuple[Key, Binding]] = {}  # by reservation id
        self.bindings: Observers[[Bound]] = Observers()  # notified of bindings made here
        self.lead_s = 0.0  # how far a replica's clock was ahead when that was last seen
        self.led_at = -math.inf  # when it was last seen
        self._writer_id = writer_id
        self._candidates = candidates
        self._clock = clock
        self._wall_ns = wall_ns
        self._journal = journal

    def target(self, request: SelectRequest) -> tuple[int, int | None] | None:
        """Returns the worker and dp rank that a request should go to, None without a session."""
        key = _key(request)
        binding = None if key is None else self.sessions.find(key, self._clock())
        return None if binding is None else (binding.worker_id, binding.dp_rank)

    def booked(
        self,
        candidates: Candidates,
        request: SelectRequest,
        reservation_id: str,
        rank: tuple[int, int],
    ) -> None:
        """Binds a booked request's session to its rank, or extends the binding that it has."""
        key = _key(request)
        if key is None:
            return
        binding = self.sessions.find(key, self._clock())
        if binding is not None and binding.means(*rank):
            self.sessions.lease(key, binding)
        elif binding is not None and _is_ruled_out(candidates, request, binding):
            return  # other requests of the session can still go to its rank
        else:
            binding = self.sessions.bind(key, *rank, self._writer_id, self._wall_ns())
        self.leases[reservation_id] = key, binding
        self._publish(key, binding, reservation_id)

    def ended(self, reservation_id: str) -> None:
        """Ends a reservation's lease; after the last one the session's time to live begins."""
        lease = self.leases.pop(reservation_id, None)
        if lease is not None and self.sessions.release(*lease, self._clock()):
            self._publish(*lease)

    def apply(self, bound: Bound, at: float | None = None) -> Outcome:
        """Applies a replica's binding of a session, made now or at an earlier time `at`."""
        self._note_lead(bound)
        self.sessions.note(bound.version)  # also if the session is of no model here
        candidates = self._candidates.get(bound.partition)
        if candidates is None or not candidates.workers:
            return Outcome.UNKNOWN_MODEL
        record = candidates.workers.get(bound.worker_id)
        if record is None:
            return Outcome.UNKNOWN_WORKER
        if bound.dp_rank is not None and bound.dp_rank not in record.ranks:
            return Outcome.UNKNOWN_RANK
        key = bound.partition, bound.session_id
        rank = bound.worker_id, bound.dp_rank
        at = self._clock() if at is None else at
        taken = self.sessions.apply(key, *rank, bound.version, at)
        if taken:
            self._record(bound, at)
        return Outcome.APPLIED if taken else Outcome.OLDER

    def _note_lead(self, bound: Bound) -> None:
        """Notes a version that lies in the future: the clock of its writer is ahead of ours."""
        sequence = bound.version.sequence
        lead_s = (sequence - self._wall_ns()) / 1e9
        if lead_s > LEAST_LEAD_S and sequence > self.sessions.newest + COUNTED_ON_NS:
            self.lead_s, self.led_at = lead_s, self._clock()

    def hold(self, reservation_id: str, bound: Bound) -> None:
        """Leases a binding to a live reservation, unless the session has been bound anew."""
        key = bound.partition, bound.session_id
        binding = self.sessions.find(key, self._clock())
        if binding is not None and binding.version == bound.version:
            self.sessions.lease(key, binding)
            self.leases[reservation_id] = key, binding

    def _publish(self, key: Key, binding: Binding, reservation_id: str | None = None) -> None:
        bound = _bound(key, binding)
        self.bindings.notify(bound)
        self._record(bound, self._clock(), reservation_id)

    def _record(self, bound: Bound, at: float, reservation_id: str | None = None) -> None:
        if self._journal is not None:
            member = bound.session_id, bound.worker_id, bound.dp_rank
            content = at, bound.partition, *member, bound.version, reservation_id
            self._journal.put(LEASED, msgpack.packb(content))

    def bound(self) -> Iterator[Bound]:
        """Yields all sessions that are bound now; bindings may change between two yields."""
        for key, binding, _ in self.sessions.listed(self._clock()):
            yield _bound(key, binding)

    def export(self) -> Iterator[None]:
        """Records all sessions and leases in the journal; yields after each."""
        for key, binding, at in self.sessions.listed(self._clock()):
            self._record(_bound(key, binding), at)
            yield
        for reservation_id, (key, binding) in list(self.leases.items()):
            if reservation_id in self.leases:
                self._record(_bound(key, binding), self._clock(), reservation_id)
            yield


def _key(request: SelectRequest) -> Key | None:
    pinned = request.constraints is not None and request.constraints.pinned is not None
    if request.session_id is None or pinned or request.affinity is not None:
        return None
    return request.key, request.session_id


def _bound(key: Key, binding: Binding) -> Bound:
    return Bound(*key, binding.worker_id, binding.dp_rank, binding.version)


def _is_ruled_out(candidates: Candidates, request: SelectRequest, binding: Binding) -> bool:
    """Returns whether constraints exclude the rank of a binding, although that rank exists."""
    record = candidates.workers.get(binding.worker_id)
    if record is None or request.constraints is None:
        return False
    dp_rank = record.ranks[0] if binding.dp_rank is None else binding.dp_rank
    return dp_rank in record.ranks and not request.constraints.admits(record, dp_rank)
