"""The client's calls against the OpenAPI documents: every route, every member, every answer."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from inspect import signature
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

import pytest

from kvd.client.calls import Asked, Call, Face, encoded, request_of
from kvd.client.conductor import Conductor
from kvd.client.gateway import Gateway
from kvd.client.indexer import Indexer
from kvd.client.reading import OTHERS
from kvd.client.selection import SelectionService
from kvd.client.slot_tracker import SlotTracker
from kvd.faces.common.openapi import document
from kvd.faces.common.paths import UI_FILES
from kvd.faces.gateway.routes import RELAYED, STORED
from tests.support.all_routes import DESCRIPTIONS, all_routes

FACES: dict[str, type[Face[Any]]] = {
    "indexer": Indexer,
    "slot-tracker": SlotTracker,
    "selection": SelectionService,
    "conductor": Conductor,
    "gateway": Gateway,
}
# Members that repeat another one, or have no effect.
UNSENT = {
    "routing_group",  # tenant_id
    *("model", "model_name", "modelname"),  # a face has one of them, or all
    "additional_salt",
    "additionalsalt",
    "block_hash",  # seq_hashes
    "block_hashes",
}
RANKS = {"pattern": "^(0|[1-9][0-9]*)$"}  # schema of members that are named by a rank
UNSENT_TO = {
    "POST /query_by_hash": {"cache_salt"},  # no effect on the indexer
    "POST /select_and_reserve": {"advisory"},  # cannot be booked
    "PATCH /workers/{worker_id}": {"worker_id", "model_name", "tenant_id"},  # never change
    "GET /services": {"verbose"},  # only for the msgpack dialect
}


@cache
def operations(face: str) -> dict[str, dict[str, Any]]:
    paths = document(face, all_routes()[face], DESCRIPTIONS[face])["paths"]
    return {
        f"{method.upper()} {path}": operation
        for path, methods in paths.items()
        for method, operation in methods.items()
    }


def asked_of(face: str) -> dict[str, Asked[Any, Any]]:
    """Returns the calls of a face by name."""
    found = ((name, getattr(FACES[face], name)) for name in dir(FACES[face]))
    return {name: each for name, each in found if isinstance(each, Asked)}


CALLS = [
    pytest.param(face, each, id=f"{face}-{name}")
    for face in FACES
    for name, each in asked_of(face).items()
]
EACH_CALL = pytest.mark.parametrize(("face", "each"), CALLS)


@pytest.mark.parametrize("face", FACES)
def test_every_route_is_a_call(face: str) -> None:
    pages = {f"GET {path}" for path in UI_FILES}  # for browsers
    engines = {f"POST {path}" for path in RELAYED} | {" ".join(each) for each in STORED}
    known = operations(face).keys() - pages - engines
    public = {name for name in known if not name.startswith("GET /v1/models")}
    names = [each.route.name for each in asked_of(face).values()]
    assert sorted(names) == sorted(public)


# ---- what is sent


def parameters(make: Any) -> dict[str, Any]:
    """Returns the types of a call's arguments by name, with the members of a TypedDict."""
    hints = get_type_hints(make)
    found: dict[str, Any] = {}
    for name in list(signature(make).parameters)[1:]:
        (inner,) = get_args(hints[name])[:1] or (None,)
        if is_typeddict(inner):
            found |= get_type_hints(inner)
        else:
            found[name] = hints[name]
    return found


def sample(kind: Any) -> Any:
    """Returns a value that an argument of this type can have."""
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    first = get_origin(kinds[0]) or kinds[0]
    if first is Sequence:
        return [sample(get_args(kinds[0])[0])]
    return {str: "x", int: 1, float: 1.0, bool: True, Mapping: {}, Any: 1}[first]


def played(each: Asked[Any, Any]) -> Call[Any]:
    """Returns the call, made with every argument."""
    given = {name: sample(kind) for name, kind in parameters(each.make).items()}
    call: Call[Any] = each.make(None, **given)
    return call


@EACH_CALL
def test_a_call_says_all_that_its_route_reads(face: str, each: Asked[Any, Any]) -> None:
    call, operation = played(each), operations(face)[each.route.name]
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    known, sent = set(schema.get("properties", {})), set(call.body or ())
    assert set(schema.get("required", ())) <= sent <= known
    if {"model_name", "model", "modelname"} & known:
        assert {"model_name", "model", "modelname"} & sent or each is SelectionService.change_worker
    assert known - sent <= UNSENT | UNSENT_TO.get(each.route.name, set())
    assert (call.body is not None) == ("requestBody" in operation)
    given = {(parameter["in"], parameter["name"]) for parameter in operation.get("parameters", ())}
    by_query = {name for where, name in given if where == "query"}
    queried = set(call.query or ())
    assert queried <= by_query
    assert by_query - queried <= UNSENT | UNSENT_TO.get(each.route.name, set())
    assert ("header", "idempotency-key") in given or call.key is None
    assert (call.key is not None) == (("header", "idempotency-key") in given)
    assert (call.segment is not None) == any(where == "path" for where, _ in given)


def test_what_a_call_comes_to() -> None:
    made = request_of(
        Call(segment="a/b ?", query={"model_name": "m&n", "tenant_id": None}),
        SlotTracker.request.route,
    )
    assert made == ("GET", "/requests/a%2Fb%20%3F?model_name=m%26n", (), b"")
    call: Call[None] = Call({"model_name": "m", "token_ids": range(3), "x": None}, key="k")
    made = request_of(call, Indexer.query.route)
    assert made.body == b'{"model_name":"m","token_ids":[0,1,2]}'
    assert dict(made.headers) == {"idempotency-key": "k", "content-type": "application/json"}
    override = types.MappingProxyType({"router_temperature": 0.5})
    assert encoded({"of": override}) == b'{"of":{"router_temperature":0.5}}'


def test_what_json_has_no_word_for_is_an_error() -> None:
    with pytest.raises(ValueError):
        encoded({"priority_jump": float("nan")})
    with pytest.raises(TypeError):
        encoded({"model_name": object()})


def test_ranks_name_members() -> None:
    assert json.loads(encoded({"kv_events_endpoints": {3: "tcp://h:1"}})) == {
        "kv_events_endpoints": {"3": "tcp://h:1"}
    }


# ---- what is answered


def misfits(schema: dict[str, Any], kind: Any, path: str) -> Iterator[str]:
    """Yields the paths where values of a schema do not fit the type that they are read as."""
    if kind is Any:
        return
    if choices := schema.get("anyOf"):
        for each in choices:
            yield from misfits(each, kind, path)
        return
    named = schema.get("type")
    if isinstance(named, list):
        for each in named:
            yield from misfits(schema | {"type": each}, kind, path)
        return
    if get_origin(kind) in (Union, types.UnionType):
        found = [list(misfits(schema, each, path)) for each in get_args(kind)]
        if all(found):
            yield from found[0]
        return
    if "const" in schema:
        wanted = type(schema["const"])
        if kind is not wanted:
            yield f"{path}: {kind} for {wanted}"
        return
    if named == "array":
        yield from misfits_of_array(schema, kind, path)
    elif named == "object" and is_dataclass(kind):
        yield from misfits_of_row(schema, kind, path)
    elif named == "object":
        yield from misfits_of_mapping(schema, kind, path)
    else:
        plain = {"string": str, "integer": int, "number": float, "boolean": bool}
        plain |= {"null": types.NoneType}
        if kind is not plain.get(named):
            yield f"{path}: {kind} for {named}"


def misfits_of_array(schema: dict[str, Any], kind: Any, path: str) -> Iterator[str]:
    if get_origin(kind) is not tuple:
        yield f"{path}: {kind} for an array"
    elif "prefixItems" in schema:
        for each, inner in zip(schema["prefixItems"], get_args(kind), strict=True):
            yield from misfits(each, inner, f"{path}[]")
    elif "items" in schema:
        assert get_args(kind)[1] is ...
        yield from misfits(schema["items"], get_args(kind)[0], f"{path}[]")


def misfits_of_row(schema: dict[str, Any], kind: Any, path: str) -> Iterator[str]:
    hints = get_type_hints(kind)
    named = {each.metadata.get("name", each.name): each for each in fields(kind)}
    rest = next((name for name, each in named.items() if each.metadata == OTHERS), None)
    if rest is not None:
        del named[rest]
        further = schema["additionalProperties"]
        yield from misfits(further, get_args(hints[rest])[1], f"{path}.{rest}")
    if different := named.keys() ^ schema["properties"].keys():
        yield f"{path}: {sorted(different)} on one side only"
    required = set(schema.get("required", ()))
    for name, each in named.items():
        if (each.default is MISSING) != (name in required):
            yield f"{path}.{name}: required on one side only"
        if name in schema["properties"]:
            yield from misfits(schema["properties"][name], hints[each.name], f"{path}.{name}")


def misfits_of_mapping(schema: dict[str, Any], kind: Any, path: str) -> Iterator[str]:
    if get_origin(kind) is not Mapping:
        yield f"{path}: {kind} for an object"
        return
    by_number = schema.get("propertyNames") == RANKS
    key, value = get_args(kind)
    if by_number != (key is int):
        yield f"{path}: members named by {key}"
    for name, each in schema.get("properties", {}).items():
        yield from misfits(each, value, f"{path}.{name}")
    if isinstance(further := schema.get("additionalProperties"), dict):
        yield from misfits(further, value, f"{path}.*")


@EACH_CALL
def test_answers_are_read_as_they_are_documented(face: str, each: Asked[Any, Any]) -> None:
    responses = operations(face)[each.route.name]["responses"]
    for status in each.route.statuses:
        content = responses.get(str(status), {}).get("content", {})
        for kind, media in content.items():
            if each.answer is types.NoneType:
                assert media["schema"]["properties"] == {"status": {"const": "ok"}}
            elif each.answer is str:
                assert media["schema"] == {"type": "string"}
            elif kind == "application/json":
                schema = media["schema"]
                if status == 503:
                    schema = schema["anyOf"][0]  # the other alternative is a refusal
                assert list(misfits(schema, each.answer, "answer")) == []


def test_a_misfit_is_found() -> None:
    documented = operations("indexer")["POST /query"]["responses"]["200"]["content"]
    schema = documented["application/json"]["schema"]
    assert list(misfits(schema, Mapping[str, int], "answer"))
    changed = schema | {"properties": schema["properties"] | {"new": {"type": "string"}}}
    (found,) = misfits(changed, Indexer.query.answer, "answer")
    assert found == "answer: ['new'] on one side only"


@pytest.mark.parametrize("face", FACES)
def test_every_call_and_answer_is_explained(face: str) -> None:
    for name, each in asked_of(face).items():
        assert each.__doc__, name
        if is_dataclass(each.answer):
            assert not str(each.answer.__doc__).startswith(each.answer.__name__ + "("), name
