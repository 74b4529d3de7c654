"""Draining a ZMQ socket: frames of any shape, within bounds of messages and time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import zmq

from kvd.net.zsocket import ZSocket
from kvd_core.zmq.drain import (
    BAD_FRAME_COUNT,
    BAD_NUMBER,
    BAD_SEQUENCE,
    Inbox,
    InboxSpace,
    fill,
    fill_frames,
)
from tests.support.zmtp_fakes import Publisher, until

FOREVER_NS = 10**12
LAST_SEQ = 2**64 - 2  # the next one marks the end of a replay


class Sink:
    """An inbox, and the messages that were taken from it or refused."""

    def __init__(self) -> None:
        self.inbox = Inbox(InboxSpace())
        self.taken: list[tuple[int, bytes]] = []
        self.refused: list[str] = []
        self.speaker = b""
        self.met: list[tuple[int, bytes]] = []  # publishers, with how many were taken before each

    def fill(self, sub: ZSocket, max_messages: int = 1000, budget_ns: int = FOREVER_NS) -> bool:
        socket = sub.socket.underlying
        return fill(self.inbox, socket, self.refused.append, max_messages, budget_ns)

    def take(self, seq: int, payload: bytes) -> None:
        self.taken.append((seq, payload))

    def drain(self, max_messages: int = 1000, budget_ns: int = FOREVER_NS) -> bool:
        return self.inbox.drain(self.take, max_messages, budget_ns, self.speaker, self.meet)

    def meet(self, publisher: bytes) -> None:
        self.speaker = publisher
        self.met.append((len(self.taken), publisher))


@pytest.fixture
async def pair(
    context: zmq.Context, publish: Callable[..., Publisher]
) -> tuple[Publisher, ZSocket]:
    worker = publish()
    sub = ZSocket(context, zmq.SUB, {zmq.SUBSCRIBE: b""})
    sub.socket.connect(worker.endpoint)
    await worker.subscribed()
    return worker, sub


async def fill_until(sub: ZSocket, sink: Sink, messages: int) -> None:
    def filled() -> bool:
        assert sink.fill(sub) is False
        return sink.inbox.pushed + len(sink.refused) >= messages

    await until(filled)


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
        *(([b"", bytes(n), b"p"], BAD_SEQUENCE) for n in range(9, 65) if n != 24),
        ([b"", (LAST_SEQ + 1).to_bytes(8), b"p"], BAD_NUMBER),
        ([b"", (LAST_SEQ + 1).to_bytes(8) + bytes(16), b"p"], BAD_NUMBER),
        ([b"", (3).to_bytes(8) + bytes(16), b"p"], (3, b"p")),
        ([b"", (1).to_bytes(8), b"end"], (1, b"end")),
    ]
    for frames, _ in sent:
        worker.send_frames(*frames)
    sink = Sink()
    await fill_until(sub, sink, len(sent))
    assert sink.drain() is False
    assert sink.taken == [event for _, event in sent if isinstance(event, tuple)]
    assert sink.refused == [event for _, event in sent if isinstance(event, str)]


async def test_it_stops_after_so_many_messages_or_so_much_time(
    pair: tuple[Publisher, ZSocket],
) -> None:
    worker, sub = pair
    worker.send(b"0", b"1")
    worker.send_frames(b"bad")
    worker.send(b"2", b"3", b"4")
    sink = Sink()
    await until(lambda: sub.socket.poll(0))
    await until(lambda: sink.fill(sub, max_messages=1) and sink.inbox.pushed == 2)
    await until(lambda: sink.fill(sub, budget_ns=0) and sink.inbox.pushed == 3)
    assert sink.refused == [BAD_FRAME_COUNT]
    await fill_until(sub, sink, 6)
    assert sink.drain(max_messages=2)
    assert sink.taken == [(0, b"0"), (1, b"1")]
    assert sink.drain(budget_ns=0)
    assert sink.taken[2:] == [(2, b"2")]
    assert sink.drain() is False
    assert sink.taken[3:] == [(3, b"3"), (4, b"4")]


async def test_frames_of_any_shape(pair: tuple[Publisher, ZSocket]) -> None:
    worker, sub = pair
    sent = [[b""], [b"topic", b"", b"x" * 100_000], [b"%d" % number for number in range(8)]]
    for frames in [*sent, [b"%d" % number for number in range(20)], [b"behind it"]]:
        worker.send_frames(*frames)
    inbox = Inbox(InboxSpace())

    def cut() -> bool:
        fill_frames(inbox, sub.socket.underlying, 8, 1000, FOREVER_NS)
        return inbox.cut

    await until(cut)
    taken = [inbox.take_frames() for _ in range(5)]
    assert taken == [*sent, [b"%d" % number for number in range(9)], None]
    assert fill_frames(inbox, sub.socket.underlying, 8, 1000, FOREVER_NS) is False
    assert inbox.take_frames() is None


def test_a_raising_taker_loses_that_message_only() -> None:
    sink = Sink()
    sink.inbox.push(0, b"0")
    sink.inbox.push(1, b"1")

    def broken(seq: int, payload: bytes) -> None:
        raise LookupError(seq)

    with pytest.raises(LookupError):
        sink.inbox.drain(broken, 1000, FOREVER_NS, b"", sink.meet)
    sink.drain()
    assert sink.taken == [(1, b"1")]


async def test_a_closed_socket_is_refused(pair: tuple[Publisher, ZSocket]) -> None:
    _, sub = pair
    sub.close()
    with pytest.raises(ValueError, match="closed"):
        Sink().fill(sub)


def test_a_socket_that_cannot_receive_is_a_zmq_error(context: zmq.Context) -> None:
    sink = Sink()
    with context.socket(zmq.PUB) as pub:
        for call in (
            lambda: fill(sink.inbox, pub.underlying, sink.refused.append, 1, FOREVER_NS),
            lambda: fill_frames(sink.inbox, pub.underlying, 8, 1, FOREVER_NS),
        ):
            with pytest.raises(zmq.ZMQError):
                call()
