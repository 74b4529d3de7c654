"""The live requests of all processes as known here.

    entries of the stream ──> take ──────────┐
                                             ├──> the faces' ledgers, as live requests
    views of other writers ──> Merge ────────┘

    requests   face, model, tenant, id ──> Known: its dot, and from where on its steps count
    progress   how far the steps of each writer are in here

The dot of a request is its writer and the number of the step that booked it. If a replica's numbers
or ended dots include that step and it does not have the request, then the request has ended. So two
views merge without remembering all ended requests (an observed-remove set with a version vector and
a cloud of dots): if only one of them has a request, the other's numbers say whether the request is
new or gone.

1. The steps of a writer are applied in the order of their numbers, each once. After a gap no more
   are applied until a view with the missing ones has been merged.
2. If two writers book the same id, all replicas keep the booking that is first in the stream.
3. A step belongs to one booking, named by its dot, or by another one: a restored request that no
   view describes, as after the server was emptied, gets a dot at each process. A step that arrives
   before its booking is held for a while. Who ends such a request, or learns of its end by one
   dot, ends each other dot by a step of its own, since others may know it by that one alone. So
   does a process whose own end of a request became no step, because there was no room for it.
4. A step counts for a request unless the request's description includes it already. A view includes
   its writer's own steps up to the last one, and the steps of others up to the position at which
   the writer had read the stream.
5. A request without a rank here waits for one, and its steps are applied to it meanwhile.
6. For each request a process knows how many output blocks every other writer has reported, and up
   to which of its steps; the remaining output blocks in the ledger are its own. So two counts
   merge, too.

7. A request that others describe has ended if one with its id and time of booking is among the last
   that ended here: by a dot of another process, or before this process began.

Costs: a step some 10 µs, a booking with its hashes 20 µs; 400 bytes for a live request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from kvd.model import PartitionKey
from kvd.persistence.bookings import EndedRequests
from kvd.replica_sync.deduplication import Deduplicator
from kvd.shared_state.booked import BOUND, BookedHere
from kvd.shared_state.entries import Dot, LedgerName, Name, Outputs, Position, StreamEntry
from kvd.shared_state.held import HeldSteps
from kvd.shared_state.progress import Progress
from kvd.shared_state.requests import ForeignBooking, ForeignRequest, ForeignStep, Known, Seen
from kvd.slots.rebooking import Booking
from kvd.wire.lifecycle import Face
from kvd_core.ledger.journal import (
    ENDED,
    OUTPUT,
    PREFILLED,
    Booked,
    OtherRecord,
    Stepped,
    read,
)

SLICE = 32  # records applied between two checkpoints: under 1 ms

# The position given to our own steps on bookings known from replica sync alone: no view has them.
NEWEST = Position(2**63, 0)

# Requests that wait for their rank to be registered here. Further ones are left out, and views of
# this process do not count the steps of their writers from there on.
MAX_WAITING = 16_384


@dataclass(slots=True)
class MirrorStats:
    """Counts of other processes' steps by outcome; plain numbers for metrics."""

    steps: int = 0  # applied
    bookings: int = 0  # requests of others, booked here
    ended: int = 0  # requests that a view has shown to be gone
    replaced: int = 0  # bookings made here under an id that another process had booked first
    left_out: int = 0  # beyond MAX_WAITING
    views: int = 0  # merged


class Mirror:
    """The live requests of all writers."""

    def __init__(
        self,
        writer: str,
        here: BookedHere,
        deduplicator: Deduplicator,
        serves: Callable[[PartitionKey], bool],
        clock: Callable[[], float],
    ) -> None:
        """Requests that `deduplicator` knows are shared by replica sync, and not sent from here."""
        self.writer = writer
        self.progress = Progress(writer, clock)
        self.held = HeldSteps(clock)
        self.requests: dict[Name, Known] = {}
        self.waiting: dict[Name, Known] = {}
        self.untold: list[tuple[Name, Dot]] = []  # ends that are still to be made own steps
        self.stats = MirrorStats()
        self.here = here
        self.serves = serves
        self.clock = clock
        self._deduplicator = deduplicator
        self._from_before: set[Name] = set()  # all restored requests, also those that have ended
        self._ended = EndedRequests()
        self._began_at = math.inf

    @property
    def left_out(self) -> int:
        """How often a bound was reached, and something of other processes was left out."""
        return self.stats.left_out + self.held.dropped + self.progress.forgotten

    # ---- steps made here

    def booked_here(self, ledger: LedgerName, booked: Booked) -> None:
        """Notes a booking made here, whose step is our last one."""
        self._claim(Name(ledger.face, ledger.key, booked.request_id), booked)

    def _claim(self, name: Name, booked: Booked) -> None:
        dot = Dot(self.writer, self.progress.own)
        self.requests[name] = Known(dot, Seen.at_booking(dot), booked.admitted_at, name.face)

    def stepped_here(self, ledger: LedgerName, step: Stepped) -> Dot | None:
        """Notes a step made here, our last one; returns the dot of its booking.

        None means that the booking is known from replica sync alone, and not yet from the stream.
        """
        name = Name(ledger.face, ledger.key, step.request_id)
        found = self.find(name)
        if found is None:
            dot = Dot(self.writer, self.progress.own)
            self.held.hold(name, ForeignStep(dot, step, None, NEWEST))
            return None
        known = self.requests[found]
        if step.kind == ENDED:
            self._deduplicator.note_end(name.key, name.request_id)
            self.progress.note_ended(known.dot)
            for dot in known.also:
                self.end_dot(found, dot)
            self._forget(found)
        return known.dot

    def end_dot(self, name: Name, dot: Dot) -> None:
        """Ends a booking by a step of ours, for those who know its request by this dot alone."""
        self.progress.note_ended(dot)
        self.untold.append((name, dot))

    # ---- restored requests

    def note_restored(self, ended: EndedRequests) -> None:
        """Notes the requests that are booked, or ended, before any call can have arrived."""
        self._ended = ended
        self._from_before = {each[0] for each in self._unknown() if each is not None}
        self.here.restored = set(self._from_before)
        self._began_at = self.clock()

    def claim(self) -> Iterator[None]:
        """Gives dots to bookings here that have none: restored ones, and those with a lost step."""
        for unknown in self._unknown():
            if unknown is None:
                yield
                continue
            self.progress.own += 1
            self._claim(*unknown)

    def drop_unknown(self, shared_at: float) -> Iterator[None]:
        """Ends bookings from before `shared_at` that no other process knows.

        All steps that had been shared by then have to be in here: then the bookings have ended.
        """
        for unknown in self._unknown():
            if unknown is None:
                yield
                continue
            name, booked = unknown
            if booked.admitted_at < shared_at:
                self.here.quietly(self.here.end, name.face, name)
                self.stats.ended += 1

    def _unknown(self) -> Iterator[tuple[Name, Booked] | None]:
        """Yields bookings here that nobody has shared; None for a rest."""
        for each in self.here.all():
            if each is None or not self._is_shared(each[0]):
                yield each

    def _is_shared(self, name: Name) -> bool:
        by_replicas = (name.key, name.request_id) in self._deduplicator.requests
        return by_replicas or self.find(name) is not None

    # ---- keeping

    def end_lost(self) -> Iterator[None]:
        """Ends requests that have ended here without a step of ours, by steps that the others get.

        The step was lost, since there was no room for it, or only replica sync announced the end.
        """
        for number, (name, known) in enumerate(list(self.requests.items()), 1):
            is_lost = known.waiting is None and not self.here.is_booked(known.face, name)
            if is_lost and self.requests.get(name) is known:
                self.here.quietly(self.end, name, ())
            if number % SLICE == 0:
                yield

    def prune(self) -> Iterator[None]:
        """Ends requests that are no longer booked here; forgets what is too old."""
        now = self.clock()
        if now - self._began_at > self.here.expiry_s:
            self._from_before.clear()
        yield from self.end_lost()
        writers: set[str] = set()
        for number, (name, known) in enumerate(list(self.requests.items()), 1):
            writers.add(known.dot.writer)
            waiting = known.waiting
            is_old = waiting is not None and waiting.booked_at < now - self.here.expiry_s
            if is_old and self.requests.get(name) is known:
                self._forget(name)
            if number % SLICE == 0:
                yield
        self.progress.forget_silent(writers)
        yield from self.progress.forget_counted()
        self.held.drop_old()
        for number, (key, request_id) in enumerate(list(self._deduplicator.requests), 1):
            if number % SLICE == 0:
                yield
            if not self.here.is_booked_anywhere(key, request_id):
                self._deduplicator.requests.discard((key, request_id))

    def rebook_waiting(self) -> Iterator[None]:
        """Books the waiting requests whose rank is registered by now."""
        for number, (name, known) in enumerate(list(self.waiting.items()), 1):
            booking = known.waiting
            if booking is not None and self.waiting.get(name) is known:
                del self.waiting[name]
                known.waiting = None
                self.here.quietly(self._add, name, known, booking)
            if number % SLICE == 0:
                yield

    # ---- steps of others

    def take(self, entry: StreamEntry, position: Position, made_at: float) -> Iterator[None]:
        """Applies an entry of the stream that was made at `made_at`, by the clock here.

        Rests at every yield. Raises ValueError on a malformed record; the records before it have
        been applied.
        """
        if entry.writer == self.writer:
            return
        progress = self.progress
        have = progress.numbers.get(entry.writer, 0)
        if entry.last <= have:
            return
        if entry.first > have + 1:
            progress.missed(entry.writer, entry.last)
            return
        dots = iter(entry.dots)
        later = made_at - entry.clock
        number = entry.first - 1
        for record in read(entry.records):
            number += 1
            of = next(dots, None) if isinstance(record, Stepped) else None
            if number <= have:
                continue
            foreign = ForeignStep(Dot(entry.writer, number), record, of, position)
            self.here.quietly(self._take, entry.ledgers, foreign, later)
            progress.hear(entry.writer, number)
            self.stats.steps += 1
            if number % SLICE == 0:
                yield
        if number != entry.last:
            raise ValueError(f"an entry up to step {entry.last} ends with step {number}")

    def _take(self, ledgers: Mapping[int, LedgerName], foreign: ForeignStep, later: float) -> None:
        record = foreign.record
        if isinstance(record, OtherRecord):
            if record.kind == BOUND:
                self.here.bind(record.content)
            return
        ledger = ledgers.get(record.ledger)
        if ledger is None or not self.serves(ledger.key):
            return
        name = Name(ledger.face, ledger.key, record.request_id)
        if isinstance(record, Stepped):
            self._take_step(name, foreign, record)
        elif foreign.dot not in self.progress.ended:
            self._take_booked(name, ledger.block_size, foreign.dot, record, later)

    def _take_booked(
        self, name: Name, block_size: int, dot: Dot, record: Booked, later: float
    ) -> None:
        """Takes over a booking from the stream, unless one under its id stands here."""
        known = self.requests.get(name)
        if known is not None and not self._end_if_later(name, known):
            if name in self._from_before:  # it may be this very booking, by its first dot
                self.note_dots(name, [dot])
            return
        counted = Outputs(dot.writer, dot.number, record.output_blocks)
        booking = self.foreign_booking(block_size, record, later)
        self.take_booking(name, ForeignRequest(booking, dot, Seen.at_booking(dot), [counted]))
        if known is not None:
            self.note_dots(name, known.dots)

    def foreign_booking(self, block_size: int, record: Booked, later: float) -> ForeignBooking:
        """Returns a booking by a clock that is `later` seconds behind the one here."""
        at = min(self.clock(), record.admitted_at + later)
        return ForeignBooking(block_size, Booking.of(record), at)

    def _end_if_later(self, name: Name, known: Known) -> bool:
        """Ends a booking of this process if another's is first in the stream; returns whether."""
        if known.dot.writer != self.writer or known.dot.number <= self.progress.settled:
            return False
        self._drop(name)
        # It goes on as the other's.
        self._from_before.discard(name)
        self._ended.forget(*name)
        self.stats.replaced += 1
        return True

    def _take_step(self, name: Name, foreign: ForeignStep, step: Stepped) -> None:
        found = self.find(name, foreign.request_dot)
        known = None if found is None else self.requests[found]
        is_it = known is not None and foreign.request_dot in (None, *known.dots)
        if found is not None and known is not None and is_it:
            # Who described the request may have read its end by a dot that it did not know.
            is_sure = step.kind == ENDED and foreign.request_dot is not None
            if step.kind == OUTPUT:
                self._take_output(found, foreign.dot, step)
            elif is_sure or not known.seen.covers(foreign.dot, foreign.position):
                self._step(found, step, foreign.request_dot)
        elif foreign.request_dot is None:
            self.held.hold(name, foreign)
        elif step.kind == ENDED:
            self.progress.note_ended(foreign.request_dot)
        elif not self.progress.has_heard(foreign.request_dot):
            self.held.hold(foreign.request_dot, foreign)

    def _take_output(self, name: Name, dot: Dot, step: Stepped) -> None:
        known = self.requests[name]
        if dot.writer != self.writer:
            before = known.outputs.get(dot.writer, Outputs(dot.writer, 0, 0))
            if dot.number <= before.number:
                return
            known.outputs[dot.writer] = Outputs(dot.writer, dot.number, before.blocks + 1)
        self._step(name, step)

    def outputs_of(self, known: Known, booked: Booked) -> list[Outputs] | None:
        """Returns the output blocks of a booking by writer; None if all are this process's own."""
        if not known.outputs:
            return None
        blocks = max(0, booked.output_blocks - known.foreign_outputs)
        return [*known.outputs.values(), Outputs(self.writer, self.progress.own, blocks)]

    def _take_held(self, name: Name, dot: Dot, is_new: bool, counted: int) -> None:
        """Applies the held steps of a request, which came before its booking.

        Our own steps are in the ledger already, unless the booking `is_new`. Even then our output
        blocks up to the step `counted` are already in the booking.
        """
        for of in (dot, name):
            for foreign in self.held.take(of):
                if self.find(name) is None:  # an earlier one of them has ended it
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
            has_ended = dot in self.progress.ended
            if dot not in known.dots:
                has_ended |= name in self._from_before and self.progress.has_heard(dot)
                known.also += (dot,)
            if has_ended:
                self.end(name, [dot])
            elif self.held:
                self._take_held(name, dot, False, 0)

    # ---- descriptions of others

    def take_booking(self, name: Name, described: ForeignRequest) -> None:
        """Takes over a request that is not known here."""
        booking, dot = described.booked, described.dot
        # An id may be used again soon, but not before this process began.
        is_old = booking.booked_at < self._began_at
        is_gone = name in self._from_before and not self.here.is_booked(name.face, name)
        if is_old and (is_gone or self.has_ended(name, booking.booked_at)):
            self.end_dot(name, dot)
            return
        known = self.requests[name] = Known(dot, described.seen, booking.booked_at, None)
        is_new = self._add(name, known, booking)
        by_writer = {each.writer: each for each in described.outputs}
        own = by_writer.pop(self.writer, None)
        if is_new:
            known.outputs = {writer: each for writer, each in by_writer.items() if each.blocks}
        else:
            self.bring_up(name, described)
        if self.held and name in self.requests:
            self._take_held(name, dot, is_new, 0 if own is None else own.number)

    def has_ended(self, name: Name, booked_at: float) -> bool:
        """Returns whether a request has ended here, perhaps when it was known by another dot."""
        return self._ended.has(*name, booked_at)

    def _add(self, name: Name, known: Known, booking: ForeignBooking) -> bool:
        """Books a request on its rank, or lets it wait for one; False if it is booked already."""
        added = self.here.add(name, booking)
        if added is not None:
            known.face = added.face
            self.stats.bookings += added.is_new
            return added.is_new
        if len(self.waiting) >= MAX_WAITING:
            self.stats.left_out += 1
            self.progress.leave_out(known.dot)
            del self.requests[name]
            return True
        known.waiting = booking
        self.waiting[name] = known
        return True

    def bring_up(self, name: Name, described: ForeignRequest) -> None:
        """Updates a known request with the steps that another description has in addition."""
        known = self.requests[name]
        before = known.foreign_outputs
        for each in described.outputs:
            there = known.outputs.get(each.writer)
            if each.writer != self.writer and (there is None or each.number > there.number):
                known.outputs[each.writer] = each
        if described.seen.position >= known.seen.position:
            known.seen = described.seen
        booking = described.booked.booking
        if known.waiting is not None:
            booking.output_blocks = known.foreign_outputs
            booking.prefill_complete |= known.waiting.booking.prefill_complete
            known.waiting.booking = booking
            return
        found = self.here.find(known.face, name)
        if found is None:
            return
        if booking.prefill_complete and not found.request.prefill_complete:
            self._step(name, Stepped(PREFILLED, 0, name.request_id, None))
        booking.output_blocks = found.request.output_blocks + known.foreign_outputs - before
        self.here.add_outputs(found, booking)

    # ---- the requests here

    def _step(self, name: Name, step: Stepped, dot: Dot | None = None) -> None:
        """Applies a step that names a request by a dot, or by its id alone."""
        known = self.requests[name]
        if step.kind == ENDED:
            self.end(name, known.dots if dot is None else [dot])
        elif known.waiting is not None:
            known.waiting.booking.take(step)
        elif known.face is not None and step.kind == PREFILLED:
            self.here.complete(known.face, name)
        elif known.face is not None and step.kind == OUTPUT:
            self.here.add_output(known.face, name, step.fraction)

    def end(self, name: Name, by: Collection[Dot]) -> None:
        """Ends a request that others have ended by some of its dots; we end it by the rest."""
        for dot in self.requests[name].dots:
            if dot in by:
                self.progress.note_ended(dot)
            else:
                self.end_dot(name, dot)
        self._drop(name)

    def _drop(self, name: Name) -> None:
        self._deduplicator.note_end(name.key, name.request_id)
        face = self.requests[name].face
        if face is not None:
            self.here.end(face, name)
        self._forget(name)

    def _forget(self, name: Name) -> None:
        """Forgets a request that has ended."""
        self._ended.note(*name, self.requests.pop(name).booked_at)
        self.waiting.pop(name, None)

    def known(self, name: Name) -> Known | None:
        """Returns what is known of a request, under the name that a face gives it."""
        found = self.find(name)
        return None if found is None else self.requests[found]

    def find(self, name: Name, *dots: Dot | None) -> Name | None:
        """Returns the name under which a request is known, which has one of these dots elsewhere.

        Processes may have booked it by different faces. But another request may have its id on
        another face: that one is booked by its own face here, and shares no dot with it.
        """
        if name in self.requests:
            return name
        for face in Face:
            found = name._replace(face=face)
            known = self.requests.get(found)
            if known is not None and (known.face is name.face or {*dots} & {*known.dots}):
                return found
        return None
