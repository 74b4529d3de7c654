"""The routes and the metrics of the replica plane."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

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
from kvd.wire.lifecycle import TOPIC, Outcome
from kvd.wire.replica import ReplicaStats
from tests.support.replicating import Process, add, frames, start
from tests.support.zmtp_fakes import Publisher, until


@pytest.fixture
async def process(nursery: trio.Nursery, context: zmq.Context) -> Process:
    return await start(nursery, context)


async def ask(replicas: Replicas, path: str, body: bytes | None = None) -> tuple[int, Any]:
    """Returns status and body of the answer; raises what the handler raises."""
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
