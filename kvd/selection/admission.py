"""Judges whether a worker can be scheduled beside those already there, and if not, why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from kvd.errors import Invalid, KvdError, Unavailable, too_many_partitions
from kvd.index.registry import Registry
from kvd.index.served_models import ServedModels
from kvd.model import PartitionKey, RankKey
from kvd.selection.candidates import Candidates
from kvd.selection.options import RouterOptions
from kvd.selection.tuning import Tuning
from kvd.selection.worker_record import WorkerLifecycle, WorkerRecord
from kvd.wire.curve import check_server_key
from kvd.wire.endpoints import Addresses, is_endpoint
from kvd_core.ledger import ledger

OWNER = "selection"  # the name under which the selection service registers ranks

MAX_WORKERS = 65_536  # worker records of the selection service

# Workers of a set judged between two checkpoints: 1 ms.
CHECKED_AT_ONCE = 32
# Endpoints of a worker checked between two checkpoints: 0.7 ms, 2 if each has another host.
ENDPOINTS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A worker of the catalog."""

    record: WorkerRecord
    reasons: list[str]  # why the worker cannot be scheduled; empty if it can
    blocked: bool = False  # only other workers, another face or a bound keep it out

    @property
    def lifecycle(self) -> WorkerLifecycle:
        return WorkerLifecycle.INCOMPLETE if self.reasons else WorkerLifecycle.SCHEDULABLE


class Admission:
    """Judges records against the workers that are there; changes nothing."""

    def __init__(
        self,
        entries: Mapping[int, CatalogEntry],
        candidates: Mapping[PartitionKey, Candidates],
        left: Iterable[PartitionKey],
        registry: Registry,
        options: RouterOptions,
        tuning: Tuning,
        served: ServedModels,
    ) -> None:
        """`left` are the models and tenants that have lost their last worker, the first first."""
        self._served = served
        self._entries = entries
        self._candidates = candidates
        self._left = left
        self._tuning = tuning
        self._registry = registry
        self._options = options

    def check_addresses(self, record: WorkerRecord) -> Iterator[None]:
        """Raises BadRequest on addresses that kvd may not connect to; rests at every yield.

        Malformed addresses pass: they become reasons not to schedule the worker. Without KV events
        kvd connects to none of them, so any text will do.
        """
        if not self._options.uses_kv_events:
            return
        check_server_key(record.curve_server_key)
        outgoing = self._registry.outgoing
        endpoints = (record.kv_events_endpoint, *record.kv_events_endpoints.values())
        for number, endpoint in enumerate(endpoints, 1):
            if endpoint and is_endpoint(endpoint):
                outgoing.check_endpoint(endpoint)
            if number % ENDPOINTS_AT_ONCE == 0:
                yield
        if record.replay_endpoint and is_endpoint(record.replay_endpoint):
            outgoing.check_replay_endpoint(record.replay_endpoint)

    def check_served(self, record: WorkerRecord) -> None:
        """Raises Misdirected for a worker of a model that another kvd serves."""
        self._served.check(record.key)

    def reasons(self, record: WorkerRecord) -> list[str]:
        """Returns why a worker cannot be scheduled beside the others of its model; [] if it can."""
        candidates = self._candidates.get(record.key)
        others = () if candidates is None else candidates.workers.values()
        other = next((one for one in others if one.worker_id != record.worker_id), None)
        return record.reasons(other, uses_events=self._options.uses_kv_events)

    def judged(self, record: WorkerRecord, reasons: list[str]) -> CatalogEntry:
        """Returns the entry that a record with these `reasons` would get in the catalog."""
        if reasons:
            alone = record.reasons(None, uses_events=self._options.uses_kv_events)
            return CatalogEntry(record, reasons, not alone)
        try:
            self._check_join([record], {record.worker_id})
        except KvdError as error:
            return CatalogEntry(record, [str(error)], blocked=True)
        return CatalogEntry(record, [])

    def _check_join(self, records: list[WorkerRecord], leaving: set[int]) -> None:
        """Raises the error that these workers of one model and tenant would meet when they join it.

        The `leaving` workers count as gone. Raises Unavailable at a bound, and Conflict with a
        registration of another face.
        """
        if not records:
            return
        key, block_size = records[0].key, records[0].block_size
        candidates = self._candidates.get(key)
        if candidates is None:
            self.check_partitions()
        ranks = sum(len(record.ranks) for record in records)
        if candidates is not None:
            staying = [one for id_, one in candidates.workers.items() if id_ not in leaving]
            ranks += sum(len(record.ranks) for record in staying)
        if ranks > ledger.MAX_RANKS:
            raise Unavailable(f"the limit of {ledger.MAX_RANKS} ranks would be exceeded")
        if self._options.uses_kv_events and block_size is not None:
            addresses: dict[RankKey, Addresses] = {
                RankKey(key, record.worker_id, dp_rank): found
                for record in records
                if not record.without_kv_events
                for dp_rank in record.ranks
                if (found := record.addresses(dp_rank)) is not None
            }
            self._registry.check(key, addresses, block_size, OWNER, leaving)

    def check_partitions(self) -> None:
        """Raises Unavailable if there are too many models and tenants for another one."""
        if self.is_full and self.replaceable() is None:
            raise too_many_partitions(self._options.max_partitions)

    @property
    def is_full(self) -> bool:
        """Returns whether another model and tenant has to take the place of one without workers."""
        return len(self._candidates) >= self._options.max_partitions

    def replaceable(self) -> PartitionKey | None:
        """Returns the model and tenant whose last worker left longest ago, None if there is none.

        Passes over those whose selections still wait to be refused, and those whose settings a call
        has changed: their changes are kept, and need a bound.
        """
        return next(
            (
                key
                for key in self._left
                if not len(self._candidates[key].queue) and not self._tuning.has_changes(key)
            ),
            None,
        )

    def check_all(self, records: list[WorkerRecord], gone: Candidates | None) -> Iterator[None]:
        """Raises an error unless all records could be scheduled after `gone` have left.

        Raises Invalid for what a record lacks, as `check_served`, `check_addresses` and
        `check_room` do, and as registering the ranks would. Rests at every yield.
        """
        for number, record in enumerate(records, 1):
            self.check_served(record)
            yield from self.check_addresses(record)
            reasons = record.reasons(records[0], uses_events=self._options.uses_kv_events)
            if reasons:
                raise Invalid(f"worker {record.worker_id}: " + "; ".join(reasons))
            if number % CHECKED_AT_ONCE == 0:
                yield
        self.check_room(records)
        leaving = {record.worker_id for record in records}
        if gone is not None:
            leaving |= gone.workers.keys()
        self._check_join(records, leaving)

    def check_room(self, records: list[WorkerRecord]) -> None:
        """Raises Unavailable if the catalog has no room for these records."""
        new = {record.worker_id for record in records} - self._entries.keys()
        if len(self._entries) + len(new) > MAX_WORKERS:
            raise Unavailable(f"the limit of {MAX_WORKERS} workers is reached")
