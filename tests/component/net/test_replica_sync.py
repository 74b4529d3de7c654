"""The routes and the metrics of the replica plane; with a live Dynamo, that both understand each
other where a test is marked `peer`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import trio
import zmq

from kvd.errors import BadJson, BadRequest, Conflict, Invalid, KvdError, NotFound
from kvd.faces.common.bodies import MAX_KEPT_BYTES
from kvd.faces.common.replica_sync import routes
from kvd.http.messages import Request, Response
from kvd.replica_sync.replicas import Replicas
from kvd.telemetry.metrics import render
from kvd.wire.fields import Refused
from kvd.wire.lifecycle import TOPIC, Lifecycle, Outcome, Step
from kvd.wire.replica import ReplicaStats
from tests.support.ports import find_free_port
from tests.support.processes import Server
from tests.support.replicating import PARTITION, Process, add, event, frames, start
from tests.support.zmtp_fakes import Publisher, until


@pytest.fixture
async def process(nursery: trio.Nursery, context: zmq.Context) -> Process:
    return await start(nursery, context)


async def ask(replicas: Replicas, path: str, body: bytes | None = None) -> tuple[int, Any]:
    """Returns status and body of the answer; raises what a handler raises."""
    method = "GET" if body is None else "POST"
    (route,) = (each for each in routes(replicas) if (each.method, each.path) == (method, path))
    answer = route.handler(Request(method, path, b"", [], body or b""))
    response = answer if isinstance(answer, Response) else await answer
    assert isinstance(response.body, bytes)
    return response.status, json.loads(response.body)


async def post(replicas: Replicas, what: str, **members: object) -> tuple[int, Any]:
    return await ask(replicas, f"/replica_sync/{what}_peer", json.dumps(members).encode())


async def test_the_list_over_http(process: Process) -> None:
    replicas, ok = process.replicas, {"status": "ok"}
    assert await post(replicas, "register", endpoint="tcp://b:1") == (201, ok)
    assert await post(replicas, "register", endpoint="tcp://a:1", more=5) == (201, ok)
    assert await post(replicas, "register", endpoint="tcp://b:1") == (200, ok)
    assert await ask(replicas, "/replica_sync/peers") == (200, ["tcp://a:1", "tcp://b:1"])
    assert await post(replicas, "deregister", endpoint="tcp://b:1") == (200, ok)
    with pytest.raises(NotFound, match="peer not found"):
        await post(replicas, "deregister", endpoint="tcp://b:1")
    with pytest.raises(NotFound, match="peer not found"):
        await post(replicas, "deregister", endpoint="tcp://*:1")
    assert await ask(replicas, "/replica_sync/peers") == (200, ["tcp://a:1"])


FAULTY: dict[str, tuple[bytes, type[KvdError]]] = {
    "no json": (b"{", BadJson),
    "empty": (b"", BadJson),
    "list": (b"[]", Invalid),
    "nothing": (b"{}", Invalid),
    "the other name": (b'{"url":"tcp://a:1"}', Invalid),
    "null": (b'{"endpoint":null}', Invalid),
    "twice": (b'{"endpoint":"tcp://a:1","endpoint":"tcp://a:1"}', Invalid),
    "address": (b'{"endpoint":"a:1"}', BadRequest),
}


@pytest.mark.parametrize("what", ["register", "deregister"])
@pytest.mark.parametrize("kind", FAULTY)
async def test_faulty_bodies_change_nothing(process: Process, what: str, kind: str) -> None:
    body, error = FAULTY[kind]
    with pytest.raises(error):
        await ask(process.replicas, f"/replica_sync/{what}_peer", body)
    assert process.replicas.endpoints() == []


async def test_a_long_address_is_not_kept(process: Process) -> None:
    with pytest.raises(Invalid):
        await post(process.replicas, "register", endpoint="tcp://" + "a" * MAX_KEPT_BYTES + ":1")


async def test_without_a_port_of_its_own_a_process_has_no_replicas() -> None:
    replicas = Replicas(None, ReplicaStats())
    for what in ("register", "deregister"):
        for endpoint in ("tcp://a:1", "foo"):
            with pytest.raises(Conflict, match="replica sync is disabled"):
                await post(replicas, what, endpoint=endpoint)
    assert await ask(replicas, "/replica_sync/peers") == (200, [])


def samples(replicas: Replicas) -> dict[str, float]:
    text = b"".join(render(replicas.families())).decode()
    lines = [line.rpartition(" ") for line in text.splitlines() if line[0] != "#"]
    return {name: float(value) for name, _, value in lines}


async def test_metrics_say_what_happens(
    process: Process, publish: Callable[..., Publisher]
) -> None:
    publisher = publish()
    process.replicas.register(publisher.endpoint)
    process.replicas.register("tcp://127.0.0.1:1")
    await publisher.subscribed_to(TOPIC)
    for sent in [*frames([add("a"), add("a")]), [TOPIC], *frames([add("b")], 5)]:
        publisher.send_frames(*sent)
    for sent in frames([add("c")], process.plane.router_id):
        publisher.send_frames(*sent)
    await until(lambda: process.stats.received == 5)
    process.plane.publish(add("d"))
    assert {name: value for name, value in samples(process.replicas).items() if value} == {
        "kvd_replica_peers": 2,
        "kvd_replica_peers_connected": 1,
        "kvd_replica_published_total": 1,
        "kvd_replica_received_total": 5,
        "kvd_replica_own_total": 1,
        "kvd_replica_applied_total": 2,
        "kvd_replica_joins_total": 1,
        'kvd_replica_refused_total{reason="frames"}': 1,
        'kvd_replica_dropped_total{reason="duplicate"}': 1,
    }
    assert len(samples(process.replicas)) == 3 + 11 + len(Refused) + len(Outcome) - 1


# ---- with the live peer

WORKER = {"worker_id": 7, "model_name": "m", "block_size": 16, "dp_start": 0, "dp_size": 2}


class Peer:
    """A live slot tracker that listens to a process of ours."""

    def __init__(self, server: Server, port: int) -> None:
        self.server = server
        self.endpoint = f"tcp://127.0.0.1:{port}"
        assert self.post("/register", **WORKER) == 201

    def post(self, path: str, **members: object) -> int:
        answer = httpx.post(
            self.server.base_url + path, json=members, trust_env=False, verify=False
        )
        return answer.status_code

    def do(self, step: str, request_id: str, **members: object) -> int:
        return self.post(step, model_name="m", request_id=request_id, **members)

    def load(self, dp_rank: int) -> tuple[int, int]:
        rows = httpx.get(self.server.base_url + "/loads", trust_env=False, verify=False).json()
        row = next(row for row in rows if row["dp_rank"] == dp_rank)
        return row["active_prefill_tokens"], row["active_decode_blocks"]


@pytest.fixture
async def peer(process: Process, peer_process: Callable[..., Server]) -> Peer:
    """Both listen to each other."""
    port = find_free_port()
    flags = ("--replica-sync-port", str(port), "--replica-sync-peers", process.endpoint)
    made = Peer(peer_process(*flags, service="slot_tracker"), port)
    process.replicas.register(made.endpoint)
    number = 0

    def hears() -> bool:
        """Ours are there once a request of ours cannot be added again, and can be freed."""
        nonlocal number
        number += 1
        process.plane.publish(add(f"hello{number}"))
        added = {"worker_id": 7, "dp_rank": 0, "sequence_hashes": [1]}
        known = made.do("/add", f"hello{number}", **added) == 409
        assert made.do("/free", f"hello{number}") == 200
        return known and process.stats.received > 0

    await until(hears)
    last = event(Step.FREE, f"hello{number}")
    await until(lambda: process.ledger.seen[-1] == last)
    process.ledger.seen.clear()
    return made


@pytest.mark.peer
async def test_what_the_peer_says_is_understood(process: Process, peer: Peer) -> None:
    placed = {"worker_id": 7, "dp_rank": 1}
    assert peer.do("/add", "r", **placed, sequence_hashes=[1, -1], new_isl_tokens=48) == 201
    assert peer.do("/prefill_complete", "r") == 200
    assert peer.do("/free", "r") == 200
    await until(lambda: len(process.ledger.seen) == 3)
    hashes = (1).to_bytes(8, "little") + b"\xff" * 8
    assert process.ledger.seen == [
        Lifecycle(PARTITION, 16, "r", 7, 1, Step.ADD, hashes, 48),
        Lifecycle(PARTITION, 16, "r", 7, 1, Step.PREFILL_COMPLETE),
        Lifecycle(PARTITION, 16, "r", 7, 1, Step.FREE),
    ]
    assert sum(process.stats.refused.values()) == 0


@pytest.mark.peer
async def test_what_we_say_is_understood_by_the_peer(process: Process, peer: Peer) -> None:
    hashes = bytes(range(8 * 12))
    request = Lifecycle(PARTITION, 16, "ours", 7, 1, Step.ADD, hashes, 48, 9, "L")
    process.plane.publish(request)
    await until(lambda: peer.load(1) == (48, 12))
    process.plane.publish(Lifecycle(PARTITION, 16, "ours", 7, 1, Step.PREFILL_COMPLETE))
    await until(lambda: peer.load(1) == (0, 12))
    process.plane.publish(Lifecycle(PARTITION, 16, "none", 7, 1, Step.ADD))
    process.plane.publish(Lifecycle(PARTITION, 16, "ours", 7, 1, Step.FREE))
    await until(lambda: peer.load(1) == (0, 0))
    # It knows the one without blocks and tokens, too.
    assert peer.do("/prefill_complete", "none") == 200


@pytest.mark.peer
async def test_either_ends_what_the_other_has_admitted(process: Process, peer: Peer) -> None:
    process.do(Lifecycle(PARTITION, 16, "ours", 7, 0, Step.ADD, bytes(8), 5))
    await until(lambda: peer.load(0) == (5, 1))
    assert peer.do("/free", "ours") == 200
    await until(lambda: "ours" not in process.ledger.live)
