"""Hints that Dynamo's clients add to their requests have their effect over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvd_core.base.hashing import sequence_hashes
from tests.conformance.failure import wait_until
from tests.support import exposition
from tests.support.http_client import Client
from tests.support.ports import find_free_port
from tests.support.running import running, running_kvd

WITHIN_S = 20.0
TOKENS = [1] * 8

Json = dict[str, Any]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """The selection service of all tests here, without KV events, beside a slot tracker."""
    port, slots = find_free_port(), find_free_port()
    flags = [f"--selection-bind=127.0.0.1:{port}", f"--slot-tracker-bind=127.0.0.1:{slots}"]
    flags += ["--indexer-bind=off", "--conductor-bind=off", "--session-affinity-ttl-secs=60"]
    environ = {"DYN_ROUTER_USE_KV_EVENTS": "false", "DYN_ROUTER_QUEUE_THRESHOLD": "1"}
    folder = tmp_path_factory.mktemp("service")
    with (
        running(folder, port, "serve", *flags, environ=environ) as server,
        Client(server.base_url, timeout=60.0) as client,
    ):
        client.headers["x-slots"] = f"http://127.0.0.1:{slots}"
        yield client


@pytest.fixture
def client(service: Client) -> Iterator[Client]:
    """The service with worker 1 alone, which is busy above 8 tokens."""
    put(service, 1)
    yield service
    service.put("/workers", json={"workers": []}).raise_for_status()  # with their requests
    for row in service.get("/loads").json():
        assert (row["loads"], row["pending_count"]) == ([], 0)


def put(client: Client, worker_id: int, **members: Any) -> Json:
    row = {"worker_id": worker_id, "block_size": 4, "endpoint": "http://w"}
    row |= {"max_num_batched_tokens": 8, "total_kv_blocks": 100}
    answer = client.post("/workers", json={**row, **members})
    answer.raise_for_status()
    shown: Json = answer.json()
    return shown


def reserve(client: Client, name: str, **members: Any) -> httpx.Response:
    body = {"token_ids": [len(name)] * 12, "reservation_id": name, **members}
    return client.post("/select_and_reserve", json=body)


def waiting(client: Client, count: int) -> None:
    def check() -> str | None:
        (row,) = client.get("/loads").json()
        pending = row["pending_count"]
        return None if pending == count else f"{pending} wait"

    wait_until(check, WITHIN_S)


@pytest.mark.parametrize("hints", [{"latency_sensitivity": 1000.0}, {"priority": 1000}], ids=str)
def test_a_request_that_says_that_it_is_urgent_goes_first(client: Client, hints: Json) -> None:
    assert reserve(client, "first").status_code == 200  # now the worker is busy
    with ThreadPoolExecutor() as pool:
        usual = pool.submit(reserve, client, "usual")
        waiting(client, 1)
        urgent = pool.submit(reserve, client, "urgent", nvext={"agent_hints": hints})
        waiting(client, 2)
        client.post("/reservations/first/prefill_complete").raise_for_status()
        assert urgent.result().status_code == 200 and not usual.done()
        client.post("/reservations/urgent/prefill_complete").raise_for_status()
        assert usual.result().status_code == 200


def test_the_output_that_is_expected_may_be_a_hint(client: Client) -> None:
    assert reserve(client, "a", nvext={"agent_hints": {"osl": 7}}).status_code == 200
    assert client.get("/reservations/a").json()["expected_output_tokens"] == 7
    client.delete("/reservations/a").raise_for_status()
    both = {"nvext": {"agent_hints": {"osl": 7}}, "expected_output_tokens": 9}
    assert reserve(client, "b", **both).status_code == 200
    assert client.get("/reservations/b").json()["expected_output_tokens"] == 9


@pytest.mark.parametrize(
    ("members", "error"),
    [
        ({"nvext": 1}, "nvext: expected an object"),
        ({"nvext": {"agent_hints": []}}, "agent_hints: expected an object"),
        ({"nvext": {"agent_hints": {"osl": "7"}}}, "osl: expected a whole number"),
        ({"nvext": {"agent_hints": {"priority": "x"}}}, "priority: expected a number"),
        ({"session_context": {}}, "missing member `session_id`"),
        (
            {"session_context": {"session_id": "s", "input_trigger": "x"}},
            "input_trigger: expected one of user_message, tool_result, other",
        ),
        (
            {"session_context": {"session_id": "s", "session_final": 1}},
            "session_final: expected true or false",
        ),
        ({"advisory": "x"}, "advisory: expected true or false"),
        ({"is_eagle": 1}, "is_eagle: expected true or false"),
    ],
)
def test_a_hint_that_cannot_be_followed_is_refused(
    client: Client, members: Json, error: str
) -> None:
    answer = client.post("/select", json={"token_ids": TOKENS, **members})
    assert (answer.status_code, answer.json()) == (422, {"error": error})


def test_an_advisory_selection_never_waits_and_shows_the_load(client: Client) -> None:
    question = {"token_ids": TOKENS, "advisory": True}
    idle = {"active_prefill_tokens": 0, "prefill_token_capacity": 8, "total_kv_blocks": 100}
    assert client.post("/select", json=question).json()["worker_load"] == idle
    assert reserve(client, "first").status_code == 200
    with ThreadPoolExecutor() as pool:
        held = pool.submit(reserve, client, "held")
        waiting(client, 1)
        load = client.post("/select", json=question).json()["worker_load"]
        assert load == idle | {"active_prefill_tokens": 12}
        assert not held.done()
        client.delete("/reservations/first").raise_for_status()
        assert held.result().status_code == 200
    answer = reserve(client, "no", advisory=True)
    assert answer.status_code == 400
    assert answer.json() == {"error": "advisory: an advisory request cannot book"}


def test_the_context_of_a_session_says_whose_it_is(client: Client) -> None:
    put(client, 2)
    context = {"session_id": "s", "parent_session_id": "p", "session_final": False}
    context["input_trigger"] = "tool_result"
    bound = {"pinned_worker": {"worker_id": 2, "dp_rank": 0}, "session_id": "another"}
    assert reserve(client, "a", session_context=context, **bound).status_code == 200
    client.delete("/reservations/a").raise_for_status()
    for _ in range(8):  # by load alone either could be chosen
        answer = client.post("/select", json={"token_ids": TOKENS, "session_id": "s"}).json()
        assert answer["worker_id"] == 2


def test_a_selection_that_waits_for_a_worker_that_is_deleted_is_answered(
    client: Client,
) -> None:
    assert reserve(client, "first").status_code == 200
    with ThreadPoolExecutor() as pool:
        held = pool.submit(reserve, client, "held")
        waiting(client, 1)
        client.delete("/workers/1").raise_for_status()
        answer = held.result()
    assert answer.status_code == 503
    assert answer.json() == {"error": "no schedulable workers are available"}
    for name in ("first", "held"):
        assert client.get(f"/reservations/{name}").status_code == 404


def test_hints_for_other_routers_are_kept_in_the_catalog(client: Client) -> None:
    assert "router_hint_worker_type" not in put(client, 2)
    hints = {"router_hint_worker_type": "decode"}
    endpoints = {"0": "tcp://w:7000"}
    shown = put(client, 2, **hints, router_hint_source_control_endpoints=endpoints)
    assert shown["router_hint_worker_type"] == "decode"
    assert shown["router_hint_source_control_endpoints"] == endpoints
    changed = client.patch("/workers/2", json={"router_hint_worker_type": "prefill"}).json()
    assert changed["router_hint_worker_type"] == "prefill"
    assert changed["router_hint_source_control_endpoints"] == endpoints


def test_an_advisory_answer_says_who_prefills_too_much(tmp_path: Path) -> None:
    environ = {"DYN_ROUTER_USE_KV_EVENTS": "false"}
    environ["DYN_ROUTER_CONDITIONAL_DISAGG_PREFILL_BUSY_THRESHOLD"] = "0.5"
    with (
        running_kvd(tmp_path, face="select-service", environ=environ) as server,
        Client(server.base_url) as client,
    ):
        busy = []
        for name in ("ab", "c"):  # worker 1 is busy above half of 24 tokens
            put(client, 1, max_num_batched_tokens=24)
            reserve(client, name, pinned_worker={"worker_id": 1, "dp_rank": 0})
            question = {"token_ids": TOKENS, "advisory": True}
            load = client.post("/select", json=question).json()["worker_load"]
            busy.append((load["active_prefill_tokens"], load["prefill_busy"]))
        assert busy == [(12, False), (24, True)]
        row = {"worker_id": 1, "block_size": 4, "endpoint": "http://w"}
        client.post("/workers", json=row).raise_for_status()  # its token capacity is unknown
        load = client.post("/select", json=question).json()["worker_load"]
        assert (load["prefill_token_capacity"], load["prefill_busy"]) == (None, False)


def test_an_answer_says_who_decodes_too_much(tmp_path: Path) -> None:
    environ = {"DYN_ROUTER_USE_KV_EVENTS": "false"}
    environ["DYN_ROUTER_CONDITIONAL_DISAGG_DECODE_BUSY_THRESHOLD"] = "0.25"
    with (
        running_kvd(tmp_path, face="select-service", environ=environ) as server,
        Client(server.base_url) as client,
    ):
        put(client, 1, max_num_batched_tokens=1000, total_kv_blocks=32)
        # A quarter of its blocks is not too much; partial blocks count.
        for tokens, busy in ((32, False), (33, True)):
            for members in ({}, {"advisory": True}):  # by the fast path, and by the handler
                question = {"token_ids": [1] * tokens, **members}
                answer = client.post("/select", json=question).json()
                assert answer["decode_busy"] is busy
                assert list(answer).index("decode_busy") == 1 + list(answer).index(
                    "potential_decode_blocks"
                )
        answer = client.post("/select_and_reserve", json={"token_ids": [2] * 24}).json()
        assert (answer["potential_decode_blocks"], answer["decode_busy"]) == (6, False)
        answer = client.post("/select", json={"token_ids": [3] * 12}).json()
        assert (answer["potential_decode_blocks"], answer["decode_busy"]) == (9, True)
        put(client, 1, max_num_batched_tokens=1000, total_kv_blocks=0)  # any block is too much
        assert client.post("/select", json={"token_ids": [4]}).json()["decode_busy"] is True
        row = {"worker_id": 1, "block_size": 4, "endpoint": "http://w"}
        client.post("/workers", json=row).raise_for_status()  # its number of blocks is unknown
        assert "decode_busy" not in client.post("/select", json=question).json()


@pytest.mark.parametrize("enforcement", ["required", "preferred"])
def test_domains_of_transfers_are_kept_and_change_no_choice(
    client: Client, enforcement: str
) -> None:
    members = {"kv_transfer_domain": "rack", "kv_transfer_enforcement": enforcement}
    for worker_id, role, rack in ((1, "prefill", "r1"), (2, "decode", "r2")):
        shown = put(client, worker_id, role=role, topology_domains={"rack": rack}, **members)
        assert members.items() <= shown.items() and shown["lifecycle"] == "schedulable"
    answer = client.post("/select", json={"token_ids": TOKENS, "phase": "both"}).json()
    assert (answer["prefill"]["worker_id"], answer["worker_id"]) == (1, 2)
    answer = client.patch("/workers/1", json={"kv_transfer_enforcement": "other"})
    error = "kv_transfer_enforcement: expected one of required, preferred"
    assert (answer.status_code, answer.json()) == (422, {"error": error})


def test_a_booking_that_is_wrong_is_refused_before_its_tracker_is_looked_for(
    client: Client,
) -> None:
    slots = client.headers["x-slots"]
    body = {"model_name": "none", "request_id": "r", "worker_id": "x", "dp_rank": 0}
    body |= {"sequence_hashes": [1], "new_isl_tokens": 4}
    with Client(slots) as tracker:
        answer = tracker.post("/add", json=body)
        assert answer.status_code == 422 and "worker_id" in answer.json()["error"]
        assert tracker.post("/add", json={**body, "worker_id": 1}).status_code == 404


def test_a_prompt_that_waits_is_hashed_by_the_block_size_there_is(client: Client) -> None:
    tokens = list(range(20))
    hashed = {"block_hashes": [1, 2], "sequence_hashes": [1, 2], "isl_tokens": 20}
    rehashed = count_rehashed(client)
    assert reserve(client, "first").status_code == 200  # now the worker is busy
    with ThreadPoolExecutor() as pool:
        callers = [pool.submit(reserve, client, "one", token_ids=tokens)]
        waiting(client, 1)
        callers.append(pool.submit(reserve, client, "two", token_ids=tokens))
        waiting(client, 2)
        lost = pool.submit(client.post, "/select", json=hashed)
        waiting(client, 3)
        wide = {"worker_id": 1, "block_size": 8, "endpoint": "http://w"}
        wide |= {"max_num_batched_tokens": 8}
        client.put("/workers", json={"workers": [wide]}).raise_for_status()
        refused = lost.result()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json() == {
            "error": "the block size of the workers changed while the request waited"
        }
        assert callers[0].result().json()["overlap"]["gpu"] == 0
        waiting(client, 1)  # the first keeps the worker busy, and counts as cached
        client.post("/reservations/one/prefill_complete").raise_for_status()
        answer = callers[1].result().json()
    assert (answer["block_size"], answer["overlap"]["gpu"]) == (8, 16)
    assert answer["effective_prefill_tokens"] == 4
    assert client.get("/reservations/two").json()["blocks"] == 2
    assert count_rehashed(client) == rehashed + 2


def count_rehashed(client: Client) -> float:
    return exposition.parse(client.get("/metrics").text)["kvd_selection_rehashed_total"]


def test_tokens_for_eagle_engines_are_hashed_as_pairs(client: Client) -> None:
    tokens = list(range(1, 10))
    # Dynamo 1.6.1 computes these hashes.
    locals_ = [1914873892905420881, 1929047464662796003]
    hashed = {"block_hashes": locals_, "sequence_hashes": sequence_hashes(locals_), "isl_tokens": 9}
    assert reserve(client, "a", token_ids=tokens, is_eagle=True).status_code == 200

    def scores(**prompt: Any) -> tuple[int, int]:
        shown = client.post("/overlap_scores", json=prompt).json()
        (row,) = shown["workers"]
        return shown["num_blocks"], row["device_blocks"]

    assert scores(token_ids=tokens, is_eagle=True) == (2, 2)
    assert scores(**hashed) == (2, 2)
    assert scores(token_ids=tokens[:8], is_eagle=True) == (1, 1)  # the second block lacks a pair
    assert scores(token_ids=tokens) == scores(token_ids=tokens, is_eagle=False) == (2, 0)
    # Blocks in use are shared with prompts that were hashed elsewhere.
    (row,) = client.post("/potential_loads", json=hashed).json()
    assert row["potential_decode_blocks"] == 2
    (row,) = client.post("/potential_loads", json={"token_ids": tokens}).json()
    assert row["potential_decode_blocks"] == 4
    salted = {"token_ids": tokens, "is_eagle": True, "cache_salt": "s"}
    assert scores(**salted) == (2, 0)  # engines do not share blocks between salts
    client.delete("/reservations/a").raise_for_status()
    assert reserve(client, "b", **salted).status_code == 200
    assert scores(**salted) == (2, 2)


def test_a_worker_beside_others_of_another_kind_is_not_chosen(client: Client) -> None:
    reasons = ["is_eagle differs from that of its model"]
    assert put(client, 2, is_eagle=False)["lifecycle"] == "schedulable"
    shown = put(client, 3, is_eagle=True)
    assert (shown["lifecycle"], shown["not_schedulable_reasons"]) == ("incomplete", reasons)
    assert client.patch("/workers/2", json={"is_eagle": True}).json()["lifecycle"] == "incomplete"
    client.delete("/workers/1").raise_for_status()
    shown = client.get("/workers").json()
    assert [row["lifecycle"] for row in shown] == ["schedulable", "schedulable"]
    row = {"block_size": 4, "endpoint": "http://w"}
    mixed = [{**row, "worker_id": 4}, {**row, "worker_id": 5, "is_eagle": True}]
    answer = client.put("/workers", json={"workers": mixed})
    assert (answer.status_code, answer.json()["error"]) == (422, f"worker 5: {reasons[0]}")
