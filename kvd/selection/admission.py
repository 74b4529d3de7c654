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
from kvd.selection.worker_record import ENDPOINTS_AT_ONCE, WorkerLifecycle, WorkerRecord
from kvd.wire.curve import check_server_key
from kvd.wire.endpoints import is_endpoint
from kvd_core.ledger import ledger

OWNER = "selection"  # the name under which the selection service registers ranks

MAX_WORKERS = 65_536  # worker records of the selection service

# Workers of a set judged between two checkpoints: 1 ms.
CHECKED_AT_ONCE = 32


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
    """Judges records against the workers that are there; changes nothing.

    Its iterators let others run at every yield, between two changes to the catalog.
    """

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
        """Raises BadRequest on addresses that kvd may not connect to.

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

    def judged(self, record: WorkerRecord) -> Iterator[CatalogEntry | None]:
        """Yields None, and at last the entry that a record would get in the catalog."""
        reasons: list[str] = []
        yield from self._find_reasons(record, reasons)
        others = self._others(record)
        clashes = [] if (other := next(others, None)) is None else list(record.clashes(other))
        if reasons or clashes:
            yield CatalogEntry(record, reasons + clashes, blocked=not reasons)
            return
        try:
            yield from self._check_join([record], {record.worker_id})
        except KvdError as error:
            yield CatalogEntry(record, [str(error)], blocked=True)
        else:
            yield CatalogEntry(record, [])

    def _find_reasons(self, record: WorkerRecord, found: list[str]) -> Iterator[None]:
        for reason in record.reasons(uses_events=self._options.uses_kv_events):
            if reason is None:
                yield
            else:
                found.append(reason)

    def _others(self, record: WorkerRecord) -> Iterator[WorkerRecord]:
        """Yields the schedulable workers of the same model and tenant."""
        candidates = self._candidates.get(record.key)
        there = () if candidates is None else candidates.workers.values()
        return (one for one in there if one.worker_id != record.worker_id)

    def _check_join(self, records: list[WorkerRecord], leaving: set[int]) -> Iterator[None]:
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
            gone = (candidates.workers.get(worker_id) for worker_id in leaving)
            ranks += candidates.ranks_count - sum(len(one.ranks) for one in gone if one is not None)
        if ranks > ledger.MAX_RANKS:
            raise Unavailable(f"the limit of {ledger.MAX_RANKS} ranks would be exceeded")
        if self._options.uses_kv_events and block_size is not None:
            addresses = (
                (RankKey(key, record.worker_id, dp_rank), found)
                for record in records
                if not record.without_kv_events
                for dp_rank in record.ranks
                if (found := record.addresses(dp_rank)) is not None
            )
            yield from self._registry.check(key, addresses, block_size, OWNER, leaving)

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
        `check_room` do, and as registering the ranks would.
        """
        for number, record in enumerate(records, 1):
            self.check_served(record)
            yield from self.check_addresses(record)
            reasons: list[str] = []
            yield from self._find_reasons(record, reasons)
            reasons += record.clashes(records[0])
            if reasons:
                raise Invalid(f"worker {record.worker_id}: " + "; ".join(reasons))
            if number % CHECKED_AT_ONCE == 0:
                yield
        self.check_room(records)
        leaving = {record.worker_id for record in records}
        if gone is not None:
            leaving |= gone.workers.keys()
        yield from self._check_join(records, leaving)

    def check_room(self, records: list[WorkerRecord]) -> None:
        """Raises Unavailable if the catalog has no room for these records."""
        new = sum(record.worker_id not in self._entries for record in records)
        if len(self._entries) + new > MAX_WORKERS:
            raise Unavailable(f"the limit of {MAX_WORKERS} workers is reached")
