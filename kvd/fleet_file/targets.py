"""Registration of fleet-file entries: one target for each table of the file.

What `add` returns stands for the registration: it is the very object that the face keeps. A
registration that a client has made since is another object, however equal.
"""

from __future__ import annotations

from typing import Any

import trio

from kvd.errors import Conflict
from kvd.gateway.dns_names import MEET_S, Wanted
from kvd.gateway.upstreams import FLEET_FILE, Upstreams
from kvd.index.publishers import Described, Narrowing, Publisher, Publishers
from kvd.index.registry import INDEXER, RegisteredRank, Registration, Registry
from kvd.replica_sync.replicas import RegisteredReplica, Replicas
from kvd.selection.tuning import Tuning, TuningPolicy
from kvd.selection.worker_record import WorkerRecord
from kvd.selection.workers import Workers
from kvd.slots.trackers import RegisteredWorker, SlotTrackers
from kvd.telemetry.logs import get_logger
from kvd.wire.replica import Replica

log = get_logger(__name__)


class _Target:
    """Changes nothing in place; removed entries go before new ones come."""

    removes_last = False

    async def can_serve(self) -> None:
        """Returns at once: new entries serve from the start."""

    def can_change(self, before: Any, after: Any) -> bool:
        return False


class IndexerTarget(_Target):
    """Ranks that the indexer subscribes to."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def add(
        self, wanted: RegisteredRank, *, over: bool = False, known: object = None
    ) -> Registration | None:
        wanted.register(self._registry)
        return self._registry.find(wanted.key)

    def holds(self, wanted: RegisteredRank, known: object) -> bool:
        found = self._registry.find(wanted.key)
        return found is known and found is not None and INDEXER in found.owners

    async def remove(self, wanted: RegisteredRank, known: object = None) -> None:
        (model_name, tenant_id), instance_id, dp_rank = wanted.key
        await self._registry.unregister(instance_id, model_name, tenant_id, dp_rank)


class SlotTrackerTarget(_Target):
    """Workers of the slot tracker."""

    def __init__(self, slots: SlotTrackers) -> None:
        self._slots = slots

    async def add(
        self, wanted: RegisteredWorker, *, over: bool = False, known: object = None
    ) -> range | None:
        await self._slots.settled(wanted.key)
        self._slots.register(*wanted)
        return self._found(wanted)

    def holds(self, wanted: RegisteredWorker, known: object) -> bool:
        return self._found(wanted) is known

    async def remove(self, wanted: RegisteredWorker, known: object = None) -> None:
        await self._slots.unregister(wanted.key, wanted.worker_id)

    def _found(self, wanted: RegisteredWorker) -> range | None:
        tracker = self._slots.trackers.get(wanted.key)
        return None if tracker is None else tracker.workers.get(wanted.worker_id)


class SelectionTarget(_Target):
    """Workers of the selection service; one that only differs is changed in place."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def can_change(self, before: WorkerRecord, after: WorkerRecord) -> bool:
        return (before.key, before.block_size) == (after.key, after.block_size)

    async def add(
        self, wanted: WorkerRecord, *, over: bool = False, known: object = None
    ) -> WorkerRecord:
        entry = await self._workers.put(wanted, new=not over, only=known)
        if entry.reasons:
            log.warning("fleet_worker_incomplete", worker=wanted.worker_id, why=entry.reasons[0])
        return entry.record

    def holds(self, wanted: WorkerRecord, known: object) -> bool:
        entry = self._workers.entries.get(wanted.worker_id)
        return entry is not None and entry.record is known

    async def remove(self, wanted: WorkerRecord, known: object = None) -> None:
        await self._workers.delete(wanted.worker_id, known)


class PolicyTarget(_Target):
    """Policies of models and tenants, which may come before their workers."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning

    async def add(
        self, wanted: TuningPolicy, *, over: bool = False, known: object = None
    ) -> object:
        return self._tuning.set_ahead(wanted.key, wanted.policy.row)

    def holds(self, wanted: TuningPolicy, known: object) -> bool:
        return self._tuning.holds(wanted.key, wanted.policy.row)

    async def remove(self, wanted: TuningPolicy, known: object = None) -> None:
        self._tuning.take_back(wanted.key, wanted.policy.row)


class UpstreamTarget(_Target):
    """Engines behind the gateway, on behalf of an owner."""

    removes_last = True

    def __init__(self, upstreams: Upstreams, owner: str = FLEET_FILE) -> None:
        self._upstreams = upstreams
        self._owner = owner

    async def can_serve(self) -> None:
        """Waits until each engine has been asked once what it is, for at most MEET_S."""
        with trio.move_on_after(MEET_S):
            await self._upstreams.all_met()

    async def add(self, wanted: Wanted, *, over: bool = False, known: object = None) -> object:
        return self._upstreams.want(wanted, self._owner)

    def holds(self, wanted: Wanted, known: object) -> bool:
        return self._upstreams.holds(wanted, self._owner) is known

    async def remove(self, wanted: Wanted, known: object = None) -> None:
        self._upstreams.unwant(wanted, self._owner)


class ConductorTarget(_Target):
    """Publishers of the conductor."""

    def __init__(self, publishers: Publishers) -> None:
        self._publishers = publishers

    async def add(
        self, wanted: Described, *, over: bool = False, known: object = None
    ) -> Publisher | None:
        if self._publishers.find(wanted.key) is not None:
            raise Conflict(f"{wanted.key.triple} already registered")
        self._publishers.register(wanted)
        return self._publishers.find(wanted.key)

    def holds(self, wanted: Described, known: object) -> bool:
        return self._publishers.find(wanted.key) is known

    async def remove(self, wanted: Described, known: object = None) -> None:
        await self._publishers.unregister(
            Narrowing(
                wanted.tenant_id,
                wanted.instance_id,
                wanted.dp_rank,
                wanted.type,
                wanted.model_name,
                wanted.lora_name,
                wanted.block_size,
                wanted.salt,
                wanted.endpoint,
            )
        )


class ReplicaTarget(_Target):
    """Replicas that this process listens to."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    async def add(
        self, wanted: RegisteredReplica, *, over: bool = False, known: object = None
    ) -> Replica | None:
        if not self._replicas.register(*wanted):
            raise Conflict(f"{wanted.endpoint} already registered")
        return self._replicas.find(wanted.endpoint)

    def holds(self, wanted: RegisteredReplica, known: object) -> bool:
        return self._replicas.find(wanted.endpoint) is known

    async def remove(self, wanted: RegisteredReplica, known: object = None) -> None:
        await self._replicas.deregister(wanted.endpoint)
