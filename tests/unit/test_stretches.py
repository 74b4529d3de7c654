"""Each busy stretch of the loop is measured, and counted once under its main cause."""

from __future__ import annotations

import gc
import select
import types
import weakref
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import suppress
from time import perf_counter

import pytest
import trio

from kvd.telemetry.metrics import render, stretch_families
from kvd.telemetry.stretches import (
    BOUNDS,
    CAUSES,
    COLLECTOR,
    DUMP,
    EVENTS,
    OTHER,
    REQUESTS,
    StretchStats,
    stretch_counts,
    stretches_counted,
)
from tests.support.exposition import parse

WORK_S = 0.001  # longer than anything else in a stretch, unless the machine is busy


@pytest.fixture
async def counted() -> AsyncIterator[None]:
    with stretches_counted():
        await trio.lowlevel.checkpoint()
        yield


def counts() -> dict[str, int]:
    return {each.cause: sum(each.buckets) for each in stretch_counts()}


def of(cause: str) -> StretchStats:
    return next(each for each in stretch_counts() if each.cause == cause)


def work() -> None:
    end = perf_counter() + WORK_S
    while perf_counter() < end:
        pass


async def counts_as(cause: str, job: Callable[[], None]) -> None:
    """Does a job in one stretch after the other, until one is counted under `cause`."""
    before = counts().get(cause, 0)
    while counts().get(cause, 0) == before:
        job()
        await trio.lowlevel.checkpoint()


def dumps_in_a_request() -> None:
    with REQUESTS:
        with DUMP:
            work()
            work()
        work()


def requests_with_a_dump() -> None:
    with REQUESTS:
        with DUMP:
            work()
        work()
        work()


def collects() -> None:
    gc.disable()
    kept: list[list[object]] = [[] for _ in range(20_000)]
    gc.enable()
    with DUMP:
        gc.collect()
    del kept


def deep(levels: int = 40) -> None:
    with EVENTS if levels % 2 else REQUESTS:
        if levels:
            deep(levels - 1)
    if levels == 40:
        work()


@pytest.mark.parametrize(
    ("cause", "job"),
    [
        ("other", work),
        ("dump", dumps_in_a_request),
        ("requests", requests_with_a_dump),
        ("other", deep),
    ],
)
async def test_the_main_cause_has_the_stretch(
    counted: None, cause: str, job: Callable[[], None]
) -> None:
    await counts_as(cause, job)


@pytest.mark.slow("a whole collection of the test process")
async def test_the_collector_is_a_cause_wherever_it_runs(counted: None) -> None:
    await counts_as("collector", collects)


async def test_a_stretch_is_counted_once(counted: None) -> None:
    before = sum(counts().values())
    for _ in range(10):
        with EVENTS:
            work()
        await trio.lowlevel.checkpoint()
    assert sum(counts().values()) == before + 10


async def test_the_longest_is_remembered(counted: None) -> None:
    await counts_as("dump", dumps_in_a_request)
    found = of("dump")
    assert WORK_S < found.longest_s <= found.seconds
    assert found.longest_age_s >= 0
    assert 0 < found.longest_cpu_s <= found.longest_s
    bounds = [*BOUNDS, float("inf")]
    assert found.longest_s <= bounds[max(i for i, n in enumerate(found.buckets) if n)]


async def test_what_did_not_run_is_no_cpu_time_of_the_longest(counted: None) -> None:
    def stands_still() -> None:
        with DUMP:
            select.select([], [], [], 20 * WORK_S)

    await counts_as("dump", stands_still)
    found = of("dump")
    assert found.longest_cpu_s < found.longest_s


async def test_each_step_of_a_coroutine(counted: None) -> None:
    async def three_steps() -> str:
        for _ in range(2):
            work()
            await trio.lowlevel.checkpoint()
        work()
        return "done"

    before = counts().get("events", 0)
    while counts().get("events", 0) == before:
        assert await EVENTS.steps_of(three_steps()) == "done"


async def test_what_a_coroutine_raises_and_is_thrown() -> None:
    seen: list[str] = []

    async def fails() -> None:
        raise ValueError("no")

    async def waits() -> None:
        try:
            await trio.sleep_forever()
        finally:
            seen.append("cancelled")

    with pytest.raises(ValueError, match="no"):
        await EVENTS.steps_of(fails())
    with trio.move_on_after(0) as scope:
        await EVENTS.steps_of(waits())
    assert scope.cancelled_caught
    assert seen == ["cancelled"]


async def test_a_coroutine_hears_what_it_waited_for() -> None:
    send, receive = trio.open_memory_channel[int](0)

    async def takes() -> int:
        return await receive.receive() + await receive.receive()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send.send, 1)
        nursery.start_soon(send.send, 2)
        assert await DUMP.steps_of(takes()) == 3


@types.coroutine
def trap() -> Generator[None, object, None]:
    yield


class Sent:
    """What a coroutine is sent."""


class Thrown(Exception):
    """What a coroutine is thrown."""


def test_nothing_of_an_earlier_wait_stays_alive() -> None:
    """A cancellation would keep all its frames, for as long as a listener rests."""

    async def rests() -> None:
        with suppress(Thrown):
            await trap()
        await trap()

    for kind, resume in ((Sent, "send"), (Thrown, "throw")):
        steps = EVENTS.steps_of(rests()).__await__()
        next(steps)
        given = kind()
        earlier = weakref.ref(given)
        getattr(steps, resume)(given)
        del given
        assert earlier() is None
        steps.close()


def test_each_item() -> None:
    def items() -> list[int]:
        return list(DUMP.each(iter(range(3))))

    assert items() == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        list(DUMP.each(1 // n for n in (1, 0)))


async def test_what_another_thread_collects_is_none_of_the_loops(counted: None) -> None:
    gc.disable()
    before = counts().get(COLLECTOR.name, 0)
    await trio.to_thread.run_sync(gc.collect, 0)
    gc.enable()
    assert counts().get(COLLECTOR.name, 0) == before


async def test_what_metrics_say(counted: None) -> None:
    await counts_as("dump", dumps_in_a_request)
    samples = parse(b"".join(render(stretch_families())).decode())
    name = "kvd_loop_stretch_seconds"
    assert samples[f'{name}_count{{cause="dump"}}'] == sum(of("dump").buckets)
    assert samples[f'{name}_bucket{{cause="dump",le="+Inf"}}'] == sum(of("dump").buckets)
    assert samples['kvd_loop_longest_stretch_seconds{cause="dump"}'] > WORK_S
    assert samples['kvd_loop_longest_stretch_age_seconds{cause="dump"}'] >= 0
    assert samples['kvd_loop_longest_stretch_cpu_seconds{cause="dump"}'] > 0


def test_names_are_one_each() -> None:
    assert len({cause.name for cause in CAUSES}) == len(CAUSES) == 12
    assert CAUSES[0] is OTHER
