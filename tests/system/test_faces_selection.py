"""The selection service over HTTP: what it refuses and how, ids, overrides, listings, fuzz.

The scenarios of tests/conformance check how it chooses and accounts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from kvd.faces.selection.records import MAX_MEMBERS
from kvd_core.json.scan import MAX_OBJECT_BYTES
from kvd_core.ledger.ledger import MAX_REQUEST_ID_BYTES
from tests.support.bodies import CHECKS, JSON, NO_JSON, UNFIT, Refusals
from tests.support.http_client import Client
from tests.support.processes import Server
from tests.support.running import running_kvd
from tests.support.selection_bodies import (
    BOOKED,
    LIVE,
    MODEL,
    POSTS,
    PROMPT,
    REGISTERED,
    SELECTION,
    WORKER,
)

ROUTES = pytest.mark.parametrize("path", POSTS)
RULES = [rule for rule in CHECKS if rule not in (NO_JSON, UNFIT)]  # they differ here
FUZZED = 2500


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kvd")


@pytest.fixture(scope="module")
def kvd(folder: Path) -> Iterator[Server]:
    with running_kvd(folder, face="select-service") as server:
        yield server


@pytest.fixture(scope="module")
def client(kvd: Server) -> Iterator[Client]:
    """A client of a service with one worker and one reservation, in its decode phase."""
    with Client(kvd.base_url) as made:
        registered = made.post("/workers", json=REGISTERED)
        assert registered.json()["lifecycle"] == "schedulable", registered.text
        assert made.post("/reservations", json=BOOKED).status_code == 201
        assert made.post(f"/reservations/{LIVE}/prefill_complete").status_code == 200
        yield made


@pytest.fixture(scope="module")
def refusals(client: Client) -> Refusals:
    def undo(path: str) -> None:
        if path == "/workers":
            assert client.delete("/workers/2").status_code == 200
        if path in ("/select_and_reserve", "/reservations"):
            assert client.delete("/reservations/new").status_code == 200
        if path.endswith("/output_block"):
            rebook(client)

    return Refusals(client, SELECTION, lambda: state(client), undo)


def rebook(client: Client) -> None:
    assert client.delete(f"/reservations/{LIVE}").status_code == 200
    assert client.post("/reservations", json=BOOKED).status_code == 201
    assert client.post(f"/reservations/{LIVE}/prefill_complete").status_code == 200


@pytest.fixture(autouse=True)
def unchanged(client: Client, kvd: Server) -> Iterator[None]:
    """Fails a test that leaves workers or loads changed, or logs a traceback."""
    before = state(client)
    yield
    assert state(client) == before
    assert "Traceback" not in kvd.stderr


def state(client: Client) -> tuple[Any, Any]:
    """Returns workers and loads, without models that have no workers: these stay listed.

    Leaves out listeners, whose connections change by themselves, and speeds, which are learned
    from bookings.
    """
    loads = [row for row in client.get("/loads").json() if row["loads"]]
    workers = client.get("/workers").json()
    return [
        {name: row[name] for name in row.keys() - {"listeners", "speeds"}} for row in workers
    ], loads


def load(client: Client) -> Any:
    (row,) = client.get("/loads", params={"model_name": MODEL, "tenant_id": "default"}).json()
    return row


# ---- what is refused


@ROUTES
def test_what_is_no_json_is_400(path: str, refusals: Refusals) -> None:
    if path.endswith("/output_block"):  # needs no body
        valid = refusals.valid(path)
        refusals.refused(path, {"blank": b" ", "twice": valid * 2, "half": valid[:-1]}, 400)
    elif path.startswith("/replica_sync"):
        pytest.skip("the slot tracker's tests have it")
    else:
        refusals.check_no_json(path)


@pytest.mark.parametrize("rule", RULES)
@ROUTES
def test_what_every_route_refuses(path: str, rule: str, refusals: Refusals) -> None:
    CHECKS[rule](refusals, path)


@ROUTES
def test_a_member_that_does_not_fit_is_422_and_named(path: str, refusals: Refusals) -> None:
    for member, values in SELECTION.unfit[path].items():
        bodies = {f"{member}: {v[:60]}": refusals.with_member(path, member, v) for v in values}
        for error in refusals.refused(path, bodies, 422):
            assert len(error) < 200  # it does not repeat 5,000 digits


@pytest.mark.parametrize("path", ["/select", "/select_and_reserve", "/overlap_scores"])
def test_a_prompt_that_is_not_whole_is_400_and_says_what_is_missing(
    path: str, refusals: Refusals
) -> None:
    valid = POSTS[path][0]
    for missing in ("block_hashes", "sequence_hashes", "isl_tokens"):
        rest = {name: value for name, value in valid.items() if name != missing}
        (error,) = refusals.refused(path, {missing: json.dumps(rest).encode()}, 400)
        assert error == f"{missing} is required, or token_ids"
    others: dict[str, dict[str, Any]] = {
        "isl_tokens must be greater than 0": {"isl_tokens": 0},
        "isl_tokens is required, or token_ids": {"isl_tokens": None},
        "block_hashes length 1 must match sequence_hashes length 2": {"block_hashes": [1]},
    }
    for error, change in others.items():
        bodies = {error: json.dumps(valid | change).encode()}
        assert refusals.refused(path, bodies, 400) == [error]


def test_reservations_that_contradict_themselves(refusals: Refusals) -> None:
    valid = POSTS["/reservations"][0]
    statuses: list[tuple[int, dict[str, Any]]] = [
        (400, {"effective_prefill_tokens": 9}),
        (400, {"block_hashes": [1]}),
        (404, {"worker_id": 9}),
        (404, {"dp_rank": 2}),
        (409, {"reservation_id": LIVE}),
        (422, {"reservation_id": "x" * (MAX_REQUEST_ID_BYTES + 1)}),
        (422, {"reservation_id": None}),
        (503, {"model_name": "none"}),
        (503, {"tenant_id": "none"}),
    ]
    for status, change in statuses:
        refusals.refused(
            "/reservations", {str(change): json.dumps(valid | change).encode()}, status
        )


def test_fractions_are_from_0_to_1(refusals: Refusals, client: Client) -> None:
    path = f"/reservations/{LIVE}/output_block"
    wrong = {v: refusals.with_member(path, "decay_fraction", v) for v in ("-0.1", "1.01", "1e300")}
    refusals.refused(path, wrong, 400)
    unknown = "/reservations/unknown/output_block"
    refusals.refused(unknown, {"before the id": b'{"decay_fraction": 2}'}, 400)
    refusals.refused(unknown, {"fine": b'{"decay_fraction": 1}'}, 404)
    for body in ({}, {"decay_fraction": None}, {"decay_fraction": 0}, {"decay_fraction": 1}):
        assert client.post(path, json=body).status_code == 200
    assert client.post(path).status_code == 200
    assert client.post(path, headers=JSON).status_code == 200
    rebook(client)


# ---- null, and both names


def test_null_is_absence_where_a_member_is_optional(client: Client) -> None:
    optional = [
        "selection_id",
        "expected_output_tokens",
        "priority_jump",
        "strict_priority",
        "affinity_target",
        "pinned_worker",
        "allowed_worker_ids",
        "routing_constraints",
        "router_config_override",
        "lora_name",
        "cache_salt",
        "explain",
        "session_id",
        "token_ids",
    ]
    wanted = client.post("/select", json=PROMPT | {"allowed_worker_ids": [WORKER]}).json()
    for change in ({name: None} for name in optional):
        answer = client.post("/select", json=PROMPT | change)
        assert (change, answer.status_code) == (change, 200), answer.text
        assert answer.json().keys() == wanted.keys()
    override = dict.fromkeys(("overlap_score_weight", "router_temperature", "assume_kv_reuse"))
    body = PROMPT | {"router_config_override": override}
    assert client.post("/select", json=body).status_code == 200


@pytest.mark.parametrize("unusual", [{}, {"explain": True}])
def test_a_booking_without_another_id_has_that_of_its_selection(
    client: Client, unusual: dict[str, Any]
) -> None:
    body = PROMPT | unusual | {"selection_id": "s"}
    answer = client.post("/select_and_reserve", json=body)
    assert answer.status_code == 200, answer.text
    assert (answer.json()["selection_id"], answer.json()["reservation_id"]) == ("s", "s")
    assert client.post("/select_and_reserve", json=body).status_code == 409
    # Beside another id it only labels the answer.
    answer = client.post("/select_and_reserve", json=body | {"reservation_id": "r"})
    assert answer.json()["reservation_id"] == "r"
    # An empty one, which fits into no path, names nothing.
    answer = client.post("/select_and_reserve", json=body | {"selection_id": ""})
    for booked in ("s", "r", answer.json()["reservation_id"]):
        assert client.post(f"/reservations/{booked}/prefill_complete").status_code == 200
        assert client.delete(f"/reservations/{booked}").status_code == 200


def test_null_is_absence_of_a_prompt_in_another_form(client: Client) -> None:
    absent = {"block_hashes": None, "sequence_hashes": None, "isl_tokens": None}
    tokens = {"model_name": MODEL, "token_ids": [1, 2, 3, 4]}
    for path in ("/select", "/potential_loads", "/overlap_scores"):
        for wanted, with_nulls in (
            (tokens, tokens | absent),
            (PROMPT, PROMPT | {"token_ids": None}),
        ):
            answers = [client.post(path, json=body) for body in (wanted, with_nulls)]
            assert [answer.status_code for answer in answers] == [200, 200]
            assert (
                answers[0].json().keys() == answers[1].json().keys()
                if path == "/select"
                else (answers[0].json() == answers[1].json())
            )
        answer = client.post(path, json=PROMPT | {"block_hashes": None})
        assert (answer.status_code, answer.json()["error"][:12]) == (400, "block_hashes")
        assert client.post(path, json=absent | {"token_ids": None}).status_code == 400
    booked = BOOKED | {"reservation_id": "r", "block_hashes": None, "token_ids": None}
    assert client.post("/reservations", json=booked).status_code == 201
    assert client.delete("/reservations/r").status_code == 200


# ---- reservations that are shown and retried

RETRY_KEY = "Idempotency-Key"


def test_a_reservation_is_shown(client: Client) -> None:
    body = BOOKED | {"reservation_id": "a/b", "effective_prefill_tokens": 5}
    assert (
        client.post("/reservations", json=body | {"expected_output_tokens": 9}).status_code == 201
    )
    assert client.post("/reservations/a%2Fb/output_block").status_code == 200
    shown = client.get("/reservations/a%2Fb").json()
    assert 0 <= shown.pop("age_s") < 60
    wanted = {
        "reservation_id": "a/b",
        "model_name": MODEL,
        "tenant_id": "default",
        "worker_id": WORKER,
        "dp_rank": 0,
        "blocks": 2,
        "effective_prefill_tokens": 5,
        "active_prefill_tokens": 5,
        "prefill_complete": False,
        "output_blocks": 1,
        "expected_output_tokens": 9,
    }
    assert shown == wanted
    assert client.post("/reservations/a%2Fb/prefill_complete").status_code == 200
    shown = client.get("/reservations/a%2Fb").json()
    assert (shown["active_prefill_tokens"], shown["prefill_complete"]) == (0, True)
    assert client.delete("/reservations/a%2Fb").status_code == 200
    assert client.get("/reservations/a%2Fb").status_code == 404
    body = PROMPT | {"reservation_id": "r"}
    assert client.post("/select_and_reserve", json=body).status_code == 200
    assert client.get("/reservations/r").json()["expected_output_tokens"] is None
    assert client.delete("/reservations/r").status_code == 200


@pytest.mark.parametrize("path", ["/select_and_reserve", "/reservations"])
def test_a_retry_is_answered_as_the_first_time(path: str, client: Client) -> None:
    body = (PROMPT if path == "/select_and_reserve" else BOOKED) | {"reservation_id": "r"}
    key = {RETRY_KEY: "k"}
    first = client.post(path, json=body, headers=key)
    assert first.status_code == POSTS[path][1]
    again = client.post(path, json=body, headers=key)
    assert (again.status_code, again.content) == (200, first.content)
    assert sum(row["active_requests"] for row in load(client)["loads"]) == 2  # one is `live`
    refused = [
        client.post(path, json=body),
        client.post(path, json=body, headers={RETRY_KEY: "other"}),
        client.post(path, json=body | {"isl_tokens": 9}, headers=key),
    ]
    assert [answer.status_code for answer in refused] == [409] * 3
    assert client.delete("/reservations/r").status_code == 200
    assert client.post(path, json=body, headers=key).status_code == POSTS[path][1]
    assert client.delete("/reservations/r").status_code == 200
    long = client.post(path, json=body, headers={RETRY_KEY: "k" * 256})
    assert long.status_code == 422 and long.json()["error"].startswith("idempotency-key")


def test_a_retry_finds_the_id_that_was_made(client: Client) -> None:
    key = {RETRY_KEY: "k"}
    first = client.post("/select_and_reserve", json=PROMPT, headers=key).json()
    assert client.post("/select_and_reserve", json=PROMPT, headers=key).json() == first
    answer = client.post("/select_and_reserve", json=PROMPT | {"isl_tokens": 9}, headers=key)
    assert answer.status_code == 409
    assert client.delete(f"/reservations/{first['reservation_id']}").status_code == 200


def test_a_client_that_leaves_as_it_is_served_keeps_nothing(tmp_path: Path) -> None:
    """The client leaves as its selection is served; kvd may notice either one first."""
    record = REGISTERED | {"data_parallel_size": 1, "max_num_batched_tokens": 1}
    with (
        running_kvd(tmp_path, face="select-service") as server,
        Client(server.base_url) as client,
    ):
        assert client.post("/workers", json=record).json()["lifecycle"] == "schedulable"
        for number in range(30):
            body = PROMPT | {"reservation_id": f"busy {number}"}
            assert client.post("/select_and_reserve", json=body).status_code == 200
            leaving = HTTPConnection("127.0.0.1", server.port)
            waiting = json.dumps(PROMPT | {"reservation_id": f"held {number}"})
            leaving.request("POST", "/select_and_reserve", waiting, JSON)
            server.wait_until(lambda: load(client)["pending_count"] == 1, "holding it")
            leaving.close()
            assert client.delete(f"/reservations/busy%20{number}").status_code == 200
            server.wait_until(lambda: load(client)["loads"][0]["active_requests"] == 0, "free")
            assert load(client)["pending_count"] == 0


@pytest.mark.parametrize("name", ["tenant_id", "routing_group"])
def test_either_name_of_the_tenant_means_the_same(name: str, client: Client) -> None:
    tenant = {name: "t"}
    worker = REGISTERED | {"worker_id": 2} | tenant
    assert client.post("/workers", json=worker).json()["tenant_id"] == "t"
    assert client.put(
        "/workers", json={"model_name": MODEL, **tenant, "workers": [worker]}
    ).status_code == (200)
    for path in ("/select", "/potential_loads", "/overlap_scores"):
        assert client.post(path, json=PROMPT | tenant).status_code == 200
    answer = client.post("/select_and_reserve", json=PROMPT | tenant | {"reservation_id": "r"})
    assert answer.json()["tenant_id"] == "t" and answer.json()["worker_id"] == 2
    assert client.post("/reservations", json=BOOKED | tenant | {"worker_id": 2}).status_code == 409
    for path in ("/workers", "/loads"):
        (row,) = client.get(path, params=tenant | {"model_name": MODEL}).json()
        assert row["tenant_id"] == "t"
    assert client.delete("/workers/2").status_code == 200
    assert client.delete("/reservations/r").status_code == 404


# ---- ids in paths

IDS = ["a/b", "a%2Fb", "a b", "?x", "#", "é", "\U0001f600", ".", "..", "+", "%", "%zz", ""]
IDS += ["\0", "\n", '"', "\\", "{reservation_id}", "a;b", "x" * MAX_REQUEST_ID_BYTES]


@pytest.mark.parametrize("name", IDS[:12] + IDS[13:], ids=lambda name: ascii(name)[:20])
def test_ids_are_any_text_in_a_path(name: str, client: Client) -> None:
    body = PROMPT | {"reservation_id": name}
    assert client.post("/select_and_reserve", json=body).json()["reservation_id"] == name
    escaped = quote(name, safe="").replace(".", "%2e")
    path = f"/reservations/{escaped}"
    for step in ("prefill_complete", "output_block"):
        assert client.post(f"{path}/{step}").status_code == 200
    assert client.delete(path).status_code == 200
    assert client.delete(path).status_code == 404
    for step in ("prefill_complete", "output_block"):
        assert client.post(f"{path}/{step}").status_code == 404


def test_an_empty_id_can_be_booked(client: Client) -> None:
    """An empty id does not fit into a path, so it ends with its worker, or expires."""
    worker = REGISTERED | {"worker_id": 2, "model_name": "other"}
    assert client.post("/workers", json=worker).status_code == 201
    booked = BOOKED | {"worker_id": 2, "model_name": "other", "reservation_id": ""}
    assert client.post("/reservations", json=booked).json()["reservation_id"] == ""
    assert client.post("/reservations", json=booked).status_code == 409
    assert client.delete("/workers/2").status_code == 200


def test_ids_that_are_none(client: Client) -> None:
    statuses = {
        "/workers/x": 400,
        "/workers/-1": 400,
        "/workers/1.0": 400,
        "/workers/18446744073709551616": 400,
        "/workers/%C2%B2": 400,
        "/workers/18446744073709551615": 404,
        "/workers/": 404,
        "/workers/1/": 404,
        "/reservations/": 404,
        "/reservations/%ff": 400,
        "/reservations/%ed%a0%80": 400,
        "/reservations/" + "x" * 8200: 414,
    }
    for path, status in statuses.items():
        answer = client.delete(path)
        assert (path[:60], answer.status_code) == (path[:60], status)
        assert answer.json().keys() == {"error"}


# ---- overrides and explanations


def test_an_answer_can_be_explained(client: Client) -> None:
    body = PROMPT | {"explain": True, "allowed_worker_ids": [WORKER]}
    answer = client.post("/select", json=body).json()
    assert [(row["worker_id"], row["dp_rank"]) for row in answer["candidates"]] == [(1, 0), (1, 1)]
    costs = [row["cost"] for row in answer["candidates"]]
    assert costs[answer["dp_rank"]] == min(costs)
    by_weight = []
    for weight in (0, 1, 2.5):
        override = {"overlap_score_weight": weight}
        rows = client.post("/select", json=body | {"router_config_override": override}).json()
        by_weight.append([row["prefill_cost"] for row in rows["candidates"]])
    assert by_weight == [[0.0, 0.0], [2.0, 2.0], [5.0, 5.0]]
    for row in answer["candidates"]:
        assert row["cost"] == row["prefill_cost"] + row["decode_cost"]
        assert row["eligible"] is True and row["busy"] is row["overloaded"] is False
        assert row["heard"] is row["reachable"] is True and row["stream"] == "recovering"
    assert "candidates" not in client.post("/select", json=body | {"explain": False}).json()


@pytest.mark.parametrize("name", ["overlap_score_weight", "kv_overlap_score_weight"])
def test_the_weight_has_two_names(name: str, client: Client) -> None:
    body = PROMPT | {"explain": True, "router_config_override": {name: 3}}
    rows = client.post("/select", json=body).json()["candidates"]
    assert [row["prefill_cost"] for row in rows] == [6.0, 6.0]


def test_prefill_is_not_tracked_on_demand(client: Client) -> None:
    override = {"router_config_override": {"track_prefill_tokens": False}}
    body = PROMPT | {"reservation_id": "r", **override}
    answer = client.post("/select_and_reserve", json=body).json()
    assert answer["effective_prefill_tokens"] == 8
    row = load(client)
    assert [rank["potential_prefill_tokens"] for rank in row["loads"]] == [0, 0]
    rows = client.post("/potential_loads", json=PROMPT | override).json()
    assert [rank["potential_prefill_tokens"] for rank in rows] == [0, 0]
    assert client.delete("/reservations/r").status_code == 200


def test_prompts_share_no_blocks_on_demand(client: Client) -> None:
    prompt = {"model_name": MODEL, "token_ids": [1, 2, 3, 4]}
    pinned = {"pinned_worker": {"worker_id": 1, "dp_rank": 1}}
    for reuse, blocks in ((True, 1), (False, 2), (None, 2)):
        override = {"router_config_override": {"assume_kv_reuse": reuse}}
        body = prompt | pinned | override | {"reservation_id": str(reuse)}
        assert client.post("/select_and_reserve", json=body).status_code == 200
        row = load(client)
        assert row["loads"][1]["potential_decode_blocks"] == blocks
    booking = prompt | {"worker_id": 1, "dp_rank": 1, "reservation_id": "r"}
    for wrong in ("x", [], 1, {"assume_kv_reuse": 1}):
        body = booking | {"router_config_override": wrong}
        assert client.post("/reservations", json=body).status_code == 422
    for name in ("True", "False", "None"):
        assert client.delete(f"/reservations/{name}").status_code == 200


# ---- listings


def test_ready_says_how_many_can_be_selected(client: Client) -> None:
    answer = client.get("/ready")
    assert answer.status_code == 200
    assert answer.json() == {
        "ready": True,
        "schedulable_workers": 1,
        "not_ready_reasons": [],
        "lifecycles": {"schedulable": 1, "unschedulable": 0, "incomplete": 0},
        "min_initial_workers": 0,
        "recovery": {"state": "off", "peers": 0, "blocks": 0},
        "workers": client.get("/workers").json(),
    }
    assert client.post("/workers", json={"worker_id": 2}).json()["lifecycle"] == "incomplete"
    ready = client.get("/ready").json()
    assert ready["schedulable_workers"] == 1 and len(ready["workers"]) == 2
    assert ready["lifecycles"] == {"schedulable": 1, "unschedulable": 0, "incomplete": 1}
    assert client.delete("/workers/2").json()["lifecycle"] == "unschedulable"


def test_loads(client: Client) -> None:
    row = load(client)
    assert row == {
        "model_name": MODEL,
        "tenant_id": "default",
        "loads": [
            {
                "worker_id": WORKER,
                "dp_rank": rank,
                "potential_prefill_tokens": 0,
                "potential_decode_blocks": 2 - 2 * rank,
                "active_requests": 1 - rank,
            }
            for rank in (0, 1)
        ],
        "pending_count": 0,
        "pending_isl_tokens": 0,
    }
    assert client.get("/loads?tenant_id=none").json() == []
    for path in ("/loads", "/workers"):
        assert client.get(f"{path}?tenant_id=a&tenant_id=a").status_code == 400
        assert client.get(f"{path}?tenant_id=a&routing_group=b").status_code == 422


# ---- changes of the catalog


def test_patches(client: Client) -> None:
    fixed = {"worker_id": 7, "model_name": "x", "tenant_id": "y", "endpoint": None}
    assert client.patch(f"/workers/{WORKER}", json=fixed).json() == client.get("/workers").json()[0]
    changed = client.patch(f"/workers/{WORKER}", json={"total_kv_blocks": 9}).json()
    assert changed["total_kv_blocks"] == 9 and changed["lifecycle"] == "schedulable"
    assert client.patch("/workers/2", json={}).status_code == 404
    for status, body in ((422, "[]"), (422, '{"block_size": "x"}'), (400, "{")):
        answer = client.patch(f"/workers/{WORKER}", content=body, headers=JSON)
        assert answer.status_code == status
    # A patch cannot unset a member; posting the whole record can.
    assert client.post("/workers", json=REGISTERED).json()["total_kv_blocks"] is None


def test_a_whole_set(client: Client) -> None:
    place = {"model_name": "set", "tenant_id": "t"}
    rows = [REGISTERED | place | {"worker_id": number} for number in (2, 3)]
    bare = {name: value for name, value in rows[0].items() if name not in place}
    for workers in (rows, [bare, rows[1]], rows[1:], []):
        for _ in range(2):
            answer = client.put("/workers", json=place | {"workers": workers})
            assert answer.status_code == 200, answer.text
            assert [row["worker_id"] for row in answer.json()] == [
                row["worker_id"] for row in workers
            ]
            assert client.get("/workers", params=place).json() == answer.json()
    wrong: list[tuple[int, Any]] = [
        (422, {"workers": None}),
        (422, {"workers": {}}),
        (422, {"workers": [1]}),
        (422, {"workers": [{}]}),
        (422, {"workers": [rows[0], rows[0]]}),
        (422, {"workers": [rows[0] | {"model_name": "other"}]}),
        (422, {"workers": [rows[0] | {"unknown": "x" * MAX_OBJECT_BYTES}]}),
        (422, {"workers": [rows[0] | {"routing_group": "other"}]}),
        (422, {"workers": [rows[0], rows[1] | {"endpoint": ""}]}),
        (422, {"workers": [rows[0], rows[1] | {"block_size": 8}]}),
        (422, {"model_name": None, "workers": []}),
        (422, {}),
    ]
    before = state(client)
    for status, body in wrong:
        assert client.put("/workers", json=place | body).status_code == status, body
        assert state(client) == before


def test_bad_upserts_are_conflicts(client: Client) -> None:
    for change in ({"endpoint": ""}, {"block_size": 0}, {"kv_events_endpoints": {}}):
        answer = client.post("/workers", json=REGISTERED | change)
        assert answer.status_code == 409 and answer.json().keys() == {"error"}


def test_kept_texts_have_a_bound(refusals: Refusals) -> None:
    valid = POSTS["/workers"][0]
    long = "x" * 4097
    changes: list[dict[str, Any]] = [
        {name: long}
        for name in ("model_name", "tenant_id", "endpoint", "stable_routing_id", "replay_endpoint")
    ]
    changes += [{"taints": [long]}, {"topology_domains": {long: "a"}}]
    changes += [{"topology_domains": {"a": long}}, {"kv_events_endpoints": {"0": long}}]
    bodies = {str(change)[:40]: json.dumps(valid | change).encode() for change in changes}
    refusals.refused("/workers", bodies, 422)


def test_objects_and_arrays_of_a_worker_have_a_bound(client: Client, refusals: Refusals) -> None:
    many = {str(number): "x" for number in range(MAX_MEMBERS + 1)}
    long = {str(number): "x" * 4000 for number in range(300)}
    names = ("kv_events_endpoints", "router_hint_source_control_endpoints", "topology_domains")
    for members in (many, long):
        changes = [(name, {name: members}) for name in names]
        changes.append(("taints", {"taints": list(members.values())}))
        bodies = {name: json.dumps(REGISTERED | change).encode() for name, change in changes}
        for name, error in zip(bodies, refusals.refused("/workers", bodies, 422), strict=True):
            assert error.startswith(name)
    workers = [REGISTERED | {"taints": list(many)}]
    assert client.put("/workers", json={"model_name": MODEL, "workers": workers}).status_code == 422
    most = REGISTERED | {"taints": list(many)[1:]}
    assert len(client.post("/workers", json=most).json()["taints"]) == MAX_MEMBERS
    assert client.post("/workers", json=REGISTERED).status_code == 201


# ---- anything

METHODS = ("POST", "POST", "POST", "PUT", "PATCH", "DELETE", "GET")
PIECES = ["null", "true", "-1", "0", "1", "2", "1e400", "-0", "9" * 400, '"x"', '""', "[]", "{}"]
PIECES += ["[null]", '{"worker_id": 1}', '{"worker_id": 1, "dp_rank": 1}', "[1, 2]", "1.5"]
PIECES += ['{"required_taints": ["gpu"]}', '{"0": "tcp://10.2.3.4:5"}', '"decode"', "[{}]", "8"]
PIECES += ['{"assume_kv_reuse": "x"}', '{"router_temperature": 1e308}', "18446744073709551615"]
PIECES += ['{"overlap_score_weight": 1e308}', "9007199254740992", "4294967295", '"live"']


def fuzzed(rng: random.Random) -> tuple[str, str, bytes]:
    """Returns a random method, path and body, which rarely make sense together."""
    path = rng.choice([*POSTS, "/workers/1", "/workers/3", "/workers", f"/reservations/{LIVE}"])
    like = rng.choice([path, *POSTS]) if rng.random() < 0.2 else path
    valid = POSTS.get(like, (REGISTERED, 0))[0] | {"worker_id": rng.choice((1, 2, 3))}
    members = {name: json.dumps(value) for name, value in valid.items()}
    names = sorted({name for each in SELECTION.unfit.values() for name in each})
    for _ in range(rng.randrange(4)):
        members[rng.choice(names)] = rng.choice(PIECES)
    if rng.random() < 0.2:
        del members[rng.choice(sorted(members))]
    if rng.random() < 0.1:
        members = {"workers": f"[{_joined(members)}]", "model_name": f'"{MODEL}"'}
    body = _joined(members).encode()
    if rng.random() < 0.2:
        at = rng.randrange(len(body))
        body = body[:at] + rng.choice([b"", b"\x00", b"\xff", b"[", b'"', b"1"]) + body[at + 1 :]
    return rng.choice(METHODS), path, body


def _joined(members: dict[str, str]) -> str:
    return "{" + ", ".join(f'"{name}": {value}' for name, value in members.items()) + "}"


def test_nothing_is_answered_500(tmp_path: Path) -> None:
    rng = random.Random(5)
    statuses: dict[int, int] = {}
    environ = {"DYN_ROUTER_QUEUE_THRESHOLD": "None"}  # held selections would take long
    with (
        running_kvd(tmp_path, face="select-service", environ=environ) as server,
        closing(HTTPConnection("127.0.0.1", server.port)) as client,
    ):

        def request(method: str, path: str, body: bytes = b"") -> int:
            client.request(method, path, body, JSON)
            answer = client.getresponse()
            content = answer.read()
            assert not content or json.loads(content) is not None
            return answer.status

        registered = json.dumps(REGISTERED).encode()
        for number in range(FUZZED):
            if number % 50 == 0:  # so that there is mostly a worker to select
                request("POST", "/workers", registered)
            method, path, body = fuzzed(rng)
            status = request(method, path, body)
            statuses[status] = statuses.get(status, 0) + 1
            assert status != 500, (method, path, body)
        assert request("GET", "/loads") == request("GET", "/dump") == 200
        assert "Traceback" not in server.stderr
    assert statuses.keys() >= {200, 201, 400, 404, 405, 409, 422, 503}, statuses
