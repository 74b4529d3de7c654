"""The schedulable workers of one model and tenant, their live requests, and waiting selections."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Mapping
from operator import and_
from typing import Any, NamedTuple

from kvd.index.partitions import Partition, State
from kvd.model import PartitionKey
from kvd.selection.options import RouterOptions
from kvd.selection.phases import Phase, serves
from kvd.selection.queue import SelectionQueue
from kvd.selection.requests import Constraints, QueuedRequest, Ranks
from kvd.selection.stats import SelectionOutcome, Unserved
from kvd.selection.worker_record import WorkerRecord
from kvd_core.index.predictions import Predictions
from kvd_core.index.prefix_index import Worker
from kvd_core.ledger.ledger import Ledger
from kvd_core.selector.selector import Candidate, Pool
from kvd_core.selector.settings import Settings

# Predicted blocks forgotten between two checkpoints, at some 0.1 µs each.
PREDICTED_SLICE = 4096

_LEFT = object()  # in place of what the cached blocks of a worker are read from


class Absence(NamedTuple):
    """The fault of a rank's event connection."""

    since: float  # seconds, of the service's clock
    heard: bool  # cached blocks still count: a connection that was never made has lost no events
    reachable: bool  # the rank can still be chosen


class Candidates:
    """The schedulable workers of one model and tenant, whose ranks can be chosen."""

    def __init__(
        self, key: PartitionKey, options: RouterOptions, state: State, settings: Settings
    ) -> None:
        self.key = key
        self._options = options
        self.settings = settings  # for requests that override none of them
        self._state = state
        self.ledger = Ledger()
        self.ledger_block_size: int | None = None  # tokens; None: no worker has joined yet
        self.workers: dict[int, WorkerRecord] = {}
        self.ranks_count = 0  # of all workers
        self.absent: dict[tuple[int, int], Absence] = {}  # by worker and dp rank
        self.queue: SelectionQueue[QueuedRequest] = SelectionQueue(options.queue_policy)
        self._pool: Pool | None = None
        self._former: Pool | None = None  # the replaced pool; the next one goes on with its turns
        self._masks: dict[Phase | None, bytes | None] = {}
        self.whole_mask: bytes | None = None  # the pool's mask for whole requests, None: all ranks
        self._silent: int | None = None  # see `changed`
        # What the cached blocks of the last pool's workers are read from, by worker; _LEFT if a
        # worker has left since. A new pool makes only those ranks for which this has changed.
        self._read_from: dict[int, object] = {}
        # By candidate, made when needed: the JSON members of an answer that name the chosen rank.
        self.rank_members: list[bytes | None] = []
        members = json.dumps(key._asdict(), separators=(",", ":"))
        self.partition_json = members.encode()[:-1]  # a JSON object without its closing brace
        # Blocks that workers without KV events should cache; None while there are no such workers.
        self.predictions: Predictions | None = None

    @property
    def block_size(self) -> int | None:
        """Tokens per block of its workers; None without any."""
        return next((record.block_size for record in self.workers.values()), None)

    def has_rank(self, worker_id: int, dp_rank: int) -> bool:
        """Returns whether a worker has a rank; the ledger also has ranks that are leaving."""
        record = self.workers.get(worker_id)
        return record is not None and dp_rank in record.ranks

    def join(self, record: WorkerRecord) -> None:
        """Adds a worker; its ranks can be chosen from now on."""
        self.ledger.add_ranks(record.worker_id, record.ranks.start, len(record.ranks))
        self.workers[record.worker_id] = record
        self.ranks_count += len(record.ranks)
        self.changed()

    def leave(self, record: WorkerRecord) -> None:
        """Removes a worker: its ranks cannot be chosen any more."""
        if (known := self.workers.pop(record.worker_id, None)) is not None:
            self.ranks_count -= len(known.ranks)
        if record.worker_id in self._read_from:
            self._read_from[record.worker_id] = _LEFT
        if self.absent:
            for dp_rank in record.ranks:
                self.absent.pop((record.worker_id, dp_rank), None)
        self.changed()

    def changed(self, silent: int | None = None) -> None:
        """Notes that the workers or their indexes have changed, so that the pool is made anew.

        The worker `silent` counts as caching nothing until the next change.
        """
        if self._pool is not None:
            self._former, self._pool = self._pool, None
        self._silent = silent

    def note_absence(self, rank: tuple[int, int], absence: Absence | None) -> None:
        """Notes the fault of a rank's event connection; None means that it is sound."""
        if absence is None:
            self.absent.pop(rank, None)
        else:
            self.absent[rank] = absence
        if self._pool is not None:
            _mark(self._pool, rank, absence)

    def lacks(self, eligible: bytes | None) -> bool:
        """Returns whether a rank of the mask cannot be chosen because its engine has gone."""
        ranks = [rank for rank, absence in self.absent.items() if not absence.reachable]
        found = [self.pool.find(*rank) for rank in ranks]
        return any(at is not None and (eligible is None or eligible[at] != 0) for at in found)

    @property
    def pool(self) -> Pool:
        """The ranks there are now, made anew at first use after changes.

        O(ranks) and O(workers), at 0.1 µs each, and 0.1 for each rank of a worker that has changed.
        """
        if self._pool is None:
            former, self._former = self._former, None  # if memory runs out, all is made anew
            self._pool = self._make_pool(former)
            for rank, absence in self.absent.items():
                _mark(self._pool, rank, absence)
            self.rank_members = [None] * len(self._pool)
            self._masks = {None: self._mask(None)}
            self.whole_mask = self._masks[None]
        return self._pool

    def _make_pool(self, former: Pool | None) -> Pool:
        options, block_size = self._options, self.block_size
        partition = None if block_size is None else self._partition()
        if self.predictions is None and any(map(self._is_predicted, self.workers.values())):
            self.predictions = Predictions(
                options.ttl_s, options.max_tree_size, options.prune_target_ratio
            )
        index = None if partition is None else partition.index
        if index is not None and options.predicted_ttl_s is not None:
            index.predict(
                options.predicted_ttl_s, options.max_tree_size, options.prune_target_ratio
            )
        empty = Pool(
            index, self.ledger, block_size or 1, (), self.predictions, options.predicted_bound
        )
        if former is not None and former.is_like(empty):
            return former.renewed(self._changes(partition))
        self._read_from.clear()
        made = empty.renewed(self._changes(partition))
        if former is not None:
            made.take_turns(former)
        return made

    def _changes(self, partition: Partition | None) -> dict[int, list[Candidate]]:
        """Returns the ranks of those workers that have changed since the last pool, by worker."""
        known = {} if partition is None else partition.workers
        read_from = self._read_from
        changes: dict[int, list[Candidate]] = {}
        for worker_id in read_from.keys() - self.workers.keys():
            changes[worker_id] = []
            del read_from[worker_id]
        for worker_id, record in self.workers.items():
            caches = None if worker_id == self._silent else known.get(worker_id)
            if read_from.get(worker_id, _LEFT) is not caches:
                changes[worker_id] = [self._ranks_of(record, caches)]
                read_from[worker_id] = caches
        return changes

    def _ranks_of(self, record: WorkerRecord, caches: Worker | None) -> Candidate:
        return Candidate(
            record.worker_id,
            record.ranks.start,
            caches,
            self.ledger.add_rank(record.worker_id, record.ranks.start),
            record.max_num_batched_tokens or 0,
            record.total_kv_blocks,
            len(record.ranks),
        )

    def _is_predicted(self, record: WorkerRecord) -> bool:
        """Returns whether a worker's cached blocks are only predicted, for lack of events."""
        return bool(record.without_kv_events) or not self._options.uses_kv_events

    def _partition(self) -> Partition | None:
        """Returns the index that events have filled for these workers, None without events."""
        return self._state.partitions.get(self.key) if self._options.uses_kv_events else None

    def render_rank(self, chosen: int) -> bytes:
        """Returns the JSON members that name a candidate in an answer, with a comma after them."""
        piece = self.rank_members[chosen]
        if piece is None:
            candidate = self.pool.candidate(chosen)
            record = self.workers[candidate.worker_id]
            members = {
                "model_name": self.key.model_name,
                "tenant_id": self.key.tenant_id,
                "worker_id": record.worker_id,
                "dp_rank": candidate.dp_rank,
                "endpoint": record.endpoint,
                "block_size": record.block_size,
            }
            piece = self.rank_members[chosen] = members_json(members)
        return piece

    def render_loads(self) -> bytes:
        """Returns a JSON object of the loads of its ranks, and of the selections that wait."""
        before, after = self.around_loads()
        return b"%b%b%b" % (before, self.ledger.project(b"", 0), after)

    def around_loads(self) -> tuple[bytes, bytes]:
        """Returns the text of this object before and behind the array of loads."""
        waiting = [held.prompt.isl_tokens for held in self.queue]
        queue = b',"pending_count":%d,"pending_isl_tokens":%d}' % (len(waiting), sum(waiting))
        return b'%b,"loads":' % self.partition_json, queue

    def ranks(
        self,
        constraints: Constraints | None,
        phase: Phase | None,
        preferred: Mapping[str, float] | None,
    ) -> Ranks:
        """Returns the present ranks as a request with these members sees them."""
        return Ranks(self.pool, self.eligible(constraints, phase), self.factors(preferred))

    def eligible(self, constraints: Constraints | None, phase: Phase | None = None) -> bytes | None:
        """Returns the pool's mask of the ranks that may serve a phase; None means all."""
        pool = self.pool
        if phase not in self._masks:
            self._masks[phase] = self._mask(phase)
        serving = self._masks[phase]
        if constraints is None:
            return serving
        named: Iterable[int] = self.workers
        dp_rank = None
        if constraints.pinned is not None:
            named, dp_rank = (constraints.pinned[0],), constraints.pinned[1]
        elif constraints.allowed is not None:
            named = constraints.allowed
        admitted = (
            worker_id
            for worker_id in named
            if (record := self.workers.get(worker_id)) is not None
            and constraints.admits(record, dp_rank or 0)
        )
        mask = pool.mask(admitted, dp_rank)
        return mask if serving is None else bytes(map(and_, mask, serving))

    def _mask(self, phase: Phase | None) -> bytes | None:
        serving = {
            worker_id: serves(record.role, phase) for worker_id, record in self.workers.items()
        }
        if all(serving.values()):
            return None
        return b"".join(
            bytes((serving[worker_id],)) * len(self.workers[worker_id].ranks)
            for worker_id in sorted(serving)
        )

    def factors(self, preferred: Mapping[str, float] | None) -> bytes | None:
        """Returns a factor for the cost of each of the pool's ranks; None means that all are 1.

        The sum of the preferences for a worker's taints gives a factor between 1/e and e: below 1,
        which favours the worker, where the sum is positive.
        """
        if not preferred:
            return None
        found = array("d")
        for _, record in sorted(self.workers.items()):
            liked = sum(preferred.get(taint, 0.0) for taint in set(record.taints))
            found.extend((math.exp(-math.tanh(liked)),) * len(record.ranks))
        return found.tobytes()

    def targets(self, affinity: tuple[int, int | None], eligible: bytes | None) -> bytes | None:
        """Narrows a mask to an affinity target; None if no rank of the target is in the mask."""
        worker_id, dp_rank = affinity
        mask = self.pool.mask((worker_id,), dp_rank)
        if eligible is not None:
            mask = bytes(map(and_, mask, eligible))
        return mask if any(mask) else None

    def predicted(self) -> int:
        """Returns how many blocks are predicted: bookings suggest that ranks cache them."""
        partition = self._partition()
        of_index = 0 if partition is None else partition.index.predicted()
        return of_index + (0 if self.predictions is None else len(self.predictions))

    def forget_predictions_of(self, rank: tuple[int, int]) -> None:
        """Forgets all predictions of a rank without events: it has left, or lost its cache."""
        in_ledger = self.ledger.rank_of(*rank)
        if self.predictions is not None and in_ledger is not None:
            self.predictions.forget(in_ledger)

    def prune_predictions(self, now: float) -> bool:
        """Forgets some outdated or surplus predictions; True while there may be more."""
        partition = self._partition()
        more = partition is not None and partition.index.forget_predicted(now, PREDICTED_SLICE)
        return (
            self.predictions is not None and self.predictions.prune(now, PREDICTED_SLICE)
        ) or more


def _mark(pool: Pool, rank: tuple[int, int], absence: Absence | None) -> None:
    at = pool.find(*rank)
    if at is not None:
        pool.set_heard(at, absence is None or absence.heard)
        pool.set_reachable(at, absence is None or absence.reachable)


def schedulable(owners: Mapping[PartitionKey, Candidates], key: PartitionKey) -> Candidates:
    """Returns the Candidates of a key if they have a worker; raises Unserved."""
    candidates = owners.get(key)
    if candidates is None or not candidates.workers:
        failure = Unserved(
            SelectionOutcome.NO_WORKERS,
            f"no schedulable workers for model={key.model_name} tenant_id={key.tenant_id}",
        )
        raise failure.about(key)
    return candidates


def members_json(members: dict[str, Any]) -> bytes:
    """Renders the members of a JSON object, with a comma after each."""
    text = json.dumps(members, separators=(",", ":")).encode()
    return text[1:-1] + b"," if members else b""
