"""Sessions of selection services as processes: bound over HTTP, and shared with replicas.

The test marked `peer` checks that kvd and a live Dynamo share sessions with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvd.selection.affinity import MAX_SESSION_ID_BYTES
from tests.support.http_client import Client
from tests.support.ports import find_free_port
from tests.support.processes import Server
from tests.support.running import running_kvd

Place = tuple[int, int]
CATALOG = [
    {
        "worker_id": number,
        "model_name": "m",
        "endpoint": f"http://worker-{number}:8000",
        "block_size": 16,
        "data_parallel_size": 2,
    }
    for number in (1, 2, 3)
]
EVENTLESS = {"DYN_ROUTER_USE_KV_EVENTS": "false"}
AFFINITY = ("--session-affinity-ttl-secs", "60")


def prompt(number: int, **members: Any) -> dict[str, Any]:
    hashes = [number * 1000 + at for at in range(20)]
    prompt = {"block_hashes": hashes, "sequence_hashes": hashes, "isl_tokens": 320}
    return {"model_name": "m", **prompt, **members}


def place_of(answer: httpx.Response) -> Place:
    assert answer.status_code == 200, answer.text
    return answer.json()["worker_id"], answer.json()["dp_rank"]


@contextmanager
def start_catalog(base_url: str) -> Iterator[Client]:
    with Client(base_url, timeout=20) as client:
        for row in CATALOG:
            answer = client.post("/workers", json=row)
            assert answer.json()["lifecycle"] == "schedulable", answer.text
        yield client


def test_a_session_over_http(tmp_path: Path) -> None:
    with (
        running_kvd(tmp_path, *AFFINITY, face="select-service", environ=EVENTLESS) as server,
        start_catalog(server.base_url) as client,
    ):
        body = prompt(1, session_id="s", reservation_id="r")
        place = place_of(client.post("/select_and_reserve", json=body))
        for number in range(2, 12):
            assert place_of(client.post("/select", json=prompt(number, session_id="s"))) == place
        free = [place_of(client.post("/select", json=prompt(n))) for n in range(12, 20)]
        assert place not in free
        assert client.delete("/reservations/r").status_code == 200
        assert place_of(client.post("/select", json=prompt(20, session_id="s"))) == place
        long = prompt(21, session_id="é" * (MAX_SESSION_ID_BYTES // 2))
        assert client.post("/select", json=long).status_code == 200
        long["session_id"] += "x"
        assert client.post("/select", json=long).status_code == 400
        assert client.post("/select", json=prompt(22, session_id=5)).status_code == 422
        assert client.post("/select", json=prompt(23, session_id=None)).status_code == 200


def test_without_the_option_sessions_are_passed_over(tmp_path: Path) -> None:
    with (
        running_kvd(tmp_path, face="select-service", environ=EVENTLESS) as server,
        start_catalog(server.base_url) as client,
    ):
        body = prompt(1, session_id="s" * 1000)
        place = place_of(client.post("/select_and_reserve", json=body))
        assert place_of(client.post("/select", json=prompt(2, session_id="s" * 1000))) != place


def check_both_follow(one: Client, two: Client, wait: Callable[..., None]) -> None:
    """Fails unless each follows the sessions that the other binds; `wait` awaits a condition."""
    for number, (mine, theirs) in enumerate(((one, two), (two, one))):
        session = f"session {number}"
        body = prompt(number, session_id=session, selection_id=f"id {number}")
        answer = mine.post("/select_and_reserve", json={**body, "reservation_id": f"id {number}"})
        place = place_of(answer)

        def followed(theirs: Client = theirs, session: str = session, place: Place = place) -> bool:
            asked = [prompt(100 + at, session_id=session) for at in range(12)]
            return all(place_of(theirs.post("/select", json=body)) == place for body in asked)

        wait(followed, "following")
        again = prompt(50 + number, session_id=session, selection_id=f"again {number}")
        again["reservation_id"] = f"again {number}"
        assert place_of(theirs.post("/select_and_reserve", json=again)) == place
        assert mine.delete(f"/reservations/id {number}").status_code == 200
        assert theirs.delete(f"/reservations/again {number}").status_code == 200
        wait(followed, "following still")


def sync(port: int, other: int) -> list[str]:
    peers = f"tcp://127.0.0.1:{other}"
    return ["--replica-sync-port", str(port), "--replica-sync-peers", peers]


def meet(one: Client, two: Client, wait: Callable[..., None]) -> None:
    """Returns once each receives the other's events; earlier events are lost."""
    for number, (mine, theirs) in enumerate(((one, two), (two, one))):
        tries = iter(range(10_000))

        def heard(
            number: int = number,
            mine: Client = mine,
            theirs: Client = theirs,
            tries: Any = tries,
        ) -> bool:
            name = f"meet-{number}-{next(tries)}"
            body = prompt(900, selection_id=name, reservation_id=name)
            place_of(mine.post("/select_and_reserve", json=body))
            seen = sum(
                rank["active_requests"]
                for row in theirs.get("/loads").json()
                for rank in row["loads"]
            )
            mine.delete(f"/reservations/{name}")
            return seen > 0

        wait(heard, "hearing the other")


def test_replicas_of_ours_follow_each_other(kvd_process: Callable[..., Server]) -> None:
    ports = find_free_port(), find_free_port()
    servers = [
        kvd_process(*AFFINITY, *sync(*order), face="select-service", environ=EVENTLESS)
        for order in (ports, ports[::-1])
    ]
    with start_catalog(servers[0].base_url) as one, start_catalog(servers[1].base_url) as two:
        meet(one, two, servers[0].wait_until)
        check_both_follow(one, two, servers[0].wait_until)
        metrics = one.get("/metrics").text
        assert "kvd_replica_refused_total" in metrics and 'reason="topic"} 0' in metrics


@pytest.mark.peer
def test_ours_and_dynamos_follow_each_other(
    kvd_process: Callable[..., Server], peer_process: Callable[..., Server]
) -> None:
    ports = find_free_port(), find_free_port()
    ours = kvd_process(*AFFINITY, *sync(*ports), face="select-service", environ=EVENTLESS)
    theirs = peer_process(
        *AFFINITY, *sync(*ports[::-1]), service="select_service", environ=EVENTLESS
    )
    with start_catalog(ours.base_url) as one, start_catalog(theirs.base_url) as two:
        meet(one, two, ours.wait_until)
        check_both_follow(one, two, ours.wait_until)
