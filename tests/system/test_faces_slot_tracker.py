"""The slot tracker over HTTP: what it refuses and how, retries, one request, listings, metrics.

The scenarios of tests/conformance check how it accounts.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import trio
import trio.testing

from kvd.errors import NotFound
from kvd.faces.slot_tracker import routes as slot_tracker
from kvd.faces.slot_tracker.metrics import LEDGER_COUNTERS, REFUSALS, slot_families
from kvd.http.messages import Request, Response
from kvd.model import PartitionKey
from kvd.replica_sync.replicas import COUNTERS, Replicas
from kvd.slots.live_requests import REMOVAL_SLICE
from kvd.slots.trackers import MAX_DP_SIZE, SlotTrackers
from kvd.telemetry.metrics import render
from kvd.wire.fields import Refused
from kvd.wire.lifecycle import Outcome
from kvd.wire.replica import ReplicaStats
from kvd_core.ledger.ledger import MAX_REQUEST_ID_BYTES, MAX_TOKENS
from tests.support.bodies import CHECKS, Refusals, check_methods
from tests.support.exposition import labels, parse
from tests.support.http_client import Client
from tests.support.processes import Server
from tests.support.running import running_kvd
from tests.support.slot_bodies import BOOKED, LIVE, MODEL, POSTS, REGISTERED, SLOT_TRACKER, WORKER

ROUTES = pytest.mark.parametrize("path", POSTS)
SHOWN_RANKS = 6  # the bound on loads in /metrics, here


@pytest.fixture(scope="module")
def kvd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environ = {"KVD_METRICS_RANKS": str(SHOWN_RANKS)}
    folder = tmp_path_factory.mktemp("kvd")
    with running_kvd(folder, face="slot-tracker", environ=environ) as server:
        yield server


@pytest.fixture(scope="module")
def client(kvd: Server) -> Iterator[Client]:
    """A client of a slot tracker with one worker and one request, in its decode phase."""
    with Client(kvd.base_url) as made:
        assert made.post("/register", json=REGISTERED).status_code == 201
        assert made.post("/add", json=BOOKED).status_code == 201
        assert step(made, "/prefill_complete", LIVE) == 200
        yield made


@pytest.fixture(scope="module")
def refusals(client: Client) -> Refusals:
    def undo(path: str) -> None:
        if path == "/register":
            assert client.post("/unregister", json=POSTS["/unregister"][0]).status_code == 200
        if path == "/add":
            assert step(client, "/free", "new") == 200

    return Refusals(client, SLOT_TRACKER, lambda: state(client), undo)


@pytest.fixture(autouse=True)
def unchanged(client: Client, kvd: Server) -> Iterator[None]:
    """Fails a test that leaves workers or requests changed, or logs a traceback."""
    before = state(client)
    yield
    assert state(client) == before
    assert "Traceback" not in kvd.stderr


def state(client: Client) -> tuple[Any, Any]:
    return client.get("/workers").json(), client.get("/loads").json()


def step(client: Client, path: str, request_id: str, model: str = MODEL) -> int:
    body = {"model_name": model, "request_id": request_id}
    return client.post(path, json=body).status_code


@contextmanager
def registered(client: Client, **members: Any) -> Iterator[None]:
    """Registers a further worker for the block."""
    worker = REGISTERED | members
    assert client.post("/register", json=worker).status_code == 201
    yield
    place = ("worker_id", "model_name", "tenant_id")
    gone = {name: worker[name] for name in place if name in worker}
    assert client.post("/unregister", json=gone).status_code == 200


# ---- what is refused


@pytest.mark.parametrize("rule", CHECKS)
@ROUTES
def test_what_every_route_refuses(path: str, rule: str, refusals: Refusals) -> None:
    CHECKS[rule](refusals, path)


@pytest.mark.peer
def test_the_live_peer_refuses_the_same(
    refusals: Refusals, peer_process: Callable[..., Server]
) -> None:
    peer = peer_process(service="slot_tracker")
    with Client(peer.base_url) as theirs:
        for path in POSTS:
            refusals.check_peer(path, theirs, "tenant_id: ", "new_isl_tokens: 9007199254740993")


def test_ranges_of_ranks_have_bounds(refusals: Refusals, client: Client) -> None:
    valid = POSTS["/register"][0]

    def bodies(*ranges: tuple[int, int]) -> dict[str, bytes]:
        return {
            str(r): json.dumps(valid | dict(zip(names, r, strict=True))).encode() for r in ranges
        }

    names = ("dp_start", "dp_size")
    most = MAX_DP_SIZE
    refusals.refused(
        "/register",
        bodies(
            (0, 0), (2**32 - 1, 0), (0, most + 1), (0, 2**32 - 1), (2**32 - 1, 1), (2**32 - 5, 5)
        ),
        400,
    )
    refusals.accepted("/register", bodies((0, 1), (2**32 - 2, 1), (2**32 - 1 - most, most)))
    refusals.refused(
        "/register", {"no blocks": json.dumps(valid | {"block_size": 0}).encode()}, 400
    )
    kept = {
        name: json.dumps(valid | {name: "x" * 4097}).encode() for name in valid if name in NAMES
    }
    assert refusals.refused("/register", kept, 422) == ["model_name: longer than 4096 bytes"]
    assert len(client.get("/workers").json()) == 1


NAMES = ("model_name", "tenant_id")


def test_a_registration_that_contradicts_another_is_409(refusals: Refusals) -> None:
    contradictions: dict[str, dict[str, Any]] = {
        "a registered worker": {},
        "elsewhere": {"dp_start": 100},
        "another block size": {"block_size": 8, "worker_id": 2},
    }
    bodies = {name: json.dumps(REGISTERED | c).encode() for name, c in contradictions.items()}
    refusals.refused("/register", bodies, 409)


UNKNOWN = {
    "a model": {"model_name": "new"},
    "a tenant": {"tenant_id": "new"},
    "a tenant by its newer name": {"routing_group": "new"},
}


@pytest.mark.parametrize("path", list(POSTS)[1:6])
def test_what_is_not_registered_is_404(path: str, refusals: Refusals) -> None:
    unknown: dict[str, dict[str, Any]] = dict(UNKNOWN)
    if path == "/add":
        unknown |= {"a worker": {"worker_id": 2}, "a rank": {"dp_rank": 2}}
        unknown |= {"a rank behind": {"dp_rank": 5}}
    if path == "/prefill_complete":
        unknown |= {"a request": {"request_id": "new"}}
    valid = POSTS[path][0] | {"model_name": MODEL}
    if path == "/unregister":
        unknown |= {"a worker": {"worker_id": 2}}
    bodies = {name: json.dumps(valid | s).encode() for name, s in unknown.items()}
    refusals.refused(path, bodies, 404)


def test_an_id_is_taken_wherever_it_is_used_again(refusals: Refusals) -> None:
    same: dict[str, dict[str, Any]] = {"all": {}, "rank": {"dp_rank": 4}, "hashes": {}}
    same["hashes"]["sequence_hashes"] = [7]
    bodies = {name: json.dumps(BOOKED | s).encode() for name, s in same.items()}
    refusals.refused("/add", bodies, 409)


@pytest.mark.parametrize("filler", ["x", "é", "\U0001f600", "\0"])
def test_request_ids_have_a_bound_in_bytes(filler: str, refusals: Refusals) -> None:
    most = MAX_REQUEST_ID_BYTES // len(filler.encode())

    def bodies(length: int) -> dict[str, bytes]:
        longest = {**POSTS["/add"][0], "request_id": filler * length}
        plain = json.dumps(longest, ensure_ascii=False).encode()
        return {"plain": plain, "escaped": json.dumps(longest).encode()}

    errors = refusals.refused("/add", bodies(most + 1), 422)
    assert set(errors) == {f"request_id: longer than {MAX_REQUEST_ID_BYTES} bytes"}


def test_the_longest_id_lives_and_ends(client: Client) -> None:
    name = "é" * (MAX_REQUEST_ID_BYTES // 2)
    assert client.post("/add", json=BOOKED | {"request_id": name}).status_code == 201
    assert client.post("/add", json=BOOKED | {"request_id": name}).status_code == 409
    assert step(client, "/prefill_complete", name) == 200
    assert step(client, "/free", name) == 200
    assert step(client, "/prefill_complete", name + "é") == 404
    assert step(client, "/free", name + "é") == 200


def test_a_request_has_tokens_up_to_the_bound(client: Client) -> None:
    heavy = BOOKED | {"request_id": "heavy", "dp_rank": 4, "new_isl_tokens": MAX_TOKENS}
    assert client.post("/add", json=heavy).status_code == 201
    assert client.get("/loads").json()[1]["active_prefill_tokens"] == MAX_TOKENS
    project = {"model_name": MODEL, "sequence_hashes": [], "new_isl_tokens": MAX_TOKENS}
    rows = client.post("/potential_loads", json=project).json()
    assert rows[1]["potential_prefill_tokens"] == 2 * MAX_TOKENS
    assert step(client, "/free", "heavy") == 200


def test_methods_and_paths_that_do_not_exist(client: Client) -> None:
    allowed = dict.fromkeys(POSTS, "POST")
    gets = ("/health", "/workers", "/loads", "/metrics", "/requests/x", "/replica_sync/peers")
    allowed |= dict.fromkeys(gets, "GET, HEAD")
    check_methods(client, allowed)
    for path in allowed:
        assert client.get("/" + path).status_code == 404
    for path in ("/", "/requests", "/requests/", "/requests/a/b", "/query", "/loads/1"):
        assert (client.get(path).status_code, path) == (404, path)


@pytest.mark.parametrize(
    "path", ["/health", "/workers", "/loads", "/requests/live?model_name=face/model"]
)
def test_head_says_what_get_would(path: str, client: Client) -> None:
    get, head = client.get(path), client.head(path)
    assert (get.status_code, head.status_code, head.content) == (200, 200, b"")
    assert head.headers.get("content-type") == get.headers.get("content-type")
    if "live" not in path:  # its age may gain a digit
        assert head.headers.get("content-length") == get.headers.get("content-length")
    if path == "/health":
        assert get.content == b"" and "content-type" not in get.headers


# ---- retries


Send = Callable[[str, dict[str, Any], dict[str, str]], int]


def status_of(kvd: Server, request: bytes) -> int:
    """Sends the bytes of a request; returns the status of its answer."""
    with socket.create_connection(("127.0.0.1", kvd.port)) as sock, sock.makefile("rb") as answer:
        sock.sendall(request)
        return int(answer.readline().split(b" ", 2)[1])


@pytest.fixture(params=["lane", "chunked", "HTTP/1.0"])
def send(request: pytest.FixtureRequest, client: Client, kvd: Server) -> Send:
    """A function that posts a body, by each of the ways to a handler, and returns the status."""

    def by_client(path: str, body: dict[str, Any], headers: dict[str, str]) -> int:
        data = json.dumps(body).encode()
        content = data if request.param == "lane" else iter([data[:9], data[9:]])
        announced = {"content-type": "application/json"}
        return client.post(path, content=content, headers=announced | headers).status_code

    def by_hand(path: str, body: dict[str, Any], headers: dict[str, str]) -> int:
        data = json.dumps(body).encode()
        lines = {"content-type": "application/json", "content-length": len(data), **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return status_of(kvd, f"POST {path} HTTP/1.0\r\n{head}\r\n".encode() + data)

    return by_hand if request.param == "HTTP/1.0" else by_client


ADD = BOOKED | {"request_id": "retried", "dp_rank": 4}


@pytest.mark.parametrize("header", ["idempotency-key", "Idempotency-Key", "IDEMPOTENCY-KEY"])
def test_a_retry_with_its_key_has_one_effect(send: Send, header: str, client: Client) -> None:
    key = {header: '"8e03978e-40d5-43dd-bc93-6894a57f9324"'}
    assert send("/add", ADD, key) == 201
    once = state(client)
    reordered = dict(reversed(ADD.items())) | {"unknown": 1, "tenant_id": "default"}
    for body in (ADD, reordered):
        assert send("/add", body, key) == 200
        assert state(client) == once
    assert step(client, "/prefill_complete", "retried") == 200
    completed = state(client)
    assert send("/add", ADD, key) == 200  # a late retry begins nothing anew
    assert state(client) == completed
    assert step(client, "/free", "retried") == 200


def test_whatever_is_not_that_retry_is_a_conflict(send: Send, client: Client) -> None:
    key = {"idempotency-key": "k"}
    assert send("/add", ADD, key) == 201
    once = state(client)
    others: list[dict[str, Any]] = [
        {"sequence_hashes": [1, 2]},
        {"sequence_hashes": [1, 2, 4]},
        {"sequence_hashes": [1, 2, 3, 4]},
        {"new_isl_tokens": 47},
        {"new_isl_tokens": 0},
        {"dp_rank": 3},
    ]
    for other in others:
        assert send("/add", ADD | other, key) == 409
    for headers in ({}, {"idempotency-key": "K"}, {"idempotency-key": ""}, {"x-key": "k"}):
        assert send("/add", ADD, headers) == 409
    assert state(client) == once
    assert send("/add", ADD | {"request_id": "another"}, key) == 201  # a key belongs to one id
    for name in ("another", "retried"):
        assert step(client, "/free", name) == 200


def test_what_was_added_without_a_key_cannot_be_retried(send: Send, client: Client) -> None:
    assert send("/add", ADD, {}) == 201
    for headers in ({}, {"idempotency-key": "k"}, {"idempotency-key": ""}):
        assert send("/add", ADD, headers) == 409
    assert step(client, "/free", "retried") == 200


def test_a_key_lives_as_long_as_its_request(send: Send, client: Client) -> None:
    for key in ("a", "b", "a"):
        assert send("/add", ADD, {"idempotency-key": key}) == 201
        assert step(client, "/free", "retried") == 200


def test_keys_have_a_bound(send: Send, client: Client) -> None:
    assert send("/add", ADD, {"idempotency-key": "k" * 256}) == 422
    assert send("/add", ADD, {"idempotency-key": "k" * 255}) == 201
    assert send("/add", ADD, {"idempotency-key": "k" * 255}) == 200
    assert step(client, "/free", "retried") == 200


KEYS: dict[str, tuple[list[bytes], list[bytes]]] = {
    "white space around it": ([b"k"], [b"  k  "]),
    "white space beyond the bound": ([b"k" * 255], [b"k" * 255 + b"  "]),
    "a tab": ([b"k"], [b"\tk\t"]),
    "lines that a proxy has joined": ([b"k", b"l"], [b"k, l"]),
    "an empty line beside it": ([b"", b"k"], [b"k"]),
}


@pytest.mark.parametrize("version", [b"HTTP/1.0", b"HTTP/1.1"])  # each has its own parser
@pytest.mark.parametrize(("first", "again"), KEYS.values(), ids=KEYS)
def test_spellings_of_one_key(
    first: list[bytes], again: list[bytes], version: bytes, kvd: Server, client: Client
) -> None:
    def add(keys: list[bytes], version: bytes) -> int:
        body = json.dumps(ADD).encode()
        lines = [b"POST /add %b" % version, b"Host: localhost", b"Content-Type: application/json"]
        lines += [b"Idempotency-Key:" + key for key in keys]
        return status_of(kvd, b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", body]))

    assert add(first, b"HTTP/1.1") == 201
    assert add(again, version) == 200
    assert add([*first, b"m"], version) == (422 if len(first[0]) == 255 else 409)
    assert step(client, "/free", "retried") == 200


# ---- one request


def show(client: Client, request_id: str, **place: str) -> httpx.Response:
    params = {"model_name": MODEL} | place
    return client.get(f"/requests/{quote(request_id, safe='')}", params=params)


def test_a_request_shows_what_it_counts(client: Client) -> None:
    answer = show(client, LIVE)
    assert b" " not in answer.content
    row = answer.json()
    assert 0 <= row.pop("age_s") < 600
    assert row == {
        "request_id": LIVE,
        "model_name": MODEL,
        "tenant_id": "default",
        "worker_id": WORKER,
        "dp_rank": 3,
        "blocks": 3,
        "new_isl_tokens": 48,
        "active_prefill_tokens": 0,
        "prefill_complete": True,
        "output_blocks": 0,
    }
    assert client.post("/add", json=ADD).status_code == 201
    assert (
        show(client, "retried").json().items()
        >= {
            "active_prefill_tokens": 48,
            "prefill_complete": False,
        }.items()
    )
    assert step(client, "/free", "retried") == 200
    assert show(client, "retried").status_code == 404


IDS = ["a/b", "a%2Fb", "a b", "?model_name=x", "#", "é", "\U0001f600", ".", "..", "+", "%", "%zz"]
IDS += ["\0", "\n", '"', "\\", "{request_id}", "peers", "a;b", "x" * 1000]


@pytest.mark.parametrize("name", IDS, ids=ascii)
def test_ids_are_any_text_in_a_path(name: str, client: Client, kvd: Server) -> None:
    assert client.post("/add", json=ADD | {"request_id": name}).status_code == 201
    escaped = "".join(f"%{byte:02x}" for byte in name.encode())  # clients shorten `..` themselves
    target = f"/requests/{escaped}?model_name={quote(MODEL)}"
    with socket.create_connection(("127.0.0.1", kvd.port)) as sock:
        sock.sendall(f"GET {target} HTTP/1.0\r\n\r\n".encode())
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert json.loads(body)["request_id"] == name
    assert step(client, "/free", name) == 200


def test_requests_that_are_not_there(client: Client) -> None:
    statuses = {
        "/requests/unknown?model_name=face/model": 404,
        "/requests/live?model_name=new": 404,
        "/requests/live?model_name=face/model&tenant_id=new": 404,
        "/requests/live?model_name=face/model&routing_group=new": 404,
        "/requests/live?model_name=face/model&routing_group=default": 200,
        "/requests/liv%65?tenant_id=default&model_name=face%2Fmodel&more=1": 200,
        "/requests/live": 422,
        "/requests/live?model=face/model": 422,
        "/requests/live?model_name=face/model&model_name=face/model": 400,
        "/requests/live?model_name=face/model&tenant_id=a&routing_group=b": 422,
        "/requests/%ff?model_name=face/model": 400,
        "/requests/%C3?model_name=face/model": 400,
        "/requests/%ed%a0%80?model_name=face/model": 400,  # a surrogate
        "/requests/" + "x" * 8200: 414,
    }
    for target, status in statuses.items():
        answer = client.get(target)
        assert (target[:60], answer.status_code) == (target[:60], status)
        assert status == 200 or answer.json().keys() == {"error"}
    assert client.get("/requests/live").json() == {"error": "missing member `model_name`"}


# ---- listings


def test_listings_are_sorted_and_written_without_blanks(client: Client) -> None:
    with (
        registered(client, worker_id=10, dp_start=0, dp_size=1),
        registered(client, worker_id=9, dp_start=1, dp_size=1),
        registered(client, model_name="Z", dp_size=1),
        registered(client, routing_group="a", tenant_id="a", dp_size=1),
        registered(client, tenant_id="é", worker_id=2**64 - 1, dp_size=1),
    ):
        rows = [
            (row["model_name"], row["tenant_id"], row["worker_id"])
            for row in client.get("/workers").json()
        ]
        loads = client.get("/loads")
    assert rows == [
        ("Z", "default", WORKER),
        (MODEL, "a", WORKER),
        (MODEL, "default", WORKER),
        (MODEL, "default", 9),
        (MODEL, "default", 10),
        (MODEL, "é", 2**64 - 1),
    ]
    assert loads.content == json.dumps(loads.json(), separators=(",", ":")).encode()
    ranks = [
        (row["model_name"], row["tenant_id"], row["worker_id"], row["dp_rank"])
        for row in loads.json()
    ]
    assert ranks == sorted(ranks) and len(ranks) == 7
    answer = client.get("/workers")
    assert answer.content == (
        b'[{"worker_id":1,"model_name":"face/model","tenant_id":"default","block_size":16,'
        b'"dp_start":3,"dp_size":2}]'
    )


async def test_workers_may_leave_while_they_are_listed() -> None:
    slots, key = SlotTrackers(300), PartitionKey("m", "t")
    for worker_id in range(2000):
        slots.register(key, worker_id, 16, 0, 1)
    answers: list[Response] = []

    async def ask() -> None:
        request = Request("GET", "/workers", b"", [], b"")
        answers.append(await slot_tracker.workers(slots, request))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        for _ in range(2):  # after these it has begun
            await trio.lowlevel.checkpoint()
        for worker_id in range(2000):
            await slots.unregister(key, worker_id)
    body = answers[0].body
    assert isinstance(body, bytes)
    rows = json.loads(body)
    assert [row["worker_id"] for row in rows] == list(range(len(rows)))
    assert 0 < len(rows) < 2000


async def test_a_worker_that_comes_back_while_it_leaves_is_empty(nursery: trio.Nursery) -> None:
    """Also if the client that unregistered it leaves. Meanwhile nothing is booked on it."""
    slots = SlotTrackers(300)
    routes = {route.path: route.handler for route in slot_tracker.routes(slots)}

    def ask(path: str, members: dict[str, Any]) -> Any:
        return routes[path](Request("POST", path, b"", [], json.dumps(members).encode()))

    async def answered(path: str, members: dict[str, Any]) -> None:
        answers.append((path, (await ask(path, members)).status))

    async def meanwhile() -> None:
        with pytest.raises(NotFound):
            ask("/add", BOOKED | {"request_id": "late"})
        await answered("/register", REGISTERED)

    answers: list[tuple[str, int]] = []
    await answered("/register", REGISTERED)
    for number in range(6 * REMOVAL_SLICE):
        assert ask("/add", BOOKED | {"request_id": str(number)}).status == 201
    with trio.CancelScope() as client:
        client.cancel()
        nursery.start_soon(meanwhile)
        await answered("/unregister", {"model_name": MODEL, "worker_id": WORKER})
    await trio.testing.wait_all_tasks_blocked()
    assert answers == [("/register", 201), ("/unregister", 200), ("/register", 201)]
    loads = json.loads(slots.render_loads(None, None))
    assert [row["active_decode_blocks"] for row in loads] == [0, 0]
    assert ask("/add", BOOKED | {"request_id": "0"}).status == 201


@pytest.mark.parametrize("path", ["/workers", "/loads"])
def test_listings_are_filtered_by_both_names(path: str, client: Client) -> None:
    with registered(client, tenant_id="other", dp_size=1):
        found = {
            "": {"default", "other"},
            "?tenant_id=other": {"other"},
            "?routing_group=other": {"other"},
            "?routing_group=other&tenant_id=other&model_name=face/model": {"other"},
            "?model_name=face%2Fmodel": {"default", "other"},
            "?model_name=new": set(),
            "?tenant_id=": set(),
            "?unknown=1&unknown=2": {"default", "other"},
        }
        for query, tenants in found.items():
            rows = client.get(path + query).json()
            assert (query, {row["tenant_id"] for row in rows}) == (query, tenants)
    refused = {"?tenant_id=a&tenant_id=a": 400, "?tenant_id=a&routing_group=b": 422}
    for query, status in refused.items():
        response = client.get(path + query)
        assert (query, response.status_code) == (query, status)
        assert response.json().keys() == {"error"}


@pytest.mark.parametrize("name", ["tenant_id", "routing_group"])
def test_either_name_of_the_tenant_means_the_same(name: str, client: Client) -> None:
    tenant = {name: "t"}
    with registered(client, tenant_id="t"):
        booked = client.post("/add", json=ADD | {"worker_id": WORKER} | tenant)
        assert booked.status_code == 201
        assert show(client, "retried", **tenant).json()["tenant_id"] == "t"
        project = {"model_name": MODEL, "sequence_hashes": [1, 2, 3, 4], **tenant}
        rows = client.post("/potential_loads", json=project).json()
        assert [row["potential_decode_blocks"] for row in rows] == [4, 4]
        for path in ("/prefill_complete", "/free"):
            body = {"model_name": MODEL, "request_id": "retried", **tenant}
            assert client.post(path, json=body).status_code == 200
        assert show(client, "retried", **tenant).status_code == 404


# ---- metrics


def scrape(client: Client) -> dict[str, float]:
    answer = client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4"
    return parse(answer.content.decode())


def by_family(samples: dict[str, float], name: str) -> dict[str, float]:
    """Returns a family's values by the values of its labels."""
    return {
        "|".join(labels(key).values()): value
        for key, value in samples.items()
        if key.partition("{")[0] == name
    }


def test_metrics_say_what_requests_do(client: Client) -> None:
    before = scrape(client)
    assert client.post("/add", json=ADD).status_code == 201
    assert client.post("/add", json=ADD).status_code == 409
    during = scrape(client)
    assert by_family(during, "kvd_slots_prefill_tokens") == {
        f"{MODEL}|default|1|3": 0,
        f"{MODEL}|default|1|4": 48,
    }
    assert by_family(during, "kvd_slots_decode_blocks") == {
        f"{MODEL}|default|1|3": 3,
        f"{MODEL}|default|1|4": 3,
    }
    with registered(client, worker_id=2):
        body = ADD | {"worker_id": 2, "request_id": "gone"}
        assert client.post("/add", json=body, headers={"idempotency-key": "k"}).status_code == 201
        assert client.post("/add", json=body, headers={"idempotency-key": "k"}).status_code == 200
    assert step(client, "/free", "retried") == 200
    after = scrape(client)
    changed = {key: after[key] - before[key] for key in after if key.startswith("kvd_slots_")}
    assert {key: value for key, value in changed.items() if value} == {
        "kvd_slots_requests_added_total": 2,
        "kvd_slots_requests_repeated_total": 1,
        "kvd_slots_requests_freed_total": 1,
        "kvd_slots_requests_removed_total": 1,
        'kvd_slots_refused_total{reason="exists"}': 1,
    }
    assert by_family(during, "kvd_slots_requests") == {"": 2}
    assert by_family(during, "kvd_slots_trackers") == by_family(during, "kvd_slots_workers")
    assert by_family(during, "kvd_slots_ranks") == {"": 2}
    adds = 'kvd_slot_tracker_requests_total{endpoint="/add",method="POST"}'
    assert after[adds] - before[adds] == 4
    shown = 'kvd_slot_tracker_requests_total{endpoint="/requests/{request_id}",method="GET"}'
    show(client, LIVE)
    assert scrape(client)[shown] - after.get(shown, 0) == 1


def test_every_series_is_there_from_the_start() -> None:
    replicas = Replicas(None, ReplicaStats())
    families = [*slot_families(SlotTrackers(300), SHOWN_RANKS), *replicas.families()]
    samples = parse(b"".join(render(families)).decode())
    for name in LEDGER_COUNTERS:
        assert samples[f"kvd_slots_requests_{name}_total"] == 0
    assert set(by_family(samples, "kvd_slots_refused_total")) == set(REFUSALS)
    assert samples["kvd_slots_trackers_refused_total"] == 0
    for name in COUNTERS:
        assert samples[f"kvd_replica_{name}_total"] == 0
    assert samples["kvd_replica_peers"] == samples["kvd_replica_peers_connected"] == 0
    assert set(by_family(samples, "kvd_replica_refused_total")) == set(map(str, Refused))
    dropped = set(map(str, Outcome)) - {"applied"}
    assert set(by_family(samples, "kvd_replica_dropped_total")) == dropped


def test_loads_are_shown_for_so_many_ranks(client: Client) -> None:
    shown = {f"{MODEL}|default|1|{rank}" for rank in (3, 4)}
    assert set(by_family(scrape(client), "kvd_slots_decode_blocks")) == shown
    with registered(client, worker_id=2, dp_size=SHOWN_RANKS - 2):
        rows = by_family(scrape(client), "kvd_slots_prefill_tokens")
        assert len(rows) == SHOWN_RANKS
        with registered(client, model_name="one more", dp_size=1):
            samples = scrape(client)
            assert not by_family(samples, "kvd_slots_prefill_tokens")
            assert not by_family(samples, "kvd_slots_decode_blocks")
            assert samples["kvd_slots_ranks"] == SHOWN_RANKS + 1


HOSTILE_NAMES = [
    'q"uote',
    "back\\slash",
    "\\n",
    "\u2028\u202e",
    "é\U0001f600",
]
HOSTILE_NAMES += ['"} 1 kvd_slots_requests 99', "{", "}", ",", "=", "", " ", "#"]


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=ascii)
def test_names_in_metrics_are_labels_and_nothing_else(name: str, client: Client) -> None:
    usual = set(scrape(client))
    with registered(client, model_name=name, tenant_id=name, dp_size=1):
        samples = scrape(client)
    new = {key: value for key, value in samples.items() if key not in usual}
    # Counts of requests, and of what has kept the loop busy, which may come at any time.
    others = "kvd_slot_tracker_", "kvd_loop_"
    new = {key: value for key, value in new.items() if not key.startswith(others)}
    assert [labels(key) for key in new] == [
        {"model_name": name, "tenant_id": name, "worker_id": "1", "dp_rank": "3"}
    ] * 3
    assert samples["kvd_slots_requests"] == 1
