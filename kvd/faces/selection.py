"""The selection service's API, as Dynamo's standalone one serves it (docs/faces/selection.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

from kvd.catalog import DEFAULT_MODEL, Lifecycle, Role, WorkerRecord
from kvd.errors import BadRequest, Invalid
from kvd.faces import bodies
from kvd.http.types import Handler, Request, Response, Route
from kvd.model import DEFAULT_TENANT, PartitionKey
from kvd.selection import Ask, Constraints, Entry, Held, Look, Selections
from kvd_core.lane import Answerer
from kvd_core.ledger import MAX_REQUEST_ID_BYTES
from kvd_core.plain_selection import (
    PlainAllLoads,
    PlainFree,
    PlainLoads,
    PlainPrefillComplete,
    PlainPrompt,
    PlainSelect,
)
from kvd_core.scan import BodyScanner
from kvd_core.selector import MAX_ISL_TOKENS, Pool
from kvd_core.selector_settings import Settings

BODY_LIMIT = 8 * 1024 * 1024  # bytes, the limit itself included, as on the original
OK = b'{"status":"ok"}'

PLACE = bodies.PLACE
RECORD = tuple(each.name for each in fields(WorkerRecord))
WORKER = BodyScanner({}, (*RECORD, "routing_group"))
WORKERS = BodyScanner({}, (*PLACE, "workers"))

# Positions of the arrays of a prompt.
BLOCK_HASHES, SEQUENCE_HASHES, TOKEN_IDS = range(3)
PROMPT: dict[str, Any] = {"block_hashes": "i64", "sequence_hashes": "i64", "token_ids": "u32"}
SELECT = BodyScanner(PROMPT, PlainSelect.FIELDS)
RESERVE = BodyScanner(
    PROMPT,
    (
        *PlainPrompt.FIELDS,
        "selection_id",
        "reservation_id",
        "worker_id",
        "dp_rank",
        "effective_prefill_tokens",
    ),
)
ASK = BodyScanner(PROMPT, PlainPrompt.FIELDS)
OUTPUT = BodyScanner({}, ("decay_fraction",))

# Overrides that change a choice, by their names in requests; the rest is accepted and passed over.
OVERRIDES = {
    "overlap_score_weight": "overlap_weight",
    "kv_overlap_score_weight": "overlap_weight",
    "prefill_load_scale": "overlap_weight",
    "overlap_score_credit": "device_credit",
    "router_temperature": "temperature",
}


def routes(selections: Selections) -> tuple[Route, ...]:
    """Returns the face's routes over the daemon's selections."""
    bound = partial(partial, selections=selections)
    known = selections, DEFAULT_MODEL, DEFAULT_TENANT
    return (
        Route("GET", "/health", health, hot=True),
        Route("GET", "/ready", bound(ready)),
        Route("GET", "/workers", bound(list_workers)),
        Route("POST", "/workers", bound(post_worker), body_limit=BODY_LIMIT),
        Route("PUT", "/workers", bound(put_workers), body_limit=BODY_LIMIT),
        Route("PATCH", "/workers/{worker_id}", bound(patch_worker), body_limit=BODY_LIMIT),
        Route("DELETE", "/workers/{worker_id}", bound(delete_worker)),
        _hot("/select", bound(select), PlainSelect(SELECT, *known, books=False)),
        _hot(
            "/select_and_reserve",
            bound(select_and_reserve),
            PlainSelect(SELECT, *known, books=True),
        ),
        _hot("/reservations", bound(reserve)),
        _hot(
            "/reservations/{reservation_id}/prefill_complete",
            bound(prefill_complete),
            PlainPrefillComplete(selections),
        ),
        _hot("/reservations/{reservation_id}/output_block", bound(output_block)),
        Route("DELETE", "/reservations/{reservation_id}", bound(free), True, PlainFree(selections)),
        Route("GET", "/loads", bound(loads), True, PlainAllLoads(selections)),
        _hot("/potential_loads", bound(potential_loads), PlainLoads(ASK, *known)),
        _hot("/overlap_scores", bound(overlap_scores)),
    )


def _hot(path: str, handler: Handler, answerer: Answerer | None = None) -> Route:
    return Route("POST", path, handler, True, answerer, BODY_LIMIT)


def health(request: Request) -> Response:
    """Answers as long as the daemon lives, whatever it knows."""
    return Response(200, OK)


# ---- the catalog


def ready(request: Request, *, selections: Selections) -> Response:
    """Answers 200 once a worker can be selected, with all workers either way."""
    entries = selections.listed(None, None)
    count = sum(not entry.reasons for entry in entries)
    answer = {
        "ready": count > 0,
        "schedulable_workers": count,
        "workers": [_shown(entry) for entry in entries],
    }
    response = bodies.json_response(answer)
    response.status = 200 if count else 503
    return response


def list_workers(request: Request, *, selections: Selections) -> Response:
    entries = selections.listed(*bodies.filters(request))
    return bodies.json_response([_shown(entry) for entry in entries])


async def post_worker(request: Request, *, selections: Selections) -> Response:
    members = bodies.scan(WORKER, request.body)
    entry = await selections.put(_record(members))
    response = bodies.json_response(_shown(entry))
    response.status = 201
    return response


async def put_workers(request: Request, *, selections: Selections) -> Response:
    """Makes the given workers all there are of a model and tenant."""
    members = bodies.scan(WORKERS, request.body)
    key = _place(members)
    rows = bodies.require(members, "workers")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise Invalid("workers: expected an array of objects")
    place = {"model_name": key.model_name, "tenant_id": key.tenant_id}
    records = [_record({**place, **row}) for row in rows]
    if any(record.key != key for record in records):
        raise Invalid("workers: one is of another model or tenant")
    if len({record.worker_id for record in records}) != len(records):
        raise Invalid("workers: a worker_id comes twice")
    entries = await selections.put_all(key, records)
    return bodies.json_response([_shown(entry) for entry in entries])


async def patch_worker(request: Request, *, selections: Selections) -> Response:
    """Changes the members that are given and not null."""
    worker_id = _path_id(request)
    changes = _changes(bodies.scan(WORKER, request.body))
    for fixed in ("worker_id", "model_name", "tenant_id"):
        changes.pop(fixed, None)
    entry = await selections.patch(worker_id, lambda record: replace(record, **changes))
    return bodies.json_response(_shown(entry))


async def delete_worker(request: Request, *, selections: Selections) -> Response:
    entry = await selections.delete(_path_id(request))
    return bodies.json_response(entry.record.shown(Lifecycle.UNSCHEDULABLE, []))


def _shown(entry: Entry) -> dict[str, Any]:
    return entry.record.shown(entry.lifecycle, entry.reasons)


def _path_id(request: Request) -> int:
    text = bodies.segment(request)
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) < 2**64):
        raise BadRequest(f"not a worker id: {text[:40]}")
    return int(text)


def _record(members: bodies.Members) -> WorkerRecord:
    worker_id = bodies.uint(members, "worker_id", bodies.U64_MAX)
    for name in PLACE:  # null is no name, and absence means another one
        if name in members:
            bodies.text(members, name)
    return WorkerRecord(**{**_changes(members), "worker_id": worker_id})


def _changes(members: bodies.Members) -> dict[str, Any]:
    """Returns the members of a record that are given and not null, read strictly."""
    given = {name: value for name, value in members.items() if value is not None}
    changes = {name: READERS[name](given, name) for name in RECORD if name in given}
    if tenant := bodies.alias(given, *bodies.TENANT):
        changes["tenant_id"] = tenant
    return changes


def _kept(members: bodies.Members, name: str) -> str:
    return bodies.bounded(bodies.text(members, name), name)


def _u32(members: bodies.Members, name: str) -> int:
    return bodies.uint(members, name, bodies.U32_MAX)


def _u64(members: bodies.Members, name: str) -> int:
    return bodies.uint(members, name, bodies.U64_MAX)


def _flag(members: bodies.Members, name: str) -> bool:
    value = members[name]
    if not isinstance(value, bool):
        raise Invalid(f"{name}: expected true or false")
    return value


def _number(members: Mapping[str, Any], name: str) -> float:
    value = members[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Invalid(f"{name}: expected a number")
    try:
        return float(value)
    except OverflowError:
        raise Invalid(f"{name}: a number out of range") from None


def _role(members: bodies.Members, name: str) -> Role:
    try:
        return Role(members[name])
    except ValueError:
        raise Invalid(f"{name}: expected one of {', '.join(Role)}") from None


def _texts(members: bodies.Members, name: str) -> tuple[str, ...]:
    value = members[name]
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise Invalid(f"{name}: expected an array of texts")
    return tuple(bodies.bounded(each, name) for each in value)


def _map(members: bodies.Members, name: str) -> dict[str, str]:
    value = members[name]
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise Invalid(f"{name}: expected an object of texts")
    return {bodies.bounded(key, name): bodies.bounded(text, name) for key, text in value.items()}


def _endpoints(members: bodies.Members, name: str) -> dict[int, str]:
    endpoints = _map(members, name)
    for key in endpoints:
        digits = key.isascii() and key.isdigit() and len(key) <= 10
        if not (digits and str(int(key)) == key and int(key) <= bodies.U32_MAX):
            raise Invalid(f"{name}: {key[:40]} is not a rank")
    return {int(key): text for key, text in endpoints.items()}


READERS: dict[str, Callable[[bodies.Members, str], Any]] = {
    "worker_id": _u64,
    "model_name": _kept,
    "tenant_id": _kept,
    "endpoint": _kept,
    "kv_events_endpoint": _kept,
    "kv_events_endpoints": _endpoints,
    "replay_endpoint": _kept,
    "block_size": _u32,
    "data_parallel_start_rank": _u32,
    "data_parallel_size": _u32,
    "max_num_batched_tokens": _u64,
    "total_kv_blocks": _u64,
    "stable_routing_id": _kept,
    "is_eagle": _flag,
    "role": _role,
    "taints": _texts,
    "topology_domains": _map,
    "kv_transfer_domain": _kept,
    "kv_transfer_enforcement": _kept,
    "kv_transfer_preferred_weight": _number,
}


# ---- selections


async def select(request: Request, *, selections: Selections) -> Response:
    """Says which rank should serve a prompt; may wait until one is not busy."""
    members = bodies.scan(SELECT, request.body)
    ask = _ask(selections, members)
    return await _selected(selections, ask, _look(selections, SELECT, members))


async def select_and_reserve(request: Request, *, selections: Selections) -> Response:
    """Does the same and books the prompt there, in one step."""
    members = bodies.scan(SELECT, request.body)
    ask = _ask(selections, members)
    given = bodies.optional_text(members, "reservation_id")
    reservation_id = selections.new_reservation_id() if given is None else _bounded_id(given)
    look = _look(selections, SELECT, members)
    return await _selected(selections, replace(ask, reservation_id=reservation_id), look)


async def _selected(selections: Selections, ask: Ask, look: Look) -> Response:
    answer = selections.select(ask, look)
    return Response(200, await selections.wait(answer) if isinstance(answer, Held) else answer)


def _ask(selections: Selections, members: bodies.Members) -> Ask:
    constraints = Constraints(
        _allowed(members), _rank(members, "pinned_worker"), _required_taints(members)
    )
    selection_id = bodies.optional_text(members, "selection_id")
    return Ask(
        _place(members),
        _settings(selections, members),
        selection_id=selection_id,
        constraints=None if constraints == Constraints() else constraints,
        affinity=_affinity(members),
        strict_priority=bodies.optional_uint(members, "strict_priority", bodies.U32_MAX) or 0,
        priority_jump=_optional_number(members, "priority_jump"),
        expected_output_tokens=bodies.optional_uint(
            members, "expected_output_tokens", bodies.U32_MAX
        ),
        lora_name=bodies.optional_text(members, "lora_name"),
        explain=members.get("explain") is not None and _flag(members, "explain"),
    )


def _allowed(members: bodies.Members) -> frozenset[int] | None:
    value = members.get("allowed_worker_ids")
    if value is None:
        return None
    if not isinstance(value, list):
        raise Invalid("allowed_worker_ids: expected an array")
    return frozenset(_u64({"allowed_worker_ids": each}, "allowed_worker_ids") for each in value)


def _rank(members: bodies.Members, name: str) -> tuple[int, int] | None:
    value = _optional_object(members, name)
    if value is None:
        return None
    return _u64(value, "worker_id"), _u32(value, "dp_rank")


def _affinity(members: bodies.Members) -> tuple[int, int | None] | None:
    value = _optional_object(members, "affinity_target")
    if value is None:
        return None
    return _u64(value, "worker_id"), bodies.optional_uint(value, "dp_rank", bodies.U32_MAX)


def _required_taints(members: bodies.Members) -> frozenset[str]:
    value = _optional_object(members, "routing_constraints")
    if value is None or value.get("required_taints") is None:
        return frozenset()
    return frozenset(_texts(value, "required_taints"))


def _optional_object(members: bodies.Members, name: str) -> bodies.Members | None:
    value = members.get(name)
    if value is not None and not isinstance(value, dict):
        raise Invalid(f"{name}: expected an object")
    return value


def _optional_number(members: bodies.Members, name: str) -> float:
    return 0.0 if members.get(name) is None else _number(members, name)


def _settings(selections: Selections, members: bodies.Members) -> Settings:
    """Returns the configured settings with what the request overrides."""
    settings = selections.options.settings
    override = _optional_object(members, "router_config_override")
    if override is None:
        return settings
    changes: dict[str, Any] = {
        OVERRIDES[name]: _number(override, name)
        for name in OVERRIDES
        if override.get(name) is not None
    }
    if override.get("track_prefill_tokens") is not None:
        changes["track_prefill"] = _flag(override, "track_prefill_tokens")
    try:
        return settings.replace(**changes)
    except ValueError as error:
        raise Invalid(f"router_config_override: {error}") from None


def _look(selections: Selections, scanner: BodyScanner, members: bodies.Members) -> Look:
    """Returns what puts the body's prompt before a pool; raises BadRequest without a whole one."""
    if "token_ids" in members:
        return _look_tokens(selections, scanner, members)
    for name in ("block_hashes", "sequence_hashes", "isl_tokens"):
        if members.get(name) is None:
            raise BadRequest(f"{name} is required, or token_ids")
    isl_tokens = bodies.uint(members, "isl_tokens", MAX_ISL_TOKENS)
    if isl_tokens == 0:
        raise BadRequest("isl_tokens must be greater than 0")
    _check_lengths(members)
    return lambda pool: pool.look_body(scanner, BLOCK_HASHES, SEQUENCE_HASHES, isl_tokens)


def _check_lengths(members: bodies.Members) -> None:
    blocks, hashes = members["block_hashes"], members["sequence_hashes"]
    if blocks != hashes:
        raise BadRequest(f"block_hashes length {blocks} must match sequence_hashes length {hashes}")


def _look_tokens(selections: Selections, scanner: BodyScanner, members: bodies.Members) -> Look:
    lora_name = bodies.optional_text(members, "lora_name")
    cache_salt = bodies.optional_text(members, "cache_salt")
    unique = _unique(selections, members)
    return lambda pool: pool.look_tokens(scanner, TOKEN_IDS, lora_name, cache_salt, unique)


def _unique(selections: Selections, members: bodies.Members) -> int | None:
    """Returns a number for a prompt that is not to share blocks in use with any other."""
    reuse = selections.options.assumes_kv_reuse
    override = _optional_object(members, "router_config_override")
    if override is not None and override.get("assume_kv_reuse") is not None:
        reuse = _flag(override, "assume_kv_reuse")
    return None if reuse else selections.random_u64()


# ---- reservations


def reserve(request: Request, *, selections: Selections) -> Response:
    """Books a prompt on a rank that was selected before."""
    members = bodies.scan(RESERVE, request.body)
    given = bodies.optional_text(members, "reservation_id")
    if given is None:
        given = bodies.text(members, "selection_id")
    reservation_id = _bounded_id(given)
    rank = (
        _u64(members, "worker_id"),
        bodies.optional_uint(members, "dp_rank", bodies.U32_MAX) or 0,
    )
    look, isl_tokens = _reserved_prompt(selections, members)
    tokens = bodies.optional_uint(members, "effective_prefill_tokens", MAX_ISL_TOKENS)
    if tokens is not None and isl_tokens is not None and tokens > isl_tokens:
        raise BadRequest("effective_prefill_tokens must not exceed isl_tokens")
    key = _place(members)
    predicts = "token_ids" in members or "block_hashes" in members
    record = selections.reserve(key, reservation_id, rank, look, tokens or 0, predicts=predicts)
    answer = {
        "reservation_id": reservation_id,
        "model_name": key.model_name,
        "tenant_id": key.tenant_id,
        "worker_id": rank[0],
        "dp_rank": rank[1],
        "endpoint": record.endpoint,
    }
    response = bodies.json_response(answer)
    response.status = 201
    return response


def _reserved_prompt(selections: Selections, members: bodies.Members) -> tuple[Look, int]:
    """Returns what looks at a prompt of which only the sequence hashes are needed; its tokens."""
    if "token_ids" in members:
        return _look_tokens(selections, RESERVE, members), members["token_ids"]
    for name in ("sequence_hashes", "isl_tokens"):
        if members.get(name) is None:
            raise BadRequest(f"{name} is required, or token_ids")
    isl_tokens = bodies.uint(members, "isl_tokens", MAX_ISL_TOKENS)
    locals_ = SEQUENCE_HASHES
    if "block_hashes" in members:
        _check_lengths(members)
        locals_ = BLOCK_HASHES

    def look(pool: Pool) -> None:
        pool.look_body(RESERVE, locals_, SEQUENCE_HASHES, isl_tokens)

    return look, isl_tokens


def prefill_complete(request: Request, *, selections: Selections) -> Response:
    selections.prefill_complete(bodies.segment(request))
    return Response(200, OK)


def output_block(request: Request, *, selections: Selections) -> Response:
    fraction = None
    if request.body:
        members = bodies.scan(OUTPUT, request.body)
        if members.get("decay_fraction") is not None:
            fraction = _number(members, "decay_fraction")
            if not 0 <= fraction <= 1:
                raise BadRequest("decay_fraction must be from 0 to 1")
    selections.output_block(bodies.segment(request), fraction)
    return Response(200, OK)


def free(request: Request, *, selections: Selections) -> Response:
    selections.free(bodies.segment(request))
    return Response(200, OK)


# ---- inspection


def loads(request: Request, *, selections: Selections) -> Response:
    """Says what every rank works on, and what waits, by model and tenant."""
    return Response(200, selections.render_loads(*bodies.filters(request)))


def potential_loads(request: Request, *, selections: Selections) -> Response:
    """Says what every rank would be working on with one more prompt."""
    members, pool = _looked(selections, request)
    return Response(200, pool.render_loads(_settings(selections, members)))


def overlap_scores(request: Request, *, selections: Selections) -> Response:
    """Says how many blocks of a prompt every rank caches."""
    members, pool = _looked(selections, request)
    if "token_ids" in members:
        blocks = members["token_ids"] // pool.block_size
    else:
        blocks = members["block_hashes"]
    return Response(
        200,
        b'{"block_size":%d,"num_blocks":%d,"workers":%b,"shared_cache":{"enabled":false,'
        b'"total_hit_blocks":0,"ranges":[],"error":null}}'
        % (pool.block_size, blocks, pool.render_overlaps()),
    )


def _looked(selections: Selections, request: Request) -> tuple[bodies.Members, Pool]:
    members = bodies.scan(ASK, request.body)
    look = _look(selections, ASK, members)
    pool = selections.fleet(_place(members)).pool
    look(pool)
    return members, pool


def _place(members: bodies.Members) -> PartitionKey:
    model_name = members.get("model_name", DEFAULT_MODEL)
    if not isinstance(model_name, str):
        raise Invalid("model_name: expected a text")
    return PartitionKey(model_name, bodies.tenant(members))


def _bounded_id(text: str) -> str:
    if len(text.encode()) > MAX_REQUEST_ID_BYTES:
        raise Invalid(f"reservation_id: longer than {MAX_REQUEST_ID_BYTES} bytes")
    return text
