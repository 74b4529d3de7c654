"""Keeps the daemon's state in the state directory, and restores it at the start.

    start   registrations ──> bookings ──> faces serve ──> index ──> streams go on from it
    runs    journal of bookings      new records every 50 ms             journal.py
            registrations            as soon as they change              registrations.py
            index                    every `snapshot_s`                  snapshot.py
    stop    index, journal

A file that cannot be believed is put aside and logged, and its part of the state begins empty; the
other files are still restored. A restored instance that nobody registers within GRACE_S is dropped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import trio

from kvd.errors import KvdError
from kvd.fleet_file.follower import RegistrationTarget
from kvd.index.partitions import State
from kvd.index.restore import bring_in, planned_of
from kvd.model import InstanceId, PartitionKey
from kvd.persistence import snapshot
from kvd.persistence.bookings import restore
from kvd.persistence.clocks import ClockReading
from kvd.persistence.directory import StateDirectory
from kvd.persistence.frames import Content, Damaged, Header, Reading
from kvd.persistence.holdings import Restoring
from kvd.persistence.journal import MAX_WAITING_BYTES, RETRY_S, JournalWriter, SharedUntil
from kvd.persistence.metrics import FileOutcome, StoreStats, state_families
from kvd.persistence.reading import UnreadJournal, bookings_of, frames_of
from kvd.persistence.registrations import Registrations, register_again
from kvd.slots.shared_loads import Ledgers
from kvd.telemetry.logs import get_logger
from kvd.telemetry.metrics import Family
from kvd.telemetry.stretches import SNAPSHOT
from kvd_core.ledger.journal import Journal

# Time within which a restored instance must be registered again: a gateway asks its engines before
# it registers them.
GRACE_S = 60.0

# Age up to which a snapshot is preferred to a peer's dump. vLLM keeps the last 10,000 batches for
# replays, a quarter of an hour of a busy engine.
FRESH_S = 600.0

# Pause between two checks whether registrations have changed. A killed process loses the
# registrations that are younger.
REGISTRATIONS_S = 0.1

# Pause between two checks whether the file of registrations is still there: it may have been
# removed, with the directory or without, and registrations may not change for long.
REMOVED_S = 1.0

# Pause between two writes of registrations or snapshots, as a multiple of the time that the last
# write took: so the loop spends at most 5 % of its time on them.
PAUSES = 20

STOP_S = 30.0  # time that the writes at the end may take, on a disk that may hang

REFUSED = ".refused"  # ends the name of a file that was put aside

log = get_logger(__name__)


class StateStore:
    """One state directory, from its opening to the end of the process."""

    def __init__(self, directory: StateDirectory, every_s: float) -> None:
        """Writes a snapshot every `every_s` seconds and at the end; with 0 at the end alone."""
        self.directory = directory
        self.journal = Journal(MAX_WAITING_BYTES)
        self.stats = StoreStats()
        self.every_s = every_s

    def close(self) -> None:
        self.directory.close()


class Keeper:
    """Restores a store's state into the faces, and keeps it from then on."""

    def __init__(
        self,
        store: StateStore,
        state: State,
        ledgers: Ledgers,
        registrations: Registrations,
        clock: Callable[[], float],
    ) -> None:
        faces = registrations.faces
        self._store = store
        self._directory = store.directory
        self.stats = store.stats
        self._state = state
        self._registry = faces.registry
        self._publishers = faces.publishers
        self._slots = faces.slots
        self._selections = faces.selections
        self._registrations = registrations
        self._clock = clock
        self._writer = JournalWriter(
            store.directory,
            store.journal,
            ledgers,
            faces.slots,
            faces.selections,
            state.instance_id,
            clock,
        )
        self._restored: list[tuple[PartitionKey, InstanceId]] = []  # instances of the snapshot
        self._is_begun = False  # everything but the index has been restored
        self._restored_index = trio.Event()  # set, too, if there was no index to restore
        self._gathering_s = 0.0  # time that collecting the registrations took last
        self._unwritten: set[Content] = set()  # files whose last write has failed

    # ---- the start

    async def prepare(self, targets: dict[str, RegistrationTarget]) -> None:
        """Restores everything but the index: registrations by calls, then the bookings on them."""
        await self._restore_registrations(targets)
        await self._restore_bookings()

    async def _restore_registrations(self, targets: dict[str, RegistrationTarget]) -> None:
        """Makes the registrations again that calls had made."""
        path = self._directory.file(Content.REGISTRATIONS)
        try:
            frames = await trio.to_thread.run_sync(frames_of, path, Content.REGISTRATIONS)
            again = await register_again(frames, targets, self._registrations)
        except FileNotFoundError:
            return
        except (OSError, Damaged) as error:
            await self._refuse(Content.REGISTRATIONS, path, error)
            return
        self.stats.outcomes[Content.REGISTRATIONS] = FileOutcome.RESTORED
        self.stats.registrations = again.registered
        log.info("registrations_restored", registered=again.registered, failed=again.failed)

    async def _restore_bookings(self) -> None:
        """Restores the live bookings, whose workers are registered by now; begins a journal."""
        journals = self._directory.journals()
        now = self._clock()
        try:
            bookings = await bookings_of([path for _, path in journals], now)
            for _ in restore(bookings, self._slots, self._selections, now, self.stats.bookings):
                await trio.lowlevel.checkpoint()
        except UnreadJournal as error:
            await self._refuse(Content.JOURNAL, error.path, error.why)
            # Without this journal the others would bring back requests that have ended.
            await trio.to_thread.run_sync(self._directory.drop_journals)
        else:
            self._writer.shared_until.restore(bookings)
            if journals:
                self.stats.outcomes[Content.JOURNAL] = FileOutcome.RESTORED
                log.info(
                    "bookings_restored",
                    requests=self.stats.bookings.requests,
                    sessions=self.stats.bookings.sessions,
                    answers=self.stats.bookings.answers,
                    expired=self.stats.bookings.expired,
                    dropped=self.stats.bookings.dropped,
                )
        await self._writer.begin()
        self._is_begun = True

    async def has_fresh_index(self) -> bool:
        """Returns whether there is a snapshot so young that replays may still reach back to it."""
        try:
            path = self._directory.file(Content.INDEX)
            reading = await trio.to_thread.run_sync(Reading, path)
        except (OSError, Damaged):  # there is none, or `restore_index` will report its fault
            return False
        reading.close()
        return ClockReading.now(self._clock()).since(reading.header.moments) < FRESH_S

    @property
    def shared_until(self) -> SharedUntil:
        """Up to where the bookings here have been sent to the shared state."""
        return self._writer.shared_until

    def leave_index(self) -> None:
        """Starts without the snapshot, which the next snapshot will replace."""
        self._restored_index.set()

    async def restore_index(self, *, unless_empty: bool = False) -> int | None:
        """Fills the index from the snapshot, while faces serve.

        Returns the number of blocks, or None if there is no usable snapshot, or one without blocks
        is not wanted yet.
        """
        path = self._directory.file(Content.INDEX)
        began = self._clock()
        self._state.begin_recovery()
        try:
            found = await snapshot.read(path)
            if unless_empty and not found.blocks:
                return None
            planned = await planned_of(self._state, found.entries)
            restoring = Restoring(self._state, self._publishers, found.holdings)
        except FileNotFoundError:
            self._restored_index.set()
            return None
        except (OSError, Damaged, KvdError, ValueError) as error:
            await self._refuse(Content.INDEX, path, error)
            self._restored_index.set()
            return None
        else:
            refused = self._state.budget.refused
            await bring_in(self._state, planned, self._note_blocks)
            if self._state.budget.refused != refused:
                found.note_no_room()
            await self._registry.take_over(found.positions)
            workers = self.stats.blocks
            await restoring.run(lambda blocks: self._note_blocks(workers + blocks))
            self._restored = [(each.key, id_) for each in planned for id_ in each.workers]
        finally:
            self._state.end_recovery()
        self._restored_index.set()  # not if cancelled: then the file must stay as it is
        self.stats.outcomes[Content.INDEX] = FileOutcome.RESTORED
        log.info(
            "index_restored",
            blocks=self.stats.blocks,
            streams=len(found.positions) + len(found.holdings.publishers),
            age_s=round(ClockReading.now(began).since(found.header.moments), 3),
            seconds=self._clock() - began,
        )
        return self.stats.blocks

    def _note_blocks(self, blocks: int) -> None:
        self.stats.blocks = blocks

    async def _refuse(self, content: Content, path: Path, error: Exception) -> None:
        """Puts an unbelievable file aside, so that it can be examined."""
        self.stats.outcomes[content] = FileOutcome.REFUSED
        reason = error.strerror if isinstance(error, OSError) else str(error)
        kept = path.with_name(content + REFUSED)
        try:
            await trio.to_thread.run_sync(os.replace, path, kept)
        except OSError:  # the fault that made it unreadable may also keep it from being moved
            kept = path
        log.error("state_refused", file=str(path), reason=reason, kept_as=str(kept))

    # ---- while the daemon runs

    async def run(self) -> None:
        """Keeps the state until it is cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._writer.run)
            nursery.start_soon(self._keep_registrations)
            nursery.start_soon(self._keep_index)
            nursery.start_soon(self._drop_unclaimed)

    async def _keep_registrations(self) -> NoReturn:
        written = -1
        checked_at = self._clock()
        while True:
            changes = self._registrations.changes
            pause = REGISTRATIONS_S
            if changes == written and self._clock() - checked_at >= REMOVED_S:
                checked_at = self._clock()
                if not await self._has_registrations():
                    written = -1
            if changes != written:
                if await self._write_registrations():
                    written = changes
                else:
                    pause = RETRY_S
            await trio.sleep(max(pause, PAUSES * self._gathering_s))

    async def _has_registrations(self) -> bool:
        """Returns whether the next start will find the file that was written last."""
        try:
            return await trio.to_thread.run_sync(self._directory.has_file, Content.REGISTRATIONS)
        except OSError as error:
            self._failed(Content.REGISTRATIONS, error)
            return False

    async def _write_registrations(self) -> bool:
        began = self._clock()
        frames = await self._registrations.frames()
        self._gathering_s = self._clock() - began
        header = self._header(Content.REGISTRATIONS)
        try:
            await trio.to_thread.run_sync(self._directory.replace, header, frames)
        except OSError as error:
            self._failed(Content.REGISTRATIONS, error)
            return False
        self._wrote(Content.REGISTRATIONS)
        return True

    async def _keep_index(self) -> None:
        await self._restored_index.wait()  # before that a snapshot would be incomplete
        while self._store.every_s:
            await trio.sleep(max(self._store.every_s, PAUSES * self.stats.index_s))
            await self._write_index()

    async def _write_index(self) -> None:
        began = self._clock()
        header = self._header(Content.INDEX)
        try:
            writing = snapshot.write(
                self._directory, header, self._state, self._registry, self._publishers
            )
            size = await SNAPSHOT.steps_of(writing)
        except OSError as error:
            self._failed(Content.INDEX, error)
            return
        self._wrote(Content.INDEX)
        self.stats.index_bytes, self.stats.index_at = size, began
        self.stats.index_s = self._clock() - began
        log.debug("index_kept", bytes=size, seconds=self.stats.index_s)

    async def _drop_unclaimed(self) -> None:
        await self._restored_index.wait()
        await trio.sleep(GRACE_S)
        dropped = self._registry.give_up(self._restored)
        self._restored = []
        if dropped:
            log.warning("restored_instances_dropped", instances=dropped)

    def _header(self, content: Content) -> Header:
        return Header(content, self._state.instance_id, ClockReading.now(self._clock()))

    def _wrote(self, content: Content) -> None:
        self.stats.written[content] += 1
        if content in self._unwritten:
            log.info("state_resumed", file=content, path=str(self._directory.path))
            self._unwritten.remove(content)

    def _failed(self, content: Content, error: OSError) -> None:
        self.stats.failures += 1
        reason = error.strerror or str(error)
        if content not in self._unwritten:
            log.warning("state_failed", file=content, path=str(self._directory.path), reason=reason)
        self._unwritten.add(content)

    # ---- the end

    async def finish(self) -> None:
        """Writes the state for the last time, when nothing changes it any more."""
        if not self._is_begun:  # the start was given up: the files must stay as they were
            return
        with trio.move_on_after(STOP_S):
            await self._writer.finish()
            await self._write_registrations()
            if self._restored_index.is_set():
                await self._write_index()

    @property
    def failures(self) -> int:
        """The number of writes that have failed."""
        return self.stats.failures + self._writer.stats.failures

    def families(self) -> Iterator[Family]:
        """Yields the families of /metrics."""
        journal, now = self._store.journal, self._clock()
        return state_families(self.stats, journal, self._writer, self.failures, now)
