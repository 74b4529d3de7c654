"""One process with a slot tracker and a selection service: bookings of either count on both."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.support.http_client import Client
from tests.support.ports import find_free_port
from tests.support.processes import Server
from tests.support.running import running

BLOCK = 16  # tokens
PROMPT = [101, 102, 103]
TOKENS = BLOCK * len(PROMPT)
BATCH = 100_000  # tokens: no worker is ever busy

Rows = dict[tuple[int, int], tuple[int, ...]]  # by worker and rank


class Faces:
    """Both faces of a process; each test has its own model."""

    def __init__(self, server: Server, tracker: Client, selection: Client) -> None:
        self.server = server
        self.tracker = tracker
        self.selection = selection
        self.model = ""

    def track(self, path: str, **members: Any) -> int:
        return self.tracker.post(path, json={"model_name": self.model, **members}).status_code

    def register(self, worker: int, block_size: int = BLOCK) -> None:
        ranks = {"block_size": block_size, "dp_start": 0, "dp_size": 1}
        assert self.track("/register", worker_id=worker, **ranks) == 201

    def add(self, name: str, worker: int, hashes: list[int] = PROMPT, tokens: int = TOKENS) -> int:
        request = {"request_id": name, "worker_id": worker, "dp_rank": 0}
        return self.track("/add", **request, sequence_hashes=hashes, new_isl_tokens=tokens)

    def free(self, name: str) -> None:
        assert self.track("/free", request_id=name) == 200

    def knows(self, name: str) -> bool:
        return self.track("/prefill_complete", request_id=name) == 200

    def serve(self, worker: int, batch: int = BATCH) -> None:
        """Makes a worker selectable."""
        members = {
            "worker_id": worker,
            "model_name": self.model,
            "endpoint": f"http://worker-{worker}:8000",
            "block_size": BLOCK,
            "kv_events_endpoint": f"ipc:///nonexistent/{self.model}-{worker}",
            "max_num_batched_tokens": batch,
        }
        response = self.selection.post("/workers", json=members)
        assert response.json()["lifecycle"] == "schedulable", response.text

    def prompt(self, hashes: list[int] = PROMPT) -> dict[str, Any]:
        place = {"model_name": self.model, "isl_tokens": BLOCK * len(hashes)}
        return place | {"block_hashes": hashes, "sequence_hashes": hashes}

    def select(self) -> int:
        worker: int = self.selection.post("/select", json=self.prompt()).json()["worker_id"]
        return worker

    def reserve(self, name: str, worker: int, hashes: list[int] = PROMPT) -> int:
        rank = {"worker_id": worker, "dp_rank": 0, "reservation_id": name}
        tokens = {"effective_prefill_tokens": BLOCK * len(hashes)}
        body = self.prompt(hashes) | rank | tokens
        return self.selection.post("/reservations", json=body).status_code

    def release(self, name: str) -> int:
        return self.selection.delete(f"/reservations/{name}").status_code

    def loads(self) -> Rows:
        """Returns the tracker's tokens and blocks of its ranks."""
        rows = self.tracker.get("/loads", params={"model_name": self.model}).json()
        return by_rank(rows, "active_prefill_tokens", "active_decode_blocks")

    def projected(self, hashes: list[int]) -> Rows:
        """Returns the tracker's tokens, blocks and requests with one more prompt."""
        body = {"model_name": self.model, "sequence_hashes": hashes}
        return by_rank(self.tracker.post("/potential_loads", json=body).json(), *PROJECTED)

    def selectable(self) -> Rows:
        """Returns the selection service's tokens, blocks and requests of its ranks."""
        (fleet,) = self.selection.get("/loads", params={"model_name": self.model}).json()
        return by_rank(fleet["loads"], *PROJECTED)

    def pending(self) -> int:
        (fleet,) = self.selection.get("/loads", params={"model_name": self.model}).json()
        waiting: int = fleet["pending_count"]
        return waiting


PROJECTED = ("potential_prefill_tokens", "potential_decode_blocks", "active_requests")


def by_rank(rows: list[dict[str, int]], *names: str) -> Rows:
    return {(row["worker_id"], row["dp_rank"]): tuple(row[name] for name in names) for row in rows}


@contextmanager
def running_faces(folder: Path, *flags: str) -> Iterator[Faces]:
    tracker, selection = find_free_port(), find_free_port()
    binds = (
        "--indexer-bind=off",
        "--conductor-bind=off",
        f"--slot-tracker-bind=127.0.0.1:{tracker}",
        f"--selection-bind=127.0.0.1:{selection}",
    )
    with ExitStack() as stack:
        server = stack.enter_context(running(folder, tracker, "serve", *binds, *flags))
        clients = (
            stack.enter_context(Client(f"http://127.0.0.1:{port}")) for port in (tracker, selection)
        )
        yield Faces(server, *clients)
        assert "Traceback" not in server.stderr


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faces]:
    with running_faces(tmp_path_factory.mktemp("kvd")) as faces:
        yield faces


MODELS = (f"model-{number}" for number in count())


@pytest.fixture
def faces(process: Faces) -> Iterator[Faces]:
    """Both faces, with the same two workers registered in each."""
    process.model = next(MODELS)
    for worker in (1, 2):
        process.register(worker)
        process.serve(worker)
    yield process
    for worker in (row["worker_id"] for row in process.selection.get("/workers").json()):
        assert process.selection.delete(f"/workers/{worker}").status_code == 200


def test_a_request_of_the_tracker_weighs_on_selections(faces: Faces) -> None:
    for loaded, free in ((1, 2), (2, 1)):
        assert faces.add("r1", loaded, [7, 8, 9]) == 201
        assert {faces.select() for _ in range(8)} == {free}
        assert faces.selectable() == {(loaded, 0): (TOKENS, 3, 1), (free, 0): (0, 0, 0)}
        assert faces.knows("r1")
        assert faces.selectable()[loaded, 0] == (0, 3, 1)
        faces.free("r1")
        assert faces.selectable() == {(1, 0): (0, 0, 0), (2, 0): (0, 0, 0)}


def test_a_reservation_weighs_on_the_trackers_loads(faces: Faces) -> None:
    assert faces.reserve("r1", 1) == 201
    assert faces.loads() == {(1, 0): (TOKENS, 3), (2, 0): (0, 0)}
    assert faces.projected([*PROMPT, 104]) == {(1, 0): (TOKENS, 4, 1), (2, 0): (0, 4, 0)}
    # Blocks that are live in both faces count once.
    assert faces.add("r2", 1, [*PROMPT[:2], 200]) == 201
    assert faces.loads()[1, 0] == (2 * TOKENS, 4)
    faces.free("r2")
    assert faces.release("r1") == 200
    assert faces.loads() == {(1, 0): (0, 0), (2, 0): (0, 0)}


def test_an_id_names_a_request_and_a_reservation(faces: Faces) -> None:
    assert faces.add("r1", 1, [1]) == 201
    assert faces.reserve("r1", 1, [2, 3]) == 201
    assert faces.add("r1", 2, [1]) == 409
    assert faces.reserve("r1", 2, [2, 3]) == 409
    assert faces.loads()[1, 0] == (TOKENS + 2 * BLOCK, 3)
    faces.free("r1")
    faces.free("r1")  # the tracker has none left, and does not free the other face's
    assert faces.loads()[1, 0] == (2 * BLOCK, 2)
    assert not faces.knows("r1")
    assert faces.add("r1", 1, [1]) == 201
    assert faces.release("r1") == 200
    assert faces.release("r1") == 404
    assert faces.loads()[1, 0] == (TOKENS, 1)
    assert faces.knows("r1")


def test_each_lists_its_own_ranks(faces: Faces) -> None:
    faces.register(3)
    faces.serve(4)
    assert faces.reserve("r1", 4) == 201
    assert faces.add("r1", 3) == 201
    assert faces.add("r2", 4) == 404
    assert faces.reserve("r2", 3) == 404
    assert faces.loads().keys() == {(1, 0), (2, 0), (3, 0)}
    assert faces.projected([]).keys() == {(1, 0), (2, 0), (3, 0)}
    assert faces.selectable() == {
        (1, 0): (0, 0, 0),
        (2, 0): (0, 0, 0),
        (4, 0): (TOKENS, 3, 1),
    }
    workers = faces.tracker.get("/workers", params={"model_name": faces.model}).json()
    assert [row["worker_id"] for row in workers] == [1, 2, 3]


@pytest.mark.parametrize("leaves", ["tracker", "selection"])
def test_a_worker_that_leaves_one_face_keeps_what_the_other_has(faces: Faces, leaves: str) -> None:
    assert faces.add("r1", 1, [1], 10) == 201
    assert faces.reserve("r1", 1, [2, 3]) == 201
    if leaves == "tracker":
        assert faces.track("/unregister", worker_id=1) == 200
        assert faces.selectable()[1, 0] == (2 * BLOCK, 2, 1)
        faces.register(1)
        assert faces.loads()[1, 0] == (2 * BLOCK, 2)
        assert not faces.knows("r1")
        assert faces.release("r1") == 200
    else:
        assert faces.selection.delete("/workers/1").status_code == 200
        assert faces.loads()[1, 0] == (10, 1)
        faces.serve(1)
        assert faces.selectable()[1, 0] == (10, 1, 1)
        assert faces.release("r1") == 404
        faces.free("r1")
    assert faces.loads()[1, 0] == (0, 0)


def test_blocks_of_another_size_share_nothing(process: Faces) -> None:
    process.model = next(MODELS)
    process.register(1, 2 * BLOCK)
    process.serve(1)
    assert process.add("r1", 1) == 201
    assert process.selectable() == {(1, 0): (0, 0, 0)}
    assert process.reserve("r1", 1, [5]) == 201
    assert process.loads() == {(1, 0): (TOKENS, 3)}
    # A new worker of the tracker has the blocks that the other face has booked.
    assert process.track("/unregister", worker_id=1) == 200
    process.register(1)
    assert process.loads() == {(1, 0): (BLOCK, 1)}


@pytest.mark.parametrize("step", ["/free", "/prefill_complete", "/unregister"])
def test_a_selection_waits_for_what_the_tracker_frees(process: Faces, step: str) -> None:
    process.model = next(MODELS)
    process.register(1)
    process.serve(1, batch=10)
    assert process.add("r1", 1, [7], 10_000) == 201
    with closing(HTTPConnection("127.0.0.1", process.selection.port, timeout=10)) as held:
        headers = {"Content-Type": "application/json"}
        held.request("POST", "/select", json.dumps(process.prompt()), headers)
        process.server.wait_until(lambda: process.pending() == 1, "holding it")
        named = {"worker_id": 1} if step == "/unregister" else {"request_id": "r1"}
        assert process.track(step, **named) == 200
        assert held.getresponse().status == 200
    assert process.pending() == 0


def test_the_tracker_counts_its_own_requests(faces: Faces) -> None:
    def requests() -> tuple[str, ...]:
        lines = faces.tracker.get("/metrics").text.splitlines()
        names = ("kvd_slots_requests ", "kvd_slots_requests_added_total ")
        return tuple(line for line in lines if line.startswith(names))

    before = requests()
    assert faces.reserve("r1", 1) == 201
    assert requests() == before
    label = f'model_name="{faces.model}",tenant_id="default",worker_id="1",dp_rank="0"'
    assert f"kvd_slots_rank_requests{{{label}}} 1" in faces.tracker.get("/metrics").text


# ---- replicas


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[tuple[Faces, Faces]]:
    """Two processes with the same workers; the second one listens to the first."""
    ports = find_free_port(), find_free_port()

    def flags(own: int, *peers: str) -> tuple[str, ...]:
        return f"--replica-sync-port={own}", *(f"--replica-sync-peers={peer}" for peer in peers)

    peer = f"tcp://127.0.0.1:{ports[0]}"
    with (
        running_faces(tmp_path, *flags(ports[0])) as speaker,
        running_faces(tmp_path, *flags(ports[1], peer)) as listener,
    ):
        for process in (speaker, listener):
            process.model = "m"
            for worker in (1, 2):
                process.register(worker)
                process.serve(worker)
        marks = (f"mark {number}" for number in count())

        def hears() -> bool:
            mark = next(marks)
            assert speaker.add(mark, 1, [], 0) == 201
            known = listener.knows(mark)
            speaker.free(mark)
            return known

        listener.server.wait_until(hears, "hearing")
        yield speaker, listener


def test_replicas_take_a_request_for_the_face_it_came_through(
    replicas: tuple[Faces, Faces],
) -> None:
    speaker, listener = replicas

    def heard(condition: Callable[[], bool]) -> None:
        listener.server.wait_until(condition, "hearing that")

    for each in replicas:
        found = each.selection.get("/diagnose", params={"probe": 1}).json()["findings"]
        assert {finding["name"] for finding in found} == {"engine_unreachable"}  # no engine exists
    assert speaker.add("r1", 1, [1]) == 201
    assert speaker.reserve("r1", 1, [2, 3]) == 201
    heard(lambda: listener.loads()[1, 0] == (TOKENS + 2 * BLOCK, 3))
    assert listener.selectable() == speaker.selectable()
    assert {listener.select() for _ in range(4)} == {2}
    assert listener.add("r1", 1) == listener.reserve("r1", 1) == 409
    assert speaker.release("r1") == 200
    heard(lambda: listener.loads()[1, 0] == (TOKENS, 1))
    assert listener.knows("r1") and listener.release("r1") == 404
    # If only one face has the rank, that face applies the event.
    assert listener.track("/unregister", worker_id=2) == 200
    assert speaker.add("r2", 2, [4, 5]) == 201
    heard(lambda: listener.selectable()[2, 0] == (TOKENS, 2, 1))
    speaker.free("r2")
    heard(lambda: listener.selectable()[2, 0] == (0, 0, 0))
