"""How long a replay waits for its server."""

from __future__ import annotations

from collections import deque
from typing import cast

import trio.testing

from kvd.net.replay import ReplayOptions, _Allowance, _Answer
from kvd.net.turns import Turns
from kvd.net.zsocket import ZSocket
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


async def test_a_server_is_not_silent_while_its_batch_is_applied(
    autojump_clock: trio.testing.MockClock,
) -> None:
    listener = EventStream("1:0", "tcp://e:1", Slow(autojump_clock), "tcp://e:2")
    catch_up = listener.catch_up
    catch_up.hold(4, b"4")
    catch_up.judge()
    catch_up.begin()
    come = cast(ZSocket, Come(0, 1, 2, 3))
    answer = _Answer(come, listener, OPTIONS.idle_s, _Allowance(OPTIONS), Turns())
    assert await answer.read() is ReplayEnd.REACHED
    assert (listener.stats.replayed, listener.unfinished) == (4, 3)
