"""Keeps the fleet as the fleet file describes it, while the daemon runs.

    every CHECK_EVERY_S:  stat ── as it was: nothing
                                 └ changed, and at rest ── read ── refused: the old fleet stays
    a reload: prepare, take ─────────────────────────────────┤
                                                             │
    held: what was registered for    reconcile <── entries ──┘
    the file, and is still there       1. remove entries that have gone, or have changed too much
                                       2. change entries in place
                                       3. add new entries
                                       4. leave engines behind the gateway that have gone, once
                                          the new ones can serve: the file may have replaced
                                          all there are

Clients' registrations are theirs: an entry fails if a client has registered the same, and it is no
longer held once a client has removed or replaced it. Entries that have not changed keep their
blocks, streams and bookings. A failed entry is tried again at the next change of the file, and at a
reload. If a reload is refused, this version of the file is skipped until the file changes again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

import trio

from kvd.config.errors import StartError
from kvd.config.load import Prepared
from kvd.errors import KvdError, Misdirected, NotFound
from kvd.fleet_file import parse as fleetfile
from kvd.fleet_file.parse import FleetFileEntry
from kvd.telemetry.logs import get_logger
from kvd.telemetry.metrics import Family, by_label
from kvd.wire.egress import AllowedNetworks, EgressPolicy

# Pause between two checks of the fleet file. A change counts once two checks have found the same:
# an editor may still be writing the file.
CHECK_EVERY_S = 1.0

SETTING = "fleet_file"

# Entries of the fleet file read or registered between two checkpoints: 0.3 to 0.5 ms.
SLICE_ENTRIES = 2
# Entries compared with what is registered between two checkpoints: 1 ms.
COMPARED_AT_ONCE = 256

log = get_logger(__name__)

Signature = tuple[int, ...] | str  # of a file, or why it cannot be read
EntryName = tuple[str, Hashable]  # table and key


class RegistrationTarget(Protocol):
    """Registers the entries of one table; what `add` returns stands for the registration."""

    removes_last: bool  # whether removed entries stay until the new ones can do their work

    async def can_serve(self) -> None:
        """Waits until new entries can do the work of removed ones, or have had time for that."""

    def can_change(self, before: Any, after: Any) -> bool:
        """Returns whether an entry can be changed without being removed first."""

    async def add(self, wanted: Any, *, over: bool = False, known: object = None) -> object:
        """Registers an entry, or changes it in place if `over`; returns what stands for it.

        Raises KvdError, also if the entry to be changed is no longer what `known` stands for; then
        nothing has changed.
        """

    def holds(self, wanted: Any, known: object) -> bool:
        """Returns whether the registration that `known` stands for is still there."""

    async def remove(self, wanted: Any, known: object = None) -> None:
        """Unregisters it; raises NotFound, also if it is no longer what `known` stands for."""


@dataclass(frozen=True, slots=True)
class Registered:
    """An entry as it was registered, and the object that stands for the registration."""

    wanted: Any
    known: object


@dataclass(frozen=True, slots=True)
class Written:
    """The content of a file without faults."""

    entries: dict[EntryName, FleetFileEntry]
    is_new: bool  # whether it differs from what was applied last
    signature: Signature


class FleetFileFollower:
    """Registers the entries of one file at the faces that are served."""

    def __init__(
        self,
        path: Path,
        outgoing: EgressPolicy,
        targets: dict[str, RegistrationTarget],
        check_every_s: float = CHECK_EVERY_S,
    ) -> None:
        self._path = path
        self._outgoing = outgoing
        self._targets = targets
        self._check_every_s = check_every_s
        self._held: dict[EntryName, Registered] = {}
        self._failed: dict[EntryName, tuple[FleetFileEntry, str]] = {}  # and why
        self._elsewhere = 0  # entries of faces that are off, and of models served elsewhere
        self._requested = trio.Event()
        self._taken: Written | None = None  # what a reload has read, to be applied
        self._entries: dict[EntryName, FleetFileEntry] = {}  # of the last applied file
        self._reloading = False
        self._applied: Signature = ""  # of the file that was read last, refused or not
        self._refused = ""  # why the file as it is now is not in force; "" if it is
        self.reads = {"applied": 0, "refused": 0}

    async def run(self) -> NoReturn:
        """Follows the file until cancelled."""
        seen = self._applied
        while True:
            with trio.move_on_after(self._check_every_s):
                await self._requested.wait()
            self._requested = trio.Event()
            if self._taken is not None:
                taken, self._taken = self._taken, None
                await self._reconcile(taken)
                continue
            before, seen = seen, await _signature(self._path)
            if before == seen != self._applied and not self._reloading:
                await self.read()

    async def read(self) -> None:
        """Reads the file and applies it, or logs why it is refused."""
        self._applied = await _signature(self._path)
        try:
            written = await self._written(self._outgoing.allowed)
        except StartError as error:
            self.reads["refused"] += 1
            self._refused = str(error)
            log.error("fleet_refused", reason=error)
        else:
            await self._reconcile(written)

    def held(self, table: str, key: Hashable) -> Any:
        """Returns what the file has registered under a key of a table, None if nothing."""
        held = self._held.get((table, key))
        if held is None or not self._targets[table].holds(held.wanted, held.known):
            return None
        return held.wanted

    def faults(self) -> dict[str, str]:
        """Returns why the file, or an entry of it, is not in force, by what it concerns."""
        if self._refused:
            return {str(self._path): self._refused}
        return {f"{entry} of {self._path}": why for entry, why in self._failed.values()}

    # ---- as a part of a reload

    @contextlib.asynccontextmanager
    async def reloading(self) -> AsyncIterator[None]:
        """Suspends the checks of the file; after a StartError the file counts as read."""
        self._reloading = True
        try:
            yield
        except StartError as error:
            self._applied, before = await _signature(self._path), self._applied
            if self._applied != before:
                self._refused = str(error)
            raise
        finally:
            self._reloading = False

    async def prepare(self, allowed: AllowedNetworks) -> Prepared:
        """Reads the file, with addresses in these networks allowed; raises StartError."""
        try:
            written = await self._written(allowed)
        except StartError:
            self.reads["refused"] += 1
            raise
        changed = (SETTING,) if written.is_new else ()
        return Prepared(changed, partial(self._take, written))

    def _take(self, written: Written) -> None:
        """Has a file applied soon, by `run`."""
        self._taken, self._applied = written, written.signature
        self._requested.set()

    async def _written(self, allowed: AllowedNetworks) -> Written:
        """Reads the file; raises StartError that names it and what is wrong."""
        signature = await _signature(self._path)
        entries: dict[EntryName, FleetFileEntry] = {}
        same = 0
        try:
            rows = await trio.to_thread.run_sync(self._rows, abandon_on_cancel=True)
            # A policy of its own, so that addresses refused in the file are not counted.
            for entry in fleetfile.entries(rows, EgressPolicy(allowed)):
                name = entry.table, entry.key
                entries[name] = entry
                known = self._entries.get(name)
                same += known is not None and known.wanted == entry.wanted
                if len(entries) % SLICE_ENTRIES == 0:
                    await trio.lowlevel.checkpoint()
        except OSError as error:
            why = error.strerror or error
            raise StartError(f"{SETTING}: cannot read {self._path}: {why}") from None
        except ValueError as error:
            raise StartError(f"{self._path}: {error}") from None
        is_new = not same == len(entries) == len(self._entries)
        return Written(entries, is_new, signature)

    def _rows(self) -> list[fleetfile.FleetFileRow]:
        return fleetfile.rows(fleetfile.read(self._path))

    async def _reconcile(self, written: Written) -> None:
        self._refused = ""
        wanted = self._entries = written.entries
        self._elsewhere = 0
        self._failed.clear()
        changed = await self._changed(wanted)
        before = dict(self._held)
        last = []
        for name in changed:
            entry = wanted.get(name)
            if entry is None and self._targets[name[0]].removes_last:
                last.append(name)
            elif entry is None or not self._can_change(name, entry):
                await self._remove(name)
        # Held entries are changed before new ones are added, which may need the freed room.
        new = await self._new(wanted)
        for number, name in enumerate(new, 1):
            await self._add(name, wanted[name])
            if number % SLICE_ENTRIES == 0:
                await trio.lowlevel.checkpoint()
        left = {table for table, _ in last}
        for table in left:
            await self._targets[table].can_serve()
        for name in last:
            await self._remove(name)
        # Some of the new ones may have failed for want of the room that these have left.
        for name in [each for each in self._failed if each[0] in left]:
            del self._failed[name]
            await self._add(name, wanted[name])
        self.reads["applied"] += 1
        after, both = self._held, [name for name in new if name in before and name in self._held]
        log.info(
            "fleet_applied",
            file=self._path,
            added=sum(name in after and name not in before for name in new),
            changed=sum(before[name].wanted != after[name].wanted for name in both),
            removed=sum(name not in after for name in changed),
            failed=len(self._failed),
            registered=len(after),
        )

    async def _changed(self, wanted: dict[EntryName, FleetFileEntry]) -> list[EntryName]:
        """Returns the held entries that the file no longer has as they are; others run meanwhile.

        What clients have removed or replaced is no longer held.
        """
        changed = []
        for number, (name, held) in enumerate(list(self._held.items()), 1):
            if not self._targets[name[0]].holds(held.wanted, held.known):
                del self._held[name]
            elif self._is_other(name, wanted.get(name)):
                changed.append(name)
            if number % COMPARED_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
        return changed

    async def _new(self, wanted: dict[EntryName, FleetFileEntry]) -> list[EntryName]:
        """Returns the entries to be registered, the held ones first; others run meanwhile."""
        over: list[EntryName] = []
        new: list[EntryName] = []
        for number, (name, entry) in enumerate(wanted.items(), 1):
            if entry.table not in self._targets:
                self._elsewhere += 1
            elif self._is_other(name, entry):
                (over if name in self._held else new).append(name)
            if number % COMPARED_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
        return over + new

    def _is_other(self, name: EntryName, entry: FleetFileEntry | None) -> bool:
        held = self._held.get(name)
        return held is None or entry is None or held.wanted != entry.wanted

    def _can_change(self, name: EntryName, entry: FleetFileEntry) -> bool:
        return self._targets[name[0]].can_change(self._held[name].wanted, entry.wanted)

    async def _remove(self, name: EntryName) -> None:
        held, target = self._held[name], self._targets[name[0]]
        if target.holds(held.wanted, held.known):  # a client may have removed it meanwhile
            with contextlib.suppress(NotFound):  # a client was faster
                await target.remove(held.wanted, held.known)
        del self._held[name]  # not before it is gone, or it would count as a client's

    async def _add(self, name: EntryName, entry: FleetFileEntry) -> None:
        held = self._held.get(name)
        before = None if held is None else held.known
        try:
            known = await self._targets[name[0]].add(
                entry.wanted, over=held is not None, known=before
            )
        except Misdirected:
            self._elsewhere += 1
        except KvdError as error:
            self._failed[name] = entry, str(error)
            log.warning("fleet_entry_failed", entry=entry, reason=error)
        else:
            self._held[name] = Registered(entry.wanted, known)

    def families(self) -> Iterator[Family]:
        """Yields metrics of entries and reads."""
        states = {
            "registered": len(self._held),
            "failed": len(self._failed),
            "off": self._elsewhere,
        }
        help = "Number of entries of the fleet file, by state; off: not served by this process"
        yield by_label("kvd_fleet_entries", "gauge", help, "state", states)
        help = "Number of reads of the fleet file, by outcome"
        yield by_label("kvd_fleet_reads_total", "counter", help, "outcome", self.reads)


async def _signature(path: Path) -> Signature:
    """Returns a value that changes when the file, or a symbolic link on the way to it, does."""
    try:
        found = await trio.to_thread.run_sync(os.stat, path, abandon_on_cancel=True)
    except OSError as error:
        return str(error)
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
