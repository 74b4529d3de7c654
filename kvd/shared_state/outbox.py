"""This process's own steps on their way to the server.

    ledgers, sessions ──> Journal (native, bounded) ── drain ──> entries, numbered ──> stream
                                                        │
                                                        └──> Mirror: our live requests

The journal is drained as steps come, with or without a server, and in slices, since one call may
end thousands of requests. Entries wait for the server. Beyond MAX_WAITING_BYTES all waiting entries
are dropped, and so are steps for which the journal has no room. Their numbers are left out, so
others see a gap and read this writer's view.

Costs: 12 us for a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import trio

from kvd.model import PartitionKey
from kvd.persistence.bookings import STEP
from kvd.shared_state.booked import Faces
from kvd.shared_state.entries import ENTRY_BYTES, Dot, LedgerName, StreamEntry, unpacked
from kvd.shared_state.mirror import Mirror
from kvd.slots.shared_loads import LEDGER, Ledgers
from kvd.wire.lifecycle import Face
from kvd_core.ledger.journal import ENDED, Booked, Journal, OtherRecord, pieces, read

# Records that wait for the server: 20 s of 100 bookings a second with 1,000 blocks each.
MAX_WAITING_BYTES = 16 * 1024 * 1024

# Steps numbered between two checkpoints: under 1 ms.
NUMBERED_AT_ONCE = 64


class Outbox:
    """The entries that wait to be written, and the journal that feeds them."""

    def __init__(self, journal: Journal, mirror: Mirror, ledgers: Ledgers, faces: Faces) -> None:
        self.entries: deque[StreamEntry] = deque()  # the first is written first
        self.holes = 0  # how often steps were lost and left out of the stream
        self._size = 0  # bytes of the entries
        self._journal = journal
        self._mirror = mirror
        self._progress = mirror.progress
        self._opened = ledgers
        self._faces = faces
        self._ledgers: dict[int, LedgerName] = {}
        self._taken: Iterator[bytes] = iter(())  # records taken from the journal, not yet numbered
        self._taken_bytes = 0
        self._ends = Journal(MAX_WAITING_BYTES)
        self._dropped = 0

    def __len__(self) -> int:
        """Returns the number of bytes that wait."""
        return len(self._journal) + self._taken_bytes + self._size

    @property
    def shared_number(self) -> int:
        """The number of the last step that the server has, in an entry or by our next view."""
        return self.entries[0].first - 1 if self.entries else self._progress.own

    @property
    def has_unsent(self) -> bool:
        return len(self) > 0 or bool(self._mirror.untold)

    def introduce(self) -> None:
        """Records all ledgers anew: the journal was paused or full when they were opened."""
        for kind, face in self._faces.items():
            for owner in face.owners():
                if owner.ledger_block_size is not None and owner.ledger.number:
                    self._opened.introduce(
                        self._journal, owner.ledger, kind, owner.key, owner.ledger_block_size
                    )

    async def drain(self) -> None:
        """Numbers all recorded steps, including those that come meanwhile."""
        while self._number_some(trio.current_time()):
            await trio.lowlevel.checkpoint()

    async def go_through(self, work: Iterator[None]) -> None:
        """Goes through work in slices, while clients go on; all their steps come before a slice."""
        await self.drain()
        for _ in work:
            await trio.lowlevel.checkpoint()
            await self.drain()

    def _number_some(self, now: float) -> bool:
        """Numbers a slice of the recorded steps; returns whether there are more."""
        if self._mirror.untold:
            self._number_ends(now)
        if not self._taken_bytes:
            self._take()
        if piece := next(self._taken, b""):
            self._taken_bytes -= len(piece)
            self._number(piece, now)
        if self._size > MAX_WAITING_BYTES:  # the server refuses to write
            self.entries.clear()
            self._size = 0
            self.holes += 1
        return self._taken_bytes > 0 or len(self._journal) > 0 or bool(self._mirror.untold)

    def _take(self) -> None:
        records = self._journal.take()
        self._taken = pieces(records, ENTRY_BYTES, NUMBERED_AT_ONCE)
        self._taken_bytes = len(records)
        if self._journal.dropped != self._dropped:
            self._dropped = self._journal.dropped
            self.holes += 1
            # The number left out comes first, since newer steps may come while these are numbered.
            self._progress.own += 1
            self.introduce()

    def sent(self) -> None:
        """Notes that the server has the first entry."""
        self._size -= len(self.entries.popleft().records)

    def _number(self, records: bytes, now: float) -> None:
        mirror, progress = self._mirror, self._progress
        first = progress.own + 1
        used: dict[int, LedgerName] = {}
        dots: list[Dot | None] = []
        for record in read(records):
            progress.own += 1
            if isinstance(record, OtherRecord):
                if record.kind == LEDGER:
                    self._introduce(record.content)
                continue
            name = self._ledgers.get(record.ledger)
            if name is None:  # the introduction of its ledger was lost, so the step is lost, too
                if not isinstance(record, Booked):
                    dots.append(None)
                continue
            used[record.ledger] = name
            if isinstance(record, Booked):
                mirror.booked_here(name, record)
                continue
            dots.append(mirror.stepped_here(name, record))
        self._append(first, now, used, dots, records)

    def _number_ends(self, now: float) -> None:
        """Numbers ends of bookings that no recorded step names: their dot here is another."""
        untold = self._mirror.untold
        ends = untold[:NUMBERED_AT_ONCE]
        del untold[:NUMBERED_AT_ONCE]
        names: dict[int, LedgerName] = {}
        dots: list[Dot | None] = []
        for number, (name, dot) in enumerate(ends):
            request_id = name.request_id.encode()
            self._ends.put(ENDED, STEP.pack(number, len(request_id)) + request_id)
            names[number] = LedgerName(name.face, name.key, 0)
            dots.append(dot)
        first = self._progress.own + 1
        self._progress.own += len(ends)
        self._append(first, now, names, dots, self._ends.take())

    def _append(
        self,
        first: int,
        now: float,
        ledgers: dict[int, LedgerName],
        dots: list[Dot | None],
        records: bytes,
    ) -> None:
        """Has an entry wait with the steps from the `first` to our last."""
        progress = self._progress
        entry = StreamEntry(progress.writer, first, progress.own, now, ledgers, dots, records)
        self._size += len(records)
        self.entries.append(entry)

    def _introduce(self, content: bytes) -> None:
        number, face, model_name, tenant_id, block_size = unpacked(content)
        key = PartitionKey(model_name, tenant_id)
        self._ledgers[number] = LedgerName(Face(face), key, block_size)
