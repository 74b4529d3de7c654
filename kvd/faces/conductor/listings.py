"""Publishers as the conductor shows them: `/services`, `/global_view`, metrics."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgpack
import trio

from kvd.faces.common.slices import written
from kvd.faces.conductor import msgpack as packed
from kvd.http.messages import Request, Response
from kvd.index.metrics import listener_families, state_families
from kvd.index.partitions import Partition, State
from kvd.index.publishers import Publisher, Publishers
from kvd.telemetry.metrics import (
    BREATH,
    Family,
    by_label,
    counter,
    gauge,
)

OUTCOMES = ("mismatch", "bad", "ignored", "stale", "orphan", "unlocated")  # of events
HELD = ("blocks", "waiting")

SLICE_ROWS = 64  # registrations written between two checkpoints: about 1 ms


class _Context(NamedTuple):
    """The context that separates blocks, named as newer conductors name it."""

    model_name: str
    lora_name: str
    block_size: int
    additional_salt: str
    tenant_id: str
    instance_id: str


async def services(publishers: Publishers, request: Request) -> Response:
    """Lists the publishers: their registration, what their events say, and their streams."""
    listed, now = list(publishers), trio.current_time()
    if packed.wants_packed(request):
        verbose = b"verbose=1" in request.query.split(b"&")
        rows = (_packed_service(publisher, now, verbose) for publisher in listed)
        return await _packed_list("count", "services", len(listed), rows)
    return Response(200, await written(_services(listed, now)))


def _packed_service(publisher: Publisher, now: float, verbose: bool) -> dict[str, Any]:
    """Returns the row of the msgpack dialect; with kvd's own members only if it is verbose."""
    row, echoed = _service(publisher, now), dict(publisher.described.echoed)
    shown = {name: value for name, value in row.items() if verbose or name[0].isupper()}
    del shown["AdditionalSalt"]
    shown |= {"CacheGroup": echoed.get("cache_group"), "HashProfile": echoed.get("hash_profile")}
    return shown


async def _packed_list(
    count: str, name: str, length: int, rows: Iterable[Mapping[str, Any]]
) -> Response:
    """Answers an object of two members: `count` with the number of rows, `name` with the rows."""
    packer = msgpack.Packer()

    def pieces() -> Iterator[bytes]:
        yield packer.pack_map_header(2) + packer.pack(count) + packer.pack(length)
        yield packer.pack(name) + packer.pack_array_header(length)
        for number, row in enumerate(rows, 1):
            yield packer.pack(row)
            if number % SLICE_ROWS == 0:
                yield b""

    return Response(200, await written(pieces()), packed.FORM.content_type)


def _services(listed: list[Publisher], now: float) -> Iterator[bytes]:
    yield b'{"count":%d,"services":[' % len(listed)
    yield from _rows(_service(publisher, now) for publisher in listed)


def _service(publisher: Publisher, now: float) -> dict[str, Any]:
    described, listener, counts = publisher.described, publisher.listener, publisher.publication
    bad = counts.bad
    row: dict[str, Any] = {
        "Endpoint": described.endpoint,
        "ReplayEndpoint": described.replay_endpoint or "",
        "Type": described.type,
        "ModelName": described.model_name,
        "LoraName": described.lora_name,
        "TenantID": described.tenant_id,
        "InstanceID": described.instance_id,
        "BlockSize": described.block_size,
        "DPRank": described.dp_rank,
        "AdditionalSalt": described.salt,
        **dict(described.echoed),
        "serves_all": described.serves_all,
        "status": listener.status,
        "stream": listener.health(now),
        "last_seq": listener.cursor.last,
        "gaps": listener.stats.gaps,
        "events": counts.events,
        "event_id_gaps": counts.order.gaps,
        "stale": counts.order.stale,
        "restarts": listener.stats.restarts + counts.order.beginnings,
        "mismatch": dict(counts.mismatches),
        "orphans": counts.orphans,
        "unlocated": counts.unlocated,
        "conflicts": counts.conflicts,
        "bad_events": bad.total(),
        "bad": dict(bad),
        "ignored": dict(counts.ignored),
        "last_error": listener.link.last_error,
        **publisher.source.stats(),
    }
    row["blocks"] += row["waiting"]  # questions by hash may find waiting blocks, too
    if listener.loss:
        row["loss"] = listener.loss
    if unused := counts.unused():
        row["warning"] = unused
    elif _is_unmatched(row):
        row["warning"] = f"{row['blocks']} blocks are indexed, but no query has matched one"
    return row


def _is_unmatched(stats: Mapping[str, Any]) -> bool:
    """Returns whether a publisher holds blocks, but no question about its instance has matched."""
    return bool(stats["blocks"] + stats["waiting"] and stats["asked"] and not stats["matched"])


async def global_view(state: State, publishers: Publishers, request: Request) -> Response:
    """Lists the contexts that keep blocks apart; the blocks themselves are not shown."""
    if packed.wants_packed(request):
        contexts = await _packed_contexts(state, publishers)
        return await _packed_list("context_count", "contexts", len(contexts), contexts)
    pieces = _contexts(list(publishers), list(state.partitions.values()))
    return Response(200, await written(pieces))


def _contexts(listed: list[Publisher], partitions: list[Partition]) -> Iterator[bytes]:
    """Yields the contexts of publishers and of workers; those of workers name no adapter.

    The adapters of workers stand only in their events.
    """
    contexts: set[_Context] = set()
    for number, publisher in enumerate(listed, 1):
        described = publisher.described
        context = _Context(
            described.model_name,
            described.lora_name,
            described.block_size,
            described.salt,
            described.tenant_id,
            described.instance_id,
        )
        contexts.add(context)
        if number % SLICE_ROWS == 0:
            yield b""
    for partition in partitions:
        model, tenant = partition.key
        for number, instance_id in enumerate(list(partition.ranks), 1):
            context = _Context(model, "", partition.block_size, "", tenant, str(instance_id))
            contexts.add(context)
            if number % SLICE_ROWS == 0:
                yield b""
        yield b""
    yield b'{"context_count":%d,"model_contexts":[' % len(contexts)
    yield from _rows(context._asdict() for context in contexts)


async def _packed_contexts(state: State, publishers: Publishers) -> list[dict[str, Any]]:
    """Returns the contexts of publishers, with the ranks of their instances.

    Blocks are counted for a model, tenant and block size, whatever their adapter.
    """
    contexts: dict[tuple[str, str, int, str], dict[str, Any]] = {}
    for number, publisher in enumerate(list(publishers), 1):
        if number % SLICE_ROWS == 0:
            await trio.lowlevel.checkpoint()
        described = publisher.described
        key = described.key.partition
        where = (*key, described.block_size, described.lora_name)
        if where[:3] not in state.sized:
            continue  # it has been unregistered meanwhile
        if where not in contexts:
            contexts[where] = {
                "model_name": described.model_name,
                "lora_name": described.lora_name,
                "block_size": described.block_size,
                "tenant_id": described.tenant_id,
                "prefix_count": state.sized[where[:3]].index.stats()["blocks"],
                "hash_profile": dict(described.echoed).get("hash_profile"),
                "instances": {},
            }
        ranks = contexts[where]["instances"].setdefault(described.instance_id, [])
        if described.dp_rank not in ranks:
            ranks.append(described.dp_rank)
    return list(contexts.values())


def _rows(rows: Iterable[Mapping[str, Any]]) -> Iterator[bytes]:
    """Yields rows and the end of an object whose last member is the list of them."""
    for number, row in enumerate(rows):
        yield (("," if number else "") + json.dumps(row)).encode()
        if number % SLICE_ROWS == SLICE_ROWS - 1:
            yield b""
    yield b"]}"


def families(state: State, publishers: Publishers) -> Iterator[Family | None]:
    """Yields the metrics of this face's listeners, and of all partitions."""
    listed = list(publishers)
    listeners = [publisher.listener for publisher in listed]
    yield from listener_families(listeners, publishers.left_stats, trio.current_time())
    yield gauge("kvd_conductor_publishers", "Number of registered publishers", len(listed))
    help = "Number of publishers refused for lack of file descriptors"
    yield counter("kvd_conductor_publishers_refused_total", help, publishers.refused)
    outcomes, held = dict.fromkeys(OUTCOMES, 0), dict.fromkeys(HELD, 0)
    unmatched = 0
    for number, publisher in enumerate(listed, 1):
        stats = publisher.source.stats()
        unmatched += _is_unmatched(stats)
        for name in HELD:
            held[name] += stats[name]
        counted = publisher.publication.outcomes()
        for name in OUTCOMES:
            outcomes[name] += counted[name]
        if number % BREATH == 0:
            yield None
    help = "Number of events of registered publishers, by outcome other than applied"
    yield by_label("kvd_conductor_events", "gauge", help, "outcome", outcomes)
    help = "Number of blocks of publishers by rank and medium; waiting: not indexed yet"
    yield by_label("kvd_conductor_blocks", "gauge", help, "state", held)
    help = "Number of publishers whose blocks no query about their instance has matched"
    yield gauge("kvd_conductor_unmatched_publishers", help, unmatched)
    yield from state_families(state, len({each.described.key.triple for each in listed}))
