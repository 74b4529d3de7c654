"""Slot trackers as processes that exchange events of requests over ZMQ, both ways.

Both are kvd, in clear or with CURVE; in tests marked `peer`, one is a live Dynamo.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.support import http_client
from tests.support.http_client import Client
from tests.support.ports import find_free_port
from tests.support.processes import Server

MODELS = ("m", "org/model:v1")
WORKERS = (1, 2, 2**64 - 1)
BLOCK = 16  # tokens
Start = Callable[..., Server]

Load = tuple[str, str, int, int, int, int]  # model, tenant, worker, rank, tokens, blocks


class Replica:
    """A running slot tracker with three workers of two ranks for each model."""

    def __init__(self, server: Server, client: Client, tenant: str) -> None:
        self.server = server
        self.client = client
        self.tenant = tenant  # its name of that member
        for model in MODELS:
            for worker in WORKERS:
                members = {"block_size": BLOCK, "dp_start": 0, "dp_size": 2}
                assert self.post("/register", model, worker_id=worker, **members) == 201

    def post(self, path: str, model: str, **members: Any) -> int:
        body = {"model_name": model, self.tenant: "t", **members}
        return self.client.post(path, json=body).status_code

    def loads(self) -> list[Load]:
        return [
            (
                row["model_name"],
                row[self.tenant],
                row["worker_id"],
                row["dp_rank"],
                row["active_prefill_tokens"],
                row["active_decode_blocks"],
            )
            for row in self.client.get("/loads").json()
        ]

    def add(self, model: str, request_id: str, rng: random.Random) -> None:
        status = self.post(
            "/add",
            model,
            request_id=request_id,
            worker_id=rng.choice(WORKERS),
            dp_rank=rng.randrange(2),
            sequence_hashes=prompt(rng),
            new_isl_tokens=rng.choice((0, 1, 48, 100_000)),
        )
        assert status == 201

    def knows(self, request_id: str) -> bool:
        return self.post("/prefill_complete", MODELS[0], request_id=request_id) == 200


def prompt(rng: random.Random) -> list[int]:
    """Returns random sequence hashes, each of which determines its prefix, as real ones do.

    Dynamo's trie goes wrong if one hash has two positions.
    """
    hashes, path = [], 1
    for _ in range(rng.randrange(6)):
        path = (path * 6364136223846793005 + rng.randrange(3)) % 2**64
        hashes.append(path - 2**63)
    return hashes


class Pair:
    """Two replicas that hear each other."""

    def __init__(self, *replicas: Replica) -> None:
        self.replicas = replicas
        self._marks = 0
        for speaker, listener in self.ways():
            listener.server.wait_until(partial(self._heard, speaker, listener), "heard")
        self.settle()

    def ways(self) -> tuple[tuple[Replica, ...], tuple[Replica, ...]]:
        return self.replicas, self.replicas[::-1]

    def _heard(self, speaker: Replica, listener: Replica) -> bool:
        """Returns whether a mark gets through, as it does once the listener has subscribed."""
        mark = self._mark(speaker)
        known = listener.knows(mark)
        speaker.post("/free", MODELS[0], request_id=mark)
        return known

    def _mark(self, speaker: Replica) -> str:
        self._marks += 1
        mark = f"mark {self._marks}"
        speaker.add(MODELS[0], mark, random.Random(self._marks))
        return mark

    def settle(self) -> None:
        """Waits until each has received all events of the other, and both have equal loads."""
        for speaker, listener in self.ways():
            mark = self._mark(speaker)
            listener.server.wait_until(partial(listener.knows, mark), "settled")
            speaker.post("/free", MODELS[0], request_id=mark)
        first, second = self.replicas
        second.server.wait_until(lambda: first.loads() == second.loads(), "equal")


class Keys:
    """The key files of two replicas, each of which accepts only the other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.public = []
        for number in range(2):
            public, secret = (key.decode() for key in zmq.curve_keypair())
            self.public.append(public)
            (folder / f"secret{number}").write_text(secret)
            (folder / f"keys{1 - number}").write_text(public)

    def flags(self, number: int) -> tuple[str, ...]:
        return (
            f"--curve-secret-key-file={self._folder}/secret{number}",
            f"--replica-sync-client-keys={self._folder}/keys{number}",
        )


@pytest.fixture(params=["kvd", "curve", pytest.param("dynamo", marks=pytest.mark.peer)])
def pair(request: pytest.FixtureRequest, kvd_process: Start, tmp_path: Path) -> Iterator[Pair]:
    ports = find_free_port(), find_free_port()

    def flags(own: int, theirs: int) -> tuple[str, ...]:
        peers = f"tcp://127.0.0.1:{theirs}"
        return "--replica-sync-port", str(own), "--replica-sync-peers", peers

    tenant = "tenant_id"
    if request.param == "curve":
        keys = Keys(tmp_path)
        first, second = replicas = [
            kvd_process(f"--replica-sync-port={port}", *keys.flags(number), face="slot-tracker")
            for number, port in enumerate(ports)
        ]
        for replica, port, key in zip(replicas, ports[::-1], keys.public[::-1], strict=True):
            body = {"endpoint": f"tcp://127.0.0.1:{port}", "curve_server_key": key}
            url = f"{replica.base_url}/replica_sync/register_peer"
            assert http_client.post(url, json=body).is_success
    else:
        first = kvd_process(*flags(*ports), face="slot-tracker")
    if request.param == "kvd":
        second = kvd_process(*flags(*ports[::-1]), face="slot-tracker")
    elif request.param == "dynamo":
        start = request.getfixturevalue("peer_process")
        tenant, second = "routing_group", start(*flags(*ports[::-1]), service="slot_tracker")
    with (
        Client(first.base_url) as to_first,
        Client(second.base_url) as to_second,
    ):
        yield Pair(Replica(first, to_first, "tenant_id"), Replica(second, to_second, tenant))


def test_both_account_for_the_same_requests(pair: Pair) -> None:
    rng = random.Random(7)
    live: list[tuple[str, str]] = []
    for burst in range(4):
        for number in range(60):
            replica = rng.choice(pair.replicas)
            if rng.random() < 0.55:
                live.append((rng.choice(MODELS), f"{burst}/{number}"))
                replica.add(*live[-1], rng)
            elif live:
                model, request_id = rng.choice(live)
                path = rng.choice(("/prefill_complete", "/free"))
                assert replica.post(path, model, request_id=request_id) in (200, 404)
        pair.settle()
        loads = pair.replicas[0].loads()
        assert sum(blocks for *_, blocks in loads) > 10
        assert sum(tokens for *_, tokens, _ in loads) > 0
    check_that_a_worker_takes_its_requests_along(pair)
    for model, request_id in live:
        rng.choice(pair.replicas).post("/free", model, request_id=request_id)
    pair.settle()
    assert {row[4:] for row in pair.replicas[1].loads()} == {(0, 0)}


def check_that_a_worker_takes_its_requests_along(pair: Pair) -> None:
    """A worker that leaves the first replica stays in the second one, but idle."""
    first, second = pair.replicas
    before = first.loads()
    gone = [row for row in before if row[0] == "m" and row[2] == 1]
    assert any(row[5] for row in gone)
    assert first.post("/unregister", "m", worker_id=1) == 200
    expected = [(*row[:4], 0, 0) if row in gone else row for row in before]
    second.server.wait_until(lambda: second.loads() == expected, "freed")
    assert first.loads() == [row for row in before if row not in gone]
    members = {"block_size": BLOCK, "dp_start": 0, "dp_size": 2}
    assert first.post("/register", "m", worker_id=1, **members) == 201
