"""Publishers over running listeners, registered and removed by several clients at a time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

import msgpack
import pytest
import trio
import trio.testing
import zmq

from kvd.index.partitions import State
from kvd.index.publishers import Described, Narrowing, Publishers
from kvd.net.link import LinkResources
from kvd.net.listeners import ListenerTasks
from kvd.wire.event_stream import EventStream
from tests.support.listening import HASTY
from tests.support.loglines import logged
from tests.support.zmtp_fakes import Publisher, until

ALL = Narrowing("default", "a")


class Daemon:
    """Publishers of one instance, all at one engine."""

    def __init__(self, nursery: trio.Nursery, context: zmq.Context, endpoint: str) -> None:
        ready = trio.Event()
        ready.set()
        self.state = State()
        tasks = ListenerTasks(nursery, LinkResources(context), ready, HASTY, health_every_s=0.01)
        self.publishers = Publishers(self.state, tasks)
        self._endpoint = endpoint

    def register(self, dp_rank: int) -> None:
        self.publishers.register(
            Described(self._endpoint, None, "vLLM", "m", "", "default", "a", 4, dp_rank, "")
        )

    def are_active(self) -> bool:
        return all(each.listener.status == "active" for each in self.publishers)

    async def replace(self, dp_rank: int) -> None:
        """Removes a rank and registers it again before any other task can run."""
        await self.publishers.unregister(Narrowing("default", "a", dp_rank))
        self.register(dp_rank)


@pytest.fixture
def daemon(
    nursery: trio.Nursery, context: zmq.Context, publish: Callable[..., Publisher]
) -> Iterator[Daemon]:
    made = Daemon(nursery, context, publish().endpoint)
    yield made
    nursery.cancel_scope.cancel()


async def test_whoever_is_slow_ends_no_later_registration(daemon: Daemon) -> None:
    for _ in range(20):  # several times, as trio wakes tasks in any order
        for rank in range(3):
            daemon.register(rank)
        await until(daemon.are_active)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(daemon.publishers.unregister, ALL)
            nursery.start_soon(daemon.replace, 2)
        await until(daemon.are_active)
        left = [each.described.dp_rank for each in daemon.publishers]
        assert left in ([], [2])
        if left:
            await daemon.publishers.unregister(ALL)


async def test_who_has_left_takes_its_index_along(
    nursery: trio.Nursery, context: zmq.Context, publish: Callable[..., Publisher]
) -> None:
    """The sweep frees it; an index that was no longer swept would go on counting in the budget."""
    engine = publish()
    daemon = Daemon(nursery, context, engine.endpoint)
    daemon.register(0)
    await engine.subscribed()
    with logged() as lines:
        engine.send(msgpack.packb([0.0, [["BlockStored", [1], None, [1, 2, 3, 4], 4, None]], 0]))
        await until(lambda: "health=exact" in lines())  # the batch has been applied
    assert daemon.state.budget.blocks == 1
    await daemon.publishers.unregister(ALL)
    while daemon.state.sweep(1024):
        pass
    assert daemon.state.budget.blocks == 0
    nursery.cancel_scope.cancel()


class Slow:
    """Listeners that take a moment to stop; notes at each end how many stops had begun."""

    def __init__(self) -> None:
        self._stopping: set[Hashable] = set()
        self.stopping_at_ends: list[int] = []

    def start(self, key: Hashable, listener: EventStream) -> None:
        pass

    async def stop(self, key: Hashable) -> bool:
        self._stopping.add(key)
        await trio.testing.wait_all_tasks_blocked()
        self.stopping_at_ends.append(len(self._stopping))
        return True


async def test_those_who_leave_are_waited_for_together() -> None:
    """Ending a connection takes milliseconds, and an instance may have a thousand."""
    listeners = Slow()
    publishers = Publishers(State(), listeners)
    for rank in range(3):
        publishers.register(
            Described("tcp://127.0.0.1:1", None, "vLLM", "m", "", "default", "a", 4, rank, "")
        )
    assert len(await publishers.unregister(ALL)) == 3
    assert listeners.stopping_at_ends == [3, 3, 3]
    assert len(publishers) == 0
