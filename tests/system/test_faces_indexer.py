"""The indexer face over HTTP: what it refuses and how, and that refusing changes nothing.

The scenarios of tests/conformance check what it does; they leave open the 4xx of each fault.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from tests.support.bodies import CHECKS, Refusals, check_methods
from tests.support.http_client import Client
from tests.support.indexer_bodies import INDEXER, MODEL, POSTS, SOMEWHERE
from tests.support.processes import Server
from tests.support.running import running_kvd

BLOCK_SIZE = 4

ROUTES = pytest.mark.parametrize("path", POSTS)


@pytest.fixture(scope="module")
def kvd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_kvd(tmp_path_factory.mktemp("kvd")) as server:
        yield server


@pytest.fixture(scope="module")
def client(kvd: Server) -> Iterator[Client]:
    """A client of a kvd in which ranks 10 and 9 of instance 1 are registered and active."""
    with (
        Client(kvd.base_url) as made,
        zmq.Context() as context,
        context.socket(zmq.PUB) as engine,
    ):
        port = engine.bind_to_random_port("tcp://127.0.0.1")
        for dp_rank in (10, 9):
            body = {
                "instance_id": 1,
                "dp_rank": dp_rank,
                "endpoint": f"tcp://127.0.0.1:{port}",
                "model_name": MODEL,
                "block_size": BLOCK_SIZE,
            }
            assert made.post("/register", json=body).status_code == 201
        kvd.wait_until(
            lambda: [row["status"] for row in made.get("/workers").json()] == ["active"],
            "listening to both ranks",
        )
        yield made


@pytest.fixture(autouse=True)
def unchanged(client: Client) -> Iterator[None]:
    """Fails a test that leaves instances or blocks changed."""
    before = _state(client)
    yield
    assert _state(client) == before


def _state(client: Client) -> tuple[Any, Any]:
    """Returns instances and blocks, without members that change by themselves."""
    own = {"listeners", "questions", "matched"}
    rows = client.get("/workers").json()
    return [{name: row[name] for name in row.keys() - own} for row in rows], client.get(
        "/dump"
    ).json()


@pytest.fixture(scope="module")
def refusals(client: Client) -> Refusals:
    def undo(path: str) -> None:
        if path == "/register":
            body, _ = POSTS["/unregister"]
            assert client.post("/unregister", json=body).status_code == 200

    return Refusals(client, INDEXER, lambda: _state(client), undo)


@pytest.mark.parametrize("rule", CHECKS)
@ROUTES
def test_what_every_route_refuses(path: str, rule: str, refusals: Refusals) -> None:
    CHECKS[rule](refusals, path)


def test_a_registration_that_contradicts_another_is_409(refusals: Refusals) -> None:
    valid = {**POSTS["/register"][0], "model_name": MODEL}
    contradictions = {
        "a registered rank": {"instance_id": 1, "dp_rank": 9},
        "a registered rank elsewhere": {"instance_id": 1, "dp_rank": 9, "block_size": 8},
        "another block size": {"block_size": 8},
        "another block size for another rank": {"instance_id": 1, "block_size": 8},
    }
    bodies = {name: json.dumps(valid | c).encode() for name, c in contradictions.items()}
    refusals.refused("/register", bodies, 409)


@pytest.mark.parametrize("member", ["endpoint", "replay_endpoint"])
def test_a_faulty_endpoint_is_400(member: str, refusals: Refusals) -> None:
    faulty = (
        "",
        "127.0.0.1:5557",
        "http://127.0.0.1:5557",
        "tcp://",
        "tcp://127.0.0.1",
        "tcp://:5557",
        "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:-1",
        "tcp://[::1:5557",
        "tcp://127.0.0.1:5557/",
        " tcp://127.0.0.1:5557",
        "tcp://127.0.0.1:5557\0",
        "pgm://eth0;239.192.1.1:5557",
    )
    bodies = {text: refusals.with_member("/register", member, json.dumps(text)) for text in faulty}
    for error in refusals.refused("/register", bodies, 400):
        assert "endpoint `" in error


def test_a_refused_registration_leaves_no_model_behind(refusals: Refusals) -> None:
    valid = {**POSTS["/register"][0], "model_name": "refused", "replay_endpoint": "nowhere"}
    refusals.refused("/register", {"its replay endpoint": json.dumps(valid).encode()}, 400)
    for path, (query, _) in POSTS.items():
        if path.startswith("/query"):
            missing = json.dumps({**query, "model_name": "refused"}).encode()
            (error,) = refusals.refused(path, {"unknown model": missing}, 404)
            tenant = "routing_group" if path == "/query_tiered_by_hash" else "tenant_id"
            assert error == f"no indexer for model=refused {tenant}=default"


def test_what_is_not_registered_cannot_be_unregistered(refusals: Refusals) -> None:
    registered = {"instance_id": 1, "model_name": MODEL}
    unknown: dict[str, dict[str, Any]] = {
        "another instance": {"instance_id": 2},
        "another model": {"model_name": "new"},
        "another tenant": {"tenant_id": "other"},
        "another tenant by its newer name": {"routing_group": "other"},
        "another rank": {"dp_rank": 8},
        "another rank of the tenant": {"tenant_id": "default", "dp_rank": 8},
    }
    bodies = {name: json.dumps(registered | s).encode() for name, s in unknown.items()}
    refusals.refused("/unregister", bodies, 404)


def test_methods_and_paths_that_do_not_exist(client: Client) -> None:
    allowed = dict.fromkeys(POSTS, "POST")
    allowed |= dict.fromkeys(("/health", "/workers", "/dump"), "GET, HEAD")
    check_methods(client, allowed)
    for path, methods in allowed.items():
        assert client.get(path.upper()).json().keys() == {"error"}
        if methods != "POST":
            head = client.head(path)
            assert (head.status_code, head.content) == (200, b"")


def test_workers_are_listed_by_rank_and_filtered_by_both_names(client: Client) -> None:
    (row,) = client.get("/workers").json()
    assert list(row["endpoints"]) == list(row["listeners"]) == ["9", "10"]
    found = {
        "?tenant_id=default": 1,
        "?routing_group=default": 1,
        "?routing_group=default&tenant_id=default&model_name=face:model": 1,
        "?model_name=face%3Amodel": 1,
        "?routing_group=other": 0,
        "?model_name=": 0,
        "?unknown=1&unknown=2": 1,
    }
    for query, rows in found.items():
        assert (query, len(client.get("/workers" + query).json())) == (query, rows)
    refused = {"?tenant_id=a&tenant_id=a": 400, "?tenant_id=a&routing_group=b": 422}
    for query, status in refused.items():
        response = client.get("/workers" + query)
        assert (query, response.status_code) == (query, status)
        assert response.json().keys() == {"error"}


def test_a_dump_names_model_and_tenant_apart(client: Client) -> None:
    _check_dump_lists(client, ("face", "model:tenant"), ('q"', ""))


def test_a_dump_lists_models_and_tenants_whose_names_look_alike(client: Client) -> None:
    _check_dump_lists(client, ("face", "model:default"))  # beside `face:model` of `default`


def _check_dump_lists(client: Client, *tenants: tuple[str, str]) -> None:
    """Registers an instance for further models and tenants while it reads a dump."""
    instance = {"instance_id": 5, "endpoint": SOMEWHERE, "block_size": 8}
    for model_name, tenant_id in tenants:
        names = {"model_name": model_name, "routing_group": tenant_id}
        assert client.post("/register", json=instance | names).status_code == 201
    entries = client.get("/dump").json().values()
    for model_name, _ in tenants:
        gone = {"instance_id": 5, "model_name": model_name}
        assert client.post("/unregister", json=gone).status_code == 200
    assert {
        (entry["model_name"], entry["tenant_id"], entry["block_size"]) for entry in entries
    } == {
        (MODEL, "default", BLOCK_SIZE),
        *((*names, 8) for names in tenants),
    }


def test_an_instance_is_pending_while_one_of_its_ranks_is(client: Client) -> None:
    names = {"instance_id": 1, "dp_rank": 1, "model_name": MODEL}
    rank = {**names, "endpoint": SOMEWHERE, "block_size": BLOCK_SIZE}
    assert client.post("/register", json=rank).status_code == 201
    (row,) = client.get("/workers").json()
    assert row["status"] == row["listeners"]["1"]["status"] == "pending"
    assert row["listeners"]["9"]["status"] == "active"
    assert client.post("/unregister", json=names).status_code == 200


@pytest.mark.parametrize("name", ["model_name", "tenant_id", "endpoint", "replay_endpoint"])
def test_what_is_kept_is_not_too_long(client: Client, name: str) -> None:
    body = {"instance_id": 5, "endpoint": SOMEWHERE, "model_name": "m", "block_size": 4}
    response = client.post("/register", json=body | {name: "x" * 4097})
    assert (response.status_code, response.json()) == (
        422,
        {"error": f"{name}: longer than 4096 bytes"},
    )
    response = client.post("/register_peer", json={"url": "http://" + "x" * 4090})
    assert response.status_code == 422


# Dynamo 1.6.1 does not have this route yet.
NOT_AT_THE_PEER = "/query_tiered_by_hash"


@pytest.mark.peer
@pytest.mark.parametrize("path", sorted(POSTS.keys() - {NOT_AT_THE_PEER}))
def test_the_live_peer_refuses_the_same(
    path: str, refusals: Refusals, peer_process: Callable[..., Server]
) -> None:
    with Client(peer_process().base_url) as theirs:
        refusals.check_peer(path, theirs)
