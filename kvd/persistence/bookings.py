"""The bookings that are alive after a journal's records, and how they are restored.

    records ──> KeptRequests.take, one by one ──> live bookings, their answers and sessions
                                                   │
    faces  <── restore: the oldest first, with its age

A journal holds everything that was booked when it was begun, and each step since. Steps that are
recorded twice, or that concern ended requests, change nothing. So the records of one journal may be
followed by those of the next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from struct import Struct
from sys import getsizeof
from typing import Any, NamedTuple

from kvd.model import PartitionKey
from kvd.persistence.clocks import ClockTranslation
from kvd.persistence.frames import Damaged, packed, unpacked
from kvd.selection.affinity import LEASED
from kvd.selection.requests import Retry, SelectReply
from kvd.selection.retries import ANSWERED
from kvd.selection.service import Selections
from kvd.slots.live_requests import LiveRequests, Receipt
from kvd.slots.rebooking import Booking, add_outputs, rebook
from kvd.slots.shared_loads import LEDGER
from kvd.slots.trackers import SlotTrackers
from kvd.wire.affinity import Bound, Version
from kvd.wire.lifecycle import Face, Outcome
from kvd_core.ledger.journal import BOOKED, ENDED, Booked, OtherRecord, Stepped
from kvd_core.ledger.ledger import Ledger

# Requests, sessions and answers restored between two checkpoints: about 1 ms.
SLICE = 32

# Memory for the requests that ended last: 15 s of 1,000 a second with ids of 36 bytes.
MAX_ENDED_BYTES = 4 * 1024 * 1024
ENDED_BYTES = 192  # what one takes besides its id

# Difference that clocks may make between two times of one booking. An id that is used again within
# that time is taken for the same request.
SAME_S = 1.0

# Kinds of records about the journal itself.
WHOLE = ord("W")  # by now the journal has everything that was booked when it was begun
HOLE = ord("H")  # records before this journal were lost: it counts only once it is whole
SHARED = ord("T")  # up to where the bookings were in the shared state: the fields of `SharedPoint`

# Records of requests before their texts (kvd_core/ledger/records.pxd).
BOOKING = Struct("<IQIIQdIIIdBHH")
STEP = Struct("<IH")

NO_LEDGER = 0  # the number of no ledger

LedgerName = tuple[Face, PartitionKey, int]  # face, model and tenant, block size
Live = tuple[LedgerName, str]  # a ledger and the id of a request in it


class SharedPoint(NamedTuple):
    """Up to where the bookings here were in the shared state when the process ended.

    They are in the steps that `numbers` counts: a fleet that has all of these and not a booking has
    ended it. The server may lose steps that only it and this process had.
    """

    at: float  # every booking from before, by the clock of the faces
    numbers: Mapping[str, int]  # by writer: its last step here


@dataclass(frozen=True, slots=True)
class SessionLease:
    """The rank that a session is bound to, and when its time to live began to run."""

    began_at: float
    bound: Bound


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """An answer that is kept for retries, and the booking that came with it."""

    retry: Retry
    answer: bytes
    key: PartitionKey
    request_id: str
    booked_at: float
    beside: str | None


class EndedRequests:
    """The requests that ended last, by their faces, ids and times of booking.

    A process that restores one which has ended meanwhile would have it go on, under a new dot.
    """

    def __init__(self) -> None:
        self._booked_at: OrderedDict[tuple[Face, PartitionKey, str], float] = OrderedDict()
        self._bytes = 0

    def note(self, face: Face, key: PartitionKey, request_id: str, booked_at: float) -> None:
        self.forget(face, key, request_id)  # moves it to the end
        self._booked_at[face, key, request_id] = booked_at
        self._bytes += _size_of(request_id)
        while self._bytes > MAX_ENDED_BYTES:
            (_, _, oldest), _ = self._booked_at.popitem(last=False)
            self._bytes -= _size_of(oldest)

    def forget(self, face: Face, key: PartitionKey, request_id: str) -> None:
        """Forgets a request, since its id is booked again."""
        if self._booked_at.pop((face, key, request_id), None) is not None:
            self._bytes -= _size_of(request_id)

    def records(self) -> Iterator[tuple[int, bytes]]:
        """Yields kinds and contents of records that say for each request that it has ended.

        It is booked and ended once more, in a ledger that no process has: of blocks of 0 tokens.
        """
        introduced = None
        for (face, key, request_id), booked_at in list(self._booked_at.items()):
            if (face, key) != introduced:
                introduced = face, key
                yield LEDGER, packed([NO_LEDGER, face.value, *key, 0])
            name = request_id.encode()
            booking = NO_LEDGER, 0, 0, 0, 0, booked_at, 0, 0, 0, 1.0, 0, len(name), 0
            yield BOOKED, BOOKING.pack(*booking) + name
            yield ENDED, STEP.pack(NO_LEDGER, len(name)) + name

    def has(self, face: Face, key: PartitionKey, request_id: str, booked_at: float) -> bool:
        """Returns whether a request that was booked at this time has ended."""
        at = self._booked_at.get((face, key, request_id))
        return at is not None and abs(booked_at - at) < SAME_S


def _size_of(request_id: str) -> int:
    return ENDED_BYTES + getsizeof(request_id)


class KeptRequests:
    """The bookings that are alive after the records read so far."""

    def __init__(self) -> None:
        self.live: dict[Live, Booking] = {}
        self.leases: dict[tuple[PartitionKey, str], SessionLease] = {}  # by session
        self.held: dict[str, Bound] = {}  # the binding that a reservation leases, by its id
        self.answers: dict[tuple[str | None, str], KeptAnswer] = {}
        self.shared_point: SharedPoint | None = None  # None: nothing has been shared
        self.ended = EndedRequests()
        # Reservations, and when each was booked by the clock of its last record.
        self._reserved: dict[tuple[PartitionKey, str | None], tuple[float, Live]] = {}
        self._ledgers: dict[int, LedgerName] = {}
        self._instance_id = ""
        self._has_all = False  # at least one journal has been whole
        self._is_whole = False  # the current journal's record WHOLE has been read
        self._renewed: set[object] = set()  # names that the current journal recorded before that
        self._translate: ClockTranslation | None = None
        # The state from before a hole, until the journal behind the hole is whole.
        self._before_hole: dict[str, Any] | None = None

    @property
    def is_part(self) -> bool:
        """Whether earlier records are missing: there are some, but no journal has been whole.

        An earlier journal is removed only once the next one is whole.
        """
        return bool(self.live or self.leases or self.answers) and not self._has_all

    def begin(self, instance_id: str, translate: ClockTranslation) -> None:
        """Begins the records of another journal; `translate` translates its clock to ours."""
        self.end()
        if instance_id != self._instance_id:
            self._ledgers.clear()  # each process numbers its ledgers anew
        self._instance_id = instance_id
        self._is_whole = False
        self._renewed.clear()
        self._translate = translate

    def end(self) -> None:
        """Ends a journal; may be called before the first one.

        A journal that began behind a hole and is not whole is forgotten: together with the records
        before the hole it would make a state that never existed.
        """
        if self._before_hole is not None:
            vars(self).update(self._before_hole)

    def take(self, record: Booked | Stepped | OtherRecord) -> None:
        """Applies the next record; raises Damaged if it has no meaning."""
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
            at, numbers = unpacked(record.content)
            self.shared_point = SharedPoint(self._translated(at), numbers)
        elif record.kind == WHOLE:
            self._forget_unrenewed()
        elif record.kind == HOLE:
            self._before_hole = deepcopy(vars(self))
        else:
            raise Damaged(f"it has a record of the unknown kind {record.kind}")

    def _take_booking(self, live: Live, record: Booked) -> None:
        """Applies the record of a booking, perhaps one that an earlier journal has had, too.

        A known booking keeps its time: translated from another journal's clock it would differ a
        little, and kept answers find their booking by its exact time.
        """
        known = self.live.get(live)
        (face, key, _), request_id = live
        if face is Face.SELECTION:
            self._reserved[key, request_id] = record.admitted_at, live
        at = self._translated(record.admitted_at) if known is None else known.booked.admitted_at
        self.live[live] = Booking.of(record._replace(admitted_at=at))
        self._note_renewed(live)
        self.ended.forget(face, key, request_id)
        # Another process may have made it before that point, but the point does not count it.
        if known is None and self.shared_point is not None and at < self.shared_point.at:
            self.shared_point = self.shared_point._replace(at=at)

    def _translated(self, moment: float) -> float:
        assert self._translate is not None
        return self._translate(moment)

    def _note_renewed(self, what: object) -> None:
        if not self._is_whole:
            self._renewed.add(what)

    def _forget_unrenewed(self) -> None:
        """Forgets what only earlier journals have recorded: its end was among dropped records."""
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
        """Returns the name of a ledger; None if the journal has not introduced it yet.

        The ledger's live requests are then recorded after its introduction.
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
            return  # the request ended before this journal was begun
        if step.kind == ENDED:
            del self.live[live]
            face, key, _ = live[0]
            self.ended.note(face, key, step.request_id, booking.booked.admitted_at)
            if face is Face.SELECTION:
                self.held.pop(step.request_id, None)
                self._reserved.pop((key, step.request_id), None)
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
        self.leases.pop(session, None)  # moves it to the end: the next to expire is first
        self.leases[session] = SessionLease(self._translated(at), bound)
        self._note_renewed(session)
        if reservation_id is not None:
            self.held[reservation_id] = bound
            self._note_renewed(reservation_id)

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
        at = self._translated(booked_at)
        for each in (request_id, beside):
            reserved = self._reserved.get((of, each))
            if reserved is not None and reserved[0] == booked_at and reserved[1] in self.live:
                at = self.live[reserved[1]].booked.admitted_at
        self.answers.pop(retry.name, None)  # moves it to the end: the oldest booking is first
        self.answers[retry.name] = KeptAnswer(retry, answer, of, request_id, at, beside)
        self._note_renewed(retry.name)


@dataclass(slots=True)
class Restored:
    """Counts of restored and of lost bookings."""

    requests: int = 0
    sessions: int = 0
    answers: int = 0
    expired: int = 0  # requests that were too old
    dropped: int = 0  # requests that their face did not take, mostly because the rank is gone


def restore(
    bookings: KeptRequests,
    slots: SlotTrackers,
    selections: Selections,
    now: float,
    restored: Restored,
) -> Iterator[None]:
    """Restores live bookings with their ages, sessions and answers; yields after every slice.

    `now` is the time of the faces' clock. Workers must have been registered before.
    """
    faces: dict[Face, LiveRequests[Any]] = {
        Face.SLOT_TRACKER: slots,
        Face.SELECTION: selections.reservations,
    }
    oldest_first = sorted(
        bookings.live.items(), key=lambda item: (item[1].booked.admitted_at, item[0][1])
    )
    with_outputs: list[tuple[Ledger, Booking]] = []
    for number, ((name, _), booking) in enumerate(oldest_first, 1):
        face, key, block_size = name
        admitted_at = min(now, booking.booked.admitted_at)
        if admitted_at < now - faces[face].expiry_s:
            restored.expired += 1
        elif rebook(faces[face], key, block_size, booking, admitted_at) is Outcome.APPLIED:
            restored.requests += 1
            if booking.output_blocks:
                with_outputs.append((faces[face].ledger_of(key), booking))
        else:
            restored.dropped += 1
        if number % SLICE == 0:
            yield
    for number, (ledger, booking) in enumerate(with_outputs, 1):
        add_outputs(ledger, booking, 0)  # none if the request has ended meanwhile
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
    live = selections.reservations.owner_of
    held = {bound for reservation_id, bound in bookings.held.items() if reservation_id in live}
    for number, lease in enumerate(bookings.leases.values(), 1):
        # The time to live of a session does not run while a request holds it.
        outcome = affinity.apply(
            lease.bound, now if lease.bound in held else min(now, lease.began_at)
        )
        restored.sessions += outcome is Outcome.APPLIED
        if number % SLICE == 0:
            yield
    for number, (reservation_id, bound) in enumerate(bookings.held.items(), 1):
        if reservation_id in live:
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
