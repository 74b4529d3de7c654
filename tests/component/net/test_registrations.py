"""Registrations over running listeners, paused, resumed and removed at any moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import msgpack
import pytest
import trio
import trio.testing
import zmq

from kvd.errors import Conflict, NotFound
from kvd.faces.indexer.routes import pause_listener
from kvd.http.messages import Request
from kvd.index.listening import ENDED_AT_ONCE
from kvd.index.partitions import State
from kvd.index.registry import INDEXER, Registry
from kvd.model import PartitionKey, RankKey
from kvd.net.arrivals import arrivals
from kvd.net.dialing import Dialer
from kvd.net.link import LinkResources
from kvd.net.listeners import ListenerTasks
from kvd.net.replay import ReplayOptions
from kvd.net.turns import Turns
from tests.support.listening import HASTY
from tests.support.loglines import logged
from tests.support.replay_servers import ReplayServer, one_and_silence, silent, three_frames
from tests.support.zmtp_fakes import (
    GREETING,
    NOT_MY_FAULT_S,
    Fake,
    Publisher,
    read_exactly,
    ready,
    serve_fake,
    until,
)

PARTITION = PartitionKey("m", "default")
BLOCK = 4


def stored(name: int) -> bytes:
    event = {
        "type": "BlockStored",
        "block_hashes": [name],
        "parent_block_hash": None,
        "token_ids": [name] * BLOCK,
        "block_size": BLOCK,
    }
    return bytes(msgpack.packb([1.5, [event], None]))


class Daemon:
    """The state, the registry, the tasks of its listeners, and one engine."""

    def __init__(self, nursery: trio.Nursery, context: zmq.Context, worker: Publisher) -> None:
        ready = trio.Event()
        ready.set()
        self.state = State()
        self.tasks = ListenerTasks(
            nursery,
            LinkResources(context),
            ready,
            HASTY,
            ReplayOptions(idle_s=5.0),
            health_every_s=0.01,
        )
        self.registry = Registry(self.state, self.tasks)
        self.worker = worker
        self.server = ReplayServer(context, three_frames)

    def register(self, dp_rank: int = 0) -> None:
        key = RankKey(PARTITION, 1, dp_rank)
        self.registry.register(key, self.worker.endpoint, BLOCK, self.server.endpoint)

    async def unregister(self, dp_rank: int | None = None) -> None:
        with trio.fail_after(NOT_MY_FAULT_S):
            await self.registry.unregister(1, "m", None, dp_rank)

    @property
    def listener(self):
        return next(iter(self.registry.registrations())).listener

    def publish(self, *seqs: int, heard: bool = True) -> None:
        for seq in seqs:
            self.server.buffer[seq] = stored(seq)
            self.worker.seq = seq
            if heard:
                self.worker.send(stored(seq))

    async def reaches(self, seq: int) -> None:
        await until(lambda: self.listener.cursor.last == seq)

    def blocks(self) -> int:
        return sum(one.index.stats()["blocks"] for one in self.state.partitions.values())


@pytest.fixture
async def daemon(
    nursery: trio.Nursery, context: zmq.Context, publish: Callable[..., Publisher]
) -> Daemon:
    made = Daemon(nursery, context, publish())
    nursery.start_soon(made.server.run)
    made.register()
    await made.worker.subscribed()
    return made


async def test_many_connect_one_by_one_once_it_is_time(
    nursery: trio.Nursery, context: zmq.Context
) -> None:
    """Thousands of ranks in a fleet file neither delay the start nor hold up clients meanwhile."""
    begin, dialer = trio.Event(), Dialer()
    tasks = ListenerTasks(nursery, LinkResources(context, dialer), trio.Event(), HASTY, begin=begin)
    registry = Registry(State(), tasks)
    for number in range(20):
        registry.register(RankKey(PARTITION, number, 0), "tcp://127.0.0.1:1", BLOCK, None)
    await trio.testing.wait_all_tasks_blocked()
    assert not dialer._links
    begin.set()
    most, before = 0, 0
    while before < 20:
        await trio.lowlevel.checkpoint()
        most, before = max(most, len(dialer._links) - before), len(dialer._links)
    assert most <= 2  # ready tasks run in any order, so this one may miss a pass
    registry.register(RankKey(PARTITION, 20, 0), "tcp://127.0.0.1:1", BLOCK, None)
    await tasks.entered()
    assert len(dialer._links) == 21


async def test_all_present_listeners_are_waited_for_until_they_are_connected(
    daemon: Daemon, nursery: trio.Nursery
) -> None:
    daemon.registry.register(RankKey(PARTITION, 1, 1), "tcp://127.0.0.1:1", BLOCK, None)
    returned, connected = trio.Event(), []

    async def wait() -> None:
        await daemon.tasks.connected()
        present = [each for each in daemon.registry.registrations() if each.owners]
        connected.extend(each.listener.connected for each in present)
        returned.set()

    nursery.start_soon(wait)
    await until(lambda: daemon.listener.connected)
    await daemon.unregister(dp_rank=1)
    with trio.fail_after(NOT_MY_FAULT_S):
        await returned.wait()
    assert connected == [True]


class Changes(trio.abc.Instrument):
    """Counts by how much a number changes between two passes of the loop."""

    def __init__(self, count: Callable[[], int]) -> None:
        self._count = count
        self._last = count()
        self.by_pass: list[int] = []

    def after_io_wait(self, timeout: float) -> None:
        before, self._last = self._last, self._count()
        self.by_pass.append(abs(self._last - before))


async def test_of_many_engines_that_answer_at_once_a_few_are_joined_in_a_pass(
    nursery: trio.Nursery, context: zmq.Context
) -> None:
    many, answer = 40, trio.Event()
    greeted: list[trio.SocketStream] = []
    arrivals().handshakes = Turns(1)  # each takes all of the time of a pass

    async def talk(stream: trio.SocketStream) -> None:
        await read_exactly(stream, len(GREETING))
        greeted.append(stream)
        await answer.wait()
        await stream.send_all(GREETING + ready())
        await trio.sleep_forever()

    fake: Fake = await nursery.start(serve_fake, talk)
    tasks = ListenerTasks(nursery, LinkResources(context), trio.Event(), HASTY)
    registry = Registry(State(), tasks)
    for number in range(many):
        registry.register(RankKey(PARTITION, number, 0), fake.endpoint, BLOCK, None)
    await until(lambda: len(greeted) == many)

    def joined() -> int:
        return sum(each.listener.connected for each in registry.registrations())

    joins = Changes(joined)
    trio.lowlevel.add_instrument(joins)
    answer.set()
    await until(lambda: joined() == many)
    trio.lowlevel.remove_instrument(joins)
    assert max(joins.by_pass) <= 2


@pytest.mark.parametrize("as_face", [False, True])
async def test_the_listeners_of_a_worker_end_together_a_few_at_a_time(
    daemon: Daemon, as_face: bool
) -> None:
    many = range(1, 1 + 16 * ENDED_AT_ONCE)
    for dp_rank in many:
        daemon.register(dp_rank)
    await until(lambda: all(each.listener.connected for each in daemon.registry.registrations()))
    ends = Changes(lambda: len(daemon.tasks._tasks))
    trio.lowlevel.add_instrument(ends)
    if as_face:
        with trio.fail_after(NOT_MY_FAULT_S):
            await daemon.registry.unregister_ranks(PARTITION, 1, many, INDEXER)
        assert [each.key.dp_rank for each in daemon.registry.registrations()] == [0]
    else:
        await daemon.unregister()
        assert not len(daemon.registry) and not daemon.state.partitions
    trio.lowlevel.remove_instrument(ends)
    assert len(daemon.tasks._tasks) == (1 if as_face else 0)
    assert len(ends.by_pass) < len(many)
    assert max(ends.by_pass) <= 4 * ENDED_AT_ONCE


async def test_a_paused_listener_misses_and_catches_up(daemon: Daemon) -> None:
    daemon.publish(0)
    await daemon.reaches(0)
    await daemon.registry.pause(1, 0)
    assert (daemon.listener.status, daemon.blocks()) == ("paused", 1)
    await until(lambda: daemon.worker.socket.poll(0))
    assert daemon.worker.socket.recv() == b"\0"
    daemon.publish(1, 2)
    daemon.registry.resume(1, 0)
    assert daemon.listener.status == "pending"
    await daemon.worker.subscribed()
    daemon.publish(3)
    await daemon.reaches(3)
    assert (daemon.listener.status, daemon.blocks()) == ("active", 4)
    assert daemon.server.requests == [1]


async def test_pausing_is_about_the_models_that_are_named(daemon: Daemon) -> None:
    registry = daemon.registry
    other = RankKey(PartitionKey("n", "t"), 1, 0)
    registry.register(other, daemon.worker.endpoint, BLOCK, None)

    def statuses() -> list[str]:
        return [str(each.listener.status) for each in registry.registrations()]

    await until(lambda: statuses()[0] == "active")  # later changes come from calls alone
    body = b'{"instance_id":1,"model_name":"n"}'
    answer = await pause_listener(registry, Request("POST", "", b"", [], body))
    assert answer.status == 200 and statuses() == ["active", "paused"]
    with pytest.raises(NotFound):
        await registry.pause(1, 0, "m", "t")
    with pytest.raises(Conflict):
        registry.resume(1, 0, "m")
    registry.resume(1, 0, "n", "t")
    await registry.pause(1, 0)
    assert statuses() == ["paused", "paused"]
    registry.resume(1, 0, None, "default")
    assert statuses() == ["pending", "paused"]


async def test_pause_and_resume_in_the_wrong_state(daemon: Daemon) -> None:
    with pytest.raises(Conflict):
        daemon.registry.resume(1, 0)
    with pytest.raises(NotFound):
        daemon.registry.resume(1, 1)
    with pytest.raises(NotFound):
        await daemon.registry.pause(2, 0)
    await daemon.registry.pause(1, 0)
    with pytest.raises(Conflict):
        await daemon.registry.pause(1, 0)
    daemon.registry.resume(1, 0)
    with pytest.raises(Conflict):
        daemon.registry.resume(1, 0)


async def test_a_paused_listener_can_be_removed(daemon: Daemon) -> None:
    daemon.publish(0)
    await daemon.reaches(0)
    await daemon.registry.pause(1, 0)
    await daemon.unregister()
    assert (len(daemon.registry), daemon.state.partitions) == (0, {})
    daemon.register()
    await until(lambda: daemon.listener.connected)


async def test_pausing_in_the_midst_of_a_replay(daemon: Daemon) -> None:
    daemon.server.answer = one_and_silence
    daemon.publish(0, 9)
    await until(lambda: daemon.listener.stats.replayed)
    with trio.fail_after(NOT_MY_FAULT_S):
        await daemon.registry.pause(1, 0)
    assert (daemon.listener.catch_up.held, daemon.listener.status) == (None, "paused")


async def test_a_rank_can_be_removed_in_the_midst_of_a_replay(daemon: Daemon) -> None:
    daemon.server.answer = silent
    for _ in range(3):  # the same each time, as no batch was ever accepted
        asked = len(daemon.server.requests)
        daemon.publish(5)
        await until(lambda asked=asked: len(daemon.server.requests) > asked)
        assert daemon.listener.health(trio.current_time()) == "recovering"
        await daemon.unregister()
        assert daemon.blocks() == 0
        await until(lambda: daemon.worker.socket.poll(0))
        assert daemon.worker.socket.recv() == b"\0"
        daemon.register()
        await daemon.worker.subscribed()
        await until(lambda: daemon.listener.connected)


async def test_the_place_in_the_stream_outlives_the_registration(daemon: Daemon) -> None:
    daemon.publish(0, 1)
    await daemon.reaches(1)
    await daemon.unregister()
    daemon.publish(2, heard=False)
    await until(lambda: daemon.worker.socket.poll(0))
    assert daemon.worker.socket.recv() == b"\0"
    daemon.register()
    await daemon.worker.subscribed()
    daemon.publish(3)
    await daemon.reaches(3)
    assert (daemon.server.requests, daemon.blocks()) == ([2], 2)
    assert daemon.listener.health(trio.current_time()) == "degraded"
    assert daemon.listener.loss == "registered again"
    assert daemon.registry.left_stats.messages == 2


async def test_an_engine_restarted_while_not_registered_is_recognised(daemon: Daemon) -> None:
    daemon.publish(0, 1, 2)
    await daemon.reaches(2)
    await daemon.unregister()
    await until(lambda: daemon.worker.socket.poll(0))
    assert daemon.worker.socket.recv() == b"\0"
    daemon.register()
    await daemon.worker.subscribed()
    daemon.publish(0)
    await daemon.reaches(0)
    assert daemon.listener.health(trio.current_time()) == "exact"
    assert daemon.blocks() == 1


@pytest.fixture
def log() -> Iterator[Callable[[], str]]:
    """Yields a function that returns the log so far."""
    with logged() as lines:
        yield lines


async def test_a_loss_is_said_once(daemon: Daemon, log: Callable[[], str]) -> None:
    daemon.server.buffer.clear()
    daemon.publish(0)
    await until(lambda: "health=exact" in log())
    daemon.worker.seq = 4
    daemon.worker.send(stored(4))
    daemon.server.buffer = {2: stored(2)}
    await daemon.reaches(4)
    await until(lambda: "health=degraded" in log())
    lines = log().splitlines()
    [lost] = [line for line in lines if "event=batches_lost" in line]
    assert 'listener=m:default/1:0 missing="1,3" lost=2' in lost
    [degraded] = [line for line in lines if "health=degraded" in line]
    assert degraded.endswith('loss="missing 1,3"')


async def test_a_batch_that_is_not_understood_is_named_with_the_reason(
    daemon: Daemon, log: Callable[[], str]
) -> None:
    """It is named even if a batch of the same turn ends the loss, and also behind a gap."""
    cleared = msgpack.packb([1.5, [{"type": "AllBlocksCleared"}], None])
    daemon.worker.seq = 0
    daemon.worker.send(stored(0), b"\xc1", cleared)
    await daemon.reaches(2)
    assert daemon.listener.health(trio.current_time()) == "exact"
    [line] = [line for line in log().splitlines() if "event=batch_not_understood" in line]
    assert "batch=1 reason=not_msgpack" in line


async def test_a_batch_behind_a_gap_that_is_not_understood_is_named(
    daemon: Daemon, log: Callable[[], str]
) -> None:
    daemon.publish(0)
    await daemon.reaches(0)
    daemon.worker.seq = 5
    daemon.worker.send(stored(5)[:-8])
    await daemon.reaches(5)
    assert "batch=5 reason=truncated" in log()


async def test_an_old_removal_never_ends_a_new_registration(
    daemon: Daemon, nursery: trio.Nursery
) -> None:
    """Meanwhile another client removes the last of many ranks and registers it again."""
    ranks = 40
    for dp_rank in range(1, ranks):
        daemon.register(dp_rank)
    nursery.start_soon(daemon.unregister)
    await trio.lowlevel.checkpoint()
    await daemon.unregister(ranks - 1)
    daemon.register(ranks - 1)
    await until(lambda: len(daemon.registry) == 1)
    await until(lambda: daemon.listener.connected)
    numbers = count()

    def publish_and_look() -> bool:  # the engine hears of a subscriber some time after it connects
        daemon.publish(next(numbers))
        return daemon.listener.cursor.last is not None

    await until(publish_and_look)
