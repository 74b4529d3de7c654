"""The live requests of this process's faces, changed by the steps of other processes.

Mirror ──> BookedHere ──> ledgers of the faces, while the journal of our own steps is paused
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from kvd.model import PartitionKey
from kvd.persistence.bookings import SAME_S
from kvd.selection.affinity import Affinity
from kvd.shared_state.entries import ENTRY_BYTES, Name
from kvd.shared_state.requests import ForeignBooking
from kvd.slots.live_requests import LiveRequests
from kvd.slots.rebooking import Booking, add_outputs, rebook
from kvd.wire import affinity as sessions
from kvd.wire.affinity import Bound
from kvd.wire.lifecycle import Face, Outcome, Step
from kvd_core.ledger.journal import Booked, Journal, read
from kvd_core.ledger.ledger import Ledger, LiveRequest

BOUND = ord("G")  # kind of a record of a session: the payload of `kvd.wire.affinity`

SCRATCH_BYTES = 64 * 1024 * 1024  # records in one slice of an export; one booking has up to 2 MiB

Faces = Mapping[Face, LiveRequests[Any]]


class Added(NamedTuple):
    """Where a request is booked."""

    face: Face
    is_new: bool  # it was not booked here before


class LiveHere(NamedTuple):
    """A request that is booked here."""

    ledger: Ledger
    request: LiveRequest


class BookedHere:
    """The faces' requests and sessions; each change wakes waiting selections afterwards."""

    def __init__(
        self,
        faces: Faces,
        affinity: Affinity | None,
        journal: Journal,
        clock: Callable[[], float],
    ) -> None:
        """The faces record in the `journal`; it is paused while steps of others are applied."""
        self.restored: set[Name] = set()  # restored requests that nobody else has described yet
        self._faces = faces
        self._affinity = affinity
        self._journal = journal
        self._clock = clock
        self._eased: set[PartitionKey] = set()  # where waiting selections are to be woken
        self._prefilled: list[Name] = []  # restored requests of which others do not know that

    @property
    def expiry_s(self) -> float:
        """The age at which all requests have expired, whatever their face."""
        return max(face.expiry_s for face in self._faces.values())

    def find(self, face: Face | None, name: Name) -> LiveHere | None:
        """Returns a request as a face has it, None if it does not or there is no face."""
        owner = None if face is None else self._faces[face].owner(name.key)
        live = None if owner is None else owner.ledger.request(name.request_id)
        return None if owner is None or live is None else LiveHere(owner.ledger, live)

    def is_booked(self, face: Face | None, name: Name) -> bool:
        return self.find(face, name) is not None

    def is_booked_anywhere(self, key: PartitionKey, request_id: str) -> bool:
        return any(self.is_booked(face, Name(face, key, request_id)) for face in self._faces)

    def all(self) -> Iterator[tuple[Name, Booked] | None]:
        """Yields all requests, also those booked meanwhile; None for a rest."""
        scratch = Journal(SCRATCH_BYTES)
        for kind, face in self._faces.items():
            for owner in list(face.owners()):
                after: int | None = 0
                while after is not None:
                    after = owner.ledger.export(scratch, after, ENTRY_BYTES)
                    for booked in list(read(scratch.take())):
                        assert isinstance(booked, Booked)
                        yield Name(kind, owner.key, booked.request_id), booked
                    yield None

    # ---- changes, to be made `quietly`

    def quietly(self, what: Callable[..., Any], *arguments: Any) -> None:
        """Applies something that came from others, and so must not be sent to them again.

        Waiting selections are woken afterwards: their bookings must be sent. So must what only this
        process knows of a restored request.
        """
        self._journal.pause()
        try:
            what(*arguments)
        finally:
            self._journal.resume()
        while self._prefilled:
            name = self._prefilled.pop()
            found = self.find(name.face, name)
            if found is not None and not found.request.prefill_complete:
                found.ledger.prefill_complete(name.request_id)
                self._eased.add(name.key)
        while self._eased:
            key = self._eased.pop()
            for face in self._faces.values():
                face.ease(key)

    def add(self, name: Name, booking: ForeignBooking) -> Added | None:
        """Books a request on its rank, by its own face if possible; None if there is no rank."""
        for kind in sorted(self._faces, key=lambda kind: kind is not name.face):
            face = self._faces[kind]
            self._make_way(name._replace(face=kind), booking)
            content = booking.booking
            outcome = rebook(face, name.key, booking.block_size, content, booking.booked_at)
            if outcome is Outcome.APPLIED:
                owner = face.owner(name.key)
                assert owner is not None
                add_outputs(owner.ledger, content, 0)
                face.observe_begin(owner, name.request_id, mirrored=True)
                return Added(kind, is_new=True)
            if outcome is Outcome.DUPLICATE:  # it came by replica sync before, or was restored
                return Added(kind, is_new=False)
        return None

    def _make_way(self, name: Name, booking: ForeignBooking) -> None:
        """Takes a restored request out of its ledger, since another process describes it anew.

        For its client it stays the same booking, so it keeps its time, unless its id has been
        booked again. Its prefill may be complete by a step that was never sent.
        """
        if name not in self.restored:
            return
        self.restored.discard(name)
        found = self.find(name.face, name)
        if found is None:
            return
        found.ledger.free(name.request_id)
        if abs(found.request.admitted_at - booking.booked_at) < SAME_S:
            booking.booked_at = found.request.admitted_at
            if found.request.prefill_complete:
                self._prefilled.append(name)

    def complete(self, face: Face, name: Name) -> None:
        self._step(face, name, Step.PREFILL_COMPLETE)

    def end(self, face: Face, name: Name) -> None:
        self._step(face, name, Step.FREE)

    def _step(self, face: Face, name: Name, step: Step) -> None:
        self._faces[face].mirror_step(name.key, name.request_id, step, self._clock())
        self._eased.add(name.key)

    def add_output(self, face: Face, name: Name, fraction: float | None) -> None:
        found = self.find(face, name)
        if found is not None:
            found.ledger.output_block(name.request_id, fraction)

    def add_outputs(self, found: LiveHere, booking: Booking) -> None:
        """Adds the output blocks that a request still lacks."""
        add_outputs(found.ledger, booking, found.request.output_blocks)

    def bind(self, payload: bytes) -> None:
        """Binds a session to its worker, as another process has."""
        bound = sessions.decode([sessions.TOPIC, payload])
        if self._affinity is not None and isinstance(bound, Bound):
            self._affinity.apply(bound)
