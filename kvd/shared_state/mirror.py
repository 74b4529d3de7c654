"""The live requests of all processes as known here, and how far each process was read.

    entries of the stream ──> take ──────────┐
                                             ├──> the faces' ledgers, as live requests
    views of other writers ──> Merge ────────┘

    numbers    writer ──> number up to which all its steps are in here
    requests   face, model, tenant, id ──> Known: its dot, and from where on its steps count
    ended      dots of ended requests, as far as `numbers` do not include them
    behind     writer ──> number of a step of it that exists, although earlier ones are missing here

The dot of a request is its writer and the number of the step that booked it. If a replica's
`numbers` or `ended` include that step and it does not have the request, then the request has ended.
So two views merge without remembering all ended requests (an observed-remove set with a version
vector and a cloud of dots): if only one of them has a request, the other's numbers say whether the
request is new or gone.

1. The steps of a writer are applied in the order of their numbers, each once. After a gap no more
   are applied until a view with the missing ones has been merged.
2. If two writers book the same id, all replicas keep the booking that is first in the stream.
3. A step belongs to one booking, named by its dot, or by another one: a restored request that no
   view describes, as after the server was emptied, gets a dot at each process. A step that arrives
   before its booking is held for a while. Who ends such a request, or learns of its end by one
   dot, ends each other dot by a step of its own, since others may know it by that one alone.
4. A step counts for a request unless the request's description includes it already. A view includes
   its writer's own steps up to the last one, and the steps of others up to the position at which
   the writer had read the stream.
5. A request without a rank here waits for one, and its steps are applied to it meanwhile.
6. For each request a process knows how many output blocks every other writer has reported, and up
   to which of its steps; the remaining output blocks in the ledger are its own. So two counts
   merge, too.

Costs: a step some 10 µs, a booking with its hashes 20 µs; 400 bytes for a live request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from kvd.model import PartitionKey
from kvd.replica_sync.deduplication import Deduplicator
from kvd.selection.affinity import Affinity
from kvd.shared_state.entries import (
    BEGINNING,
    ENTRY_BYTES,
    Dot,
    LedgerName,
    Outputs,
    Piece,
    Position,
    StreamEntry,
    ViewHead,
)
from kvd.slots.live_requests import LiveRequests
from kvd.slots.rebooking import Booking, add_outputs, rebook
from kvd.wire import affinity as sessions
from kvd.wire.affinity import Bound
from kvd.wire.lifecycle import Face, Outcome, Step
from kvd_core.ledger.journal import (
    ENDED,
    OUTPUT,
    PREFILLED,
    Booked,
    Journal,
    OtherRecord,
    Stepped,
    read,
)

BOUND = ord("G")  # kind of a record of a session: the payload of `kvd.wire.affinity`

SCRATCH_BYTES = 64 * 1024 * 1024  # records in one slice of an export; one booking has up to 2 MiB

SLICE = 32  # records applied between two checkpoints: under 1 ms

# The position given to our own steps on bookings known from replica sync alone: no view has them.
NEWEST = Position(2**63, 0)

# Requests that wait for their rank to be registered here. Further ones are left out, and views of
# this process do not count the steps of their writers from there on.
MAX_WAITING = 16_384

# Steps that wait for their booking, and how long: with replica sync on, too, a step may overtake
# its booking. Beyond the bound the oldest are dropped.
MAX_EARLY = 65_536
EARLY_S = 60.0

MAX_ENDED = 65_536  # dots in `ended`; beyond that the oldest are forgotten

# Time after which a silent writer without live requests is forgotten, since each restart makes a
# new writer. If the writer is still there, its next step shows as a gap, and its view is read.
FORGET_S = 3600.0

Faces = Mapping[Face, LiveRequests[Any]]


class Name(NamedTuple):
    """Names a request, with the face through which it was booked."""

    face: Face
    key: PartitionKey
    request_id: str


@dataclass(frozen=True, slots=True)
class Seen:
    """Which steps a request's description already has: later ones count."""

    position: Position
    writer: str
    number: int

    def covers(self, writer: str, number: int, position: Position) -> bool:
        if writer == self.writer:
            return number <= self.number
        return position <= self.position


def _all(dot: Dot) -> Seen:
    """Returns the Seen of a fresh booking: all later steps count, also our own unsent ones."""
    return Seen(Position(-1, 0), *dot)


@dataclass(slots=True)
class Known:
    """A request that lives, as far as this process knows."""

    dot: Dot
    seen: Seen
    face: Face | None  # where it is booked here; None: it waits for a rank
    also: tuple[Dot, ...] = ()  # other dots that it has elsewhere, where it was restored
    waiting: RequestWithoutRank | None = None
    outputs: dict[str, Outputs] = field(default_factory=dict)  # as other writers reported them

    @property
    def dots(self) -> tuple[Dot, ...]:
        return (self.dot, *self.also)

    @property
    def foreign_outputs(self) -> int:
        return sum(each.blocks for each in self.outputs.values())


@dataclass(frozen=True, slots=True)
class ForeignStep:
    """One step of another writer."""

    dot: Dot  # the writer and number of this step
    record: Booked | Stepped | OtherRecord
    request_dot: Dot | None  # the dot of the step's request, if known
    position: Position  # in the stream


@dataclass(slots=True)
class RequestWithoutRank:
    """A request that has no rank here yet."""

    block_size: int
    booking: Booking
    booked_at: float


@dataclass(slots=True)
class MirrorStats:
    """Counts of other processes' steps by outcome; plain numbers for metrics."""

    steps: int = 0  # applied
    bookings: int = 0  # requests of others, booked here
    ended: int = 0  # requests that a view has shown to be gone
    replaced: int = 0  # bookings made here under an id that another process had booked first
    left_out: int = 0  # beyond MAX_WAITING, MAX_EARLY or MAX_ENDED
    gaps: int = 0
    views: int = 0  # merged


class Mirror:
    """The live requests of all writers."""

    def __init__(
        self,
        writer: str,
        faces: Faces,
        affinity: Affinity | None,
        journal: Journal,
        deduplicator: Deduplicator,
        serves: Callable[[PartitionKey], bool],
        clock: Callable[[], float],
    ) -> None:
        """The faces record in the `journal`; it is paused while steps of others are applied.

        Requests that `deduplicator` knows are shared by replica sync, and not sent from here.
        """
        self.writer = writer
        self.own = 0  # number of the last step of this process
        self.settled = 0  # number of its last step that has come back in the stream
        self.position = BEGINNING  # up to which the stream has been read
        self.numbers: dict[str, int] = {}
        self._heard_at: dict[str, float] = {}  # when a writer's number last grew
        self.requests: dict[Name, Known] = {}
        self.waiting: dict[Name, Known] = {}
        self.behind: dict[str, int] = {}
        self.ended: dict[Dot, None] = {}  # the oldest first
        self.untold: list[tuple[Name, Dot]] = []  # ends that are still to be made own steps
        self.stats = MirrorStats()
        self._faces = faces
        self._affinity = affinity
        self._journal = journal
        self._serves = serves
        self._clock = clock
        self._deduplicator = deduplicator
        self._restored: set[Name] = set()  # restored requests that nobody else has described yet
        self._from_before: set[Name] = set()  # all restored requests, also those that have ended
        self._began_at = math.inf
        self._early: dict[Dot | Name, list[tuple[float, ForeignStep]]] = {}
        self._held = 0  # number of steps in `_early`
        self._lacking: dict[str, int] = {}  # by writer: its first booking that was left out here
        self._eased: set[PartitionKey] = set()  # where waiting selections are to be woken

    # ---- steps made here

    def booked_here(self, name: LedgerName, request_id: str) -> None:
        """Notes a booking made here, whose step has the number `own`."""
        dot = Dot(self.writer, self.own)
        known = Known(dot, _all(dot), name.face)
        self.requests[Name(name.face, name.key, request_id)] = known

    def stepped_here(self, ledger: LedgerName, step: Stepped) -> Dot | None:
        """Notes a step made here, which has the number `own`; returns the dot of its booking.

        None means that the booking is known from replica sync alone, and not yet from the stream.
        """
        name = Name(ledger.face, ledger.key, step.request_id)
        found = self._find(name)
        if found is None:
            dot = Dot(self.writer, self.own)
            self._hold(name, ForeignStep(dot, step, None, NEWEST))
            return None
        known = self.requests[found]
        if step.kind == ENDED:
            self._deduplicator.note_end(*name[1:])
            self._note_ended(known.dot)
            for dot in known.also:
                self._end_dot(found, dot)
            self._forget(found)
        return known.dot

    def skip_own(self) -> None:
        """Leaves out a number, because steps of ours were lost and never reach the stream."""
        self.own += 1

    def note_restored(self) -> None:
        """Notes the requests that are booked before any call can have arrived."""
        self._restored = {each[0] for each in self._unknown() if each is not None}
        self._from_before = set(self._restored)
        self._began_at = self._clock()

    def claim(self) -> Iterator[None]:
        """Gives dots to bookings here that have none: restored ones, and those with a lost step."""
        for found in self._unknown():
            if found is None:
                yield
                continue
            name, _ = found
            self.own += 1
            self.booked_here(LedgerName(name.face, name.key, 0), name.request_id)

    def has_all(self, numbers: Mapping[str, int]) -> bool:
        """Returns whether all steps up to these numbers, by writer, are in here."""
        return all(self._whole(each) >= last for each, last in numbers.items())

    def whole_numbers(self) -> dict[str, int]:
        """Returns, by writer, up to which number its steps are in here, and none was left out."""
        return {each: self._whole(each) for each in self.numbers}

    def _whole(self, writer: str) -> int:
        number = self.numbers.get(writer, 0)
        return min(number, self._lacking.get(writer, number + 1) - 1)

    def has_heard(self, dot: Dot) -> bool:
        """Returns whether a booking is in here, or has been and has ended."""
        number = self.own if dot.writer == self.writer else self._whole(dot.writer)
        return dot.number <= number or dot in self.ended

    def _note_ended(self, dot: Dot) -> None:
        """Notes the end of a booking, perhaps before all earlier steps of its writer are here."""
        if not self.has_heard(dot):
            self.ended[dot] = None
            if len(self.ended) > MAX_ENDED:
                del self.ended[next(iter(self.ended))]
                self.stats.left_out += 1

    def _end_dot(self, name: Name, dot: Dot) -> None:
        """Ends a booking by a step of ours, for those who know its request by this dot alone."""
        self._note_ended(dot)
        self.untold.append((name, dot))

    def drop_unknown(self, shared_at: float) -> Iterator[None]:
        """Ends bookings from before `shared_at` that no other process knows.

        All steps that had been shared by then have to be in here: then the bookings have ended.
        """
        for found in self._unknown(shared_at):
            if found is None:
                yield
                continue
            name, face = found
            self._quietly(self._mirror_step, face, name, Step.FREE)
            self.stats.ended += 1

    def _unknown(self, before: float = math.inf) -> Iterator[tuple[Name, LiveRequests[Any]] | None]:
        """Yields bookings here from before `before` that nobody has shared; None for a rest."""
        scratch = Journal(SCRATCH_BYTES)
        for kind, face in self._faces.items():
            for owner in list(face.owners()):
                after: int | None = 0
                while after is not None:
                    after = owner.ledger.export(scratch, after, ENTRY_BYTES)
                    for booked in list(read(scratch.take())):
                        assert isinstance(booked, Booked)
                        name = Name(kind, owner.key, booked.request_id)
                        is_known = (
                            self._find(name) is not None or name[1:] in self._deduplicator.requests
                        )
                        if booked.admitted_at < before and not is_known:
                            yield name, face
                    yield None

    def prune(self) -> Iterator[None]:
        """Forgets requests that are no longer booked here or have waited too long for a rank."""
        now = self._clock()
        if now - self._began_at > max(face.expiry_s for face in self._faces.values()):
            self._from_before.clear()
        writers: set[str] = set()
        for number, (name, known) in enumerate(list(self.requests.items()), 1):
            writers.add(known.dot.writer)
            if not self._lives(name, known, now) and self.requests.get(name) is known:
                self._forget(name)
            if number % SLICE == 0:
                yield
        for writer, at in list(self._heard_at.items()):
            if at < now - FORGET_S and writer not in writers:
                del self.numbers[writer], self._heard_at[writer]
                self._lacking.pop(writer, None)
        self.ended = {dot: None for dot in self.ended if dot.number > self._whole(dot.writer)}
        old = [of for of, steps in self._early.items() if steps[0][0] < now - EARLY_S]
        for of in old:
            self._held -= len(self._early.pop(of))
        faces = self._faces
        for number, (key, request_id) in enumerate(list(self._deduplicator.requests), 1):
            if number % SLICE == 0:
                yield
            if not any(self._is_booked(face, Name(face, key, request_id)) for face in faces):
                self._deduplicator.requests.discard((key, request_id))

    def _lives(self, name: Name, known: Known, now: float) -> bool:
        if known.waiting is None:
            return self._is_booked(known.face, name)
        expiry_s = max(face.expiry_s for face in self._faces.values())
        return known.waiting.booked_at >= now - expiry_s

    def _is_booked(self, face: Face | None, name: Name) -> bool:
        owner = None if face is None else self._faces[face].owner(name.key)
        return owner is not None and owner.ledger.request(name.request_id) is not None

    # ---- steps of others

    def take(self, entry: StreamEntry, position: Position, age_s: float) -> Iterator[None]:
        """Applies an entry of the stream that was made `age_s` ago; rests at every yield.

        Raises ValueError on a malformed record; the records before it have been applied.
        """
        if entry.writer == self.writer:
            return
        have = self.numbers.get(entry.writer, 0)
        if entry.last <= have:
            return
        if entry.first > have + 1:
            self.missed(entry.writer, entry.last)
            return
        dots = iter(entry.dots)
        later = self._clock() - entry.clock - age_s
        number = entry.first - 1
        for record in read(entry.records):
            number += 1
            of = next(dots, None) if isinstance(record, Stepped) else None
            if number <= have:
                continue
            foreign = ForeignStep(Dot(entry.writer, number), record, of, position)
            self._quietly(self._take, entry.ledgers, foreign, later)
            self.hear(entry.writer, number)
            self.stats.steps += 1
            if number % SLICE == 0:
                yield
        if number != entry.last:
            raise ValueError(f"an entry up to step {entry.last} ends with step {number}")

    def hear(self, writer: str, number: int) -> None:
        """Notes that all steps of a writer up to a number are in here."""
        if number > self.numbers.get(writer, 0):
            self.numbers[writer] = number
            self._heard_at[writer] = self._clock()

    def heard_lately(self) -> dict[str, int]:
        """Returns the numbers of the writers that have recently sent steps."""
        since = self._clock() - FORGET_S / 2
        return {each: self._whole(each) for each, at in self._heard_at.items() if at >= since}

    def missed(self, writer: str, number: int) -> None:
        """Notes that steps of a writer up to a number exist, some of which are missing here."""
        if writer not in self.behind:
            self.stats.gaps += 1
        self.behind[writer] = max(self.behind.get(writer, 0), number)

    def _take(self, ledgers: Mapping[int, LedgerName], foreign: ForeignStep, later: float) -> None:
        record = foreign.record
        if isinstance(record, OtherRecord):
            if record.kind == BOUND:
                self._bind(record.content)
            return
        ledger = ledgers.get(record.ledger)
        if ledger is None or not self._serves(ledger.key):
            return
        name = Name(ledger.face, ledger.key, record.request_id)
        if isinstance(record, Booked):
            if foreign.dot in self.ended:
                return
            known = self.requests.get(name)
            if known is not None and not self._end_if_later(name, known):
                if name in self._from_before:  # it may be this very booking, by its first dot
                    self.note_dots(name, [foreign.dot])
                return
            at = min(self._clock(), record.admitted_at + later)
            content = Booking.of(record), at, foreign.dot, _all(foreign.dot)
            self._take_booking(
                name, ledger.block_size, *content, [Outputs(*foreign.dot, record.output_blocks)]
            )
            if known is not None:
                self.note_dots(name, known.dots)
        else:
            self._take_step(name, foreign, record)

    def _take_step(self, name: Name, foreign: ForeignStep, step: Stepped) -> None:
        found = self._find(name)
        known = None if found is None else self.requests[found]
        is_it = known is not None and foreign.request_dot in (None, *known.dots)
        if found is not None and known is not None and is_it:
            # Who described the request may have read its end by a dot that it did not know.
            is_sure = step.kind == ENDED and foreign.request_dot is not None
            if step.kind == OUTPUT:
                self._take_output(found, foreign.dot, step)
            elif is_sure or not known.seen.covers(*foreign.dot, foreign.position):
                self._step(found, step, foreign.request_dot)
        elif foreign.request_dot is None:
            self._hold(name, foreign)
        elif step.kind == ENDED:
            self._note_ended(foreign.request_dot)
        elif not self.has_heard(foreign.request_dot):
            self._hold(foreign.request_dot, foreign)

    def _take_output(self, name: Name, dot: Dot, step: Stepped) -> None:
        known = self.requests[name]
        if dot.writer != self.writer:
            _, number, count = known.outputs.get(dot.writer, Outputs(dot.writer, 0, 0))
            if dot.number <= number:
                return
            known.outputs[dot.writer] = Outputs(*dot, count + 1)
        self._step(name, step)

    def outputs_of(self, known: Known, booked: Booked) -> list[Outputs] | None:
        """Returns the output blocks of a booking by writer; None if all are this process's own."""
        if not known.outputs:
            return None
        own = Outputs(self.writer, self.own, max(0, booked.output_blocks - known.foreign_outputs))
        return [*known.outputs.values(), own]

    def _hold(self, of: Dot | Name, foreign: ForeignStep) -> None:
        """Holds a step whose booking has not arrived yet."""
        self._early.setdefault(of, []).append((self._clock(), foreign))
        self._held += 1
        while self._held > MAX_EARLY:
            self._held -= len(self._early.pop(next(iter(self._early))))
            self.stats.left_out += 1

    def _take_held(self, name: Name, dot: Dot, is_new: bool, counted: int) -> None:
        """Applies the held steps of a request, which came before its booking.

        Our own steps are in the ledger already, unless the booking `is_new`. Even then our output
        blocks up to the step `counted` are already in the booking.
        """
        for of in (dot, name):
            held = self._early.pop(of, [])
            self._held -= len(held)
            for _, foreign in held:
                if self._find(name) is None:  # an earlier one of them has ended it
                    break
                step = foreign.record
                if not isinstance(step, Stepped) or foreign.dot.writer == dot.writer:
                    continue
                is_due = foreign.dot.writer != self.writer or is_new
                if foreign.dot.writer == self.writer and step.kind == OUTPUT:
                    is_due = is_new and foreign.dot.number > counted
                if is_due:
                    self._take_step(name, replace(foreign, request_dot=dot), step)

    def note_dots(self, name: Name, dots: Iterable[Dot]) -> None:
        """Notes dots that a request has elsewhere, and applies the steps that came before them.

        Each process gives its own dot to a restored request, unless another has described it. If
        one of its other dots has been heard and was not noted here, then the request has ended.
        """
        for dot in dots:
            known = self.requests.get(name)
            if known is None:
                return
            has_ended = dot in self.ended
            if dot not in known.dots:
                has_ended |= name in self._from_before and self.has_heard(dot)
                known.also += (dot,)
            if has_ended:
                self._end(name, [dot])
            elif self._early:
                self._take_held(name, dot, False, 0)

    def _end_if_later(self, name: Name, known: Known) -> bool:
        """Ends a booking of this process if another's is first in the stream; returns whether."""
        if known.dot.writer != self.writer or known.dot.number <= self.settled:
            return False
        self._drop(name)
        self._from_before.discard(name)  # it goes on as the other's
        self.stats.replaced += 1
        return True

    def _take_booking(
        self,
        name: Name,
        block_size: int,
        booking: Booking,
        at: float,
        dot: Dot,
        seen: Seen,
        outputs: list[Outputs],
    ) -> None:
        is_old = at < self._began_at and name in self._from_before
        if is_old and not self._is_booked(name.face, name):
            # It has ended here since it was restored, when it was not known by this dot.
            self._end_dot(name, dot)
            return
        known = self.requests[name] = Known(dot, seen, None)
        is_new = self._rebook(name, known, block_size, booking, at)
        if is_new:
            known.outputs = {
                each.writer: each for each in outputs if each.blocks and each.writer != self.writer
            }
        else:
            self.bring_up(name, booking.booked, seen, outputs)
        if self._early and name in self.requests:
            counted = next((each.number for each in outputs if each.writer == self.writer), 0)
            self._take_held(name, dot, is_new, counted)

    def _rebook(
        self, name: Name, known: Known, block_size: int, booking: Booking, at: float
    ) -> bool:
        """Books a request on its rank, or lets it wait for one; False if it is booked already."""
        for kind in sorted(self._faces, key=lambda kind: kind is not name.face):
            face = self._faces[kind]
            at = self._make_way(name._replace(face=kind), at)
            outcome = rebook(face, name.key, block_size, booking, at)
            if outcome is Outcome.APPLIED:
                known.face = kind
                owner = face.owner(name.key)
                assert owner is not None
                add_outputs(owner.ledger, booking, 0)
                face.observe_begin(owner, name.request_id, mirrored=True)
                self.stats.bookings += 1
                return True
            if outcome is Outcome.DUPLICATE:  # it came by replica sync before, or was restored
                known.face = kind
                return False
        if len(self.waiting) >= MAX_WAITING:
            self.stats.left_out += 1
            writer, booked = known.dot
            self._lacking[writer] = min(booked, self._lacking.get(writer, booked))
            del self.requests[name]
            return True
        known.waiting = RequestWithoutRank(block_size, booking, at)
        self.waiting[name] = known
        return True

    def _make_way(self, name: Name, at: float) -> float:
        """Takes a restored request out of the ledger, since another process describes it anew.

        For its client it stays the same booking, so it keeps its time, which is returned.
        """
        if name not in self._restored:
            return at
        self._restored.discard(name)
        owner = self._faces[name.face].owner(name.key)
        live = None if owner is None else owner.ledger.request(name.request_id)
        if owner is None or live is None:
            return at
        owner.ledger.free(name.request_id)
        admitted_at: float = live.admitted_at
        return admitted_at

    def rebook_waiting(self) -> Iterator[None]:
        """Books the waiting requests whose rank is registered by now."""
        for number, (name, known) in enumerate(list(self.waiting.items()), 1):
            waiting = known.waiting
            if waiting is not None and self.waiting.get(name) is known:
                del self.waiting[name]
                known.waiting = None
                content = waiting.block_size, waiting.booking, waiting.booked_at
                self._quietly(self._rebook, name, known, *content)
            if number % SLICE == 0:
                yield

    def bring_up(self, name: Name, booked: Booked, seen: Seen, outputs: Iterable[Outputs]) -> None:
        """Updates a known request with the steps that another description has in addition."""
        known = self.requests[name]
        before = known.foreign_outputs
        for each in outputs:
            there = known.outputs.get(each.writer)
            if each.writer != self.writer and (there is None or each.number > there.number):
                known.outputs[each.writer] = each
        if seen.position >= known.seen.position:
            known.seen = seen
        booking = Booking.of(booked)
        if known.waiting is not None:
            booking.output_blocks = known.foreign_outputs
            booking.prefill_complete |= known.waiting.booking.prefill_complete
            known.waiting.booking = booking
            return
        owner = None if known.face is None else self._faces[known.face].owner(name.key)
        live = None if owner is None else owner.ledger.request(name.request_id)
        if owner is None or live is None:
            return
        if booked.prefill_complete and not live.prefill_complete:
            self._step(name, Stepped(PREFILLED, 0, name.request_id, None))
        booking.output_blocks = live.output_blocks + known.foreign_outputs - before
        add_outputs(owner.ledger, booking, live.output_blocks)

    def _step(self, name: Name, step: Stepped, dot: Dot | None = None) -> None:
        """Applies a step that names a request by a dot, or by its id alone."""
        known = self.requests[name]
        if step.kind == ENDED:
            self._end(name, known.dots if dot is None else [dot])
        elif known.waiting is not None:
            known.waiting.booking.take(step)
        elif known.face is not None:
            face = self._faces[known.face]
            if step.kind == PREFILLED:
                self._mirror_step(face, name, Step.PREFILL_COMPLETE)
            elif step.kind == OUTPUT and self._is_booked(known.face, name):
                face.ledger_of(name.key).output_block(name.request_id, step.fraction)

    def _end(self, name: Name, by: Collection[Dot]) -> None:
        """Ends a request, as others have said by some of its dots; we say it by the rest."""
        for dot in self.requests[name].dots:
            if dot in by:
                self._note_ended(dot)
            else:
                self._end_dot(name, dot)
        self._drop(name)

    def _drop(self, name: Name) -> None:
        self._deduplicator.note_end(*name[1:])
        known = self.requests[name]
        if known.face is not None:
            self._mirror_step(self._faces[known.face], name, Step.FREE)
        self._forget(name)

    def _mirror_step(self, face: LiveRequests[Any], name: Name, step: Step) -> None:
        face.mirror_step(name.key, name.request_id, step, self._clock())
        self._eased.add(name.key)

    def _forget(self, name: Name) -> None:
        del self.requests[name]
        self.waiting.pop(name, None)

    def find(self, name: Name) -> Known | None:
        """Returns what is known of a request, under the name that a face gives it."""
        found = self._find(name)
        return None if found is None else self.requests[found]

    def _find(self, name: Name) -> Name | None:
        """Returns the name under which a request is known; another face may have booked it."""
        for face in (name.face, *Face):
            found = name._replace(face=face)
            if found in self.requests:
                return found
        return None

    def _bind(self, payload: bytes) -> None:
        bound = sessions.decode([sessions.TOPIC, payload])
        if self._affinity is not None and isinstance(bound, Bound):
            self._affinity.apply(bound)

    def _quietly(self, what: Callable[..., Any], *arguments: Any) -> None:
        """Applies something that came from others, and so must not be sent to them again.

        Waiting selections are woken afterwards: their bookings must be sent.
        """
        self._journal.pause()
        try:
            what(*arguments)
        finally:
            self._journal.resume()
        while self._eased:
            key = self._eased.pop()
            for face in self._faces.values():
                face.ease(key)


class Merge:
    """Merges one view of another writer, piece by piece."""

    def __init__(self, mirror: Mirror, writer: str, head: ViewHead) -> None:
        self._mirror = mirror
        self._writer = writer
        self._head = head
        self._mentioned: set[Name] = set()
        self._lacking: dict[str, int] = {}  # by writer: its first booking that the view only names

    def take(self, piece: Piece, age_s: float) -> Iterator[None]:
        """Merges a piece that was written `age_s` ago; rests at every yield."""
        mirror = self._mirror
        seen = Seen(piece.position, self._writer, piece.own)
        later = mirror._clock() - piece.clock - age_s
        dots, outputs, others = iter(piece.dots), iter(piece.outputs), iter(piece.also)
        for number, record in enumerate(read(piece.records), 1):
            if isinstance(record, OtherRecord):
                if record.kind == BOUND:
                    mirror._quietly(mirror._bind, record.content)
            elif isinstance(record, Booked):
                dot = next(dots, None)
                foreign = next(outputs, None)
                also = next(others, [])
                if foreign is None:
                    foreign = [Outputs(self._writer, piece.own, record.output_blocks)]
                ledger = piece.ledgers.get(record.ledger)
                if dot is not None and ledger is not None and mirror._serves(ledger.key):
                    of = dot, *also
                    mirror._quietly(self._merge, ledger, record, of, seen, later, foreign)
            if number % SLICE == 0:
                yield
        for face, model_name, tenant_id, request_id, dot in piece.elsewhere:
            name = Name(Face(face), PartitionKey(model_name, tenant_id), request_id)
            found = mirror._find(name)
            self._mentioned.add(found or name)
            if found is None and not mirror.has_heard(dot):
                self._lacking[dot.writer] = min(
                    dot.number, self._lacking.get(dot.writer, dot.number)
                )

    def _merge(
        self,
        ledger: LedgerName,
        booked: Booked,
        dots: tuple[Dot, ...],
        seen: Seen,
        later: float,
        outputs: list[Outputs],
    ) -> None:
        mirror = self._mirror
        name = Name(ledger.face, ledger.key, booked.request_id)
        found = mirror._find(name)
        self._mentioned.add(found or name)
        if found is not None:
            mirror.bring_up(found, booked, seen, outputs)
            mirror.note_dots(found, dots)
            return
        unheard = [dot for dot in dots if not mirror.has_heard(dot)]
        if len(unheard) == len(dots):
            at = min(mirror._clock(), booked.admitted_at + later)
            content = Booking.of(booked), at, dots[0], seen, outputs
            mirror._take_booking(name, ledger.block_size, *content)
            mirror.note_dots(name, dots)
        else:  # it has ended here by one of its dots
            for dot in unheard:
                mirror._end_dot(name, dot)

    def finish(self) -> Iterator[None]:
        """Ends the requests that the writer knew and no longer has; takes over its numbers."""
        mirror, head = self._mirror, self._head
        for number, (name, known) in enumerate(list(mirror.requests.items()), 1):
            gone = self._gone(name, known)
            if gone and mirror.requests.get(name) is known:
                mirror._quietly(mirror._end, name, gone)
                mirror.stats.ended += 1
            if number % SLICE == 0:
                yield
        for dot in head.ended:
            mirror._note_ended(dot)
        for writer, number in head.numbers.items():
            if writer != mirror.writer:
                whole = min(number, self._lacking.get(writer, number + 1) - 1)
                mirror.hear(writer, whole)
        mirror.stats.views += 1

    def _gone(self, name: Name, known: Known) -> list[Dot]:
        """Returns the dots of a request that the writer has heard, if it no longer has it."""
        served = self._head.served
        is_served = not served or (name.key[0], None) in served or tuple(name.key) in served
        if not is_served or name in self._mentioned:
            return []
        heard, ended = self._head.numbers, self._head.ended
        return [dot for dot in known.dots if dot.number <= heard.get(dot.writer, 0) or dot in ended]
