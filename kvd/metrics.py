"""What /metrics says, in the Prometheus text format 0.0.4.

    RequestMetrics   counts requests as they are answered (the HTTP servers' Observer)
    Family           one metric: name, type, help, its samples
    render           families -> pieces of text

Everything but requests is read at the scrape. A generator of families yields None where other
work may go on, so a scrape of thousands of listeners or partitions does not stall the loop. Labels
come from closed sets; models, tenants and workers are named only where their number is bounded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from resource import getpagesize
from typing import Any

from kvd.state import State
from kvd.wire.counts import StreamCounts
from kvd.wire.listener import Listener, ListenerStatus, Quiet, StreamHealth
from kvd.wire.replay import ReplayEnd
from kvd_core.drain import BAD_FRAME_COUNT, BAD_SEQUENCE

CONTENT_TYPE = b"text/plain; version=0.0.4"
METRICS_PATH = "/metrics"  # scrapes themselves are not observed

# Upper bounds in seconds: 0.1 ms doubled 19 times, as on the original.
BUCKETS = tuple(0.0001 * 2**k for k in range(20))

BREATH = 64  # partitions, listeners or series between two rests: about 0.2 ms

BAD_MESSAGES = (BAD_FRAME_COUNT, BAD_SEQUENCE)

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric; a sample is a suffix of the name, its labels and its value."""

    name: str
    type: str
    help: str
    samples: Iterable[tuple[str, Labels, float]]


Source = Callable[[], Iterator[Family | None]]


def counter(name: str, help: str, value: float) -> Family:
    return Family(name, "counter", help, [("", (), value)])


def gauge(name: str, help: str, value: float) -> Family:
    return Family(name, "gauge", help, [("", (), value)])


def by_label(name: str, type: str, help: str, label: str, values: Mapping[str, float]) -> Family:
    """Returns a family with one sample for each value of its only label."""
    return Family(name, type, help, [("", ((label, key),), n) for key, n in values.items()])


def render(families: Iterable[Family | None]) -> Iterator[bytes]:
    """Yields the text family by family, and nothing (b"") where they rest, or one is long."""
    for family in families:
        if family is None:
            yield b""
        else:
            yield from _family(family)


def _family(family: Family) -> Iterator[bytes]:
    lines = [f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.type}"]
    for suffix, labels, value in family.samples:
        if len(lines) > BREATH:
            yield _joined(lines)
            yield b""
            lines = []
        text = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels)
        lines.append(
            f"{family.name}{suffix}{{{text}}} {value}" if text else f"{family.name}{suffix} {value}"
        )
    yield _joined(lines)


def _joined(lines: list[str]) -> bytes:
    return "\n".join([*lines, ""]).encode()


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class Histogram:
    """How often a value was at most each of some bounds, without those below the one before."""

    __slots__ = ("bounds", "buckets", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.buckets = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.buckets[bisect_left(self.bounds, value)] += 1
        self.sum += value


@dataclass(slots=True)
class _Endpoint:
    methods: dict[str, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    seconds: Histogram = field(default_factory=lambda: Histogram(BUCKETS))


class RequestMetrics:
    """Requests by path, method and outcome. A path appears with its first request."""

    def __init__(self, prefix: str) -> None:
        """Names of the metrics begin with `prefix`."""
        self._prefix = prefix
        self._endpoints: dict[str, _Endpoint] = {}

    def observe(self, path: str, method: str, status: int, seconds: float) -> None:
        """Counts one request to a path that some route has."""
        if path == METRICS_PATH:
            return
        endpoint = self._endpoints.get(path)
        if endpoint is None:
            endpoint = self._endpoints[path] = _Endpoint()
        endpoint.methods[method] = endpoint.methods.get(method, 0) + 1
        endpoint.seconds.observe(seconds)
        if status >= 400:
            kind = "4xx" if status < 500 else "5xx"
            endpoint.errors[kind] = endpoint.errors.get(kind, 0) + 1

    def families(self) -> Iterator[Family | None]:
        ordered = sorted(self._endpoints.items())
        errors = [
            ("", (("endpoint", path), ("status_class", kind)), count)
            for path, endpoint in ordered
            for kind, count in sorted(endpoint.errors.items())
        ]
        requests = [
            ("", (("endpoint", path), ("method", method)), count)
            for path, endpoint in ordered
            for method, count in sorted(endpoint.methods.items())
        ]
        # A family without samples is not announced: series appear once they are hit.
        if errors:
            help = "HTTP error responses (4xx/5xx)"
            yield Family(f"{self._prefix}_errors_total", "counter", help, errors)
        if requests:
            name = f"{self._prefix}_request_duration_seconds"
            bounds = [f"{bound:.4f}" for bound in BUCKETS]
            samples = [
                sample
                for path, one in ordered
                for sample in histogram_samples(
                    bounds, one.seconds.buckets, one.seconds.sum, (("endpoint", path),)
                )
            ]
            yield Family(name, "histogram", "HTTP request latency", samples)
            help = "Total HTTP requests"
            yield Family(f"{self._prefix}_requests_total", "counter", help, requests)

    def durations(self, paths: Iterable[str]) -> tuple[list[int], float]:
        """Returns how many requests to these paths took how long, by BUCKETS, and their sum."""
        endpoints = [self._endpoints[path] for path in paths if path in self._endpoints]
        none = [0] * (len(BUCKETS) + 1)
        columns = zip(none, *(each.seconds.buckets for each in endpoints), strict=True)
        return [sum(column) for column in columns], sum(each.seconds.sum for each in endpoints)


def histogram_samples(
    bounds: Iterable[str], buckets: Sequence[int], sum_: float, labels: Labels = ()
) -> Iterator[tuple[str, Labels, float]]:
    """Yields the samples of one histogram; `buckets` has one more than there are bounds."""
    for bound, count in zip([*bounds, "+Inf"], accumulate(buckets), strict=True):
        yield "_bucket", (*labels, ("le", bound)), count
    yield "_sum", labels, sum_
    yield "_count", labels, sum(buckets)


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
    listeners: Iterable[Listener], left: StreamCounts, now: float
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


def stats_families(prefix: str, stats: Any, help: str, gauges: frozenset[str]) -> Iterator[Family]:
    """Shows every number of a dataclass of plain counters as `<prefix>_<field>_total`."""
    for each in fields(stats):
        value = getattr(stats, each.name)
        if each.name in gauges:
            yield gauge(f"{prefix}_{each.name}", help, value)
        else:
            name = each.name.removesuffix("_total")
            yield counter(f"{prefix}_{name}_total", help, value)


def memory_families() -> Iterator[Family]:
    """Says what the kernel says of this process, where it does (Linux)."""
    try:
        with open("/proc/self/statm") as statm:
            pages = statm.read().split()
    except OSError:
        return
    resident = int(pages[1]) * getpagesize()
    yield gauge("process_resident_memory_bytes", "Resident memory of the process", resident)
