"""An engine that restarts, over real sockets: its old blocks go, its new ones count."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Callable

import pytest
import trio
import zmq

from kvd.net.link import LinkResources
from kvd.net.replay import Replayer
from tests.support.listening import HASTY, HASTY_REPLAYS, PATIENT_REPLAYS, Listening
from tests.support.replay_servers import (
    END_SEQ,
    Answer,
    ReplayServer,
    four_frames,
    silent,
    three_frames,
    without_end,
)
from tests.support.zmtp_fakes import NOT_MY_FAULT_S, Publisher, until

Publish = Callable[..., Publisher]
SPARING = dataclasses.replace(HASTY_REPLAYS, spare_s=600.0)


class Engine:
    """An engine that restarts at the same address, with a replay server."""

    def __init__(self, context: zmq.Context, publish: Publish) -> None:
        self._publish = publish
        self.worker = publish()
        self.server = ReplayServer(context, three_frames)
        self.life = 0  # number of the process, in each of its batches
        self.losses = 0  # times that its connections were lost

    async def restart(self) -> None:
        """Comes back as another process, without the batches of the one before."""
        self.server.buffer.clear()
        self.life += 1
        await self.lose_connections()

    async def lose_connections(self) -> None:
        """Closes its connections, and accepts others at the same address."""
        self.worker.close()
        self.losses += 1
        endpoint = self.worker.endpoint
        with trio.fail_after(NOT_MY_FAULT_S):
            while True:  # libzmq frees an address only some time after the close
                try:
                    self.worker = self._publish(endpoint)
                    return
                except zmq.ZMQError as error:
                    assert error.errno == errno.EADDRINUSE
                    await trio.sleep(0.005)

    def batch(self, seq: int) -> bytes:
        return b"%d of life %d" % (seq, self.life)

    def batches(self, stop: int) -> list[bytes]:
        return [self.batch(seq) for seq in range(stop)]

    def keep(self, *seqs: int) -> None:
        """Publishes batches that no listener receives, but the replay server keeps."""
        for seq in seqs:
            self.server.buffer[seq] = self.batch(seq)

    def send(self, *seqs: int) -> None:
        self.keep(*seqs)
        for seq in seqs:
            self.worker.seq = seq
            self.worker.send(self.batch(seq))


@pytest.fixture
def engine(context: zmq.Context, publish: Publish, nursery: trio.Nursery) -> Engine:
    made = Engine(context, publish)
    nursery.start_soon(made.server.run)
    return made


@pytest.fixture
def asked_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the pause that spares engines questions."""
    monkeypatch.setattr("kvd.net.listener.ASK_AGAIN_S", 0.01)


async def listen(
    engine: Engine,
    context: zmq.Context,
    nursery: trio.Nursery,
    replay: bool = True,
    replayer: Replayer | None = None,
) -> Listening:
    listening = Listening(engine.worker.endpoint, engine.server.endpoint if replay else None)
    listening.ready.set()
    nursery.start_soon(listening.run, context, HASTY, replayer)
    await engine.worker.subscribed()
    return listening


async def hear(
    engine: Engine,
    context: zmq.Context,
    nursery: trio.Nursery,
    count: int,
    replay: bool = True,
    replayer: Replayer | None = None,
) -> Listening:
    """Listens to an engine; returns once its first `count` batches are applied."""
    listening = await listen(engine, context, nursery, replay, replayer)
    engine.send(*range(count))
    await until(lambda: len(listening.applied) == count)
    return listening


async def lost_and_found(listening: Listening, engine: Engine) -> None:
    await until(lambda: listening.listener.stats.losses == engine.losses)
    await engine.worker.subscribed()


def now_held(listening: Listening) -> list[bytes | None]:
    """Returns the batches applied since the last clear."""
    applied = listening.applied
    cleared = len(applied) - applied[::-1].index(None) if None in applied else 0
    return applied[cleared:]


def health_and_restarts(listening: Listening) -> tuple[str, int]:
    listener = listening.listener
    return str(listener.health(trio.current_time())), listener.stats.restarts


def ended(listening: Listening) -> list[str]:
    """Returns how replays have ended."""
    return sorted(listening.listener.stats.replays)


@pytest.mark.parametrize("kept", [0, 3])
async def test_it_comes_back_and_says_nothing(
    engine: Engine, context: zmq.Context, nursery: trio.Nursery, kept: int
) -> None:
    """Its replay server has no batch from the last number on, so it is another engine."""
    listening = await hear(engine, context, nursery, 58)
    await engine.restart()
    engine.keep(*range(kept))
    health = "exact" if kept else "recovering"
    await until(lambda: ended(listening) == ["marker", "other_engine"])
    assert health_and_restarts(listening) == (health, 1)
    assert now_held(listening) == engine.batches(kept)
    assert engine.server.requests == [57, 0]
    engine.send(kept)
    await until(lambda: now_held(listening) == engine.batches(kept + 1))
    assert health_and_restarts(listening) == ("exact", 1)


@pytest.mark.usefixtures("asked_again_soon")
async def test_it_restarts_again_while_it_is_asked(
    engine: Engine, context: zmq.Context, nursery: trio.Nursery
) -> None:
    replayer = Replayer(LinkResources(context), HASTY, PATIENT_REPLAYS)
    listening = await hear(engine, context, nursery, 5, replayer=replayer)
    stats = listening.listener.stats

    async def ending(server: ReplayServer, start: int, reply: Callable[..., None]) -> None:
        if start:
            return reply([END_SEQ, b""])
        first, second = engine.batches(2)
        reply([bytes(8), first])
        await until(lambda: now_held(listening) == [first])
        server.answer = three_frames
        await engine.restart()
        await until(lambda: stats.losses == 2)
        engine.keep(0, 1)
        reply([(1).to_bytes(8), second])

    engine.server.answer = ending
    await engine.restart()
    await until(lambda: stats.restarts == 2 and now_held(listening) == engine.batches(2))
    await until(lambda: health_and_restarts(listening) == ("exact", 2))
    assert engine.server.requests == [4, 0, 0, 0, 1]
    engine.send(2)
    await until(lambda: now_held(listening) == engine.batches(3))
    assert (health_and_restarts(listening), stats.crashes) == (("exact", 2), 0)


@pytest.mark.parametrize("missed", [0, 3, 1000])
async def test_a_connection_is_lost_and_the_engine_says_nothing(
    engine: Engine, context: zmq.Context, nursery: trio.Nursery, missed: int
) -> None:
    """It is the same engine, and a replay brings the batches published meanwhile."""
    listening = await hear(engine, context, nursery, 58)
    await engine.lose_connections()
    engine.keep(*range(58, 58 + missed))
    await until(
        lambda: (
            health_and_restarts(listening) == ("exact", 0) and listening.listener.stats.joins == 2
        )
    )
    assert listening.applied == engine.batches(58 + missed)
    assert engine.server.requests == ([57, 57 + missed + 1] if missed == 1000 else [57])


@pytest.mark.usefixtures("asked_again_soon")
async def test_who_does_not_answer_is_asked_again(
    engine: Engine, context: zmq.Context, nursery: trio.Nursery
) -> None:
    replayer = Replayer(LinkResources(context), HASTY, HASTY_REPLAYS)
    listening = await hear(engine, context, nursery, 3, replayer=replayer)
    engine.server.answer = silent
    await engine.restart()
    await until(lambda: len(engine.server.requests) == 2)
    assert health_and_restarts(listening) == ("recovering", 0)
    assert now_held(listening) == [b"%d of life 0" % seq for seq in range(3)]
    engine.server.answer = four_frames
    await until(lambda: health_and_restarts(listening) == ("recovering", 1))
    assert now_held(listening) == []


async def ask_in_vain(
    engine: Engine, context: zmq.Context, nursery: trio.Nursery, answer: Answer, is_same: bool
) -> Listening:
    """Has an engine with five batches come back, whose replay server ends no answer.

    Returns when kvd has given the question up; later replays may take long.
    """
    replayer = Replayer(LinkResources(context), HASTY, SPARING)
    listening = await hear(engine, context, nursery, 5, replayer=replayer)
    engine.server.answer = answer
    await (engine.lose_connections() if is_same else engine.restart())
    await until(lambda: ended(listening) == ["silent"])
    replayer.set_options(PATIENT_REPLAYS)
    return listening


@pytest.mark.parametrize("is_same", [False, True])
async def test_an_unanswered_question_spares_no_gap_its_replay(
    engine: Engine, context: zmq.Context, nursery: trio.Nursery, is_same: bool
) -> None:
    """A server that was not up yet when the idle engine was asked answers at the next gap."""
    listening = await ask_in_vain(engine, context, nursery, silent, is_same)
    engine.server.answer = three_frames
    engine.keep(*range(5 if is_same else 0, 7))
    engine.send(7)
    await until(lambda: now_held(listening) == engine.batches(8))
    assert health_and_restarts(listening) == ("exact", 0 if is_same else 1)


@pytest.mark.usefixtures("asked_again_soon")
async def test_another_connection_is_not_spared_for_the_silence_over_the_one_before(
    engine: Engine, context: zmq.Context, nursery: trio.Nursery
) -> None:
    """A server that was not up yet when the idle engine was asked answers after the next loss."""
    listening = await ask_in_vain(engine, context, nursery, silent, is_same=True)
    engine.server.answer = three_frames
    await engine.restart()
    engine.keep(*range(2))
    await until(lambda: health_and_restarts(listening) == ("exact", 1))
    assert now_held(listening) == engine.batches(2)


async def test_an_engine_that_proves_itself_and_sends_no_end_is_asked_at_the_next_gap(
    engine: Engine, context: zmq.Context, nursery: trio.Nursery
) -> None:
    listening = await ask_in_vain(engine, context, nursery, without_end, is_same=True)
    engine.keep(5, 6)
    engine.send(7)
    await until(lambda: len(listening.applied) == 8)
    assert (listening.applied, health_and_restarts(listening)) == (engine.batches(8), ("exact", 0))


async def test_a_restarted_engine_is_not_spared_for_the_silence_of_the_old_one(
    engine: Engine, context: zmq.Context, nursery: trio.Nursery
) -> None:
    replayer = Replayer(LinkResources(context), HASTY, SPARING)
    listening = await listen(engine, context, nursery, replayer=replayer)
    engine.send(*range(10))
    engine.server.answer = silent
    engine.send(12)
    await until(lambda: len(listening.applied) == 11)
    replayer.set_options(PATIENT_REPLAYS)
    engine.server.answer = three_frames
    engine.server.buffer.clear()
    engine.life = 1
    engine.keep(*range(5))
    engine.send(5, 6, 7)
    await until(lambda: now_held(listening) == engine.batches(8))
    assert health_and_restarts(listening) == ("exact", 1)


async def test_what_was_brought_and_comes_live_as_well_is_no_restart(
    engine: Engine, context: zmq.Context, nursery: trio.Nursery
) -> None:
    """There are more of them than batches whose content is remembered."""
    listening = await hear(engine, context, nursery, 5)
    await engine.lose_connections()

    async def speaking(server: ReplayServer, start: int, reply: Callable[..., None]) -> None:
        server.answer = three_frames
        engine.send(*range(5, 405))
        await three_frames(server, start, reply)

    engine.server.answer = speaking
    await until(lambda: listening.listener.stats.stale == 400)
    engine.send(405)
    await until(lambda: listening.applied == engine.batches(406))
    assert health_and_restarts(listening) == ("exact", 0)


@pytest.mark.parametrize("replay", [False, True])
async def test_it_begins_with_0(
    engine: Engine, context: zmq.Context, nursery: trio.Nursery, replay: bool
) -> None:
    listening = await hear(engine, context, nursery, 58, replay)
    await engine.restart()
    await lost_and_found(listening, engine)
    if replay:
        await until(lambda: ended(listening) == ["marker", "other_engine"])
        assert (health_and_restarts(listening), now_held(listening)) == (("recovering", 1), [])
    engine.send(0)
    await until(lambda: now_held(listening) == engine.batches(1))
    engine.send(1, 2)
    await until(lambda: now_held(listening) == engine.batches(3))
    assert (listening.listener.stats.restarts, listening.listener.stats.stale) == (1, 0)
    assert listening.listener.health(trio.current_time()) == "exact"
    assert engine.server.requests == ([57, 0] if replay else [])


async def test_it_is_heard_late(
    engine: Engine, context: zmq.Context, nursery: trio.Nursery
) -> None:
    """Batches that the new engine published before it was heard are replayed from 0."""
    listening = await hear(engine, context, nursery, 58)
    await engine.restart()
    await lost_and_found(listening, engine)
    await until(lambda: ended(listening) == ["marker", "other_engine"])
    engine.keep(*range(7))
    engine.send(7, 8)
    await until(lambda: now_held(listening) == engine.batches(9))
    assert (listening.listener.stats.restarts, engine.server.requests) == (1, [57, 0, 0])
    assert listening.listener.health(trio.current_time()) == "exact"


@pytest.mark.parametrize("first_heard", [5, 6, 9])
async def test_it_has_come_as_far_as_the_old_one(
    engine: Engine, context: zmq.Context, nursery: trio.Nursery, first_heard: int
) -> None:
    """No number goes back; only the replay shows that the last batch is a different one."""
    listening = await hear(engine, context, nursery, 5)
    await engine.restart()
    engine.keep(*range(first_heard))
    await lost_and_found(listening, engine)
    engine.send(first_heard, first_heard + 1)
    await until(lambda: now_held(listening) == engine.batches(first_heard + 2))
    assert (listening.listener.stats.restarts, engine.server.requests) == (1, [4, 0])


@pytest.mark.parametrize("first_heard", [5, 6, 9])
async def test_a_lost_connection_is_no_restart(
    engine: Engine, context: zmq.Context, nursery: trio.Nursery, first_heard: int
) -> None:
    listening = await hear(engine, context, nursery, 5)
    await engine.lose_connections()
    engine.keep(*range(5, first_heard))
    await lost_and_found(listening, engine)
    engine.send(first_heard, first_heard + 1)
    await until(lambda: listening.applied == engine.batches(first_heard + 2))
    assert (listening.listener.stats.restarts, engine.server.requests) == (0, [4])


async def test_behind_a_proxy_no_connection_is_lost(
    engine: Engine, context: zmq.Context, nursery: trio.Nursery
) -> None:
    listening = await hear(engine, context, nursery, 58)
    engine.server.buffer.clear()
    engine.life = 1
    engine.send(0, 1, 2)
    await until(lambda: now_held(listening) == engine.batches(3))
    assert (listening.listener.stats.restarts, engine.server.requests) == (1, [0])


async def test_another_engine_at_the_same_address_degrades(
    engine: Engine, context: zmq.Context, nursery: trio.Nursery
) -> None:
    """Two publish behind one proxy: the blocks of the one that is not listened to are unknown."""
    listening = await listen(engine, context, nursery)
    for seq in range(4):
        for life in (0, 1):
            engine.life = life
            engine.send(seq)
    await until(lambda: listening.listener.stats.stale == 4)
    assert listening.applied == [b"%d of life 0" % seq for seq in range(4)]
    assert health_and_restarts(listening) == ("degraded", 0)
    assert listening.listener.loss == "batch 3 is of another engine"
    engine.life = 2
    engine.send(0, 1)
    await until(lambda: now_held(listening) == engine.batches(2))
    assert health_and_restarts(listening) == ("exact", 1)


async def test_late_duplicates_are_no_restart(
    engine: Engine, context: zmq.Context, nursery: trio.Nursery
) -> None:
    listening = await listen(engine, context, nursery)
    engine.send(*range(58), *range(58), 57, 0, 1, 2, 58)
    await until(lambda: len(listening.applied) == 59)
    assert listening.applied == engine.batches(59)
    assert (listening.listener.stats.restarts, listening.listener.stats.stale) == (0, 62)
    assert engine.server.requests == []


async def test_a_server_that_still_holds_the_old_engine_does_not_feed_the_new(
    engine: Engine, context: zmq.Context, nursery: trio.Nursery
) -> None:
    listening = await hear(engine, context, nursery, 58)
    kept = dict(engine.server.buffer)
    await engine.restart()
    await lost_and_found(listening, engine)
    engine.server.buffer = kept
    engine.worker.seq = 3
    engine.worker.send(engine.batch(3))
    await until(lambda: now_held(listening) == [engine.batch(3)])
    assert listening.listener.health(trio.current_time()) == "degraded"
    assert listening.listener.loss == "missing 0..2"


async def test_a_restart_without_a_server_degrades(
    engine: Engine, context: zmq.Context, nursery: trio.Nursery
) -> None:
    listening = await hear(engine, context, nursery, 58, replay=False)
    await engine.restart()
    await lost_and_found(listening, engine)
    engine.send(2)
    await until(lambda: now_held(listening) == [engine.batch(2)])
    assert listening.listener.health(trio.current_time()) == "degraded"


async def test_restarts_one_after_the_other(
    engine: Engine, context: zmq.Context, nursery: trio.Nursery
) -> None:
    listening = await listen(engine, context, nursery)
    for life in range(6):
        engine.send(*range(life, 2 * life + 2))
        engine.keep(*range(life))
        expected = engine.batches(2 * life + 2)
        await until(lambda expected=expected: now_held(listening) == expected)
        assert listening.listener.stats.restarts == life
        await engine.restart()
        await lost_and_found(listening, engine)
