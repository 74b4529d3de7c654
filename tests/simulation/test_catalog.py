"""Registrations that replicas share, beside fleet files and over a server that fails.

One replica after the other is called, restarted, given another fleet file, or cut off while it
compares; the server is emptied, or goes back to an old copy. Once all have compared, each has what
calls have registered by a plain model, and what its own file has.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Coroutine
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from kvd.config.load import Config
from kvd.fleet_file.follower import FleetFileFollower
from kvd.fleet_file.parse import TABLES
from kvd.fleet_file.targets import (
    ConductorTarget,
    PolicyTarget,
    SelectionTarget,
    SlotTrackerTarget,
)
from kvd.index.peers import Peers
from kvd.index.publishers import Publishers
from kvd.persistence.registrations import ENDPOINTS_OF_ROW, SLICE, Faces, Registrations
from kvd.replica_sync.replicas import Replicas
from kvd.shared_state.catalog import Catalog, CatalogRow
from kvd.shared_state.keys import Keys
from kvd.shared_state.server import write_rows
from kvd.slots.trackers import SlotTrackers
from kvd.wire.egress import EgressPolicy
from kvd.wire.replica import ReplicaStats
from tests.simulation.memory_server import MemoryServer
from tests.support.budget import scaled
from tests.support.cancelling import Cancelling
from tests.support.selecting import Service

KEYS = Keys("kvd")
STEPS = 15
REPLICAS = 3
WORKERS = "slot_tracker", "selection"
Registered = dict[tuple[str, int], int]  # table and worker id, to the variant


class NoUpstreams:
    """There is no gateway."""

    changes = 0
    each: tuple[int, ...] = ()

    def __iter__(self) -> Any:
        return iter(())


class NothingSet:
    """Settings that name no workers."""

    workers = ()
    catalog = ()
    replica_sync = None


class Replica:
    """The slot tracker and the selection service of one process, its fleet file and catalog."""

    def __init__(self, path: Path) -> None:
        self.path = path
        service = Service()
        self.selections = service.selections
        self.slots = SlotTrackers(300)
        self.targets: dict[str, Any] = {
            "slot_tracker": SlotTrackerTarget(self.slots),
            "selection": SelectionTarget(self.selections.workers),
            "policy": PolicyTarget(self.selections.tuning),
        }
        self.fleet = FleetFileFollower(path, EgressPolicy(), self.targets)
        self.publishers = Publishers(service.state, service.listeners)
        others = self.publishers, Replicas(None, ReplicaStats()), NoUpstreams(), Peers()
        faces = Faces(service.registry, self.slots, self.selections, *others)  # type: ignore[arg-type]
        config: Config = NothingSet()  # type: ignore[assignment]
        self.registrations = Registrations(faces, config, self.fleet)
        self.catalog = Catalog(self.registrations, self.targets)

    async def read(self, *rows: tuple[str, dict[str, Any]]) -> None:
        lines = (
            f"[[{table}]]\n" + "".join(f"{name} = {json.dumps(of)}\n" for name, of in row.items())
            for table, row in rows
        )
        self.path.write_text("".join(lines))
        await self.fleet.read()
        assert not self.fleet.reads["refused"]

    async def sync(self, server: MemoryServer) -> None:
        await self.catalog.sync(server, KEYS, _write)  # type: ignore[arg-type]

    async def add(self, table: str, row: dict[str, Any]) -> None:
        await self.targets[table].add(_wanted(table, row))

    async def remove(self, table: str, row: dict[str, Any]) -> None:
        await self.targets[table].remove(_wanted(table, row))

    def has_in_file(self, table: str, number: int) -> bool:
        return self.registrations.is_set(table, _wanted(table, row_of(table, number)))

    def workers(self) -> Registered:
        """Returns what is registered, by calls or by the file."""
        slots = self.slots.workers(None, None)
        selection = self.selections.workers.entries.items()
        return {("slot_tracker", row.worker_id): len(row.ranks) for row in slots} | {
            ("selection", number): entry.record.max_num_batched_tokens or 0
            for number, entry in selection
        }

    def called(self) -> Registered:
        """Returns what is registered here and not held by the file."""
        return {
            (table, number): size
            for (table, number), size in self.workers().items()
            if not self.has_in_file(table, number)
        }


async def _write(command: Awaitable[Any]) -> bool:
    await command
    return True


def _wanted(table: str, row: dict[str, Any]) -> Any:
    return TABLES[table].read(json.dumps(row).encode())


def row_of(table: str, number: int, size: int = 1) -> dict[str, Any]:
    """Returns a worker with so many ranks, or batched tokens."""
    row: dict[str, Any] = {"worker_id": number, "model_name": "m", "block_size": 4}
    if table == "slot_tracker":
        return row | {"dp_start": 0, "dp_size": size}
    row |= {"endpoint": "http://e", "kv_events_endpoint": "tcp://127.0.0.1:1"}
    return row | {"max_num_batched_tokens": size, "total_kv_blocks": 1000}


async def settle(server: MemoryServer, *replicas: Replica) -> None:
    for _ in range(3):
        for each in replicas:
            await each.sync(server)


async def test_what_one_replica_has_in_its_file_stays_with_the_others(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    server, one, two = MemoryServer(9), Replica(tmp_path / "1"), Replica(tmp_path / "2")
    rows = ("slot_tracker", row_of("slot_tracker", 1)), ("selection", row_of("selection", 2))
    policy = {"model_name": "m", "router_policy": "kvd"}
    for table, row in rows:
        await one.add(table, row)
    one.registrations.replace_settings(
        ("m", None), {}, {"mode": 0} | dict(_wanted("policy", policy).policy.row)
    )
    changes = one.selections.tuning.all_changes()
    await two.read(*rows, ("policy", policy))
    await settle(server, one, two)
    await two.add("slot_tracker", row_of("slot_tracker", 9))  # `two` has news to write
    await settle(server, one, two)
    assert one.workers() == two.workers() and len(one.workers()) == 3
    assert one.selections.tuning.all_changes() == changes
    await two.read()  # what its file had is there by what the other says
    await settle(server, one, two)
    assert one.workers() == two.workers() and len(one.workers()) == 3
    assert dict(two.selections.tuning.all_changes()) == dict(changes)
    await one.remove(*rows[0])
    await settle(server, one, two)
    assert one.workers() == two.workers() and len(one.workers()) == 2


async def test_a_comparison_that_is_cut_off_removes_nothing(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A lost connection ends the session while a worker is registered."""
    server, one, two = MemoryServer(9), Replica(tmp_path / "1"), Replica(tmp_path / "2")
    await one.add("selection", row_of("selection", 1))
    await settle(server, one)
    async with two.selections.workers._changing, trio.open_nursery() as session:
        session.cancel_scope.deadline = trio.current_time() + 1  # then it waits for its turn
        session.start_soon(two.sync, server)
    assert session.cancel_scope.cancelled_caught
    assert not two.workers()
    await settle(server, two, one)
    assert one.workers() == two.workers() == {("selection", 1): 1}


async def test_a_change_that_is_accepted_in_part_undoes_no_later_one(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that fills up accepts the first rows, and another replica removes one of them."""
    monkeypatch.setattr("kvd.shared_state.catalog.WRITTEN_AT_ONCE", 2)
    server, one, two = MemoryServer(9), Replica(tmp_path / "1"), Replica(tmp_path / "2")
    rows = [row_of("slot_tracker", number) for number in range(4)]
    for row in rows:
        await one.add("slot_tracker", row)
    accepted = 0

    async def accept_first(command: Coroutine[Any, Any, None]) -> bool:
        nonlocal accepted
        accepted += 1
        if accepted > 1:
            command.close()
            return False
        await command
        return True

    await one.catalog.sync(server, KEYS, accept_first)  # type: ignore[arg-type]
    await settle(server, two)
    assert accepted == 2
    assert two.workers() == {("slot_tracker", number): 1 for number in range(2)}
    await two.remove("slot_tracker", rows[0])
    await settle(server, two)
    await settle(server, one, two)
    assert one.workers() == two.workers() == {("slot_tracker", number): 1 for number in (1, 2, 3)}


async def test_a_removal_elsewhere_leaves_what_a_client_has_registered_meanwhile(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The removal waits for its turn behind a client that replaces the worker."""
    server, one, two = MemoryServer(9), Replica(tmp_path / "1"), Replica(tmp_path / "2")
    row = row_of("selection", 1)
    await one.add("selection", row)
    await settle(server, one, two)
    await one.remove("selection", row)
    await settle(server, one)
    workers, later = two.selections.workers, _wanted("selection", row_of("selection", 1, 2))
    async with trio.open_nursery() as nursery, workers._changing:
        nursery.start_soon(workers.put, later)
        await wait_all_tasks_blocked()
        nursery.start_soon(two.sync, server)
        await trio.sleep(1)
    await settle(server, two, one)
    assert one.workers() == two.workers() == {("selection", 1): 2}


async def test_a_registration_by_an_earlier_version_counts(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """It does not say when it was made, and so cannot be told from one of an old copy."""
    server, one = MemoryServer(9), Replica(tmp_path / "1")
    row = row_of("selection", 1)
    await one.add("selection", row)
    await settle(server, one)
    [(name, content)] = server.values[KEYS.catalog].items()
    made = CatalogRow.read(content)
    assert made is not None
    await one.remove("selection", row)
    await settle(server, one)
    await write_rows(server, KEYS, {name: replace(made, at=0.0).packed()})  # type: ignore[arg-type]
    await settle(server, one)
    assert one.workers() == {("selection", 1): 1}


async def test_a_publisher_that_leaves_is_registered_no_more(tmp_path: Path) -> None:
    """It would come back after a restart, or to other replicas, also where it was of a file."""
    replica = Replica(tmp_path / "1")
    row = {"endpoint": "tcp://127.0.0.1:1", "type": "vLLM", "modelname": "m", "block_size": 16}
    wanted = _wanted("conductor", row | {"instance_id": "a", "dp_rank": 0})
    replica.publishers.register(wanted)
    assert len(list(replica.registrations.rows())) == 1
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ConductorTarget(replica.publishers).remove, wanted)
        while replica.publishers.find(wanted.key) is not None:
            await trio.lowlevel.checkpoint()
        assert len(replica.publishers) == 1 and not list(replica.registrations.rows())


@pytest.mark.parametrize("fleet", [True, False])
async def test_others_run_while_registrations_are_gathered(tmp_path: Path, *, fleet: bool) -> None:
    """Those of the fleet file are passed over; a worker of many ranks takes as long as many."""
    replica, counting = Replica(tmp_path / "fleet.toml"), Cancelling(sys.maxsize)
    if fleet:
        await replica.read(*(("slot_tracker", row_of("slot_tracker", each)) for each in range(200)))
    else:
        endpoints = dict.fromkeys(map(str, range(4096)), "tcp://127.0.0.1:1")
        row = row_of("selection", 1) | {
            "kv_events_endpoints": endpoints,
            "data_parallel_size": 4097,
        }
        await replica.add("selection", row)  # it cannot be scheduled, so nothing is listened to
    await counting.run(replica.registrations.frames)
    assert counting.steps >= (200 if fleet else 4096 // ENDPOINTS_OF_ROW) // SLICE


async def test_others_run_while_many_settings_are_gathered(tmp_path: Path) -> None:
    replica, turns = Replica(tmp_path / "1"), 0
    for number in range(3 * SLICE):
        replica.registrations.replace_settings((f"m{number}", None), {}, {"mode": 0})

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count_turns)
        for gather in (replica.registrations.frames, replica.catalog._here):
            before = turns
            await gather()
            assert turns > before + 1
        nursery.cancel_scope.cancel()


async def run(folder: Path, seed: int) -> None:
    random, server, model = Random(seed), MemoryServer(9), Registered()
    before: dict[str, Any] = {}  # what the server had at some time
    replicas = [Replica(folder / str(number)) for number in range(REPLICAS)]
    for step in range(STEPS):
        at = random.randrange(REPLICAS)
        replica, table, number = replicas[at], random.choice(WORKERS), random.randrange(3)
        size = random.randrange(1, 3)
        row, is_in_file = row_of(table, number, size), replica.has_in_file(table, number)
        match random.randrange(9):
            case 0 | 1 | 2 if (table, number) not in replica.workers():
                await replica.add(table, row)
                model[table, number] = size
            case 3 if (table, number) in replica.workers():
                await replica.remove(table, row)
                if not is_in_file:
                    del model[table, number]
            case 4:
                rows = [(each, random.randrange(3)) for each in WORKERS]
                await replica.read(*((each[0], row_of(*each)) for each in rows))
            case 5:
                server.values.clear()
            case 6:
                replica = replicas[at] = Replica(replica.path)
                if replica.path.exists():
                    await replica.fleet.read()
            case 7:
                before = deepcopy(server.values)
            case 8:
                server.values = deepcopy(before)
        with trio.move_on_after(random.uniform(0, 0.002)):
            await random.choice(replicas).sync(server)
        await settle(server, replica, *random.sample(replicas, REPLICAS))
        for each in replicas:
            called = {of: size for of, size in model.items() if not each.has_in_file(*of)}
            assert each.called() == called, (seed, step)


@pytest.mark.parametrize("seed", range(scaled(12)))
def test_replicas_have_what_calls_have_registered(tmp_path: Path, seed: int) -> None:
    trio.run(run, tmp_path, seed, clock=MockClock(autojump_threshold=0))
