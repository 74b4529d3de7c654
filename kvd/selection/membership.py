"""Lets workers join the candidates of their model and tenant, and leave them.

    joins    listeners are made ──> ranks in the ledger and the pool, in one step
    leaves   listeners end ──> no rank can be chosen any more ──> bookings on its ranks end

All but that one step is done in slices: a worker may have thousands of ranks. Changes of the
catalog call this one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import trio

from kvd.errors import KvdError
from kvd.index.partitions import State
from kvd.index.registry import Registry
from kvd.model import PartitionKey, RankKey
from kvd.selection.admission import OWNER, Admission
from kvd.selection.candidates import Candidates
from kvd.selection.options import RouterOptions
from kvd.selection.reservations import Reservations
from kvd.selection.streams import Streams
from kvd.selection.tuning import Tuning
from kvd.selection.worker_record import WorkerRecord
from kvd.slots.live_requests import REMOVAL_SLICE
from kvd.telemetry.stretches import REQUESTS, UNREGISTRATION
from kvd.wire.endpoints import Addresses
from kvd_core.ledger import ledger

# Ranks whose listeners are made between two checkpoints: 0.4 ms.
LISTENED_SLICE = 16
# Ranks whose listeners are looked through between two checkpoints: 0.5 ms.
SOUGHT_SLICE = 256


class Membership:
    """Exchanges the workers of all models and tenants."""

    def __init__(
        self,
        candidates: dict[PartitionKey, Candidates],
        left: dict[PartitionKey, None],
        state: State,
        registry: Registry,
        options: RouterOptions,
        reservations: Reservations,
        tuning: Tuning,
        streams: Streams,
        admission: Admission,
    ) -> None:
        """Notes in `left` which models and tenants have lost their last worker and booking."""
        self._candidates = candidates
        self._left = left
        self._state = state
        self._registry = registry
        self._options = options
        self._reservations = reservations
        self._tuning = tuning
        self._streams = streams
        self._admission = admission

    async def begin_leaving(self, before: WorkerRecord, after: WorkerRecord | None) -> list[int]:
        """Ends the listeners that the new record does not have.

        If the new ranks cannot join beside the old ones, these leave now, with their bookings.
        Returns the ranks that are still to be dropped once the new ones have joined.
        """
        await self._fall_silent(before, after)
        stay = after.ranks if after is not None and _stays(before, after) else range(0)
        leaving = [each for each in before.ranks if each not in stay]
        if after is None:
            self._take_out(before)
        elif not self._fits_with(before, after):
            self._take_out(before)
            await self.drop_ranks(before, leaving)
            return []
        return leaving

    async def join_or_undo(self, after: WorkerRecord, before: WorkerRecord | None) -> str | None:
        """Makes a worker selectable in slices; returns what is in its way, None if nothing is.

        If something is, neither the worker nor what it was `before` can be selected any more.
        """
        try:
            for _ in REQUESTS.each(self._join(after, before)):
                await trio.lowlevel.checkpoint()
        except KvdError as error:  # another face has taken the rank meanwhile
            await self._fall_silent(after, None)
            for record in (after,) if before is None else (after, before):
                self._take_out(record)
            await self.drop_ranks(after, after.ranks)
            return str(error)
        return None

    def _fits_with(self, before: WorkerRecord, after: WorkerRecord) -> bool:
        """Returns whether a worker's new ranks can join while its old ranks are in the ledger."""
        candidates = self._candidates.get(after.key)
        if candidates is None:
            return True
        if candidates.ledger_block_size != after.block_size:
            # Joining opens another ledger; the old bookings could not be found and ended there.
            return after.key != before.key
        return candidates.ledger.stats()["ranks"] + len(after.ranks) <= ledger.MAX_RANKS

    async def _fall_silent(self, record: WorkerRecord, after: WorkerRecord | None) -> None:
        """Ends the listeners that the worker will not have after the change, and waits for that."""
        stays = after is not None and _stays(record, after)
        leaving: list[int] = []
        found = self._registry.registrations_of(record.key, record.worker_id, record.ranks)
        for number, (dp_rank, registration) in enumerate(found, 1):
            if OWNER in registration.owners and not (
                stays and registration.listener.addresses == _addresses(after, dp_rank)
            ):
                leaving.append(dp_rank)
            if number % SOUGHT_SLICE == 0:
                await trio.lowlevel.checkpoint()
        candidates = self._candidates.get(record.key)
        if leaving and candidates is not None:
            # The worker can be selected until it leaves, but its blocks go with its listeners.
            candidates.changed(silent=record.worker_id)
        if leaving:
            await self._registry.unregister_ranks(record.key, record.worker_id, leaving, OWNER)

    def _take_out(self, record: WorkerRecord) -> None:
        """Removes a worker from its candidates: its ranks cannot be chosen any more."""
        candidates = self._candidates.get(record.key)
        if candidates is not None:
            candidates.leave(record)

    async def drop_ranks(self, record: WorkerRecord, dp_ranks: Sequence[int]) -> None:
        """Ends the bookings on ranks that cannot be chosen any more, in slices."""
        candidates = self._candidates.get(record.key)
        if candidates is None:
            return
        for _ in UNREGISTRATION.each(self._dropping(candidates, record, dp_ranks)):
            await trio.lowlevel.checkpoint()

    def _dropping(
        self, candidates: Candidates, record: WorkerRecord, dp_ranks: Sequence[int]
    ) -> Iterator[None]:
        if candidates.predictions is not None:
            for number, dp_rank in enumerate(dp_ranks, 1):
                candidates.forget_predictions_of((record.worker_id, dp_rank))
                if number % REMOVAL_SLICE == 0:
                    yield
        yield from self._reservations.drop_ranks(
            candidates, record.worker_id, dp_ranks, record.block_size or 0
        )
        if not candidates.workers:
            self._left[candidates.key] = None

    def _join(self, record: WorkerRecord, before: WorkerRecord | None) -> Iterator[None]:
        """Listens to a worker's ranks and makes them selectable; raises as `register` does.

        It rests at every yield. In the last step the worker becomes selectable, and ceases to be
        what it was `before`.
        """
        if record.key not in self._candidates:
            self._admission.check_partitions()
        assert record.block_size is not None  # or it could not be scheduled
        if self._options.uses_kv_events and not record.without_kv_events:
            yield from self._listen(record, record.block_size)
        if before is not None:
            self._take_out(before)
        candidates = self._candidates.get(record.key) or self._new(record.key)
        self._left.pop(record.key, None)
        self._reservations.open_ledger(candidates, record.block_size)
        candidates.join(record)
        if self._options.uses_kv_events:
            self._streams.judge_joined(candidates, record)

    def _new(self, key: PartitionKey) -> Candidates:
        """Makes the candidates of a model and tenant, in place of others at the bound."""
        if self._admission.is_full and (gone := self._admission.replaceable()) is not None:
            del self._left[gone], self._candidates[gone]
        settings = self._tuning.settings(*key)
        candidates = Candidates(key, self._options, self._state, settings)
        self._candidates[key] = candidates
        return candidates

    def _listen(self, record: WorkerRecord, block_size: int) -> Iterator[None]:
        key, worker_id = record.key, record.worker_id
        for number, dp_rank in enumerate(record.ranks, 1):
            rank = RankKey(key, worker_id, dp_rank)
            known, found = self._registry.find(rank), record.addresses(dp_rank)
            if found is not None and (known is None or OWNER not in known.owners):
                endpoint, replay, server_key = found
                self._registry.register(rank, endpoint, block_size, replay, OWNER, server_key)
            if number % LISTENED_SLICE == 0:
                yield


def _stays(before: WorkerRecord, after: WorkerRecord) -> bool:
    """Returns whether ranks keep their bookings when the record of their worker is replaced."""
    return (after.key, after.block_size) == (before.key, before.block_size)


def _addresses(record: WorkerRecord | None, dp_rank: int) -> Addresses | None:
    return None if record is None or dp_rank not in record.ranks else record.addresses(dp_rank)
