"""Many clients of the selection service at once, over real sockets, compared with a plain model.

Now and then all clients pause, or wait for an answer. Then the loads of the service must equal the
sum, by the model, of the reservations that its clients know of.
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import trio

from kvd.faces.selection.routes import selection_routes
from kvd.selection.options import RouterOptions
from kvd.selection.queue import Waiting
from kvd.selection.requests import QueuedRequest
from kvd_core.base.hashing import local_hashes, sequence_hashes
from kvd_core.selector.settings import Settings
from tests.models.ledger_model import ModelLedger
from tests.support.budget import scaled
from tests.support.descriptors import open_descriptors
from tests.support.selecting import EXPIRY_S, M, Service, worker
from tests.support.serving import Client, Reply, Running, eventually, serving

BLOCK_SIZE = 4
BATCH = 40  # tokens: two prompts or three make a rank busy
OPTIONS = RouterOptions(Settings(queue_threshold=1.0))
CLIENTS = 24
ROUNDS = 8
MOST_ROUNDS = 80  # of a test that has not yet seen all HAPPENINGS, which depend on the machine
HAPPENINGS = "waiting at a rest", "gone with its worker", "reserved 201", "reserved 409", "gone"
STEPS = 100  # steps of all clients together in a round
KEPT = 3  # most reservations that a client keeps while it asks for another
PLACE = {"model_name": M.model_name, "tenant_id": M.tenant_id}
FAMILIES = [[family] * 6 * BLOCK_SIZE for family in range(2)]


@dataclass
class Reservation:
    rank: tuple[int, int]
    hashes: list[int]
    tokens: int
    prefilling: bool = True
    outputs: int = 0


class World:
    """The service, its workers and its clients."""

    def __init__(self, running: Running, service: Service, rng: Random) -> None:
        self.running = running
        self.service = service
        self.rng = rng
        self.workers: dict[int, int] = {}  # ranks by worker id; an id is used once
        self.leaving: set[int] = set()  # workers that are being deleted
        self.numbered = 0
        self.connected = 0  # connections made so far, including closed ones
        self.clients = [Caller(self, number) for number in range(CLIENTS)]
        # Reservations whose clients left before the answer, with their hashes.
        self.unsure: dict[str, list[int]] = {}
        self.left: dict[str, Reservation] = {}  # those that were booked nevertheless
        self.steps = self.resting = self.connections = 0
        self.may_go = trio.Event()
        self.over = False
        self.seen: Counter[str] = Counter()

    def prompt(self) -> list[int]:
        """Returns some tokens of a family, and new ones behind them."""
        family = self.rng.choice(FAMILIES)
        novel = [self.rng.getrandbits(32) for _ in range(self.rng.choice((0, 3, 9)))]
        return family[: self.rng.randrange(len(family))] + novel

    async def register(self, client: Client) -> None:
        self.numbered += 1
        size = self.rng.randint(1, 2)
        record = worker(self.numbered, data_parallel_size=size, max_num_batched_tokens=BATCH)
        members = {
            **PLACE,
            "worker_id": record.worker_id,
            "endpoint": record.endpoint,
            "block_size": BLOCK_SIZE,
            "data_parallel_size": size,
            "max_num_batched_tokens": BATCH,
            "kv_events_endpoints": record.kv_events_endpoints,
        }
        reply = await client.request("POST", "/workers", json.dumps(members).encode())
        assert reply.status == 201, reply
        self.workers[record.worker_id] = size

    async def vanish(self, client: Client) -> None:
        """Deletes a worker with the requests that run there, unless it is the last one."""
        if len(self.workers) > 1:
            worker_id = self.rng.choice(list(self.workers))
            self.leaving.add(worker_id)
            reply = await client.request("DELETE", f"/workers/{worker_id}")
            assert reply.status == 200
            del self.workers[worker_id]

    # ---- rest

    async def rest(self) -> None:
        """Counts a step; once the round has all its steps, waits for the next round."""
        self.steps += 1
        if self.steps > STEPS and not self.over:
            self.resting += 1
            await self.may_go.wait()
            self.resting -= 1

    def is_quiet(self) -> bool:
        """Returns whether the service has nothing to do.

        Then every client rests or has a request that is held, and the server has noticed every new
        and every closed connection.
        """
        held = self.service.selections.scheduler.held
        stats = self.running.front.stats
        connections = stats.connections_total, stats.connections_open
        all_seen = connections == (self.connected, self.connections)
        return all_seen and self.resting + held == CLIENTS

    def has_seen_all(self) -> bool:
        """Returns whether all has happened that makes the comparison worth something."""
        return all(self.seen[what] for what in HAPPENINGS)

    def go_on(self) -> None:
        self.steps = 0
        self.may_go.set()
        self.may_go = trio.Event()

    # ---- the accounts

    async def check(self, client: Client) -> None:
        self.resolve()
        left = {name: one for name, one in self.left.items() if one.rank[0] in self.workers}
        known = [left, *(caller.live() for caller in self.clients)]
        live = {name: one for some in known for name, one in some.items()}
        assert sum(map(len, known)) == len(live)  # ids are unique
        assert live.keys() == self.service.selections.reservations.owner_of.keys()
        model = ModelLedger()
        for worker_id, size in self.workers.items():
            for dp_rank in range(size):
                model.add_rank((worker_id, dp_rank))
        for name, one in live.items():
            assert model.add(name, one.rank, one.hashes, one.tokens, 0.0, None) == 0
            if not one.prefilling:
                model.prefill_complete(name)
            for _ in range(one.outputs):
                model.output_block(name, None)
        (candidates,) = json.loads((await client.request("GET", "/loads")).body)
        rows = {
            (row["worker_id"], row["dp_rank"]): tuple(row.values())[2:]
            for row in candidates["loads"]
        }
        assert rows == {rank: model.load(rank) for rank in model.ranks}
        held = self.service.selections.scheduler.held
        assert candidates["pending_count"] == held
        self.seen["waiting at a rest"] += held
        self.service.check()

    def resolve(self) -> None:
        """Finds out which requests whose clients have left were booked."""
        ledger = self.service.candidates().ledger
        for name, hashes in self.unsure.items():
            request = ledger.request(name)
            self.seen["gone, booked" if request else "gone"] += 1
            if request is not None:
                rank = request.worker_id, request.dp_rank
                self.left[name] = Reservation(rank, hashes, request.tokens)
        self.unsure.clear()

    def end_left(self) -> None:
        """Ends bookings whose clients have left, so that ranks do not stay busy with them."""
        reservations = self.service.selections.reservations
        for name in self.left.keys() & reservations.owner_of.keys():
            reservations.free(name)
        self.left.clear()

    async def end_the_last(self, clients: trio.Nursery) -> None:
        """Ends the bookings of clients that leave in the last round, until all clients are done."""
        reservations = self.service.selections.reservations
        while clients.child_tasks:
            for name in self.unsure.keys() & reservations.owner_of.keys():
                reservations.free(name)
            await trio.sleep(0.002)

    def expire(self) -> None:
        """Makes all reservations expire."""
        self.service.now += EXPIRY_S + 1
        self.service.expire()
        self.left.clear()
        for caller in self.clients:
            caller.mine.clear()


class Caller:
    """A client that sends one request after the other."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.asked = 0
        self.mine: dict[str, Reservation] = {}
        self.client: Client

    def live(self) -> dict[str, Reservation]:
        workers = self.world.workers
        return {name: one for name, one in self.mine.items() if one.rank[0] in workers}

    async def run(self) -> None:
        rng = self.world.rng
        await self.connect()
        while not self.world.over:
            # Unfinished prefills would keep ranks busy.
            while [one for one in self.mine.values() if one.prefilling] or len(self.mine) > KEPT:
                await self.step(rng.choice(list(self.mine)))
            await rng.choices((self.select, self.reserve, self.go_away), (8, 3, 1))[0]()
        while self.mine:
            await self.end(next(iter(self.mine)))
        await self.disconnect()

    async def connect(self) -> None:
        self.client = Client(await trio.open_tcp_stream(*self.world.running.address))
        self.world.connections += 1
        self.world.connected += 1

    async def disconnect(self) -> None:
        await self.client.stream.aclose()
        self.world.connections -= 1

    async def post(self, path: str, members: dict[str, Any]) -> Reply:
        await self.world.rest()
        return await self.client.request("POST", path, json.dumps(members).encode())

    # ---- bookings

    def selection(self, name: str) -> tuple[dict[str, Any], list[int]]:
        """Returns a request's members and its prompt's sequence hashes."""
        rng, tokens = self.world.rng, self.world.prompt()
        local = local_hashes(tokens, BLOCK_SIZE)
        hashes = sequence_hashes(local)
        members: dict[str, Any] = {**PLACE, "reservation_id": name}
        if rng.random() < 0.3:
            members["token_ids"] = tokens
        else:
            members |= {"block_hashes": list(map(signed, local)), "isl_tokens": len(tokens)}
            members |= {"sequence_hashes": list(map(signed, hashes))}
        if members.get("isl_tokens") == 0:
            members = {**PLACE, "reservation_id": name, "token_ids": []}
        if rng.random() < 0.3:
            members["allowed_worker_ids"] = rng.sample(list(self.world.workers), 1)
        if rng.random() < 0.2:
            members["strict_priority"] = 1
        return members, list(hashes)

    def new_name(self) -> str:
        self.asked += 1
        return f"{self.number}-{self.asked}"

    async def select(self) -> None:
        name = self.new_name()
        members, hashes = self.selection(name)
        reply = await self.post("/select_and_reserve", members)
        if reply.status == 503:
            assert self.world.leaving.issuperset(members["allowed_worker_ids"]), reply
            self.world.seen["nobody left"] += 1
            return
        assert reply.status == 200, reply
        answer = json.loads(reply.body)
        rank = answer["worker_id"], answer["dp_rank"]
        self.mine[name] = Reservation(rank, hashes, answer["effective_prefill_tokens"])

    async def go_away(self) -> None:
        """Closes the connection while a request is under way, being served or held."""
        name = self.new_name()
        members, hashes = self.selection(name)
        body = json.dumps(members).encode()
        await self.world.rest()
        self.world.unsure[name] = hashes
        head = "POST /select_and_reserve HTTP/1.1\r\nhost: localhost\r\n"
        head += f"content-length: {len(body)}\r\n"
        await self.client.send(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        await self.disconnect()
        await self.connect()

    async def reserve(self) -> None:
        """Books a rank under a name that other clients use, too."""
        rng = self.world.rng
        worker_id = rng.choice(list(self.world.workers))
        # Each name is for one worker, so that it cannot go from a deleted worker to another.
        name = f"shared {worker_id} {rng.randrange(3)}"
        rank = worker_id, rng.randrange(self.world.workers[worker_id])
        members, hashes = self.selection(name)
        members |= {"worker_id": worker_id, "dp_rank": rank[1], "effective_prefill_tokens": 0}
        reply = await self.post("/reservations", members)
        self.world.seen[f"reserved {reply.status}"] += 1
        if reply.status == 201:
            assert name not in self.live()
            self.mine[name] = Reservation(rank, hashes, 0)
        else:
            gone = worker_id in self.world.leaving
            assert reply.status == 409 or (gone and reply.status == 404), reply

    # ---- steps

    async def step(self, name: str) -> None:
        steps = self.prefill_complete, self.output_block, self.end
        await self.world.rng.choice(steps)(name)

    async def prefill_complete(self, name: str) -> None:
        if await self.known(name, "POST", "/prefill_complete"):
            self.mine[name].prefilling = False

    async def output_block(self, name: str) -> None:
        if await self.known(name, "POST", "/output_block"):
            self.mine[name].outputs += 1

    async def end(self, name: str) -> None:
        if await self.known(name, "DELETE", ""):
            del self.mine[name]

    async def known(self, name: str, method: str, path: str) -> bool:
        """Takes a step; forgets the reservation if it expired or went with its worker."""
        one = self.mine[name]
        await self.world.rest()
        if self.mine.get(name) is not one:  # it has expired
            return False
        path = f"/reservations/{name.replace(' ', '%20')}{path}"
        reply = await self.client.request(method, path)
        if reply.status == 404:
            assert one.rank[0] in self.world.leaving, (name, one)
            self.world.seen["gone with its worker"] += 1
            del self.mine[name]
            return False
        assert reply.status == 200, reply
        return True


def signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


@pytest.mark.parametrize("seed", range(scaled(1)))
async def test_clients_at_once_account_as_the_model(seed: int) -> None:
    descriptors = open_descriptors()
    service = Service(OPTIONS)
    async with serving(routes=selection_routes(service.selections)) as running:
        world = World(running, service, Random(seed))
        async with running.client() as client, trio.open_nursery() as nursery:
            world.connections += 1
            world.connected += 1
            for _ in range(3):
                await world.register(client)
            for caller in world.clients:
                nursery.start_soon(caller.run)
            for number in range(MOST_ROUNDS):
                await eventually(lambda: world.steps > STEPS / 2)
                await world.vanish(client)  # while the clients go on
                await eventually(world.is_quiet)
                await world.check(client)
                if number % 3 == 2:
                    world.expire()
                else:
                    world.end_left()
                await world.register(client)
                done = number >= ROUNDS - 1 and world.has_seen_all()
                world.over = done or number == MOST_ROUNDS - 1
                world.go_on()
                if world.over:
                    break
            await world.end_the_last(nursery)
        world.resolve()
        world.end_left()
    assert not service.selections.reservations.owner_of and not service.selections.scheduler.held
    assert not service.candidates().queue._queues
    stats = service.candidates().ledger.stats()
    assert (stats["requests"], stats["blocks"], stats["output_blocks"]) == (0, 0, 0)
    service.check()
    assert open_descriptors() <= descriptors
    gc.collect()
    assert not any(isinstance(one, QueuedRequest | Waiting) for one in gc.get_objects())
    assert world.has_seen_all(), world.seen
