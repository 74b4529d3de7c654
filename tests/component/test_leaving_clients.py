"""Clients that leave at any moment of a request, over real sockets: nothing stays booked for them.

Each client either has its answer, or nothing is booked for it. Only if its end and the answer cross
on the way is the outcome unknown; such bookings have the names that the client gave.
"""

from __future__ import annotations

import gc
import json
import socket
import struct
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import trio

from kvd.faces.selection.routes import selection_routes
from kvd.faces.slot_tracker import routes as slot_tracker
from kvd.http.routes import Route
from kvd.model import PartitionKey
from kvd.selection.options import RouterOptions
from kvd.selection.queue import Waiting
from kvd.selection.requests import QueuedRequest
from kvd.slots.trackers import SlotTrackers
from kvd_core.selector.settings import Settings
from tests.support.budget import scaled
from tests.support.descriptors import open_descriptors
from tests.support.selecting import M, Service, worker
from tests.support.serving import Client, Running, serving

BATCH = 40  # tokens: three prompts make a rank busy
TOKENS = list(range(16))
PLACE = {"model_name": M.model_name, "tenant_id": M.tenant_id}
CLIENTS = 64
REQUESTS = 16  # requests of each client

Leave = Callable[[socket.socket], None]


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def half_close(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_WR)


LEAVING: dict[str, Leave] = {
    "closed": socket.socket.close,
    "half-closed": half_close,
    "reset": reset,
}


def request(method: str, path: str, members: Any = None, more: str = "") -> bytes:
    body = b"" if members is None else json.dumps(members).encode()
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n{more}"
    if members is not None:
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


def connect(running: Running) -> socket.socket:
    sock = socket.create_connection(running.address)
    sock.setblocking(False)
    return sock


async def registered(service: Service, *worker_ids: int) -> None:
    for worker_id in worker_ids:
        record = worker(worker_id, max_num_batched_tokens=BATCH)
        assert not (await service.selections.workers.put(record)).reasons


PROMPT = {**PLACE, "token_ids": TOKENS}
KEYED = "idempotency-key: k\r\n"
RESERVED = {**PLACE, "worker_id": 1, "sequence_hashes": [1], "isl_tokens": 4}
BOOKINGS = {
    "in the lane": ("/select_and_reserve", PROMPT, ""),
    "by the handler": ("/select_and_reserve", {**PROMPT, "explain": True}, ""),
    "for a retry": ("/select_and_reserve", PROMPT, KEYED),
    "the long way": ("/select_and_reserve", PROMPT, "connection: close\r\n"),
    "where it was chosen before": ("/reservations", RESERVED, ""),
    "there, for a retry": ("/reservations", RESERVED, KEYED),
    "there, the long way": ("/reservations", RESERVED, "connection: close\r\n"),
}


async def leave_at_once(
    routes: tuple[Route, ...], leave: Leave, parked: bool, ask: Callable[[int], bytes]
) -> None:
    """Has twenty clients send a request and leave before the server can have read it."""
    async with serving(routes=routes) as running:
        for number in range(20):
            sock = connect(running)
            if parked:
                client = Client(trio.SocketStream(trio.socket.from_stdlib_socket(sock)))
                assert (await client.request("GET", "/health")).status == 200
            sock.sendall(ask(number))
            leave(sock)
            await running.until(client_gone=number + 1)
            sock.close()


@pytest.mark.parametrize("parked", [False, True], ids=["new", "known"])
@pytest.mark.parametrize("leaving", LEAVING)
@pytest.mark.parametrize("what", BOOKINGS)
async def test_who_leaves_right_after_asking_has_reserved_nothing(
    what: str, leaving: str, parked: bool
) -> None:
    service = Service(RouterOptions())
    await registered(service, 1)
    path, members, more = BOOKINGS[what]

    def ask(number: int) -> bytes:
        return request("POST", path, {**members, "reservation_id": str(number)}, more)

    routes = selection_routes(service.selections)
    await leave_at_once(routes, LEAVING[leaving], parked, ask)
    assert not service.selections.reservations.owner_of
    assert service.candidates().ledger.stats()["requests"] == 0
    service.check()


@pytest.mark.parametrize("parked", [False, True], ids=["new", "known"])
@pytest.mark.parametrize("leaving", LEAVING)
@pytest.mark.parametrize("more", ["", KEYED, "connection: close\r\n"])
async def test_who_leaves_right_after_asking_has_added_nothing(
    more: str, leaving: str, parked: bool
) -> None:
    slots = SlotTrackers(300.0)
    slots.register(PartitionKey("m", "default"), 1, 16, 0, 1)
    members = {"model_name": "m", "worker_id": 1, "dp_rank": 0, "sequence_hashes": [1, 2]}

    def ask(number: int) -> bytes:
        return request("POST", "/add", {**members, "request_id": f"é{number}"}, more)

    routes = slot_tracker.routes(slots)
    await leave_at_once(routes, LEAVING[leaving], parked, ask)
    (tracker,) = slots.trackers.values()
    assert tracker.ledger.stats()["requests"] == 0


class Caller:
    """One of many clients, which leaves in the middle of most of its requests."""

    def __init__(self, running: Running, number: int, rng: Random, seen: Counter[str]) -> None:
        self.running = running
        self.number = number
        self.rng = rng
        self.seen = seen
        self.asked = 0
        self.mine: list[str] = []  # reservations that were confirmed
        self.unsure: set[str] = set()  # names that it may have reserved
        self.not_booked: set[str] = set()  # names that it cannot have reserved
        self.unnamed = 0  # requests that may have reserved names chosen by the server

    async def run(self) -> None:
        for _ in range(REQUESTS):
            await self.ask()
        while self.mine:
            await self.whole(request("DELETE", f"/reservations/{self.mine.pop()}"), None)

    def operation(self) -> tuple[bytes, str | None, bool]:
        """Returns a request, the name that it reserves, and whether it reserves anything."""
        self.asked += 1
        name = f"{self.number}-{self.asked}"
        kind = self.rng.choice(("select", "reserve", "reserve", "reserve", "unnamed", "place"))
        if self.mine and (len(self.mine) > 1 or self.rng.random() < 0.5):
            step = self.rng.choice(("/prefill_complete", "/output_block", ""))
            path = f"/reservations/{self.rng.choice(self.mine)}{step}"
            return request("POST" if step else "DELETE", path), None, False
        members: dict[str, Any] = {**PLACE, "token_ids": [self.number, *TOKENS]}
        if self.rng.random() < 0.3:
            members["strict_priority"] = self.rng.randrange(3)
        if self.rng.random() < 0.3:
            members["allowed_worker_ids"] = [self.rng.choice((1, 2))]
        if kind == "select":
            return request("POST", "/select", members), None, False
        more = f"idempotency-key: {name}\r\n" if self.rng.random() < 0.2 else ""
        if kind == "unnamed":
            return request("POST", "/select_and_reserve", members, more), None, True
        if kind == "place":
            place = {**RESERVED, "worker_id": self.rng.choice((1, 2)), "reservation_id": name}
            return request("POST", "/reservations", place, more), name, True
        members["reservation_id"] = name
        return request("POST", "/select_and_reserve", members, more), name, True

    async def ask(self) -> None:
        data, name, reserves = self.operation()
        moment = self.rng.choice(("never", "before", "within", "at once", "later", "answered"))
        if moment == "never":
            return await self.whole(data, name)
        self.seen[moment] += 1
        sock = connect(self.running)
        cut = {"before": 0, "within": self.rng.randrange(1, len(data))}.get(moment, len(data))
        sock.sendall(data[:cut])
        if moment in ("later", "answered"):
            for _ in range(self.rng.randrange(1, 30)):
                await trio.lowlevel.checkpoint()
        if moment == "answered":
            with trio.move_on_after(0.05):
                await trio.lowlevel.wait_readable(sock)
        leaving = self.rng.choice(list(LEAVING))
        LEAVING[leaving](sock)
        if leaving == "half-closed":
            await Client(trio.SocketStream(trio.socket.from_stdlib_socket(sock))).read_to_end()
        sock.close()
        if not reserves or cut < len(data):
            return
        if moment == "at once" and name is not None:
            self.not_booked.add(name)
        elif name is not None:
            self.unsure.add(name)
        elif moment != "at once":
            self.unnamed += 1

    async def whole(self, data: bytes, name: str | None) -> None:
        """Sends a request, waits for the answer, and notes the reservation that it confirms."""
        sock = connect(self.running)
        client = Client(trio.SocketStream(trio.socket.from_stdlib_socket(sock)))
        async with client.stream:
            await client.send(data)
            reply = await client.read_reply()
        assert reply.status in (200, 201, 404, 503), reply
        members = json.loads(reply.body)
        if reply.status in (200, 201) and "reservation_id" in members:
            assert name in (None, members["reservation_id"])
            self.mine.append(members["reservation_id"])


@pytest.mark.parametrize("seed", range(scaled(1)))
async def test_sixty_four_clients_that_leave_at_any_moment(seed: int) -> None:
    descriptors = open_descriptors()
    service = Service(RouterOptions(Settings(queue_threshold=1.0), max_wait_s=0.5))
    selections, seen = service.selections, Counter[str]()
    await registered(service, 1, 2)
    rng = Random(seed)
    async with serving(routes=selection_routes(selections)) as running:
        callers = [Caller(running, number, Random(rng.random()), seen) for number in range(CLIENTS)]
        async with trio.open_nursery() as nursery:
            for caller in callers:
                nursery.start_soon(caller.run)
        await running.until_empty()
    live = set(selections.reservations.owner_of)
    unsure = set[str]().union(*(caller.unsure for caller in callers))
    assert not live & set[str]().union(*(caller.not_booked for caller in callers))
    unheard = live - unsure  # reservations with names chosen by the server
    assert all(len(name) == 36 for name in unheard)
    assert len(unheard) <= sum(caller.unnamed for caller in callers)
    assert selections.scheduler.held == 0 and not len(service.candidates().queue)
    assert selections.reservations.given_back > 0 and min(seen.values()) > 0
    for name in live:
        selections.reservations.free(name)
    stats = service.candidates().ledger.stats()
    assert (stats["requests"], stats["blocks"], stats["output_blocks"]) == (0, 0, 0)
    service.check()
    assert open_descriptors() <= descriptors
    gc.collect()
    assert not any(isinstance(one, QueuedRequest | Waiting) for one in gc.get_objects())
