"""The bookings alive after a journal, and how they are restored.

    records ──> KeptRequests.take, one by one ──> what is booked, and its answers and sessions
                                                   │
    faces  <── restore: the oldest first, with its age

A journal holds what was booked when it was begun, and each step since. Steps that are recorded
twice, or of what has ended, change nothing, so the records of one journal may be followed by those
of the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from kvd.model import PartitionKey
from kvd.persistence.clocks import ClockTranslation
from kvd.persistence.frames import Damaged, unpacked
from kvd.selection.affinity import LEASED
from kvd.selection.requests import Retry, SelectReply
from kvd.selection.retries import ANSWERED
from kvd.selection.service import Selections
from kvd.slots.live_requests import LiveRequests, Receipt
from kvd.slots.rebooking import Booking, rebook
from kvd.slots.shared_loads import LEDGER
from kvd.slots.trackers import SlotTrackers
from kvd.wire.affinity import Bound, Version
from kvd.wire.lifecycle import Face, Outcome
from kvd_core.ledger.journal import ENDED, Booked, OtherRecord, Stepped

# Requests, sessions and answers that come back between two checkpoints: about 1 ms.
SLICE = 32

WHOLE = ord("W")  # a journal has recorded all that was booked when it began
HOLE = ord("H")  # records before this journal were lost: it holds only as a whole
SHARED = ord("T")  # so has the server of the shared state, of all that was booked before a time

LedgerName = tuple[Face, PartitionKey, int]  # face, model and tenant, block size
Live = tuple[LedgerName, str]  # a ledger and the id of a request there


@dataclass(frozen=True, slots=True)
class SessionLease:
    """The rank that a session is bound to, and the moment from which its time to live runs."""

    at: float
    bound: Bound


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """An answer that is kept for retries, and what was booked with it."""

    retry: Retry
    answer: bytes
    key: PartitionKey
    request_id: str
    booked_at: float
    beside: str | None


class KeptRequests:
    """The bookings alive after the records read so far."""

    def __init__(self) -> None:
        self.live: dict[Live, Booking] = {}
        self.leases: dict[tuple[PartitionKey, str], SessionLease] = {}  # of sessions
        self.held: dict[str, Bound] = {}  # by reservation: what it keeps bound
        self.answers: dict[tuple[str | None, str], KeptAnswer] = {}
        self.shared_at: float | None = None  # see kvd.persistence.journal
        # Reservations, and when each was booked by the clock of its last record.
        self._reserved: dict[tuple[PartitionKey, str | None], tuple[float, Live]] = {}
        self._ledgers: dict[int, LedgerName] = {}
        self._instance_id = ""
        self._has_all = False  # some journal so far has begun with all that was booked
        self._is_whole = False  # what was booked when the journal began has all been read
        self._renewed: set[object] = set()  # by this journal, before it was whole
        self._translate: ClockTranslation | None = None
        # The state of the journals before a hole, until the one behind it has been whole.
        self._before_hole: dict[str, Any] | None = None

    @property
    def is_part(self) -> bool:
        """Returns whether the records are the rest of more: the beginning of a first journal is
        missing.

        The one before it has gone only once it had all.
        """
        return bool(self.live or self.leases or self.answers) and not self._has_all

    def begin(self, instance_id: str, translate: ClockTranslation) -> None:
        """Begins the records of another journal; `translate` reads its clock."""
        self.end()
        if instance_id != self._instance_id:
            self._ledgers.clear()  # each process numbers its own
        self._instance_id = instance_id
        self._is_whole = False
        self._renewed.clear()
        self._translate = translate

    def end(self) -> None:
        """Ends a journal; may be called before the first one.

        What began behind a hole and is not whole is forgotten: with what was recorded before, it
        would be a state that never was.
        """
        if self._before_hole is not None:
            vars(self).update(self._before_hole)

    def take(self, record: Booked | Stepped | OtherRecord) -> None:
        """Takes the next record; raises Damaged on one that means nothing."""
        if isinstance(record, Booked):
            if (name := self._name(record.ledger)) is not None:
                self._take_booking((name, record.request_id), record)
        elif isinstance(record, Stepped):
            self._step(record)
        elif record.kind == LEDGER:
            number, face, model_name, tenant_id, block_size = unpacked(record.content)
            self._ledgers[number] = Face(face), PartitionKey(model_name, tenant_id), block_size
        elif record.kind == LEASED:
            self._lease(*unpacked(record.content))
        elif record.kind == ANSWERED:
            self._answer(*unpacked(record.content))
        elif record.kind == SHARED:
            self.shared_at = self._at(unpacked(record.content))
        elif record.kind == WHOLE:
            self._forget_unrenewed()
        elif record.kind == HOLE:
            self._before_hole = deepcopy(vars(self))
        else:
            raise Damaged(f"it has a record of the unknown kind {record.kind}")

    def _take_booking(self, live: Live, record: Booked) -> None:
        """Takes a booking, or its record in a further journal.

        It keeps its time then: no two readings of clocks agree, and answers go by it.
        """
        known = self.live.get(live)
        (face, key, _), request_id = live
        if face is Face.SELECTION:
            self._reserved[key, request_id] = record.admitted_at, live
        at = self._at(record.admitted_at) if known is None else known.booked.admitted_at
        self.live[live] = Booking.of(record._replace(admitted_at=at))
        self._tell(live)

    def _at(self, moment: float) -> float:
        assert self._translate is not None
        return self._translate(moment)

    def _tell(self, what: object) -> None:
        if not self._is_whole:
            self._renewed.add(what)

    def _forget_unrenewed(self) -> None:
        """Forgets what only earlier journals have recorded: it ended where these had no room."""
        self._is_whole = self._has_all = True
        self._before_hole = None
        self.live = {name: each for name, each in self.live.items() if name in self._renewed}
        self.leases = {name: each for name, each in self.leases.items() if name in self._renewed}
        self.answers = {name: each for name, each in self.answers.items() if name in self._renewed}
        self.held = {name: each for name, each in self.held.items() if name in self._renewed}
        reserved = self._reserved.items()
        self._reserved = {name: each for name, each in reserved if each[1] in self.live}
        self._renewed.clear()

    def _name(self, number: int) -> LedgerName | None:
        """Returns which ledger it is; None for one that the journal is still to introduce.

        Its live requests are recorded behind that.
        """
        name = self._ledgers.get(number)
        if name is None and self._is_whole:
            raise Damaged(f"a record is about ledger {number}, which no earlier one describes")
        return name

    def _step(self, step: Stepped) -> None:
        name = self._name(step.ledger)
        live = None if name is None else (name, step.request_id)
        booking = None if live is None else self.live.get(live)
        if live is None or booking is None:
            return  # it has ended before this journal began
        if step.kind == ENDED:
            del self.live[live]
            if live[0][0] is Face.SELECTION:
                self.held.pop(step.request_id, None)
                self._reserved.pop((live[0][1], step.request_id), None)
        else:
            booking.take(step)

    def _lease(
        self,
        at: float,
        partition: list[str],
        session_id: str,
        worker_id: int,
        dp_rank: int | None,
        version: list[int],
        reservation_id: str | None,
    ) -> None:
        session = PartitionKey(*partition), session_id
        bound = Bound(*session, worker_id, dp_rank, Version(*version))
        self.leases.pop(session, None)  # the next to end comes first
        self.leases[session] = SessionLease(self._at(at), bound)
        self._tell(session)
        if reservation_id is not None:
            self.held[reservation_id] = bound
            self._tell(reservation_id)

    def _answer(
        self,
        reservation_id: str | None,
        key: str,
        content: bytes,
        answer: bytes,
        partition: list[str],
        request_id: str,
        booked_at: float,
        beside: str | None,
    ) -> None:
        retry = Retry((reservation_id, key), content)
        of = PartitionKey(*partition)
        at = self._at(booked_at)
        for each in (request_id, beside):
            reserved = self._reserved.get((of, each))
            if reserved is not None and reserved[0] == booked_at and reserved[1] in self.live:
                at = self.live[reserved[1]].booked.admitted_at
        self.answers.pop(retry.name, None)  # the oldest booking comes first
        self.answers[retry.name] = KeptAnswer(retry, answer, of, request_id, at, beside)
        self._tell(retry.name)


@dataclass(slots=True)
class Restored:
    """Counts of restored and of lost bookings."""

    requests: int = 0
    sessions: int = 0
    answers: int = 0
    expired: int = 0  # requests that were too old
    dropped: int = 0  # those whose rank is gone


def restore(
    bookings: KeptRequests,
    slots: SlotTrackers,
    selections: Selections,
    now: float,
    restored: Restored,
) -> Iterator[None]:
    """Books again what lives, with its age, and yields after every slice.

    The clock of the faces says `now`. Workers are to be registered before.
    """
    faces: dict[Face, LiveRequests[Any]] = {
        Face.SLOT_TRACKER: slots,
        Face.SELECTION: selections.reservations,
    }
    oldest_first = sorted(
        bookings.live.items(), key=lambda item: (item[1].booked.admitted_at, item[0][1])
    )
    for number, ((name, _), booking) in enumerate(oldest_first, 1):
        face, key, block_size = name
        admitted_at = min(now, booking.booked.admitted_at)
        if admitted_at < now - faces[face].expiry_s:
            restored.expired += 1
        elif rebook(faces[face], key, block_size, booking, admitted_at) is Outcome.APPLIED:
            restored.requests += 1
        else:
            restored.dropped += 1
        if number % SLICE == 0:
            yield
    yield from _restore_sessions(bookings, selections, now, restored)
    yield from _restore_answers(bookings, selections, now, restored)


def _restore_sessions(
    bookings: KeptRequests, selections: Selections, now: float, restored: Restored
) -> Iterator[None]:
    affinity = selections.affinity
    if affinity is None:
        return
    for number, lease in enumerate(bookings.leases.values(), 1):
        outcome = affinity.apply(lease.bound, min(now, lease.at))
        restored.sessions += outcome is Outcome.APPLIED
        if number % SLICE == 0:
            yield
    for number, (reservation_id, bound) in enumerate(bookings.held.items(), 1):
        if reservation_id in selections.reservations.live:
            affinity.hold(reservation_id, bound)
        if number % SLICE == 0:
            yield


def _restore_answers(
    bookings: KeptRequests, selections: Selections, now: float, restored: Restored
) -> Iterator[None]:
    booked = {
        (name[1], request_id, booking.booked.admitted_at)
        for (name, request_id), booking in bookings.live.items()
        if name[0] is Face.SELECTION
    }
    for number, answer in enumerate(bookings.answers.values(), 1):
        candidates = selections.candidates.get(answer.key)
        ids = answer.request_id, answer.beside
        of_it = [(answer.key, each, answer.booked_at) for each in ids]
        if candidates is not None and not booked.isdisjoint(of_it):
            at = min(now, answer.booked_at)
            receipt = Receipt(candidates, answer.request_id, at, answer.beside)
            if receipt.left() is not None:
                reply = SelectReply(answer.answer, receipt)
                selections.reservations.retries.note(answer.retry, reply)
                restored.answers += 1
        if number % SLICE == 0:
            yield
