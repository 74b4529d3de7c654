"""Handlers cancelled at every checkpoint, and clients that leave in the middle of a long answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
import zmq

import kvd.faces.common.slices
import kvd.index.dumps
from kvd.config.sections.state import MAX_DUMPS
from kvd.faces.common.monitoring import metrics_route
from kvd.faces.indexer import routes as indexer
from kvd.http.app import build_app
from kvd.http.context import ServerContext
from kvd.http.routes import ConcurrencyLimit
from kvd.index.partitions import State
from kvd.index.peers import Peers
from kvd.index.registry import Registry
from kvd.model import PartitionKey, RankKey
from kvd.net.link import LinkOptions, LinkResources
from kvd.net.listeners import ListenerTasks
from kvd.net.zsocket import make_context
from kvd.wire.dump import BINARY_DUMP
from tests.support.agreement import check_agreement
from tests.support.cancelling import every_checkpoint
from tests.support.descriptors import open_descriptors
from tests.support.serving import PATIENT, Client, eventually, serving

PARTITION = PartitionKey("m", "default")
KEYS = [RankKey(PARTITION, 1, dp_rank) for dp_rank in range(3)]
SOMEWHERE = "tcp://127.0.0.1:1"  # nothing listens there


@dataclass
class Daemon:
    """The parts of a daemon's face, including its listeners."""

    state: State
    tasks: ListenerTasks
    registry: Registry
    engine: str  # where all listeners are connected; each failing attempt would open a descriptor
    routes: Any = None
    statuses: list[int] = field(default_factory=list)
    body: bytes = b""

    def __post_init__(self) -> None:
        dumps = indexer.dumps_bound(MAX_DUMPS)
        families = partial(indexer.families, self.state, self.registry, dumps)
        self.routes = (
            *indexer.routes(self.state, self.registry, Peers(), dumps, test_endpoints=True),
            metrics_route([families]),
        )
        self.app = build_app(self.routes, PATIENT, ServerContext())

    @property
    def dumps(self) -> ConcurrencyLimit:
        return next(route.admission for route in self.routes if route.path == "/dump")

    def register(self, key: RankKey) -> None:
        self.registry.register(key, self.engine, 4, None)

    def fill(self, blocks: int) -> None:
        numbers = list(range(1, blocks + 1))
        self.state.partitions[PARTITION].workers[1].store(0, numbers, numbers)

    async def ask(self, method: str, path: str, body: object = None, accept: bytes = b"*/*") -> int:
        """Has the application answer one request; returns its status."""
        self.statuses.clear()
        sent: list[bytes] = []
        content = b"" if body is None else json.dumps(body).encode()

        async def receive() -> dict[str, object]:
            await trio.lowlevel.checkpoint()
            while not bodies:
                await trio.sleep_forever()
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}

        async def send(message: Any) -> None:
            await trio.lowlevel.checkpoint()
            if message["type"] == "http.response.start":
                self.statuses.append(message["status"])
            else:
                sent.append(message.get("body", b""))

        bodies = [content]
        headers = [(b"content-type", b"application/json"), (b"accept", accept)]
        await self.app(
            {
                "type": "http",
                "asgi": {"version": "3.0", "spec_version": "2.3"},
                "http_version": "1.1",
                "method": method,
                "scheme": "http",
                "path": path,
                "raw_path": path.encode(),
                "query_string": b"",
                "root_path": "",
                "headers": [*headers, (b"content-length", b"%d" % len(content))],
                "client": None,
                "server": None,
                "extensions": {},
            },
            receive,
            send,
        )
        self.body = b"".join(sent)
        return self.statuses[0]

    def check(self) -> None:
        check_agreement(self.state, self.registry, self.tasks)
        assert self.dumps.inside == 0


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    made = make_context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def engine(context: zmq.Context) -> Iterator[str]:
    with context.socket(zmq.PUB) as publisher:
        publisher.bind("tcp://127.0.0.1:*")
        yield publisher.last_endpoint.decode()


@pytest.fixture
async def daemon(context: zmq.Context, engine: str, nursery: trio.Nursery) -> Daemon:
    state = State()
    tasks = ListenerTasks(nursery, LinkResources(context), trio.Event(), LinkOptions())
    made = Daemon(state, tasks, Registry(state, tasks), engine)
    for key in KEYS:
        made.register(key)
    made.fill(200)
    listeners = [registered.listener for registered in made.registry.registrations()]
    await eventually(lambda: all(listener.connected for listener in listeners))
    return made


RANK = {"instance_id": 1, "dp_rank": 0}
REGISTER = {**RANK, "dp_rank": 9, "model_name": "m", "endpoint": SOMEWHERE, "block_size": 4}

# Requests, and the statuses that each may have when it is sent again.
REQUESTS: dict[str, tuple[tuple[Any, ...], set[int]]] = {
    "register": (("POST", "/register", REGISTER), {201, 409}),
    "unregister a rank": (("POST", "/unregister", {**RANK, "model_name": "m"}), {200, 404}),
    "unregister": (("POST", "/unregister", {"instance_id": 1, "model_name": "m"}), {200, 404}),
    "pause": (("POST", "/test/pause_listener", RANK), {200, 409}),
    "query": (("POST", "/query", {"token_ids": [1] * 8, "model_name": "m"}), {200, 404}),
    "workers": (("GET", "/workers"), {200}),
    "metrics": (("GET", "/metrics"), {200}),
    "dump": (("GET", "/dump"), {200}),
    "binary dump": (("GET", "/dump", None, BINARY_DUMP), {200}),
}


@pytest.mark.parametrize("what", REQUESTS)
async def test_a_request(what: str, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvd.index.dumps, "SLICE_BYTES", 1024)
    monkeypatch.setattr(kvd.faces.common.slices, "SLICE_BYTES", 1024)
    request, statuses = REQUESTS[what]
    for cancelling in every_checkpoint(at_least=3):
        for key in KEYS:
            if key not in {registration.key for registration in daemon.registry.registrations()}:
                daemon.register(key)
        await cancelling.run(partial(daemon.ask, *request))
        await trio.testing.wait_all_tasks_blocked()
        daemon.check()
        assert await daemon.ask(*request) in statuses
        daemon.check()


# ---- clients of long answers

LONG = 60_000  # blocks: 5 MB of text, more than sockets hold


@asynccontextmanager
async def served(daemon: Daemon) -> AsyncIterator[Any]:
    daemon.fill(LONG)
    async with serving(routes=daemon.routes) as running:
        yield running


GET_DUMP = b"GET /dump HTTP/1.1\r\nhost: kvd\r\n\r\n"


@pytest.mark.parametrize("read", [0, 70_000, 1_000_000])
async def test_a_client_that_leaves_in_the_midst_of_a_dump(daemon: Daemon, read: int) -> None:
    async with served(daemon) as running:
        before = open_descriptors()
        async with running.client() as client:
            await client.send(GET_DUMP)
            got = 0
            while got < read:
                got += len(await client.stream.receive_some(read - got))
            client.reset()
        await running.until_empty()
        daemon.check()
        assert open_descriptors() == before


async def test_dumps_are_bounded(daemon: Daemon) -> None:
    async with served(daemon) as running, running.client() as another:
        clients = [Client(await trio.open_tcp_stream(*running.address)) for _ in range(MAX_DUMPS)]
        for client in clients:  # they do not read their answers
            await client.send(GET_DUMP)
        await eventually(lambda: daemon.dumps.inside == MAX_DUMPS)
        refused = await another.request("GET", "/dump")
        assert (refused.status, json.loads(refused.body)) == (
            503,
            {"error": "the limit of 8 concurrent dumps is reached (max_dumps)"},
        )
        metrics = (await another.request("GET", "/metrics")).body.decode().splitlines()
        assert {"kvd_dumps_open 8", "kvd_dumps_refused_total 1"} <= set(metrics)
        assert ("GET", "/dump", 503) in running.observed
        clients[0].reset()
        await eventually(lambda: daemon.dumps.inside < MAX_DUMPS)
        assert (await another.request("HEAD", "/dump")).status == 200
        for client in clients[1:]:
            client.reset()
        await running.until(client_gone=MAX_DUMPS)
        daemon.check()
