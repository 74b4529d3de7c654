"""Replicas on a server that fails in every way: once it works again, all come to agree.

Each seed is a run of its own, in virtual time. Requests are booked through any replica, go on and
end through others. The server freezes, goes away, is emptied, trims, loses its last writes, or cuts
a connection off. Replicas are killed and come back empty, or with their requests. If no replica was
killed, all have exactly the live requests of a plain model; if all came back with their requests,
all have at least these. In a storm the server is killed with its data, and replicas with it, again
and again: what a state directory restores is enough for all to have exactly the live requests.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Awaitable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from kvd.persistence.bookings import SharedPoint
from kvd.shared_state import mirror
from kvd.shared_state.catalog import Catalog
from kvd.shared_state.keys import Keys
from kvd.wire.lifecycle import Lifecycle, Outcome, Step
from tests.simulation.agenda import decide_order
from tests.simulation.memory_server import MemoryServer
from tests.simulation.sharing import KEY, LEASE_S, Replica, Scene, SharingWorld, Storm, count
from tests.support.budget import scaled
from tests.support.registrations import NoRegistrations

STEPS = 60
CALM_S = 120.0  # virtual time within which all must agree


# In 5 and 38, requests that a process restores after the server was emptied end elsewhere; in 12215
# the journal has no room for the end.
@pytest.mark.parametrize("seed", sorted({*range(scaled(4)), 5, 38, 12215}))
def test_replicas_come_to_agree(seed: int) -> None:
    settle(SharingWorld, seed)


@pytest.mark.parametrize("seed", range(scaled(4)))
def test_what_ends_in_a_storm_has_ended(seed: int) -> None:
    settle(Storm, seed)


def settle(kind: type[SharingWorld], seed: int) -> None:
    """Has a world of this kind fail in ways of the seed, and checks that all then agree."""

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            world = kind(seed, nursery)
            for _ in range(STEPS):
                await world.act()
            await world.heal()
            with trio.move_on_after(CALM_S):
                while not world.agree():  # noqa: ASYNC110  no event signals it
                    await trio.sleep(0.5)
            assert world.agree(), world.differences()
            assert world.stretch() < 0.1
            for replica in world.replicas:
                replica.tracker.ledger.verify()
            nursery.cancel_scope.cancel()

    decide_order(seed)
    trio.run(main, clock=MockClock(autojump_threshold=0))


async def test_who_is_registered_is_known_before_what_is_booked(
    scene: Scene, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More requests are booked than may wait for the registration of their rank."""
    monkeypatch.setattr(mirror, "MAX_WAITING", 3)
    [first] = scene.start("first")
    for number in range(20):
        first.book(f"r{number}", 0, [number])
    await trio.sleep(5)
    [late] = scene.start("late", registers=True)
    await trio.sleep(20)
    assert count(late, "r", 20) == 20
    assert late.mirror.stats.left_out == 0


@pytest.mark.parametrize("set_s", [3600.0, -3600.0])
async def test_a_server_whose_clock_is_set_changes_no_age(
    scene: Scene, autojump_clock: MockClock, set_s: float
) -> None:
    """A replica that comes later would otherwise expire the requests of all."""
    first, second = scene.start("first", "second")
    await trio.sleep(5)
    for number in range(10):
        first.book(f"r{number}", 0, [number])
    await trio.sleep(1)
    scene.server.ahead_s = set_s
    await trio.sleep(LEASE_S)
    [late] = scene.start("late")
    await trio.sleep(LEASE_S)
    second.book("r10", 0, [10])
    await trio.sleep(LEASE_S)
    for replica in (second, late):
        for number in range(11):
            own = first if number < 10 else second
            at, expected = (
                each.tracker.ledger.request(f"r{number}").admitted_at for each in (replica, own)
            )
            assert abs(at - expected) < 0.1


async def test_what_is_booked_while_old_requests_are_looked_through_stays(
    scene: Scene, autojump_clock: MockClock
) -> None:
    [first] = scene.start("first")
    await trio.sleep(5)
    [back] = scene.make("back", room=1 << 24, restored=1000)
    back.fleet.note_restored(SharedPoint(trio.current_time() + 1, {}))
    made = 0
    drop = back.mirror.drop_unknown

    def drop_beside_clients(shared_at: float) -> Iterator[None]:
        nonlocal made
        for _ in drop(shared_at):
            back.book(f"new{made}", 0, [made])
            made += 1
            yield

    back.mirror.drop_unknown = drop_beside_clients  # type: ignore[method-assign]
    scene.run(back)
    await trio.sleep(20)
    assert count(back, "old", 1000) == 0  # they had ended elsewhere meanwhile
    assert back.mirror.stats.ended == 1000
    assert made > 10
    assert count(back, "new", made) == count(first, "new", made) == made


@pytest.mark.parametrize("has_shared", [True, False])
async def test_what_nobody_was_told_of_has_not_ended_elsewhere(
    scene: Scene, autojump_clock: MockClock, has_shared: bool
) -> None:
    """A request was booked while the server was away, and the process restarted meanwhile."""
    [first] = scene.start("first")
    first.book("r0", 0, [1])
    await trio.sleep(5)
    [back] = scene.make("back", restored=5)
    back.fleet.note_restored(SharedPoint(trio.current_time() - 1, {}) if has_shared else None)
    scene.run(back)
    await trio.sleep(20)
    assert count(back, "old", 5) == count(first, "old", 5) == 5
    assert count(back, "r", 1) == 1
    shared = back.shared.last
    scene.server.freeze()
    back.book("later", 0, [1])
    await trio.sleep(20)
    assert shared == back.shared.last is not None
    scene.server.thaw()
    await trio.sleep(20)
    assert back.shared.last.at > shared.at


async def test_all_end_what_each_has_restored_on_its_own(
    scene: Scene, autojump_clock: MockClock
) -> None:
    """The server loses everything before each restart, so that no replica sees another's view."""
    replicas = scene.make("one", "two", "three", restored=6)
    for replica in replicas:
        scene.run(replica)
        await trio.sleep(5)
        replica.kill()
        scene.server.flush()
    for replica in replicas:
        scene.run(replica)
    await trio.sleep(20)
    for number in range(6):
        replica = replicas[number // 2]
        replica.slots.end(replica.tracker, f"old{number}")
    await trio.sleep(20)
    assert [count(each, "old", 6) for each in replicas] == [0, 0, 0]


async def test_what_ended_before_another_restored_it_ends_there(
    scene: Scene, autojump_clock: MockClock
) -> None:
    """The server loses all; who restores a request first ends it before another claims it."""
    replicas = scene.start("one", "two")
    for number in range(2):
        replicas[0].book(f"r{number}", 0, [number])
    await trio.sleep(5)
    for each in replicas:
        each.kill()
    scene.server.flush()
    [first] = scene.start("first", before=replicas[0])
    await trio.sleep(20)
    first.slots.end(first.tracker, "r0")
    await trio.sleep(5)
    scene.server.flush()
    [second] = scene.start("second", before=replicas[1])
    await trio.sleep(20)
    assert list(first.live(["r0", "r1"])) == list(second.live(["r0", "r1"])) == ["r1"]


@pytest.mark.parametrize("restarts", [1, 2])
async def test_an_end_that_no_other_was_told_of_outlives_its_process(
    scene: Scene, autojump_clock: MockClock, restarts: int
) -> None:
    """It ends while the server is away, and its process is killed before it can tell."""
    first, ender = scene.start("first", "ender")
    first.book("r0", 0, [1])
    ender.book("r1", 0, [1])
    await trio.sleep(5)
    scene.server.is_gone = True
    for number in range(2):
        ender.slots.end(ender.tracker, f"r{number}")
    for restart in range(restarts):
        ender.kill()
        [ender] = scene.start(f"back{restart}", before=ender)
        await trio.sleep(5)
    scene.server.is_gone = False
    await trio.sleep(20)
    assert [count(each, "r", 2) for each in (first, ender)] == [0, 0]


async def test_an_id_that_is_used_again_is_another_request(
    scene: Scene, autojump_clock: MockClock
) -> None:
    first, second = scene.start("first", "second")
    first.book("r0", 0, [1])
    await trio.sleep(5)
    second.slots.end(second.tracker, "r0")
    await trio.sleep(5)
    second.kill()
    first.book("r0", 0, [1])
    [back] = scene.start("back", before=second)
    await trio.sleep(20)
    assert count(first, "r", 1) == count(back, "r", 1) == 1


async def test_an_id_that_is_used_again_meanwhile_is_as_old_as_its_last_booking(
    scene: Scene, autojump_clock: MockClock
) -> None:
    """Whoever restores the former one would let the later one expire early, for all."""
    first, second = scene.start("first", "second")
    first.book("r0", 0, [1])
    await trio.sleep(5)
    second.slots.complete(second.tracker, "r0")
    second.kill()
    first.slots.end(first.tracker, "r0")
    await trio.sleep(5)
    first.book("r0", 0, [1])
    scene.server.flush()  # so that a view has the later one alone
    await trio.sleep(LEASE_S)
    [back] = scene.start("back", before=second)
    await trio.sleep(20)
    assert first.live(["r0"]) == back.live(["r0"]) == {"r0": (0, 1, False, 0)}
    first_at, back_at = (each.tracker.ledger.request("r0").admitted_at for each in (first, back))
    assert abs(first_at - back_at) < 0.1


async def test_a_prefill_that_no_other_was_told_of_outlives_its_process(
    scene: Scene, autojump_clock: MockClock
) -> None:
    """It is completed while the server is away, and its process is killed before it can tell."""
    first, second = scene.start("first", "second")
    first.book("r0", 0, [1])
    await trio.sleep(5)
    scene.server.is_gone = True
    second.slots.complete(second.tracker, "r0")
    second.kill()
    [back] = scene.start("back", before=second)
    await trio.sleep(5)
    scene.server.is_gone = False
    await trio.sleep(20)
    for each in first, back:
        assert each.live(["r0"]) == {"r0": (0, 1, True, 0)}


async def test_who_only_reads_knows_what_has_ended_while_it_was_away(
    scene: Scene, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has lost the stream, and so much has ended that nobody remembers this end."""
    monkeypatch.setattr("kvd.persistence.bookings.MAX_ENDED_BYTES", 0)
    first, reader = scene.start("first", "reader")
    await trio.sleep(5)
    first.book("r0", 0, [1])
    await trio.sleep(5)
    reader.kill()
    first.slots.end(first.tracker, "r0")
    await trio.sleep(5)
    scene.server.flush()
    await trio.sleep(LEASE_S)
    [back] = scene.start("back", before=reader)
    await trio.sleep(20)
    assert count(first, "r", 1) == count(back, "r", 1) == 0


def gone() -> MemoryServer:
    """Returns a server that nobody reaches."""
    server = MemoryServer(1000)
    server.is_gone = True
    return server


async def test_what_is_read_late_is_not_counted_by_an_earlier_point(
    scene: Scene, autojump_clock: MockClock
) -> None:
    """Its writer did not reach the server when it was booked, and is gone with its state."""
    reader, other = scene.start("reader", "other")
    [writer] = scene.make("writer")
    await trio.sleep(5)
    writer.book("r0", 0, [1])
    await trio.sleep(5)
    reader.book("r1", 0, [1])
    await trio.sleep(5)
    server, other.server = other.server, gone()
    other.cut()
    scene.run(writer)
    while not count(reader, "r", 1):  # noqa: ASYNC110  no event signals it
        await trio.sleep(0.0001)
    for each in reader, writer:
        each.kill()
    server.flush()
    other.server = server
    await trio.sleep(LEASE_S)
    [back] = scene.start("back", before=reader)
    await trio.sleep(20)
    for each in back, other:
        assert list(each.live(["r0", "r1"])) == ["r0", "r1"]


async def test_an_end_stands_though_the_server_lost_a_later_booking(
    scene: Scene, autojump_clock: MockClock
) -> None:
    """The fleet does not have all that had been shared; all until shortly before it does."""
    scene.server = Unsteady(1000)
    first, second = scene.start("first", "second")
    await trio.sleep(LEASE_S)
    second.book("r0", 0, [1])
    await trio.sleep(LEASE_S)
    scene.server.loses = True
    shared = second.shared.last
    second.book("r1", 0, [1])
    while second.shared.last == shared:  # noqa: ASYNC110  no event signals it
        await trio.sleep(0.001)
    scene.server.loses = False
    second.kill()
    first.slots.end(first.tracker, "r0")
    [back] = scene.start("back", before=second)
    await trio.sleep(5 * LEASE_S)
    assert list(first.live(["r0", "r1"])) == list(back.live(["r0", "r1"])) == ["r1"]


async def test_an_end_stands_though_another_restores_its_request_first(
    scene: Scene, autojump_clock: MockClock
) -> None:
    """The server comes back empty; the process that has restored the request finds nothing."""
    first, second = scene.start("first", "second")
    first.book("r0", 0, [1])
    await trio.sleep(5)
    scene.server.is_gone = True
    first.cut()
    first.slots.end(first.tracker, "r0")
    second.kill()
    scene.server.flush()
    server, first.server = first.server, gone()
    scene.server.is_gone = False
    [back] = scene.start("back", before=second)
    await trio.sleep(5)
    assert count(back, "r", 1) == 1
    first.server = server
    await trio.sleep(20)
    assert count(first, "r", 1) == count(back, "r", 1) == 0


def serve_when_eased(replica: Replica) -> None:
    """Has a selection wait on a replica until there is less load."""
    loads = replica.tracker.ledger.loads

    def serve() -> None:
        loads.on_eased(None)
        replica.book("waited0", 0, [2])

    loads.on_eased(serve)


async def test_who_joins_has_what_was_sent_since_the_only_announcement(
    scene: Scene, autojump_clock: MockClock
) -> None:
    """The other has only just begun, so it has announced no step, and its view has none."""
    [first] = scene.start("first")
    await trio.sleep(0.3)
    first.book("r0", 0, [1])
    await trio.sleep(0.1)
    [late] = scene.start("late")
    await trio.sleep(0.5)
    assert count(late, "r", 1) == 1


async def test_what_waited_for_an_end_elsewhere_is_shared(
    scene: Scene, autojump_clock: MockClock
) -> None:
    one, two = scene.start("one", "two")
    two.book("r0", 0, [1])
    await trio.sleep(5)
    serve_when_eased(one)
    two.slots.end(two.tracker, "r0")
    await trio.sleep(5)
    assert count(one, "waited", 1) == count(two, "waited", 1) == 1


async def test_what_waited_for_an_end_by_replica_sync_is_shared(
    scene: Scene, autojump_clock: MockClock
) -> None:
    one, two = scene.start("one", "two")
    take = partial(one.slots.apply, now=trio.current_time(), eases=False)
    for step in (Step.ADD, Step.FREE):
        hashes = array("Q", [1]).tobytes()
        event = Lifecycle(KEY, 4, "r0", 1, 0, step, hashes, 4)
        if step is Step.FREE:
            serve_when_eased(one)
        assert one.deduplicator.apply(event, take, one.slots.ease) is Outcome.APPLIED
    await trio.sleep(5)
    assert count(one, "waited", 1) == count(two, "waited", 1) == 1


async def test_an_entry_is_read_again_if_the_session_ends_before_it_is_applied(
    scene: Scene,
    autojump_clock: MockClock,
) -> None:
    """Its writer is gone then, and no view has it: only the stream does."""
    here, there = scene.start("here", "there")
    await trio.sleep(5)
    async with here.known.at_rest:
        there.book("r0", 0, [1])
        await trio.sleep(0.1)
        there.kill()
        scene.server.is_gone = True
        await trio.sleep(5)
    scene.server.is_gone = False
    await trio.sleep(5)
    assert count(here, "r", 1) == 1
    assert here.mirror.progress.gaps == 0


async def test_what_only_a_view_can_say_is_not_shared_before_it(
    scene: Scene, autojump_clock: MockClock
) -> None:
    """A process that is restarted in between would end what nobody has heard of."""
    [writer] = scene.start("writer", room=600)
    writer.book("r0", 0, [1])
    await trio.sleep(5)
    push, is_open = scene.server.rpush, trio.Event()

    async def push_late(name: str, values: Iterable[bytes]) -> int:
        await is_open.wait()
        return await push(name, values)

    scene.server.rpush = push_late
    for number in range(1, 50):
        writer.book(f"r{number}", 0, [1])  # the journal has no room for so many at once
    booked_at = trio.current_time()
    await trio.sleep(5)
    assert writer.outbox.holes == 1 and writer.outbox.entries == deque()
    assert writer.shared.last is not None and writer.shared.last.at <= booked_at
    is_open.set()
    await trio.sleep(5)
    writer.book("r50", 0, [1])
    await trio.sleep(5)
    assert writer.shared.last.at > booked_at


class Unsteady(MemoryServer):
    """A server that fails where entries are read again, and may lose entries before it is asked."""

    spared = 0  # times that it does not fail yet
    failures = 0
    loses = False

    async def xrange(self, *arguments: Any, **options: Any) -> Any:
        if self.failures and self.spared:
            self.spared -= 1
        elif self.failures:
            self.failures -= 1
            raise ConnectionError
        return await super().xrange(*arguments, **options)

    async def xadd(self, *arguments: Any, **options: Any) -> bytes:
        found = await super().xadd(*arguments, **options)
        if self.loses:
            self.entries.clear()
        return found


@pytest.mark.parametrize("failures", [1, 2, 3])
async def test_sessions_that_end_while_they_join_cost_no_booking(
    scene: Scene, autojump_clock: MockClock, failures: int
) -> None:
    """What a restored process had sent is only in the stream, behind the views that it merges."""
    scene.server = Unsteady(1000)
    first, second = scene.make("first", "second")
    for each in second, first:
        scene.run(each)
        await trio.sleep(LEASE_S)
    for number in range(5):
        second.book(f"r{number}", 0, [number])
    await trio.sleep(LEASE_S)
    second.kill()
    await trio.sleep(2 * LEASE_S)  # it is gone
    scene.server.failures = failures
    first.slots.end(first.tracker, "r0")
    await trio.sleep(1)
    [back] = scene.start("back", before=second)
    await trio.sleep(5 * LEASE_S)
    assert scene.server.failures == 0
    assert list(first.live(["r0", "r1", "r2", "r3", "r4"])) == ["r1", "r2", "r3", "r4"]
    assert first.live(["r0", "r1", "r2"]) == back.live(["r0", "r1", "r2"])


async def test_a_server_emptied_while_a_process_joins_costs_no_booking(
    scene: Scene, autojump_clock: MockClock
) -> None:
    """The first session has merged a view; the next one finds nobody and nothing."""
    scene.server = Unsteady(1000)
    [before] = scene.start("before")
    await trio.sleep(LEASE_S)
    for number in range(5):
        before.book(f"r{number}", 0, [number])
    await trio.sleep(LEASE_S)
    before.kill()
    await trio.sleep(2 * LEASE_S)
    scene.server.spared, scene.server.failures = 1, 1
    [back] = scene.start("back", before=before)
    while scene.server.failures:  # noqa: ASYNC110  no event signals it
        await trio.sleep(0.01)
    scene.server.flush()
    await trio.sleep(2 * LEASE_S)
    assert back.mirror.stats.views == 1
    assert count(back, "r", 5) == 5


async def test_what_the_server_lost_before_anyone_read_it_has_not_ended(
    scene: Scene, autojump_clock: MockClock
) -> None:
    """The process that had sent it restores it, and the views of others do not have it."""
    scene.server = Unsteady(1000)
    first, second = scene.start("first", "second")
    await trio.sleep(LEASE_S)
    scene.server.loses = True
    shared = second.shared.last
    second.book("r0", 0, [1])
    while second.shared.last == shared:  # noqa: ASYNC110  no event signals it
        await trio.sleep(0.001)
    scene.server.loses = False
    second.kill()
    [back] = scene.start("back", before=second)
    await trio.sleep(5 * LEASE_S)
    assert count(back, "r", 1) == count(first, "r", 1) == 1


class Settings(NoRegistrations):
    """Three router settings of one model, made by calls."""

    changes = 1

    def router_settings(self) -> Any:
        yield ("m", "default"), {"first": 1, "second": 2, "third": 3}


async def test_rows_beyond_the_bound_of_one_comparison_are_written_by_the_next(
    scene: Scene, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.shared_state.catalog.MAX_ROWS", 2)

    async def write(command: Awaitable[Any]) -> bool:
        await command
        return True

    catalog = Catalog(Settings(), {})  # type: ignore[arg-type]
    for written in (2, 3, 3):
        await catalog.sync(scene.server, Keys("kvd"), write)
        assert len(scene.server.values[Keys("kvd").catalog]) == written
        assert catalog.stats.written == written


class LateAnswers(MemoryServer):
    """A server whose answers about the end of the stream are outdated when they arrive."""

    async def xrevrange(self, *arguments: Any, **options: Any) -> Any:
        found = await super().xrevrange(*arguments, **options)
        await trio.sleep(0.05)
        return found


async def test_a_server_that_has_everything_is_not_read_again(
    scene: Scene, autojump_clock: MockClock
) -> None:
    scene.server = LateAnswers(1000)
    replicas = scene.start("first", "second")
    for number in range(1000):
        replicas[number % 2].book(f"r{number}", 0, [number])
        await trio.sleep(0.01)
    assert [each.fleet.stats.lost_stream for each in replicas] == [0, 0]
