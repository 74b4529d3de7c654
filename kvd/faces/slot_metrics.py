"""What /metrics says of running requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvd.metrics import BREATH, Family, Labels, by_label, counter, gauge
from kvd.slots import SlotTrackers, Tracker, totals
from kvd_core.ledger import Load

# Counters of the ledgers, by what each says.
LEDGER_COUNTERS = {
    "added": "Requests booked, those of replicas included",
    "repeated": "Retries of a booking that changed nothing",
    "freed": "Requests freed",
    "expired": "Requests dropped for their age",
    "removed": "Requests that went with their worker",
}
REFUSALS = ("exists", "full", "overflow", "output_blocks")


def slot_families(slots: SlotTrackers, most_ranks: int) -> Iterator[Family | None]:
    """Sums up all trackers; shows loads rank by rank up to `most_ranks` registered ranks.

    Only there a label holds names that clients chose, hence the bound.
    """
    sums = Counter(slots.ended)
    live = workers = ranks = 0
    for number, key in enumerate(list(slots.trackers), 1):
        tracker = slots.trackers.get(key)
        if tracker is not None:
            sums.update(totals(tracker.ledger))
            stats = tracker.ledger.stats()
            live += stats["requests"]
            ranks += stats["ranks"]
            workers += len(tracker.workers)
        if number % BREATH == 0:
            yield None
    yield gauge("kvd_slots_trackers", "Models and tenants with slot trackers", len(slots.trackers))
    yield gauge("kvd_slots_workers", "Registered workers", workers)
    yield gauge("kvd_slots_ranks", "Their ranks", ranks)
    yield gauge("kvd_slots_requests", "Live requests", live)
    for name, help in LEDGER_COUNTERS.items():
        yield counter(f"kvd_slots_requests_{name}_total", help, sums[name])
    help = "Bookings and output blocks refused"
    refused = {reason: sums[f"refused_{reason}"] for reason in REFUSALS}
    yield by_label("kvd_slots_refused_total", "counter", help, "reason", refused)
    help = "Trackers refused at the bound"
    yield counter("kvd_slots_trackers_refused_total", help, slots.refused_trackers)
    if ranks <= most_ranks:
        yield from _rank_families(slots)


def _rank_families(slots: SlotTrackers) -> Iterator[Family | None]:
    ranks = [
        (tracker, worker_id, dp_rank)
        for tracker in slots.select(None, None)
        for worker_id in sorted(tracker.workers)
        for dp_rank in tracker.workers[worker_id]
    ]
    loads: list[tuple[Labels, Load]] = []
    for number, (tracker, worker_id, dp_rank) in enumerate(ranks, 1):
        rank = tracker.ledger.rank_of(worker_id, dp_rank)
        if rank is not None:  # it may have gone during a rest
            loads.append((_labels(tracker, worker_id, dp_rank), tracker.ledger.load(rank)))
        if number % BREATH == 0:
            yield None
    help = "Prompt tokens that a rank has yet to process"
    tokens = [("", labels, load.prefill_tokens) for labels, load in loads]
    yield Family("kvd_slots_prefill_tokens", "gauge", help, tokens)
    help = "Distinct blocks of the requests that a rank works on"
    blocks = [("", labels, load.decode_blocks) for labels, load in loads]
    yield Family("kvd_slots_decode_blocks", "gauge", help, blocks)
    help = "Live requests of a rank"
    requests = [("", labels, load.requests) for labels, load in loads]
    yield Family("kvd_slots_rank_requests", "gauge", help, requests)


def _labels(tracker: Tracker, worker_id: int, dp_rank: int) -> Labels:
    return (
        ("model_name", tracker.key.model_name),
        ("tenant_id", tracker.key.tenant_id),
        ("worker_id", str(worker_id)),
        ("dp_rank", str(dp_rank)),
    )
