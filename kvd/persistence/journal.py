"""Writes the journal of bookings, so that a killed process loses no more than the last moments.

    ledgers, sessions, answers ──> Journal (memory) ── every FLUSH_S ──> journal.7     a thread
                                                                            │ too long, or a hole
       everything booked now, in slices ──> journal.8 <─────────────────────┘
       journal.7 goes once journal.8 is whole and on the disk

Records reach the kernel within FLUSH_S: a killed process loses the bookings of that time. They
reach the disk within SYNC_S: a machine that loses its power loses the bookings of that time.

The records are those of requests (kvd_core/ledger/records.pxd), and others by their kind: L of
ledgers (kvd.slots.shared_loads), A of retried answers (kvd.selection.retries), S of sessions
(kvd.selection.affinity), W, H and T of the journal itself (kvd.persistence.bookings).

A disk that hangs is reported after HANGING_S; records wait meanwhile.
While it is full or faulty, nothing is recorded and the old journals stay as they are. Every
RETRY_S a new journal is tried, which begins with everything that is booked then.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import trio

from kvd.persistence.bookings import (
    HOLE,
    SHARED,
    WHOLE,
    EndedRequests,
    KeptRequests,
    SharedPoint,
)
from kvd.persistence.clocks import ClockReading
from kvd.persistence.directory import StateDirectory, give_up, put, sync_directory
from kvd.persistence.frames import Content, Header, frame, packed
from kvd.selection.service import Selections
from kvd.slots.live_requests import LedgerOwner
from kvd.slots.shared_loads import Ledgers
from kvd.slots.trackers import SlotTrackers
from kvd.telemetry.logs import get_logger
from kvd.wire.lifecycle import Face
from kvd_core.ledger.journal import Journal

FLUSH_S = 0.05  # time after which a booking is with the kernel, and outlives the process
SYNC_S = 1.0  # time after which a booking is on the disk, and outlives a power loss

# Records that wait for a slow disk: 13,000 bookings of 10,000 tokens, which take 5 KB each.
MAX_WAITING_BYTES = 64 * 1024 * 1024

# Size beyond which a new journal is begun, or GROWTH times the size at which the journal was whole,
# if that is more.
MAX_JOURNAL_BYTES = 64 * 1024 * 1024
GROWTH = 4

EXPORT_BYTES = 64 * 1024  # bookings recorded anew between two checkpoints: 0.1 ms
EXPORTED_AT_ONCE = 256  # records of ended requests between two checkpoints: 0.2 ms
RETRY_S = 5.0  # pause before a disk that has failed is tried again
HANGING_S = 5.0  # time after which a disk that has not answered is reported

T = TypeVar("T")

RECORDS = ord("R")  # kind of the frames of a journal

log = get_logger(__name__)


class SharedUntil:
    """Up to where the bookings here have been sent to the shared state's server.

    A later booking that no other process knows after a restart has not ended elsewhere. Others may
    not know of the last ends here either.
    """

    def __init__(self, journal: Journal | None) -> None:
        """Records it in the `journal`, if there is one."""
        self.last: SharedPoint | None = None  # None: nothing has been sent
        self.ended = EndedRequests()  # the shared state goes on with it
        self._journal = journal

    def restore(self, kept: KeptRequests) -> None:
        """Takes over what a process before this one has recorded."""
        self.last, self.ended = kept.shared_point, kept.ended

    def note(self, shared: SharedPoint) -> None:
        self.last = shared
        if self._journal is not None:
            self._journal.put(SHARED, packed(shared))

    def export(self) -> Iterator[None]:
        """Records everything in the journal; yields after every slice."""
        if self._journal is None or self.last is None:
            return
        for number, (kind, content) in enumerate(self.ended.records()):
            self._journal.put(kind, content)
            if number % EXPORTED_AT_ONCE == 0:
                yield
        self.note(self.last)  # behind the bookings of ended requests, which it does count


@dataclass(slots=True)
class JournalStats:
    """The cost and the losses of the journal; plain numbers for metrics."""

    written_bytes: int = 0
    flushes: int = 0
    begun: int = 0  # journals
    failures: int = 0  # writes that the disk refused
    lost_bytes: int = 0  # size of the records that could not be written


class JournalWriter:
    """The journals of one directory."""

    def __init__(
        self,
        directory: StateDirectory,
        journal: Journal,
        ledgers: Ledgers,
        slots: SlotTrackers,
        selections: Selections,
        instance_id: str,
        clock: Callable[[], float],
    ) -> None:
        self._directory = directory
        self._journal = journal
        self._ledgers = ledgers
        self._slots = slots
        self._selections = selections
        self._instance_id = instance_id
        self._clock = clock
        self.stats = JournalStats()
        self.shared_until = SharedUntil(journal)
        self.error: str | None = None  # why nothing is recorded; None: bookings are recorded
        self._has_failed = False  # the disk has refused a write to the current file
        self._last = max((number for number, _ in directory.journals()), default=0)
        self._file: int | None = None
        self._number = 0  # of the current file
        self._size = 0
        self._bound = MAX_JOURNAL_BYTES
        self._dropped = 0  # records dropped so far when the journal was begun
        self._synced = 0  # bytes of the file that are on the disk
        self._whole = math.inf  # bytes of the file with everything that was booked at its begin
        self._begun_at = -math.inf  # when the last journal was begun or tried
        self._moments = ClockReading.now(clock())  # when the last journal was begun
        self._asked: list[float] = []  # since when threads wait for the disk

    async def run(self) -> None:
        """Writes records until it is cancelled; `finish` writes those that wait then."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write_all)
            nursery.start_soon(self._sync_all)
            nursery.start_soon(self._watch_disk)

    async def _on_disk(self, what: Callable[..., T], *arguments: Any) -> T:
        """Calls a function in a thread, since it may wait for the disk."""
        asked_at = trio.current_time()
        self._asked.append(asked_at)
        try:
            return await trio.to_thread.run_sync(what, *arguments)
        finally:
            self._asked.remove(asked_at)

    async def _watch_disk(self) -> NoReturn:
        """Reports a disk that neither takes nor refuses what is written."""
        while True:
            await trio.sleep(SYNC_S)
            if self._is_hanging():
                self._note_fault(f"the disk has not answered for {HANGING_S:g} s")

    def _is_hanging(self) -> bool:
        return bool(self._asked) and min(self._asked) < trio.current_time() - HANGING_S

    async def _sync_all(self) -> NoReturn:
        """Syncs the file to the disk every SYNC_S, however long that takes: nobody waits for it."""
        while True:
            await trio.sleep(SYNC_S)
            number = self._number
            try:
                await self.sync()
            except OSError as error:
                if number == self._number:  # a new journal needs the one before no more
                    self._failed(error)

    async def sync(self) -> None:
        """Syncs the written records to the disk; raises OSError, also if the journal is gone."""
        if self._file is None or self._has_failed:
            return
        # A new journal may be begun while the thread works.
        file, size, number = os.dup(self._file), self._size, self._number
        try:
            await self._on_disk(self._put_on_disk, number, file, self._synced != size)
        finally:
            os.close(file)
        if self._synced == 0:
            await self._on_disk(sync_directory, self._directory.path)
        if number != self._number or self._has_failed:
            return
        is_longer, self._synced = self._synced != size, size
        if size < self._whole:
            return
        if self.error is not None and not self._is_hanging():
            log.info("state_journal_resumed", path=str(self._directory.path))
            self.error = None
        if is_longer:
            await self._on_disk(self._directory.drop_journals, number)

    def _put_on_disk(self, number: int, file: int, has_unsynced: bool) -> None:
        """In a thread: syncs a journal, and checks that the next start will find it."""
        if has_unsynced:
            os.fdatasync(file)
        if not self._directory.has_journal(number, file):
            raise OSError(errno.ENOENT, "the journal has been removed")

    async def _write_all(self) -> NoReturn:
        while True:
            if not self._has_failed:
                await trio.sleep(FLUSH_S)
                await self.flush()
            if self._has_failed:  # the first time since long, a new journal is tried at once
                await trio.sleep_until(self._begun_at + RETRY_S)
            is_due = self._size > self._bound or self._has_hole() or self._is_clock_off()
            if self._has_failed or is_due:
                await self.begin()

    async def finish(self) -> None:
        """Writes the records that wait, and closes the journal.

        A journal that is gone or could not be written, perhaps only until now, is begun anew.
        """
        await self.flush()
        try:
            await self.sync()
        except OSError as error:
            self._failed(error)
        if self._has_failed or self._has_hole():
            await self.begin()
            with suppress(OSError):  # the process ends, so nothing could be done about it
                await self.sync()
        self._close()

    async def begin(self) -> None:
        """Begins a journal with everything that is booked now.

        Once that is on the disk, earlier ones are not needed.
        """
        self._begun_at = trio.current_time()
        if self._has_failed:  # there is no file for the records that wait
            self.stats.lost_bytes += len(self._journal.take())
        await self.flush()  # to the journal before, which may still be needed
        self._last += 1  # also if this one fails: the next one has another name
        number = self._last
        self._moments = ClockReading.now(self._clock())
        header = Header(Content.JOURNAL, self._instance_id, self._moments, number)
        try:
            made = await self._on_disk(self._directory.create_journal, header)
        except OSError as error:
            self._failed(error)
            return
        before = None if self._file is None or self._synced else self._number
        self._close()
        self._number, (self._file, self._size) = number, made
        self._synced = 0
        is_behind_hole = self._has_failed or self._has_hole()
        self._has_failed = False
        if is_behind_hole:  # the records that wait are from around it, and are exported anew below
            self.stats.lost_bytes += len(self._journal.take())
            self._journal.put(HOLE, b"")
        self._whole = math.inf
        self._dropped = self._journal.dropped
        self._bound = MAX_JOURNAL_BYTES
        try:
            for _ in self._export():
                if len(self._journal) > EXPORT_BYTES:
                    await self.flush()
                if self._has_failed:
                    break
                await trio.lowlevel.checkpoint()
        except MemoryError:  # too many records wait: that is a hole, so another journal is begun
            return
        await self.flush()
        if self._has_failed and is_behind_hole:  # a part of it is of no use, and takes room
            await self._on_disk(self._directory.drop_journal, number)
        if self._has_failed or self._has_hole():
            return
        self._bound = max(MAX_JOURNAL_BYTES, GROWTH * self._size)
        self._whole = self._size
        self.stats.begun += 1
        if before is not None:  # it never reached the disk, and the process needs the new one alone
            await self._on_disk(self._directory.drop_journal, before)

    def _has_hole(self) -> bool:
        """Returns whether records of this journal were dropped because too many waited."""
        return self._journal.dropped != self._dropped

    def _is_clock_off(self) -> bool:
        """Returns whether ages by the header of this journal will be wrong after another boot."""
        return ClockReading.now(self._clock()).is_off(self._moments)

    def _export(self) -> Iterator[None]:
        """Records everything that is booked; yields after every slice."""
        owners: list[tuple[Face, LedgerOwner]] = []
        owners += [(Face.SLOT_TRACKER, each) for each in self._slots.owners()]
        owners += [(Face.SELECTION, each) for each in self._selections.reservations.owners()]
        for face, owner in owners:
            block_size = owner.ledger_block_size
            if block_size is None or not owner.ledger.number:
                continue  # the owner has had no worker, so nothing is booked
            self._ledgers.introduce(self._journal, owner.ledger, face, owner.key, block_size)
            after: int | None = 0
            while after is not None:
                after = owner.ledger.export(self._journal, after, EXPORT_BYTES)
                yield
        if self._selections.affinity is not None:
            yield from self._selections.affinity.export()
        yield from self._selections.reservations.retries.export()
        yield from self.shared_until.export()
        self._journal.put(WHOLE, b"")

    async def flush(self) -> None:
        """Writes the records that wait."""
        if self._file is None or self._has_failed or not len(self._journal):
            return
        records = self._journal.take()
        try:
            with trio.CancelScope(shield=True):  # or the records that were taken would be lost
                await self._on_disk(self._append, self._file, records)
        except OSError as error:
            self.stats.lost_bytes += len(records)
            self._failed(error)
            return
        self.stats.flushes += 1
        self.stats.written_bytes += len(records)

    def _append(self, file: int, records: bytes) -> None:
        """In a thread: appends a frame, wholly or not at all."""
        framed = frame(RECORDS, records)
        try:
            put(file, framed)
        except OSError:
            with suppress(OSError):  # the write has failed already
                os.ftruncate(file, self._size)
            raise
        self._size += len(framed)

    def _failed(self, error: OSError) -> None:
        """Notes a fault; the file stays open until the next journal, since a thread may use it."""
        self.stats.failures += 1
        self._note_fault(error.strerror or str(error))
        self._has_failed = True

    def _note_fault(self, reason: str) -> None:
        if self.error is None:
            log.warning("state_journal_failed", path=str(self._directory.path), reason=reason)
        self.error = reason

    def _close(self) -> None:
        if self._file is not None:
            give_up(self._file)
            self._file = None
