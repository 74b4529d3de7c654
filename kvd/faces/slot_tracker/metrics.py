"""Families of /metrics about running requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvd.faces.common.rank_metrics import Rank, rank_families
from kvd.slots.trackers import SlotTrackers, ledger_stats
from kvd.telemetry.metrics import BREATH, Family, by_label, counter, gauge

# Counters of the ledgers, each with its HELP.
LEDGER_COUNTERS = {
    "added": "Number of requests added, those of replicas included",
    "repeated": "Number of repeated requests to add, which changed nothing",
    "freed": "Number of requests freed",
    "expired": "Number of requests dropped for their age",
    "removed": "Number of requests removed with their worker",
}
REFUSALS = ("exists", "full", "overflow", "output_blocks")


def slot_families(slots: SlotTrackers, most_ranks: int) -> Iterator[Family | None]:
    """Yields sums over all trackers, and the load of each rank while there are few enough.

    That is, at most `most_ranks` registered ranks.
    """
    sums = Counter(slots.ended)
    sums.update(expired=slots.expired, removed=slots.removed)
    live = workers = ranks = 0
    for number, key in enumerate(list(slots.trackers), 1):
        tracker = slots.trackers.get(key)
        if tracker is not None:
            sums.update(ledger_stats(tracker.ledger))
            stats = tracker.ledger.stats()
            live += stats["requests"]
            ranks += stats["ranks"]
            workers += len(tracker.workers)
        if number % BREATH == 0:
            yield None
    yield gauge(
        "kvd_slots_trackers",
        "Number of (model, tenant) pairs with a slot tracker",
        len(slots.trackers),
    )
    yield gauge("kvd_slots_workers", "Number of registered workers", workers)
    yield gauge("kvd_slots_ranks", "Number of ranks of the registered workers", ranks)
    yield gauge("kvd_slots_requests", "Number of live requests", live)
    for name, help in LEDGER_COUNTERS.items():
        yield counter(f"kvd_slots_requests_{name}_total", help, sums[name])
    help = "Number of requests and output blocks refused, by reason"
    refused = {reason: sums[f"refused_{reason}"] for reason in REFUSALS}
    yield by_label("kvd_slots_refused_total", "counter", help, "reason", refused)
    help = "Number of requests freed because their client left before its answer"
    yield counter("kvd_slots_given_back_total", help, slots.given_back)
    help = "Number of ends received from replicas that still wait for their requests"
    yield gauge("kvd_slots_early_ends", help, len(slots.early))
    help = "Number of ends received before their requests and forgotten at the limit"
    yield counter("kvd_slots_early_ends_forgotten_total", help, slots.early.forgotten)
    help = "Number of slot trackers refused at the limit"
    yield counter("kvd_slots_trackers_refused_total", help, slots.refused_trackers)
    if ranks <= most_ranks:
        names = ("prefill_tokens", "decode_blocks", "rank_requests")
        yield from rank_families(list(_ranks(slots)), *(f"kvd_slots_{name}" for name in names))


def _ranks(slots: SlotTrackers) -> Iterator[Rank]:
    for tracker in slots.select(None, None):
        for worker_id in sorted(tracker.workers):
            for dp_rank in tracker.workers[worker_id]:
                yield tracker.key, tracker.ledger, worker_id, dp_rank
