"""Writes the list of registered instances, rank by rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator

from kvd.faces.common import bodies
from kvd.index.partitions import Partition, State
from kvd.index.registry import Registration, Registry, by_instance
from kvd.model import RankKey
from kvd.wire.event_stream import EventStream, StreamHealth
from kvd.wire.stream_link import ListenerStatus

# Ranks examined or written between two checkpoints: at most about 1 ms.
SLICE_RANKS = 64

# An instance shows the most alarming status of its listeners.
STATUS_ORDER = (
    ListenerStatus.FAILED,
    ListenerStatus.PENDING,
    ListenerStatus.ACTIVE,
    ListenerStatus.PAUSED,
)

Instance = tuple[Partition, list[Registration]]


def instances_of(state: State, registrations: Iterable[Registration]) -> Iterator[Instance | None]:
    """Yields the instances of registrations; None where other tasks may run."""
    partitions = dict(state.partitions)
    for ranks in by_instance(registrations):
        yield None if ranks is None else (partitions[ranks[0].key.partition], ranks)


def listed(instances: Iterable[Instance | None], now: float) -> Iterator[bytes]:
    """Yields a JSON array of instances, and b"" where other tasks may run, also for a None.

    An instance is shown in the state that it has when it is written. One that is unregistered
    meanwhile is still listed.
    """
    separator = b"["
    written = 0
    for instance in instances:
        if instance is None:
            yield b""
            continue
        partition, ranks = instance
        yield separator
        yield from _instance(partition, ranks, now)
        separator = b", "
        written += len(ranks)
        if written >= SLICE_RANKS:
            written = 0
            yield b""
    yield b"[]" if separator == b"[" else b"]"


def _instance(partition: Partition, ranks: list[Registration], now: float) -> Iterator[bytes]:
    statuses: set[ListenerStatus] = set()
    streams: set[StreamHealth] = set()
    for number, rank in enumerate(ranks, 1):
        statuses.add(rank.listener.status)
        streams.add(rank.listener.health(now))
        if number % SLICE_RANKS == 0:
            yield b""
    head = {
        "instance_id": ranks[0].key.instance_id,
        "source": "zmq",
        "status": next(status for status in STATUS_ORDER if status in statuses),
        "stream": next(health for health in StreamHealth if health in streams),
        "model_name": partition.key.model_name,
        "tenant_id": partition.key.tenant_id,
        "block_size": partition.block_size,
        **matching(partition),
    }
    yield json.dumps(head)[:-1].encode()
    yield from _by_rank("endpoints", ranks, lambda listener: listener.endpoint)
    yield from _by_rank("listeners", ranks, lambda listener: dict(stream_members(listener, now)))
    yield b"}"


def _by_rank(
    name: str, ranks: list[Registration], show: Callable[[EventStream], object]
) -> Iterator[bytes]:
    """Yields a member whose value is an object with a member for each rank."""
    separator = f', "{name}": {{'
    for number, rank in enumerate(ranks, 1):
        yield f'{separator}"{rank.key.dp_rank}": {json.dumps(show(rank.listener))}'.encode()
        separator = ", "
        if number % SLICE_RANKS == 0:
            yield b""
    yield b"}"


def matching(partition: Partition) -> dict[str, int | str]:
    """Returns members that say whether questions about the model and tenant match anything."""
    index = partition.index
    shown: dict[str, int | str] = {"questions": index.questions, "matched": index.matched}
    if partition.is_unmatched:
        shown["warning"] = f"none of {index.questions} questions has matched a block"
    return shown


def stream_members(listener: EventStream, now: float) -> Iterator[tuple[str, object]]:
    """Yields members that describe a rank's stream."""
    yield "endpoint", listener.endpoint
    yield "status", listener.status
    if listener.link.last_error is not None:
        yield "last_error", listener.link.last_error
    yield "stream", listener.health(now)
    if listener.loss:
        yield "loss", listener.loss
    if listener.link.quiet is not None:
        yield "quiet", listener.link.quiet
        yield "quiet_s", round(now - listener.link.quiet_since)
    if ignored := dict(listener.ignored):
        yield "ignored_events", ignored
    if (last := listener.cursor.last) is not None:
        yield "last_seq", last
    if listener.identity.publisher:
        yield "publisher_id", listener.identity.publisher.hex()


def streams_of(partition: Partition, registry: Registry, now: float) -> bytes:
    """Returns the health of each rank's stream, by instance and rank, as JSON."""
    streams: dict[int | str, dict[int, str]] = {}
    for instance_id, dp_rank in sorted(partition.rank_keys()):
        listener = registry.find_listener(RankKey(partition.key, instance_id, dp_rank))
        assert listener is not None
        streams.setdefault(instance_id, {})[dp_rank] = listener.health(now)
    return bodies.render(streams)
