"""Coroutines that run without a task until they want one."""

from __future__ import annotations

import pytest
import trio

from kvd.http.untasked import IN_TASK, Signal, Untasked, has_task, in_task, signalled


async def test_a_coroutine_runs_from_signal_to_signal() -> None:
    first, second = Signal(), Signal()
    seen: list[object] = []

    async def work() -> bool:
        seen.append(has_task())
        await signalled(first)
        seen.append("first")
        await signalled(second)
        return True

    running = Untasked(work())
    assert running.step() is first
    assert has_task()  # the caller of `step` has a task
    assert running.step() is second
    assert seen == [False, "first"]
    with pytest.raises(StopIteration) as end:
        running.step()
    assert end.value.value is True


async def test_the_rest_runs_in_a_task() -> None:
    signal, event = Signal(), trio.Event()

    async def work() -> bool:
        await signalled(signal)
        await in_task()
        assert has_task()
        await in_task()  # already in a task: changes nothing
        with trio.fail_after(5):
            await event.wait()
        return False

    running = Untasked(work())
    assert running.step() is signal
    assert running.step() is IN_TASK
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep, 0)
        event.set()
        assert await running.rest() is False


async def test_cancellation_reaches_the_rest() -> None:
    ended = []

    async def work() -> bool:
        await in_task()
        try:
            await trio.sleep_forever()
        finally:
            ended.append(True)
        return True

    running = Untasked(work())
    assert running.step() is IN_TASK
    with trio.CancelScope() as scope:
        scope.cancel()
        await running.rest()
    assert scope.cancelled_caught
    assert ended


async def test_what_wants_a_task_without_saying_so_fails_at_once() -> None:
    async def work() -> bool:
        with trio.move_on_after(1):
            await trio.lowlevel.checkpoint()
        return True

    with pytest.raises(RuntimeError):
        Untasked(work()).step()
    assert trio.lowlevel.current_task() is not None


async def test_close_ends_a_coroutine_where_it_waits() -> None:
    ended = []

    async def work() -> bool:
        try:
            await signalled(Signal())
        finally:
            ended.append(True)
        return True

    running = Untasked(work())
    running.step()
    running.close()
    assert ended
