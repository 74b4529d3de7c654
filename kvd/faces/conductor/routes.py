"""Mooncake Conductor's Indexer API over the KV Events standard (docs/faces/conductor.md)."""

from __future__ import annotations

import json
from functools import partial

import trio

from kvd.errors import BadRequest, Conflict, NotFound
from kvd.faces.common.bodies import U64_MAX, json_response
from kvd.faces.common.monitoring import HEALTH
from kvd.faces.conductor import msgpack as packed
from kvd.faces.conductor.listings import global_view, services
from kvd.faces.conductor.members import (
    MODEL,
    Members,
    Topic,
    alias,
    checked,
    detailed,
    echoed,
    invalid,
    kept_model_name,
    missing,
    model_name,
    optional_name,
    optional_uint,
    require,
    required,
    required_name,
    scan,
    text,
    uint,
    usable,
    wrong_type,
)
from kvd.faces.conductor.plain import FIELDS, PlainHoldings
from kvd.http.fast_path import Answerer
from kvd.http.types import LONG_BODY_LIMIT, Handler, Request, Response, Route, Scope
from kvd.index.partitions import Partition, State
from kvd.index.publishers import EVERY_INSTANCE, Described, Narrowing, Publishers
from kvd.model import DEFAULT_TENANT
from kvd.wire import kv_events
from kvd.wire.curve import check_server_key
from kvd_core.json.scan import BodyScanner

SALT = ("cache_salt", "additional_salt", "additionalsalt")
HASHES = ("seq_hashes", "block_hash", "block_hashes")
ECHOED = ("hash_profile", "cache_group")  # of newer conductors: shown again, without effect

QUERY = BodyScanner({"token_ids": "u32?"}, FIELDS)
QUERY_BY_HASH = BodyScanner(dict.fromkeys(HASHES, "hash64?"), FIELDS)
SPELLED = BodyScanner({}, (*FIELDS, *HASHES))  # reads the same, and hashes as whatever they are
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

# What a failure is called that does not call itself anything, by its status.
REASONS = {
    400: "invalid_request",
    401: "unauthenticated",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    413: "too_large",
    414: "invalid_request",
    417: "invalid_request",
    421: "misdirected",
    431: "invalid_request",
    500: "internal",
    503: "unavailable",
}

# Steps of making sequence hashes between two checkpoints, 4,096 blocks: 1 to 1.5 ms.
SEQUENCE_STEPS = 8192

# Longest body in bytes whose hashes are texts, some 10,000: Python objects are made of them, for 30
# ms.
TEXT_HASHES_LIMIT = 256 * 1024


def routes(state: State, publishers: Publishers) -> tuple[Route, ...]:
    """Returns the face's routes over the daemon's state."""
    known = state.sized, DEFAULT_TENANT
    by_hash = partial(query_by_hash, state, trio.Lock())
    return (
        HEALTH,
        _hot("/query", partial(query, state), PlainHoldings(QUERY, *known)),
        _hot("/query_by_hash", by_hash, PlainHoldings(QUERY_BY_HASH, *known)),
        Route("POST", "/register", partial(register, publishers), any_type=True, scope=Scope.ADMIN),
        Route(
            "POST", "/unregister", partial(unregister, publishers), any_type=True, scope=Scope.ADMIN
        ),
        Route("GET", "/services", partial(services, publishers)),
        Route("GET", "/global_view", partial(global_view, state, publishers)),
    )


def _hot(path: str, handler: Handler, answerer: Answerer) -> Route:
    return Route(
        "POST", path, handler, True, answerer, LONG_BODY_LIMIT, any_type=True, scope=Scope.READ
    )


# ---- questions


def query(state: State, request: Request) -> Response:
    """Says what every instance holds of a prompt given as token ids."""
    if packed.is_packed(request):
        return _packed_query(state, request)
    members = scan(QUERY, request.body)
    require(members, "token_ids")
    topic = _topic(members)
    partition = state.sized.get(topic[:3])
    if partition is None:
        return _no_rows(topic)
    asked = topic.lora_name, topic.cache_salt, topic.tenant, topic.instance
    return Response(200, partition.conductor.query_tokens(QUERY, 0, *asked))


async def query_by_hash(state: State, making: trio.Lock, request: Request) -> Response:
    """Says what every instance holds of a prompt given as its rolling sequence hashes.

    The first question to a partition waits until its blocks have theirs; of several that wait, the
    one that has the lock makes them.
    """
    if packed.is_packed(request):
        return await _packed_query_by_hash(state, making, request)
    at, topic = _scan_topic(request)
    partition = state.sized.get(topic[:3])
    if partition is None:
        return _no_rows(topic)
    if not partition.conductor.sequence(0):
        await _make_sequences(partition, making)
        return await query_by_hash(state, making, request)  # others have used the scanner
    asked = topic.lora_name, topic.cache_salt, topic.tenant, topic.instance
    return Response(200, partition.conductor.query_hashes(QUERY_BY_HASH, at, *asked))


async def _make_sequences(partition: Partition, making: trio.Lock) -> None:
    async with making:
        while not partition.conductor.sequence(SEQUENCE_STEPS):
            await trio.lowlevel.checkpoint()


def _packed_query(state: State, request: Request) -> Response:
    topic, tokens = packed.read_question(request.body, "token_ids", 4)
    partition = None if topic is None else state.sized.get(topic[:3])
    if topic is None or partition is None:
        return packed.rows(())
    asked = topic.lora_name, topic.cache_salt, topic.instance
    return packed.rows(partition.conductor.tiers_of_tokens(tokens, *asked))


async def _packed_query_by_hash(state: State, making: trio.Lock, request: Request) -> Response:
    topic, hashes = packed.read_question(request.body, "seq_hashes", 8)
    partition = None if topic is None else state.sized.get(topic[:3])
    if topic is None or partition is None:
        return packed.rows(())
    if not partition.conductor.sequence(0):
        await _make_sequences(partition, making)
    asked = topic.lora_name, topic.cache_salt, topic.instance
    return packed.rows(partition.conductor.tiers_of_hashes(hashes, *asked))


def _scan_topic(request: Request) -> tuple[int, Topic]:
    """Scans hashes; returns also which of their names they have, as a position in HASHES."""
    members = _scan_hashes(request)
    given = [name for name in HASHES if name in members]
    if not given:
        raise missing(HASHES[0])
    lists = [QUERY_BY_HASH.array(name) for name in given]
    if any(each != lists[0] for each in lists):
        raise invalid(f"`{'` and `'.join(given)}` are the same member and differ", given[1])
    return HASHES.index(given[0]), _topic(members)


def _topic(members: Members) -> Topic:
    return Topic(
        model_name(members, "model"),
        text(members, "tenant_id") or DEFAULT_TENANT,
        uint(members, "block_size", 1),
        _adapter(members),
        alias(members, SALT) or "",
        text(members, "instance_id") or "",
    )


def _no_rows(topic: Topic) -> Response:
    return json_response({topic.tenant: {}})


def _adapter(members: Members) -> str:
    """Returns the adapter's name; a number finds blocks of engines that know only that."""
    name = text(members, "lora_name") or ""
    number = members.get("lora_id")
    if number is None:
        return name
    if type(number) is not int:
        raise wrong_type("lora_id", "a whole number")
    if not -1 <= number <= U64_MAX:
        raise invalid(f"lora_id: expected a number from -1 to {U64_MAX}", "lora_id")
    if name:
        raise invalid("`lora_id` is deprecated, and not to be used with `lora_name`", "lora_id")
    return f"#{number}" if number > 0 else ""


def _scan_hashes(request: Request) -> Members:
    """Scans hashes that may be texts, for clients whose JSON has no 64-bit integers."""
    try:
        return scan(QUERY_BY_HASH, request.body)
    except BadRequest:
        body = _rewritten(request.body)
        if body is None:
            raise
    return scan(QUERY_BY_HASH, body)


def _rewritten(body: bytes) -> bytes | None:
    """Returns a body with its hashes as integers; None if that is not what is wrong with it."""
    if len(body) > TEXT_HASHES_LIMIT:
        return None
    members = scan(SPELLED, body)
    given = {name: members[name] for name in HASHES if isinstance(members.get(name), list)}
    if not any(isinstance(each, str) for hashes in given.values() for each in hashes):
        return None
    for name, hashes in given.items():
        try:
            members[name] = [kv_events.hash_of(each) for each in hashes]
        except ValueError:
            raise invalid(f"{name}: expected whole numbers of 64 bits", name) from None
    return json.dumps(members).encode()


# ---- registrations


def register(publishers: Publishers, request: Request) -> Response:
    in_msgpack = packed.is_packed(request)
    described = (packed.read_publisher if in_msgpack else read_publisher)(request.body)
    outgoing = publishers.outgoing
    usable(described.endpoint, "endpoint", outgoing.check_endpoint)
    usable(described.replay_endpoint, "replay_endpoint", outgoing.check_replay_endpoint)
    usable(described.server_key, "curve_server_key", check_server_key)
    try:
        publishers.register(described)
    except Conflict as error:
        refusal = BadRequest(str(error)) if in_msgpack else error
        raise detailed(refusal, "invalid_registration") from None
    answer = {"status": REGISTERED, "instance_id": described.instance_id}
    return packed.response(answer) if in_msgpack else json_response(answer)


def read_publisher(body: bytes) -> Described:
    """Returns the publisher that a registration describes; its addresses may be of no use."""
    members = scan(REGISTER, body)
    described = Described(
        endpoint=required(members, "endpoint"),
        replay_endpoint=text(members, "replay_endpoint") or None,
        type=required_name(members, "type"),
        model_name=kept_model_name(members, "modelname"),
        lora_name=optional_name(members, "lora_name") or "",
        tenant_id=optional_name(members, "tenant_id") or DEFAULT_TENANT,
        instance_id=required_name(members, "instance_id"),
        block_size=uint(members, "block_size", 1),
        dp_rank=uint(members, "dp_rank", 0),
        salt=alias(members, SALT[1:]) or "",
        server_key=text(members, "curve_server_key") or None,
        echoed=tuple(
            (name, echoed(members[name], name)) for name in ECHOED if members.get(name) is not None
        ),
    )
    return checked(described.shared() if described.instance_id == EVERY_INSTANCE else described)


async def unregister(publishers: Publishers, request: Request) -> Response:
    in_msgpack = packed.is_packed(request)
    wanted = (packed.read_narrowing if in_msgpack else read_narrowing)(request.body)
    try:
        removed = await publishers.unregister(wanted)
    except NotFound as error:
        raise detailed(error, "not_found") from None
    answer = {"status": UNREGISTERED, "removed_instances": removed}
    return packed.response(answer) if in_msgpack else json_response(answer)


def read_narrowing(body: bytes) -> Narrowing:
    """Returns which publishers are to be unregistered."""
    members = scan(REGISTER, body)
    return Narrowing(
        tenant_id=text(members, "tenant_id") or DEFAULT_TENANT,
        instance_id=required(members, "instance_id"),
        dp_rank=optional_uint(members, "dp_rank", 0),
        type=text(members, "type") or None,
        model_name=alias(members, MODEL) or None,
        lora_name=text(members, "lora_name") or None,
        block_size=optional_uint(members, "block_size", 1),
        salt=alias(members, SALT[1:]) or None,
        endpoint=text(members, "endpoint") or None,
    )
