"""Several kvds that divide a fleet by model and tenant: each answers for its own part, and names
the owners of the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import http_client
from tests.support.ports import find_free_port
from tests.support.running import running

FACES = ("indexer", "slot-tracker", "selection", "conductor")
MODELS = ("llama", "qwen", "phi")
OWNERS = "llama=http://kvd-0,qwen=http://kvd-1,phi@default=http://kvd-2"


@dataclass(frozen=True)
class Part:
    """One kvd, which serves one of the models: its ports and its process."""

    ports: dict[str, int]
    log: Any

    def ask(self, face: str, path: str, body: dict[str, Any]) -> httpx.Response:
        url = f"http://127.0.0.1:{self.ports[face]}{path}"
        return http_client.post(url, json=body)

    def get(self, face: str, path: str) -> httpx.Response:
        return http_client.get(f"http://127.0.0.1:{self.ports[face]}{path}")


def fleet(folder: Path) -> Path:
    """Writes a fleet file with a worker of each model on each face."""
    file = folder / "fleet.toml"
    entries = []
    for number, model in enumerate(MODELS, 1):
        entries.append(
            f'[[indexer]]\ninstance_id = {number}\nmodel_name = "{model}"\nblock_size = 16\n'
            f'endpoint = "tcp://127.0.0.1:{number}"\n'
            f'[[slot_tracker]]\nworker_id = {number}\nmodel_name = "{model}"\nblock_size = 16\n'
            "dp_start = 0\ndp_size = 1\n"
            f'[[selection]]\nworker_id = {number}\nmodel_name = "{model}"\nblock_size = 16\n'
            f'endpoint = "http://gpu{number}"\nkv_events_endpoint = "tcp://127.0.0.1:{number}"\n'
        )
    file.write_text("\n".join(entries))
    return file


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Part]]:
    """Three kvds with one fleet file between them; each serves one model."""
    with ExitStack() as stack:
        made = []
        for number, model in enumerate(MODELS):
            folder = tmp_path_factory.mktemp(f"kvd-{number}")
            ports = {face: find_free_port() for face in FACES}
            binds = [f"--{face}-bind=127.0.0.1:{port}" for face, port in ports.items()]
            flags = [f"--serve={model}", f"--owners={OWNERS}", f"--fleet-file={fleet(folder)}"]
            server = stack.enter_context(running(folder, ports["indexer"], "serve", *binds, *flags))
            made.append(Part(ports, server))
        yield made


def questions(model: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Returns questions, bookings and registrations of a model, all of which need its partition."""
    worker = {"worker_id": 9, "model_name": model, "block_size": 16, "dp_start": 0, "dp_size": 1}
    rank = {
        "instance_id": 9,
        "model_name": model,
        "block_size": 16,
        "endpoint": "tcp://127.0.0.1:9",
    }
    add = {
        "model_name": model,
        "request_id": "r",
        "worker_id": 1,
        "dp_rank": 0,
        "sequence_hashes": [1],
        "new_isl_tokens": 1,
    }
    tokens = {"model_name": model, "token_ids": [1] * 16}
    hashes = {"model_name": model, "block_hashes": [1]}
    publisher = {
        "endpoint": "tcp://127.0.0.1:9",
        "type": "vLLM",
        "modelname": model,
        "instance_id": "a",
        "block_size": 16,
        "dp_rank": 0,
    }
    return [
        ("indexer", "/query", tokens),
        ("indexer", "/query_by_hash", hashes),
        ("indexer", "/query_tiered_by_hash", hashes),
        ("indexer", "/register", rank),
        ("slot-tracker", "/add", add),
        ("slot-tracker", "/potential_loads", add),
        ("slot-tracker", "/register", worker),
        ("selection", "/select", tokens),
        ("selection", "/select_and_reserve", tokens),
        ("selection", "/workers", {"worker_id": 9, "model_name": model, "block_size": 16}),
        ("conductor", "/query", {"model": model, "block_size": 16, "token_ids": [1] * 16}),
        ("conductor", "/query_by_hash", {"model": model, "block_size": 16, "seq_hashes": [1]}),
        ("conductor", "/register", publisher),
    ]


@pytest.mark.parametrize("number", range(len(questions(""))))
def test_what_belongs_elsewhere_is_sent_there(parts: list[Part], number: int) -> None:
    face, path, body = questions("qwen")[number]
    reply = parts[0].ask(face, path, body)
    assert reply.status_code == 421, reply.text
    assert reply.json()["owner"] == reply.headers["x-kvd-owner"] == "http://kvd-1"
    assert "model=qwen tenant_id=default is not served here" in reply.json()["error"]


def test_each_answers_for_its_own(parts: list[Part]) -> None:
    for number, (part, model) in enumerate(zip(parts, MODELS, strict=True), 1):
        for face, path, body in questions(model)[:3] + questions(model)[4:6]:
            assert part.ask(face, path, body | {"worker_id": number}).status_code in (200, 201)
        assert [row["model_name"] for row in part.get("indexer", "/workers").json()] == [model]
        assert [row["model_name"] for row in part.get("selection", "/workers").json()] == [model]


def test_a_fleet_file_is_shared(parts: list[Part]) -> None:
    """Each kvd skips the entries of models that others serve."""
    for part in parts:
        text = part.get("indexer", "/metrics").text
        assert 'kvd_fleet_entries{state="off"} 6' in text
        assert 'kvd_fleet_entries{state="failed"} 0' in text
        assert "fleet_entry_failed" not in part.log.stderr


def test_a_tenant_may_be_elsewhere_alone(parts: list[Part]) -> None:
    """`phi@default` has an owner, but no other tenant of `phi` has one."""
    tokens = {"model_name": "phi", "token_ids": [1] * 16}
    assert parts[0].ask("indexer", "/query", tokens).json()["owner"] == "http://kvd-2"
    reply = parts[0].ask("indexer", "/query", tokens | {"tenant_id": "other"})
    assert reply.status_code == 421 and reply.json()["owner"] is None
    assert "x-kvd-owner" not in reply.headers


def test_unknown_models_that_are_served_are_not_found(parts: list[Part]) -> None:
    reply = parts[0].ask(
        "indexer", "/query", {"model_name": "llama", "tenant_id": "t", "token_ids": []}
    )
    assert reply.status_code == 404


def test_what_belongs_elsewhere_is_counted(parts: list[Part]) -> None:
    name = "kvd_misdirected_total"

    def count() -> float:
        text = parts[2].get("indexer", "/metrics").text
        return float(next(line.split()[1] for line in text.splitlines() if line.startswith(name)))

    before = count()
    parts[2].ask("indexer", "/query", {"model_name": "llama", "token_ids": []})
    assert count() == before + 1
