"""What metrics say of event streams and of the index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kvd.index.partitions import State
from kvd.telemetry.metrics import BREATH, Family, by_label, counter, gauge
from kvd.wire.counts import StreamCounts
from kvd.wire.event_stream import EventStream, ListenerStatus, Quiet, StreamHealth
from kvd.wire.replay import ReplayEnd
from kvd_core.zmq.drain import BAD_FRAME_COUNT, BAD_SEQUENCE

BAD_MESSAGES = (BAD_FRAME_COUNT, BAD_SEQUENCE)

# Counters of a listener that are summed over all of them, and what each says.
LISTENER_COUNTERS = {
    "messages": "Well-formed messages of engines",
    "payload_bytes": "Payload bytes of these",
    "stale": "Messages ignored because their number had been passed",
    "gaps": "Times that messages of an engine were missing",
    "replayed": "Missing messages that a replay brought",
    "lost": "Missing messages that were given up",
    "dropped": "Messages that found no room among those that wait; they show as gaps",
    "strays": "Messages in replays that were no answer to what was asked",
    "spared_replays": "Replays not requested because the server had just been silent",
    "restarts": "Engines that were started again",
    "superseded": "Times that an engine's own history took the place of a peer's blocks",
    "flawed": "Batches that could not be understood wholly",
    "joins": "Connections on which an engine answered",
    "losses": "Of these, connections that broke",
    "crashes": "Bugs, each of which cost a batch and the connection",
    "failures": "Sockets that could not be connected or had to be given up",
    "unreachable": "Times that an engine could not be reached for engine_stale_s",
    "silent": "Times that nothing came over a new connection for engine_stale_s",
}


def listener_families(
    listeners: Iterable[EventStream], left: StreamCounts, now: float
) -> Iterator[Family | None]:
    """Sums up `listeners` at the moment `now`; `left` counts for those that are no more."""
    totals = StreamCounts()
    totals.add(left)
    statuses: dict[str, int] = dict.fromkeys(sorted(ListenerStatus), 0)
    streams: dict[str, int] = dict.fromkeys(StreamHealth, 0)
    quiet: dict[str, int] = dict.fromkeys(Quiet, 0)
    for number, listener in enumerate(listeners, 1):
        totals.add(listener)
        statuses[listener.status] += 1
        streams[listener.health(now)] += 1
        if listener.quiet is not None:
            quiet[listener.quiet] += 1
        if number % BREATH == 0:
            yield None
    help = "Number of ZMQ listeners by status"
    yield by_label("dynamo_kvindexer_listeners", "gauge", help, "status", statuses)
    help = "Event streams by how far the index can be believed for them"
    yield by_label("kvd_streams", "gauge", help, "state", streams)
    help = "Event streams over which nothing has come for engine_stale_s, by why"
    yield by_label("kvd_quiet_streams", "gauge", help, "why", quiet)
    for name, help in LISTENER_COUNTERS.items():
        yield counter(f"kvd_listener_{name}_total", help, getattr(totals, name))
    help = "Messages of engines refused for their shape"
    bad = dict.fromkeys(BAD_MESSAGES, 0) | totals.bad_frames
    yield by_label("kvd_bad_messages_total", "counter", help, "reason", bad)
    help = "Replays by how they ended"
    ends = dict.fromkeys(map(str, ReplayEnd), 0) | totals.replays
    yield by_label("kvd_replays_total", "counter", help, "end", ends)


# Sums over all partitions: name of the family, key in PrefixIndex.stats(), help.
INDEX_GAUGES = (
    ("kvd_index_blocks", "blocks", "Distinct blocks in the index"),
    ("kvd_index_chains", "chains", "Chains they are stored in"),
    ("kvd_index_bytes", "bytes", "Memory of the index in bytes, estimated"),
    ("kvd_parked_blocks", "parked_now", "Blocks whose parent is unknown, set aside"),
)
# The same, those that have ended included (State.ended_totals).
INDEX_COUNTERS = (
    ("kvd_questions_total", "questions", "Prompts looked up while there were blocks"),
    ("kvd_questions_matched_total", "matched", "Of these, those that some rank had a part of"),
    ("kvd_parked_blocks_dropped_total", "parked_dropped", "Parked blocks lost to the bound"),
    (
        "kvd_parked_blocks_unsalted_total",
        "parked_unsalted",
        "Parked blocks placed that were hashed without the salt of their prompt",
    ),
    ("kvd_unknown_blocks_removed_total", "removed_unknown", "Removals of blocks not held"),
    ("kvd_rebound_blocks_total", "rebound", "Engine hashes that came back with other content"),
)


def state_families(state: State, instances: int) -> Iterator[Family | None]:
    """Says what is indexed; `instances` is the number of registered ones."""
    sums = dict.fromkeys((name for _, name, _ in INDEX_GAUGES), 0) | state.ended_totals
    held: dict[str, int] = {}
    recovered = unmatched = 0
    for number, partition in enumerate(list(state.sized.values()), 1):
        stats: dict[str, Any] = {**partition.index.stats()}
        for name in sums:
            sums[name] += stats[name]
        for tier, count in stats["held"].items():
            held[tier] = held.get(tier, 0) + count
        recovered += len(partition.workers.keys() - partition.ranks.keys())
        unmatched += partition.is_unmatched
        if number % BREATH == 0:
            yield None
    help = "Number of active model+routing-group indexers"
    yield gauge("dynamo_kvindexer_models", help, len(state.partitions))
    yield gauge("dynamo_kvindexer_workers", "Number of registered worker instances", instances)
    help = "Instances known from a peer's dump that have not registered"
    yield gauge("kvd_recovered_workers", help, recovered)
    help = "Models and tenants that are asked about and never match, although blocks are held"
    yield gauge("kvd_unmatched_models", help, unmatched)
    yield by_label("kvd_blocks", "gauge", "(rank, block) pairs by tier", "tier", held)
    for family, name, help in INDEX_GAUGES:
        yield gauge(family, help, sums[name])
    for family, name, help in INDEX_COUNTERS:
        yield counter(family, help, sums[name])
    budget = state.budget
    help = "Bound of the blocks and of the (rank, block) pairs, 0 without one"
    yield gauge("kvd_index_max_blocks", help, budget.max_blocks)
    help = "(rank, block) pairs in the index, on whatever tiers"
    yield gauge("kvd_index_pairs", help, budget.pairs)
    help = "Blocks told that there was no room for, each time that they were"
    yield counter("kvd_index_refused_blocks_total", help, budget.refused)
    yield from _ingest_families(state)


def _ingest_families(state: State) -> Iterator[Family]:
    totals = state.ingest.as_dict()
    kinds = {kind: totals[kind] for kind in ("stored", "removed", "cleared")}
    yield counter("kvd_batches_total", "Event batches applied", totals["batches"])
    yield by_label("kvd_events_total", "counter", "Events understood", "type", kinds)
    help = "Events understood that had no effect"
    yield by_label("kvd_events_ignored_total", "counter", help, "reason", totals["ignored"])
    help = "Events and batches that could not be read"
    yield by_label("kvd_bad_events_total", "counter", help, "reason", totals["bad"])
    help = "Partitions refused at the bound"
    yield counter("kvd_partitions_refused_total", help, state.refused_partitions)
    help = "Partitions of a dump that gave way to a registration with another block size"
    yield counter("kvd_partitions_replaced_total", help, state.replaced_partitions)
    help = "Unregistrations during recovery that were not noted, at the bound"
    yield counter("kvd_departures_unnoted_total", help, state.unnoted_departures)
