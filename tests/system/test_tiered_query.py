"""The route for selectors without an index of their own: each rank and tier, in a strict form."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, cast

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.errors import KvdError
from kvd.faces.indexer import routes as indexer
from kvd.http.limits import HttpLimits
from kvd.http.messages import Request, Response
from kvd.http.routes import Route
from kvd.index.partitions import State
from kvd.index.peers import Peers
from kvd.index.registry import LEFT_PAIR_S, Registry
from kvd.model import PartitionKey, RankKey
from kvd_core.index.prefix_index import TIERS
from tests.support.http_client import Client
from tests.support.idle_listeners import IdleListeners
from tests.support.running import running_kvd

BLOCK = 4
ROUTE = "/query_tiered_by_hash"
PLACE = PartitionKey("m", "g")
LOWER = ("host_pinned", "disk", "external")
HIGHEST = 2**64 - 1

Rank = tuple[int, int]
Rows = dict[str, dict[Rank, int]]  # by tier: further blocks of each rank


def made_of(members: Any, *names: str) -> list[Any]:
    """Returns the values of an object, which must have exactly these members, in any order."""
    assert isinstance(members, dict)
    assert set(members) == set(names)
    return [members[name] for name in names]


def number(value: Any, bits: int) -> int:
    assert type(value) is int
    assert 0 <= value < 2**bits
    return value


def read_rows(rows: Any) -> dict[Rank, int]:
    """Returns the blocks of each rank; rows must be sorted, and none may be of 0 blocks."""
    assert isinstance(rows, list)
    found = {}
    for who, blocks in rows:
        worker, dp_rank = made_of(who, "worker_id", "dp_rank")
        found[number(worker, 64), number(dp_rank, 32)] = number(blocks, 32)
    assert len(found) == len(rows)
    assert list(found) == sorted(found)
    assert all(found.values())
    return found


def read_strictly(answer: bytes) -> tuple[int, Rows]:
    """Reads an answer like a client that requires every member; returns block size and rows."""
    block_size, tiered = made_of(json.loads(answer), "block_size", "tiered")
    device, lower = made_of(tiered, "device", "lower_tier")
    scores, frequencies = made_of(device, "scores", "frequencies")
    assert frequencies == []
    rows = {"device": read_rows(scores)}
    for tier, found in lower:
        assert tier in LOWER
        assert tier not in rows
        (hits,) = made_of(found, "hits")
        rows[tier] = read_rows(hits)
        assert rows[tier], "a tier without hits"
    assert [tier for tier in LOWER if tier in rows] == list(rows)[1:]
    return number(block_size, 32), rows


def body_of(hashes: list[int], **members: Any) -> bytes:
    asked = {"block_hashes": hashes, "model_name": "m", "routing_group": "g"}
    return json.dumps(asked | members).encode()


def ask(routes: dict[str, Route], path: str, body: bytes) -> bytes:
    """Returns the body of a route's answer."""
    response = cast(Response, routes[path].handler(Request("POST", path, b"", [], body)))
    return cast(bytes, response.body)


def made() -> tuple[State, Registry, dict[str, Route]]:
    state = State()
    registry = Registry(state, IdleListeners())
    routes = indexer.routes(state, registry, Peers(), indexer.dumps_bound(8))
    return state, registry, {route.path: route for route in routes}


HASHES = list(range(1, 7))
HELD = st.tuples(
    st.sampled_from([(7, 0), (7, 1), (2**63 + 1, 0), (HIGHEST, 3), (10, 0)]),
    st.sampled_from(range(len(TIERS))),
    st.integers(0, 5),  # first block
    st.integers(1, 6),  # blocks
)


@settings(deadline=None)
@given(held=st.lists(HELD, max_size=12), asked=st.integers(0, 6))
def test_what_the_tiers_add_sums_to_what_query_by_hash_says(
    held: list[tuple[Rank, int, int, int]], asked: int
) -> None:
    state, _, routes = made()
    for instance in (7, 2**63 + 1, HIGHEST, 10):
        state.add_rank(RankKey(PLACE, instance, 0), BLOCK)
    partition = state.partition(*PLACE)
    for (instance, dp_rank), tier, first, count in held:
        worker = partition.workers[instance]
        chain = HASHES[: first + count]
        # Blocks before the first one are stored and dropped again, so that it has a position.
        worker.store(dp_rank, [100 + each for each in chain], chain, tier=tier)
        before = [each for each in held if each[:2] == ((instance, dp_rank), tier)]
        if min(each[2] for each in before) == first:
            worker.drop(dp_rank, [100 + each for each in chain[:first]], tier)
    body = body_of(HASHES[:asked])
    block_size, rows = read_strictly(ask(routes, ROUTE, body))
    assert block_size == BLOCK
    plain = json.loads(ask(routes, "/query_by_hash", body))
    reached: dict[Rank, dict[str, int]] = {}
    for tier in ("device", *LOWER):
        for rank, blocks in rows.get(tier, {}).items():
            reached.setdefault(rank, {})[tier] = blocks
    for instance in (7, 2**63 + 1, HIGHEST, 10):
        best = {"gpu": 0, "cpu": 0, "disk": 0}
        for (worker_id, dp_rank), added in reached.items():
            if worker_id != instance:
                continue
            device = added.get("device", 0) * BLOCK
            host = device + added.get("host_pinned", 0) * BLOCK
            disk = host + (added.get("disk", 0) + added.get("external", 0)) * BLOCK
            assert plain["scores"][str(instance)][str(dp_rank)] == device
            for name, depth in (("gpu", device), ("cpu", host), ("disk", disk)):
                best[name] = max(best[name], depth)
        row = plain["instances"].get(str(instance), {})
        assert {name: row.get(name, 0) for name in best} == best


def test_the_external_tier_is_apart_from_the_disk() -> None:
    state, _, routes = made()
    state.add_rank(RankKey(PLACE, 7, 0), BLOCK)
    state.add_rank(RankKey(PLACE, 8, 0), BLOCK)
    seven, eight = (state.partition(*PLACE).workers[each] for each in (7, 8))
    for tier in range(4):
        chain = HASHES[: tier + 1]
        seven.store(0, chain, chain, tier=tier)
    eight.store(0, HASHES, HASHES, tier=3)
    _, rows = read_strictly(ask(routes, ROUTE, body_of(HASHES)))
    assert rows == {
        "device": {(7, 0): 1},
        "host_pinned": {(7, 0): 1},
        "disk": {(7, 0): 1},
        "external": {(7, 0): 1, (8, 0): 6},
    }


async def test_a_pair_whose_last_worker_has_just_left_matches_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    _, registry, routes = made()
    key = RankKey(PLACE, 7, 0)
    handler = routes[ROUTE].handler

    def asked(**members: Any) -> bytes | str:
        request = Request("POST", ROUTE, b"", [], body_of([1], **members))
        try:
            return cast(bytes, cast(Response, handler(request)).body)  # type: ignore[operator]
        except KvdError as error:
            return str(error)

    unknown = "no indexer for model=m routing_group=g"
    assert asked() == unknown
    registry.register(key, "tcp://127.0.0.1:1", BLOCK, None)
    await registry.unregister(7, "m", "g", None)
    nothing = b'{"block_size":4,"tiered":{"device":{"scores":[],"frequencies":[]},"lower_tier":[]}}'
    assert asked() == nothing
    assert asked(routing_group="other") == unknown.replace("=g", "=other")
    await trio.sleep(LEFT_PAIR_S - 0.1)
    assert asked() == nothing
    await trio.sleep(0.2)
    assert asked() == unknown
    registry.register(key, "tcp://127.0.0.1:1", 2 * BLOCK, None)
    assert read_strictly(cast(bytes, asked())) == (2 * BLOCK, {"device": {}})
    await registry.unregister(7, "m", None, 0)
    assert read_strictly(cast(bytes, asked())) == (2 * BLOCK, {"device": {}})


async def test_pairs_that_were_left_are_remembered_within_a_bound(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = 100
    monkeypatch.setattr("kvd.index.registry.MAX_LEFT_PAIRS", bound)
    _, registry, _ = made()
    for number in range(bound + 1):
        place = PartitionKey("m", str(number))
        registry.register(RankKey(place, 7, 0), "tcp://127.0.0.1:1", BLOCK, None)
        await registry.unregister(7, *place, None)
    assert registry.block_size_left(PartitionKey("m", "0")) is None
    assert registry.block_size_left(PartitionKey("m", "1")) == BLOCK
    assert registry.block_size_left(PartitionKey("m", str(bound))) == BLOCK


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with (
        running_kvd(tmp_path_factory.mktemp("kvd")) as server,
        Client(server.base_url) as made,
    ):
        place = {"model_name": "m", "routing_group": "g", "block_size": BLOCK}
        worker = {"instance_id": HIGHEST, "endpoint": "tcp://127.0.0.1:1"}
        assert made.post("/register", json=worker | place).status_code == 201
        yield made


@pytest.mark.parametrize(
    "hashes",
    [[], [1], [-1], [-(2**63)], [2**63], [2**64 - 1], [1] * 5000],
    ids=lambda hashes: str(hashes)[:24],
)
def test_what_nobody_holds_matches_nothing(client: Client, hashes: list[int]) -> None:
    answer = client.post(ROUTE, json=json.loads(body_of(hashes)))
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert read_strictly(answer.content) == (BLOCK, {"device": {}})


def test_members_that_the_hashes_carry_already_are_not_looked_at(client: Client) -> None:
    odd = {"lora_name": 1, "cache_salt": [], "unknown": None}
    assert client.post(ROUTE, content=body_of([1], **odd), headers=JSON).status_code == 200


JSON = {"content-type": "application/json"}


def test_the_longest_body_is_answered_in_both_framings(client: Client) -> None:
    limit = 8 * 1024 * 1024
    body = body_of([1] * 100_000)
    body += b" " * (limit - len(body))
    chunks = [body[: limit // 2], body[limit // 2 :]]
    for content in (body, iter(chunks)):
        answer = client.post(ROUTE, content=content, headers=JSON)
        assert read_strictly(answer.content) == (BLOCK, {"device": {}})
    refused = client.post(ROUTE, content=body + b" ", headers=JSON)
    assert refused.status_code == 413


def test_requests_are_counted_under_their_own_name(client: Client) -> None:
    def count() -> int:
        line = rf'dynamo_kvindexer_requests_total\{{[^}}]*endpoint="{ROUTE}"[^}}]*\}} (\d+)'
        return sum(int(each) for each in re.findall(line, client.get("/metrics").text))

    before = count()
    assert client.post(ROUTE, content=body_of([1]), headers=JSON).status_code == 200
    assert client.post(ROUTE, content=body_of([1], model_name="x"), headers=JSON).status_code == 404
    assert count() == before + 2


def test_idle_connections_are_kept_longer_than_such_clients_do() -> None:
    assert HttpLimits().idle_s > 90  # reqwest's pool keeps them 90 s
