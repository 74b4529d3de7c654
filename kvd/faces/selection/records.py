"""Reads worker records strictly from bodies, and writes the rows of listings."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import fields
from typing import Any

import trio

from kvd.errors import Invalid
from kvd.faces.common import bodies
from kvd.faces.common.bodies import flag
from kvd.faces.indexer.workers import SLICE_RANKS, matching, stream_members
from kvd.faces.selection.members import number, texts, u32, u64
from kvd.selection.admission import CatalogEntry
from kvd.selection.worker_record import Role, WorkerLifecycle, WorkerRecord
from kvd.selection.workers import Workers
from kvd_core.json.scan import BodyScanner

# Least speed of a worker in tokens a second: below it, times to the first token could be infinite,
# which JSON cannot express.
LEAST_TOKENS_PER_S = 0.001

# Longest object or array of a record: endpoints of 4,096 ranks with 250 bytes each.
MAX_NESTED_BYTES = 1_048_576

# Most members of an object or array of a record: as many endpoints as a worker may have ranks. All
# of them are read and checked, and later shown, without a pause.
MAX_MEMBERS = 4096

ENFORCEMENTS = ("required", "preferred")  # of a kv_transfer_domain
FIELDS = tuple(each.name for each in fields(WorkerRecord))
REGISTERED = (*FIELDS, "routing_group")
WORKER = BodyScanner({}, REGISTERED, nested_bytes=MAX_NESTED_BYTES)


def row(workers: Workers, entry: CatalogEntry) -> Iterator[bytes]:
    """Yields a worker as pieces of a JSON object, and b"" where others may run.

    It has the worker's record, why it cannot be chosen, its streams and speeds.
    """
    lifecycle, absent = workers.lifecycle(entry), workers.absent(entry)
    gone = list(absent.values()) if lifecycle is WorkerLifecycle.UNSCHEDULABLE else []
    shown = entry.record.shown(lifecycle, entry.reasons + gone)
    if absent:  # from here on, members that Dynamo's rows lack
        shown["disconnected_dp_ranks"] = {str(dp_rank): why for dp_rank, why in absent.items()}
    yield bodies.render(shown)[:-1]
    now = trio.current_time()
    listeners = workers.listeners(entry)
    has_listeners = yield from _by_rank(
        "listeners",
        ((dp_rank, dict(stream_members(listener, now))) for dp_rank, listener in listeners),
    )
    yield from _by_rank("speeds", _speeds(workers, entry))
    if has_listeners and (partition := workers.partition(entry)) is not None:
        yield b"," + bodies.render(matching(partition))[1:-1]
    yield b"}"


def _by_rank(
    name: str, ranks: Iterable[tuple[int, dict[str, Any]]]
) -> Generator[bytes, None, bool]:
    """Yields a member with an object for each dp rank; without any yields none, returns False."""
    number = 0
    opening = b',"%b":{' % name.encode()
    for number, (dp_rank, shown) in enumerate(ranks, 1):
        if number > 1 and number % SLICE_RANKS == 1:
            yield b""
        yield b'%b"%d":%b' % (opening, dp_rank, bodies.render(shown))
        opening = b","
    if number:
        yield b"}"
    return number > 0


def _speeds(workers: Workers, entry: CatalogEntry) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the speeds of those ranks of a worker whose speed is known."""
    if entry.reasons:  # it has no ranks here, however many it claims
        return
    key, worker_id = entry.record.key, entry.record.worker_id
    for dp_rank in workers.speeds.known_ranks(entry.record):
        rank = key, worker_id, dp_rank
        prefill = workers.speeds.prefill(rank)
        if prefill is None:
            continue
        decode = workers.speeds.decode(rank)
        shown: dict[str, Any] = {
            "prefill_tokens_per_s": round(1.0 / prefill.token_s, 1),
            "base_ttft_s": prefill.base_s,
            "confidence": round(prefill.confidence, 3),
            "observations": prefill.observations,
            "given": prefill.given,
        }
        if decode is not None:
            shown["output_token_s"] = decode.base
            shown["output_token_s_per_request"] = decode.slope
            shown["decode_confidence"] = round(decode.confidence, 3)
        yield dp_rank, shown


def read_worker(body: bytes) -> WorkerRecord:
    """Returns the worker that a body, or an entry of a fleet file, describes."""
    return record(bodies.scan(WORKER, body))


def read_changes(body: bytes) -> dict[str, Any]:
    """Returns the members of a record that a body changes: those given and not null."""
    return changes(bodies.scan(WORKER, body))


def record(members: bodies.Members) -> WorkerRecord:
    worker_id = bodies.uint(members, "worker_id", bodies.U64_MAX)
    for name in bodies.PARTITION_MEMBERS:  # refuses null, which `changes` takes for absent
        if name in members:
            bodies.text(members, name)
    return WorkerRecord(**{**changes(members), "worker_id": worker_id})


def changes(members: bodies.Members) -> dict[str, Any]:
    """Returns the members of a record that are given and not null, read strictly."""
    given = {name: value for name, value in members.items() if value is not None}
    found = {name: READERS[name](given, name) for name in FIELDS if name in given}
    for name in bodies.TENANT:
        if name in given:
            _name(given, name)
    if tenant := bodies.alias(given, *bodies.TENANT):
        found["tenant_id"] = tenant
    return found


def _address(members: bodies.Members, name: str) -> str:
    return bodies.bounded(bodies.text(members, name), name)


def _name(members: bodies.Members, name: str) -> str:
    return bodies.kept_name(bodies.text(members, name), name)


def _role(members: bodies.Members, name: str) -> Role:
    try:
        return Role(members[name])
    except ValueError:
        raise Invalid(f"{name}: expected one of {', '.join(Role)}") from None


def _enforcement(members: bodies.Members, name: str) -> str:
    value: str = members[name]
    if value not in ENFORCEMENTS:
        raise Invalid(f"{name}: expected one of {', '.join(ENFORCEMENTS)}")
    return value


def _map(members: bodies.Members, name: str) -> dict[str, str]:
    return {
        bodies.kept_name(key, name): bodies.kept_name(text, name)
        for key, text in _texts_by_text(members, name).items()
    }


def _texts_by_text(members: bodies.Members, name: str) -> dict[str, str]:
    value = _few(members, name)
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise Invalid(f"{name}: expected an object of texts")
    return value


def _taints(members: bodies.Members, name: str) -> tuple[str, ...]:
    _few(members, name)
    return texts(members, name)


def _few(members: bodies.Members, name: str) -> Any:
    """Returns a member; raises Invalid for an object or array of more than MAX_MEMBERS."""
    value = members[name]
    if isinstance(value, (dict, list)) and len(value) > MAX_MEMBERS:
        raise Invalid(f"{name}: more than {MAX_MEMBERS} members")
    return value


def _endpoints(members: bodies.Members, name: str) -> dict[int, str]:
    endpoints = _texts_by_text(members, name)
    for key in endpoints:
        digits = key.isascii() and key.isdigit() and len(key) <= 10
        if not (digits and str(int(key)) == key and int(key) <= bodies.U32_MAX):
            raise Invalid(f"{name}: {key[:40]} is not a rank")
    return {int(key): bodies.bounded(text, name) for key, text in endpoints.items()}


def _positive(members: bodies.Members, name: str) -> float:
    value = number(members, name)
    if not 0.0 < value < math.inf:
        raise Invalid(f"{name} must be above 0")
    return value


def _speed(members: bodies.Members, name: str) -> float:
    value = _positive(members, name)
    if value < LEAST_TOKENS_PER_S:
        raise Invalid(f"{name} must be at least {LEAST_TOKENS_PER_S}")
    return value


READERS: dict[str, Callable[[bodies.Members, str], Any]] = {
    "worker_id": u64,
    "model_name": _name,
    "tenant_id": _name,
    "endpoint": _name,
    "kv_events_endpoint": _address,
    "kv_events_endpoints": _endpoints,
    "replay_endpoint": _address,
    "block_size": u32,
    "data_parallel_start_rank": u32,
    "data_parallel_size": u32,
    "max_num_batched_tokens": u64,
    "total_kv_blocks": u64,
    "stable_routing_id": _name,
    "is_eagle": flag,
    "without_kv_events": flag,
    "prefill_tokens_per_s": _speed,
    "decode_step_ms": _positive,
    "role": _role,
    "taints": _taints,
    "topology_domains": _map,
    "kv_transfer_domain": _name,
    "kv_transfer_enforcement": _enforcement,
    "kv_transfer_preferred_weight": number,
    "router_hint_worker_type": _name,
    "router_hint_source_control_endpoints": _endpoints,
    "curve_server_key": _address,
}
