"""A fleet for the page to show: `kvd serve`, engines that publish, prompts with shared prefixes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

from tests.support.engines import BLOCK_SIZE, Engine
from tests.support.http_client import Client
from tests.support.ports import find_free_port
from tests.support.processes import Server, clean_environment

MODEL = "example/model-8b"
TEMPLATES = 6  # beginnings that prompts share
BEGINNING, REST = 48 * BLOCK_SIZE, 12 * BLOCK_SIZE  # tokens
WITHIN_S = 10.0  # for subscriptions, which take milliseconds
LIVE = 3  # requests that run on each worker, about


class Pictured:
    """A daemon, its engines, and the requests that are sent to them."""

    def __init__(self, folder: Path, workers: int, *flags: str, token: str = "") -> None:
        self.port, selection = find_free_port(), find_free_port()
        binds = [f"--indexer-bind=127.0.0.1:{self.port}", f"--selection-bind=127.0.0.1:{selection}"]
        off = ["--slot-tracker-bind=off", "--conductor-bind=off"]
        self._command = [sys.executable, "-m", "kvd", "serve", *binds, *off, *flags]
        self._folder = folder
        self.url = f"http://127.0.0.1:{self.port}"
        self.engines = [Engine() for _ in range(workers)]
        self.client = Client(f"http://127.0.0.1:{selection}")
        if token:
            self.client.headers["authorization"] = f"Bearer {token}"
        self._chance = Random(1)
        self.asked = 0
        self._live: list[str] = []
        self.start()

    def start(self) -> None:
        """Starts the daemon and registers all workers with it."""
        self.server = Server(self._command, self._folder, self.port, clean_environment())
        self.server.wait_healthy()
        self._live.clear()
        rows = [
            {
                "worker_id": number,
                "endpoint": f"http://worker-{number}:8000",
                "block_size": BLOCK_SIZE,
                "kv_events_endpoint": engine.endpoint,
                "replay_endpoint": engine.replay_endpoint,
                "total_kv_blocks": 2000,
            }
            for number, engine in enumerate(self.engines, 1)
        ]
        body = {"model_name": MODEL, "workers": rows}
        self.client.put("/workers", json=body).raise_for_status()
        for number, engine in enumerate(self.engines):
            assert engine.subscribed.wait(WITHIN_S)
            engine.store([2 * 10**6 + number] * BEGINNING)  # exact from its first batch on

    def stop(self) -> int:
        return self.server.stop()

    def ask(self, requests: int) -> None:
        """Sends requests to the workers that kvd chooses, which cache them; ends some others."""
        for _ in range(requests):
            self.asked += 1
            template = self._chance.randrange(TEMPLATES)
            begins = [template * 100_000 + at for at in range(BEGINNING)]
            turn = self._chance.randrange(40)
            tokens = begins + [10**6 + turn * 1000 + at for at in range(REST)]
            name = f"request-{self.asked:05}"
            body = {"model_name": MODEL, "token_ids": tokens, "reservation_id": name}
            answer = self.client.post("/select_and_reserve", json=body)
            answer.raise_for_status()
            self.engines[answer.json()["worker_id"] - 1].store(tokens)
            self._live.append(name)
            if len(self._live) > LIVE * len(self.engines):
                self.end(self._chance.choice(self._live))

    def end(self, name: str) -> None:
        """Frees a running request."""
        self._live.remove(name)
        self.client.delete(f"/reservations/{name}").raise_for_status()

    def close(self) -> None:
        if self.server.process.poll() is None:
            self.stop()
        self.client.close()
        for engine in self.engines:
            engine.close()


@contextmanager
def pictured(folder: Path, workers: int, *flags: str, token: str = "") -> Iterator[Pictured]:
    """Runs a fleet; its requests bear `token`, if the flags name a file of tokens."""
    with ExitStack() as opened:
        fleet = Pictured(folder, workers, *flags, token=token)
        opened.callback(fleet.close)
        yield fleet
