"""Calls and tasks cancelled at every checkpoint: a client leaves, a listener stops, TERM comes.

After each cancellation registry, state and tasks agree and no socket is left open. The cancelled
operation, done again, ends as if nothing had happened. Time is virtual and sockets are simulated;
tests/component/net/test_cancelled_sockets.py and tests/component/http/test_cancelled_handlers.py do
the same with real ones.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import pytest
import trio
import trio.testing

from kvd.errors import Conflict, NotFound
from kvd.model import PartitionKey, RankKey
from kvd.net.link import LinkOptions
from kvd.net.listener import run_listener
from kvd.net.recovery import RecoveryStats, confirm_restored, recover
from kvd.net.replay import Replayer, ReplayOptions
from kvd.wire.event_stream import StreamHealth
from kvd.wire.stream_link import ListenerStatus
from kvd_core.base.hashing import local_hashes
from tests.simulation.engine import BLOCK, tokens_of
from tests.simulation.fleet import Fleet, check_replica
from tests.simulation.network import Wire, is_plain
from tests.simulation.oracle import Oracle
from tests.simulation.replica import Replica
from tests.support.cancelling import every_checkpoint

KEYS = [
    RankKey(PartitionKey("model", tenant), instance_id, dp_rank)
    for tenant, instance_id, dp_rank in (("a", 1, 0), ("a", 1, 1), ("b", 1, 0), ("a", 2, 0))
]
ONE = KEYS[0]

Clock = trio.testing.MockClock


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


async def started(fleet: Fleet) -> Replica:
    """Returns a replica that has heard batches of all engines."""
    replica = await fleet.start("replica", *KEYS)
    await trio.sleep(0.1)
    for key in KEYS:
        fleet.speak(key, 3)
    await trio.sleep(0.1)
    return replica


async def check_all_exact(fleet: Fleet, replica: Replica) -> None:
    """Has the engines publish, and checks that the replica then agrees with them."""
    await trio.sleep(0.1)
    for key in KEYS:
        fleet.speak(key)
    await trio.sleep(10)
    check_replica(replica)
    oracle = Oracle(0)
    oracle.check_all(replica)
    for engine in fleet.engines.values():
        assert oracle.is_exact(replica, engine)


# ---- calls of clients

UNREGISTER = {
    "one rank": (ONE.partition.tenant_id, ONE.dp_rank, KEYS[:1]),
    "one tenant": (ONE.partition.tenant_id, None, KEYS[:2]),
    "all tenants": (None, None, KEYS[:3]),
}


@pytest.mark.parametrize("what", UNREGISTER)
async def test_unregister(what: str, autojump_clock: Clock) -> None:
    tenant, rank, gone = UNREGISTER[what]
    for cancelling in every_checkpoint():
        fleet = Fleet(KEYS)
        async with fleet.living():
            replica = await started(fleet)
            call = partial(replica.registry.unregister, 1, "model", tenant, rank)
            await cancelling.run(call)
            await trio.testing.wait_all_tasks_blocked()
            check_replica(replica)
            with pytest.raises(NotFound):  # a cancelled call is still done to its end
                await call()
            assert {key for key in KEYS if not replica.find(fleet.engines[key])} == set(gone)


async def test_unregister_of_a_rank_whose_replay_is_under_way(autojump_clock: Clock) -> None:
    for cancelling in every_checkpoint():
        fleet = Fleet(KEYS)
        async with fleet.living():
            replica = await started(fleet)
            fleet.ports[ONE].replays = "slow"
            fleet.speak(ONE, heard=False)
            fleet.speak(ONE)
            await trio.sleep(0.1)
            await cancelling.run(partial(replica.unregister, fleet.engines[ONE]))
            await trio.testing.wait_all_tasks_blocked()
            check_replica(replica)
            assert replica.find(fleet.engines[ONE]) is None
            replica.register(fleet.engines[ONE])
            await trio.sleep(1)
            check_replica(replica)


async def test_register_while_a_removal_is_under_way(autojump_clock: Clock) -> None:
    async def register(replica: Replica) -> None:
        with trio.fail_after(1):
            while True:
                try:
                    return replica.register(engine)
                except Conflict:
                    await trio.sleep(0.0001)

    for cancelling in every_checkpoint():
        fleet = Fleet(KEYS)
        engine = fleet.engines[ONE]
        async with fleet.living():
            replica = await started(fleet)
            async with trio.open_nursery() as clients:
                clients.start_soon(cancelling.run, partial(replica.unregister, engine))
                clients.start_soon(register, replica)
            check_replica(replica)
            await trio.sleep(0.1)
            fleet.speak(ONE)
            await trio.sleep(1)
            found = replica.registration(engine).listener
            assert (found.status, found.cursor.last) == (ListenerStatus.ACTIVE, 3)


async def test_pause(autojump_clock: Clock) -> None:
    for cancelling in every_checkpoint():
        fleet = Fleet(KEYS)
        async with fleet.living():
            replica = await started(fleet)
            call = partial(replica.pause, fleet.engines[ONE])
            await cancelling.run(call)
            await trio.testing.wait_all_tasks_blocked()
            check_replica(replica)
            with pytest.raises(Conflict):
                await call()
            fleet.speak(ONE)
            replica.registry.resume(ONE.instance_id, ONE.dp_rank)
            await check_all_exact(fleet, replica)


# ---- a listener


@pytest.mark.parametrize("key", [KEYS[0], KEYS[1]], ids=["libzmq", "plain"])
async def test_a_listener(key: RankKey, autojump_clock: Clock) -> None:
    """The listener connects, has a gap replayed, loses its connection, gets a protocol error."""

    async def live(fleet: Fleet, run: Callable[[], Awaitable[None]]) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await trio.sleep(0.1)
            port = fleet.ports[key]
            fleet.speak(key)
            fleet.speak(key, heard=False)
            fleet.speak(key, 2)
            await trio.sleep(1)
            for fault in (False, True):
                for connection in list(port.connections):
                    connection.break_off(fault)
                fleet.speak(key, 2)
                await trio.sleep(3)
                fleet.speak(key)
                await trio.sleep(1)
            nursery.cancel_scope.cancel()

    for cancelling in every_checkpoint(at_least=40):
        fleet = Fleet([key])
        engine = fleet.engines[key]
        assert is_plain(engine.endpoint) is (key is KEYS[1])
        async with fleet.living():
            replica = await fleet.start("replica", key)
            await replica.pause(engine)
            listener = replica.registration(engine).listener
            wire = Wire(fleet.network, "replica", cut_replays=False)
            ready = trio.Event()
            ready.set()
            resources = wire.resources()
            replayer = Replayer(resources, LinkOptions(), ReplayOptions())
            run = partial(run_listener, listener, resources, ready, LinkOptions(), replayer)
            await cancelling.run(partial(live, fleet, run))
            assert (wire.connections, wire.monitors) == ([], {})
            assert not fleet.ports[key].connections
            listener.paused(trio.current_time())  # as the registry does after a stop
            replica.state.partitions[key.partition].index.verify()
            replica.registry.resume(key.instance_id, key.dp_rank)
            await trio.sleep(0.1)
            fleet.speak(key)
            await trio.sleep(20)
            assert listener.health(trio.current_time()) is StreamHealth.EXACT
            Oracle(0).check_all(replica)


# ---- the start


@pytest.mark.parametrize("texts", [0.0, 1.0], ids=["binary", "text"])
async def test_recovery(texts: float, autojump_clock: Clock) -> None:
    """The peer's dump is fetched, staged, planned, and stored in slices of 8 blocks."""
    fleet = Fleet(KEYS)
    fleet.peers.texts = texts
    async with fleet.living():
        peer = await started(fleet)
        unharmed = Replica("replica", fleet.network, (), kind=True)
        await recover(unharmed.state, [peer.url], RecoveryStats())
        for cancelling in every_checkpoint(at_least=20):
            replica = Replica("replica", fleet.network, (), kind=True)
            state = replica.state
            call = partial(recover, state, [peer.url], RecoveryStats())
            await cancelling.run(call)
            assert not state.recovering
            for partition in state.partitions.values():
                assert partition.workers
                partition.index.verify()
            assert await call() == peer.url
            assert held(fleet, replica) == held(fleet, unharmed)


def held(fleet: Fleet, replica: Replica) -> list[object]:
    """Returns what the ranks hold of every prompt so far, and how much in all."""
    found: list[object] = []
    for engine in fleet.engines.values():
        index = replica.state.partitions[engine.key.partition].index
        found += [index.match(local_hashes(tokens_of(path), BLOCK)) for path in engine.asked]
        found.append(index.stats()["held"])
    return found


async def test_settling(autojump_clock: Clock) -> None:
    for cancelling in every_checkpoint(at_least=10):
        fleet = Fleet(KEYS)
        async with fleet.living():
            peer = await started(fleet)
            replica = await fleet.start("other", peers=[])
            await recover(replica.state, [peer.url], RecoveryStats())
            unconfirmed = len(replica.state.unconfirmed)
            assert unconfirmed == 3
            for key in KEYS:
                replica.register(fleet.engines[key])
            await trio.sleep(0.1)
            for key in KEYS:
                fleet.speak(key)  # an engine is only confirmed once it has published
            listened = replica.state, replica.registry, replica.publishers
            await cancelling.run(partial(confirm_restored, *listened))
            check_replica(replica)
            await confirm_restored(*listened)
            assert not replica.state.unconfirmed


async def test_a_replica_that_is_told_to_end(autojump_clock: Clock) -> None:
    """It is cancelled at any moment of its start: in recovery, while connecting, during replays.

    Each attempt has a fleet of its own: what engines published in others would make it longer.
    """
    for cancelling in every_checkpoint(at_least=50):
        fleet = Fleet(KEYS)
        async with fleet.living():
            peer = await started(fleet)
            replica = Replica("other", fleet.network, fleet.engines.values(), kind=True)
            await cancelling.run(partial(live_for_a_moment, fleet, replica, peer))
            assert (replica.wire.connections, replica.wire.monitors) == ([], {})
            assert not replica.state.recovering
            for partition in replica.state.partitions.values():
                partition.index.verify()
            await check_all_exact(fleet, await fleet.start("other", *KEYS, peers=[peer.name]))


async def live_for_a_moment(fleet: Fleet, replica: Replica, peer: Replica) -> None:
    """Starts a replica that recovers from the peer; engines publish once it has."""
    async with trio.open_nursery() as nursery:
        engines = list(fleet.engines.values())
        await nursery.start(replica.run, [peer.url], engines)
        await trio.sleep(0.5)
        for key in KEYS:
            fleet.speak(key)
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
