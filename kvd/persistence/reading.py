"""Reads the registrations and bookings of a state directory, and checks them as a whole."""

from __future__ import annotations

from pathlib import Path

import trio

from kvd.persistence.bookings import KeptRequests
from kvd.persistence.clocks import ClockReading, ClockTranslation
from kvd.persistence.frames import Content, CutOff, Damaged, Frame, Reading
from kvd.persistence.journal import RECORDS
from kvd.telemetry.logs import get_logger
from kvd_core.ledger.journal import read

log = get_logger(__name__)


def frames_of(path: Path, content: Content) -> list[Frame]:
    """Returns the frames of a file that was written as a whole; raises OSError and Damaged."""
    reading = Reading(path)
    try:
        if reading.header.content is not content:
            raise Damaged(f"it holds {reading.header.content}, not {content}")
        return list(reading.whole_frames())
    finally:
        reading.close()


class UnreadJournal(Exception):
    """A journal cannot be believed, so none of the journals is."""

    def __init__(self, path: Path, why: OSError | Damaged) -> None:
        super().__init__(f"{path.name}: {why}")
        self.path = path
        self.why = why


async def bookings_of(paths: list[Path], now: float, *, is_later: bool = False) -> KeptRequests:
    """Returns the bookings that are alive after the records of these journals, oldest first.

    `is_later` says that earlier journals are left out. Raises UnreadJournal.
    """
    bookings = KeptRequests()
    present = ClockReading.now(now)
    for path in paths:
        try:
            await _read_journal(path, bookings, present)
        except (OSError, Damaged) as error:
            raise UnreadJournal(path, error) from None
        if bookings.is_part and not is_later:
            raise UnreadJournal(path, CutOff(path.stat().st_size))
    bookings.end()
    return bookings


async def _read_journal(path: Path, bookings: KeptRequests, present: ClockReading) -> None:
    try:
        reading = await trio.to_thread.run_sync(Reading, path)
    except CutOff as error:  # its process was killed before it had written the header
        log.warning("journal_torn", file=str(path), dropped_bytes=error.size)
        return
    try:
        if reading.header.content is not Content.JOURNAL:
            raise Damaged(f"it holds {reading.header.content}, not a journal")
        translate = ClockTranslation.between(reading.header.moments, present)
        bookings.begin(reading.header.instance_id, translate)
        for each in reading.frames(torn=RECORDS):
            _take_records(bookings, each)
            await trio.lowlevel.checkpoint()
        if reading.whole < reading.size:
            dropped = reading.size - reading.whole
            log.warning("journal_torn", file=str(path), dropped_bytes=dropped)
    finally:
        reading.close()


def _take_records(bookings: KeptRequests, found: Frame) -> None:
    if found.kind != RECORDS:
        raise Damaged(f"it has a part of the unknown kind {found.kind}")
    try:
        for record in read(found.content):
            bookings.take(record)
    except (TypeError, ValueError) as error:
        raise Damaged(f"its records are not understood: {error}") from None
