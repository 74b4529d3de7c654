"""What a process knows of the others and of the server, from one session to the next."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

from coredis.exceptions import ReadOnlyError, ResponseError, WrongTypeError

from kvd.index.served_models import ServedModels
from kvd.persistence.bookings import SharedPoint
from kvd.shared_state.members import Member
from kvd.telemetry.logs import get_logger

# Approximate size of the stream, within MIN_ENTRIES and MAX_ENTRIES: older entries are dropped. A
# process that was away for longer reads views instead.
STREAM_BYTES = 64 * 1024 * 1024
MIN_ENTRIES, MAX_ENTRIES = 1024, 65_536

log = get_logger(__name__)


@dataclass(slots=True)
class SessionStats:
    """The cost of the stream; plain numbers for metrics."""

    entries_written: int = 0
    bytes_written: int = 0
    entries_read: int = 0
    bytes_read: int = 0
    unreadable: int = 0
    unknown_form: int = 0  # entries of another version of kvd
    refused: int = 0  # writes, by a server that is full or may not be written to
    lost_stream: int = 0  # how often the server had fewer entries than had been read
    wrong_keys: int = 0  # sessions that did not begin, since a key was of another type
    given_up: int = 0  # gaps given up because their process is gone


@dataclass(slots=True)
class KnownFleet:
    """Knowledge about the fleet that outlives a session."""

    served: ServedModels  # is notified of the models that others serve
    members: dict[str, Member] = field(default_factory=dict)
    stats: SessionStats = field(default_factory=SessionStats)
    has_begun: bool = False  # the stream is read from some position on
    has_joined: bool = False  # the state that others had at our start has been read
    has_settled: bool = False  # restored bookings have been shared with all, or dropped
    shared: SharedPoint | None = None  # up to where restored bookings had been sent to the server
    is_connected: bool = False
    described_holes: int = 0  # holes in our steps that a view of ours has described
    entry_bytes: float = 1024.0  # mean size of the entries read lately
    refusals: dict[str, str] = field(default_factory=dict)  # why the server refuses, by kind

    def note_members(self, found: dict[str, Member]) -> None:
        """Notes which other processes there are, and what they serve."""
        self.members = found
        self.served.note_others(
            {each.address: each.serves for each in found.values() if each.address is not None}
        )

    def note_restored(self, shared: SharedPoint | None) -> None:
        """Notes up to where restored bookings had been sent to the server, if any."""
        self.shared = shared

    def note_entry(self, size: int) -> None:
        """Notes the size of an entry that was read, in bytes."""
        self.stats.entries_read += 1
        self.stats.bytes_read += size
        self.entry_bytes += (size - self.entry_bytes) / 256

    def most_entries(self) -> int:
        """Returns how many entries the stream keeps, given their mean size."""
        return int(min(MAX_ENTRIES, max(MIN_ENTRIES, STREAM_BYTES / self.entry_bytes)))

    async def lets(self, command: Awaitable[Any], what: str) -> bool:
        """Runs a command that writes; returns False if the server refuses it.

        Raises what else the client raises. The server may refuse some kinds of writes alone, if the
        user has only some rights.
        """
        try:
            await command
        except (ReadOnlyError, WrongTypeError):
            # The server has become a copy, or a key is not ours: a new session finds out more.
            raise
        except ResponseError as error:
            self.stats.refused += 1
            if not self.refusals:
                log.warning("shared_state_refused", reason=str(error))
            self.refusals[what] = str(error)
            return False
        if self.refusals.pop(what, None) is not None and not self.refusals:
            log.info("shared_state_accepted")
        return True
