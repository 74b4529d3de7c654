"""Modes, thresholds, taints and phases over HTTP, as operators and gateways meet them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvd.config.errors import StartError
from kvd.config.load import load
from kvd.selection.phases import PREFILL_SUFFIX
from kvd_core.ledger.ledger import MAX_REQUEST_ID_BYTES
from tests.conformance.engine import Engine
from tests.conformance.failure import wait_until
from tests.support.http_client import Client
from tests.support.processes import Server
from tests.support.running import running_kvd

LONGEST = MAX_REQUEST_ID_BYTES - len(PREFILL_SUFFIX)  # id of a reservation of both phases
PROMPT = {"block_hashes": [1, 2], "sequence_hashes": [3, 4], "isl_tokens": 8}


@pytest.fixture(scope="module")
def kvd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environ = {"DYN_ROUTER_MODE": "round-robin", "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD": "100000"}
    folder = tmp_path_factory.mktemp("kvd")
    with running_kvd(folder, face="select-service", environ=environ) as server:
        yield server


@pytest.fixture
def client(kvd: Server) -> Iterator[Client]:
    with Client(kvd.base_url) as made:
        yield made
        for row in made.get("/workers").json():
            made.delete(f"/workers/{row['worker_id']}")
    assert "Traceback" not in kvd.stderr


def register(client: Client, worker_id: int, model: str, **members: Any) -> None:
    record = {
        "worker_id": worker_id,
        "model_name": model,
        "endpoint": f"http://worker-{worker_id}",
        "block_size": 4,
        "kv_events_endpoint": f"ipc:///nonexistent/{worker_id}",
    }
    answer = client.post("/workers", json=record | members)
    assert answer.json()["lifecycle"] == "schedulable", answer.text


def select(client: Client, model: str, path: str = "/select", **members: Any) -> Any:
    answer = client.post(path, json={"model_name": model, **PROMPT, **members})
    assert answer.status_code == 200, answer.text
    return answer.json()


def workers(client: Client, model: str, times: int, **members: Any) -> list[int]:
    return [select(client, model, **members)["worker_id"] for _ in range(times)]


def test_the_mode_by_default_by_model_by_tenant_and_by_request(client: Client) -> None:
    for worker_id in (1, 2):
        register(client, worker_id, "mode")
    assert workers(client, "mode", 4) == [1, 2, 1, 2]
    assert client.get("/router_mode").json() == {"router_mode": "round-robin", "router_modes": []}
    select(client, "mode", "/select_and_reserve", pinned_worker={"worker_id": 1, "dp_rank": 0})
    override = {"router_config_override": {"router_mode": "least-loaded"}}
    assert workers(client, "mode", 3, **override) == [2, 2, 2]
    changed = {"model_name": "mode", "tenant_id": "default", "router_mode": "direct"}
    assert client.post("/router_mode", json=changed).json() == {
        "model": "mode",
        "tenant_id": "default",
        "router_mode": "direct",
    }
    body = {"model_name": "mode", **PROMPT}
    answer = client.post("/select", json=body)
    assert answer.status_code == 400 and "pinned_worker" in answer.json()["error"]
    pinned = {"pinned_worker": {"worker_id": 1, "dp_rank": 0}}
    assert workers(client, "mode", 2, **pinned) == [1, 1]
    both = client.post("/select", json=body | pinned | {"phase": "both"})
    assert both.status_code == 400
    assert len(client.get("/router_mode").json()["router_modes"]) == 1
    gone = client.delete("/router_mode", params={"model_name": "mode", "tenant_id": "default"})
    assert gone.json()["router_mode"] == "round-robin"
    assert client.delete("/router_mode").status_code == 400
    assert client.post("/router_mode", json=changed | {"model_name": "x"}).status_code == 404


def test_the_policy_by_default_by_model_by_tenant_and_by_request(client: Client) -> None:
    register(client, 1, "policy")
    listed = client.get("/policy").json()
    assert (listed["router_policy"], listed["router_policies"]) == ("dynamo", [])
    assert listed["presets"]["dynamo"]["overlap_weight"] == 1
    kvd = {
        "uncached": 1,
        "hold_up": 0,
        "crowding": 0.07,
        "crowding_limit": 16384,
        "queued": 0.5,
        "per_request": 0,
        "per_block": 0,
        "product": 0,
        "saturation": None,
        "session_bound": 1.177,
    }
    assert listed["presets"]["kvd"] == kvd
    changed = client.post("/policy", json={"model": "policy", "router_policy": "kvd"}).json()
    assert changed == {"model": "policy", "router_policy": "kvd", "weights": kvd}
    assert client.get("/policy").json()["router_policies"] == [changed]

    def terms(**members: Any) -> Any:
        kv = {"router_mode": "kv", **members.pop("override", {})}
        override = {"router_config_override": kv, "explain": True}
        (row,) = select(client, "policy", **override, **members)["candidates"]
        return [row[f"{name}_cost"] for name in ("uncached", "product", "prefill", "decode")]

    # Nothing is cached, so 8 tokens, or 2 blocks, are to be computed.
    assert terms() == [8, 0, 0, 0]
    assert terms(override={"router_temperature": 0.5}) == [8, 0, 0, 0]
    assert terms(router_policy="lmetric") == [0, 8, 0, 0]
    for name in ("overlap_score_weight", "overlap_score_credit"):
        assert terms(override={name: 1}) == [0, 0, 2, 2]
    assert terms(override={"overlap_score_weight": 1}, router_policy="kvd") == [8, 0, 0, 0]
    own = {"model": "policy", "tenant_id": "default", "router_policy": "lmetric"}
    assert client.post("/policy", json=own).json()["weights"]["product"] == 1
    assert terms() == [0, 8, 0, 0]
    for place, left in (({"tenant_id": "default"}, "kvd"), ({}, "dynamo")):
        gone = client.delete("/policy", params={"model_name": "policy", **place})
        assert gone.json()["router_policy"] == left
    assert terms() == [0, 0, 2, 2]
    assert client.post("/policy", json=own | {"model": "none"}).status_code == 404
    refused = client.post("/policy", json=own | {"router_policy": "best"})
    assert refused.status_code == 422 and "kvd, lmetric" in refused.json()["error"]


def test_a_row_by_numbers(client: Client) -> None:
    register(client, 1, "row")

    def post(policy: Any, **place: str) -> Any:
        body = {"model": "row", "router_policy": policy, **place}
        return client.post("/policy", json=body)

    def counted(**members: Any) -> Any:
        override = {"router_config_override": {"router_mode": "kv"}, "explain": True}
        answer = select(client, "row", **override | members)
        (row,) = answer["candidates"]
        costs = {name: row[name] for name in ("uncached_cost", "product_cost", "prefill_cost")}
        return answer["router_policy"], costs

    changed = post({"policy": "kvd", "weights": {"uncached": 3, "saturation": 7}}).json()
    assert changed["router_policy"] == "kvd,uncached=3,saturation=7"
    assert changed["weights"]["uncached"] == 3 and changed["weights"]["saturation"] == 7
    # Changes to the row in use, by the policy's name, and for a tenant.
    assert post({"weights": {"saturation": None}}).json()["router_policy"] == "kvd,uncached=3"
    assert post("kvd,uncached=2").json()["router_policy"] == "kvd,uncached=2"
    own = post({"weights": {"product": 1}}, tenant_id="default").json()
    assert own["router_policy"] == "kvd,uncached=2,product=1"
    costs = {"uncached_cost": 16, "product_cost": 8, "prefill_cost": 0}
    assert counted() == ("kvd,uncached=2,product=1", costs)
    one = {"weights": {"product": 0}}
    assert counted(router_policy=one) == ("kvd,uncached=2", costs | {"product_cost": 0})
    four = {"policy": "kvd", "weights": {"uncached": 4}}
    assert counted(router_policy=four)[1]["uncached_cost"] == 32
    by_dynamo = counted(router_config_override={"router_mode": "kv", "overlap_score_weight": 2})
    assert by_dynamo[0] == "dynamo,overlap_weight=2" and by_dynamo[1]["prefill_cost"] == 4
    half = {"policy": "kvd", "weights": {"uncached": 1, "hold_up": -1}}
    for wrong, why in (
        (half, "hold_up must lie in"),
        ({"policy": "kvd", "weights": {"speed": 1}}, "speed: no such weight of kvd"),
        ({"policy": "kvd", "weights": {"uncached": None}}, "uncached: expected a number"),
        ({"policy": "kvd", "weights": {"uncached": "1"}}, "uncached: expected a number"),
        ({"policy": "kvd", "weights": {"uncached": 1e300}}, "uncached must lie in"),
        ({"policy": "kvd", "weights": [1]}, "weights: expected an object"),
        ({"uncached": 1}, "uncached: unknown member"),
        ({"policy": 1}, "policy: expected a text"),
        (1, "expected a text or an object"),
    ):
        for refused in (
            post(wrong),
            client.post("/select", json={"model_name": "row", **PROMPT, "router_policy": wrong}),
        ):
            assert refused.status_code == 422, refused.text
            assert f"router_policy: {why}" in refused.json()["error"]
    places = client.get("/policy").json()["router_policies"]
    assert [each["router_policy"] for each in places] == [
        "kvd,uncached=2",
        "kvd,uncached=2,product=1",
    ]
    for place in ({"tenant_id": "default"}, {}):
        client.delete("/policy", params={"model_name": "row", **place})
    assert client.get("/policy").json()["router_policies"] == []


def test_busy_thresholds_at_run_time(client: Client) -> None:
    for worker_id in (1, 2):
        register(client, worker_id, "busy", total_kv_blocks=4)
    nothing = {
        "model": "busy",
        "active_decode_blocks_threshold": None,
        "active_prefill_tokens_threshold": 100000,
        "active_prefill_tokens_threshold_frac": None,
    }
    assert client.post("/busy_threshold", json={"model": "busy"}).json() == nothing
    assert nothing in client.get("/busy_threshold").json()["thresholds"]
    for worker_id in (1, 2):
        pinned = {"pinned_worker": {"worker_id": worker_id, "dp_rank": 0}}
        booked = {"reservation_id": f"busy {worker_id}"}
        select(client, "busy", "/select_and_reserve", **pinned, **booked)
    changed = {"model": "busy", "active_decode_blocks_threshold": 0.4}
    answer = client.post("/busy_threshold", json=changed)
    assert answer.json() == nothing | changed
    refused = client.post("/select", json={"model_name": "busy", **PROMPT})
    assert refused.status_code == 503 and "retry-after" in refused.headers
    assert client.delete("/reservations/busy%201").status_code == 200
    assert workers(client, "busy", 3) == [1, 1, 1]
    own = {"model": "busy", "tenant_id": "default", "active_decode_blocks_threshold": "off"}
    answer = client.post("/busy_threshold", json=own)
    assert answer.json()["active_decode_blocks_threshold"] is None
    assert set(workers(client, "busy", 4)) == {1, 2}
    for place in ({"model_name": "busy", "tenant_id": "default"}, {"model_name": "busy"}):
        gone = client.delete("/busy_threshold", params=place)
    assert gone.json() == nothing
    wrong: list[tuple[int, dict[str, Any]]] = [
        (400, {"active_decode_blocks_threshold": 1.1}),
        (400, {"active_decode_blocks_threshold": -1}),
        (400, {"active_prefill_tokens_threshold_frac": -0.5}),
        (400, {"active_prefill_tokens_threshold_frac": 1.1e18}),
        (404, {"model": "none", "active_decode_blocks_threshold": 1}),
        (404, {"tenant_id": "none", "active_decode_blocks_threshold": 1}),
    ]
    for status, change in wrong:
        answer = client.post("/busy_threshold", json={"model": "busy"} | change)
        assert (answer.status_code, change) == (status, change)
    assert client.post("/busy_threshold", json={"model": "none"}).json()["model"] == "none"


def test_preferred_taints(client: Client) -> None:
    for worker_id, taints in ((1, []), (2, ["a"]), (3, ["b"])):
        register(client, worker_id, "taints", taints=taints)
    kv = {"router_config_override": {"router_mode": "kv"}}

    def chosen(constraints: dict[str, Any], times: int = 12) -> set[int]:
        return set(workers(client, "taints", times, routing_constraints=constraints, **kv))

    assert chosen({"preferred_taints": {"a": 0.5}}) == {2}
    assert chosen({"preferred_taints": {"a": 0.5, "b": 0.6}}) == {3}
    assert chosen({"preferred_taints": ["b"]}) == {3}
    assert chosen({"preferred_taints": {"a": -1, "b": -1}}) == {1}
    assert chosen({"preferred_taints": {"b": 1}, "required_taints": ["a"]}) == {2}
    # Ties are drawn at random: 100 draws miss one of three in one run of 10^17.
    assert chosen({"preferred_taints": {}}, 100) == {1, 2, 3}


def test_both_phases_of_a_request(client: Client) -> None:
    register(client, 1, "phases", role="prefill")
    register(client, 2, "phases", role="decode")
    assert workers(client, "phases", 3) == [2, 2, 2]
    assert select(client, "phases", phase="prefill")["worker_id"] == 1
    answer = select(
        client, "phases", "/select_and_reserve", phase="both", reservation_id="r", explain=True
    )
    assert (answer["worker_id"], answer["prefill"]["worker_id"]) == (2, 1)
    assert answer["prefill"]["endpoint"] == "http://worker-1"
    assert answer["prefill"]["candidates"][0]["eligible"] is True

    def loads() -> Any:
        (row,) = client.get("/loads", params={"model_name": "phases"}).json()
        return [
            (each["potential_prefill_tokens"], each["potential_decode_blocks"])
            for each in row["loads"]
        ]

    assert loads() == [(8, 0), (0, 2)]
    assert client.post("/reservations/r/prefill_complete").status_code == 200
    assert loads() == [(0, 0), (0, 2)]
    assert client.delete("/reservations/r%3Aprefill").status_code == 404
    assert client.delete("/reservations/r").status_code == 200
    assert loads() == [(0, 0), (0, 0)]
    named = select(client, "phases", "/select_and_reserve", phase="both")
    assert named["prefill"]["reservation_id"] == named["reservation_id"] + ":prefill"
    assert client.delete(f"/reservations/{named['reservation_id']}").status_code == 200
    assert loads() == [(0, 0), (0, 0)]
    booking = {"model_name": "phases", **PROMPT, "worker_id": 1, "reservation_id": "p"}
    body = booking | {"phase": "prefill", "effective_prefill_tokens": 5}
    assert client.post("/reservations", json=body).status_code == 201
    assert loads() == [(5, 0), (0, 0)]
    assert client.delete("/reservations/p").status_code == 200
    for length, status in ((LONGEST, 200), (LONGEST + 1, 422)):
        body = {"model_name": "phases", **PROMPT, "phase": "both", "reservation_id": "x" * length}
        assert client.post("/select_and_reserve", json=body).status_code == status
    client.delete("/workers/1")
    alone = select(client, "phases", phase="both")
    assert alone["prefill"] is None and alone["worker_id"] == 2
    assert alone["fallback"] == "decode only: no prefill worker is available"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DYN_ROUTER_MODE", "fastest"),
        ("DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD", "1.5"),
        ("DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD", "1.5"),
    ],
)
def test_a_setting_that_makes_no_sense_stops_the_start(
    name: str, value: str, tmp_path: Path
) -> None:
    with pytest.raises(StartError, match=f"{name}='{value}'"):
        load({}, {name: value})


# ---- the start


def readiness(client: Client) -> tuple[int, list[str], str]:
    answer = client.get("/ready")
    members = answer.json()
    assert members["ready"] is (answer.status_code == 200)
    return answer.status_code, members["not_ready_reasons"], members["recovery"]["state"]


def test_as_many_workers_as_were_asked_for_are_waited_for(tmp_path: Path) -> None:
    environ = {"DYN_ROUTER_MIN_INITIAL_WORKERS": "2"}
    with (
        running_kvd(tmp_path, face="select-service", environ=environ) as server,
        Client(server.base_url) as client,
    ):
        assert readiness(client)[:2] == (503, ["0 of 2 initial workers are schedulable"])
        register(client, 1, "one")
        assert readiness(client)[:2] == (503, ["1 of 2 initial workers are schedulable"])
        assert select(client, "one")["worker_id"] == 1  # still serves requests
        register(client, 2, "two")
        assert readiness(client) == (200, [], "off")
        client.delete("/workers/2")
        assert readiness(client)[0] == 200
        client.delete("/workers/1")
        assert readiness(client)[:2] == (503, ["no worker is schedulable"])


@contextmanager
def publishing() -> Iterator[Engine]:
    engine = Engine("e")
    engine.bind()
    try:
        yield engine
    finally:
        engine.unbind()


@contextmanager
def recovering(folder: Path, peer: str, delay_s: int) -> Iterator[Client]:
    environ = {"KVD_RECOVERY_DELAY_S": str(delay_s)}
    flags = ("--indexer-peers", peer)
    with (
        running_kvd(folder, *flags, face="select-service", environ=environ) as server,
        Client(server.base_url) as client,
    ):
        yield client


def test_recovery_is_waited_for(tmp_path: Path) -> None:
    with recovering(tmp_path, "http://127.0.0.1:1", delay_s=60) as client:
        register(client, 1, "m")
        assert readiness(client) == (503, ["recovery from a peer is in progress"], "running")


@pytest.mark.parametrize("state", ["done", "empty"])
def test_ready_tells_of_recovery(state: str, tmp_path: Path) -> None:
    with (
        running_kvd(tmp_path, face="select-service") as peer,
        Client(peer.base_url) as other,
        publishing() as engine,
    ):
        if state == "done":
            register(other, 1, "m", kv_events_endpoint=engine.endpoint("pub"))
            stored = ["BlockStored", [11, 12], None, list(range(8)), 4, None]
            engine.publish({"seq": 0, "batch": [1.5, [stored], None]})
            wait_until(lambda: None if other.get("/dump").json() else "not stored yet", 10)
        with recovering(tmp_path, peer.base_url, delay_s=0) as client:
            register(client, 1, "m")
            wait_until(lambda: None if readiness(client)[0] == 200 else "not ready", 10)
            assert readiness(client) == (200, [], state)
            blocks = client.get("/ready").json()["recovery"]["blocks"]
            assert blocks == (2 if state == "done" else 0)
