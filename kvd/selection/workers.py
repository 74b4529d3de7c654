"""The catalog of the selection service, and its changes.

    POST, PUT, PATCH, DELETE ──> judged ──> leaves its model, joins it anew ──> selections that
                                   │                 │                           wait are served
                                   v                 v
                              Entry: reasons    listeners, ledger ranks, pool

Changes run one after the other and may wait for listeners to end. The registry's listeners receive
the KV events; all faces share them.

Others alone may keep a worker from being a candidate: by their block size, or because another face
has registered its rank at another address. Such a worker is judged again whenever a worker or rank
leaves, here or on another face.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import trio

from kvd.errors import Conflict, NotFound
from kvd.index.partitions import Partition, State
from kvd.index.registry import Registry
from kvd.model import PartitionKey
from kvd.selection.admission import Admission, CatalogEntry
from kvd.selection.candidates import Candidates
from kvd.selection.membership import Membership
from kvd.selection.options import RouterOptions
from kvd.selection.reservations import Reservations
from kvd.selection.speeds import Speeds
from kvd.selection.streams import Streams
from kvd.selection.tuning import Tuning
from kvd.selection.worker_record import WorkerLifecycle, WorkerRecord
from kvd.telemetry.stretches import REQUESTS
from kvd.wire.event_stream import EventStream

# Blocked workers judged again as part of a change; the others follow between two changes.
RECONSIDERED = 64
# Workers looked through for a list between two checkpoints: 1 ms.
LISTED_AT_ONCE = 2048


class Workers:
    """The registered workers of the selection service."""

    def __init__(
        self,
        candidates: dict[PartitionKey, Candidates],
        state: State,
        registry: Registry,
        options: RouterOptions,
        reservations: Reservations,
        tuning: Tuning,
        streams: Streams,
        speeds: Speeds,
        on_change: Callable[[], None],
    ) -> None:
        """Calls `on_change` after every change that may give waiting selections a rank."""
        self.entries: dict[int, CatalogEntry] = {}
        self._candidates = candidates
        self._state = state
        self._registry = registry
        self._streams = streams
        self.speeds = speeds
        self.changes = 0  # number of changes to the catalog
        self._on_change = on_change
        # Models and tenants without workers and bookings, in the order in which they lost them.
        left: dict[PartitionKey, None] = {}
        self._admission = Admission(
            self.entries, candidates, left, registry, options, tuning, state.served
        )
        self._membership = Membership(
            candidates,
            left,
            state,
            registry,
            options,
            reservations,
            tuning,
            streams,
            self._admission,
        )
        self._changing = trio.Lock()
        self._blocked: set[int] = set()  # workers that only others keep from being scheduled
        self._due: deque[int] = deque()  # blocked workers that are to be judged again
        registry.departures.append(self._obstacle_gone)

    async def put(
        self, record: WorkerRecord, *, new: bool = False, only: object = None
    ) -> CatalogEntry:
        """Replaces the record of a worker.

        Raises Conflict if it is known although it should be `new`, if it has another record than
        `only` (None: any), or if a schedulable worker would become unschedulable; BadRequest on an
        address that kvd may not connect to.
        """
        await self._check(record)
        async with self._changing:
            known = self.entries.get(record.worker_id)
            is_other = known is not None and only is not None and known.record is not only
            if is_other or (new and known is not None):
                raise Conflict(f"worker {record.worker_id} already registered")
            entry = await self._judged(record)
            if known is not None and not known.reasons and entry.reasons:
                raise Conflict(
                    f"worker {record.worker_id} would become unschedulable: "
                    + "; ".join(entry.reasons)
                )
            self._admission.check_room([record])
            entry = await self._replace(known, entry)
            await self._changed()
            return entry

    async def _check(self, record: WorkerRecord) -> None:
        self._admission.check_served(record)
        await trio.lowlevel.checkpoint()  # reading thousands of endpoints has taken milliseconds
        for _ in REQUESTS.each(self._admission.check_addresses(record)):
            await trio.lowlevel.checkpoint()

    async def _judged(self, record: WorkerRecord) -> CatalogEntry:
        judging = REQUESTS.each(self._admission.judged(record))
        while (entry := next(judging)) is None:
            await trio.lowlevel.checkpoint()
        return entry

    async def patch(
        self, worker_id: int, change: Callable[[WorkerRecord], WorkerRecord]
    ) -> CatalogEntry:
        """Changes the record of a worker, which may become incomplete.

        Raises NotFound, and BadRequest as `put` does.
        """
        async with self._changing:
            known = self._entry(worker_id)
            record = change(known.record)
            await self._check(record)
            entry = await self._replace(known, await self._judged(record))
            await self._changed()
            return entry

    async def delete(self, worker_id: int, only: object = None) -> CatalogEntry:
        """Removes a worker with its bookings and blocks; returns its last entry.

        Raises NotFound if it is unknown, or has another record than `only` (None: any).
        """
        async with self._changing:
            known = self._entry(worker_id)
            if only is not None and known.record is not only:
                raise NotFound(f"worker {worker_id} has another record now")
            await self._replace(known, None)
            await self._changed()
            return known

    async def put_all(self, key: PartitionKey, records: list[WorkerRecord]) -> list[CatalogEntry]:
        """Replaces all workers of a model and tenant by these, which must be schedulable.

        Workers that stay go on serving, unless the block size changes. Raises as
        `Admission.check_all` does; nothing has changed then.
        """
        async with self._changing:
            candidates = self._candidates.get(key)
            replaced = candidates is not None and candidates.block_size not in (
                None,
                *(record.block_size for record in records),
            )
            checks = self._admission.check_all(records, candidates if replaced else None)
            for _ in REQUESTS.each(checks):
                await trio.lowlevel.checkpoint()
            named = {record.worker_id for record in records}
            old = [entry for entry in self.entries.values() if entry.record.key == key]
            # From here on all that waits is shielded: no half of a set is left behind.
            if replaced:  # an index cannot hold blocks of two sizes, not even for a moment
                for entry in old:
                    await self._replace(entry, None)
            entries = [
                await self._replace(self.entries.get(record.worker_id), CatalogEntry(record, []))
                for record in records
            ]
            for entry in old:
                if entry.record.worker_id not in named and not replaced:
                    await self._replace(entry, None)
            await self._changed()
            return entries

    async def _changed(self) -> None:
        """Ends a change; it may have removed what kept blocked workers from joining."""
        self.changes += 1
        self._due = deque(sorted(self._blocked))
        self._on_change()
        await self._reconsider()

    async def _obstacle_gone(self) -> None:
        """Judges blocked workers again after any face has unregistered a rank."""
        self._due = deque(sorted(self._blocked))
        await self.reconsider()

    async def reconsider(self) -> bool:
        """Judges some of the blocked workers again; True while there are more.

        While a change is under way this is left to its end.
        """
        if self._due and not self._changing.locked():
            async with self._changing:
                await self._reconsider()
        return bool(self._due) and not self._changing.locked()

    async def _reconsider(self) -> None:
        """Judges some of the blocked workers again, of which those join that can, in slices."""
        joined = False
        # Shielded: a worker that is no longer due must have been judged.
        with trio.CancelScope(shield=True):
            for _ in range(RECONSIDERED):
                if not self._due:
                    break
                known = self.entries.get(self._due.popleft())
                if known is not None and known.reasons:
                    entry = await self._replace(known, await self._judged(known.record))
                    joined = joined or not entry.reasons
        if joined:
            self._on_change()

    def _enter(self, entry: CatalogEntry) -> None:
        worker_id = entry.record.worker_id
        self.entries[worker_id] = entry
        if entry.blocked:
            self._blocked.add(worker_id)
        else:
            self._blocked.discard(worker_id)

    def absent(self, entry: CatalogEntry) -> dict[int, str]:
        """Returns the faults of a worker's event connections, by dp rank."""
        return self._streams.reasons(entry.record.key, entry.record.worker_id)

    def listeners(self, entry: CatalogEntry) -> Iterator[tuple[int, EventStream]]:
        """Yields the event streams of a worker with their dp rank; others may run meanwhile."""
        record = entry.record
        found = self._registry.registrations_of(record.key, record.worker_id, record.ranks)
        return ((dp_rank, each.listener) for dp_rank, each in found)

    def partition(self, entry: CatalogEntry) -> Partition | None:
        """Returns the partition of the worker's model and tenant, None if there is none."""
        return self._state.partitions.get(entry.record.key)

    def lifecycle(self, entry: CatalogEntry) -> WorkerLifecycle:
        """Returns the lifecycle of a worker: unschedulable once all its engines have gone."""
        candidates = self._candidates.get(entry.record.key)
        if not entry.reasons and candidates is not None and candidates.absent:
            absent = (
                candidates.absent.get((entry.record.worker_id, each)) for each in entry.record.ranks
            )
            if all(each is not None and not each.reachable for each in absent):
                return WorkerLifecycle.UNSCHEDULABLE
        return entry.lifecycle

    async def listed(self, model_name: str | None, tenant_id: str | None) -> list[CatalogEntry]:
        """Returns the workers of a model and tenant, sorted; None stands for any name.

        Others run meanwhile: a worker may be listed although it has just gone.
        """
        found: dict[PartitionKey, list[CatalogEntry]] = {}
        for number, worker_id in enumerate(sorted(self.entries), 1):
            entry = self.entries.get(worker_id)
            if (
                entry is not None
                and model_name in (None, entry.record.model_name)
                and tenant_id in (None, entry.record.tenant_id)
            ):
                found.setdefault(entry.record.key, []).append(entry)
            if number % LISTED_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
        return [entry for key in sorted(found) for entry in found[key]]

    def _entry(self, worker_id: int) -> CatalogEntry:
        entry = self.entries.get(worker_id)
        if entry is None:
            raise NotFound(f"worker {worker_id} not found")
        return entry

    async def _replace(self, old: CatalogEntry | None, new: CatalogEntry | None) -> CatalogEntry:
        """Replaces a worker among its candidates; ranks that stay as they are keep their bookings.

        First the listeners end that the new record does not have, and those are made, in slices,
        that it has in addition. Then the ranks are exchanged in one step, after which selections
        that wait are served. At last the bookings on the old ranks end, in slices.
        """
        membership = self._membership
        before = None if old is None or old.reasons else old.record
        after = None if new is None or new.reasons else new.record
        # Shielded: a client that goes away must not leave half a worker behind.
        with trio.CancelScope(shield=True):
            await trio.lowlevel.checkpoint()  # it may be one of a thousand workers in a row
            leaving = [] if before is None else await membership.begin_leaving(before, after)
            if new is None and old is not None:
                del self.entries[old.record.worker_id]
                self._blocked.discard(old.record.worker_id)
            if after is not None and (obstacle := await membership.join_or_undo(after, before)):
                new = CatalogEntry(after, [obstacle], blocked=True)
            if new is not None:
                self._enter(new)
            if before is not None and leaving:
                if new is not None and not new.reasons:
                    self._on_change()
                await membership.drop_ranks(before, leaving)
        return new or old  # type: ignore[return-value]
