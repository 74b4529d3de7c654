"""How long a replay waits for its server, and how much of an answer waits for kvd."""

from __future__ import annotations

from collections import deque
from typing import cast

import trio.testing

from kvd.net.link import LinkOptions
from kvd.net.replay import ReplayOptions, _Allowance, _Answer
from kvd.net.turns import Turns
from kvd.net.zsocket import ZSocket
from kvd.wire.applied_batches import BatchSink
from kvd.wire.event_stream import EventStream
from kvd.wire.replay import ReplayEnd
from kvd_core.index.prefix_index import UNFINISHED
from tests.support.batch_sinks import NoStream

OPTIONS = ReplayOptions()


class Come:
    """A socket with an answer that has come as a whole."""

    def __init__(self, *seqs: int) -> None:
        self._messages = deque([b"", seq.to_bytes(8), b"%d" % seq] for seq in seqs)

    def receive_nowait(self) -> list[bytes] | None:
        return self._messages.popleft() if self._messages else None

    async def wait_readable(self) -> None:
        await trio.sleep_forever()

    def close(self) -> None:
        self._messages.clear()


class Slow(NoStream):
    """Applies each batch in two more slices; a slice takes longer than a replay waits."""

    def __init__(self, clock: trio.testing.MockClock) -> None:
        self._clock = clock
        self._slices = 0

    def apply(self, payload: bytes) -> int:
        self._slices = 2
        return UNFINISHED

    def advance(self) -> int:
        self._clock.jump(2 * OPTIONS.idle_s)
        self._slices -= 1
        return UNFINISHED if self._slices else 0


def gap_of_four(stream: BatchSink) -> EventStream:
    """Returns a stream that lacks the batches before the held one, whose number is 4."""
    listener = EventStream("1:0", "tcp://e:1", stream, "tcp://e:2")
    listener.catch_up.hold(4, b"4")
    listener.catch_up.judge()
    listener.catch_up.begin()
    return listener


def answer_of(come: Come, listener: EventStream, link: LinkOptions) -> _Answer:
    room = _Allowance(OPTIONS)
    return _Answer(cast(ZSocket, come), listener, OPTIONS, link, room, Turns())


async def test_a_server_is_not_silent_while_its_batch_is_applied(
    autojump_clock: trio.testing.MockClock,
) -> None:
    listener = gap_of_four(Slow(autojump_clock))
    answer = answer_of(Come(0, 1, 2, 3), listener, LinkOptions())
    assert await answer.read() is ReplayEnd.REACHED
    assert (listener.stats.replayed, listener.unfinished) == (4, 3)


async def test_what_finds_no_room_to_wait_is_asked_for_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A server that sends faster than kvd applies would fill its memory."""
    listener = gap_of_four(Slow(autojump_clock))
    link = LinkOptions(queue_bytes=17)  # a message has 9
    assert await answer_of(Come(0, 1, 2, 3), listener, link).read() is ReplayEnd.HOLE
    assert listener.stats.replayed == 2
    assert listener.catch_up.wants_more(ReplayEnd.HOLE)
    assert await answer_of(Come(2, 3), listener, LinkOptions()).read() is ReplayEnd.REACHED
    assert listener.stats.replayed == 4
