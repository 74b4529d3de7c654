"""A supervisor runs one child task for each key, and waits for it to end."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from kvd.net.supervisor import Supervisor


async def test_a_child_runs_until_it_is_stopped(nursery: trio.Nursery) -> None:
    supervisor: Supervisor[str] = Supervisor(nursery)
    steps: list[str] = []

    async def child() -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.testing.wait_all_tasks_blocked()
            steps.append("cleaned up")

    supervisor.start("a", child)
    await trio.testing.wait_all_tasks_blocked()
    assert ("a" in supervisor, "b" in supervisor, len(supervisor)) == (True, False, 1)
    await supervisor.stop("a")
    assert steps == ["cleaned up"]
    assert "a" not in supervisor


async def test_children_are_stopped_one_by_one(nursery: trio.Nursery) -> None:
    supervisor: Supervisor[tuple[int, int]] = Supervisor(nursery)
    for rank in range(3):
        supervisor.start((1, rank), trio.sleep_forever)
    await supervisor.stop((1, 1))
    await supervisor.stop((1, 7))
    assert set(supervisor.keys()) == {(1, 0), (1, 2)}
    for key in list(supervisor.keys()):
        await supervisor.stop(key)
    assert len(supervisor) == 0


async def test_a_key_is_free_only_when_its_child_has_ended(nursery: trio.Nursery) -> None:
    supervisor: Supervisor[str] = Supervisor(nursery)
    supervisor.start("a", trio.sleep_forever)
    with pytest.raises(KeyError):
        supervisor.start("a", trio.sleep_forever)
    await supervisor.stop("a")
    supervisor.start("a", trio.sleep_forever)
    await supervisor.stop("a")


async def test_several_may_wait_for_the_same_end(nursery: trio.Nursery) -> None:
    supervisor: Supervisor[str] = Supervisor(nursery)
    supervisor.start("a", trio.sleep_forever)
    async with trio.open_nursery() as stoppers:
        for _ in range(3):
            stoppers.start_soon(supervisor.stop, "a")
    assert "a" not in supervisor


async def test_a_child_that_returns_is_forgotten(nursery: trio.Nursery) -> None:
    supervisor: Supervisor[str] = Supervisor(nursery)
    supervisor.start("a", trio.lowlevel.checkpoint)
    await trio.testing.wait_all_tasks_blocked()
    assert "a" not in supervisor


async def test_what_a_child_raises_ends_the_nursery() -> None:
    async def broken() -> None:
        raise LookupError("a bug")

    with pytest.raises(ExceptionGroup) as caught:
        async with trio.open_nursery() as nursery:
            supervisor: Supervisor[str] = Supervisor(nursery)
            supervisor.start("other", trio.sleep_forever)
            supervisor.start("broken", broken)
    assert caught.group_contains(LookupError)
    assert len(supervisor) == 0
