"""Queries answered by the lane's own code: the same as by the handlers, whatever the body."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, cast

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvd.errors import KvdError
from kvd.faces.indexer import routes as indexer
from kvd.faces.indexer.plain import PlainQuery
from kvd.http.types import Request, Response, Route
from kvd.index.partitions import State
from kvd.index.peers import Peers
from kvd.index.registry import Registry
from kvd.model import DEFAULT_TENANT, PartitionKey, RankKey
from kvd_core.json.scan import BodyScanner

BLOCK_SIZE = 4
TOKENS = list(range(4 * BLOCK_SIZE))


def filled_state() -> State:
    """Returns a state with one worker's chain of blocks in two partitions."""
    state = State()
    for tenant in (DEFAULT_TENANT, "other"):
        stream = state.add_rank(RankKey(PartitionKey("m", tenant), 7, 0), BLOCK_SIZE)
        for lora in (None, "adapter"):
            event = ["BlockStored", [1, 2, 3], None, TOKENS[:12], BLOCK_SIZE, None, "GPU", lora]
            stream.apply(msgpack.packb([0.0, [event]]))
    return state


STATE = filled_state()
ROUTES = {
    route.path: route
    for route in indexer.routes(STATE, cast(Registry, None), Peers(), indexer.dumps_bound(8))
}
QUERIES = [ROUTES[path] for path in ("/query", "/query_by_hash", "/query_tiered_by_hash")]

VALUES = st.sampled_from(
    ['"m"', '"other"', '"adapter"', '""', "null", "1", "true", "[]", r'"\u006d"', '"\u00e9"', "[1]"]
)
NUMBERS = st.sampled_from(
    [json.dumps(TOKENS), "[]", "[1]", "null", "[-1]", "[4294967296]", "[1.0]"]
)
FIELDS = [name for name in indexer.QUERY_FIELDS if name != "streams"]  # which is never plain
MEMBERS = st.one_of(
    st.tuples(st.sampled_from(["token_ids", "block_hashes"]), NUMBERS),
    st.tuples(st.sampled_from([*FIELDS, "unknown"]), VALUES),
)
USUAL = [("token_ids", json.dumps(TOKENS)), ("block_hashes", "[1]"), ("model_name", '"m"')]
BODIES = st.lists(MEMBERS, max_size=4).map(lambda more: members_body([*USUAL, *more]))


def members_body(members: list[tuple[str, str]]) -> bytes:
    return ("{" + ",".join(f'"{name}":{value}' for name, value in members) + "}").encode()


def handled(route: Route, body: bytes) -> bytes | None:
    """Returns what the handler answers with 200, None for anything else."""
    handler = cast(Callable[[Request], Response], route.handler)
    try:
        response = handler(Request("POST", route.path, b"", [], body))
    except KvdError:
        return None
    assert response.status == 200
    return cast(bytes, response.body)


@pytest.mark.parametrize("route", QUERIES, ids=lambda route: route.path)
@given(body=st.one_of(BODIES, st.binary(max_size=20)))
@example(body=members_body(USUAL[:1]))
def test_what_is_answered_is_what_the_handler_answers(route: Route, body: bytes) -> None:
    assert route.answerer is not None
    answer = route.answerer(body)
    assert answer is None or answer == handled(route, body)


@pytest.mark.parametrize("route", QUERIES, ids=lambda route: route.path)
@pytest.mark.parametrize(
    "members",
    [
        {},
        {"tenant_id": "other"},
        {"routing_group": "other"},
        {"lora_name": "adapter", "cache_salt": "s"},
        {"lora_name": None, "cache_salt": None},
        {"unknown": [1, {"a": None}]},
    ],
    ids=str,
)
def test_usual_queries_are_answered(route: Route, members: dict[str, Any]) -> None:
    body = members_body([*USUAL, *((name, json.dumps(v)) for name, v in members.items())])
    if route.path != "/query":
        members.pop("lora_name", None)
    assert route.answerer is not None
    answer = route.answerer(body)
    assert answer is not None
    assert answer == handled(route, body)


def test_a_scanner_of_other_members_is_a_mistake() -> None:
    for arrays, fields in (
        ({"token_ids": "u32"}, ("model_name", "lora_name")),
        ({"block_hashes": "hash64"}, indexer.QUERY_FIELDS),
    ):
        with pytest.raises(ValueError, match="not the fields of a query"):
            PlainQuery(BodyScanner(arrays, fields), {}, DEFAULT_TENANT)
