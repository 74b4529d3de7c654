"""Counts of kept and of restored state, and the families of /metrics about them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from kvd.persistence.bookings import Restored
from kvd.persistence.frames import Content
from kvd.persistence.journal import JournalWriter
from kvd.telemetry.metrics import Family, by_label, counter, gauge
from kvd_core.ledger.journal import Journal


class FileOutcome(StrEnum):
    """The outcome of reading one file at the start."""

    NONE = "none"  # there was no file
    RESTORED = "restored"
    REFUSED = "refused"  # damaged, foreign, or in conflict with registrations


@dataclass(slots=True)
class StoreStats:
    """Counts of restored and of kept state; plain numbers for metrics."""

    outcomes: dict[Content, FileOutcome] = field(
        default_factory=lambda: dict.fromkeys(Content, FileOutcome.NONE)
    )
    bookings: Restored = field(default_factory=Restored)
    registrations: int = 0
    blocks: int = 0
    written: dict[str, int] = field(
        default_factory=lambda: {Content.INDEX: 0, Content.REGISTRATIONS: 0}
    )
    failures: int = 0
    index_bytes: int = 0  # of the last snapshot
    index_s: float = 0.0  # time that the last snapshot took
    index_at: float | None = None  # when it was begun, by the clock of the loop


def state_families(
    stats: StoreStats, journal: Journal, writer: JournalWriter, failures: int, now: float
) -> Iterator[Family]:
    """Yields the families; `failures` are writes of all files, `now` is the clock of the loop."""
    by_writer = writer.stats
    help = "Number of files of the state directory written whole, by content"
    yield by_label("kvd_state_files_total", "counter", help, "content", stats.written)
    help = "Number of files of the state directory that could not be written"
    yield counter("kvd_state_failures_total", help, failures)
    help = "Age of the last snapshot of the index in seconds; absent before the first"
    if stats.index_at is not None:
        yield gauge("kvd_state_index_age_seconds", help, now - stats.index_at)
    help = "Size of the last snapshot of the index in bytes"
    yield gauge("kvd_state_index_bytes", help, stats.index_bytes)
    help = "Time that the last snapshot of the index took in seconds"
    yield gauge("kvd_state_index_seconds", help, stats.index_s)
    help = "Size of the records that were written to the journal of bookings in bytes"
    yield counter("kvd_state_journal_bytes_total", help, by_writer.written_bytes)
    help = "Number of writes to the journal of bookings"
    yield counter("kvd_state_journal_writes_total", help, by_writer.flushes)
    help = "Number of journals begun"
    yield counter("kvd_state_journals_total", help, by_writer.begun)
    help = "Number of records dropped because too many waited for the disk"
    yield counter("kvd_state_records_dropped_total", help, journal.dropped)
    help = "Total size of the records that the disk refused in bytes"
    yield counter("kvd_state_lost_bytes_total", help, by_writer.lost_bytes)
    help = "Whether bookings are recorded: 0 while the disk refuses them"
    yield gauge("kvd_state_recording", help, int(writer.error is None))
    restored = {
        "blocks": stats.blocks,
        "requests": stats.bookings.requests,
        "sessions": stats.bookings.sessions,
        "answers": stats.bookings.answers,
        "registrations": stats.registrations,
    }
    help = "Number of items restored from the state directory at the start, by kind"
    yield by_label("kvd_state_restored", "gauge", help, "kind", restored)
    lost = {"expired": stats.bookings.expired, "no_rank": stats.bookings.dropped}
    help = "Number of live requests that were not restored at the start, by reason"
    yield by_label("kvd_state_unrestored_requests", "gauge", help, "reason", lost)
    refused: dict[str, float] = {
        content: int(outcome is FileOutcome.REFUSED) for content, outcome in stats.outcomes.items()
    }
    help = "Whether a file of the state directory was refused at the start, by content"
    yield by_label("kvd_state_refused", "gauge", help, "content", refused)
