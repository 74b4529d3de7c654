"""Gathers evidence from the parts of the daemon.

Streams without a sign of trouble are passed over, and long walks let other tasks run between
slices, so that a diagnosis hardly slows the routing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import trio

from kvd.diagnosis.evidence import (
    CapacityEvidence,
    EndpointEvidence,
    Evidence,
    ExpiredEvidence,
    FaceEvidence,
    KvdEvidence,
    ModelEvidence,
    ProbeResult,
    ReplicaEvidence,
    ReplicaTraffic,
    SaltUsage,
    SelectionEvidence,
    SharedEvidence,
    ShareEvidence,
    StreamEvidence,
    UpstreamEvidence,
    WorkerEvidence,
)
from kvd.diagnosis.findings import partition_name
from kvd.diagnosis.growth import Growth
from kvd.gateway.choices import Choices
from kvd.gateway.following import DISAGREE
from kvd.gateway.upstream import Upstream
from kvd.gateway.upstreams import Upstreams
from kvd.http.auth import Authorizer
from kvd.index.partitions import Partition, State
from kvd.index.publishers import Publishers
from kvd.index.registry import Registry
from kvd.model import InstanceId, PartitionKey, RankKey
from kvd.replica_sync.replicas import Replicas
from kvd.selection.candidates import Candidates
from kvd.selection.service import Selections
from kvd.selection.stats import SelectionOutcome
from kvd.slots.live_requests import Moment
from kvd.slots.trackers import SlotTrackers
from kvd.wire.event_stream import EventStream, StreamHealth
from kvd.wire.lifecycle import Step
from kvd.wire.stream_link import ListenerStatus
from kvd_core.index.prefix_index import PromptStats

SLICE = 32  # streams, or models, between two checkpoints: 0.5 to 1 ms
# Requests of a rank above which its bookings count: with fewer, prompts of one prefix rightly go to
# one rank, and with more they could as well go elsewhere.
BUSY_REQUESTS = 4
MAX_SHARES = 4096  # workers whose bookings are counted; those of others are not

Counted = tuple[str, Hashable]  # a kind of counter, and its subject
Probes = Mapping[str, ProbeResult]  # by address
Shown = Callable[[], dict[str, Any] | None]  # returns the status of the shared state, if it is on


@dataclass(frozen=True, slots=True)
class DiagnosedParts:
    """The parts of the daemon that evidence is taken from."""

    state: State
    registry: Registry
    publishers: Publishers
    slots: SlotTrackers
    selections: Selections
    replicas: Replicas
    upstreams: Upstreams
    choices: Choices  # of the gateway
    authorizers: Mapping[str, Authorizer]  # by face, of those that are served
    failures: Mapping[str, Callable[[], int]]  # counts of failed writes, by content
    fleet_faults: Callable[[], Mapping[str, str]]  # why the fleet file is not in force, by part


class Gathering:
    """Takes evidence from the daemon, and counts the bookings of its busy ranks."""

    def __init__(self, parts: DiagnosedParts, now: float) -> None:
        self._parts = parts
        self._growth: Growth[Counted] = Growth(now)
        self.uncounted = 0  # bookings, beyond MAX_SHARES workers
        self._away: dict[str, float] = {}  # when each replica was first seen unconnected
        self._bookings: Counter[tuple[PartitionKey, int]] = Counter()
        parts.selections.reservations.moments.subscribe(self._note)

    def note_counters(self, now: float) -> None:
        """Notes unconnected replicas, and counters when due; to be called every few seconds."""
        away = [each.endpoint for each in self._parts.replicas.all() if not each.connected]
        self._away = {endpoint: self._away.get(endpoint, now) for endpoint in away}
        if self._growth.is_due(now):
            self._growth.take(self._event_counts(), now)

    def endpoints(self) -> list[str]:
        """Returns the addresses whose probes may show a fault."""
        replicas = self._parts.replicas
        found = [each.endpoint for each in replicas.all() if not each.connected]
        for listener in self._listeners():
            is_refused = bool(listener.stats.refused) and not listener.stats.messages
            if listener.status is ListenerStatus.PAUSED:
                continue
            if not listener.connected or is_refused:
                found.append(listener.endpoint)
            elif listener.replay_endpoint is not None:
                found.append(listener.replay_endpoint)
        return found

    async def gather(self, probes: Probes, shared: Shown) -> Evidence:
        """Returns the evidence of this moment."""
        parts, now = self._parts, trio.current_time()
        grown = self._growth.grown(self._event_counts())
        replicas = parts.replicas
        return Evidence(
            watched_s=self._growth.since_s(now),
            streams=await self._streams(probes),
            models=await self._models(),
            upstreams=tuple(self._upstreams()),
            kvds=tuple(
                KvdEvidence(str(each["url"]), str(each["problem"] or ""))
                for each in parts.choices.shown() or ()
            ),
            registered=frozenset(self._registered()),
            unknown=_counts_of(grown, "unknown"),
            endpoints=await self._shared_endpoints(),
            workers=await self._workers(),
            shares=tuple(self._shares(grown)),
            faces=tuple(
                FaceEvidence(name, grown["host", name], each.refused_host)
                for name, each in parts.authorizers.items()
            ),
            capacity=self._capacity(grown),
            selections=self._selections(grown),
            expired=(
                ExpiredEvidence("slot-tracker", grown["expired", "slots"], parts.slots.expiry_s),
                ExpiredEvidence(
                    "selection",
                    grown["expired", "selections"],
                    parts.selections.reservations.expiry_s,
                ),
            ),
            replicas=tuple(
                ReplicaEvidence(
                    each.endpoint,
                    0.0 if each.connected else now - self._away.get(each.endpoint, now),
                    each.last_error or "",
                    probes.get(each.endpoint),
                )
                for each in replicas.all()
            ),
            traffic=ReplicaTraffic(grown["replicas", "overflows"], grown["replicas", "missed"]),
            shared=_shared(shared()),
            fleet_faults=parts.fleet_faults(),
            unwritten=_counts_of(grown, "unwritten"),
            clock_lead_s=self._clock_lead_s(now),
        )

    def _upstreams(self) -> Iterator[UpstreamEvidence]:
        """Yields the engines behind the gateway, and the names that lead to none."""
        upstreams = self._parts.upstreams
        for each in upstreams:
            yield UpstreamEvidence(each.url, each.problem or "", _doubt(each))
        for wanted, name in upstreams.followed.items():
            if not name.urls:
                yield UpstreamEvidence(wanted.url, name.problem or "", "")

    # ---- counters

    def _note(self, moment: Moment) -> None:
        """Counts a booking of the sample if its rank is busy; replicas count their own."""
        live, candidates = moment.live, self._parts.selections.candidates.get(moment.key)
        if moment.step is not Step.ADD or moment.mirrored or live is None or candidates is None:
            return
        rank = candidates.ledger.rank_of(live.worker_id, live.dp_rank)
        if rank is None or candidates.ledger.load(rank).requests <= BUSY_REQUESTS:
            return
        worker = moment.key, live.worker_id
        if worker in self._bookings or len(self._bookings) < MAX_SHARES:
            self._bookings[worker] += 1
        else:
            self.uncounted += 1

    def _event_counts(self) -> dict[Counted, int]:
        """Returns the counters whose growth is evidence."""
        parts = self._parts
        stats = parts.replicas.stats
        totals: dict[Counted, int] = {
            ("capacity", "refused"): parts.state.budget.refused,
            ("expired", "slots"): parts.slots.expired,
            ("expired", "selections"): parts.selections.reservations.expired,
            ("replicas", "overflows"): stats.overflows,
            ("replicas", "missed"): stats.missed,
        }
        totals |= {("outcome", outcome): 0 for outcome in SelectionOutcome}
        for _, _, outcome, number in parts.selections.choice_stats.outcomes():
            totals["outcome", SelectionOutcome(outcome)] += number
        for name, each in parts.authorizers.items():
            totals["host", name] = each.refused["host"]
        for name, count in parts.failures.items():
            totals["unwritten", name] = count()
        for asked, number in parts.state.served.unknown.items():
            totals["unknown", PartitionKey(*asked)] = number
        for worker, number in self._bookings.items():
            totals["booking", worker] = number
        return totals

    # ---- the chain

    def _listeners(self) -> Iterable[EventStream]:
        yield from [each.listener for each in self._parts.registry.registrations()]
        yield from [each.listener for each in self._parts.publishers]

    async def _streams(self, probes: Probes) -> tuple[StreamEvidence, ...]:
        parts, found = self._parts, []
        for number, registration in enumerate(list(parts.registry.registrations()), 1):
            key, listener = registration.key, registration.listener
            partition = parts.state.partitions.get(key.partition)
            if partition is not None and _shows(listener, probes):
                of = partition_name(key.partition)
                subject = f"worker {key.instance_id} rank {key.dp_rank} of {of}"
                size = partition.block_size
                found.append(_stream(subject, key.partition, size, listener, probes, {}))
            if number % SLICE == 0:
                await trio.lowlevel.checkpoint()
        for number, each in enumerate(list(parts.publishers), 1):
            foreign = each.publication.mismatches
            if foreign or _shows(each.listener, probes):
                entry = each.described
                named = PartitionKey(entry.model_name, entry.tenant_id)
                subject = (
                    f"publisher {entry.instance_id} rank {entry.dp_rank} of {partition_name(named)}"
                )
                size = entry.block_size
                found.append(_stream(subject, named, size, each.listener, probes, foreign))
            if number % SLICE == 0:
                await trio.lowlevel.checkpoint()
        return tuple(found)

    async def _models(self) -> tuple[ModelEvidence, ...]:
        found = []
        for number, partition in enumerate(list(self._parts.state.partitions.values()), 1):
            found.append(_model(partition))
            if number % SLICE == 0:
                await trio.lowlevel.checkpoint()
        return tuple(found)

    def _registered(self) -> Iterable[PartitionKey]:
        parts = self._parts
        yield from parts.state.partitions
        yield from (
            key for key, candidates in parts.selections.candidates.items() if candidates.workers
        )
        yield from parts.slots.trackers

    async def _shared_endpoints(self) -> tuple[EndpointEvidence, ...]:
        found: dict[tuple[str, PartitionKey], list[RankKey]] = {}
        for number, registration in enumerate(list(self._parts.registry.registrations()), 1):
            key = registration.key
            found.setdefault((registration.listener.endpoint, key.partition), []).append(key)
            if number % SLICE == 0:
                await trio.lowlevel.checkpoint()
        return tuple(
            EndpointEvidence(*of, tuple(ranks)) for of, ranks in found.items() if len(ranks) > 1
        )

    async def _workers(self) -> tuple[WorkerEvidence, ...]:
        found = []
        for number, entry in enumerate(list(self._parts.selections.workers.entries.values()), 1):
            if entry.reasons:
                record = entry.record
                found.append(WorkerEvidence(record.worker_id, record.key, tuple(entry.reasons)))
            if number % SLICE == 0:
                await trio.lowlevel.checkpoint()
        return tuple(found)

    def _shares(self, grown: Mapping[Counted, int]) -> Iterable[ShareEvidence]:
        by_fleet: dict[PartitionKey, dict[int, int]] = {}
        for (key, worker_id), bookings in _counts_of(grown, "booking").items():
            by_fleet.setdefault(key, {})[worker_id] = bookings
        for key, shares in by_fleet.items():
            candidates = self._parts.selections.candidates.get(key)
            if candidates is not None:
                yield ShareEvidence(key, shares, len(_present(candidates)))

    def _capacity(self, grown: Mapping[Counted, int]) -> CapacityEvidence:
        budget = self._parts.state.budget
        return CapacityEvidence(
            budget.max_blocks,
            budget.blocks,
            budget.pairs,
            budget.refused,
            grown["capacity", "refused"],
        )

    def _selections(self, grown: Mapping[Counted, int]) -> SelectionEvidence:
        selections = self._parts.selections
        return SelectionEvidence(
            grown["outcome", SelectionOutcome.OVERLOADED],
            grown["outcome", SelectionOutcome.QUEUE_FULL],
            grown["outcome", SelectionOutcome.TIMED_OUT],
            grown["outcome", SelectionOutcome.SERVED],
            selections.scheduler.held,
            selections.options.max_held,
        )

    def _clock_lead_s(self, now: float) -> float:
        affinity = self._parts.selections.affinity
        if affinity is None or now - affinity.led_at > self._growth.since_s(now):
            return 0.0
        return affinity.lead_s


def _counts_of(grown: Mapping[Counted, int], kind: str) -> dict[Any, int]:
    """Returns the counters of a kind that have grown, by subject."""
    return {about: count for (each, about), count in grown.items() if each == kind and count}


def _shows(listener: EventStream, probes: Probes) -> bool:
    """Returns whether a stream shows a sign of trouble, or its replay endpoint was probed."""
    return (
        listener.health(trio.current_time()) is not StreamHealth.EXACT
        or listener.restarted_at is not None
        or bool(listener.ignored)
        or listener.replay_endpoint in probes
    )


def _stream(
    subject: str,
    key: PartitionKey,
    block_size: int,
    listener: EventStream,
    probes: Probes,
    foreign: Mapping[str, int],
) -> StreamEvidence:
    now, stats, link = trio.current_time(), listener.stats, listener.link
    at, flaw = listener.restarted_at, listener.batches.last_flaw
    return StreamEvidence(
        subject=subject,
        key=key,
        endpoint=listener.endpoint,
        replay_endpoint=listener.replay_endpoint,
        has_key=listener.server_key is not None,
        block_size=block_size,
        is_paused=listener.status is ListenerStatus.PAUSED,
        is_connected=listener.connected,
        last_error=link.last_error or "",
        is_degraded=listener.health(now) is StreamHealth.DEGRADED,
        quiet=link.quiet or "",
        quiet_s=now - link.quiet_since,
        messages=stats.messages,
        bad_frames=dict(stats.bad_frames),
        batches_flawed=stats.flawed,
        flaw="" if flaw is None else flaw[1],
        joins=stats.joins,
        restarts=stats.restarts,
        restarted_s=None if at is None else now - at,
        gaps=stats.gaps,
        lost=stats.lost,
        crashes=stats.crashes,
        dropped=stats.dropped,
        replays=dict(stats.replays),
        strays=stats.strays,
        loss=listener.loss,
        ignored=dict(listener.ignored),
        foreign=dict(foreign),
        probe=probes.get(listener.endpoint),
        replay_probe=probes.get(listener.replay_endpoint or ""),
    )


def _doubt(upstream: Upstream) -> str:
    """Returns why the events of an engine are not believed."""
    return upstream.advice if upstream.advice == DISAGREE else ""


def _model(partition: Partition) -> ModelEvidence:
    index = partition.index
    stats = index.stats()
    return ModelEvidence(
        partition.key,
        partition.block_size,
        stats["blocks"],
        stats["parked_now"],
        index.questions,
        index.matched,
        partition.is_unmatched,
        _side(index.asked()),
        _side(index.announced()),
        _with_holes(partition.ranks),
    )


def _side(stats: PromptStats) -> SaltUsage:
    return SaltUsage(
        prompts=stats.prompts,
        salted=stats.salted,
        adapted=stats.adapted,
        announcing_salts=stats.announcing_salts,
        first_tokens=frozenset(stats.first_tokens),
    )


def _with_holes(ranks: Mapping[InstanceId, set[int]]) -> dict[InstanceId, frozenset[int]]:
    """Returns the ranks of those instances whose rank numbers have holes."""
    return {
        instance_id: frozenset(each)
        for instance_id, each in ranks.items()
        if max(each) - min(each) >= len(each)
    }


def _present(candidates: Candidates) -> list[int]:
    """Returns the workers of a model and tenant that have a rank which can be chosen."""
    return [
        record.worker_id
        for record in candidates.workers.values()
        if any(
            (absence := candidates.absent.get((record.worker_id, each))) is None
            or absence.reachable
            for each in record.ranks
        )
    ]


def _shared(shown: Mapping[str, Any] | None) -> SharedEvidence | None:
    if shown is None:
        return None
    fault = str(shown["fault"] or "")
    return SharedEvidence(shown["server"], shown["connected"], shown["behind"], fault)
