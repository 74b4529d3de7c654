"""Merges a view of another writer into what is known here, piece by piece."""

from __future__ import annotations

from collections.abc import Iterator

from kvd.shared_state.booked import BOUND
from kvd.shared_state.entries import Dot, LedgerName, Name, Outputs
from kvd.shared_state.mirror import SLICE, Mirror
from kvd.shared_state.pieces import Piece, ViewHead
from kvd.shared_state.progress import DOTS_AT_ONCE
from kvd.shared_state.requests import ForeignRequest, Known, Seen
from kvd_core.ledger.journal import Booked, OtherRecord, read


class Merge:
    """Takes the pieces of one view, and at their end its numbers."""

    def __init__(self, mirror: Mirror, writer: str, head: ViewHead) -> None:
        self._mirror = mirror
        self._writer = writer
        self._head = head
        self._mentioned: set[Name] = set()
        self._ended: set[Dot] = set()  # bookings that have ended, as the view says
        self._lacking: dict[str, int] = {}  # by writer: its first booking that the view only names

    def take(self, piece: Piece, made_at: float) -> Iterator[None]:
        """Merges a piece that was made at `made_at`, by the clock here; rests at every yield."""
        here = self._mirror.here
        later = made_at - piece.clock
        dots, outputs, others = iter(piece.dots), iter(piece.outputs), iter(piece.also)
        for number, record in enumerate(read(piece.records), 1):
            if isinstance(record, OtherRecord):
                if record.kind == BOUND:
                    here.quietly(here.bind, record.content)
            elif isinstance(record, Booked):
                dot = next(dots, None)
                counted = next(outputs, None)
                also = next(others, [])
                if counted is None:
                    counted = [Outputs(self._writer, piece.own, record.output_blocks)]
                ledger = piece.ledgers.get(record.ledger)
                if dot is not None and ledger is not None and self._mirror.serves(ledger.key):
                    booking = self._mirror.foreign_booking(ledger.block_size, record, later)
                    seen = Seen(piece.position, self._writer, piece.own)
                    described = ForeignRequest(booking, dot, seen, counted)
                    here.quietly(self._merge, ledger, record.request_id, described, also)
            if number % SLICE == 0:
                yield
        for name, dot in piece.elsewhere:
            found = self._mirror.find(name, dot)
            self._mentioned.add(found or name)
            if found is None and not self._mirror.progress.has_heard(dot):
                self._lacking[dot.writer] = min(
                    dot.number, self._lacking.get(dot.writer, dot.number)
                )
        self._ended.update(piece.ended)

    def _merge(
        self, ledger: LedgerName, request_id: str, described: ForeignRequest, also: list[Dot]
    ) -> None:
        mirror = self._mirror
        name = Name(ledger.face, ledger.key, request_id)
        dots = [described.dot, *also]
        found = mirror.find(name, *dots)
        self._mentioned.add(found or name)
        if found is not None:
            mirror.bring_up(found, described)
            mirror.note_dots(found, dots)
            return
        unheard = [dot for dot in dots if not mirror.progress.has_heard(dot)]
        has_ended = mirror.has_ended(name, described.booked.booked_at)
        if len(unheard) == len(dots) and not has_ended:
            mirror.take_booking(name, described)
            mirror.note_dots(name, dots)
        else:  # it has ended here, perhaps when another process had not restored it yet
            for dot in unheard:
                mirror.end_dot(name, dot)

    def finish(self) -> Iterator[None]:
        """Ends the requests that the writer knew and no longer has; takes over its numbers."""
        mirror = self._mirror
        for number, (name, known) in enumerate(list(mirror.requests.items()), 1):
            gone = self._gone(name, known)
            if gone and mirror.requests.get(name) is known:
                mirror.here.quietly(mirror.end, name, gone)
                mirror.stats.ended += 1
            if number % SLICE == 0:
                yield
        for number, dot in enumerate(self._ended, 1):
            mirror.progress.note_ended(dot)
            if number % DOTS_AT_ONCE == 0:
                yield
        for writer, number in self._head.numbers.items():
            if writer != mirror.writer:
                whole = min(number, self._lacking.get(writer, number + 1) - 1)
                mirror.progress.hear(writer, whole)
        mirror.stats.views += 1

    def _gone(self, name: Name, known: Known) -> list[Dot]:
        """Returns the dots of a request that the writer has heard, if it no longer has it."""
        if not self._is_served(name) or name in self._mentioned:
            return []
        return [dot for dot in known.dots if self._has_heard(dot)]

    def _is_served(self, name: Name) -> bool:
        served = self._head.served
        of_all_tenants = (name.key.model_name, None)
        return not served or of_all_tenants in served or tuple(name.key) in served

    def _has_heard(self, dot: Dot) -> bool:
        """Returns whether the writer had heard of a booking."""
        return dot.number <= self._head.numbers.get(dot.writer, 0) or dot in self._ended
