"""Messages wait within bounds while none can be applied, and stay attributed to their engine."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
import zmq

import kvd
from kvd.net.link import LinkResources
from kvd.net.listener import run_listener
from kvd.net.publisher import open_publisher
from kvd.net.replay import Replayer
from kvd.net.replication import REPLICA_LINK
from kvd.net.zmq_link import asking_options, socket_options
from kvd.net.zsocket import ZSocket
from kvd_core.zmq.drain import InboxSpace
from tests.support.listening import HASTY, HASTY_REPLAYS, Listening
from tests.support.replay_servers import ReplayServer, three_frames
from tests.support.zmtp_fakes import Publisher, until

NARROW = dataclasses.replace(HASTY, queue_messages=5)


class Engine:
    """A publisher, the replay server of its batches, and a listener whose gate is closed."""

    def __init__(
        self,
        context: zmq.Context,
        publish: Callable[..., Publisher],
        nursery: trio.Nursery,
    ) -> None:
        self._context = context
        self._publish = publish
        self._nursery = nursery
        self.worker = publish()
        self.server = ReplayServer(context, three_frames)
        nursery.start_soon(self.server.run)
        self.life = 0
        self.space = InboxSpace()

    async def listen(self, replay: bool = True, options=HASTY) -> Listening:  # type: ignore[no-untyped-def]
        listening = Listening(self.worker.endpoint, self.server.endpoint if replay else None)
        resources = LinkResources(self._context, space=self.space)
        replayer = Replayer(resources, options, HASTY_REPLAYS)

        async def run() -> None:
            with listening.scope:
                await run_listener(
                    listening.listener, resources, listening.ready, options, replayer
                )
            listening.ended.set()

        self._nursery.start_soon(run)
        await self.worker.subscribed()
        await until(lambda: listening.listener.connected)
        return listening

    def batch(self, seq: int) -> bytes:
        return b"%d of life %d" % (seq, self.life)

    def batches(self, *numbers: int) -> list[bytes | None]:
        return [self.batch(seq) for seq in numbers]

    def keep(self, *numbers: int) -> None:
        self.server.buffer.update({seq: self.batch(seq) for seq in numbers})

    def send(self, *numbers: int) -> None:
        self.keep(*numbers)
        for seq in numbers:
            self.worker.seq = seq
            self.worker.send(self.batch(seq))

    async def restart(self, listening: Listening) -> None:
        """Replaces the engine's process by another one, and waits until that is connected."""
        losses = listening.listener.stats.losses
        self.worker.close()
        self.server.buffer.clear()
        self.life += 1
        await until(lambda: listening.listener.stats.losses == losses + 1)

        def bound() -> bool:
            try:
                self.worker = self._publish(self.worker.endpoint)
            except zmq.ZMQError:
                return False  # libzmq frees an address only some time after the close
            return True

        await until(bound)
        await self.worker.subscribed()
        await until(lambda: listening.listener.connected)


@pytest.fixture
def engine(
    context: zmq.Context, publish: Callable[..., Publisher], nursery: trio.Nursery
) -> Engine:
    return Engine(context, publish, nursery)


def health(listening: Listening) -> str:
    return str(listening.listener.health(trio.current_time()))


@pytest.mark.parametrize("replay", [True, False])
async def test_before_the_gate_opens_a_full_queue_keeps_beginning_and_end(
    engine: Engine, replay: bool
) -> None:
    listening = await engine.listen(replay, NARROW)
    listener = listening.listener
    engine.send(*range(100))
    await until(lambda: listener.stats.dropped == 95)
    assert engine.space.messages == 5
    listening.ready.set()
    await until(lambda: listening.applied and listening.applied[-1] == engine.batch(99))
    assert engine.space.messages == 0
    if replay:
        assert listening.applied == engine.batches(*range(100))
        assert (health(listening), engine.server.requests) == ("exact", [4])
    else:
        assert listening.applied == engine.batches(0, 1, 2, 3, 99)
        assert (listener.stats.lost, listener.loss) == (95, "missing 4..98")


async def test_bytes_are_bounded_as_messages_are(engine: Engine) -> None:
    listening = await engine.listen(options=dataclasses.replace(HASTY, queue_bytes=320))
    engine.send(*range(100))
    # A message takes 16 bytes of text, and 16 besides.
    await until(lambda: listening.listener.stats.dropped == 90)
    assert (engine.space.messages, engine.space.size_bytes) == (10, 320)
    listening.ready.set()
    await until(lambda: listening.applied == engine.batches(*range(100)))


async def test_while_a_replay_runs_the_socket_is_emptied(engine: Engine) -> None:
    listening = await engine.listen(options=NARROW)
    listening.ready.set()
    engine.send(0)
    await until(lambda: len(listening.applied) == 1)
    answer, engine.server.answer = engine.server.answer, stopped(go_on := trio.Event())
    engine.send(*range(3, 100))
    engine.keep(1, 2)
    await until(lambda: engine.server.requests == [1])
    stats = listening.listener.stats
    await until(lambda: stats.dropped + engine.space.messages == 96)  # all but 3
    assert engine.space.messages <= 5
    engine.server.answer = answer
    go_on.set()
    await until(lambda: listening.applied == engine.batches(*range(100)))
    assert health(listening) == "exact"


def stopped(event: trio.Event):  # type: ignore[no-untyped-def]
    async def wait_and_answer(server: ReplayServer, start: int, reply) -> None:  # type: ignore[no-untyped-def]
        await event.wait()
        await three_frames(server, start, reply)

    return wait_and_answer


async def test_all_streams_share_a_bound(
    engine: Engine,
    context: zmq.Context,
    publish: Callable[..., Publisher],
    nursery: trio.Nursery,
) -> None:
    """A stream whose messages all found no room does not claim to be exact."""
    other = Engine(context, publish, nursery)
    engine.space = other.space = InboxSpace(max_messages=10)
    loud, quiet = await engine.listen(), await other.listen()
    engine.send(*range(50))
    await until(lambda: loud.listener.stats.dropped == 40)
    other.send(0, 1)
    await until(lambda: quiet.listener.stats.dropped == 2)
    assert engine.space.messages == 10
    quiet.ready.set()
    loud.ready.set()
    await until(lambda: loud.applied == engine.batches(*range(50)))
    assert (health(loud), health(quiet)) == ("exact", "recovering")
    other.send(2)
    await until(lambda: quiet.applied == other.batches(0, 1, 2))
    assert health(quiet) == "exact"


async def test_a_stream_that_was_exact_is_not_while_its_last_batches_found_no_room(
    engine: Engine,
    context: zmq.Context,
    publish: Callable[..., Publisher],
    nursery: trio.Nursery,
) -> None:
    other = Engine(context, publish, nursery)
    engine.space = other.space = InboxSpace(max_messages=3)
    full = await engine.listen()
    exact = await other.listen()
    exact.ready.set()
    other.send(0)
    await until(lambda: exact.applied == other.batches(0))
    assert health(exact) == "exact"
    engine.send(*range(9))
    await until(lambda: full.listener.stats.dropped == 6)
    other.send(1)
    await until(lambda: exact.listener.stats.dropped == 1)
    await until(lambda: health(exact) == "recovering")
    full.ready.set()
    await until(lambda: engine.space.messages == 0)
    other.send(2)
    await until(lambda: exact.applied == other.batches(0, 1, 2))
    assert health(exact) == "exact"


async def test_what_waited_when_listening_ends_is_given_back(engine: Engine) -> None:
    listening = await engine.listen()
    engine.send(*range(9))
    await until(lambda: engine.space.messages == 9)
    await listening.stop()
    assert (engine.space.messages, engine.space.size_bytes) == (0, 0)
    assert health(listening) == "recovering"


async def test_batches_from_before_a_reconnect_are_the_old_engines(engine: Engine) -> None:
    """They wait for the gate; the new engine is only asked once they have been applied."""
    listening = await engine.listen()
    engine.send(*range(200))
    await until(lambda: engine.space.messages == 200)
    old = engine.batches(*range(200))
    await engine.restart(listening)
    engine.keep(*range(3))
    listening.ready.set()
    await until(lambda: listening.applied == [*old, None, *engine.batches(0, 1, 2)])
    assert engine.server.requests == [199, 0]
    engine.send(3)
    await until(lambda: listening.applied == [*old, None, *engine.batches(0, 1, 2, 3)])
    assert (listening.listener.stats.restarts, health(listening)) == (1, "exact")


async def test_a_gap_among_the_old_engines_batches_is_not_filled_by_the_new_one(
    engine: Engine,
) -> None:
    listening = await engine.listen()
    engine.send(0, 1, 3)
    await until(lambda: engine.space.messages == 3)
    old = engine.batches(0, 1)
    await engine.restart(listening)
    engine.keep(*range(6))
    listening.ready.set()
    await until(lambda: listening.applied == [*old, None, *engine.batches(*range(6))])
    assert engine.server.requests == [1, 0, 3]
    assert (listening.listener.stats.restarts, listening.listener.loss) == (1, "")


async def test_a_restart_is_seen_behind_any_number_of_waiting_batches(engine: Engine) -> None:
    """One batch is enough, although older batches are applied after the connection was made."""
    listening = await engine.listen(replay=False)
    engine.send(*range(200))
    await until(lambda: engine.space.messages == 200)
    old = engine.batches(*range(200))
    await engine.restart(listening)
    engine.send(7)
    await until(lambda: engine.space.messages == 201)
    listening.ready.set()
    await until(lambda: listening.applied == [*old, None, *engine.batches(7)])
    assert listening.listener.stats.restarts == 1


async def test_each_of_several_lives_ends_where_it_did(engine: Engine) -> None:
    listening = await engine.listen(replay=False, options=NARROW)
    expected: list[bytes | None] = []
    for life, numbers in enumerate(([0, 1], [0], [0, 1])):
        if life:
            await engine.restart(listening)
            expected.append(None)
        engine.send(*numbers)
        expected += engine.batches(*numbers)
        waiting = len(expected) - expected.count(None)
        await until(lambda waiting=waiting: engine.space.messages == waiting)
    listening.ready.set()
    await until(lambda: listening.applied == expected)


# ---- libzmq ends the process if a socket has both


def both(options: dict[int, int | bytes]) -> bool:
    return bool(options[zmq.RCVHWM] and options[zmq.HEARTBEAT_IVL])


@pytest.mark.parametrize("options", [HASTY, NARROW, REPLICA_LINK])
def test_no_socket_has_a_receive_bound_and_heartbeats(options) -> None:  # type: ignore[no-untyped-def]
    endpoint = "tcp://127.0.0.1:1"
    for chosen in (socket_options(endpoint, options), asking_options(endpoint, options)):
        assert not both(chosen)  # type: ignore[arg-type]


async def test_a_publisher_has_no_receive_bound(context: zmq.Context) -> None:
    publishing = await open_publisher(context, "127.0.0.1", 0, REPLICA_LINK)
    sock = publishing._socket.socket
    assert (sock.rcvhwm, sock.get(zmq.HEARTBEAT_IVL) > 0) == (0, True)
    publishing._socket.close()


def test_a_socket_with_both_cannot_be_made(context: zmq.Context) -> None:
    with pytest.raises(AssertionError):
        ZSocket(context, zmq.SUB, {zmq.RCVHWM: 10, zmq.HEARTBEAT_IVL: 1000})


def sources() -> Iterator[Path]:
    return (Path(kvd.__file__).parent).rglob("*.py")


def test_all_sockets_are_made_in_one_place() -> None:
    made = {
        path.name
        for path in sources()
        if "socket" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("context.socket")
    }
    assert made == {"zsocket.py"}
