"""The time that listeners share."""

from __future__ import annotations

import time
from collections import Counter

import trio
import trio.testing

from kvd.net.turns import ROUND_NS, Turns


def use_up(turns: Turns) -> None:
    """Ends a turn that took all there was."""
    until = time.perf_counter_ns() + ROUND_NS
    while time.perf_counter_ns() <= until:
        pass
    turns.end()


async def test_turns_cost_nothing_while_there_is_time() -> None:
    turns = Turns()
    with trio.testing.assert_no_checkpoints():
        first = await turns.begin()
        turns.end()
        second = await turns.begin()
    assert 0 < second < first == ROUND_NS


async def test_when_it_is_used_up_every_pass_serves_one(nursery: trio.Nursery) -> None:
    """However many have messages, others run between two of them, and all come in order."""
    turns, order, passes = Turns(), [], 0

    async def listener(number: int) -> None:
        assert await turns.begin() > 0
        order.append((number, passes))
        use_up(turns)

    await turns.begin()
    use_up(turns)
    for number in range(5):
        nursery.start_soon(listener, number)
        await trio.lowlevel.checkpoint()
    while len(order) < 5:
        await trio.lowlevel.checkpoint()
        passes += 1
    assert [number for number, _ in order] == list(range(5))
    # Ready tasks run in any order, so the counter may miss a pass between two.
    assert max(Counter(at for _, at in order).values()) <= 2
