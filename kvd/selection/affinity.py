"""Sessions of the selection service: their requests go where those before them went.

A booking binds its session to a rank, and later selections follow the binding. A pinned worker or
an affinity target comes before the session and leaves it as it is; constraints that exclude the
session's rank hold for that request alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvd.model import Observers, PartitionKey
from kvd.selection.candidates import Fleet
from kvd.selection.requests import SelectRequest
from kvd.selection.sessions import MAX_SESSIONS, Binding, Sessions
from kvd.wire.affinity import Bound
from kvd.wire.lifecycle import Outcome

MAX_SESSION_ID_BYTES = 256  # longest session id, as on the original

Key = tuple[PartitionKey, str]


class Affinity:
    """What sessions are bound to, and which reservations keep that so."""

    def __init__(
        self,
        fleets: Mapping[PartitionKey, Fleet],
        ttl_s: float,
        writer_id: int,
        clock: Callable[[], float],
        wall_ns: Callable[[], int],
        max_sessions: int = MAX_SESSIONS,
    ) -> None:
        self.sessions: Sessions[Key] = Sessions(ttl_s, max_sessions)
        self.leases: dict[str, tuple[Key, Binding]] = {}  # by reservation id
        self.bindings: Observers[[Bound]] = Observers()  # told of bindings made here
        self._writer_id = writer_id
        self._fleets = fleets
        self._clock = clock
        self._wall_ns = wall_ns

    def target(self, ask: SelectRequest) -> tuple[int, int | None] | None:
        """Returns the worker and dp rank that a request should go to, None without a session."""
        key = _key(ask)
        binding = None if key is None else self.sessions.find(key, self._clock())
        return None if binding is None else (binding.worker_id, binding.dp_rank)

    def booked(
        self, fleet: Fleet, ask: SelectRequest, reservation_id: str, rank: tuple[int, int]
    ) -> None:
        """Binds a request's session to where it was booked, or keeps it bound."""
        key = _key(ask)
        if key is None:
            return
        binding = self.sessions.find(key, self._clock())
        if binding is not None and binding.means(*rank):
            self.sessions.lease(key, binding)
        elif binding is not None and _is_ruled_out(fleet, ask, binding):
            return  # others of the session can go there
        else:
            binding = self.sessions.bind(key, *rank, self._writer_id, self._wall_ns())
        self.leases[reservation_id] = key, binding
        self._tell(key, binding)

    def ended(self, reservation_id: str) -> None:
        """Ends what a reservation has kept bound; its session's time to live begins."""
        lease = self.leases.pop(reservation_id, None)
        if lease is not None and self.sessions.release(*lease, self._clock()):
            self._tell(*lease)

    def apply(self, bound: Bound) -> Outcome:
        """Takes what a replica says of a session."""
        fleet = self._fleets.get(bound.partition)
        if fleet is None or not fleet.workers:
            return Outcome.UNKNOWN_MODEL
        record = fleet.workers.get(bound.worker_id)
        if record is None:
            return Outcome.UNKNOWN_WORKER
        if bound.dp_rank is not None and bound.dp_rank not in record.ranks:
            return Outcome.UNKNOWN_RANK
        key = bound.partition, bound.session_id
        place = bound.worker_id, bound.dp_rank
        taken = self.sessions.apply(key, *place, bound.version, self._clock())
        return Outcome.APPLIED if taken else Outcome.OLDER

    def _tell(self, key: Key, binding: Binding) -> None:
        if self.bindings.subscribers:
            place = binding.worker_id, binding.dp_rank
            self.bindings.tell(Bound(*key, *place, binding.version))


def _key(ask: SelectRequest) -> Key | None:
    pinned = ask.constraints is not None and ask.constraints.pinned is not None
    if ask.session_id is None or pinned or ask.affinity is not None:
        return None
    return ask.key, ask.session_id


def _is_ruled_out(fleet: Fleet, ask: SelectRequest, binding: Binding) -> bool:
    """Says whether a request's constraints keep it from a rank that is there."""
    record = fleet.workers.get(binding.worker_id)
    if record is None or ask.constraints is None:
        return False
    dp_rank = record.ranks[0] if binding.dp_rank is None else binding.dp_rank
    return dp_rank in record.ranks and not ask.constraints.admits(record, dp_rank)
