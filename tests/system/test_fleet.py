"""A fleet in a file: entries added, changed, removed and refused, files swapped, under load."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any

import pytest
import trio
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvd.config.errors import StartError
from kvd.errors import Conflict
from kvd.fleet_file import parse as fleetfile
from kvd.fleet_file.follower import COMPARED_AT_ONCE, FleetFileFollower
from kvd.fleet_file.targets import (
    ConductorTarget,
    IndexerTarget,
    PolicyTarget,
    ReplicaTarget,
    SelectionTarget,
    SlotTrackerTarget,
)
from kvd.index.publishers import Publishers
from kvd.model import PartitionKey, RankKey
from kvd.replica_sync.replicas import Replicas
from kvd.selection.policies import MEMBERS, Policy, RouterPolicy
from kvd.slots.trackers import SlotTrackers
from kvd.wire.egress import DEFAULT, AllowedNetworks, EgressPolicy
from kvd.wire.replica import Replica, ReplicaStats
from tests.support import exposition, http_client
from tests.support.cancelling import Cancelling
from tests.support.http_client import Client
from tests.support.loglines import logged
from tests.support.ports import find_free_port
from tests.support.processes import REPOSITORY, Server
from tests.support.running import running, running_kvd
from tests.support.selecting import Service
from tests.support.storing_engines import TOKENS, StoringEngine

M = PartitionKey("m", "default")


class Links:
    """Stands in for the links to replicas; listens to none of them."""

    def __init__(self) -> None:
        self.running: list[str] = []

    def start(self, replica: Replica) -> None:
        self.running.append(replica.endpoint)

    async def stop(self, replica: Replica) -> None:
        await trio.lowlevel.checkpoint()
        self.running.remove(replica.endpoint)


class Faces:
    """All faces, with listeners that read nothing, and the fleet file that they follow."""

    def __init__(self, folder: Path, check_every_s: float = 60.0) -> None:
        self.service = Service()
        self.registry = self.service.registry
        self.workers = self.service.selections.workers
        self.publishers = Publishers(self.service.state, self.service.listeners)
        self.slots = SlotTrackers(300)
        self.links = Links()
        self.replicas = Replicas(self.links, ReplicaStats())
        self.path = folder / "fleet.toml"
        self.fleet = FleetFileFollower(
            self.path,
            EgressPolicy(),
            {
                "indexer": IndexerTarget(self.registry),
                "slot_tracker": SlotTrackerTarget(self.slots),
                "selection": SelectionTarget(self.workers),
                "policy": PolicyTarget(self.service.selections.tuning),
                "conductor": ConductorTarget(self.publishers),
                "replica": ReplicaTarget(self.replicas),
            },
            check_every_s,
        )

    async def read(self, *entries: str) -> None:
        self.path.write_text("\n".join(entries))
        await self.fleet.read()

    def there(self) -> dict[str, list[Any]]:
        return {
            "indexer": sorted(
                (each.key.instance_id, each.listener.endpoint)
                for each in self.registry.owned_by("indexer")
            ),
            "slot_tracker": [
                (row.worker_id, len(row.ranks)) for row in self.slots.workers(None, None)
            ],
            "selection": [
                (each.record.worker_id, each.record.taints)
                for _, each in sorted(self.workers.entries.items())
            ],
            "conductor": sorted(
                (each.described.instance_id, each.described.endpoint) for each in self.publishers
            ),
            "replica": self.replicas.endpoints(),
        }

    def states(self) -> dict[str, float]:
        entries, _ = self.fleet.families()
        return {dict(labels)["state"]: value for _, labels, value in entries.samples}


def rank(number: int, port: int = 1, block_size: int = 4) -> str:
    return (
        f'[[indexer]]\ninstance_id = {number}\nmodel_name = "m"\nblock_size = {block_size}\n'
        f'endpoint = "tcp://127.0.0.1:{port}"\n'
    )


def tracked(number: int, size: int = 1) -> str:
    return (
        f'[[slot_tracker]]\nworker_id = {number}\nmodel_name = "m"\nblock_size = 4\n'
        f"dp_start = 0\ndp_size = {size}\n"
    )


def worker(number: int, port: int = 1, taint: str = "a", block_size: int = 4) -> str:
    return (
        f'[[selection]]\nworker_id = {number}\nmodel_name = "m"\nblock_size = {block_size}\n'
        f'endpoint = "http://e"\nkv_events_endpoint = "tcp://127.0.0.1:{port}"\n'
        f'taints = ["{taint}"]\nmax_num_batched_tokens = 8192\ntotal_kv_blocks = 1000\n'
    )


def publisher(name: str, port: int = 1) -> str:
    return (
        f'[[conductor]]\ninstance_id = "{name}"\nmodel = "m"\nblock_size = 4\ntype = "vLLM"\n'
        f'dp_rank = 0\nendpoint = "tcp://127.0.0.1:{port}"\n'
    )


def replica(port: int) -> str:
    return f'[[replica]]\nendpoint = "tcp://127.0.0.1:{port}"\n'


async def test_entries_come_change_and_go_on_every_face(tmp_path: Path) -> None:
    faces = Faces(tmp_path)
    kept = [rank(1), tracked(1), worker(2, 2), publisher("a"), replica(1)]
    await faces.read(*kept)
    before = faces.there()
    assert before == {
        "indexer": [(1, "tcp://127.0.0.1:1")],
        "slot_tracker": [(1, 1)],
        "selection": [(2, ("a",))],
        "conductor": [("a", "tcp://127.0.0.1:1")],
        "replica": ["tcp://127.0.0.1:1"],
    }
    starts = faces.service.listeners.starts
    more = [rank(5, 5), tracked(5, 2), worker(6, 6), publisher("b", 7), replica(8)]
    await faces.read(*more, *kept)
    assert {name: len(rows) for name, rows in faces.there().items()} == dict.fromkeys(before, 2)
    assert faces.service.listeners.starts == starts + 3  # of the new entries alone
    changed = [rank(5, 9), tracked(5, 3), worker(6, 9, "b"), publisher("b", 9), replica(9)]
    await faces.read(*changed, *kept)
    after = faces.there()
    assert [after[name][1] for name in ("indexer", "slot_tracker", "selection", "conductor")] == [
        (5, "tcp://127.0.0.1:9"),
        (5, 3),
        (6, ("b",)),
        ("b", "tcp://127.0.0.1:9"),
    ]
    assert after["replica"] == ["tcp://127.0.0.1:1", "tcp://127.0.0.1:9"]
    assert faces.service.listeners.starts == starts + 6
    await faces.read(*kept)
    assert faces.there() == before
    await faces.read(*kept)
    assert faces.service.listeners.starts == starts + 6
    await faces.read()
    assert faces.there() == {name: [] for name in before}
    assert not faces.service.listeners.running and not faces.links.running
    assert faces.states() == {"registered": 0, "failed": 0, "off": 0}


def policy(text: str, more: str = "") -> str:
    return f'[[policy]]\nmodel_name = "m"\nrouter_policy = {text}\n{more}'


async def test_policies_come_before_workers_change_and_go(tmp_path: Path) -> None:
    faces = Faces(tmp_path)
    tuning = faces.service.selections.tuning

    def policies() -> list[str]:
        return [str(Policy.of(tuning.settings("m", tenant))) for tenant in ("default", "t")]

    own = policy('{policy = "kvd", weights = {hold_up = 0.2}}', 'tenant_id = "t"\n')
    await faces.read(policy('"lmetric"'), own)
    assert policies() == ["lmetric", "kvd,hold_up=0.2"]
    await faces.read(policy('"ramjet"'), own, worker(1))
    assert policies() == ["ramjet", "kvd,hold_up=0.2"]
    fleet = faces.service.selections.candidates[M]
    assert str(Policy.of(fleet.settings)) == "ramjet"
    # A client's policy stays the client's, also once the file has none.
    tuning.change(("m", None), RouterPolicy.KVD.row, whole=MEMBERS)
    await faces.read(policy('"lmetric"'), worker(1))
    assert policies() == ["kvd", "kvd"] and faces.states()["failed"] == 1
    tuning.forget(("m", None), MEMBERS)
    await faces.read(policy('"lmetric"'), worker(1))
    assert policies() == ["lmetric", "lmetric"]
    await faces.read()
    assert policies() == ["dynamo", "dynamo"] and tuning.changed_keys(MEMBERS) == []


async def test_what_clients_have_registered_is_theirs(tmp_path: Path) -> None:
    faces = Faces(tmp_path)
    entries = [rank(1), tracked(1), worker(2, 2), publisher("a"), replica(1)]
    faces.path.write_text("\n".join(entries))
    ranked, tracking, working, publishing, replicated = (
        each.wanted for each in fleetfile.load(faces.path, EgressPolicy())
    )
    ranked.register(faces.registry)
    faces.slots.register(*tracking)
    await faces.workers.put(working)
    faces.publishers.register(publishing)
    faces.replicas.register(*replicated)
    theirs = faces.there()
    await faces.read(*entries, rank(9, 9))
    assert faces.states() == {"registered": 1, "failed": 5, "off": 0}
    await faces.read(rank(1, 3), tracked(1, 2), worker(2, 2, "other"), publisher("a", 5))
    assert faces.there() == theirs
    await faces.read()
    assert faces.there() == theirs
    # Once the clients' registrations have gone, the entries are applied.
    await faces.registry.unregister(1, "m", None, None)
    await faces.slots.unregister(M, 1)
    await faces.workers.delete(2)
    await faces.replicas.deregister("tcp://127.0.0.1:1")
    await faces.read(*entries[:3], entries[4])
    assert faces.states() == {"registered": 4, "failed": 0, "off": 0}


async def test_what_a_client_removes_comes_back_with_the_next_change(tmp_path: Path) -> None:
    faces = Faces(tmp_path)
    await faces.read(rank(1), tracked(1), worker(2, 2))
    await faces.registry.unregister(1, "m", None, None)
    await faces.slots.unregister(M, 1)
    await faces.workers.delete(2)
    await faces.read(rank(1), tracked(1), worker(2, 2))
    assert faces.states()["registered"] == 3
    # A client registers it anew, so it is the client's, and stays.
    await faces.registry.unregister(1, "m", None, None)
    faces.registry.register(RankKey(M, 1, 0), "tcp://127.0.0.1:1", 4, None)
    await faces.read()
    assert faces.there()["indexer"] == [(1, "tcp://127.0.0.1:1")]


async def test_a_failed_entry_costs_itself_and_is_tried_again(tmp_path: Path) -> None:
    faces = Faces(tmp_path)
    faces.registry.register(RankKey(M, 7, 0), "tcp://127.0.0.1:7", 4, None)
    await faces.read(rank(1, 1), rank(7, 8), rank(2, 2), rank(3, 3, block_size=16))
    assert faces.states() == {"registered": 2, "failed": 2, "off": 0}
    await faces.registry.unregister(7, "m", None, None)
    await faces.read(rank(1, 1), rank(7, 8), rank(2, 2))
    assert faces.states() == {"registered": 3, "failed": 0, "off": 0}


async def test_what_the_log_counts_has_happened(tmp_path: Path) -> None:
    faces = Faces(tmp_path)

    async def counts(*entries: str) -> str:
        with logged() as lines:
            await faces.read(*entries)
            (found,) = re.findall(r"fleet_applied file=\S+ (.*)", lines())
        return str(found)

    unnamed = worker(2, 2).replace('endpoint = "http://e"', "", 1)
    both, moved = (rank(1), worker(2, 2)), (rank(1, 9), worker(2, 2, "b"))
    assert await counts(*both) == "added=2 changed=0 removed=0 failed=0 registered=2"
    assert await counts(*moved) == "added=0 changed=2 removed=0 failed=0 registered=2"
    # What clients have removed comes back, and is not theirs to remove from the file.
    await faces.workers.delete(2)
    assert await counts(*moved) == "added=1 changed=0 removed=0 failed=0 registered=2"
    await faces.registry.unregister(1, "m", None, None)
    assert await counts(moved[1]) == "added=0 changed=0 removed=0 failed=0 registered=1"
    # A change that fails leaves the entry as it was.
    assert await counts(unnamed) == "added=0 changed=0 removed=0 failed=1 registered=1"
    assert await counts() == "added=0 changed=0 removed=1 failed=0 registered=0"


async def test_the_block_size_of_a_model_changes(tmp_path: Path) -> None:
    faces = Faces(tmp_path)
    for size in (4, 16):
        await faces.read(
            rank(1, 1, size), rank(2, 2, size), worker(1, 1, "a", size), worker(3, 3, "a", size)
        )
        assert faces.states() == {"registered": 4, "failed": 0, "off": 0}
        assert {each.block_size for each in faces.service.state.partitions.values()} == {size}


async def test_an_address_changes_on_both_faces_that_share_it(tmp_path: Path) -> None:
    faces = Faces(tmp_path)
    for port in (1, 2):
        await faces.read(rank(1, port), worker(1, port))
        assert faces.states() == {"registered": 2, "failed": 0, "off": 0}
        assert len(faces.service.listeners.running) == 1
        assert all(not each.reasons for each in faces.workers.entries.values())


async def test_the_documented_fleet_can_be_selected(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs/configuration.md").read_text()
    (example,) = re.findall(r"^```\n(\[\[indexer\]\]\n.*?)^```", page, re.DOTALL | re.MULTILINE)
    faces = Faces(tmp_path)
    await faces.read(example)
    assert faces.states() == {"registered": 3, "failed": 0, "off": 0}
    assert [each.reasons for each in faces.workers.entries.values()] == [[]]


async def test_what_is_changed_in_place_keeps_its_bookings(tmp_path: Path) -> None:
    faces = Faces(tmp_path)
    await faces.read(worker(2, 2))
    fleet = faces.service.candidates(M)
    before = fleet.ledger.rank_of(2, 0)
    await faces.read(worker(2, 2, "other"))
    assert fleet.ledger.rank_of(2, 0) == before
    assert faces.there()["selection"] == [(2, ("other",))]


async def test_what_leaves_the_file_is_the_files_until_it_has_left(tmp_path: Path) -> None:
    """Else it would be kept as a client's registration, and come back after a restart."""
    faces = Faces(tmp_path)
    await faces.read(worker(2, 2))
    changing = faces.workers._changing
    async with trio.open_nursery() as nursery, changing:
        nursery.start_soon(faces.read)
        while not changing.statistics().tasks_waiting:
            await trio.lowlevel.checkpoint()
        assert faces.there()["selection"] and faces.fleet.held("selection", 2) is not None
    assert not faces.there()["selection"] and faces.fleet.held("selection", 2) is None


@pytest.mark.parametrize("entries", [(), (worker(2, 2, "b"),)])
async def test_what_a_client_registers_as_the_file_waits_is_the_clients(
    entries: tuple[str, ...], tmp_path: Path
) -> None:
    """The file's own registration is removed by a client meanwhile, and another one comes."""
    faces = Faces(tmp_path)
    await faces.read(worker(2, 2))
    record = faces.workers.entries[2].record
    changing = faces.workers._changing
    async with trio.open_nursery() as nursery, changing:
        nursery.start_soon(faces.workers.delete, 2)
        while not changing.statistics().tasks_waiting:
            await trio.lowlevel.checkpoint()
        nursery.start_soon(faces.workers.put, replace(record, taints=("client",)))
        while changing.statistics().tasks_waiting != 2:
            await trio.lowlevel.checkpoint()
        nursery.start_soon(faces.read, *entries)
        while changing.statistics().tasks_waiting != 3:
            await trio.lowlevel.checkpoint()
    assert faces.there()["selection"] == [(2, ("client",))]
    assert faces.fleet.held("selection", 2) is None


async def test_a_bad_file_changes_nothing(tmp_path: Path) -> None:
    faces = Faces(tmp_path)
    await faces.read(rank(1))
    for bad in ("[", rank(1, 70000), rank(1) + rank(1), "x = 1"):
        await faces.read(bad)
    faces.path.unlink()
    await faces.fleet.read()
    assert faces.there()["indexer"] == [(1, "tcp://127.0.0.1:1")]
    assert faces.fleet.reads == {"applied": 1, "refused": 5}


async def test_a_long_file_is_compared_in_steps(tmp_path: Path) -> None:
    faces = Faces(tmp_path)
    await faces.read(*(tracked(number) for number in range(4 * COMPARED_AT_ONCE)))
    reading, applying = Cancelling(sys.maxsize), Cancelling(sys.maxsize)  # neither is cancelled
    await reading.run(partial(faces.fleet.prepare, DEFAULT))
    await applying.run(faces.fleet.read)
    assert applying.steps >= reading.steps + 2 * 4


async def test_entries_of_faces_that_are_off_are_left_out(tmp_path: Path) -> None:
    faces = Faces(tmp_path)
    del faces.fleet._targets["slot_tracker"]
    await faces.read(rank(1), tracked(1))
    assert faces.states() == {"registered": 1, "failed": 0, "off": 1}


async def test_a_worker_that_would_not_be_schedulable_any_more_stays_as_it_was(
    tmp_path: Path,
) -> None:
    faces = Faces(tmp_path)
    await faces.read(worker(2, 2))
    await faces.read(worker(2, 2).replace('endpoint = "http://e"', "", 1))
    assert faces.states() == {"registered": 1, "failed": 1, "off": 0}
    assert not faces.workers.entries[2].reasons
    with pytest.raises(Conflict):
        await faces.workers.put(faces.workers.entries[2].record, new=True)


Step = tuple[str, Any]
NUMBERS, PORTS = st.integers(1, 3), st.integers(1, 2)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("file"), st.dictionaries(NUMBERS, PORTS)),
        st.tuples(st.just("bad file"), st.none()),
        st.tuples(st.just("registers"), st.tuples(NUMBERS, PORTS)),
        st.tuples(st.just("unregisters"), NUMBERS),
    ),
    max_size=12,
)


@given(STEPS)
def test_whoever_does_what_in_any_order(steps: list[Step]) -> None:
    with TemporaryDirectory() as folder:
        trio.run(live, Faces(Path(folder)), steps)


async def live(faces: Faces, steps: list[Step]) -> None:
    """Plays steps of clients and of the file's writer, and compares with a plain model."""
    model: dict[int, tuple[str, int]] = {}  # by instance: its owner and port
    for what, argument in steps:
        if what == "file":
            await faces.read(*(rank(number, port) for number, port in argument.items()))
            gone = [each for each, (whose, _) in model.items() if whose == "file"]
            model = {each: model[each] for each in model.keys() - (set(gone) - argument.keys())}
            for number, port in argument.items():
                if model.get(number, ("file", 0))[0] == "file":
                    model[number] = ("file", port)
            failed = sum(model[each][0] == "client" for each in argument)
            assert faces.states()["failed"] == failed
        elif what == "bad file":
            await faces.read("[")
        elif what == "registers":
            number, port = argument
            try:
                address = f"tcp://127.0.0.1:{port}"
                faces.registry.register(RankKey(M, number, 0), address, 4, None)
            except Conflict:
                assert number in model
            else:
                assert number not in model
                model[number] = ("client", port)
        elif argument in model:
            await faces.registry.unregister(argument, "m", None, None)
            del model[argument]
        expected = sorted((each, f"tcp://127.0.0.1:{port}") for each, (_, port) in model.items())
        assert faces.there()["indexer"] == expected
        assert len(faces.service.listeners.running) == len(model)


# ---- following the file


async def test_a_change_counts_once_it_is_at_rest(tmp_path: Path, nursery: trio.Nursery) -> None:
    faces = Faces(tmp_path, check_every_s=0.02)
    await faces.read(rank(1))
    nursery.start_soon(faces.fleet.run)
    faces.path.write_text(rank(1) + rank(2, 2))
    await until(lambda: len(faces.there()["indexer"]) == 2)
    for number in range(30):  # the file is being written
        faces.path.write_text("[" * (number + 1))
        await trio.sleep(0.005)
    await until(lambda: faces.fleet.reads["refused"] > 0)
    assert len(faces.there()["indexer"]) == 2
    faces.path.unlink()
    refused = faces.fleet.reads["refused"]
    await until(lambda: faces.fleet.reads["refused"] > refused)
    faces.path.write_text("")
    await until(lambda: faces.there()["indexer"] == [])


async def test_a_config_map_is_swapped(tmp_path: Path, nursery: trio.Nursery) -> None:
    """In Kubernetes the file links to ..data/fleet.toml, and ..data is a link that is replaced."""
    faces = Faces(tmp_path, check_every_s=0.02)
    for name, text in (("one", rank(1)), ("two", rank(2))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "fleet.toml").write_text(text)
        os.utime(tmp_path / name / "fleet.toml", (1, 1))
    (tmp_path / "..data").symlink_to("one")
    faces.path.symlink_to("..data/fleet.toml")
    await faces.fleet.read()
    nursery.start_soon(faces.fleet.run)
    assert [number for number, _ in faces.there()["indexer"]] == [1]
    (tmp_path / "..data_tmp").symlink_to("two")
    (tmp_path / "..data_tmp").rename(tmp_path / "..data")
    await until(lambda: [number for number, _ in faces.there()["indexer"]] == [2])
    assert faces.fleet.reads == {"applied": 2, "refused": 0}


async def test_who_asks_does_not_wait(tmp_path: Path, nursery: trio.Nursery) -> None:
    faces = Faces(tmp_path)
    await faces.read()
    nursery.start_soon(faces.fleet.run)
    faces.path.write_text(rank(1))
    for changed, applied in (("fleet_file",), 2), ((), 3):
        async with faces.fleet.reloading():
            prepared = await faces.fleet.prepare(DEFAULT)
        assert prepared.changed == changed and faces.fleet.reads["applied"] == applied - 1
        prepared.commit()
        await until(lambda applied=applied: faces.fleet.reads["applied"] == applied)
        assert len(faces.there()["indexer"]) == 1


async def test_what_a_refused_reload_has_left_out_waits_for_another_change(
    tmp_path: Path, nursery: trio.Nursery
) -> None:
    faces = Faces(tmp_path, check_every_s=0.01)
    await faces.read(rank(1))
    nursery.start_soon(faces.fleet.run)
    with pytest.raises(StartError, match="elsewhere"):
        async with faces.fleet.reloading():
            faces.path.write_text(rank(1) + rank(2, 2))
            await faces.fleet.prepare(DEFAULT)
            raise StartError("something elsewhere is wrong")
    assert faces.fleet.faults() == {str(faces.path): "something elsewhere is wrong"}
    with pytest.raises(StartError, match=f"{faces.path}: indexer, entry 1: .*outgoing_allow"):
        async with faces.fleet.reloading():
            await faces.fleet.prepare(AllowedNetworks())
    for _ in range(10):
        await trio.sleep(faces.fleet._check_every_s)
    assert faces.fleet.reads == {"applied": 1, "refused": 1}
    faces.path.write_text(rank(1) + rank(2, 2) + rank(3, 3))
    await until(lambda: len(faces.there()["indexer"]) == 3)
    assert faces.fleet.faults() == {}


async def until(condition: Callable[[], object]) -> None:
    with trio.fail_after(60):
        while not condition():  # noqa: ASYNC110 - files and threads set no event
            await trio.sleep(0.005)


# ---- a daemon


class Daemon:
    """A running kvd with all faces, and its fleet file."""

    def __init__(self, server: Server, path: Path, clients: dict[str, Client]) -> None:
        self.server = server
        self.path = path
        self.clients = clients

    def write(self, *entries: str, outcome: str = "applied") -> None:
        """Writes the file, has the daemon read it, and waits until it has."""
        before = self.reads(outcome)
        self.path.write_text("\n".join(entries))
        self.server.process.send_signal(signal.SIGHUP)
        self.server.wait_until(lambda: self.reads(outcome) > before, "read")

    def reads(self, outcome: str) -> float:
        return self.metric(f'kvd_fleet_reads_total{{outcome="{outcome}"}}')

    def metric(self, name: str) -> float:
        return exposition.parse(self.clients["indexer"].get("/metrics").text)[name]

    def found(self) -> dict[str, Any]:
        body = {"model_name": "m", "token_ids": TOKENS}
        answer = self.clients["indexer"].post("/query", json=body).json()
        return {name: ranks["0"] for name, ranks in answer.get("scores", {}).items()}


@contextmanager
def daemon(folder: Path, text: str) -> Iterator[Daemon]:
    ports = {
        face: find_free_port() for face in ("indexer", "slot-tracker", "selection", "conductor")
    }
    binds = [f"--{face}-bind=127.0.0.1:{port}" for face, port in ports.items()]
    path = folder / "fleet.toml"
    path.write_text(text)
    with ExitStack() as stack:
        flags = *binds, "--fleet-file", os.fspath(path)
        server = stack.enter_context(running(folder, ports["indexer"], "serve", *flags))
        clients = {
            face: stack.enter_context(Client(f"http://127.0.0.1:{port}"))
            for face, port in ports.items()
        }
        yield Daemon(server, path, clients)
        assert "Traceback" not in server.stderr


@pytest.fixture
def engines() -> Iterator[Callable[[], StoringEngine]]:
    with zmq.Context() as context, ExitStack() as stack:

        def make() -> StoringEngine:
            engine = StoringEngine(context)
            stack.callback(engine.socket.close, 0)
            return engine

        yield make


def test_a_daemon_follows_its_fleet(tmp_path: Path, engines: Callable[[], StoringEngine]) -> None:
    one, two = engines(), engines()
    both = rank(1, one.port), worker(1, one.port), tracked(1)
    with daemon(tmp_path, "\n".join(both)) as kvd:

        def hear(engine: StoringEngine, name: str) -> bool:
            engine.publish()
            return kvd.found().get(name) == 12

        kvd.server.wait_until(lambda: hear(one, "1"), "heard")
        kvd.write(*both, rank(2, two.port), publisher("p", two.port), replica(1))
        kvd.server.wait_until(lambda: hear(two, "2"), "heard")
        assert kvd.found() == {"1": 12, "2": 12}  # still with the first one's blocks
        assert kvd.metric('kvd_fleet_entries{state="registered"}') == 5
        assert kvd.metric('kvd_fleet_entries{state="off"}') == 1  # no port for replicas
        assert kvd.clients["conductor"].get("/services").json()["count"] == 1
        select = {"model_name": "m", "token_ids": TOKENS}
        assert kvd.clients["selection"].post("/select", json=select).json()["worker_id"] == 1
        # An instance that a client registers, which no file touches.
        body = {"instance_id": 3, "model_name": "m", "block_size": 4}
        kvd.clients["indexer"].post(
            "/register", json={**body, "endpoint": f"tcp://127.0.0.1:{two.port}"}
        )
        kvd.write("[[indexer", outcome="refused")
        kvd.server.wait_logged(f'event=reload_refused reason="{kvd.path}: ')
        assert kvd.found() == {"1": 12, "2": 12}
        kvd.write(*both, rank(3, 9))
        assert kvd.metric('kvd_fleet_entries{state="failed"}') == 1
        kvd.server.wait_logged('event=fleet_entry_failed entry="indexer, entry 2"')
        assert kvd.found() == {"1": 12}
        listed = kvd.clients["indexer"].get("/workers").json()
        assert sorted(each["instance_id"] for each in listed) == [1, 3]
        assert kvd.clients["slot-tracker"].get("/workers").json()[0]["worker_id"] == 1


def test_replicas_of_faces_that_are_off_are_left_out(tmp_path: Path) -> None:
    """Several commands may share one file and one environment."""
    path = tmp_path / "fleet.toml"
    path.write_text(replica(1))
    environ = {"KVD_REPLICA_SYNC_PORT": str(find_free_port())}
    flags = ["--fleet-file", str(path)]
    with running_kvd(tmp_path, *flags, face="conductor", environ=environ) as server:
        text = http_client.get(f"{server.base_url}/metrics").text
        shown = exposition.parse(text)
    assert shown['kvd_fleet_entries{state="off"}'] == 1
    assert shown['kvd_fleet_entries{state="failed"}'] == 0


def test_the_file_is_followed_without_a_word(tmp_path: Path) -> None:
    with daemon(tmp_path, "") as kvd:
        new = tmp_path / "new"
        new.write_text(rank(1))
        new.rename(kvd.path)
        kvd.server.wait_until(lambda: kvd.reads("applied") == 2, "followed")
        assert len(kvd.clients["indexer"].get("/workers").json()) == 1


def test_under_load_no_request_is_lost(
    tmp_path: Path, engines: Callable[[], StoringEngine]
) -> None:
    """One worker stays, with its blocks, while all others come and go."""
    engine = engines()
    stays = rank(1, engine.port), worker(1, engine.port)
    with daemon(tmp_path, "\n".join(stays)) as kvd:

        def heard() -> bool:
            engine.publish()
            return kvd.found().get("1") == 12

        kvd.server.wait_until(heard, "heard")
        stop, bad = Event(), list[str]()
        asked = count()

        def ask(face: str, path: str, good: Callable[[Any], bool]) -> None:
            url = str(kvd.clients[face].base_url)
            with Client(url) as http:
                while not stop.is_set():
                    next(asked)
                    answer = http.post(path, json={"model_name": "m", "token_ids": TOKENS})
                    if answer.status_code != 200 or not good(answer.json()):
                        bad.append(answer.text)

        clients = [
            Thread(target=ask, args=("indexer", "/query", lambda shown: shown["scores"]["1"]["0"])),
            Thread(
                target=ask, args=("selection", "/select", lambda shown: shown["worker_id"] == 1)
            ),
        ]
        for client in clients:
            client.start()
        for turn in range(12):
            if turn % 4 == 3:
                kvd.write("[", outcome="refused")
            else:
                others = range(2, 20, turn % 3 + 1)
                kvd.write(*stays, *(rank(each, 100 + turn % 2 + each) for each in others))
        stop.set()
        for client in clients:
            client.join()
        assert not bad and next(asked) > 20
