"""Mooncake Conductor's Indexer API over the KV Events standard (docs/faces/conductor.md)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import trio

from kvd.errors import BadRequest, Conflict, KvdError, NotFound, UnsupportedMedia
from kvd.faces.bodies import MAX_KEPT_BYTES, U32_MAX, U64_MAX, json_response
from kvd.faces.dumps import sliced
from kvd.faces.monitoring import HEALTH
from kvd.http.types import Handler, Request, Response, Route
from kvd.metrics import Family, by_label, counter, gauge, listener_families, state_families
from kvd.model import DEFAULT_TENANT
from kvd.publishers import Described, Narrowing, Publisher, Publishers
from kvd.state import Partition, State
from kvd.wire import kv_events
from kvd_core.lane import Answerer
from kvd_core.plain_conductor import FIELDS, PlainHoldings
from kvd_core.scan import BodyScanner

QUERY_BODY_LIMIT = 8 * 1024 * 1024  # bytes, as on the indexer

MODEL = ("model", "modelname", "model_name")
SALT = ("cache_salt", "additional_salt", "additionalsalt")
HASHES = ("seq_hashes", "block_hash", "block_hashes")
ECHOED = ("hash_profile", "cache_group")  # of newer conductors: shown again, without effect

QUERY = BodyScanner({"token_ids": "u32"}, FIELDS)
QUERY_BY_HASH = BodyScanner(dict.fromkeys(HASHES, "hash64"), FIELDS)
DESCRIBED = (
    *MODEL,
    "endpoint",
    "replay_endpoint",
    "type",
    "lora_name",
    "tenant_id",
    "instance_id",
    "block_size",
    "dp_rank",
    "curve_server_key",
    *SALT[1:],
    *ECHOED,
)
REGISTER = BodyScanner({}, DESCRIBED)

REGISTERED = "registered successfully"
UNREGISTERED = "unregistered successfully"

MSGPACK = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")
SLICE_ROWS = 64  # registrations written between two rests

# Of a body with its hashes as texts, some 10,000: those are made of Python, for 30 ms then.
TEXT_HASHES_LIMIT = 256 * 1024

Members = dict[str, Any]


def routes(state: State, publishers: Publishers) -> tuple[Route, ...]:
    """Returns the face's routes over the daemon's state."""
    known = state.sized, DEFAULT_TENANT
    return (
        HEALTH,
        _hot("/query", partial(query, state), PlainHoldings(QUERY, *known)),
        _hot("/query_by_hash", partial(query_by_hash, state), PlainHoldings(QUERY_BY_HASH, *known)),
        Route("POST", "/register", partial(register, publishers), any_type=True),
        Route("POST", "/unregister", partial(unregister, publishers), any_type=True),
        Route("GET", "/services", partial(services, publishers)),
        Route("GET", "/global_view", partial(global_view, publishers)),
    )


def _hot(path: str, handler: Handler, answerer: Answerer) -> Route:
    return Route("POST", path, handler, True, answerer, QUERY_BODY_LIMIT, any_type=True)


# ---- questions


def query(state: State, request: Request) -> Response:
    """Says what every instance holds of a prompt given as token ids."""
    members = _scan(QUERY, request)
    _require(members, "token_ids")
    return _answer(
        state,
        members,
        lambda partition, *scope: partition.query_tokens(QUERY, 0, *scope),
    )


def query_by_hash(state: State, request: Request) -> Response:
    """Says what every instance holds of a prompt given as its rolling sequence hashes."""
    members = _scan_hashes(request)
    given = [name for name in HASHES if name in members]
    if not given:
        raise _missing(HASHES[0])
    lists = [QUERY_BY_HASH.array(name) for name in given]
    if any(each != lists[0] for each in lists):
        raise _invalid(f"`{'` and `'.join(given)}` are the same member and differ", given[1])
    at = HASHES.index(given[0])
    return _answer(
        state,
        members,
        lambda partition, *scope: partition.query_hashes(QUERY_BY_HASH, at, *scope),
    )


def _answer(state: State, members: Members, ask: Callable[..., bytes]) -> Response:
    model = _model(members)
    tenant = _text(members, "tenant_id") or DEFAULT_TENANT
    block_size = _uint(members, "block_size", 1)
    instance = _text(members, "instance_id") or ""
    salt = _alias(members, SALT) or ""
    lora_name = _adapter(members)
    partition: Partition | None = state.sized.get((model, tenant, block_size))
    if partition is None:
        return json_response({tenant: {}})
    return Response(200, ask(partition.conductor, lora_name, salt, tenant, instance))


def _adapter(members: Members) -> str:
    """Returns the adapter's name; a number finds blocks of engines that know only that."""
    name = _text(members, "lora_name") or ""
    number = members.get("lora_id")
    if number is None:
        return name
    if type(number) is not int or not -1 <= number <= U64_MAX:
        raise _wrong_type("lora_id", "a whole number")
    if name:
        raise _invalid("`lora_id` is deprecated, and not to be used with `lora_name`", "lora_id")
    return f"#{number}" if number > 0 else ""


# ---- registrations


def register(publishers: Publishers, request: Request) -> Response:
    _refuse_msgpack(request)
    described = read_publisher(request.body)
    try:
        publishers.register(described)
    except Conflict as error:
        raise _detailed(error, "invalid_registration") from None
    except BadRequest as error:
        raise _detailed(error, "invalid_value", "endpoint") from None
    return json_response({"status": REGISTERED, "instance_id": described.instance_id})


def read_publisher(body: bytes) -> Described:
    """Returns the publisher that a registration describes."""
    members = _scan_body(REGISTER, body)
    return Described(
        endpoint=_required(members, "endpoint"),
        replay_endpoint=_text(members, "replay_endpoint") or None,
        type=_required(members, "type"),
        model_name=_model(members),
        lora_name=_text(members, "lora_name") or "",
        tenant_id=_text(members, "tenant_id") or DEFAULT_TENANT,
        instance_id=_required(members, "instance_id"),
        block_size=_uint(members, "block_size", 1),
        dp_rank=_uint(members, "dp_rank", 0),
        salt=_alias(members, SALT[1:]) or "",
        server_key=_text(members, "curve_server_key") or None,
        echoed=tuple((name, _echoed(members[name], name)) for name in ECHOED if name in members),
    )


async def unregister(publishers: Publishers, request: Request) -> Response:
    members = _scan(REGISTER, request)
    wanted = Narrowing(
        tenant_id=_text(members, "tenant_id") or DEFAULT_TENANT,
        instance_id=_required(members, "instance_id"),
        dp_rank=_optional_uint(members, "dp_rank", 0),
        type=_text(members, "type") or None,
        model_name=_alias(members, MODEL) or None,
        lora_name=_text(members, "lora_name") or None,
        block_size=_optional_uint(members, "block_size", 1),
        salt=_alias(members, SALT[1:]) or None,
        endpoint=_text(members, "endpoint") or None,
    )
    try:
        removed = await publishers.unregister(wanted)
    except NotFound as error:
        raise _detailed(error, "not_found") from None
    return json_response({"status": UNREGISTERED, "removed_instances": removed})


# ---- listings


def services(publishers: Publishers, request: Request) -> Response:
    """Streams who is registered, what their events really say, and how their streams are."""
    return Response(200, sliced(_services(list(publishers), trio.current_time())))


def _services(listed: list[Publisher], now: float) -> Iterator[bytes]:
    yield b'{"count":%d,"services":[' % len(listed)
    for number, publisher in enumerate(listed):
        separator = "," if number else ""
        yield (separator + json.dumps(_service(publisher, now))).encode()
        if number % SLICE_ROWS == SLICE_ROWS - 1:
            yield b""
    yield b"]}"


def _service(publisher: Publisher, now: float) -> Members:
    described, listener, said = publisher.described, publisher.listener, publisher.publication
    row: Members = {
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
        "status": listener.status,
        "stream": listener.health(now),
        "last_seq": listener.cursor.last,
        "gaps": listener.gaps,
        "events": said.events,
        "event_id_gaps": said.gaps,
        "stale": said.stale,
        "restarts": listener.restarts + said.beginnings,
        "mismatch": dict(said.mismatches),
        "orphans": said.orphans,
        "unlocated": said.unlocated,
        "conflicts": said.conflicts,
        "bad_events": said.bad.total(),
        "bad": dict(said.bad),
        "ignored": dict(said.ignored),
        "last_error": listener.last_error,
    }
    if listener.loss:
        row["loss"] = listener.loss
    return row


def global_view(publishers: Publishers, request: Request) -> Response:
    """Lists what blocks are kept apart by; the blocks themselves stay here."""
    contexts = {
        (
            one.described.model_name,
            one.described.lora_name,
            one.described.block_size,
            one.described.salt,
            one.described.tenant_id,
            one.described.instance_id,
        )
        for one in publishers
    }
    names = (
        "model_name",
        "lora_name",
        "block_size",
        "additional_salt",
        "tenant_id",
        "instance_id",
    )
    listed = [dict(zip(names, context, strict=True)) for context in sorted(contexts)]
    return json_response({"context_count": len(listed), "model_contexts": listed})


def families(state: State, publishers: Publishers) -> Iterator[Family | None]:
    """Yields what /metrics says of this face's listeners, and of all partitions."""
    listeners = [publisher.listener for publisher in publishers]
    yield from listener_families(listeners, publishers.left_counts, trio.current_time())
    said = [publisher.publication for publisher in publishers]
    yield gauge("kvd_conductor_publishers", "Registered publishers", len(publishers))
    help = "Publishers refused because there are no descriptors for their listeners"
    yield counter("kvd_conductor_publishers_refused_total", help, publishers.refused)
    outcomes = {
        "mismatch": sum(each.mismatches.total() for each in said),
        "bad": sum(each.bad.total() for each in said),
        "ignored": sum(each.ignored.total() for each in said),
        "stale": sum(each.stale for each in said),
        "orphan": sum(each.orphans for each in said),
        "unlocated": sum(each.unlocated for each in said),
    }
    help = "Events of registered publishers that were not simply applied"
    yield by_label("kvd_conductor_events", "gauge", help, "outcome", outcomes)
    yield from state_families(state, len({each.described.key.triple for each in publishers}))


# ---- bodies


def _scan(scanner: BodyScanner, request: Request) -> Members:
    _refuse_msgpack(request)
    return _scan_body(scanner, request.body)


def _scan_body(scanner: BodyScanner, body: bytes) -> Members:
    try:
        return scanner.scan(body)
    except ValueError as error:
        raise _detailed(
            BadRequest(f"the body is not valid JSON: {error}"), "invalid_json"
        ) from None
    except TypeError as error:
        raise _detailed(BadRequest(str(error)), "invalid_type") from None


def _scan_hashes(request: Request) -> Members:
    """Scans hashes that may be texts, for clients whose JSON has no 64-bit integers."""
    try:
        return _scan(QUERY_BY_HASH, request)
    except BadRequest:
        body = _rewritten(request.body)
        if body is None:
            raise
    try:
        return QUERY_BY_HASH.scan(body)
    except (ValueError, TypeError) as error:
        raise _detailed(BadRequest(str(error)), "invalid_type") from None


def _rewritten(body: bytes) -> bytes | None:
    """Returns a body with its hashes as integers; None if that is not what is wrong with it."""
    if len(body) > TEXT_HASHES_LIMIT:
        return None
    try:
        members = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(members, dict):
        return None
    for name in HASHES:
        if name not in members:
            continue
        if members[name] is None:
            del members[name]
            continue
        if not isinstance(members[name], list):
            return None
        try:
            members[name] = [kv_events.hash_of(value) for value in members[name]]
        except ValueError:
            raise _detailed(
                BadRequest(f"{name}: expected whole numbers of 64 bits"), "invalid_value", name
            ) from None
    return json.dumps(members).encode()


def _refuse_msgpack(request: Request) -> None:
    for name, value in request.headers:
        if name == b"content-type" and _essence(value) in MSGPACK:
            raise _detailed(
                UnsupportedMedia("msgpack has a dialect of its own, which is not served: use JSON"),
                "invalid_type",
            )


def _essence(value: bytes) -> str:
    return value.partition(b";")[0].strip().lower().decode("latin-1")


def _require(members: Members, name: str) -> Any:
    value = members.get(name)
    if value is None:
        raise _missing(name)
    return value


def _required(members: Members, name: str) -> str:
    """Returns a text that must not be empty."""
    _require(members, name)
    value = _text(members, name)
    if not value:
        raise _invalid(f"{name}: must not be empty", name)
    return value


def _text(members: Members, name: str) -> str | None:
    """Returns a text, or None when the member is absent or null."""
    value = members.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise _wrong_type(name, "a text")
    if len(value.encode()) > MAX_KEPT_BYTES:
        raise _invalid(f"{name}: longer than {MAX_KEPT_BYTES} bytes", name)
    return value


def _echoed(value: object, name: str) -> object:
    """Returns a value of any type that will be kept."""
    if len(json.dumps(value)) > MAX_KEPT_BYTES:
        raise _invalid(f"{name}: longer than {MAX_KEPT_BYTES} bytes", name)
    return value


def _alias(members: Members, names: tuple[str, ...]) -> str | None:
    """Returns the one member of several names for the same text."""
    given = {name: value for name in names if (value := _text(members, name)) is not None}
    if len(set(given.values())) > 1:
        raise _invalid(f"`{'` and `'.join(given)}` are the same member and differ", min(given))
    return next(iter(given.values()), None)


def _model(members: Members) -> str:
    name = _alias(members, MODEL)
    if name is None:
        raise _missing(MODEL[0])
    if not name:
        raise _invalid("the model must not be empty", MODEL[0])
    return name


def _uint(members: Members, name: str, minimum: int) -> int:
    _require(members, name)
    value = _optional_uint(members, name, minimum)
    assert value is not None
    return value


def _optional_uint(members: Members, name: str, minimum: int) -> int | None:
    value = members.get(name)
    if value is None:
        return None
    if type(value) is not int:
        raise _wrong_type(name, "a whole number")
    if not minimum <= value <= U32_MAX:
        raise _invalid(f"{name}: expected a number from {minimum} to {U32_MAX}", name)
    return value


def _missing(name: str) -> KvdError:
    return _detailed(BadRequest(f"missing member `{name}`"), "missing", name)


def _wrong_type(name: str, wanted: str) -> KvdError:
    return _detailed(BadRequest(f"{name}: expected {wanted}"), "invalid_type", name)


def _invalid(text: str, name: str) -> KvdError:
    return _detailed(BadRequest(text), "invalid_value", name)


def _detailed(error: KvdError, reason: str, name: str | None = None) -> KvdError:
    """Returns the failure with what this face says of every one."""
    error.details = {"reason": reason} if name is None else {"reason": reason, "field": name}
    return error
