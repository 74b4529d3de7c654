from __future__ import annotations

from collections.abc import Callable

import pytest
import zmq
from zmtp_fakes import Publisher, until

from kvd.net.zsocket import ZSocket
from kvd_core.drain import BAD_FRAME_COUNT, BAD_SEQUENCE, drain

FOREVER_NS = 10**12
LAST_SEQ = 2**64 - 1


class Sink:
    def __init__(self) -> None:
        self.events: list[tuple[int, bytes] | str] = []

    def take(self, seq: int, payload: bytes) -> None:
        self.events.append((seq, payload))

    def refuse(self, reason: str) -> None:
        self.events.append(reason)


@pytest.fixture
async def pair(
    context: zmq.Context, publish: Callable[..., Publisher]
) -> tuple[Publisher, ZSocket]:
    worker = publish()
    sub = ZSocket(context, zmq.SUB, {zmq.SUBSCRIBE: b""})
    sub.socket.connect(worker.endpoint)
    await worker.subscribed()
    return worker, sub


def run(sub: ZSocket, sink: Sink, max_messages: int = 1000, budget_ns: int = FOREVER_NS) -> bool:
    return drain(sub.socket.underlying, sink.take, sink.refuse, max_messages, budget_ns)


async def drain_until(sub: ZSocket, sink: Sink, events: int) -> None:
    def drained() -> bool:
        assert run(sub, sink) is False
        return len(sink.events) >= events

    await until(drained)


async def test_every_shape(pair: tuple[Publisher, ZSocket]) -> None:
    worker, sub = pair
    sent: list[tuple[list[bytes], tuple[int, bytes] | str]] = [
        ([b"", bytes(8), b""], (0, b"")),
        ([b"t" * 300, LAST_SEQ.to_bytes(8), b"p"], (LAST_SEQ, b"p")),
        ([b"t", (0x0102030405060708).to_bytes(8), b"\0" * 40], (0x0102030405060708, b"\0" * 40)),
        ([b"t", (7).to_bytes(8), b"x" * 1_000_000], (7, b"x" * 1_000_000)),
        ([b""], BAD_FRAME_COUNT),
        ([b"", b""], BAD_FRAME_COUNT),
        ([b"", bytes(8), b"p", b""], BAD_FRAME_COUNT),
        ([b"", bytes(8), b"p"] * 5, BAD_FRAME_COUNT),
        ([b"", b"", b"p"], BAD_SEQUENCE),
        ([b"", bytes(7), b"p"], BAD_SEQUENCE),
        ([b"", bytes(9), b"p"], BAD_SEQUENCE),
        ([b"", (1).to_bytes(8), b"end"], (1, b"end")),
    ]
    for frames, _ in sent:
        worker.send_frames(*frames)
    sink = Sink()
    await drain_until(sub, sink, len(sent))
    assert sink.events == [event for _, event in sent]


async def test_it_stops_after_so_many_messages_or_so_much_time(
    pair: tuple[Publisher, ZSocket],
) -> None:
    worker, sub = pair
    worker.send(b"0", b"1")
    worker.send_frames(b"bad")
    worker.send(b"2", b"3", b"4")
    sink = Sink()
    await until(lambda: sub.socket.poll(0))
    await until(lambda: run(sub, sink, max_messages=1) and len(sink.events) == 2)
    await until(lambda: run(sub, sink, budget_ns=0) and len(sink.events) == 4)
    await drain_until(sub, sink, 6)
    assert sink.events == [(0, b"0"), (1, b"1"), BAD_FRAME_COUNT, (2, b"2"), (3, b"3"), (4, b"4")]


async def test_a_raising_taker_loses_that_message_only(pair: tuple[Publisher, ZSocket]) -> None:
    worker, sub = pair
    worker.send(b"0", b"1")
    sink = Sink()

    def broken(seq: int, payload: bytes) -> None:
        raise LookupError(seq)

    await until(lambda: sub.socket.poll(0))
    with pytest.raises(LookupError):
        drain(sub.socket.underlying, broken, sink.refuse, 1000, FOREVER_NS)
    await drain_until(sub, sink, 1)
    assert sink.events == [(1, b"1")]


async def test_a_closed_socket_is_refused(pair: tuple[Publisher, ZSocket]) -> None:
    _, sub = pair
    sub.close()
    with pytest.raises(ValueError, match="closed"):
        run(sub, Sink())


def test_a_socket_that_cannot_receive_is_a_zmq_error(context: zmq.Context) -> None:
    with context.socket(zmq.PUB) as pub, pytest.raises(zmq.ZMQError):
        drain(pub.underlying, Sink().take, Sink().refuse, 1, FOREVER_NS)
