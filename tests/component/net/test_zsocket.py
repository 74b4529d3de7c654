"""ZMQ sockets under trio: waiting, cancelling, closing."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio
import trio.testing
import zmq

from kvd.net.zsocket import ZSocket
from tests.support.zmtp_fakes import NOT_MY_FAULT_S

Pair = tuple[ZSocket, ZSocket]


@pytest.fixture
async def pair(context: zmq.Context) -> AsyncIterator[Pair]:
    left, right = (ZSocket(context, zmq.PAIR, {zmq.RCVHWM: 5}) for _ in range(2))
    left.socket.bind("tcp://127.0.0.1:0")
    right.socket.connect(left.socket.last_endpoint)
    yield left, right
    left.close()
    right.close()


async def receive_all(socket: ZSocket, received: list[list[bytes]]) -> None:
    while received[-1:] != [[b"end"]]:
        received.append(await socket.receive())


async def test_receive_waits_for_messages(pair: Pair) -> None:
    left, right = pair
    received: list[list[bytes]] = []
    with trio.fail_after(NOT_MY_FAULT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive_all, left, received)
            await trio.testing.wait_all_tasks_blocked()
            assert received == []
            for frames in ([b"a"], [b"b", b"", b"c"], [b"end"]):
                right.socket.send_multipart(frames)
    assert received == [[b"a"], [b"b", b"", b"c"], [b"end"]]


async def test_messages_that_come_while_sending_wake_the_receiver(pair: Pair) -> None:
    """A send consumes libzmq's only signal for arrivals; the receiver must not rely on it."""
    left, right = pair
    received: list[list[bytes]] = []
    with trio.fail_after(NOT_MY_FAULT_S):
        for i in range(20):
            right.socket.send(b"answer")
            left.socket.send(b"%d" % i)
            received.append(await left.receive())
            assert await right.receive() == [b"%d" % i]
    assert received == [[b"answer"]] * 20


async def test_a_cancelled_receive_takes_nothing(pair: Pair) -> None:
    left, right = pair
    with trio.move_on_after(0):
        await left.receive()
    right.socket.send(b"a")
    with trio.fail_after(NOT_MY_FAULT_S):
        assert await left.receive() == [b"a"]


async def test_closing_wakes_who_waits(pair: Pair) -> None:
    left, _ = pair
    with trio.fail_after(NOT_MY_FAULT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(closed_while_receiving, left)
            await trio.testing.wait_all_tasks_blocked()
            left.close()


async def closed_while_receiving(socket: ZSocket) -> None:
    with pytest.raises(trio.ClosedResourceError):
        await socket.receive()


async def test_unsent_messages_do_not_hold_up_the_end(context: zmq.Context) -> None:
    socket = ZSocket(context, zmq.PUSH, {})
    socket.socket.connect("tcp://127.0.0.1:1")
    socket.socket.send(b"never")
    socket.close()
    await trio.to_thread.run_sync(context.term)


async def test_there_is_room_for_thousands_of_listeners(context: zmq.Context) -> None:
    sockets = [ZSocket(context, zmq.SUB, {}) for _ in range(1100)]  # libzmq's default limit is 1023
    for socket in sockets:
        socket.close()
