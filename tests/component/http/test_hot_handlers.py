"""Hot handlers under a front: the path by which a request comes does not change its answer."""

from __future__ import annotations

import json
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from kvd.faces.indexer.handlers import QueryHandler
from kvd.faces.selection.routes import selection_routes
from kvd.faces.slot_tracker.routes import routes as slot_routes
from kvd.http.hot import HotHandler
from kvd.http.limits import LONG_BODY_LIMIT
from kvd.http.messages import Request, Response
from kvd.http.routes import Route, Scope
from kvd.http.transport import ConnectionPhase
from kvd.index.registry import Registry
from kvd.model import DEFAULT_TENANT, PartitionKey
from kvd.selection.options import RouterOptions
from kvd.slots.trackers import SlotTrackers
from kvd_core.json.scan import AHEAD_BYTES, ScanAhead
from kvd_core.selector.settings import Settings
from tests.support.selecting import Service, worker
from tests.support.serving import Client, Reply, Running, Unwilling, eventually, serving

FORMS = ["whole", "in pieces", "chunked", "with a query"]
ADD = {"model_name": "m", "request_id": "r", "worker_id": 7, "dp_rank": 0, "sequence_hashes": [1]}


def tracking() -> SlotTrackers:
    slots = SlotTrackers(expiry_s=300)
    slots.register(PartitionKey("m", DEFAULT_TENANT), 7, 16, 0, 1)
    return slots


def tracked() -> tuple[Route, ...]:
    return slot_routes(tracking())


async def post(client: Client, form: str, path: str, body: bytes) -> Reply:
    """Sends a request in some form; only the first of FORMS is for the fast path."""
    target = path + "?x=1" * (form == "with a query")
    head = f"POST {target} HTTP/1.1\r\nhost: kvd\r\ncontent-type: application/json\r\n".encode()
    if form == "chunked":
        await client.send(head + b"transfer-encoding: chunked\r\n\r\n")
        await client.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
    else:
        data = head + b"content-length: %d\r\n\r\n%b" % (len(body), body)
        first = len(data) - 1 if form == "in pieces" else len(data)
        await client.send(data[:first])
        for _ in range(20):  # lets the front's tasks run
            await trio.lowlevel.checkpoint()
        await client.send(data[first:])
    return await client.read_reply()


@pytest.mark.parametrize("form", FORMS)
async def test_a_life_is_the_same_on_every_way(form: str, layers: str) -> None:
    replies = []
    async with serving(routes=tracked()) as running, running.client() as client:
        for path, change in (
            ("/add", {}),
            ("/add", {}),
            ("/potential_loads", {}),
            ("/prefill_complete", {}),
            ("/prefill_complete", {"request_id": "x"}),
            ("/free", {}),
            ("/free", {}),
            ("/add", {"worker_id": -1}),
            ("/add", {"model_name": "n"}),
        ):
            reply = await post(client, form, path, json.dumps(ADD | change).encode())
            replies.append((reply.status, json.loads(reply.body)))
            assert reply.headers["content-type"] == "application/json"
        assert (await client.request("GET", "/loads")).status == 200
        assert running.front.stats.handler_bugs == 0
    ok = {"status": "ok"}
    assert replies[2][0] == 200
    assert replies[:2] + replies[3:] == [
        (201, ok),
        (409, {"error": "request r already exists"}),
        (200, ok),
        (404, {"error": "request x not found"}),
        (200, ok),
        (200, ok),
        (422, {"error": f"worker_id: expected a number from 0 to {2**64 - 1}"}),
        (404, {"error": "no slot tracker for model=n tenant_id=default"}),
    ]


@pytest.mark.parametrize("form", FORMS)
async def test_a_bug_in_a_handler_is_answered_with_500(form: str, layers: str) -> None:
    state: Any = SimpleNamespace(partitions={("m", DEFAULT_TENANT): SimpleNamespace(index=7)})
    handler = QueryHandler(state, cast(Registry, None))
    route = Route("POST", "/query", handler, hot=True, scope=Scope.READ)
    async with serving(routes=(route,)) as running, running.client() as client:
        reply = await post(client, form, "/query", b'{"model_name":"m","token_ids":[1]}')
        assert reply.status == 500
        assert b"TypeError" not in reply.body
        assert running.front.stats.handler_bugs == 1
        assert running.observed == [("POST", "/query", 500)]


@pytest.mark.parametrize("form", FORMS)
async def test_what_is_booked_is_undone_where_the_answer_cannot_be_told_of(
    form: str, layers: str
) -> None:
    slots = tracking()
    async with serving(routes=slot_routes(slots)) as running:
        running.recorder.requests = Unwilling()
        async with running.client() as client:
            with suppress(trio.EndOfChannel, trio.BrokenResourceError):  # it ends without an answer
                await post(client, form, "/add", json.dumps(ADD).encode())
            await running.until(bugs=1)
        assert slots.given_back == 1
        assert slots.tracker("m", DEFAULT_TENANT).ledger.stats()["requests"] == 0
        assert running.front.stats.bugs == 1
        running.front.stats.bugs = 0  # this bug was intended


PROMPT = {"model_name": "m", "tenant_id": "t", "token_ids": list(range(12))}
ODD = {"worker_id": 9, "dp_rank": 0}
DRAWING: dict[str, dict[str, Any]] = {
    "usual": {},
    "explained": {"explain": True},
    "for somebody unknown": {"pinned_worker": ODD},
    "of its own": {"router_config_override": {"assume_kv_reuse": False}},
    "without a model": {"model_name": "x"},
    "in both phases": {"phase": "both"},
    "not one": {"token_ids": "x"},
}


async def test_random_numbers_are_drawn_alike_on_every_way() -> None:
    """The fast path leaves some requests to their task, which calls the handler once more."""
    drawn = []
    for form in FORMS:
        service = Service(RouterOptions(Settings(temperature=1.0)))
        for number in (1, 2, 3):
            await service.selections.workers.put(worker(number))
        for _ in range(500):  # so that the handlers use up the numbers drawn in bulk, and need more
            service.selections.draws.next()
        replies = []
        routes = selection_routes(service.selections)
        async with serving(routes=routes) as running, running.client() as client:
            for path in ("/select", "/select_and_reserve"):
                for change in DRAWING.values():
                    body = json.dumps(PROMPT | change).encode()
                    reply = await post(client, form, path, body)
                    replies.append((reply.status, json.loads(reply.body)))
        drawn.append((replies, service.selections.draws.next()))
        assert [status for status, _ in replies].count(200) >= 8
    assert drawn == [drawn[0]] * len(FORMS)


async def test_a_selection_whose_client_has_sent_more_and_left_gives_up_its_place(
    layers: str,
) -> None:
    service = Service(RouterOptions(Settings(queue_threshold=1.0)))
    await service.selections.workers.put(worker(1, max_num_batched_tokens=100))
    service.reserve("a", (1, 0), [901], 101)
    body = json.dumps(PROMPT).encode()
    head = b"POST /select HTTP/1.1\r\nhost: kvd\r\ncontent-type: application/json\r\n"
    async with serving(routes=selection_routes(service.selections)) as running:
        async with running.client() as client:
            await client.send(head + b"content-length: %d\r\n\r\n%b" % (len(body), body))
            await eventually(lambda: service.selections.scheduler.held == 1)
            await client.send(b"P")
            for _ in range(20):  # lets the front read it
                await trio.lowlevel.checkpoint()
        await eventually(lambda: service.selections.scheduler.held == 0)
        assert not len(service.candidates().queue)


class Scanned(HotHandler):
    """Notes the phases of all connections at each of the two steps in which it scans a body."""

    def __init__(self) -> None:
        self.waits = True
        self.running: Running | None = None
        self.phases: list[ConnectionPhase] = []

    def ahead(self, body: bytes) -> ScanAhead:
        return cast(ScanAhead, self)

    def advance(self) -> bool:
        assert self.running is not None
        self.phases += [each.phase for each in self.running.front._running]
        return len(self.phases) == 2

    async def __call__(self, request: Request) -> Response:
        return Response(200, b"{}")


async def test_a_connection_whose_long_body_is_scanned_is_at_work(layers: str) -> None:
    """It is not ended for others, as one is whose request is still to come."""
    handler = Scanned()
    route = Route("POST", "/scanned", handler, True, LONG_BODY_LIMIT, scope=Scope.READ)
    async with serving(routes=(route,)) as running, running.client() as client:
        handler.running = running
        reply = await client.request("POST", "/scanned?x=1", b" " * (AHEAD_BYTES + 1))
        assert reply.status == 200
    assert handler.phases == [ConnectionPhase.WORKING] * 2
