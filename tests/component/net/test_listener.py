"""A listener over real sockets: batches in order, gaps, endpoints, descriptors."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trio.testing
import zmq

from kvd.net.turns import MAX_TURN_MESSAGES, ROUND_NS
from kvd.wire.event_stream import EventStream
from tests.support.descriptors import descriptors_now, open_descriptors
from tests.support.listening import HASTY, Listening
from tests.support.zmtp_fakes import (
    NOT_MY_FAULT_S,
    Fake,
    Publisher,
    reserved_endpoint,
    serve_fake,
    shake_hands,
    until,
)

Publish = Callable[..., Publisher]
Listen = Callable[..., Listening]


async def test_batches_are_applied_in_order(publish: Publish, listen: Listen) -> None:
    worker = publish()
    listening = listen(worker.endpoint)
    await worker.subscribed()
    await until(listening.is_("active"))
    worker.send(b"a", b"", b"c" * 100_000)
    await until(lambda: len(listening.applied) == 3)
    assert listening.applied == [b"a", b"", b"c" * 100_000]
    listener = listening.listener
    stats = listener.stats
    assert (stats.messages, stats.payload_bytes) == (3, 100_001)
    assert (stats.gaps, stats.stale) == (0, 0)
    assert (listener.connected, listener.stats.joins, listener.link.last_error) == (True, 1, None)


class Spawned(trio.abc.Instrument):
    """The names of tasks that have been started."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        self.names.append(task.name)


async def test_no_task_keeps_messages_where_they_can_be_applied(
    publish: Publish, listen: Listen
) -> None:
    spawned = Spawned()
    trio.lowlevel.add_instrument(spawned)
    worker = publish()
    listening = listen(worker.endpoint)
    await worker.subscribed()
    worker.send(b"a")
    await until(lambda: listening.applied == [b"a"])
    assert not [name for name in spawned.names if name.endswith("._keep")]


async def test_a_worker_may_come_up_later(publish: Publish, listen: Listen) -> None:
    with reserved_endpoint() as endpoint:
        listening = listen(endpoint)
        descriptors = open_descriptors()
        await until(lambda: descriptors_now() != descriptors)  # attempts are under way
        assert listening.is_("pending")()
        worker = publish(endpoint)
        await worker.subscribed()
        worker.send(b"a")
        await until(lambda: listening.applied == [b"a"])
        await until(listening.is_("active"))


@pytest.mark.parametrize("endpoint", ["tcp://[::1]:0", "ipc://{tmp_path}/kv.sock"])
async def test_other_kinds_of_endpoints(
    publish: Publish, listen: Listen, tmp_path: Path, endpoint: str
) -> None:
    worker = publish(endpoint.format(tmp_path=tmp_path))
    listening = listen(worker.endpoint)
    await worker.subscribed()
    worker.send(b"a")
    await until(lambda: listening.applied == [b"a"])
    await until(listening.is_("active"))


async def test_the_end_of_a_subscription_is_said(nursery: trio.Nursery, listen: Listen) -> None:
    received = bytearray()
    over = trio.Event()

    async def talk(stream: trio.SocketStream) -> None:
        await shake_hands(stream)
        async for part in stream:
            received.extend(part)
        over.set()

    fake: Fake = await nursery.start(serve_fake, talk)
    listening = listen(fake.endpoint)
    subscribed, unsubscribed = b"\0\1\1", b"\0\1\0"  # ZMTP 3.0: flags, size, (un)subscribe
    await until(lambda: received == subscribed)
    await listening.stop()
    await over.wait()
    assert received == subscribed + unsubscribed


async def test_gaps_and_stale_batches_are_counted(publish: Publish, listen: Listen) -> None:
    worker = publish()
    listening = listen(worker.endpoint)
    await worker.subscribed()
    for seq in (0, 1, 4, 4, 2, 5, 10):
        worker.seq = seq
        worker.send(b"%d" % seq)
    await until(lambda: listening.listener.stats.messages == 7)
    assert listening.applied == [b"0", b"1", b"4", b"5", b"10"]
    listener = listening.listener
    assert (listener.stats.gaps, listener.stats.lost, listener.stats.stale) == (2, 6, 2)


async def test_wrong_shapes_are_counted_and_leave_the_stream_alone(
    publish: Publish, listen: Listen
) -> None:
    worker = publish()
    listening = listen(worker.endpoint)
    await worker.subscribed()
    worker.send(b"a")
    worker.send_frames(b"kv")
    worker.send_frames(b"kv", bytes(8))
    worker.send_frames(b"kv", bytes(4), b"x")
    worker.send_frames(b"kv", bytes(8), b"x", b"")
    worker.send(b"b")
    await until(lambda: listening.listener.stats.messages == 2)
    assert listening.applied == [b"a", b"b"]
    assert listening.listener.stats.bad_frames == {"frame_count": 3, "sequence_length": 1}
    assert (listening.listener.stats.gaps, listening.listener.status) == (0, "active")


async def test_before_the_gate_opens_messages_wait(publish: Publish, listen: Listen) -> None:
    worker = publish()
    listening = listen(worker.endpoint, gate=False)
    await worker.subscribed()
    worker.send(*(b"%d" % i for i in range(3000)))
    await until(lambda: listening.listener.connected)
    assert (listening.is_("pending")(), listening.applied) == (True, [])
    listening.ready.set()
    await until(lambda: len(listening.applied) == 3000)
    assert (listening.is_("active")(), listening.listener.stats.gaps) == (True, 0)


async def test_a_connected_listener_has_one_task(publish: Publish, listen: Listen) -> None:
    async def tasks() -> int:
        await trio.testing.wait_all_tasks_blocked()
        return trio.lowlevel.current_statistics().tasks_living

    workers = [publish() for _ in range(4)]
    counts = []
    for worker in workers:
        listening = listen(worker.endpoint)
        await until(listening.is_("active"))
        counts.append(await tasks())
    assert counts == list(range(counts[0], counts[0] + len(workers)))


async def test_listeners_do_not_mix(publish: Publish, listen: Listen) -> None:
    workers = [publish(), publish()]
    listening = [listen(worker.endpoint) for worker in workers]
    for worker in workers:
        await worker.subscribed()
    workers[0].send(b"a", b"b")
    workers[1].send(b"c")
    await until(lambda: len(listening[0].applied) == 2 and len(listening[1].applied) == 1)
    workers[0].close()
    await until(lambda: not listening[0].listener.connected)
    workers[1].send(b"d")
    await until(lambda: listening[1].applied == [b"c", b"d"])
    assert listening[0].applied == [b"a", b"b"]


async def test_connections_that_cannot_be_read_cost_no_descriptors(listen: Listen) -> None:
    """No message can have a negative size: this stands for a connection without memory."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        unreadable = replace(HASTY, max_message_bytes=-1)
        listening = listen(f"tcp://127.0.0.1:{server.getsockname()[1]}", options=unreadable)
        stats = listening.listener.stats
        await until(lambda: stats.crashes > 0)
        crashes, descriptors = stats.crashes, open_descriptors()
        await until(lambda: stats.crashes >= crashes + 5)
        assert open_descriptors() <= descriptors + 1  # the next connection may be under way


async def test_a_worker_that_comes_and_goes_costs_no_descriptors(
    publish: Publish, listen: Listen
) -> None:
    worker = publish()
    listening = listen(worker.endpoint)
    listener = listening.listener
    await worker.subscribed()
    await until(lambda: listener.connected)
    descriptors = open_descriptors()
    for life in range(1, 11):
        worker.close()
        await until(lambda: not listener.connected)
        assert (listener.status, listener.stats.losses) == ("active", life)
        assert listener.link.last_error == f"connection lost: {worker.endpoint}"
        assert listener.link.disconnected_since is not None
        worker = await revive(publish, worker)
        await worker.subscribed()
        await until(lambda: listener.connected)
        assert (listener.link.last_error, listener.link.disconnected_since) == (None, None)
        worker.seq = life
        worker.send(b"alive")
        await until(lambda: len(listening.applied) == listener.stats.losses)
    await until(lambda: descriptors_now() <= descriptors)
    assert (listener.stats.joins, listener.stats.failures) == (11, 0)


async def revive(publish: Publish, dead: Publisher) -> Publisher:
    """Binds to the same address again, which libzmq frees only some time after the close."""
    with trio.fail_after(NOT_MY_FAULT_S):
        while True:
            try:
                return publish(dead.endpoint)
            except zmq.ZMQError as error:
                assert error.errno == errno.EADDRINUSE
                await trio.sleep(0.005)


async def test_a_burst_leaves_room_for_other_tasks(
    publish: Publish, listen: Listen, nursery: trio.Nursery
) -> None:
    worker = publish()
    listening = listen(worker.endpoint, gate=False)
    await worker.subscribed()
    worker.send(*[b"x" * 100] * 5000)
    await until(lambda: listening.listener.connected)
    await applied_between_turns(listening, nursery, 5000, at_most=2 * MAX_TURN_MESSAGES)


async def test_slow_batches_leave_room_for_other_tasks(
    publish: Publish, listen: Listen, nursery: trio.Nursery
) -> None:
    worker = publish()
    listening = listen(worker.endpoint, gate=False)
    await worker.subscribed()
    worker.send(*[b"x"] * 20)
    await until(lambda: listening.listener.connected)

    def take_long() -> None:
        start = time.perf_counter()
        while time.perf_counter() - start < 2 * ROUND_NS / 1e9:
            pass

    await applied_between_turns(listening, nursery, 20, at_most=2, work=take_long)


async def applied_between_turns(
    listening: Listening,
    nursery: trio.Nursery,
    messages: int,
    at_most: int,
    work: Callable[[], None] = lambda: None,
) -> None:
    """Lets `messages` come and checks how many are applied between two turns of another task."""
    since_turn = most = total = 0

    def apply(_: bytes) -> None:
        nonlocal since_turn, most, total
        work()
        total += 1
        since_turn += 1
        most = max(most, since_turn)

    listening.stream.on_batch = apply
    listening.ready.set()
    with trio.fail_after(NOT_MY_FAULT_S):
        while total < messages:
            since_turn = 0
            await trio.lowlevel.checkpoint()
    # Two ready tasks have one turn each per round, in any order, so one may have two in a row.
    assert 0 < most <= at_most


async def test_a_bug_costs_its_batch_and_the_stream_says_so(
    publish: Publish, listen: Listen, caplog: pytest.LogCaptureFixture
) -> None:
    def poisoned(payload: bytes) -> None:
        if payload == b"poison":
            raise LookupError("a bug")
        listening.applied.append(payload)

    worker = publish()
    listening = listen(worker.endpoint)
    listening.stream.on_batch = poisoned
    await worker.subscribed()
    worker.send(b"a")
    await until(lambda: listening.applied == [b"a"])
    worker.send(b"poison")
    await until(lambda: listening.listener.stats.crashes == 1)
    assert listening.listener.loss == "an internal error"
    await worker.subscribed()  # over a new socket
    worker.send(b"b")
    await until(lambda: listening.applied == [b"a", b"b"])
    assert any(record.exc_info for record in caplog.records)


async def test_a_bug_in_the_check_for_silence_costs_the_connection(
    monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery, publish: Publish, listen: Listen
) -> None:
    def lost_connection(stream: EventStream, why: str, now: float) -> None:
        raise LookupError("a bug")

    async def talk(stream: trio.SocketStream) -> None:
        await shake_hands(stream, version=b"\3\1")  # it would answer a PING, if it were not frozen
        async for _ in stream:
            pass

    monkeypatch.setattr(EventStream, "lost_connection", lost_connection)
    fake: Fake = await nursery.start(serve_fake, talk)
    frozen, worker = listen(fake.endpoint), publish()
    fine = listen(worker.endpoint)
    await worker.subscribed()
    await until(lambda: frozen.listener.stats.crashes == 2)  # it has connected again
    worker.send(b"a")
    await until(lambda: fine.applied == [b"a"])
    assert (fine.listener.stats.joins, fine.listener.stats.crashes) == (1, 0)


async def test_a_bug_that_comes_again_and_again_leaves_other_listeners_alone(
    publish: Publish, listen: Listen
) -> None:
    def poisoned(payload: bytes) -> None:
        raise LookupError("a bug")

    worker, another = publish(), publish()
    listening, fine = listen(worker.endpoint), listen(another.endpoint)
    listening.stream.on_batch = poisoned
    await another.subscribed()
    for times in range(1, 4):
        await worker.subscribed()
        worker.send(b"poison")
        await until(lambda times=times: listening.listener.stats.failures == times)
        assert listening.listener.stats.crashes == times
        assert listening.listener.link.last_error == "internal error"  # until it connects again
        another.send(b"a")
        await until(lambda times=times: fine.applied == [b"a"] * times)
    assert (fine.listener.stats.failures, fine.listener.stats.lost) == (0, 0)


class TestCancelled:
    """A listener ends at once whatever it is doing, and leaves no descriptor behind."""

    async def test_before_the_worker_is_there(self, listen: Listen) -> None:
        with reserved_endpoint() as endpoint:
            await self.start_and_stop(listen, endpoint, lambda listening: True)

    async def test_before_the_gate_opens(self, publish: Publish, listen: Listen) -> None:
        await self.start_and_stop(
            listen, publish().endpoint, lambda listening: listening.listener.connected, gate=False
        )

    async def test_while_waiting(self, publish: Publish, listen: Listen) -> None:
        await self.start_and_stop(
            listen, publish().endpoint, lambda listening: listening.is_("active")()
        )

    async def test_between_two_attempts(self, listen: Listen) -> None:
        await self.start_and_stop(
            listen, "tcp://*:5557", lambda listening: listening.is_("failed")()
        )

    async def test_in_the_midst_of_messages(self, publish: Publish, listen: Listen) -> None:
        worker = publish()
        await self.fail_once(listen)
        before = open_descriptors()
        listening = listen(worker.endpoint, gate=False)
        await worker.subscribed()
        worker.send(*[b"x"] * 1000)
        await until(lambda: listening.listener.connected)
        listening.stream.on_batch = lambda payload: listening.scope.cancel()
        listening.ready.set()
        with trio.fail_after(NOT_MY_FAULT_S):
            await listening.ended.wait()
        assert 0 < listening.listener.stats.messages <= MAX_TURN_MESSAGES
        await until(lambda: descriptors_now() <= before)

    async def test_while_connecting_it_does_not_stall_the_others(
        self, publish: Publish, listen: Listen
    ) -> None:
        """libzmq's I/O thread serves all sockets; a monitor that nobody reads would block it."""
        worker = publish()
        other = listen(worker.endpoint)
        await worker.subscribed()
        with reserved_endpoint() as endpoint:
            for _ in range(100):
                await listen(endpoint).stop()
        worker.send(b"a")
        await until(lambda: other.applied == [b"a"])

    async def start_and_stop(
        self,
        listen: Listen,
        endpoint: str,
        reached: Callable[[Listening], bool],
        gate: bool = True,
    ) -> None:
        await self.fail_once(listen)
        before = open_descriptors()
        listening = listen(endpoint, gate=gate)
        await until(lambda: reached(listening))
        await listening.stop()
        await until(lambda: descriptors_now() <= before)

    async def fail_once(self, listen: Listen) -> None:
        """Fails once, so that all descriptors that stay open for good are open."""
        first = listen("ipc://" + "x" * 200)  # too long
        await until(first.is_("failed"))
        await first.stop()
