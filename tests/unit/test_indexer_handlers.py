"""The indexer's hot handlers: any body is answered, or refused with a clear error."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import msgpack
import pytest
import trio
from hypothesis import example, given
from hypothesis import strategies as st

from kvd.errors import BadJson, Invalid, KvdError, NotFound
from kvd.faces.indexer import routes as indexer
from kvd.faces.indexer.handlers import FIELDS
from kvd.http.hot import HotHandler
from kvd.http.messages import Request, Response
from kvd.http.routes import Route
from kvd.index.partitions import State
from kvd.index.peers import Peers
from kvd.index.registry import Registry
from kvd.model import DEFAULT_TENANT, PartitionKey, RankKey
from kvd_core.json.scan import AHEAD_BYTES
from tests.support.idle_listeners import IdleListeners

BLOCK_SIZE = 4
TOKENS = list(range(4 * BLOCK_SIZE))


def filled() -> tuple[State, Registry]:
    """Returns a state with one worker's chain of blocks in two partitions."""
    state = State()
    registry = Registry(state, IdleListeners())
    for tenant in (DEFAULT_TENANT, "other"):
        key = PartitionKey("m", tenant)
        registry.register(RankKey(key, 7, 0), "tcp://127.0.0.1:1", BLOCK_SIZE, None)
        stream = state.partitions[key].workers[7].stream(0)
        for lora, names in ((None, [1, 2, 3]), ("adapter", [4, 5, 6])):
            event = ["BlockStored", names, None, TOKENS[:12], BLOCK_SIZE, None, "GPU", lora]
            stream.apply(msgpack.packb([0.0, [event]]))
    return state, registry


STATE, REGISTRY = filled()
ROUTES = {
    route.path: route for route in indexer.routes(STATE, REGISTRY, Peers(), indexer.dumps_bound(8))
}
QUERIES = [ROUTES[path] for path in ("/query", "/query_by_hash", "/query_tiered_by_hash")]
every_query = pytest.mark.parametrize("route", QUERIES, ids=lambda route: route.path)

VALUES = st.sampled_from(
    ['"m"', '"other"', '"adapter"', '""', "null", "1", "true", "false", "[]", "[1]", '{"a":1e999}',
     r'"\u006d"', '"\u00e9"', "1e999", "9" * 5000]
)  # fmt: skip
NUMBERS = st.sampled_from(
    [json.dumps(TOKENS), "[]", "[1]", "null", "[-1]", "[4294967296]", "[1.0]"]
)
MEMBERS = st.one_of(
    st.tuples(st.sampled_from(["token_ids", "block_hashes"]), NUMBERS),
    st.tuples(st.sampled_from([*FIELDS, "unknown"]), VALUES),
)
USUAL = [("token_ids", json.dumps(TOKENS)), ("block_hashes", "[1]"), ("model_name", '"m"')]
BODIES = st.lists(MEMBERS, max_size=4).map(lambda more: members_body([*USUAL, *more]))

ESCAPES = r"a\n\u4e2d\ud83d\ude00\"" + "é中"
NESTED = f'[[],{{"{ESCAPES}":["{ESCAPES}",{{}},-1.5e3,null]}},[[ {{"":[]}} ]]]'


def members_body(members: list[tuple[str, str]]) -> bytes:
    return ("{" + ",".join(f'"{name}":{value}' for name, value in members) + "}").encode()


def asked(route: Route, body: bytes) -> Any:
    """Returns the parsed body of a route's answer; raises its refusal."""
    response = route.handler(Request("POST", route.path, b"", [], body))
    assert isinstance(response, Response) and isinstance(response.body, bytes)
    assert response.status == 200
    return json.loads(response.body)


@every_query
@given(body=st.one_of(BODIES, st.binary(max_size=20)))
@example(body=members_body(USUAL[:1]))
def test_every_body_is_answered_or_refused(route: Route, body: bytes) -> None:
    async def ask() -> None:
        try:
            asked(route, body)
        except KvdError as error:
            assert error.status in (400, 404, 422) and str(error)

    trio.run(ask)


def outcome(route: Route, body: bytes, some_bytes: int) -> Any:
    """Returns an answer or refusal; the body is scanned ahead in steps of `some_bytes`, if any."""
    handler = route.handler
    assert isinstance(handler, HotHandler)
    ahead = handler.ahead(body) if some_bytes else None
    while ahead is not None and not ahead.advance(some_bytes):
        pass
    try:
        response = handler(Request("POST", route.path, b"", [], body, ahead=ahead))
    except KvdError as error:
        return error.status, str(error)
    assert isinstance(response, Response)
    return response.body


@every_query
@given(body=st.one_of(BODIES, st.binary(max_size=20)), some_bytes=st.integers(1, 40))
@example(body=members_body([("token_ids", "[1,2,]"), ("model_name", '"m"')]), some_bytes=1)
@example(body=members_body([("token_ids", "[1,2")]), some_bytes=1)
@example(body=members_body([*USUAL, ("token_ids", "[1]")]), some_bytes=1)
@example(body=members_body([*USUAL, ("x", NESTED), (ESCAPES, NESTED)]), some_bytes=1)
@example(body=members_body([*USUAL, ("lora_name", f'"{ESCAPES}"'), (ESCAPES, "0")]), some_bytes=1)
@example(body=members_body([*USUAL, ("lora_name", NESTED)]), some_bytes=1)
@example(body=members_body([*USUAL, ("x", NESTED[:-1])]), some_bytes=1)
@example(body=members_body([*USUAL, ("lora_name", f'"{ESCAPES}')]), some_bytes=1)
@example(body=members_body([("token_ids", f'"{ESCAPES}"')]), some_bytes=1)
def test_a_body_may_be_scanned_in_steps(route: Route, body: bytes, some_bytes: int) -> None:
    async def ask() -> None:
        assert outcome(route, body, some_bytes) == outcome(route, body, 0)

    trio.run(ask)


@pytest.mark.parametrize("some_bytes", [0, AHEAD_BYTES])
def test_a_long_body_that_is_refused_is_neither_copied_nor_scanned_again(some_bytes: int) -> None:
    body = body_of(token_ids=list(range(400_000)))[:-1]
    outcome(ROUTES["/query"], body, some_bytes)  # what is imported or made at first use is there
    tracemalloc.start()
    try:
        assert outcome(ROUTES["/query"], body, some_bytes)[0] == BadJson.status
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < len(body)


@pytest.mark.parametrize(
    ("body", "some"),
    [
        (json.dumps({"token_ids": list(range(100_000))}).encode(), 1100),
        (members_body([("token_ids", "[" + "1 ,1," * 20_000 + "1]")]), 300),
        (members_body([("x", "[" * 50_000 + "]" * 50_000)]), 600),  # the end is read in one step
        (members_body([("x", "[" + "[]," * 30_000 + "[]]")]), 300),
        (members_body([("x", "{" + '"":0,' * 20_000 + '"":0}')]), 300),
        (members_body([("x", "[" + '"",' * 30_000 + '""]')]), 300),
        (members_body([("x", f'["{ESCAPES * 2000}"]')]), 300),
        (members_body([("x", f'{{"{ESCAPES * 2000}":0}}')]), 300),
        (members_body([("tenant_id", f'"{ESCAPES * 2000}"')]), 300),
        (members_body([("x", "0")] * 20_000), 300),
        (members_body([(ESCAPES * 2000, "0")]), 300),
    ],
    ids=lambda each: str(each)[:30],
)
def test_steps_of_a_scan_are_short(body: bytes, some: int) -> None:
    handler = ROUTES["/query"].handler
    assert isinstance(handler, HotHandler)
    ahead = handler.ahead(body)
    assert ahead is not None
    steps = 1
    while not ahead.advance(1000):
        steps += 1
    assert steps > len(body) // some


@every_query
@pytest.mark.parametrize(
    ("members", "same"),
    [
        ({}, {"model_name": "m", "tenant_id": DEFAULT_TENANT}),
        ({"tenant_id": "other"}, {"routing_group": "other"}),
        ({"tenant_id": "other"}, {"routing_group": "other", "tenant_id": "other"}),
        ({}, {"lora_name": None, "cache_salt": None}),
        ({}, {"streams": None}),
        ({}, {"streams": False}),
        ({}, {"unknown": [1, {"a": None}]}),
    ],
    ids=str,
)
def test_members_have_several_spellings(
    route: Route, members: dict[str, Any], same: dict[str, Any]
) -> None:
    asks = (body_of(**members), body_of(**same))
    assert asked(route, asks[0]) == asked(route, asks[1]) != {}


def body_of(**members: Any) -> bytes:
    usual = {"token_ids": TOKENS, "block_hashes": [1], "model_name": "m"}
    return json.dumps(usual | members).encode()


@every_query
def test_texts_may_be_escaped(route: Route) -> None:
    assert asked(route, members_body([*USUAL[:2], ("model_name", r'"\u006d"')])) == asked(
        route, body_of()
    )


def test_adapters_and_salts_narrow_tokens() -> None:
    whole = asked(ROUTES["/query"], body_of())["scores"]
    assert whole == {"7": {"0": 12}}
    assert asked(ROUTES["/query"], body_of(lora_name="adapter"))["scores"] == whole
    assert asked(ROUTES["/query"], body_of(lora_name="none"))["scores"] == {"7": {"0": 0}}
    assert asked(ROUTES["/query_by_hash"], body_of(cache_salt="s")) == asked(
        ROUTES["/query_by_hash"], body_of()
    )


@every_query
@pytest.mark.parametrize(
    ("body", "failure", "text"),
    [
        (b"{", BadJson, "the body is not valid JSON"),
        (b"[]", Invalid, "expected an object"),
        (body_of(model_name=None), Invalid, "model_name: expected a text"),
        (body_of(model_name="n"), NotFound, "no indexer for model=n"),
        (body_of(tenant_id=7), Invalid, "tenant_id: expected a text"),
        (body_of(tenant_id="a", routing_group="b"), Invalid, "are the same member and differ"),
        (members_body([("model_name", '"m"')]), Invalid, "missing member `"),
        (members_body([*USUAL[:2], ("model_name", "1e999")]), Invalid, "a number out of range"),
    ],
    ids=str,
)
async def test_failures_say_what_is_wrong(
    route: Route, body: bytes, failure: type[KvdError], text: str
) -> None:
    with pytest.raises(failure, match=text):
        asked(route, body)


@pytest.mark.parametrize("path", ["/query", "/query_by_hash"])
def test_members_that_only_some_queries_have_are_read_strictly(path: str) -> None:
    for name, value, text in (("streams", 1, "true or false"), ("cache_salt", 1, "a text")):
        with pytest.raises(Invalid, match=f"{name}: expected {text}"):
            asked(ROUTES[path], body_of(**{name: value}))


@pytest.mark.parametrize("route", QUERIES[:2], ids=lambda route: route.path)
async def test_queries_say_how_far_streams_can_be_believed(route: Route) -> None:
    answer = asked(route, body_of(streams=True))
    assert answer.pop("streams") == {"7": {"0": "recovering"}}
    assert answer == asked(route, body_of())


@every_query
def test_the_fast_path_asks_the_route_s_handler(route: Route) -> None:
    assert route.hot and isinstance(route.handler, HotHandler)
    assert not route.waits
