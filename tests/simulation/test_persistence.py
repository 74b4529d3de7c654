"""Processes that die at any moment, on disks that lie: they restore a state that once was, or none.

A life is one process. It books, completes and ends requests on two faces, with sessions and
retries, and now and then flushes its journal to a disk that may be full for a while. It ends like a
killed process; afterwards its files may be torn or changed, or a foreign file put beside them. The
next life starts from those files, perhaps after a reboot, with a wall clock that has jumped. No
other process gets the directory meanwhile.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from random import Random
from threading import Event
from typing import Any, NamedTuple

import pytest
import trio
import trio.testing

from kvd.model import PartitionKey
from kvd.persistence import clocks, journal
from kvd.persistence.bookings import Restored, restore
from kvd.persistence.directory import StateDirectory
from kvd.persistence.frames import Content, Header, opening
from kvd.persistence.journal import JournalWriter
from kvd.persistence.reading import UnreadJournal, bookings_of
from kvd.selection.options import RouterOptions
from kvd.selection.requests import Retry
from kvd.slots.live_requests import REMOVAL_SLICE
from kvd.slots.shared_loads import Ledgers
from kvd.slots.trackers import SlotTrackers
from kvd_core.json.scan import BodyScanner
from kvd_core.ledger.journal import Journal
from tests.support.budget import scaled
from tests.support.full_disks import no_longer_files
from tests.support.selecting import M, Service, worker

TTL_S = 50
EXPIRY_S = 1e6  # so long that no request expires
SLOTS = PartitionKey("m", "t")
LIVES = 6


class Seen(NamedTuple):
    """Everything that a process has booked, and the retries that it could answer."""

    slots: frozenset[tuple[object, ...]]
    reservations: frozenset[tuple[object, ...]]
    sessions: frozenset[tuple[object, ...]]
    answers: int


NOTHING = Seen(frozenset(), frozenset(), frozenset(), 0)


def scanned(hashes: list[int]) -> BodyScanner:
    scanner = BodyScanner({"sequence_hashes": "i64"}, ())
    scanner.scan(b'{"sequence_hashes":[%b]}' % b",".join(b"%d" % each for each in hashes))
    return scanner


class Process:
    """One life on a state directory."""

    def __init__(self, folder: Path, number: int, room: int = 1 << 24) -> None:
        self.directory = StateDirectory(folder)
        self.journal = Journal(room)
        ledgers = Ledgers(journals=[self.journal])
        options = RouterOptions(session_affinity_ttl_s=TTL_S, uses_kv_events=False)
        self.service = Service(options, expiry_s=EXPIRY_S, ledgers=ledgers, journal=self.journal)
        self._ahead = 1000.0 * (number + 1)  # each process has a clock of its own
        self.service.now = time.monotonic() + self._ahead
        clock = lambda: self.service.now  # noqa: E731
        self.slots = SlotTrackers(EXPIRY_S, ledgers, clock=clock)
        selections = self.service.selections
        self.writer = JournalWriter(
            self.directory, self.journal, ledgers, self.slots, selections, f"p{number}", clock
        )
        self.restored = Restored()
        self.names = 0

    async def start(self) -> None:
        """Registers workers and restores the bookings in the journals; raises UnreadJournal."""
        for number in (1, 2):
            self.slots.register(SLOTS, number, 4, 0, 2)
            await self.service.selections.workers.put(worker(number))
        now = self.service.now
        bookings = await bookings_of([path for _, path in self.directory.journals()], now)
        for _ in restore(bookings, self.slots, self.service.selections, now, self.restored):
            pass

    def seen(self) -> Seen:
        ledger = self.slots.trackers[SLOTS].ledger
        names = [f"r{number}" for number in range(40)]
        affinity = self.service.selections.affinity
        assert affinity is not None
        now = self.service.now
        return Seen(
            frozenset((name, *_plain(ledger.request(name))) for name in names if _is(ledger, name)),
            frozenset(
                (name, *_plain(fleet.ledger.request(name)))
                for name, fleet in self.service.selections.reservations.owner_of.items()
            ),
            frozenset(
                (key, binding.worker_id, binding.dp_rank, binding.leases)
                for key, binding, _ in affinity.sessions.listed(now)
            ),
            sum(
                answered.receipt is not None and answered.receipt.left() is not None
                for _, answered in self.service.selections.reservations.retries._answers.values()
            ),
        )

    async def step(self, random: Random) -> None:
        self.service.now = max(math.nextafter(self.service.now, math.inf), self._present())
        name = f"r{random.randrange(40)}"
        reservations = self.service.selections.reservations
        match random.randrange(9):
            case 0 | 1:
                tracker = self.slots.trackers[SLOTS]
                if not _is(tracker.ledger, name):
                    hashes = [random.randrange(1, 5) for _ in range(random.randrange(1, 6))]
                    rank = random.choice([1, 2]), random.randrange(2)
                    key = random.choice([None, "key"])
                    content = scanned(hashes), random.randrange(50), self.service.now, key
                    self.slots.add(tracker, name, *rank, *content)
            case 2:
                self.slots.complete(self.slots.trackers[SLOTS], name)
            case 3:
                self.slots.end(self.slots.trackers[SLOTS], name)
            case 4 | 5:
                if name not in reservations.owner_of:
                    session = random.choice([None, "s1", "s2", "s3"])
                    retry = random.choice([None, Retry((name, "key"), b"content")])
                    self.service.select(
                        [random.randrange(3)], reservation_id=name, session_id=session, retry=retry
                    )
            case 6:
                if name in reservations.owner_of:
                    reservations.prefill_complete(name)
            case 7:
                if name in reservations.owner_of:
                    reservations.output_block(name, random.choice([None, 0.5]))
            case 8:
                if name in reservations.owner_of:
                    reservations.free(name)

    def _present(self) -> float:
        return time.monotonic() + self._ahead

    def die(self) -> None:
        """Ends as a killed process does: unwritten bookings are lost, and its lock is free."""
        self.writer._close()
        self.directory.close()


@contextmanager
def full_disk(process: Process, room: int) -> Iterator[None]:
    """Lets files grow at most `room` bytes beyond the present size of the journal."""
    (_, path) = process.directory.journals()[-1]
    with no_longer_files(path.stat().st_size + room):
        yield


class Clocks:
    """The machine's boot id and wall clock, which change from life to life."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.boot = "boot-0"
        self.ahead_s = 0.0  # offset of the wall clock; it must not outlast sessions
        real = time.time
        monkeypatch.setattr(clocks, "_boot", lambda: self.boot)
        monkeypatch.setattr(clocks.time, "time", lambda: real() + self.ahead_s)

    def jump(self, random: Random) -> None:
        self.boot = random.choice([self.boot, f"boot-{random.random()}"])
        self.ahead_s += random.choice([0.0, 3.0, -100_000.0])


def _is(ledger: object, name: str) -> bool:
    return ledger.request(name) is not None  # type: ignore[attr-defined]


def _plain(live: object) -> tuple[object, ...]:
    """Returns a request without its time of admission, which differs between clocks."""
    return live._replace(admitted_at=0.0)  # type: ignore[attr-defined,no-any-return]


def spoil(folder: Path, random: Random) -> str:
    """Tears the last journal, changes a bit of one, or puts a foreign file there; says which."""
    journals = sorted(folder.glob("journal.*"), key=lambda path: int(path.suffix[1:]))
    if not journals:
        return ""
    path = random.choice(journals)
    data = bytearray(path.read_bytes())
    match random.randrange(4):
        case 2:
            header = Header(Content.REGISTRATIONS, "p", clocks.ClockReading.now(0.0), 0)
            (folder / f"journal.{len(journals) + 1000}").write_bytes(opening(header))
            return "foreign"
        case 0 if path == journals[-1] and data:
            path.write_bytes(data[: random.randrange(len(data))])
            return "torn"
        case 1 if data:
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
            path.write_bytes(data)
            return "flipped"
    return ""


def nearest(seen: Seen, before: list[Seen]) -> list[str]:
    """Returns how a state differs from the most similar one in `before`."""
    found = [
        [
            f"{name} {a ^ b if isinstance(a, frozenset) else (a, b)}"  # type: ignore[operator]
            for name, a, b in zip(Seen._fields, seen, each, strict=True)
            if a != b
        ]
        for each in before
    ]
    return min(found, key=lambda each: len(str(each)))


async def half_a_beginning(process: Process, random: Random, before: list[Seen]) -> list[Seen]:
    """Begins a journal while clients call, and stops half-way; returns all states meanwhile."""
    seen = list(before)

    async def call() -> None:
        for _ in range(random.randrange(12)):
            await process.step(random)
            seen.append(process.seen())
            await trio.lowlevel.checkpoint()

    flush, left = process.writer.flush, random.randrange(1, 6)

    async def flush_some() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            await trio.sleep_forever()
        await flush()

    process.writer.flush = flush_some  # type: ignore[method-assign]
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(process.writer.begin)
            await call()
            with trio.move_on_after(0.02):
                await trio.sleep_forever()
            scope.cancel()
    return seen


async def lives(folder: Path, clocks: Clocks, seed: int) -> None:
    random = Random(seed)
    before = [NOTHING]  # all states since the last restart
    written = NOTHING  # the last state known to be written to the kernel
    spoilt = ""
    for number in range(LIVES):
        clocks.jump(random)
        process = Process(folder / "state", number)
        with pytest.raises(OSError, match="in use"):
            StateDirectory(folder / "state")
        try:
            await process.start()
        except UnreadJournal:
            assert spoilt
            process.die()
            shutil.rmtree(folder / "state")
            before, written, spoilt = [NOTHING], NOTHING, ""
            continue
        seen = process.seen()
        if spoilt:
            assert seen in before, (seed, number, spoilt, nearest(seen, before))
        else:
            assert seen == written, (seed, number)
        assert process.restored.dropped == process.restored.expired == 0
        before, written = [NOTHING, *before, seen], seen
        if random.randrange(4) == 0:
            before = await half_a_beginning(process, random, [seen])
            spoilt = "interrupted"
        elif random.randrange(4):  # otherwise it dies while it starts
            await process.writer.begin()
            before = [NOTHING, seen]
            for _ in range(random.randrange(60)):
                await process.step(random)
                before.append(process.seen())
                if random.randrange(5) == 0:
                    await process.writer.flush()
                    written = before[-1]
                if random.randrange(25) == 0:
                    await process.writer.begin()
                    written = before[-1]
                if random.randrange(25) == 0:
                    await process.writer.sync()
                if random.randrange(25) == 0:
                    with full_disk(process, random.randrange(40)):
                        await process.writer.flush()
                    if process.writer.error is None:
                        written = before[-1]  # the disk had room for this flush
                    elif random.randrange(3):
                        await process.writer.begin()
                        await process.writer.sync()
                        assert process.writer.error is None
                        written = before[-1]
                    else:
                        break  # it dies before the disk has room again
                if random.randrange(40) == 0:
                    before = await half_a_beginning(process, random, before)
                    spoilt = "interrupted"
                    break
        process.service.check()
        process.die()
        if spoilt != "interrupted":
            spoilt = spoil(folder / "state", random) if random.randrange(3) == 0 else ""


@pytest.mark.parametrize("seed", range(scaled(16)))
def test_what_comes_back_was_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(journal, "EXPORT_BYTES", 150)
    trio.run(lives, tmp_path, Clocks(monkeypatch), seed)


async def booked_and_written(folder: Path) -> Process:
    """Returns a process with one request in its journal."""
    process = Process(folder, 0)
    await process.start()
    await process.writer.begin()
    tracker = process.slots.trackers[SLOTS]
    process.slots.add(tracker, "r1", 1, 0, scanned([5]), 9, process.service.now, None)
    await process.writer.flush()
    return process


async def has_it(folder: Path) -> bool:
    """Returns whether another process restores that request."""
    process = Process(folder, 1)
    await process.start()
    found = _is(process.slots.trackers[SLOTS].ledger, "r1")
    process.die()
    return found


def test_a_session_is_held_for_longer_than_its_time_to_live(tmp_path: Path) -> None:
    async def main() -> None:
        process = Process(tmp_path, 0)
        await process.start()
        await process.writer.begin()
        process.service.now -= 2 * TTL_S
        process.service.select([1], reservation_id="r1", session_id="s1")
        process.service.now += 2 * TTL_S
        await process.writer.flush()
        before = process.seen()
        process.die()
        process = Process(tmp_path, 1)
        await process.start()
        assert process.seen().sessions == before.sessions != NOTHING.sessions
        process.die()

    trio.run(main)


def test_a_journal_that_is_removed_is_written_anew(tmp_path: Path) -> None:
    async def main() -> None:
        process = await booked_and_written(tmp_path / "state")
        shutil.rmtree(tmp_path / "state")
        with pytest.raises(OSError, match="has been removed"):
            await process.writer.sync()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(process.writer.run)
            while process.writer.stats.begun == 1:  # noqa: ASYNC110 - a thread writes
                await trio.sleep(journal.FLUSH_S)
            nursery.cancel_scope.cancel()
        process.die()
        assert await has_it(tmp_path / "state")

    trio.run(main, clock=trio.testing.MockClock(rate=50))


def test_a_journal_that_is_removed_right_before_the_end_is_written_anew(tmp_path: Path) -> None:
    async def main() -> None:
        process = await booked_and_written(tmp_path / "state")
        shutil.rmtree(tmp_path / "state")
        await process.writer.finish()
        process.die()
        assert await has_it(tmp_path / "state")

    trio.run(main)


def test_a_journal_stays_until_the_next_has_all(tmp_path: Path) -> None:
    """A sync while the next one is being made leaves the old one in place."""

    async def main() -> None:
        process = await booked_and_written(tmp_path)
        create, made = process.directory.create_journal, Event()

        def create_late(header: Header) -> tuple[int, int]:
            made.wait(10)
            return create(header)

        process.directory.create_journal = create_late  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(process.writer.begin)
            await trio.testing.wait_all_tasks_blocked()
            await process.writer.sync()
            assert [number for number, _ in process.directory.journals()] == [1]
            made.set()
        await process.writer.sync()
        assert [number for number, _ in process.directory.journals()] == [2]
        process.die()
        assert await has_it(tmp_path)

    trio.run(main)


def test_records_dropped_while_a_journal_is_created_are_a_hole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies before the journal is whole: what came before the hole is restored."""
    monkeypatch.setattr(journal, "EXPORT_BYTES", 0)

    async def main() -> None:
        process = Process(tmp_path, 0, room=2000)
        await process.start()
        await process.writer.begin()
        add, now = process.slots.add, process.service.now
        tracker = process.slots.trackers[SLOTS]
        add(tracker, "r1", 1, 0, scanned([1]), 9, now, None)
        await process.writer.flush()
        create, flush, made = process.directory.create_journal, process.writer.flush, Event()

        def create_late(header: Header) -> tuple[int, int]:
            made.wait(10)
            return create(header)

        async def flush_once() -> None:
            await flush()
            if made.is_set():
                await trio.sleep_forever()

        process.directory.create_journal = create_late  # type: ignore[method-assign]
        process.writer.flush = flush_once  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(process.writer.begin)
            await trio.testing.wait_all_tasks_blocked()
            for name, blocks in (("r2", 1), ("r3", 235), ("r4", 1)):
                add(tracker, name, 1, 0, scanned([1] * blocks), 9, now, None)
            assert process.journal.dropped == 1
            made.set()
            while process.writer._number != 2 or len(process.journal):
                await trio.lowlevel.checkpoint()
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        process.die()
        after = Process(tmp_path, 1)
        await after.start()
        assert {row[0] for row in after.seen().slots} == {"r1"}
        after.die()

    trio.run(main)


@pytest.mark.parametrize("is_leaving", [False, True])
def test_a_journal_may_begin_while_a_fleet_has_no_worker(is_leaving: bool, tmp_path: Path) -> None:
    """With `is_leaving` the bookings of the last worker are being ended in slices meanwhile."""

    async def main() -> None:
        process = await booked_and_written(tmp_path)
        workers = process.service.selections.workers
        for number in range(8 * REMOVAL_SLICE):
            process.service.reserve(str(number), (1, 0), [1], 8)
        await workers.delete(2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(workers.delete, 1)
            if is_leaving:
                while process.service.candidates().workers:
                    await trio.lowlevel.checkpoint()
                assert process.service.selections.reservations.owner_of
                await process.writer.begin()
        if not is_leaving:
            await process.writer.begin()
        await workers.put(worker(1))
        process.service.reserve("later", (1, 0), [1], 8)
        await process.writer.flush()
        await process.writer.sync()
        process.die()
        process = Process(tmp_path, 1)
        await process.start()
        assert list(process.service.selections.reservations.owner_of) == ["later"]
        process.die()

    trio.run(main)


def test_a_file_that_a_thread_may_write_to_stays_open(tmp_path: Path) -> None:
    """Once it is closed, another file may get its descriptor, and the thread would write there."""

    async def main() -> None:
        process = await booked_and_written(tmp_path)
        file = process.writer._file
        assert file is not None
        process.writer._failed(OSError(5, "Input/output error"))
        assert os.fstat(file).st_size > 0
        await process.writer.begin()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file)
        process.die()

    trio.run(main)


def test_a_fault_at_the_close_of_a_journal_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk in the network may report only then that it has not taken some bytes."""

    async def main() -> None:
        process = await booked_and_written(tmp_path)
        file, close = process.writer._file, os.close

        def close_with_fault(descriptor: int) -> None:
            close(descriptor)
            if descriptor == file:
                raise OSError(122, "Disk quota exceeded")

        monkeypatch.setattr(os, "close", close_with_fault)
        await process.writer.begin()
        monkeypatch.undo()
        await process.writer.sync()
        assert [number for number, _ in process.directory.journals()] == [2]
        process.die()
        assert await has_it(tmp_path)

    trio.run(main)


def test_a_disk_with_little_room_keeps_what_it_had(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each attempt begins a journal and fails before its end."""
    caplog.set_level("INFO")

    async def main() -> None:
        process = await booked_and_written(tmp_path)
        tracker = process.slots.trackers[SLOTS]
        with no_longer_files(process.directory.journals()[-1][1].stat().st_size):
            process.slots.add(tracker, "r2", 1, 0, scanned([5]), 9, process.service.now, None)
            await process.writer.flush()
        header = Header(Content.JOURNAL, "p0", clocks.ClockReading.now(0.0), 1)
        for _ in range(3):
            with no_longer_files(len(opening(header)) + 30):
                await process.writer.begin()
            assert process.writer.error is not None
            assert [number for number, _ in process.directory.journals()] == [1]
        await process.writer.begin()
        await process.writer.sync()
        assert process.writer.error is None
        process.die()
        assert await has_it(tmp_path)
        messages = [record.getMessage() for record in caplog.records]
        assert messages == ["state_journal_failed", "state_journal_resumed"]

    trio.run(main)


def test_a_disk_that_syncs_nothing_is_tried_at_intervals_and_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each journal is whole for a killed process, and none for a power failure."""
    caplog.set_level("INFO")
    clock = trio.testing.MockClock(rate=50)
    begun: list[float] = []

    async def main() -> None:
        process = await booked_and_written(tmp_path)
        await process.writer.sync()
        begin = process.writer.begin
        (first,) = process.directory.journals()

        async def note_and_begin() -> None:
            begun.append(trio.current_time())
            await begin()

        def fail(number: int, file: int) -> bool:
            raise OSError(5, "Input/output error")

        process.writer.begin = note_and_begin  # type: ignore[method-assign]
        has_journal = process.directory.has_journal
        process.directory.has_journal = fail  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(process.writer.run)
            while len(begun) < 4:
                await trio.sleep(journal.FLUSH_S)
                # The first is on the disk, and the last two are not.
                assert len(process.directory.journals()) <= 3
                assert first in process.directory.journals()
            assert min(b - a for a, b in pairwise(begun)) >= journal.RETRY_S
            messages = [record.getMessage() for record in caplog.records]
            assert messages == ["state_journal_failed"]
            process.directory.has_journal = has_journal  # type: ignore[method-assign]
            while (number := len(process.directory.journals())) > 1 or process.writer.error:
                assert number <= 3
                await trio.sleep(journal.FLUSH_S)
            nursery.cancel_scope.cancel()
        process.die()
        assert await has_it(tmp_path)
        assert caplog.records[-1].getMessage() == "state_journal_resumed"

    trio.run(main, clock=clock)


def test_a_wall_clock_that_is_set_changes_no_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After another boot only that clock can tell how old a booking is."""
    machine = Clocks(monkeypatch)

    async def main() -> None:
        process = await booked_and_written(tmp_path)
        machine.ahead_s = 86_400.0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(process.writer.run)
            while process.writer.stats.begun == 1 or len(process.directory.journals()) > 1:  # noqa: ASYNC110
                await trio.sleep(journal.FLUSH_S)
            nursery.cancel_scope.cancel()
        process.die()
        machine.boot = "another"
        later = Process(tmp_path, 1)
        await later.start()
        (oldest,) = [later.slots.trackers[SLOTS].ledger.oldest()]
        assert oldest is not None
        assert later.service.now - oldest < 3600
        later.die()

    trio.run(main, clock=trio.testing.MockClock(rate=50))


@pytest.mark.parametrize("what", ["write", "sync"])
def test_a_disk_that_hangs_is_reported(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It neither takes nor refuses what is written, so no write fails."""
    caplog.set_level("INFO")
    goes_on = Event()

    def hanging(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: goes_on.wait() and call(*arguments)

    async def main() -> None:
        process = await booked_and_written(tmp_path)
        if what == "sync":
            monkeypatch.setattr(os, "fdatasync", hanging(os.fdatasync))
        else:
            await process.writer.sync()
            monkeypatch.setattr(journal, "put", hanging(journal.put))
            tracker = process.slots.trackers[SLOTS]
            process.slots.add(tracker, "r2", 1, 0, scanned([5]), 9, process.service.now, None)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(process.writer.run)
            while process.writer.error is None:  # noqa: ASYNC110 - a thread writes
                await trio.sleep(journal.FLUSH_S)
            assert "has not answered" in process.writer.error
            await trio.sleep(3 * journal.SYNC_S)
            assert [each.getMessage() for each in caplog.records] == ["state_journal_failed"]
            goes_on.set()
            while process.writer.error is not None:  # noqa: ASYNC110 - a thread writes
                await trio.sleep(journal.FLUSH_S)
            nursery.cancel_scope.cancel()
        assert process.writer.stats.failures == 0
        process.die()
        assert await has_it(tmp_path)
        assert caplog.records[1].getMessage() == "state_journal_resumed"

    trio.run(main, clock=trio.testing.MockClock(rate=50))


def test_hashes_are_those_that_were_booked(tmp_path: Path) -> None:
    async def main() -> None:
        first = Process(tmp_path, 0)
        await first.start()
        await first.writer.begin()
        hashes = [5, 6, 7]
        first.slots.add(first.slots.trackers[SLOTS], "r1", 1, 0, scanned(hashes), 9, 1.0, None)
        await first.writer.flush()
        first.die()
        second = Process(tmp_path, 1)
        await second.start()
        ledger = second.slots.trackers[SLOTS].ledger
        assert ledger.depths(array("Q", hashes).tobytes()) == {ledger.rank_of(1, 0): 3}
        assert ledger.project(array("Q", hashes).tobytes(), 0) != ledger.project(b"", 0)
        second.die()

    trio.run(main)
    assert M == SLOTS
