"""A listener and a recovery cancelled at every checkpoint, over real sockets: none is left open.

tests/simulation/test_cancelled.py does the same in virtual time, with more events.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import trio
import zmq

import kvd.net.recovery
from kvd.net.arrivals import arrivals
from kvd.net.dialing import Dialer
from kvd.net.link import LinkResources
from kvd.net.listener import run_listener
from kvd.net.recovery import RecoveryLimits, RecoveryStats, recover
from kvd.net.replay import Replayer
from kvd.wire.dump import BINARY_DUMP, JSON_DUMP
from tests.support.cancelling import every_checkpoint
from tests.support.descriptors import descriptors_now, open_descriptors
from tests.support.listening import HASTY, HASTY_REPLAYS, Listening
from tests.support.recovering import PARTITION, Replica
from tests.support.replay_servers import ReplayServer, three_frames
from tests.support.resolving import Names
from tests.support.zmtp_fakes import Publisher, reserved_endpoint, until


async def test_a_listener_whose_gap_is_replayed(
    context: zmq.Context, publish: Callable[..., Publisher], nursery: trio.Nursery
) -> None:
    server = ReplayServer(context, three_frames, buffer=range(9))
    nursery.start_soon(server.run)
    replayer = Replayer(LinkResources(context), HASTY, HASTY_REPLAYS)
    arrivals()  # opens a descriptor that stays
    before = open_descriptors()
    for cancelling in every_checkpoint(at_least=8):
        worker = publish()
        listening = Listening(worker.endpoint, server.endpoint)
        listening.ready.set()

        def over(listening: Listening = listening, seq: int = 9) -> bool:
            return listening.ended.is_set() or listening.listener.cursor.last == seq

        async def lead(worker: Publisher = worker, listening: Listening = listening) -> None:
            """Has batch 0 applied, then sends batch 9, which leaves a gap of eight."""
            await until(lambda: worker.socket.poll(0) or listening.ended.is_set())
            worker.send_frames(b"", bytes(8), b"0")
            await until(partial(over, seq=0))
            worker.send_frames(b"", (9).to_bytes(8), b"9")
            await until(over)
            listening.scope.cancel()

        async def run(listening: Listening = listening) -> None:
            try:
                await listening.run(context, HASTY, replayer)
            finally:
                listening.ended.set()

        async with trio.open_nursery() as both:
            both.start_soon(lead)
            await cancelling.run(run)
        worker.close()
        applied = [int(batch or b"-1") for batch in listening.applied]
        assert applied == list(range(len(applied)))  # in order, each once, without a hole
        assert listening.listener.stats.lost == 0
        await until(lambda: descriptors_now() <= before)
    assert len(applied) == 10


@pytest.mark.parametrize("form", [BINARY_DUMP, JSON_DUMP], ids=["binary", "text"])
async def test_a_recovery(form: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvd.net.recovery, "ACCEPT", form)
    peer = Replica()
    peer.register(7)
    peer.register(8)
    workers = peer.state.partitions[PARTITION].workers
    workers[7].store(0, list(range(1, 3000)), list(range(1, 3000)))
    workers[8].store(0, [1, 2], [1, 2])
    async with peer.served() as url:
        before = open_descriptors()
        for cancelling in every_checkpoint(at_least=5):
            fresh = Replica()
            call = partial(recover, fresh.state, [url], RecoveryStats(), RecoveryLimits())
            await cancelling.run(call)
            assert not fresh.state.recovering
            for partition in fresh.state.partitions.values():
                assert partition.workers
                partition.index.verify()
            await until(lambda: descriptors_now() <= before)
            assert await call() == url
            assert fresh.dumped() == peer.dumped()


async def test_a_listener_whose_engine_has_a_name(
    context: zmq.Context, nursery: trio.Nursery
) -> None:
    """The name is looked up, connected to, lost, looked up again, and found elsewhere."""
    names = Names()
    trio.socket.set_custom_hostname_resolver(names)
    dialer = Dialer(lookup_s=0.1, lookup_every_s=0.01)
    resources = LinkResources(context, dialer)
    replayer = Replayer(resources, HASTY, HASTY_REPLAYS)
    first = Listening("ipc://" + "x" * 200)  # fails, but opens the context's own descriptors
    first.ready.set()
    nursery.start_soon(first.run, context, HASTY)
    await until(first.is_("failed"))
    await first.stop()
    before = open_descriptors()
    with reserved_endpoint() as unserved:
        port = unserved.rpartition(":")[2]
        for cancelling in every_checkpoint(at_least=8):
            names.known["w"] = ["127.0.0.2"]
            listening = Listening(f"tcp://w:{port}")
            asked = names.asked

            async def lead(asked: int = asked, listening: Listening = listening) -> None:
                await until(lambda: names.asked >= asked + 3 or listening.ended.is_set())
                names.known["w"] = ["127.0.0.3"]
                await until(
                    lambda: listening.listener.stats.failures > 0 or listening.ended.is_set()
                )
                listening.scope.cancel()

            async def run(listening: Listening = listening) -> None:
                arguments = resources, listening.ready, HASTY, replayer
                try:
                    with listening.scope:
                        await run_listener(listening.listener, *arguments)
                finally:
                    listening.ended.set()

            async with trio.open_nursery() as both:
                both.start_soon(lead)
                await cancelling.run(run)
            assert not dialer._links
    await until(lambda: descriptors_now() <= before)
