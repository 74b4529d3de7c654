"""Plain slot trackers with the rules of `kvd/slots/trackers.py`, over plain ledgers.

Every step returns the events for the replicas, and every event from a replica its outcome.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from kvd.wire.lifecycle import Lifecycle, Outcome, Step
from tests.models.ledger_model import ADDED, ModelLedger

Published = list[tuple[Step, str, int, int, list[int], int]]
Row = tuple[str, str, int, int, int, int]  # model, tenant, worker, rank, tokens, blocks


@dataclass
class ModelTracker:
    block_size: int
    ledger: ModelLedger = field(default_factory=ModelLedger)
    workers: dict[int, int] = field(default_factory=dict)  # number of ranks, by worker id


class ModelSlots:
    def __init__(self, expiry_s: float) -> None:
        self.expiry_s = expiry_s
        self.trackers: dict[tuple[str, str], ModelTracker] = {}

    def register(self, key: tuple[str, str], worker: int, block_size: int, ranks: int) -> bool:
        tracker = self.trackers.get(key) or ModelTracker(block_size)
        if worker in tracker.workers or tracker.block_size != block_size:
            return False
        self.trackers[key] = tracker
        tracker.workers[worker] = ranks
        for rank in range(ranks):
            tracker.ledger.add_rank((worker, rank))
        return True

    def unregister(self, key: tuple[str, str], worker: int) -> Published | None:
        """Returns the events for replicas; None if there is no such worker."""
        tracker = self.trackers.get(key)
        if tracker is None or worker not in tracker.workers:
            return None
        published: Published = []
        for rank in range(tracker.workers.pop(worker)):
            for name in tracker.ledger.remove_rank((worker, rank)):
                published.append((Step.FREE, name, worker, rank, [], 0))
        if not tracker.workers:
            del self.trackers[key]
        return published

    def add(
        self,
        key: tuple[str, str],
        name: str,
        place: tuple[int, int],
        hashes: list[int],
        tokens: int,
        now: float,
        retry_key: str | None,
    ) -> Published | None:
        tracker = self.trackers.get(key)
        if tracker is None or place not in tracker.ledger.ranks:
            return None
        if tracker.ledger.add(name, place, hashes, tokens, now, retry_key) != ADDED:
            return []
        return [(Step.ADD, name, *place, hashes, tokens)]

    def step(self, key: tuple[str, str], name: str, step: Step) -> Published | None:
        """Completes the prefill of a request, or frees it; None if there is no tracker."""
        tracker = self.trackers.get(key)
        if tracker is None:
            return None
        live = tracker.ledger.requests.get(name)
        if live is None:
            return []
        self._apply(tracker.ledger, name, step)
        return [(step, name, *live.rank, [], 0)]

    def expire(self, now: float) -> None:
        for tracker in self.trackers.values():
            tracker.ledger.expire(now - self.expiry_s, len(tracker.ledger.requests))

    def apply(self, event: Lifecycle, now: float) -> Outcome:
        tracker = self.trackers.get(tuple(event.partition))
        if tracker is None:
            return Outcome.UNKNOWN_MODEL
        if tracker.block_size != event.block_size:
            return Outcome.BLOCK_SIZE
        if event.worker_id not in tracker.workers:
            return Outcome.UNKNOWN_WORKER
        ledger, place = tracker.ledger, (event.worker_id, event.dp_rank)
        if place not in ledger.ranks:
            return Outcome.UNKNOWN_RANK
        live = ledger.requests.get(event.request_id)
        if event.step is Step.ADD:
            if live is not None:
                return Outcome.DUPLICATE
            hashes = array("Q", event.hashes).tolist()
            ledger.add(event.request_id, place, hashes, event.prefill_tokens, now, None)
            return Outcome.APPLIED
        if live is None:
            return Outcome.UNKNOWN_REQUEST
        if live.rank != place:
            return Outcome.OTHER_WORKER
        self._apply(ledger, event.request_id, event.step)
        return Outcome.APPLIED

    def _apply(self, ledger: ModelLedger, name: str, step: Step) -> None:
        if step is Step.FREE:
            ledger.free(name)
        else:
            ledger.prefill_complete(name)

    def loads(self) -> list[Row]:
        return [
            (*key, *place, *tracker.ledger.load(place)[:2])
            for key, tracker in sorted(self.trackers.items())
            for place in sorted(tracker.ledger.ranks)
        ]

    def projection(self, key: tuple[str, str], hashes: list[int]) -> list[tuple[int, ...]]:
        """Returns rows of worker, rank, prefill tokens, decode blocks, requests."""
        ledger = self.trackers[key].ledger
        rows = []
        for place in sorted(ledger.ranks):
            tokens, blocks, requests = ledger.load(place)
            new = len(hashes) - ledger.depth(place, hashes)
            rows.append((*place, tokens, blocks + new, requests))
        return rows
