"""Slot trackers: what the running requests of every model and tenant weigh on its ranks.

    SlotTrackers
      └ trackers: (model, tenant) ──> Tracker
                                        ├ ledger    kvd_core: live requests, loads, projections;
                                        │           other faces may weigh on these (shared_loads)
                                        └ workers   worker id ──> its data-parallel ranks

A tracker lives from its first worker to its last; its block size is fixed by the first. Every step
of a request's life that succeeds here is told to the replicas, and theirs is taken from them, so
that all account for the same requests; what came from a replica is never told on.
All of it is touched by one thread only, and no method awaits: each call is one atomic change.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvd.errors import BadRequest, Conflict, Invalid, NotFound, Unavailable
from kvd.model import MAX_PARTITIONS, Observers, PartitionKey
from kvd.slots.shared_loads import Ledgers
from kvd.wire.early import EarlySteps
from kvd.wire.lifecycle import Face, Lifecycle, Outcome, Step
from kvd_core.json.scan import BodyScanner
from kvd_core.ledger import ledger
from kvd_core.ledger.ledger import Ledger, LiveRequest

MAX_DP_SIZE = 4096  # ranks of one worker, as on the original
U32_MAX = 2**32 - 1

# Requests expired, or trackers looked at, between two checkpoints: under 1 ms.
EXPIRY_SLICE = 64


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
    row_prefix: bytes = b""  # rendered members that name the tracker in a row of loads

    def __post_init__(self) -> None:
        model, tenant = (json.dumps(name) for name in self.key)
        self.row_prefix = f'"model_name":{model},"tenant_id":{tenant},'.encode()

    def rank(self, worker_id: int, dp_rank: int) -> int:
        """Returns the ledger's number of a registered rank or raises NotFound."""
        rank = self.ledger.rank_of(worker_id, dp_rank)
        if rank is None:
            raise NotFound(f"worker {worker_id} dp_rank {dp_rank} not found")
        return rank


class SlotTrackers:
    """All trackers of the daemon."""

    def __init__(
        self,
        expiry_s: float,
        ledgers: Ledgers | None = None,
        max_trackers: int = MAX_PARTITIONS,
    ) -> None:
        """Requests older than `expiry_s` seconds are dropped; no other face is None."""
        self.expiry_s = expiry_s
        self.max_trackers = max_trackers
        self._ledgers = ledgers or Ledgers()
        self.steps: Observers[[Lifecycle]] = Observers()  # told of every step of a request
        self.trackers: dict[PartitionKey, Tracker] = {}
        self.early = EarlySteps()
        self.refused_trackers = 0  # at `max_trackers`
        self.given_back = 0  # requests whose clients left before their answers
        self.ended: Counter[str] = Counter()  # totals of ledgers that are no more

    def tracker(self, model_name: str, tenant_id: str) -> Tracker:
        """Returns a tracker or raises NotFound."""
        # A plain tuple finds the key that equals it, for a third of what making a key costs.
        found: Tracker | None = self.trackers.get((model_name, tenant_id))  # type: ignore[call-overload]
        if found is None:
            raise NotFound(f"no slot tracker for model={model_name} tenant_id={tenant_id}")
        return found

    # ---- workers

    def register(
        self, key: PartitionKey, worker_id: int, block_size: int, dp_start: int, dp_size: int
    ) -> None:
        """Registers a worker with its contiguous ranks; nothing has changed when it raises."""
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
        if worker_id in tracker.workers:
            raise Conflict(
                f"worker {worker_id} already registered for model={key.model_name} "
                f"tenant_id={key.tenant_id}"
            )
        if tracker.ledger.stats()["ranks"] + dp_size > ledger.MAX_RANKS:
            raise Unavailable(f"there would be more than {ledger.MAX_RANKS} ranks")
        self.trackers[key] = tracker
        tracker.workers[worker_id] = range(dp_start, dp_start + dp_size)
        for dp_rank in tracker.workers[worker_id]:
            tracker.ledger.add_rank(worker_id, dp_rank)

    def _new(self, key: PartitionKey, block_size: int) -> Tracker:
        if len(self.trackers) >= self.max_trackers:
            self.refused_trackers += 1
            raise Unavailable(f"there are {self.max_trackers} models and tenants already")
        return Tracker(key, block_size, self._ledgers.open(key, block_size))

    def unregister(self, key: PartitionKey, worker_id: int) -> None:
        """Removes a worker with its live requests, here and on the replicas, or raises NotFound."""
        tracker = self.tracker(*key)
        ranks = tracker.workers.pop(worker_id, None)
        if ranks is None:
            raise NotFound(
                f"worker {worker_id} not found for model={key.model_name} tenant_id={key.tenant_id}"
            )
        for dp_rank in ranks:
            for request_id in tracker.ledger.remove_rank(tracker.rank(worker_id, dp_rank)):
                self._tell(tracker, request_id, worker_id, dp_rank, Step.FREE)
        if not tracker.workers:
            del self.trackers[key]
            self.ended.update(totals(tracker.ledger))
        ease(tracker.ledger)

    def select(self, model_name: str | None, tenant_id: str | None) -> list[Tracker]:
        """Returns the trackers of a model and a tenant, None for any, sorted."""
        return [
            self.trackers[key]
            for key in sorted(self.trackers)
            if model_name in (None, key.model_name) and tenant_id in (None, key.tenant_id)
        ]

    def workers(self, model_name: str | None, tenant_id: str | None) -> Iterator[WorkerRow]:
        """Yields the registered workers of these trackers, sorted; some may go meanwhile."""
        for tracker in self.select(model_name, tenant_id):
            for worker_id in sorted(tracker.workers):
                ranks = tracker.workers.get(worker_id)
                if ranks is not None:
                    yield WorkerRow(tracker.key, worker_id, tracker.block_size, ranks)

    def render_loads(self, model_name: str | None, tenant_id: str | None) -> bytes:
        """Returns a JSON array of what every rank of these trackers is working on, sorted."""
        rows = (
            tracker.ledger.render_loads(tracker.row_prefix)
            for tracker in self.select(model_name, tenant_id)
        )
        return b"[%b]" % b",".join(rows)

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
        """Books a request; False if it is a retry of one that is booked already, equal in all.

        Raises NotFound, Conflict on an id that lives, Invalid on more tokens than the rank can
        count, Unavailable at a bound.
        """
        rank = tracker.rank(worker_id, dp_rank)
        outcome = tracker.ledger.add(request_id, rank, hashes, tokens, now, retry_key)
        if outcome == ledger.ADDED:
            if self.steps.subscribers:
                content = hashes.hashes(), tokens
                self._tell(tracker, request_id, worker_id, dp_rank, Step.ADD, *content)
            return True
        if outcome == ledger.REPEATED:
            return False
        if outcome == ledger.EXISTS:
            raise Conflict(f"request {request_id} already exists")
        raise _refusal(outcome)

    def undoing(self, tracker: Tracker, request_id: str, now: float) -> Callable[[], None]:
        """Returns what ends a request that has just been booked, if its client has left."""
        return partial(self._take_back, tracker, request_id, now)

    def _take_back(self, tracker: Tracker, request_id: str, booked_at: float) -> None:
        live = tracker.ledger.request(request_id)
        if live is not None and live.admitted_at == booked_at:  # not another one of the name
            self.given_back += 1
            self.free(tracker, request_id)

    def prefill_complete(self, tracker: Tracker, request_id: str) -> None:
        """Ends the prefill of a request, once or again; raises NotFound."""
        live = self._told(tracker, request_id)
        if not tracker.ledger.prefill_complete(request_id):
            raise NotFound(f"request {request_id} not found")
        if live is not None:
            self._tell(tracker, request_id, live.worker_id, live.dp_rank, Step.PREFILL_COMPLETE)
        ease(tracker.ledger)

    def free(self, tracker: Tracker, request_id: str) -> None:
        """Ends a request; one that is unknown is none to end."""
        live = self._told(tracker, request_id)
        tracker.ledger.free(request_id)
        if live is not None:
            self._tell(tracker, request_id, live.worker_id, live.dp_rank, Step.FREE)
        ease(tracker.ledger)

    def expire(self, now: float) -> Iterator[None]:
        """Drops what is older than the expiry age; rests at every yield.

        Replicas do the same with their own clocks and are not told.
        """
        before = now - self.expiry_s
        for number, key in enumerate(list(self.trackers), 1):
            tracker = self.trackers.get(key)
            while tracker is not None and tracker.ledger.expire(before, EXPIRY_SLICE):
                ease(tracker.ledger)
                yield
                tracker = self.trackers.get(key)  # it may have ended, or begun anew, meanwhile
            if number % EXPIRY_SLICE == 0:
                yield

    # ---- replicas

    def apply(self, event: Lifecycle, now: float) -> Outcome:
        """Takes a step that a replica tells of; changes nothing unless it is APPLIED."""
        tracker = self.trackers.get(event.partition)
        if tracker is None:
            return Outcome.UNKNOWN_MODEL
        rank = named_rank(event, tracker.block_size, tracker.workers, tracker.ledger)
        if isinstance(rank, Outcome):
            return rank
        outcome = apply_to(tracker.ledger, rank, self.early, event, now)
        if outcome is Outcome.APPLIED and event.step is not Step.ADD:
            ease(tracker.ledger)
        return outcome

    def _told(self, tracker: Tracker, request_id: str) -> LiveRequest | None:
        """Returns the request if there is anyone to tell of it."""
        return tracker.ledger.request(request_id) if self.steps.subscribers else None

    def _tell(
        self,
        tracker: Tracker,
        request_id: str,
        worker_id: int,
        dp_rank: int,
        step: Step,
        hashes: bytes = b"",
        tokens: int = 0,
    ) -> None:
        if self.steps.subscribers:
            where = tracker.key, tracker.block_size, request_id, worker_id, dp_rank
            self.steps.tell(Lifecycle(*where, step, hashes, tokens, face=Face.SLOT_TRACKER))


def ease(of: Ledger) -> None:
    """Says that ranks of a ledger may have less to do, if a selection waits for that."""
    if of.loads.eased is not None:
        of.loads.eased()


def named_rank(
    event: Lifecycle, block_size: int | None, workers: Container[int], live_requests: Ledger
) -> int | Outcome:
    """Returns the rank of the ledger that a replica's step names, or why there is none."""
    if block_size != event.block_size:
        return Outcome.BLOCK_SIZE
    if event.worker_id not in workers:
        return Outcome.UNKNOWN_WORKER
    rank = live_requests.rank_of(event.worker_id, event.dp_rank)
    return Outcome.UNKNOWN_RANK if rank is None else rank


def apply_to(
    live_requests: Ledger, rank: int, early: EarlySteps, event: Lifecycle, now: float
) -> Outcome:
    """Takes a replica's step on the ledger and the rank it is about."""
    if event.step is Step.ADD:
        return _add_to(live_requests, rank, early.meet(event, now), event, now)
    live = live_requests.request(event.request_id)
    if live is None:
        early.note(event, now)
        return Outcome.UNKNOWN_REQUEST
    if (live.worker_id, live.dp_rank) != (event.worker_id, event.dp_rank):
        return Outcome.OTHER_WORKER
    if event.step is Step.FREE:
        live_requests.free(event.request_id)
    else:
        live_requests.prefill_complete(event.request_id)
    return Outcome.APPLIED


def _add_to(
    live_requests: Ledger, rank: int, before: Step | None, event: Lifecycle, now: float
) -> Outcome:
    """Books a replica's request, of which the step `before` was heard before, if one was."""
    if before is Step.FREE:
        return Outcome.ENDED
    tokens = event.prefill_tokens if before is None else 0
    content = event.hashes, tokens, now, None, event.expected_output_tokens
    outcome = live_requests.add(event.request_id, rank, *content)
    if outcome == ledger.ADDED:
        return Outcome.APPLIED
    return Outcome.DUPLICATE if outcome == ledger.EXISTS else Outcome.FULL


def _refusal(outcome: int) -> Exception:
    if outcome == ledger.OVERFLOW:
        return Invalid("new_isl_tokens: the rank cannot count so many tokens")
    return Unavailable("the limit of live requests is reached")


def totals(of: Ledger) -> dict[str, int]:
    """Returns what a ledger counts that only grows."""
    stats = of.stats()
    counts = {name: stats[name] for name in ("added", "repeated", "freed", "expired", "removed")}
    return counts | {f"refused_{why}": count for why, count in stats["refused"].items()}
