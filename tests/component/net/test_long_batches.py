"""A batch that takes long to apply, beside everything else that a running kvd does."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import trio
import zmq

from kvd.errors import NotFound
from kvd.index.partitions import State
from kvd.index.publishers import Described, Narrowing, Publishers
from kvd.index.registry import Registry
from kvd.model import PartitionKey, RankKey
from kvd.net.link import LinkResources
from kvd.net.listeners import ListenerTasks
from kvd.wire.event_stream import EventStream
from tests.support.listening import HASTY
from tests.support.replay_servers import ReplayServer, three_frames
from tests.support.zmtp_fakes import NOT_MY_FAULT_S, Publisher, until

KEY = PartitionKey("m", "default")
BLOCK = 4
TOKENS = list(range(BLOCK))
LONG = range(1, 80_001)  # takes a few hundred milliseconds
SMALL: bytes = msgpack.packb([0, [["BlockStored", [10**9], None, TOKENS, BLOCK, None, "GPU"]]])
STANDARD: bytes = msgpack.packb([0, [{"event_type": "stored", "seq_hashes": list(LONG)}]])
ENGINE: bytes = msgpack.packb([0, [["BlockStored", list(LONG), None, [], BLOCK, None, "CPU"]]])
JSON, ENGINE_JSON = (json.dumps(msgpack.unpackb(each)).encode() for each in (STANDARD, ENGINE))


class Daemon:
    """The state, both registries, the tasks of their listeners, and one engine."""

    def __init__(self, nursery: trio.Nursery, context: zmq.Context, engine: Publisher) -> None:
        ready = trio.Event()
        ready.set()
        self.state = State()
        self.engine = engine
        tasks = ListenerTasks(nursery, LinkResources(context), ready, HASTY)
        self.publishers = Publishers(self.state, tasks)
        self.registry = Registry(self.state, tasks)
        self.server = ReplayServer(context, three_frames)
        nursery.start_soon(self.server.run)

    def publisher(self) -> EventStream:
        """Registers the engine on the conductor's face."""
        at, asked = self.engine.endpoint, self.server.endpoint
        self.publishers.register(Described(at, asked, "x", "m", "", "default", "a", BLOCK, 0, ""))
        return next(iter(self.publishers)).listener

    def worker(self) -> EventStream:
        """Registers the engine on the indexer's face."""
        self.registry.register(
            RankKey(KEY, 1, 0), self.engine.endpoint, BLOCK, self.server.endpoint
        )
        return next(iter(self.registry.registrations())).listener

    def stats(self) -> dict[str, Any]:
        (partition,) = self.state.sized.values()
        return dict(partition.index.stats())


@pytest.fixture
def daemon(
    nursery: trio.Nursery, context: zmq.Context, publish: Callable[..., Publisher]
) -> Daemon:
    return Daemon(nursery, context, publish())


@pytest.mark.parametrize("batch", [STANDARD, ENGINE, JSON, ENGINE_JSON])
async def test_others_are_served_between_slices(daemon: Daemon, batch: bytes) -> None:
    listener = daemon.publisher()
    await daemon.engine.subscribed()
    daemon.engine.send(SMALL, batch, SMALL)
    await until(lambda: listener.unfinished is not None)
    answered = 0
    conductor = daemon.state.sized[(*KEY, BLOCK)].conductor
    assert conductor is not None
    while listener.unfinished is not None:
        assert conductor.match_tokens(TOKENS)["a"]["GPU"] == BLOCK
        assert (listener.health(0.0), listener.stats.messages) == ("recovering", 2)
        answered += 1
        await trio.lowlevel.checkpoint()
    assert answered > 10
    await until(lambda: listener.stats.messages == 3)
    assert (daemon.stats()["parked_now"], listener.health(0.0)) == (len(LONG), "exact")


@pytest.mark.parametrize("batch", [STANDARD, ENGINE, JSON])
async def test_unregistering_ends_it(daemon: Daemon, batch: bytes) -> None:
    listener = daemon.publisher()
    daemon.state.add_source(KEY, BLOCK, "b", "", "", 0, store=False)  # keeps the partition
    await daemon.engine.subscribed()
    daemon.engine.send(batch)
    await until(lambda: listener.unfinished is not None and daemon.stats()["parked_now"])
    with trio.fail_after(NOT_MY_FAULT_S):
        await daemon.publishers.unregister(Narrowing("default", "a"))
    while daemon.state.sweep(10_000):
        pass
    assert (daemon.stats()["parked_now"], daemon.stats()["blocks"]) == (0, 0)


async def test_what_a_pause_leaves_is_done_when_it_is_over(daemon: Daemon) -> None:
    listener = daemon.worker()
    await daemon.engine.subscribed()
    daemon.engine.send(ENGINE)
    await until(lambda: listener.unfinished is not None)
    with trio.fail_after(NOT_MY_FAULT_S):
        await daemon.registry.pause(1, 0)
    assert listener.unfinished == 0
    daemon.registry.resume(1, 0)
    await until(lambda: listener.unfinished is None)
    assert daemon.stats()["parked_now"] == 65_536  # the bound
    assert daemon.stats()["parked"] == len(LONG)


async def test_long_batches_are_replayed_in_order(daemon: Daemon) -> None:
    listener = daemon.worker()
    await daemon.engine.subscribed()
    prompt = [token % 50_000 for token in range(len(LONG) * BLOCK)]
    half = len(LONG) // 2
    events = [
        ["BlockStored", list(LONG[:half]), None, prompt[: half * BLOCK], BLOCK, None, "GPU"],
        ["BlockStored", list(LONG[half:]), half, prompt[half * BLOCK :], BLOCK, None, "GPU"],
    ]
    first, second = (msgpack.packb([0, [event]]) for event in events)
    daemon.server.buffer = {1: first, 2: second}
    daemon.engine.send(SMALL)
    daemon.engine.seq = 3
    daemon.engine.send(msgpack.packb([0, [["BlockRemoved", [len(LONG)]]]]))
    await until(lambda: listener.cursor.expected == 4 and listener.unfinished is None)
    assert (listener.stats.replayed, listener.stats.lost, listener.health(0.0)) == (2, 0, "exact")
    stats = daemon.stats()
    assert (stats["parked"], stats["removed_unknown"], stats["removed"]) == (0, 0, 1)
    assert stats["blocks"] == len(LONG) - 1


async def test_a_removed_worker_is_gone(daemon: Daemon) -> None:
    listener = daemon.worker()
    await daemon.engine.subscribed()
    daemon.engine.send(ENGINE)
    await until(lambda: listener.unfinished is not None)
    with trio.fail_after(NOT_MY_FAULT_S):
        await daemon.registry.unregister(1, "m", None, None)
    with pytest.raises(NotFound):
        daemon.state.partition(*KEY)
