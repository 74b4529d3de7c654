"""A daemon to be diagnosed, and engines around it, with or without faults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import zmq

from examples.engine.caches import BLOCK_SIZE, Event, VllmEngine
from examples.engine.caches import Engine as Cache
from tests.conformance.engine import Engine
from tests.conformance.failure import show, wait_until
from tests.support.http_client import Client
from tests.support.ports import find_free_port
from tests.support.processes import Server
from tests.support.running import running

WITHIN_S = 20.0  # for conditions that take a second or two, on a busy machine

FACES = ("indexer", "slot-tracker", "selection", "conductor")

Json = dict[str, Any]


class Patient:
    """A running daemon with all faces, and the engines of one test."""

    def __init__(self, server: Server, urls: Mapping[str, str], opened: ExitStack) -> None:
        self.server = server
        self.urls = urls
        self._opened = opened
        self.clients = {face: opened.enter_context(Client(url)) for face, url in urls.items()}

    def post(self, face: str, path: str, body: Json, status: int | None = None) -> Any:
        answer = self.clients[face].post(path, json=body)
        if status is None:
            assert answer.is_success, answer.text
        else:
            assert answer.status_code == status, answer.text
        return answer.json()

    # ---- engines

    def engine(self, *, replay: bool = False, buffer: int = 10_000) -> Engine:
        """Returns an engine that publishes and ends with the test."""
        made = Engine("e")
        made.bind(replay=replay, buffer=buffer)
        self._opened.callback(made.unbind)
        return made

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        """Returns a bound socket of ZeroMQ's, and ends it with the test."""
        context = self._opened.enter_context(zmq.Context())
        made = self._opened.enter_context(closing(context.socket(kind)))
        made.linger = 0
        made.bind("tcp://127.0.0.1:0")
        return made

    def register(self, endpoint: str, **members: Any) -> None:
        """Registers instance 1 of model m with the indexer, unless said otherwise."""
        usual = {"instance_id": 1, "model_name": "m", "block_size": BLOCK_SIZE}
        self.post("indexer", "/register", {**usual, "endpoint": endpoint, **members})

    def rank(self, *, replay: bool = False, buffer: int = 10_000, **members: Any) -> Engine:
        """Returns an engine that is registered and has a subscriber."""
        made = self.engine(replay=replay, buffer=buffer)
        if replay:
            members["replay_endpoint"] = made.endpoint("replay")
        self.register(made.endpoint("pub"), **members)
        made.wait_subscribed(1, WITHIN_S)
        return made

    def worker(self, worker_id: int, events: str | None, **members: Any) -> Json:
        """Registers a worker of model m with the selection service; None: it has no KV events."""
        usual: Json = {
            "worker_id": worker_id,
            "model_name": "m",
            "endpoint": f"http://worker-{worker_id}:8000",
            "block_size": BLOCK_SIZE,
        }
        usual |= {"without_kv_events": True} if events is None else {"kv_events_endpoint": events}
        found: Json = self.post("selection", "/workers", usual | members)
        return found

    # ---- findings

    def findings(self, *, probe: bool = False, face: str = "indexer") -> list[Json]:
        answer = self.clients[face].get("/diagnose", params={"probe": int(probe)}, timeout=60)
        assert answer.status_code == 200, answer.text
        found: list[Json] = answer.json()["findings"]
        return found

    def finds(
        self, name: str, subject: str = "m/default", *, probe: bool = False, evidence: str = ""
    ) -> Json:
        """Waits until there is a finding of that name about a subject, and returns it.

        Its evidence must contain this text; evidence may grow while a fault lasts.
        """
        found: list[Json] = []

        def check() -> str | None:
            every = self.findings(probe=probe)
            found[:] = [
                each
                for each in every
                if each["name"] == name
                and subject in each["subject"]
                and evidence in each["evidence"]
            ]
            return None if found else f"no {name} of {subject}: {show(every)}"

        wait_until(check, WITHIN_S)
        return found[0]

    def until_applied(self, model: str, instance: int, dp_rank: int, seq: int) -> None:
        """Waits until the batch with number `seq`, or a later one, has been applied."""

        def check() -> str | None:
            rows = self.clients["indexer"].get("/workers", params={"model_name": model}).json()
            rows += self.clients["selection"].get("/workers").json()
            for row in rows:
                name = row.get("instance_id", row.get("worker_id"))
                listener = row.get("listeners", {}).get(str(dp_rank), {})
                if (row["model_name"], name) == (model, instance):
                    return None if listener.get("last_seq", -1) >= seq else show(row)
            return f"{instance} of {model} is not listed"

        wait_until(check, WITHIN_S)

    def empty(self) -> None:
        """Unregisters every engine and every replica."""
        for row in self.clients["indexer"].get("/workers").json():
            body = {name: row[name] for name in ("instance_id", "model_name")}
            self.clients["indexer"].post("/unregister", json=body)
        for row in self.clients["selection"].get("/workers").json():
            self.clients["selection"].delete(f"/workers/{row['worker_id']}")
        for each in self.clients["conductor"].get("/services").json()["services"]:
            body = {"instance_id": each["InstanceID"], "tenant_id": each["TenantID"]}
            self.clients["conductor"].post("/unregister", json=body)
        for each in self.clients["slot-tracker"].get("/replica_sync/peers").json():
            body = {"endpoint": each}
            self.clients["slot-tracker"].post("/replica_sync/deregister_peer", json=body)


class Rank:
    """A cache that publishes through an engine what it stores, as a rank does."""

    def __init__(self, engine: Engine, cache: Cache | None = None, dp_rank: int = 0) -> None:
        self.engine = engine
        self.cache = cache or VllmEngine(4096)
        self._dp_rank = dp_rank
        self._seqs = count()
        self.seq = -1  # of the last batch

    def serve(self, tokens: Sequence[int], **members: Any) -> None:
        """Caches a prompt and publishes what is new; `members` are added to its events."""
        self.publish([{**each, **members} for each in self.cache.serve(tokens)])

    def publish(self, events: Sequence[Event | list[Any]], **message: Any) -> None:
        if events:
            self.seq = next(self._seqs)
            batch = [0.0, list(events), self._dp_rank]
            self.engine.publish({"seq": self.seq, "batch": batch, **message})

    def skip(self, batches: int) -> None:
        """Loses batches, as a PUB socket does when its queue is full."""
        for _ in range(batches):
            self.publish([{"type": "AllBlocksCleared"}], drop=True, no_buffer=True)


def prompt(number: int, blocks: int = 2, begin: Sequence[int] = ()) -> list[int]:
    """Returns a prompt that shares no block with the prompts of other numbers."""
    return [*begin, *(number * 1000 + at for at in range(blocks * BLOCK_SIZE))]


@contextmanager
def running_patient(folder: Path, *flags: str) -> Iterator[tuple[Server, dict[str, str]]]:
    """Runs a daemon with all faces; yields it and the faces' URLs."""
    ports = {face: find_free_port() for face in FACES}
    binds = [f"--{face}-bind=127.0.0.1:{port}" for face, port in ports.items()]
    with running(folder, ports["indexer"], "serve", *binds, *flags) as server:
        yield server, {face: f"http://127.0.0.1:{port}" for face, port in ports.items()}
        assert "Traceback" not in server.stderr
