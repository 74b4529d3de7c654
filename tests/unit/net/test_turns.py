"""The time of a pass that listeners share."""

from __future__ import annotations

from collections import Counter

import pytest
import trio
import trio.testing

from kvd.net.turns import ROUND_NS, Turns


class Clock:
    """A clock that the test sets."""

    now_ns = 5

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def test_turns_cost_nothing_while_there_is_time(clock: Clock) -> None:
    turns = Turns(clock_ns=clock)
    with trio.testing.assert_no_checkpoints():
        assert await turns.begin() == ROUND_NS
        clock.now_ns += 100
        turns.end()
        assert await turns.begin() == ROUND_NS - 100


async def test_a_round_is_renewed_with_all_its_time(clock: Clock) -> None:
    turns = Turns(10, clock)
    assert await turns.begin() == 10
    clock.now_ns += 30
    turns.end()
    with trio.testing.assert_checkpoints():
        assert await turns.begin() == 10


async def test_when_it_is_used_up_every_pass_serves_one(
    nursery: trio.Nursery, clock: Clock
) -> None:
    """However many listeners have messages, others run between two of them, and order is kept."""
    turns, order, passes = Turns(clock_ns=clock), [], 0

    def use_up() -> None:
        clock.now_ns += ROUND_NS
        turns.end()

    async def listener(number: int) -> None:
        assert await turns.begin() > 0
        order.append((number, passes))
        use_up()

    await turns.begin()
    use_up()
    for number in range(5):
        nursery.start_soon(listener, number)
        await trio.lowlevel.checkpoint()
    while len(order) < 5:
        await trio.lowlevel.checkpoint()
        passes += 1
    assert [number for number, _ in order] == list(range(5))
    # Ready tasks run in any order, so the counter may miss a pass between two.
    assert max(Counter(at for _, at in order).values()) <= 2
