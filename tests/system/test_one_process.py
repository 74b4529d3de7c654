"""One `kvd serve`, one engine: each face answers about its blocks, in its own shape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from kvd_core.base.hashing import local_hashes, sequence_hashes
from tests.support.http_client import Client
from tests.support.ports import find_free_port
from tests.support.running import running

TOKENS = list(range(16))
STORED = msgpack.packb(
    [
        0.5,
        [
            ["BlockStored", [1, 2, 3], None, TOKENS[:12], 4, None, "GPU"],
            ["BlockStored", [4], 3, TOKENS[12:], 4, None, "CPU"],
        ],
        0,
    ]
)
LOCALS = local_hashes(TOKENS, 4)
FACES = ("indexer", "slot-tracker", "selection", "conductor")


class Process:
    """The clients of one kvd by face, and an engine that repeats one batch."""

    def __init__(self, clients: dict[str, Client], engine: zmq.Socket[bytes]) -> None:
        self._clients = clients
        self._engine = engine
        self._numbers = count()
        self.endpoint = f"tcp://127.0.0.1:{engine.bind_to_random_port('tcp://127.0.0.1')}"

    def post(self, face: str, path: str, body: dict[str, Any]) -> Any:
        answer = self._clients[face].post(path, json=body)
        assert answer.is_success, answer.text
        return answer.json()

    def publish(self) -> None:
        self._engine.send_multipart([b"", next(self._numbers).to_bytes(8, "big"), STORED])

    def register(self, face: str) -> None:
        """Registers the engine as worker 7 of the model."""
        if face == "selection":
            body = {"worker_id": 7, "model_name": "m", "endpoint": "http://e", "block_size": 4}
            self.post(face, "/workers", body | {"kv_events_endpoint": self.endpoint})
        elif face == "indexer":
            body = {"instance_id": 7, "model_name": "m", "endpoint": self.endpoint}
            self.post(face, "/register", body | {"block_size": 4})
        else:
            body = {"instance_id": "7", "modelname": "m", "endpoint": self.endpoint}
            self.post(face, "/register", body | {"block_size": 4, "type": "vLLM", "dp_rank": 0})

    def client(self, face: str) -> Client:
        return self._clients[face]

    def leave(self, face: str) -> None:
        if face == "selection":
            assert self._clients[face].delete("/workers/7").is_success
        elif face == "indexer":
            self.post(face, "/unregister", {"instance_id": 7, "model_name": "m"})
        else:
            self.post(face, "/unregister", {"instance_id": "7"})

    def found(self, face: str) -> int:
        """Returns how many of the prompt's tokens the engine caches, by a face."""
        if face == "indexer":
            body = {"model_name": "m", "token_ids": TOKENS}
            scores = self._clients[face].post("/query", json=body).json().get("scores", {})
            return int(scores.get("7", {}).get("0", 0))
        if face == "conductor":
            body = {"model": "m", "block_size": 4, "token_ids": TOKENS}
            rows = self.post(face, "/query", body).get("default", {})
            return int(rows.get("7", {"GPU": 0})["GPU"])
        answer = self._clients[face].post("/select", json={"model_name": "m", "token_ids": TOKENS})
        return int(answer.json().get("overlap", {"gpu": 0})["gpu"])

    def answers(self) -> dict[str, Any]:
        """Returns each face's answer about the prompt, in its own shape; all know the worker."""
        tokens, model = {"token_ids": TOKENS}, {"model_name": "m"}
        sized = {"model": "m", "block_size": 4}
        by_tokens = self.post("indexer", "/query", model | tokens)
        assert by_tokens == self.post("indexer", "/query_by_hash", model | {"block_hashes": LOCALS})
        rows = self.post("conductor", "/query", sized | tokens)
        hashes = {"seq_hashes": sequence_hashes(LOCALS)}
        assert rows == self.post("conductor", "/query_by_hash", sized | hashes)
        chosen = self.post("selection", "/select", model | tokens)
        return {"indexer": by_tokens, "conductor": rows, "selection": chosen["overlap"]}

    def until(self, tokens: int, *faces: str) -> None:
        """Has the engine publish until all of the faces find this many tokens."""
        for _ in range(2000):
            self.publish()
            if all(self.found(face) == tokens for face in faces):
                return
        raise AssertionError({face: self.found(face) for face in faces})


@contextmanager
def serving(folder: Path) -> Iterator[Process]:
    ports = {face: find_free_port() for face in FACES}
    binds = [f"--{face}-bind=127.0.0.1:{port}" for face, port in ports.items()]
    with ExitStack() as stack:
        server = stack.enter_context(running(folder, ports["indexer"], "serve", *binds))
        clients = {
            face: stack.enter_context(Client(f"http://127.0.0.1:{port}"))
            for face, port in ports.items()
        }
        context = stack.enter_context(zmq.Context())
        engine = stack.enter_context(context.socket(zmq.PUB))
        engine.linger = 0
        yield Process(clients, engine)
        assert "Traceback" not in server.stderr


def chosen(client: Client, **members: Any) -> str:
    """Returns the policy that the explanation of a selection names."""
    body = {"model_name": "m", "token_ids": TOKENS, "explain": True, **members}
    answer = client.post("/select", json=body)
    assert answer.is_success, answer.text
    return str(answer.json()["router_policy"])


def test_serve_goes_by_its_own_cost_but_for_requests_of_the_original(process: Process) -> None:
    process.register("selection")
    client = process.client("selection")
    assert client.get("/policy").json()["router_policy"] == chosen(client) == "kvd"
    for override in ({"router_temperature": 0.5}, {"track_prefill_tokens": False}):
        assert chosen(client, router_config_override=override) == "kvd"
    for override in ({"overlap_score_weight": 1}, {"overlap_score_credit": 1}):
        assert chosen(client, router_config_override=override) == "dynamo"
    assert chosen(client, router_policy="lmetric") == "lmetric"


@pytest.mark.parametrize("flags", [(), ("--router-policy=kvd,hold_up=0.5",)])
def test_the_drop_in_goes_by_the_cost_of_the_original(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    port = find_free_port()
    command = ("select-service", f"--port={port}", *flags)
    expected = flags[0].partition("=")[2] if flags else "dynamo"
    with (
        running(tmp_path, port, *command),
        Client(f"http://127.0.0.1:{port}") as client,
    ):
        assert client.get("/policy").json()["router_policy"] == expected


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    with serving(tmp_path) as process:
        yield process


ROW = {"longest_matched": 16, "gpu": 12, "dp": {"0": 12}, "cpu": 16, "disk": 16}
ANSWERS = {
    "indexer": {
        "scores": {"7": {"0": 12}}, "frequencies": [1, 1, 1], "instances": {"7": ROW},
    },
    "conductor": {
        "default": {
            "7": {"longest_matched": 16, "GPU": 12, "CPU": 4, "DISK": 0, "DP": {"0": 16}},
        },
    },
    "selection": ROW,
}  # fmt: skip


@pytest.mark.parametrize("face", ["indexer", "conductor", "selection"])
def test_whatever_face_listens_all_answer(process: Process, face: str) -> None:
    """All faces find the same prefix, each in its own figures."""
    process.register(face)
    process.until(12, face, "indexer", "conductor")
    if face != "selection":
        process.register("selection")  # it chooses among its own workers only
    assert process.answers() == ANSWERS
    process.leave(face)
    if face == "selection":
        assert process.found("indexer") == process.found("conductor") == 0


def test_what_a_publisher_tells_is_found_on_all_faces(process: Process) -> None:
    process.register("conductor")
    process.until(12, "conductor", "indexer")
    process.register("selection")  # it knows its own workers only
    assert process.found("selection") == 12
    process.leave("conductor")
    process.until(12, "selection", "indexer")


def test_a_face_removes_what_it_has_registered_and_nothing_else(process: Process) -> None:
    for face in ("indexer", "conductor", "selection"):
        process.register(face)
    process.until(12, "indexer", "conductor", "selection")
    process.leave("conductor")
    assert process.found("indexer") == process.found("selection") == 12
    process.leave("indexer")
    assert process.found("indexer") == process.found("selection") == 12
    process.leave("selection")
    assert process.found("indexer") == process.found("conductor") == 0
