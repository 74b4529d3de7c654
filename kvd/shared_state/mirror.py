"""What all writers have booked, as it is here: who has booked what, and how far each was heard.

    entries of the stream ──> take ──────────┐
                                             ├──> the faces' ledgers, as live requests
    views of other writers ──> Merge ────────┘

    numbers    writer ──> number of its last step that is in here, none before it lacking
    requests   face, model, tenant, id ──> Known: its dot, and from where on its steps count
    behind     writer ──> number of a step of it that is in the stream, or was: a gap before it

A request's dot is its writer and the number of the step that booked it. Whoever has heard of that
step, by `numbers`, and does not have the request, knows that it has ended. So two views merge
without a memory of what ended (an observed-remove set with a version vector): of what only one of
them has, the other one's numbers say whether it is new or gone.

1. Steps of a writer are taken in the order of their numbers, each once. After a gap none of it are
   taken until its view has been merged.
2. Where two writers book the same id, the first in the stream stands, on all replicas.
3. A step counts for a request if it came after what was known of it: behind the place in the stream
   up to which the view that told of it had read, or numbered behind that writer's own last step.
4. What has no rank here waits for one, with all that becomes of it.

Costs: a step some 10 µs, a booking with its hashes 20 µs; 400 bytes a live request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvd.model import PartitionKey
from kvd.selection.affinity import Affinity
from kvd.shared_state.aside import Aside
from kvd.shared_state.entries import (
    BEGINNING,
    ENTRY_BYTES,
    Dot,
    Entry,
    LedgerName,
    Piece,
    Position,
    ViewHead,
)
from kvd.slots.live_requests import LiveRequests
from kvd.slots.rebooking import Booking, book_again
from kvd.wire import affinity as sessions
from kvd.wire.affinity import Bound
from kvd.wire.lifecycle import Face, Outcome, Step
from kvd_core.ledger.journal import ENDED, OUTPUT, PREFILLED, Booked, Journal, Said, Stepped, read

BOUND = ord("G")  # kind of a record of a session: the payload of `kvd.wire.affinity`

SCRATCH_BYTES = 64 * 1024 * 1024  # of one slice of an export; the longest booking takes 2 MiB

SLICE = 32  # records taken between two checkpoints: under 1 ms

# Requests that wait for their rank to be registered here. Beyond that they are left out, and the
# view of this process says that it is not whole.
MAX_WAITING = 16_384

Faces = Mapping[Face, LiveRequests[Any]]


class Name(NamedTuple):
    """A request, by the face through which it was booked."""

    face: Face
    key: PartitionKey
    request_id: str


@dataclass(frozen=True, slots=True)
class Seen:
    """From where on steps of a request count: those before are in what was told of it."""

    position: Position
    writer: str
    number: int

    def covers(self, writer: str, number: int, position: Position) -> bool:
        if writer == self.writer:
            return number <= self.number
        return position <= self.position


@dataclass(slots=True)
class Known:
    """A request that lives, as far as anybody has said."""

    dot: Dot
    seen: Seen
    face: Face | None  # where it is booked here; None: it waits for a rank
    waiting: Waiting | None = None


@dataclass(slots=True)
class Waiting:
    """A request that has no rank here yet."""

    block_size: int
    booking: Booking
    at: float


@dataclass(slots=True)
class MirrorCounts:
    """What became of what others told; plain numbers for metrics."""

    steps: int = 0  # taken
    bookings: int = 0  # of others, booked here
    ended: int = 0  # requests that a view has shown to be gone
    replaced: int = 0  # bookings made here under an id that another one had booked first
    left_out: int = 0  # requests without a rank here, beyond MAX_WAITING
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
        aside: Aside,
        serves: Callable[[PartitionKey], bool],
        clock: Callable[[], float],
    ) -> None:
        """`journal` is where the faces record; it is paused while steps of others are taken.

        What is `aside` is not this process's to tell of.
        """
        self.writer = writer
        self.own = 0  # number of the last step of this process
        self.settled = 0  # number of its last step that was read in the stream
        self.position = BEGINNING  # up to which the stream has been read
        self.numbers: dict[str, int] = {}
        self.requests: dict[Name, Known] = {}
        self.waiting: dict[Name, Known] = {}
        self.behind: dict[str, int] = {}
        self.counts = MirrorCounts()
        self._faces = faces
        self._affinity = affinity
        self._journal = journal
        self._serves = serves
        self._clock = clock
        self._aside = aside

    # ---- what happens here

    def booked_here(self, name: LedgerName, request_id: str) -> None:
        """Notes a booking that has the number `own`."""
        dot = Dot(self.writer, self.own)
        known = Known(dot, Seen(BEGINNING, *dot), name.face)
        self.requests[Name(name.face, name.key, request_id)] = known

    def ended_here(self, name: LedgerName, request_id: str) -> None:
        """Notes the end of a request that was booked by anybody."""
        found = self._find(Name(name.face, name.key, request_id))
        if found is not None:
            self._forget(found)

    def skip_own(self) -> None:
        """Leaves out a number: something of ours is lost for the stream."""
        self.own += 1

    def claim(self) -> Iterator[None]:
        """Gives dots to what is booked here and has none: it was restored, or its step was lost."""
        for number, (name, _) in enumerate(self._unknown(), 1):
            self.own += 1
            self.booked_here(LedgerName(name.face, name.key, 0), name.request_id)
            if number % SLICE == 0:
                yield

    def drop_unknown(self) -> Iterator[None]:
        """Ends what is booked here and known to nobody: it ended while this process was away."""
        for number, (name, face) in enumerate(self._unknown(), 1):
            self._quietly(face.follow, name.key, name.request_id, Step.FREE, self._clock())
            self.counts.ended += 1
            if number % SLICE == 0:
                yield

    def _unknown(self) -> Iterator[tuple[Name, LiveRequests[Any]]]:
        """Yields what is booked here, without anybody having said so."""
        scratch = Journal(SCRATCH_BYTES)
        for kind, face in self._faces.items():
            for owner in list(face.owners()):
                after: int | None = 0
                while after is not None:
                    after = owner.ledger.export(scratch, after, ENTRY_BYTES)
                    for booked in read(scratch.take()):
                        assert isinstance(booked, Booked)
                        name = Name(kind, owner.key, booked.request_id)
                        if self._find(name) is None and name[1:] not in self._aside.requests:
                            yield name, face

    def prune(self) -> Iterator[None]:
        """Forgets what is not booked here any more, and what has waited too long for a rank."""
        now = self._clock()
        for number, (name, known) in enumerate(list(self.requests.items()), 1):
            if not self._lives(name, known, now) and self.requests.get(name) is known:
                self._forget(name)
            if number % SLICE == 0:
                yield
        faces = self._faces
        for key, request_id in list(self._aside.requests):
            if not any(self._is_booked(face, Name(face, key, request_id)) for face in faces):
                self._aside.requests.discard((key, request_id))

    def _lives(self, name: Name, known: Known, now: float) -> bool:
        if known.waiting is None:
            return self._is_booked(known.face, name)
        expiry_s = max(face.expiry_s for face in self._faces.values())
        return known.waiting.at >= now - expiry_s

    def _is_booked(self, face: Face | None, name: Name) -> bool:
        owner = None if face is None else self._faces[face].owner(name.key)
        return owner is not None and owner.ledger.request(name.request_id) is not None

    # ---- what the stream says

    def take(self, entry: Entry, position: Position, age_s: float) -> Iterator[None]:
        """Takes an entry of the stream that came `age_s` ago; rests at every yield.

        Raises ValueError on what are no records; what came before is taken none the less.
        """
        if entry.writer == self.writer:
            self.settled = max(self.settled, entry.last)
            return
        have = self.numbers.get(entry.writer, 0)
        if entry.last <= have:
            return
        if entry.first > have + 1:
            self.missed(entry.writer, entry.last)
            return
        seen = Seen(position, entry.writer, entry.first - 1)
        later = self._clock() - entry.clock - age_s
        number = entry.first - 1
        for record in read(entry.records):
            number += 1
            if number <= have:
                continue
            self._quietly(self._record, entry, Dot(entry.writer, number), record, seen, later)
            self.numbers[entry.writer] = number
            self.counts.steps += 1
            if number % SLICE == 0:
                yield
        self.numbers[entry.writer] = entry.last

    def missed(self, writer: str, number: int) -> None:
        """Notes that steps of a writer up to a number exist, and that some are not in here."""
        if writer not in self.behind:
            self.counts.gaps += 1
        self.behind[writer] = max(self.behind.get(writer, 0), number)

    def _record(
        self, entry: Entry, dot: Dot, record: Booked | Stepped | Said, seen: Seen, later: float
    ) -> None:
        if isinstance(record, Said):
            if record.kind == BOUND:
                self._bind(record.content)
            return
        ledger = entry.ledgers.get(record.ledger)
        if ledger is None or not self._serves(ledger.key):
            return
        name = Name(ledger.face, ledger.key, record.request_id)
        if isinstance(record, Booked):
            known = self.requests.get(name)
            if known is not None and not self._gives_way(name, known):
                return
            at = min(self._clock(), record.admitted_at + later)
            self._book(name, ledger.block_size, Booking.of(record), at, dot, seen)
        else:
            found = self._find(name)
            if found is not None and not self.requests[found].seen.covers(*dot, seen.position):
                self._step(found, record)

    def _gives_way(self, name: Name, known: Known) -> bool:
        """Ends a booking of this process that comes behind another's in the stream."""
        if known.dot.writer != self.writer or known.dot.number <= self.settled:
            return False
        self._end(name)
        self.counts.replaced += 1
        return True

    def _book(
        self, name: Name, block_size: int, booking: Booking, at: float, dot: Dot, seen: Seen
    ) -> None:
        known = self.requests[name] = Known(dot, seen, None)
        for kind in sorted(self._faces, key=lambda kind: kind is not name.face):
            face = self._faces[kind]
            outcome = book_again(face, name.key, block_size, booking, at)
            if outcome is Outcome.APPLIED:
                known.face = kind
                owner = face.owner(name.key)
                assert owner is not None
                face.observe_begin(owner, name.request_id, mirrored=True)
                self.counts.bookings += 1
                return
            if outcome is Outcome.DUPLICATE:  # replica sync was faster, or it was restored
                known.face = kind
                return
        if len(self.waiting) >= MAX_WAITING:
            self.counts.left_out += 1
            del self.requests[name]
            return
        known.waiting = Waiting(block_size, booking, at)
        self.waiting[name] = known

    def place_waiting(self) -> Iterator[None]:
        """Books what waits for a rank, where there is one now."""
        for number, (name, known) in enumerate(list(self.waiting.items()), 1):
            waiting = known.waiting
            if waiting is not None and self.waiting.get(name) is known:
                del self.waiting[name]
                content = waiting.block_size, waiting.booking, waiting.at, known.dot, known.seen
                self._quietly(self._book, name, *content)
            if number % SLICE == 0:
                yield

    def _step(self, name: Name, step: Stepped) -> None:
        known = self.requests[name]
        if step.kind == ENDED:
            self._end(name)
        elif known.waiting is not None:
            known.waiting.booking.take(step)
        elif known.face is not None:
            face = self._faces[known.face]
            if step.kind == PREFILLED:
                face.follow(name.key, name.request_id, Step.PREFILL_COMPLETE, self._clock())
            elif step.kind == OUTPUT and self._is_booked(known.face, name):
                face.ledger_of(name.key).output_block(name.request_id, step.fraction)

    def _end(self, name: Name) -> None:
        known = self.requests[name]
        if known.face is not None:
            self._faces[known.face].follow(name.key, name.request_id, Step.FREE, self._clock())
        self._forget(name)

    def _forget(self, name: Name) -> None:
        del self.requests[name]
        self.waiting.pop(name, None)

    def find(self, name: Name) -> Known | None:
        """Returns what is known of a request by what a face calls it."""
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
        """Does something of which others are not told: they have said it."""
        self._journal.pause()
        try:
            what(*arguments)
        finally:
            self._journal.resume()


class Merge:
    """One view of another writer, brought in piece by piece."""

    def __init__(self, mirror: Mirror, writer: str, head: ViewHead) -> None:
        self._mirror = mirror
        self._writer = writer
        self._head = head
        self._mentioned: set[Name] = set()
        self._before = dict(mirror.numbers)

    def take(self, piece: Piece, age_s: float) -> Iterator[None]:
        """Takes a piece that was written `age_s` ago; rests at every yield."""
        mirror = self._mirror
        seen = Seen(piece.position, self._writer, piece.own)
        later = mirror._clock() - piece.clock - age_s
        dots = iter(piece.dots)
        for number, record in enumerate(read(piece.records), 1):
            if isinstance(record, Said):
                if record.kind == BOUND:
                    mirror._quietly(mirror._bind, record.content)
            elif isinstance(record, Booked):
                dot = next(dots, None)
                ledger = piece.ledgers.get(record.ledger)
                if dot is not None and ledger is not None and mirror._serves(ledger.key):
                    mirror._quietly(self._merge, ledger, record, dot, seen, later)
            if number % SLICE == 0:
                yield
        for face, model_name, tenant_id, request_id, _ in piece.elsewhere:
            name = Name(Face(face), PartitionKey(model_name, tenant_id), request_id)
            self._mentioned.add(mirror._find(name) or name)

    def _merge(
        self, ledger: LedgerName, booked: Booked, dot: Dot, seen: Seen, later: float
    ) -> None:
        mirror = self._mirror
        name = Name(ledger.face, ledger.key, booked.request_id)
        found = mirror._find(name)
        self._mentioned.add(found or name)
        if found is not None:
            self._bring_up(found, booked, seen)
        elif dot.number > self._has_heard(dot.writer):
            at = min(mirror._clock(), booked.admitted_at + later)
            mirror._book(name, ledger.block_size, Booking.of(booked), at, dot, seen)

    def _has_heard(self, writer: str) -> int:
        mirror = self._mirror
        return mirror.own if writer == mirror.writer else self._before.get(writer, 0)

    def _bring_up(self, name: Name, booked: Booked, seen: Seen) -> None:
        """Takes what the view has more of a request that is known here."""
        mirror = self._mirror
        known = mirror.requests[name]
        if known.waiting is not None:
            if booked.output_blocks >= known.waiting.booking.output_blocks:
                known.waiting.booking, known.seen = Booking.of(booked), seen
            return
        owner = None if known.face is None else mirror._faces[known.face].owner(name.key)
        live = None if owner is None else owner.ledger.request(name.request_id)
        if owner is None or live is None or live.output_blocks > booked.output_blocks:
            return
        if booked.prefill_complete and not live.prefill_complete:
            mirror._step(name, Stepped(PREFILLED, 0, name.request_id, None))
        for number in range(live.output_blocks + 1, booked.output_blocks + 1):
            fraction = booked.fraction if number == booked.decayed_blocks else None
            owner.ledger.output_block(name.request_id, fraction)
        if booked.prefill_complete == live.prefill_complete or booked.prefill_complete:
            known.seen = seen

    def finish(self) -> Iterator[None]:
        """Ends what the writer knew and has no more; from then on its numbers are ours."""
        mirror, head = self._mirror, self._head
        if not head.partial:
            for number, (name, known) in enumerate(list(mirror.requests.items()), 1):
                if self._is_gone(name, known) and mirror.requests.get(name) is known:
                    mirror._quietly(mirror._end, name)
                    mirror.counts.ended += 1
                if number % SLICE == 0:
                    yield
        for writer, number in head.numbers.items():
            if writer != mirror.writer:
                mirror.numbers[writer] = max(number, mirror.numbers.get(writer, 0))
        mirror.counts.views += 1

    def _is_gone(self, name: Name, known: Known) -> bool:
        served = self._head.served
        is_served = not served or (name.key[0], None) in served or tuple(name.key) in served
        heard = self._head.numbers.get(known.dot.writer, 0)
        return is_served and name not in self._mentioned and known.dot.number <= heard
