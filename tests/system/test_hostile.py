"""Whatever engines and clients send, a running kvd serves the others and keeps its size.

Each test misbehaves in one way. Around each, `unharmed` checks that the process is as it was: it
has no more descriptors, little more memory and no error in its log, and it still indexes a
well-behaved worker. One process serves both faces.
tests/component and tests/unit test each part with every fault.
"""

from __future__ import annotations

import json
import os
import random
import resource
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
import zmq

from kvd.http.limits import HttpLimits
from kvd.platform.descriptors import listeners_within
from kvd_core.index.prefix_index import IngestStats, PrefixIndex
from tests.support import http_client
from tests.support.applying import apply_whole
from tests.support.http_client import Client
from tests.support.ports import find_free_port
from tests.support.processes import REPOSITORY, Server, clean_environment
from tests.support.running import running_both
from tests.support.slot_bodies import POSTS
from tests.support.zmtp_fakes import GREETING, large_frame, message, ready

# Memory that a test may leave resident: freed pages that malloc keeps (its threshold grows with
# the sizes it has seen, up to 64 MiB), and buffers that are used again. Three huge batches that
# stayed decoded, one for each stream, would take twice as much.
RSS_GROWTH_BYTES = 128 * 1024 * 1024

TIMEOUT_MS = 10_000  # of sockets, for answers that take milliseconds
MIB = 1024 * 1024
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
BLOCK_SIZE = 4
MODEL = "m"


class Kvd:
    """The process under test, with a client."""

    def __init__(self, server: Server, client: Client, slots: Client, context: zmq.Context) -> None:
        self.server = server
        self.client = client
        self.slots = slots  # client of the slot tracker
        self.context = context
        self._usual_bytes = 0

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.server.process.pid}/fd"))

    def resident_bytes(self) -> int:
        statm = Path(f"/proc/{self.server.process.pid}/statm").read_text()
        return int(statm.split()[1]) * PAGE_BYTES

    def note_size(self) -> None:
        self._usual_bytes = self.resident_bytes()

    def check_size(self) -> None:
        """Waits until the memory of all that was received since `note_size` is given back."""
        allowed = self._usual_bytes + RSS_GROWTH_BYTES
        self.server.wait_until(lambda: self.resident_bytes() <= allowed, "as small as before")

    def workers(self) -> list[dict]:
        return self.client.get("/workers").json()

    def register(self, instance_id: int, endpoint: str) -> int:
        body = {
            "instance_id": instance_id,
            "endpoint": endpoint,
            "model_name": MODEL,
            "block_size": BLOCK_SIZE,
        }
        return self.client.post("/register", json=body).status_code

    def unregister(self, row: dict) -> None:
        names = {name: row[name] for name in ("instance_id", "model_name", "tenant_id")}
        assert self.client.post("/unregister", json=names).status_code == 200

    def check_indexing(self) -> None:
        """Registers a well-behaved worker until the index has what it stores."""
        with closing(Worker(self, 999)) as worker:
            worker.check_indexed()
        self.unregister({"instance_id": 999, "model_name": MODEL, "tenant_id": "default"})

    def check_booking(self) -> None:
        """Registers a slot worker, books a request on it, and removes both."""
        place = {"worker_id": 999, "model_name": "well-behaved"}
        ranks = {"block_size": 16, "dp_start": 0, "dp_size": 1}
        booking = {"request_id": "r", "dp_rank": 0, "sequence_hashes": [1, 2]}
        steps = {"/register": place | ranks, "/add": place | booking, "/unregister": place}
        for path, body in steps.items():
            assert self.slots.post(path, json=body).status_code in (200, 201)
        for row in self.slots.get("/workers").json():
            gone = {name: row[name] for name in ("worker_id", "model_name", "tenant_id")}
            assert self.slots.post("/unregister", json=gone).status_code == 200
        assert self.slots.get("/loads").json() == []


class Worker:
    """An engine with a publisher of its own, registered."""

    def __init__(self, kvd: Kvd, instance_id: int = 1) -> None:
        self._kvd = kvd
        self._instance_id = instance_id
        self._socket = kvd.context.socket(zmq.XPUB)
        self._socket.linger = 0
        self._socket.sndhwm = 0
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        assert kvd.register(instance_id, f"tcp://127.0.0.1:{port}") == 201
        assert self._socket.poll(TIMEOUT_MS), "nobody subscribed"
        self._seq = 0

    def send(self, payload: bytes) -> None:
        self.send_frames(b"kv", self._seq.to_bytes(8, "big"), payload)
        self._seq += 1

    def send_frames(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def check_indexed(self) -> None:
        """Stores a block and waits for it; by then kvd has read all earlier messages."""
        tokens = [4_000_000_000 + self._seq] * BLOCK_SIZE
        stored = ["BlockStored", [self._seq], None, tokens, BLOCK_SIZE]
        self.send(msgpack.packb([0.0, [stored]]))
        self._kvd.server.wait_until(lambda: self._holds(tokens), "indexing")

    def _holds(self, tokens: list[int]) -> bool:
        body = {"token_ids": tokens, "model_name": MODEL}
        scores = self._kvd.client.post("/query", json=body).json()["scores"]
        return bool(scores.get(str(self._instance_id), {}).get("0"))

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(scope="module")
def kvd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kvd]:
    with (
        running_both(tmp_path_factory.mktemp("kvd")) as (server, slot_tracker),
        Client(server.base_url) as client,
        Client(slot_tracker) as slots,
        ExitStack() as stack,
    ):
        context = zmq.Context()
        stack.callback(context.destroy, linger=0)
        running = Kvd(server, client, slots, context)
        running.check_indexing()  # libzmq makes its threads with the first socket
        running.check_booking()
        yield running


@pytest.fixture(autouse=True)
def unharmed(kvd: Kvd) -> Iterator[None]:
    descriptors = kvd.descriptors()
    kvd.note_size()
    yield
    kvd.check_indexing()
    kvd.check_booking()
    for row in kvd.workers():
        kvd.unregister(row)
    assert kvd.workers() == []
    kvd.server.wait_until(lambda: kvd.descriptors() <= descriptors, "without further descriptors")
    kvd.check_size()
    assert "Traceback" not in kvd.server.stderr
    assert "level=error" not in kvd.server.stderr


# ---- publishers that speak ZMTP, but send no valid batches


def _array(count: int, item: bytes) -> bytes:
    return b"\xdd" + struct.pack(">I", count) + item * count


def _batch(events: bytes) -> bytes:
    return b"\x93\x00" + events + b"\xc0"


BAD_PAYLOADS = {
    "text": b"hello",
    "JSON": b'[0.0, [["BlockStored", [1], null, [1, 2, 3, 4], 4]], 0]',
    "arrays a million deep": b"\x91" * 1_000_000,
    "maps a million deep": b"\x81\x00" * 1_000_000,
    "events a million deep": _batch(b"\x91" * 1_000_000),
    "an array of four billion": b"\xdd\xff\xff\xff\xff",
    "four billion events": b"\x93\x00\xdd\xff\xff\xff\xff",
    "four billion hashes": _batch(b"\x91\x95\xabBlockStored\xdd\xff\xff\xff\xff"),
    "four billion tokens": _batch(b"\x91\x95\xabBlockStored\x91\x01\xc0\xdd\xff\xff\xff\xff"),
    "four billion bytes": b"\x93\x00\xc6\xff\xff\xff\xff",
    "a map of four billion": b"\xdf\xff\xff\xff\xff",
    "an extension": b"\xc9\xff\xff\xff\xff\x00",
    "the byte msgpack never uses": b"\xc1" * 100,
    "one number": b"\x01",
    "a batch and a byte": _batch(b"\x90") + b"\x00",
    "a batch with rank 2^63": b"\x93\x00\x90\xcf" + b"\x80" + bytes(7),
    "events that are none": _batch(_array(100_000, b"\xc0")),
    "events of unknown types": _batch(_array(10_000, b"\x91\xa1x")),
    "hashes that are texts": _batch(b"\x91\x95\xabBlockStored\x91\xa1x\xc0\x91\x01\x01"),
    "tokens that are negative": _batch(b"\x91\x95\xabBlockStored\x91\x01\xc0\x91\xff\x01"),
}


def _recorded() -> list[bytes]:
    lines = (REPOSITORY / "tests/support/data/engine_batches.jsonl").read_text().splitlines()
    return [bytes.fromhex(json.loads(line)["payload"]) for line in lines]


def _mutated(rng: random.Random, data: bytes) -> bytes:
    """Returns `data` changed at one to four positions."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1)
        length = rng.choice((1, 1, 2, 8, 64))
        piece = bytes(changed[at : at + length])
        changed[at : at + length] = rng.choice(
            (rng.randbytes(len(piece)), b"", piece * 2, b"\xdd\xff\xff\xff\xff", b"\xc0")
        )
    return bytes(changed) or b"\x00"


def test_batches_that_are_none() -> None:
    """Each payload is counted, and leaves nothing in the index."""
    counters = IngestStats()
    index = PrefixIndex(BLOCK_SIZE, counters)
    worker = index.add_worker(1)
    worker.register(0)
    for name, payload in BAD_PAYLOADS.items():
        before = sum(counters.as_dict()["bad"].values())
        apply_whole(worker.stream(0), payload)
        assert sum(counters.as_dict()["bad"].values()) > before, name
    index.verify()
    assert index.stats()["blocks"] == 0


def test_publishers_of_garbage(kvd: Kvd) -> None:
    with closing(Worker(kvd)) as worker:
        for payload in BAD_PAYLOADS.values():
            worker.send(payload)
            worker.check_indexed()


def test_publishers_of_damaged_batches(kvd: Kvd) -> None:
    rng = random.Random(15)
    with closing(Worker(kvd)) as worker:
        for batch in _recorded():
            worker.send(batch[: rng.randrange(len(batch))])
            for _ in range(20):
                worker.send(_mutated(rng, batch))
        worker.check_indexed()


def test_publishers_of_messages_of_a_wrong_shape(kvd: Kvd) -> None:
    seq = bytes(8)
    shapes = [
        (b"",),
        (b"kv", seq),
        (b"kv", seq, b"\x93\x00\x90\xc0", b""),
        (b"kv", seq[:7], b"\x93\x00\x90\xc0"),
        (b"kv", seq + b"\0", b"\x93\x00\x90\xc0"),
        (b"kv", b"", b""),
        (b"",) * 10_000,
        (b"k" * MIB, seq[:4], b""),
    ]
    with closing(Worker(kvd)) as worker:
        for shape in shapes:
            worker.send_frames(*shape)
        for _ in range(5000):
            worker.send_frames(b"kv", b"no", b"number")
        worker.check_indexed()
    lines = kvd.server.stderr.splitlines()
    refused = [line for line in lines if "event=messages_refused" in line]
    assert refused, lines
    assert len(refused) < 10  # lines are limited, so as not to fill the disk


def _self_parents(count: int) -> bytes:
    """Returns stored events that take ten times their size while their batch is applied."""
    return _batch(_array(count, b"\x95\xabBlockStored\x91\x05\x05\x91\x01\x01"))


@pytest.mark.parametrize(
    "payload",
    [
        b"\xff" * (15 * MIB),
        _batch(_array(8 * MIB, b"\xc0")),
        _self_parents(MIB // 2),
        _batch(_array(MIB // 2, b"\x92\xacBlockRemoved\x91\x01")),
    ],
    ids=["no msgpack", "events that are none", "stored events", "removed events"],
)
def test_publishers_of_huge_frames(kvd: Kvd, payload: bytes) -> None:
    with ExitStack() as stack:
        for instance_id in range(1, 4):  # each stream has buffers of its own
            worker = stack.enter_context(closing(Worker(kvd, instance_id)))
            worker.send(payload)
            worker.check_indexed()
        kvd.check_size()


# ---- peers that do not speak ZMTP, or not to the end


class FakePeer:
    """Listens on TCP, sends the same bytes to every client, and then closes or waits."""

    def __init__(self, opening: bytes, closes: bool) -> None:
        self.connections = 0
        self._opening = opening
        self._closes = closes
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.endpoint = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):  # until `close`
            while True:
                client, _ = self._listening.accept()
                self.connections += 1
                self._open.append(client)
                with suppress(OSError):
                    client.sendall(self._opening)
                if self._closes:
                    client.close()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for sock in (self._listening, *self._open):
            sock.close()


HANDSHAKE = GREETING + ready()
OPENINGS = {
    "HTTP": b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n",
    "SSH": b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n",
    "TLS": b"\x16\x03\x03\x00\x7a\x02\x00\x00\x76\x03\x03",
    "noise": random.Random(16).randbytes(4096),
    "zeros": bytes(4096),
    "ones": b"\xff" * 4096,
    "half a greeting": GREETING[:20],
    "a greeting, then noise": GREETING + random.Random(17).randbytes(4096),
    "an old greeting": b"\xff" + bytes(8) + b"\x7f\x00\x00",
    "another kind of socket": GREETING + ready(b"REP"),
    "an endless command": GREETING + b"\x06" + b"\x7f" + b"\xff" * 7,
    "a frame of 2^63 bytes": HANDSHAKE + large_frame(2**63),
    "a frame over the limit": HANDSHAKE + large_frame(65 * MIB),
    "half a batch": HANDSHAKE + message(b"kv", bytes(8), b"\x93\x00\x90\xc0")[:-2],
}


@pytest.mark.parametrize("closes", [True, False], ids=["leaving", "staying"])
def test_peers_that_are_no_engines(kvd: Kvd, closes: bool) -> None:
    with ExitStack() as stack:
        fakes = [
            stack.enter_context(closing(FakePeer(opening, closes))) for opening in OPENINGS.values()
        ]
        for instance_id, fake in enumerate(fakes, 1):
            assert kvd.register(instance_id, fake.endpoint) == 201
        again = 2 if closes else 1  # kvd waits for peers that stay silent
        kvd.server.wait_until(lambda: all(f.connections >= again for f in fakes), "trying again")
        kvd.check_indexing()
        engines = {row["instance_id"] for row in kvd.workers() if row["status"] == "active"}
        shook_hands = {i for i, opening in enumerate(OPENINGS.values(), 1) if HANDSHAKE in opening}
        assert engines <= shook_hands


# ---- clients


def _connect(kvd: Kvd, port: int | None = None) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port or kvd.server.port))
    sock.settimeout(TIMEOUT_MS / 1000)
    return sock


def _reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def test_a_flood_of_connections(kvd: Kvd) -> None:
    bound, beyond = HttpLimits().connections, 50
    with ExitStack() as stack:
        sockets = [stack.enter_context(_connect(kvd)) for _ in range(bound + beyond)]
        for sock in sockets[:beyond]:  # the oldest are displaced
            assert sock.recv(12) == b""
        for sock in sockets[-beyond:]:
            sock.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert sock.recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize("end", [socket.socket.close, _reset], ids=["close", "reset"])
def test_clients_that_come_and_go(kvd: Kvd, end: Callable[[socket.socket], None]) -> None:
    request = b'POST /query HTTP/1.1\r\ncontent-length: 99999\r\n\r\n{"token_ids": [1, 2'
    for number in range(1500):
        sock = _connect(kvd)
        sock.sendall(request[: number % len(request)])
        end(sock)


def _indexer_requests() -> list[bytes]:
    """Returns requests for each route, and some more; the registered endpoint does not exist."""
    identity = {"instance_id": 7, "model_name": MODEL}
    bodies = {
        "/register": {**identity, "endpoint": "ipc:///nonexistent", "block_size": BLOCK_SIZE},
        "/unregister": identity,
        "/query": {"token_ids": [1, 2, 3, 4, 5], "model_name": MODEL, "lora_name": "é"},
        "/query_by_hash": {"block_hashes": [1, -1, 2**64 - 1], "model_name": MODEL},
        "/query_tiered_by_hash": {"block_hashes": [1, 2**64 - 1], "model_name": MODEL},
    }
    return _posts(bodies) + _gets(
        "/health", "/workers?model_name=m&tenant_id=%C3", "/dump", "/nope"
    )


def _slot_requests() -> list[bytes]:
    tenants = {"tenant_id": "t", "routing_group": "t"}
    bodies = {path: body | tenants for path, (body, _) in POSTS.items()}
    bodies["/register"]["model_name"] = bodies["/add"]["model_name"]
    return _posts(bodies) + _gets(
        "/loads?tenant_id=t", "/requests/new%2F?model_name=m", "/replica_sync/peers", "/metrics"
    )


def _posts(bodies: dict[str, dict]) -> list[bytes]:
    return [
        b"POST %b HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
        % (path.encode(), len(json.dumps(body)), json.dumps(body).encode())
        for path, body in bodies.items()
    ]


def _gets(*targets: str) -> list[bytes]:
    return [f"GET {target} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode() for target in targets]


@pytest.mark.parametrize("face", ["indexer", "slot tracker"])
def test_damaged_requests(face: str, kvd: Kvd) -> None:
    rng = random.Random(18)
    requests = _indexer_requests() if face == "indexer" else _slot_requests()
    port = None if face == "indexer" else kvd.slots.port
    for _ in range(1500):
        with _connect(kvd, port) as sock, suppress(ConnectionError):
            sock.sendall(_mutated(rng, rng.choice(requests)) + rng.choice(requests))
            sock.shutdown(socket.SHUT_WR)
            answers = b"".join(iter(lambda sock=sock: sock.recv(65536), b""))
            assert b"HTTP/1.1 500" not in answers, answers


def test_clients_that_register_the_same_worker_at_once(kvd: Kvd) -> None:
    with ThreadPoolExecutor(8) as pool:
        statuses = pool.map(lambda seed: _storm(kvd, random.Random(seed)), range(8))
        assert set().union(*statuses) == {200, 201, 404, 409}


def _storm(kvd: Kvd, rng: random.Random) -> set[int]:
    """Registers and unregisters two instances at random; returns the statuses seen."""
    with Client(kvd.server.base_url) as client:
        return {_register_or_not(client, rng) for _ in range(50)}


def _register_or_not(client: Client, rng: random.Random) -> int:
    identity = {"instance_id": rng.choice((1, 2)), "model_name": MODEL}
    if rng.random() < 0.5:
        return client.post("/unregister", json=identity).status_code
    body = {**identity, "endpoint": "tcp://127.0.0.1:1", "block_size": BLOCK_SIZE}
    return client.post("/register", json=body).status_code


BOOKINGS = ("/add", "/prefill_complete", "/free", "/register", "/unregister")


def test_clients_that_book_the_same_requests_at_once(kvd: Kvd) -> None:
    with ThreadPoolExecutor(8) as pool:
        statuses = pool.map(lambda seed: _reservations(kvd, random.Random(seed)), range(8))
        assert set().union(*statuses) == {200, 201, 404, 409}


def _reservations(kvd: Kvd, rng: random.Random) -> set[int]:
    with Client(kvd.slots.base_url) as client:
        return {_book(client, rng) for _ in range(50)}


def _book(client: Client, rng: random.Random) -> int:
    path = rng.choices(BOOKINGS, weights=(4, 2, 2, 2, 1))[0]
    names = {"model_name": MODEL, "request_id": rng.choice("ab"), "worker_id": 1}
    body = POSTS[path][0] | names
    return client.post(path, json=body).status_code


def test_prompts_as_long_as_a_body_may_be(kvd: Kvd) -> None:
    assert kvd.slots.post("/register", json=POSTS["/register"][0]).status_code == 201
    place = POSTS["/add"][0] | {"model_name": "new"}
    for number in range(4):
        hashes = str(number) + ",7" * (MIB - 200)
        body = json.dumps(place | {"request_id": str(number), "sequence_hashes": [0]})
        data = body.replace("[0]", f"[{hashes}]").encode()
        for path, status in (("/potential_loads", 200), ("/add", 201), ("/add", 409)):
            headers = {"content-type": "application/json"}
            answer = kvd.slots.post(path, content=data, headers=headers)
            assert answer.status_code == status, answer.text
    (load, _) = kvd.slots.get("/loads").json()
    assert load["active_decode_blocks"] == 4 * (MIB - 199)


# ---- what only the operating system can bound

DESCRIPTORS = 64
FEW = (
    "import resource, runpy;"
    f"resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}));"
    "runpy.run_module('kvd', run_name='__main__', alter_sys=True)"
)


def test_workers_and_clients_share_few_descriptors(tmp_path: Path) -> None:
    """Registrations leave descriptors for clients, and clients give theirs back when they go."""
    port = find_free_port()
    command = [sys.executable, "-c", FEW, "indexer", "--port", str(port)]
    server = Server(command, tmp_path, port, clean_environment())
    try:
        server.wait_healthy()
        client = Client(server.base_url)
        with client, zmq.Context() as context, context.socket(zmq.PUB) as engine:
            engine.bind("tcp://127.0.0.1:0")
            body = {"endpoint": engine.last_endpoint.decode(), "model_name": "m", "block_size": 4}
            answers = [
                client.post("/register", json={"instance_id": number, **body})
                for number in range(DESCRIPTORS)
            ]
            taken = listeners_within(DESCRIPTORS)
            statuses = [answer.status_code for answer in answers]
            assert statuses == [201] * taken + [503] * (DESCRIPTORS - taken)
            assert "listeners is reached" in answers[-1].json()["error"]

            def listening() -> bool:
                rows = client.get("/workers").json()
                return len(rows) == taken and all(row["status"] == "active" for row in rows)

            server.wait_until(listening, "listening to those registered")
            with ExitStack() as stack:
                for _ in range(2 * DESCRIPTORS):
                    stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                paused = "kvd_http_accept_pauses_total 0"
                server.wait_until(
                    lambda: paused not in client.get("/metrics").text, "short of them"
                )
                assert listening()
            assert http_client.get(f"{server.base_url}/health").status_code == 200
            assert f"kvd_ranks_refused_total {DESCRIPTORS - taken}" in client.get("/metrics").text
            assert listening()
        assert server.stop() == 0
    finally:
        server.stop()


ADDRESS_SPACE_BYTES = 768 * MIB  # of the daemon, which takes a third of that before it serves
LIMITED = (
    "import resource, runpy;"
    f"resource.setrlimit(resource.RLIMIT_AS, ({ADDRESS_SPACE_BYTES}, {ADDRESS_SPACE_BYTES}));"
    "runpy.run_module('kvd', run_name='__main__', alter_sys=True)"
)


def test_a_message_without_end_is_ended_by_the_memory_limit(tmp_path: Path) -> None:
    """libzmq bounds a frame and the number of messages, but not the frames of one message.

    Where the process may take no more memory, libzmq gives up the connection and frees the
    message's frames; the listener logs that and tries again.
    """
    port = find_free_port()
    command = [sys.executable, "-c", LIMITED, "indexer", "--port", str(port)]
    server = Server(command, tmp_path, port, clean_environment())
    try:
        server.wait_healthy()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            endpoint = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
            body = {"instance_id": 1, "endpoint": endpoint, "model_name": MODEL, "block_size": 4}
            assert http_client.post(f"{server.base_url}/register", json=body).status_code == 201
            publisher, _ = listening.accept()
            with publisher:
                publisher.sendall(GREETING + ready())
                sent = _send_without_end(publisher)
        assert MIB < sent < ADDRESS_SPACE_BYTES
        assert http_client.get(f"{server.base_url}/health").status_code == 200
        assert server.stop() == 0
    finally:
        server.stop()


def _send_without_end(publisher: socket.socket) -> int:
    """Sends frames of one message until they are not accepted any more; returns their bytes."""
    frame = struct.pack(">BQ", 3, MIB) + bytes(MIB)
    sent = 0
    with suppress(OSError):
        while sent < ADDRESS_SPACE_BYTES:
            publisher.sendall(frame)
            sent += len(frame)
    return sent


def test_an_index_without_memory_left_says_so(tmp_path: Path) -> None:
    """Where the process may take no more memory, it loses a batch, or ends, with a message.

    Which of both depends on what asks for memory first. systemd starts it again.
    """
    port = find_free_port()
    command = [sys.executable, "-m", "kvd", "indexer", "--port", str(port)]
    server = Server(command, tmp_path, port, clean_environment())
    try:
        server.wait_healthy()
        with zmq.Context() as context, context.socket(zmq.PUB) as engine:
            engine.linger = engine.sndhwm = 0
            where = f"tcp://127.0.0.1:{engine.bind_to_random_port('tcp://127.0.0.1')}"
            body = {"instance_id": 1, "endpoint": where, "model_name": MODEL, "block_size": 1}
            http_client.post(f"{server.base_url}/register", json=body).raise_for_status()
            pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[0])
            most = pages * PAGE_BYTES + 8 * MIB
            resource.prlimit(server.process.pid, resource.RLIMIT_AS, (most, most))
            workers = _fill(engine, server)
        if workers is None:
            assert server.process.returncode != 0 and server.stderr.splitlines()[-1], server.stderr
        else:
            (worker,) = workers
            assert worker["stream"] != "exact"
    finally:
        server.process.kill()
        server.process.wait()


def _fill(engine: zmq.Socket[bytes], server: Server) -> list[Any] | None:
    """Publishes ever new blocks until memory is short; returns the workers listed then.

    Returns None if the process has ended.
    """
    names = 20_000  # per batch
    numbers = random.Random(1)
    for number in range(500):
        first = number * names + 1
        hashes = list(range(first, first + names))
        tokens = [numbers.getrandbits(31) for _ in hashes]
        event = ["BlockStored", hashes, first - 1 if number else None, tokens, 1, None]
        batch = msgpack.packb([0.0, [event], 0])
        engine.send_multipart([b"", number.to_bytes(8, "big"), batch])
        with suppress(httpx.TransportError):
            http_client.get(f"{server.base_url}/health")  # waits until kvd keeps up
        if server.process.poll() is not None:
            return None
        if "MemoryError" in server.stderr:
            with suppress(httpx.TransportError):  # kvd may end nevertheless
                found: list[Any] = http_client.get(f"{server.base_url}/workers").json()
                return found
    raise AssertionError("memory was never short")
