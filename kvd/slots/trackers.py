"""Slot trackers: the load that the live requests of each model and tenant put on its ranks.

    SlotTrackers
      └ trackers: (model, tenant) ──> Tracker
                                        ├ ledger    kvd_core: live requests, loads, projections;
                                        │           other faces may share these loads (shared_loads)
                                        ├ workers   worker id ──> its data-parallel ranks
                                        └ leaving   workers whose requests are being ended

A tracker lives from its first worker to its last; the first worker fixes its block size.
live_requests.py has the life of a booked request, here and on replicas.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import trio

from kvd.errors import BadRequest, Conflict, Invalid, NotFound, Unavailable, too_many_partitions
from kvd.index.served_models import EVERYTHING, ServedModels
from kvd.model import MAX_PARTITIONS, PartitionKey
from kvd.slots.live_requests import LiveRequests, ease
from kvd.slots.shared_loads import Ledgers
from kvd.telemetry.stretches import UNREGISTRATION
from kvd.wire.lifecycle import Face
from kvd_core.json.scan import BodyScanner
from kvd_core.ledger import ledger
from kvd_core.ledger.ledger import KeptRows, Ledger

MAX_DP_SIZE = 4096  # ranks of one worker, as in Dynamo
U32_MAX = 2**32 - 1


class RegisteredWorker(NamedTuple):
    """A worker as it is registered."""

    key: PartitionKey
    worker_id: int
    block_size: int  # tokens
    dp_start: int
    dp_size: int


class WorkerRow(NamedTuple):
    """One registered worker."""

    key: PartitionKey
    worker_id: int
    block_size: int
    ranks: range


@dataclass(slots=True)
class Tracker:
    """The live requests of one model and tenant, and the workers they may run on."""

    key: PartitionKey
    block_size: int  # tokens per block
    ledger: Ledger = field(default_factory=Ledger)
    workers: dict[int, range] = field(default_factory=dict)  # by worker id: its dp ranks
    # Unregistered workers whose requests are being ended, by id: set when all have ended.
    leaving: dict[int, trio.Event] = field(default_factory=dict)
    row_prefix: bytes = b""  # the JSON members that name the tracker in a row of loads

    def __post_init__(self) -> None:
        model, tenant = (json.dumps(name) for name in self.key)
        self.row_prefix = f'"model_name":{model},"tenant_id":{tenant},'.encode()

    @property
    def ledger_block_size(self) -> int:
        return self.block_size

    def has_rank(self, worker_id: int, dp_rank: int) -> bool:
        return dp_rank in self.workers.get(worker_id, ())

    def rank(self, worker_id: int, dp_rank: int) -> int:
        """Returns the ledger's number of a registered rank or raises NotFound."""
        rank = self.ledger.rank_of(worker_id, dp_rank)
        if rank is None or not self.has_rank(worker_id, dp_rank):
            raise NotFound(f"worker {worker_id} dp_rank {dp_rank} not found")
        return rank


class SlotTrackers(LiveRequests[Tracker]):
    """All trackers of the daemon, and the life of their requests."""

    face = Face.SLOT_TRACKER

    def __init__(
        self,
        expiry_s: float,
        ledgers: Ledgers | None = None,
        max_trackers: int = MAX_PARTITIONS,
        clock: Callable[[], float] = time.monotonic,
        served: ServedModels = EVERYTHING,
    ) -> None:
        """Drops requests older than `expiry_s`; without `ledgers` no other face shares loads.

        Only models and tenants that are `served` here have trackers.
        """
        self._served = served
        self.trackers: dict[PartitionKey, Tracker] = {}
        super().__init__(self.trackers, expiry_s, clock)
        self.max_trackers = max_trackers
        self._ledgers = ledgers or Ledgers()
        self.changes = 0  # how often a worker has come or gone
        self.refused_trackers = 0  # at `max_trackers`
        self.ended: Counter[str] = Counter()  # totals of the ledgers of ended trackers

    def tracker(self, model_name: str, tenant_id: str) -> Tracker:
        """Returns a tracker or raises NotFound."""
        # A plain tuple finds the equal key, and costs a third of making a PartitionKey.
        found: Tracker | None = self.trackers.get((model_name, tenant_id))  # type: ignore[call-overload]
        if found is None:
            failure = NotFound(f"no slot tracker for model={model_name} tenant_id={tenant_id}")
            raise failure.about((model_name, tenant_id))
        return found

    # ---- workers

    def register(
        self, key: PartitionKey, worker_id: int, block_size: int, dp_start: int, dp_size: int
    ) -> None:
        """Registers a worker with its contiguous ranks; nothing has changed when it raises.

        If the worker was registered before, it must have left entirely (see `settled`).
        """
        if block_size == 0:
            raise BadRequest("block_size must be greater than 0")
        if not 0 < dp_size <= MAX_DP_SIZE:
            raise BadRequest(f"dp_size must be from 1 to {MAX_DP_SIZE}")
        if dp_start + dp_size > U32_MAX:
            raise BadRequest(f"dp_start + dp_size must not be above {U32_MAX}")
        tracker = self.trackers.get(key) or self._new(key, block_size)
        if tracker.block_size != block_size:
            raise Conflict(
                f"block_size mismatch for model={key.model_name} tenant_id={key.tenant_id}: "
                f"existing={tracker.block_size}, requested={block_size}"
            )
        if worker_id in tracker.workers or worker_id in tracker.leaving:
            raise Conflict(
                f"worker {worker_id} already registered for model={key.model_name} "
                f"tenant_id={key.tenant_id}"
            )
        if tracker.ledger.stats()["ranks"] + dp_size > ledger.MAX_RANKS:
            raise Unavailable(f"the limit of {ledger.MAX_RANKS} ranks would be exceeded")
        self.changes += 1
        self.trackers[key] = tracker
        tracker.workers[worker_id] = range(dp_start, dp_start + dp_size)
        tracker.ledger.add_ranks(worker_id, dp_start, dp_size)

    def _new(self, key: PartitionKey, block_size: int) -> Tracker:
        self._served.check(key)
        if len(self.trackers) >= self.max_trackers:
            self.refused_trackers += 1
            raise too_many_partitions(self.max_trackers)
        return Tracker(key, block_size, self._ledgers.open(self.face, key, block_size))

    async def settled(self, key: PartitionKey) -> None:
        """Waits until no worker of a tracker is leaving: then each can be registered again."""
        while (tracker := self.trackers.get(key)) is not None and tracker.leaving:
            await next(iter(tracker.leaving.values())).wait()

    async def unregister(self, key: PartitionKey, worker_id: int) -> None:
        """Removes a worker with its live requests, here and on the replicas, or raises NotFound."""
        # Shielded: a client that goes away must not leave half a worker behind.
        with trio.CancelScope(shield=True):
            for _ in UNREGISTRATION.each(self.leave(key, worker_id)):
                await trio.lowlevel.checkpoint()

    def leave(self, key: PartitionKey, worker_id: int) -> Iterator[None]:
        """Removes a worker with its live requests; rests at every yield. Raises NotFound.

        From the first yield on the worker is no longer registered and nothing can be booked on it;
        its ranks stay in the ledger with the requests that are left. The last worker's end is that
        of its tracker.
        """
        tracker = self.tracker(*key)
        ranks = tracker.workers.pop(worker_id, None)
        if ranks is None:
            raise NotFound(
                f"worker {worker_id} not found for model={key.model_name} tenant_id={key.tenant_id}"
            )
        self.changes += 1
        left = tracker.leaving[worker_id] = trio.Event()
        yield from self.drop_ranks(tracker, worker_id, ranks, tracker.block_size)
        del tracker.leaving[worker_id]
        if not tracker.workers and not tracker.leaving:
            del self.trackers[key]
            self.ended.update(ledger_stats(tracker.ledger))
        ease(tracker.ledger)
        left.set()

    def select(self, model_name: str | None, tenant_id: str | None) -> list[Tracker]:
        """Returns the trackers of a model and tenant, sorted; None stands for any name."""
        return [
            self.trackers[key]
            for key in sorted(self.trackers)
            if model_name in (None, key.model_name) and tenant_id in (None, key.tenant_id)
        ]

    def workers(self, model_name: str | None, tenant_id: str | None) -> Iterator[WorkerRow]:
        """Yields the registered workers of these trackers, sorted; workers may leave meanwhile."""
        for tracker in self.select(model_name, tenant_id):
            for worker_id in sorted(tracker.workers):
                ranks = tracker.workers.get(worker_id)
                if ranks is not None:
                    yield WorkerRow(tracker.key, worker_id, tracker.block_size, ranks)

    def render_loads(self, model_name: str | None, tenant_id: str | None) -> bytes | None:
        """Returns a JSON array of the loads of every rank of these trackers, sorted.

        None if they have so many ranks that it should be rendered in pieces.
        """
        trackers, room = self.select(model_name, tenant_id), 0
        for tracker in trackers:  # to sum up a generator takes longer than to render some ranks
            room += tracker.ledger.rows_bytes(len(tracker.row_prefix))
        if room > ledger.WHOLE_ROWS_BYTES:
            return None
        rows = [tracker.ledger.render_loads(tracker.row_prefix) for tracker in trackers]
        return b"[%b]" % b",".join(rows)

    def kept_loads(self, model_name: str | None, tenant_id: str | None) -> Iterator[KeptRows]:
        """Yields the rows of this array: those of each tracker as of the moment it is yielded."""
        for tracker in self.select(model_name, tenant_id):
            yield tracker.ledger.keep_loads(tracker.row_prefix)

    # ---- requests

    def add(
        self,
        tracker: Tracker,
        request_id: str,
        worker_id: int,
        dp_rank: int,
        hashes: BodyScanner,
        tokens: int,
        now: float,
        retry_key: str | None,
    ) -> bool:
        """Books a request; False if it is an exact retry of a request that is booked already.

        Raises NotFound, Conflict on the id of another live request, Invalid on more tokens than the
        rank can count, Unavailable at a bound.
        """
        rank = tracker.rank(worker_id, dp_rank)
        outcome = tracker.ledger.add(request_id, rank, hashes, tokens, now, retry_key)
        if outcome == ledger.ADDED:
            rank_key = worker_id, dp_rank
            self.begun(tracker, request_id, rank_key, hashes.hashes, tokens)
            return True
        if outcome == ledger.REPEATED:
            return False
        if outcome == ledger.EXISTS:
            raise Conflict(f"request {request_id} already exists")
        raise _refusal(outcome)

    def prefill_complete(self, tracker: Tracker, request_id: str) -> None:
        """Ends the prefill of a request; repeating it is no error. Raises NotFound."""
        if not self.complete(tracker, request_id):
            raise NotFound(f"request {request_id} not found")


def _refusal(outcome: int) -> Exception:
    if outcome == ledger.OVERFLOW:
        return Invalid("new_isl_tokens: the tokens of the rank would exceed what can be counted")
    return Unavailable("the limit of live requests is reached (max_requests, max_request_blocks)")


def ledger_stats(of: Ledger) -> dict[str, int]:
    """Returns the counters of a ledger, which only grow."""
    stats = of.stats()
    counts = {name: stats[name] for name in ("added", "repeated", "freed")}
    return counts | {f"refused_{why}": count for why, count in stats["refused"].items()}
