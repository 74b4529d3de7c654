"""CURVE in daemons: engines registered with their keys, replicas that have each other's keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvd.cli.main import main
from tests.support import exposition
from tests.support.http_client import Client
from tests.support.ports import find_free_port
from tests.support.processes import Server
from tests.support.running import running
from tests.support.storing_engines import TOKENS, StoringEngine

PUBLIC, SECRET = (key.decode() for key in zmq.curve_keypair())
OTHER_PUBLIC, OTHER_SECRET = (key.decode() for key in zmq.curve_keypair())

FACES = ("indexer", "slot-tracker", "selection", "conductor")


class CurveEngine(StoringEngine):
    """An engine that speaks CURVE with the key SECRET, and accepts any client."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        super().__init__(context)
        self.socket.unbind(self.socket.last_endpoint)
        self.socket.set(zmq.CURVE_SERVER, 1)
        self.socket.set(zmq.CURVE_SECRETKEY, SECRET.encode())
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")


@pytest.fixture
def engine() -> Iterator[CurveEngine]:
    with zmq.Context() as context:
        made = CurveEngine(context)
        yield made
        made.socket.close(0)


Clients = dict[str, Client]
Start = Callable[..., tuple[Server, Clients]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A function that starts a kvd with all faces."""
    with ExitStack() as stack:

        def run(*flags: str) -> tuple[Server, Clients]:
            ports = {face: find_free_port() for face in FACES}
            binds = [f"--{face}-bind=127.0.0.1:{port}" for face, port in ports.items()]
            folder = tmp_path / str(ports["indexer"])
            folder.mkdir()
            server = stack.enter_context(running(folder, ports["indexer"], "serve", *binds, *flags))
            urls = {face: f"http://127.0.0.1:{port}" for face, port in ports.items()}
            return server, {face: stack.enter_context(Client(url)) for face, url in urls.items()}

        yield run


def registrations(port: int, key: str) -> list[tuple[str, str, dict[str, Any]]]:
    endpoint = f"tcp://127.0.0.1:{port}"
    members = {"block_size": 4, "curve_server_key": key}
    rank = {**members, "instance_id": 1, "model_name": "m", "endpoint": endpoint}
    publisher = {**members, "instance_id": "2", "type": "vLLM", "model": "m", "endpoint": endpoint}
    worker = {**members, "worker_id": 3, "model_name": "m", "endpoint": "http://e"}
    return [
        ("indexer", "/register", rank),
        ("conductor", "/register", {**publisher, "dp_rank": 0}),
        ("selection", "/workers", {**worker, "kv_events_endpoint": endpoint}),
    ]


def test_every_face_takes_an_engines_key(start: Start, engine: CurveEngine) -> None:
    server, clients = start()
    for face, path, body in registrations(engine.port, PUBLIC):
        for key in ("", "x", 5):
            answer = clients[face].post(path, json={**body, "curve_server_key": key})
            assert answer.status_code in (400, 422) or (face, key) == ("conductor", "")
            assert not answer.is_error or "curve_server_key" in answer.json()["error"]
        if face == "conductor":
            assert clients[face].post("/unregister", json={"instance_id": "2"}).is_success
        assert clients[face].post(path, json=body).is_success
        other = clients[face].post(path, json={**body, "curve_server_key": OTHER_PUBLIC})
        assert other.status_code == (409 if face != "selection" else 201)
    clients["selection"].post("/workers", json=registrations(engine.port, PUBLIC)[2][2])

    def heard() -> bool:
        engine.publish()
        body = {"model_name": "m", "token_ids": TOKENS}
        found = clients["indexer"].post("/query", json=body).json().get("scores", {})
        asked = {"model": "m", "block_size": 4, "token_ids": TOKENS}
        held = clients["conductor"].post("/query", json=asked).json().get("default", {})
        return {"1", "3"} <= found.keys() and "2" in held

    server.wait_until(heard, "heard")
    (worker,) = clients["selection"].get("/workers").json()
    assert worker["curve_server_key"] == PUBLIC


def test_a_wrong_key_hears_nothing(start: Start, engine: CurveEngine) -> None:
    server, clients = start()
    for face, path, body in registrations(engine.port, OTHER_PUBLIC):
        assert clients[face].post(path, json=body).is_success

    def is_logged() -> bool:
        engine.publish()
        services = clients["conductor"].get("/services").json()["services"]
        return "handshake failed" in (services[0]["last_error"] or "")

    server.wait_until(is_logged, "said")
    body = {"model_name": "m", "token_ids": TOKENS}
    assert not clients["indexer"].post("/query", json=body).json().get("scores")


def test_replicas_with_keys(start: Start, tmp_path: Path) -> None:
    """Each replica receives the other's bookings; one without a key receives nothing, counted."""
    ports = find_free_port(), find_free_port()
    pairs = (PUBLIC, SECRET), (OTHER_PUBLIC, OTHER_SECRET)
    started = []
    for number, (port, (_, secret)) in enumerate(zip(ports, pairs, strict=True)):
        other_port, (other_key, _) = ports[1 - number], pairs[1 - number]
        folder = tmp_path / f"replica{number}"
        folder.mkdir()
        (folder / "secret").write_text(secret)
        (folder / "keys").write_text(f"{other_key} the other one\n")
        (folder / "fleet.toml").write_text(
            f'[[replica]]\nendpoint = "tcp://127.0.0.1:{other_port}"\n'
            f'curve_server_key = "{other_key}"\n'
            '[[slot_tracker]]\nmodel_name = "m"\nworker_id = 1\nblock_size = 4\n'
            "dp_start = 0\ndp_size = 1\n"
        )
        started.append(
            start(
                f"--replica-sync-port={port}",
                f"--curve-secret-key-file={folder}/secret",
                f"--replica-sync-client-keys={folder}/keys",
                f"--fleet-file={folder}/fleet.toml",
            )
        )
    (server, clients), (_, others) = started
    assert "event=curve_key public_key=" in server.stderr and SECRET not in server.stderr
    with zmq.Context() as context, context.socket(zmq.SUB) as unlisted:
        unlisted.linger = 0
        unlisted.subscribe(b"")
        unlisted.set(zmq.CURVE_SERVERKEY, PUBLIC.encode())
        public, secret = zmq.curve_keypair()
        unlisted.set(zmq.CURVE_PUBLICKEY, public)
        unlisted.set(zmq.CURVE_SECRETKEY, secret)
        unlisted.connect(f"tcp://127.0.0.1:{ports[0]}")
        place = {"model_name": "m", "worker_id": 1, "dp_rank": 0}
        numbers = iter(range(10_000))

        def booked() -> bool:
            request = {
                "request_id": f"r{next(numbers)}",
                "sequence_hashes": [1, 2],
                "new_isl_tokens": 8,
            }
            assert clients["slot-tracker"].post("/add", json={**place, **request}).is_success
            loads = others["slot-tracker"].get("/loads").json()
            return any(row["active_prefill_tokens"] or row["active_decode_blocks"] for row in loads)

        server.wait_until(booked, "replicated")
        refused = "kvd_replica_keys_refused_total"
        metrics = clients["slot-tracker"]
        server.wait_until(
            lambda: exposition.parse(metrics.get("/metrics").text)[refused] > 0, "refused"
        )
        assert not unlisted.poll(50)


@pytest.mark.parametrize(
    ("secret", "keys", "complaint"),
    [
        ("short", None, "secret: expected the 40 characters of a secret key"),
        (None, PUBLIC, "--replica-sync-client-keys needs --curve-secret-key-file"),
        (SECRET, "x\n", "keys: line 1: expected the 40 characters of a public key"),
        ("\0", None, "secret: expected"),
    ],
    ids=["short", "no secret", "not a public key", "no text"],
)
def test_bad_files(
    secret: str | None,
    keys: str | None,
    complaint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["config", "check"]
    for flag, name, text in (
        ("--curve-secret-key-file", "secret", secret),
        ("--replica-sync-client-keys", "keys", keys),
    ):
        if text is not None:
            (tmp_path / name).write_text(text)
            flags += [flag, str(tmp_path / name)]
    assert main(flags) == 1
    assert complaint in capsys.readouterr().err
