"""`kvd serve` as a process that tests kill and start again, and requests to it."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.engines import BLOCK_SIZE, Engine
from tests.support.http_client import Client
from tests.support.ports import find_free_port
from tests.support.processes import Server, clean_environment

FACES = ("indexer", "slot-tracker", "selection", "conductor")
FIRST_POLL_S, LAST_POLL_S = 0.005, 0.05
PATIENCE_S = 60.0


def wait(condition: Callable[[], object]) -> None:
    """Waits for a condition; fails the test after PATIENCE_S.

    Polls ever more slowly, as most conditions ask a daemon.
    """
    deadline, pause = time.monotonic() + PATIENCE_S, FIRST_POLL_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(pause)
        pause = min(pause * 1.5, LAST_POLL_S)


class Kvd:
    """`kvd serve`, which can be started again on the same state directory."""

    def __init__(self, folder: Path, *flags: str) -> None:
        """`folder` exists, and no other daemon uses it."""
        self.folder = folder
        self.state = folder / "state"
        self.ports = {face: find_free_port() for face in FACES}
        self.flags = [f"--state-dir={self.state}", "--snapshot-s=0.2", *flags]
        self.client = Client(timeout=PATIENCE_S)
        self.server: Server | None = None

    def start(self) -> None:
        binds = [f"--{face}-bind=127.0.0.1:{port}" for face, port in self.ports.items()]
        command = [sys.executable, "-m", "kvd", "serve", *binds, *self.flags]
        self.server = Server(command, self.folder, self.ports["indexer"], clean_environment())
        self.server.wait_healthy()

    def url(self, face: str, path: str) -> str:
        return f"http://127.0.0.1:{self.ports[face]}{path}"

    def post(self, face: str, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        return self.client.post(self.url(face, path), json=body, headers=headers)

    def get(self, face: str, path: str) -> Any:
        return self.client.get(self.url(face, path)).json()

    def metric(self, name: str) -> float:
        text = self.client.get(self.url("indexer", "/metrics")).text
        (line,) = [line for line in text.splitlines() if line.startswith(f"{name} ")]
        return float(line.split()[1])

    def snapshots_before_death(self) -> bool:
        """Returns whether the process began by restoring blocks from a snapshot."""
        assert self.server is not None
        self.server.wait_logged("event=ready")
        found = re.search(r"event=index_restored blocks=(\d+)", self.server.stderr)
        return found is not None and int(found[1]) > 0

    def kill(self) -> None:
        assert self.server is not None
        self.server.process.kill()
        self.server.process.wait()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        assert self.server is not None
        self.server.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.server.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        assert self.server is not None
        assert self.server.stop() == 0, self.server.stderr

    def close(self) -> None:
        self.client.close()
        if self.server is not None and self.server.process.poll() is None:
            self.kill()

    def register(self, engine: Engine, instance_id: int = 1) -> None:
        body = {
            "instance_id": instance_id,
            "endpoint": engine.endpoint,
            "model_name": "m",
            "block_size": BLOCK_SIZE,
        }
        if engine.replay_endpoint is not None:
            body["replay_endpoint"] = engine.replay_endpoint
        assert self.post("indexer", "/register", body).status_code == 201

    def health(self, instance_id: int = 1) -> tuple[str, str]:
        """Returns the state of an instance's stream, and why it is not exact."""
        for row in self.get("indexer", "/workers"):
            if row["instance_id"] == instance_id:
                listener = row["listeners"]["0"]
                return listener["stream"], listener.get("loss", "")
        return "absent", ""

    def paths(self, instance_id: int = 1) -> set[tuple[int, ...]]:
        """Returns, for each block of an instance, its local hash with all before it."""
        return paths_of(self.get("indexer", "/dump"), instance_id)

    def matched(self, tokens: list[int], instance_id: int = 1) -> int:
        body = {"model_name": "m", "token_ids": tokens}
        found = self.post("indexer", "/query", body).json()["scores"]
        scores: dict[str, int] = found.get(str(instance_id), {})
        return max(scores.values(), default=0)


def paths_of(dump: dict[str, Any], instance_id: int = 1) -> set[tuple[int, ...]]:
    """Does what `Kvd.paths` does, with a dump."""
    found: dict[int | None, tuple[int, ...]] = {None: ()}
    for event in dump.get("m:default", {"events": []})["events"]:
        if event["worker_id"] == instance_id:
            stored = event["event"]["data"]["stored"]
            parent = stored["parent_hash"]
            for block in stored["blocks"]:
                found[block["block_hash"]] = (*found[parent], block["tokens_hash"])
                parent = block["block_hash"]
    del found[None]
    return set(found.values())


@contextmanager
def kvd_of(folder: Path, *flags: str) -> Iterator[Kvd]:
    kvd = Kvd(folder, *flags)
    try:
        kvd.start()
        yield kvd
    finally:
        kvd.close()


@contextmanager
def engine_of(**options: Any) -> Iterator[Engine]:
    engine = Engine(**options)
    try:
        yield engine
    finally:
        engine.close()


def prompt(number: int, blocks: int = 3) -> list[int]:
    return [number] * BLOCK_SIZE * (blocks - 1) + list(range(BLOCK_SIZE))


def settle(kvd: Kvd, engine: Engine, prompts: int = 5) -> None:
    """Registers an engine, stores prompts, and waits until a snapshot has all of its blocks."""
    kvd.register(engine)
    assert engine.subscribed.wait(PATIENCE_S)
    for number in range(prompts):
        engine.store(prompt(number))
    wait(lambda: kvd.health() == ("exact", "") and len(kvd.paths()) == len(engine.cache))
    written = kvd.metric('kvd_state_files_total{content="index"}')
    wait(lambda: kvd.metric('kvd_state_files_total{content="index"}') > written + 1)


def book(kvd: Kvd, name: str) -> httpx.Response:
    body = {
        "model_name": "m",
        "request_id": name,
        "worker_id": 7,
        "dp_rank": 0,
        "sequence_hashes": [1, 2, 3],
        "new_isl_tokens": 12,
    }
    return kvd.post("slot-tracker", "/add", body, **{"idempotency-key": name})
