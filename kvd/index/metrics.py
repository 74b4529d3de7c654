"""Families of /metrics about event streams and the index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kvd.index.partitions import State
from kvd.telemetry.metrics import BREATH, Family, by_label, counter, gauge
from kvd.wire.event_stream import EventStream, StreamHealth
from kvd.wire.replay import ReplayEnd
from kvd.wire.stream_link import ListenerStatus, Quiet
from kvd.wire.stream_stats import StreamStats
from kvd_core.index.chronicle import Chronicle
from kvd_core.index.prefix_index import TIERS
from kvd_core.zmq.drain import BAD_FRAME_COUNT, BAD_NUMBER, BAD_SEQUENCE, TOO_LARGE

BAD_MESSAGES = (BAD_FRAME_COUNT, BAD_SEQUENCE, BAD_NUMBER, TOO_LARGE)

# Counters that are summed over all listeners, with the help of their metrics.
LISTENER_COUNTERS = {
    "messages": "Number of well-formed messages received from engines",
    "payload_bytes": "Total payload bytes of the messages received from engines",
    "stale": "Number of messages ignored because their sequence number had been passed",
    "gaps": "Number of gaps found in the messages of engines",
    "replayed": "Number of missing messages recovered by replays",
    "lost": "Number of missing messages given up as lost",
    "dropped": "Number of messages dropped because the queue was full; each leaves a gap",
    "strays": "Number of replay messages that answered no request",
    "spared_replays": "Number of replays skipped because the previous replay had brought nothing",
    "restarts": "Number of engine restarts detected",
    "superseded": "Number of times that an engine's history replaced blocks of a dump",
    "flawed": "Number of batches with a part that could not be read",
    "joins": "Number of connections on which an engine answered",
    "losses": "Number of established connections to engines that broke",
    "crashes": "Number of bugs that cost a batch and its connection",
    "failures": "Number of sockets to engines that could not be connected or had to be closed",
    "unreachable": "Number of times that an engine stayed unreachable for engine_stale_s",
    "silent": "Number of times that a new connection stayed silent for engine_stale_s",
}


def listener_families(
    listeners: Iterable[EventStream], left: StreamStats, now: float
) -> Iterator[Family | None]:
    """Sums up `listeners` at the moment `now`; `left` has the sums of ended listeners."""
    totals = StreamStats()
    totals.add(left)
    statuses: dict[str, int] = dict.fromkeys(sorted(ListenerStatus), 0)
    streams: dict[str, int] = dict.fromkeys(StreamHealth, 0)
    quiet: dict[str, int] = dict.fromkeys(Quiet, 0)
    for number, listener in enumerate(listeners, 1):
        totals.add(listener.stats)
        statuses[listener.status] += 1
        streams[listener.health(now)] += 1
        if listener.link.quiet is not None:
            quiet[listener.link.quiet] += 1
        if number % BREATH == 0:
            yield None
    help = "Number of ZMQ listeners by status"
    yield by_label("dynamo_kvindexer_listeners", "gauge", help, "status", statuses)
    help = "Number of event streams by state: exact, degraded, recovering or stale"
    yield by_label("kvd_streams", "gauge", help, "state", streams)
    help = "Number of event streams without a message for engine_stale_s, by reason"
    yield by_label("kvd_quiet_streams", "gauge", help, "why", quiet)
    for name, help in LISTENER_COUNTERS.items():
        yield counter(f"kvd_listener_{name}_total", help, getattr(totals, name))
    help = "Number of messages of engines refused for their framing, by reason"
    bad = dict.fromkeys(BAD_MESSAGES, 0) | totals.bad_frames
    yield by_label("kvd_bad_messages_total", "counter", help, "reason", bad)
    help = "Number of replays, by how they ended"
    ends = dict.fromkeys(map(str, ReplayEnd), 0) | totals.replays
    yield by_label("kvd_replays_total", "counter", help, "end", ends)


# Sums over all partitions: name of the family, key in PrefixIndex.stats(), help.
INDEX_GAUGES = (
    ("kvd_index_blocks", "blocks", "Number of distinct blocks in the index"),
    ("kvd_index_chains", "chains", "Number of chains that store the blocks of the index"),
    ("kvd_index_bytes", "bytes", "Estimated memory of the index in bytes"),
    (
        "kvd_parked_blocks",
        "parked_now",
        "Number of blocks set aside because their parent is unknown",
    ),
)
# The same for counters; these include ended partitions (State.ended_totals).
INDEX_COUNTERS = (
    (
        "kvd_questions_total",
        "questions",
        "Number of prompts looked up, but for the conductor's, while the index held blocks",
    ),
    (
        "kvd_questions_matched_total",
        "matched",
        "Number of prompts looked up, but for the conductor's, that matched at least one block",
    ),
    (
        "kvd_parked_blocks_dropped_total",
        "parked_dropped",
        "Number of parked blocks dropped at the limit",
    ),
    (
        "kvd_parked_blocks_unsalted_total",
        "parked_unsalted",
        "Number of parked blocks indexed although they were hashed without their prompt's salt",
    ),
    (
        "kvd_unknown_blocks_removed_total",
        "removed_unknown",
        "Number of removals of blocks that the index did not hold",
    ),
    (
        "kvd_rebound_blocks_total",
        "rebound",
        "Number of engine hashes that were announced again with other content",
    ),
)


def state_families(state: State, instances: int) -> Iterator[Family | None]:
    """Yields the families of the index; `instances` is the number of registered instances."""
    sums = dict.fromkeys((name for _, name, _ in INDEX_GAUGES), 0) | state.ended_totals
    held = dict.fromkeys(TIERS, 0)
    recovered = unmatched = 0
    for number, partition in enumerate(list(state.sized.values()), 1):
        stats: dict[str, Any] = {**partition.index.stats()}
        for name in sums:
            sums[name] += stats[name]
        for tier, count in stats["held"].items():
            held[tier] += count
        recovered += len(partition.workers.keys() - partition.ranks.keys())
        unmatched += partition.is_unmatched
        if number % BREATH == 0:
            yield None
    help = "Number of active model+routing-group indexers"
    yield gauge("dynamo_kvindexer_models", help, len(state.partitions))
    yield gauge("dynamo_kvindexer_workers", "Number of registered worker instances", instances)
    help = "Number of instances known from a peer's dump that have not registered"
    yield gauge("kvd_recovered_workers", help, recovered)
    help = "Number of indexed (model, tenant) pairs whose queries never match"
    yield gauge("kvd_unmatched_models", help, unmatched)
    yield by_label("kvd_blocks", "gauge", "Number of (rank, block) pairs by tier", "tier", held)
    for family, name, help in INDEX_GAUGES:
        yield gauge(family, help, sums[name])
    for family, name, help in INDEX_COUNTERS:
        yield counter(family, help, sums[name])
    budget = state.budget
    help = "Maximum number of blocks and of (rank, block) pairs; 0 means unlimited"
    yield gauge("kvd_index_max_blocks", help, budget.max_blocks)
    help = "Number of (rank, block) pairs in the index over all tiers"
    yield gauge("kvd_index_pairs", help, budget.pairs)
    help = "Number of announced blocks refused because the index was full"
    yield counter("kvd_index_refused_blocks_total", help, budget.refused)
    yield from _chronicle_families(state.chronicle)
    yield from _ingest_families(state)


def _chronicle_families(chronicle: Chronicle | None) -> Iterator[Family]:
    noted, overwritten = (0, 0) if chronicle is None else (chronicle.noted, chronicle.overwritten)
    help = "Number of stores, evictions and clears recorded for explanations"
    yield counter("kvd_index_chronicle_changes_total", help, noted)
    help = "Number of recorded stores, evictions and clears overwritten by newer ones"
    yield counter("kvd_index_chronicle_overwritten_total", help, overwritten)


def _ingest_families(state: State) -> Iterator[Family]:
    totals = state.ingest.as_dict()
    kinds = {kind: totals[kind] for kind in ("stored", "removed", "cleared")}
    help = "Number of event batches of workers applied"
    yield counter("kvd_batches_total", help, totals["batches"])
    help = "Number of events of workers understood, by type"
    yield by_label("kvd_events_total", "counter", help, "type", kinds)
    help = "Number of events of workers understood but ignored, by reason"
    yield by_label("kvd_events_ignored_total", "counter", help, "reason", totals["ignored"])
    help = "Number of events and batches of workers that could not be read, by reason"
    yield by_label("kvd_bad_events_total", "counter", help, "reason", totals["bad"])
    help = "Number of (model, tenant) pairs refused at the limit"
    yield counter("kvd_partitions_refused_total", help, state.refused_partitions)
    help = "Number of dumped (model, tenant) pairs replaced for another block size"
    yield counter("kvd_partitions_replaced_total", help, state.replaced_partitions)
    help = "Number of unregistrations during recovery that were not recorded, at the limit"
    yield counter("kvd_departures_unnoted_total", help, state.unnoted_departures)
