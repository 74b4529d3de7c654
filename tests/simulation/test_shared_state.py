"""Replicas on a server that fails in every way: once it works again, all come to agree.

Each seed is a run of its own, in virtual time. Requests are booked through any replica, go on and
end through others. The server freezes, goes away, is emptied, trims, loses its last writes, or cuts
a connection off. Replicas are killed and come back empty, or with their requests. If no replica was
killed, all have exactly the live requests of a plain model; if all came back with their requests,
all have at least these.
"""

from __future__ import annotations

import gc
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from random import Random
from typing import Any

import msgpack
import pytest
import trio
from trio.testing import MockClock

from kvd.index.served_models import ServedModels
from kvd.model import PartitionKey
from kvd.persistence.bookings import SharedPoint
from kvd.persistence.journal import SharedUntil
from kvd.replica_sync.deduplication import Deduplicator
from kvd.shared_state import mirror
from kvd.shared_state.catalog import Catalog
from kvd.shared_state.entries import Piece, Position, ViewHead
from kvd.shared_state.keys import Keys
from kvd.shared_state.mirror import Faces, Merge, Mirror
from kvd.shared_state.outbox import NUMBERED_AT_ONCE, Outbox
from kvd.shared_state.session import KnownFleet, Session
from kvd.shared_state.views import Views, ViewStats, read_head, read_pieces
from kvd.slots.rebooking import Booking, rebook
from kvd.slots.shared_loads import Ledgers
from kvd.slots.trackers import SlotTrackers
from kvd.wire.lifecycle import Face, Lifecycle, Outcome, Step
from kvd_core.ledger.journal import Booked, Journal, read
from kvd_core.ledger.ledger import ADDED
from tests.simulation.agenda import decide_order
from tests.simulation.memory_server import MemoryServer
from tests.support.budget import scaled
from tests.support.registrations import NoRegistrations

KEY = PartitionKey("m", "default")
RANKS = 3
STEPS = 60
REPLICAS = 3
LEASE_S = 10.0
CALM_S = 120.0  # virtual time within which all must agree


class OneRegistration:
    """A catalog with one worker."""

    def __init__(self, register: Callable[[], None]) -> None:
        self.changes = 0
        self._register = register

    async def sync(self, *_: object) -> None:
        if not self.changes:
            await trio.sleep(0.01)
            self._register()
            self.changes = 1


class Replica:
    """One process: its tracker, and its sessions with the server."""

    def __init__(
        self,
        server: MemoryServer,
        name: str,
        room: int = 1 << 20,
        *,
        restored: int = 0,
        registers: bool = False,
        before: Replica | None = None,
    ) -> None:
        """Begins with `restored` requests, or with those of the process `before`.

        `registers`: the catalog registers its worker.
        """
        self.name = name
        self._server = server
        journal = self.journal = Journal(room)
        self.deduplicator = Deduplicator(journal, trio.current_time)
        self.deduplicator.pause()
        ledgers = Ledgers(journals=[journal])
        self.slots = SlotTrackers(1e9, ledgers, clock=trio.current_time)
        if not registers:
            self.register()
        faces: Faces = {Face.SLOT_TRACKER: self.slots}
        self.mirror = Mirror(
            name, faces, None, journal, self.deduplicator, lambda key: True, trio.current_time
        )
        self.outbox = Outbox(journal, self.mirror, ledgers, faces)
        self._at_rest = trio.Lock()
        self.views = Views(self.mirror, self.outbox, faces, None, [], self._at_rest)
        self.shared = SharedUntil(None)
        self.standing = KnownFleet(ServedModels())
        self._catalog = (
            OneRegistration(self.register) if registers else Catalog(NoRegistrations(), {})  # type: ignore[arg-type]
        )
        self._scope = trio.CancelScope()
        for number in range(restored):
            self.book(f"old{number}", 0, list(range(128)))
        if before is not None:
            self._restore(before)
        self.mirror.note_restored()
        self.deduplicator.resume()
        self.outbox.introduce()

    def register(self) -> None:
        self.slots.register(KEY, 1, 4, 0, RANKS)

    def _restore(self, before: Replica) -> None:
        """Books the live requests of another process, as a state directory restores them."""
        self.shared.last = before.shared.last
        self.standing.note_restored(self.shared.last)
        records, after = Journal(1 << 20), 0
        while after is not None:
            after = before.tracker.ledger.export(records, after, 1 << 20)
        for booked in read(records.take()):
            assert isinstance(booked, Booked)
            booking = Booking.of(booked)
            outcome = rebook(self.slots, KEY, 4, booking, booked.admitted_at)
            assert outcome is Outcome.APPLIED

    async def run(self) -> None:
        with trio.CancelScope() as self._scope:
            while True:
                session = Session(
                    self._server,  # type: ignore[arg-type]
                    Keys("kvd"),
                    self.mirror,
                    self.outbox,
                    self.views,
                    self._catalog,
                    self._at_rest,
                    self.standing,
                    self.shared.note,
                    self.name,
                    None,
                    [],
                    LEASE_S,
                )
                try:
                    await session.run(lambda: None, trio.Event())
                except* OSError:
                    await trio.sleep(0.2)

    def kill(self) -> None:
        self._scope.cancel()

    @property
    def tracker(self) -> Any:
        return self.slots.trackers[KEY]

    def book(self, request_id: str, rank: int, hashes: list[int]) -> None:
        content = array("Q", hashes).tobytes()
        tracker = self.tracker
        at = trio.current_time()
        number = tracker.ledger.rank_of(1, rank)
        assert tracker.ledger.add(request_id, number, content, 4 * len(hashes), at) == ADDED

    def live(self, names: list[str]) -> dict[str, tuple[int, int, bool, int]]:
        """Returns, by id, each booked request's rank, blocks, whether it decodes, output blocks."""
        found = {}
        for name in names:
            live = self.tracker.ledger.request(name)
            if live is not None:
                state = live.dp_rank, live.blocks, live.prefill_complete, live.output_blocks
                found[name] = state
        return found


class World:
    """The server, the replicas, and the truth."""

    def __init__(self, seed: int, nursery: trio.Nursery) -> None:
        self.random = Random(seed)
        self.server = MemoryServer(self.random.choice([5, 20, 1000]))
        self._nursery = nursery
        self._started = 0
        self._room = self.random.choice([600, 1 << 20])
        self.is_lossy = False  # bookings may be lost for good
        self.may_revive = False  # what has ended may come back
        self.booked: list[str] = []
        self.live: dict[str, tuple[int, int, bool, int]] = {}
        self.replicas = [self.start() for _ in range(REPLICAS)]

    def start(self, before: Replica | None = None) -> Replica:
        self._started += 1
        replica = Replica(self.server, f"w{self._started}", self._room, before=before)
        self._nursery.start_soon(replica.run)
        return replica

    async def act(self) -> None:
        random = self.random
        await trio.sleep(random.choice([0, 0, 0.003, 0.05, 1.5]))
        what = random.random()
        if what < 0.45:
            self.book()
        elif what < 0.85:
            self.go_on()
        elif what < 0.88:
            self.server.freeze()
        elif what < 0.94:
            self.server.thaw()
            self.server.is_gone = False
        elif what < 0.96:
            self.server.is_gone = True
        elif what < 0.97:
            self.server.flush()
        elif what < 0.98:
            self.server.lose(random.randrange(6))
        elif what < 0.985:
            self.server.entries.clear()
        else:
            self.kill()

    def book(self) -> None:
        random = self.random
        name = f"r{len(self.booked)}"
        rank, blocks = random.randrange(RANKS), random.randrange(1, 12)
        random.choice(self.replicas).book(name, rank, [random.randrange(4) for _ in range(blocks)])
        self.booked.append(name)
        self.live[name] = rank, blocks, False, 0

    def go_on(self) -> None:
        """Has a replica that knows a request advance or end it."""
        replica = self.random.choice(self.replicas)
        known = sorted(replica.live(list(self.live)))
        if not known:
            return
        name = self.random.choice(known)
        rank, blocks, prefilled, outputs = self.live[name]
        step = self.random.randrange(4)
        if step == 0:
            replica.slots.complete(replica.tracker, name)
            prefilled = True
        elif step == 1:
            replica.tracker.ledger.output_block(name)
            outputs += 1
        elif step > 1:
            replica.slots.end(replica.tracker, name)
            del self.live[name]
            return
        self.live[name] = rank, blocks, prefilled, outputs

    def kill(self) -> None:
        """Kills a replica and starts one instead that is empty, or restores its requests."""
        number = self.random.randrange(REPLICAS)
        before = self.replicas[number]
        before.kill()
        kept = self.random.choice([None, before])
        self.may_revive = True
        self.is_lossy |= kept is None
        self.server.breaks_after = self.random.choice([None, self.random.randrange(40)])
        self.replicas[number] = self.start(kept)

    def agree(self) -> bool:
        first, *others = (replica.live(self.booked) for replica in self.replicas)
        if any(each != first for each in others):
            return False
        if self.may_revive:
            return self.is_lossy or self.live.keys() <= first.keys()
        return first == self.live

    def stretch(self) -> float:
        """Returns the largest difference between replicas in the age of a request."""
        live = [
            [each.tracker.ledger.request(name) for each in self.replicas] for name in self.booked
        ]
        times = [[each.admitted_at for each in known] for known in live if all(known)]
        return max((max(each) - min(each) for each in times), default=0.0)

    def differences(self) -> str:
        """Returns what the replicas disagree on, and how far each has read the others' entries."""
        found = [] if self.is_lossy else [("truth", self.live)]
        found += [(each.name, each.live(self.booked)) for each in self.replicas]
        lines = [
            f"{name}: {[(who, live.get(name)) for who, live in found]}"
            for name in self.booked
            if len({str(live.get(name)) for _, live in found}) > 1
        ]
        for each in self.replicas:
            mirror = each.mirror
            lines.append(
                f"{each.name}: own {mirror.own} told {each.outbox.shared_number} "
                f"numbers {mirror.numbers} behind {mirror.behind} dots "
                f"{[(name.request_id, *known.dot) for name, known in mirror.requests.items()]} "
                f"{mirror.stats}"
            )
        return "\n".join(lines)


# In the last two, requests that a process restores after the server was emptied end elsewhere.
@pytest.mark.parametrize("seed", sorted({*range(scaled(4)), 5, 38}))
def test_replicas_come_to_agree(seed: int) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            world = World(seed, nursery)
            for _ in range(STEPS):
                await world.act()
            world.server.thaw()
            world.server.is_gone = False
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


def run(scenario: Callable[[MemoryServer, trio.Nursery], Awaitable[None]]) -> None:
    """Runs a scenario in virtual time, on a server that keeps every entry."""

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await scenario(MemoryServer(1000), nursery)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))


def count(replica: Replica, prefix: str, names: int) -> int:
    return len(replica.live([f"{prefix}{number}" for number in range(names)]))


async def read_view(client: Any, here: Replica, there: Replica, *, to_end: bool = True) -> None:
    """Writes a view on one replica, and merges it on another up to its end, or its pieces alone."""
    await there.views.write(client, Keys("kvd"), 0.0)
    head = await read_head(client, Keys("kvd"), there.name)
    assert head is not None
    merge = Merge(here.mirror, there.name, head)
    async for piece in read_pieces(client, Keys("kvd"), there.name, head, ViewStats()):
        assert list(merge.take(piece, 0.0)) == []
    if to_end:
        assert list(merge.finish()) == []


async def take_all(here: Replica, there: Replica) -> None:
    """Applies all steps that one replica has made, so far, to another."""
    await there.outbox.drain()
    for number, entry in enumerate(there.outbox.entries, 1):
        assert list(here.mirror.take(entry, Position(1, number), 0.0)) == []


def merge_view(here: Replica, there: Replica, pieces: list[Piece], age_s: float) -> None:
    """Merges a view that a replica has written of all that it has."""
    numbers = {there.mirror.writer: there.mirror.own}
    position, own = there.mirror.position, there.mirror.own
    head = ViewHead(1, 1, 1, numbers, position, own, ended=frozenset(), served=[])
    merge = Merge(here.mirror, there.mirror.writer, head)
    for piece in pieces:
        assert list(merge.take(piece, age_s)) == []
    assert list(merge.finish()) == []


def test_views_of_earlier_versions_are_read_unless_they_are_partial() -> None:
    """And earlier versions read what is written now."""
    head = ViewHead(1, 0, 0, {"a": 3}, Position(5, 0), 3, ended=frozenset(), served=[])
    members = msgpack.unpackb(head.packed())
    assert members["partial"] is False
    del members["ended"]
    assert ViewHead.read(msgpack.packb(members)) == head
    assert ViewHead.read(msgpack.packb(members | {"partial": True})) is None


def test_who_is_registered_is_known_before_what_is_booked(monkeypatch: pytest.MonkeyPatch) -> None:
    """More requests are booked than may wait for the registration of their rank."""
    monkeypatch.setattr(mirror, "MAX_WAITING", 3)

    async def scenario(server: MemoryServer, nursery: trio.Nursery) -> None:
        first = Replica(server, "first")
        nursery.start_soon(first.run)
        for number in range(20):
            first.book(f"r{number}", 0, [number])
        await trio.sleep(5)
        late = Replica(server, "late", registers=True)
        nursery.start_soon(late.run)
        await trio.sleep(20)
        assert count(late, "r", 20) == 20
        assert late.mirror.stats.left_out == 0

    run(scenario)


@pytest.mark.parametrize("set_s", [3600.0, -3600.0])
def test_a_server_whose_clock_is_set_changes_no_age(set_s: float) -> None:
    """A replica that comes later would otherwise expire the requests of all."""

    async def scenario(server: MemoryServer, nursery: trio.Nursery) -> None:
        first, second = Replica(server, "first"), Replica(server, "second")
        nursery.start_soon(first.run)
        nursery.start_soon(second.run)
        await trio.sleep(5)
        for number in range(10):
            first.book(f"r{number}", 0, [number])
        await trio.sleep(1)
        server.ahead_s = set_s
        await trio.sleep(LEASE_S)
        late = Replica(server, "late")
        nursery.start_soon(late.run)
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

    run(scenario)


def test_what_is_booked_while_old_requests_are_looked_through_stays() -> None:
    async def scenario(server: MemoryServer, nursery: trio.Nursery) -> None:
        first = Replica(server, "first")
        nursery.start_soon(first.run)
        await trio.sleep(5)
        back = Replica(server, "back", 1 << 24, restored=1000)
        back.standing.note_restored(SharedPoint(trio.current_time() + 1, {}))
        made = 0
        drop = back.mirror.drop_unknown

        def drop_beside_clients(shared_at: float) -> Iterator[None]:
            nonlocal made
            for _ in drop(shared_at):
                back.book(f"new{made}", 0, [made])
                made += 1
                yield

        back.mirror.drop_unknown = drop_beside_clients  # type: ignore[method-assign]
        nursery.start_soon(back.run)
        await trio.sleep(20)
        assert count(back, "old", 1000) == 0  # they had ended elsewhere meanwhile
        assert back.mirror.stats.ended == 1000
        assert made > 10
        assert count(back, "new", made) == count(first, "new", made) == made

    run(scenario)


@pytest.mark.parametrize("has_shared", [True, False])
def test_what_nobody_was_told_of_has_not_ended_elsewhere(has_shared: bool) -> None:
    """A request was booked while the server was away, and the process restarted meanwhile."""

    async def scenario(server: MemoryServer, nursery: trio.Nursery) -> None:
        first = Replica(server, "first")
        nursery.start_soon(first.run)
        first.book("r0", 0, [1])
        await trio.sleep(5)
        back = Replica(server, "back", restored=5)
        back.standing.note_restored(
            SharedPoint(trio.current_time() - 1, {}) if has_shared else None
        )
        nursery.start_soon(back.run)
        await trio.sleep(20)
        assert count(back, "old", 5) == count(first, "old", 5) == 5
        assert count(back, "r", 1) == 1
        shared = back.shared.last
        server.freeze()
        back.book("later", 0, [1])
        await trio.sleep(20)
        assert shared == back.shared.last is not None
        server.thaw()
        await trio.sleep(20)
        assert back.shared.last.at > shared.at

    run(scenario)


def test_all_end_what_each_has_restored_on_its_own() -> None:
    """The server loses everything before each restart, so that no replica sees another's view."""

    async def scenario(server: MemoryServer, nursery: trio.Nursery) -> None:
        replicas = [Replica(server, name, restored=6) for name in ("one", "two", "three")]
        for replica in replicas:
            nursery.start_soon(replica.run)
            await trio.sleep(5)
            replica.kill()
            server.flush()
        for replica in replicas:
            nursery.start_soon(replica.run)
        await trio.sleep(20)
        for number in range(6):
            replica = replicas[number // 2]
            replica.slots.end(replica.tracker, f"old{number}")
        await trio.sleep(20)
        assert [count(each, "old", 6) for each in replicas] == [0, 0, 0]

    run(scenario)


def test_what_ended_before_another_restored_it_ends_there() -> None:
    """The server loses all; who restores a request first ends it before another claims it."""

    async def scenario(server: MemoryServer, nursery: trio.Nursery) -> None:
        replicas = [Replica(server, name) for name in ("one", "two")]
        for each in replicas:
            nursery.start_soon(each.run)
        for number in range(2):
            replicas[0].book(f"r{number}", 0, [number])
        await trio.sleep(5)
        for each in replicas:
            each.kill()
        server.flush()
        first = Replica(server, "first", before=replicas[0])
        nursery.start_soon(first.run)
        await trio.sleep(20)
        first.slots.end(first.tracker, "r0")
        await trio.sleep(5)
        server.flush()
        second = Replica(server, "second", before=replicas[1])
        nursery.start_soon(second.run)
        await trio.sleep(20)
        assert list(first.live(["r0", "r1"])) == list(second.live(["r0", "r1"])) == ["r1"]

    run(scenario)


def test_what_ends_while_its_view_is_merged_is_in_the_next_view() -> None:
    """Of the writer only the booking is known then, not all steps up to it."""

    async def scenario(server: MemoryServer, nursery: trio.Nursery) -> None:
        maker, ender, other = (Replica(server, name) for name in ("maker", "ender", "other"))
        maker.book("r0", 0, [1])
        maker.book("r1", 0, [1])
        await read_view(server, other, maker)
        await read_view(server, ender, maker, to_end=False)
        assert count(ender, "r", 2) == count(other, "r", 2) == 2
        ender.slots.end(ender.tracker, "r0")
        await read_view(server, other, ender)
        assert list(other.live(["r0", "r1"])) == ["r1"]
        await read_view(server, ender, maker)
        assert list(ender.live(["r0", "r1"])) == ["r1"]

    run(scenario)


def test_an_end_that_came_before_its_booking_is_in_a_view() -> None:
    async def scenario(server: MemoryServer, nursery: trio.Nursery) -> None:
        maker, ender = Replica(server, "maker"), Replica(server, "ender")
        reader, other = Replica(server, "reader"), Replica(server, "other")
        maker.book("r0", 0, [1])
        for each in ender, other:
            await take_all(each, maker)
        ender.slots.end(ender.tracker, "r0")
        await take_all(reader, ender)
        await read_view(server, other, reader)
        assert count(other, "r", 1) == 0
        await take_all(reader, maker)
        assert count(reader, "r", 1) == 0

    run(scenario)


def test_an_end_by_one_dot_ends_a_request_that_is_known_by_another() -> None:
    """Two restored the request, each on its own; who ends it knows of both dots."""

    async def scenario(server: MemoryServer, nursery: trio.Nursery) -> None:
        maker = Replica(server, "maker")
        maker.book("r0", 0, [1])
        one, two = (Replica(server, name, before=maker) for name in ("one", "two"))
        other = Replica(server, "other")
        for each in one, two:
            assert not any(each.mirror.claim())
        await read_view(server, one, two)
        await read_view(server, other, two)
        other.mirror.hear("one", one.mirror.own)
        one.slots.end(one.tracker, "r0")
        for each in two, other:
            each.mirror.hear("one", 1)
            await take_all(each, one)
        assert [count(each, "r", 1) for each in (one, two, other)] == [0, 0, 0]

    run(scenario)


def test_who_learns_of_an_end_by_one_dot_tells_it_by_the_others() -> None:
    """The maker came back and gave its own dot to the request, which only one other replica links.

    The one that ends it takes it for another request then.
    """

    async def scenario(server: MemoryServer, nursery: trio.Nursery) -> None:
        maker, ender, other = (Replica(server, name) for name in ("maker", "ender", "other"))
        maker.book("r0", 0, [1])
        for each in ender, other:
            await take_all(each, maker)
        back = Replica(server, "back", before=maker)
        assert not any(back.mirror.claim())
        await read_view(server, other, back)
        ender.slots.end(ender.tracker, "r0")
        await read_view(server, ender, back)
        await take_all(other, ender)
        for each in ender, back:
            await take_all(each, other)
        assert [count(each, "r", 1) for each in (ender, other, back)] == [0, 0, 0]

    run(scenario)


def test_who_refuses_a_request_that_has_ended_by_another_dot_says_so() -> None:
    async def scenario(server: MemoryServer, nursery: trio.Nursery) -> None:
        maker, linker = Replica(server, "maker"), Replica(server, "linker")
        other = Replica(server, "other")
        maker.book("r0", 0, [1])
        await take_all(linker, maker)
        back = Replica(server, "back", before=maker)
        assert not any(back.mirror.claim())
        await read_view(server, back, linker)
        linker.slots.end(linker.tracker, "r0")
        await read_view(server, other, linker)
        await read_view(server, other, back)
        await take_all(back, other)
        assert [count(each, "r", 1) for each in (linker, other, back)] == [0, 0, 0]

    run(scenario)


def test_who_restored_what_had_ended_learns_it_from_its_first_dot() -> None:
    """A view without the request is merged before an older one that has it."""

    async def scenario(server: MemoryServer, nursery: trio.Nursery) -> None:
        maker, ender, older = (Replica(server, name) for name in ("maker", "ender", "older"))
        maker.book("r0", 0, [1])
        for each in ender, older:
            await take_all(each, maker)
        ender.slots.end(ender.tracker, "r0")
        back = Replica(server, "back", before=maker)
        assert not any(back.mirror.claim())
        await read_view(server, back, ender)
        await read_view(server, back, older)
        await take_all(older, ender)
        await read_view(server, older, back)
        assert [count(each, "r", 1) for each in (older, back)] == [0, 0]

    run(scenario)


def test_who_restored_a_request_and_reads_its_booking_keeps_it() -> None:
    async def scenario(server: MemoryServer, nursery: trio.Nursery) -> None:
        maker, older = Replica(server, "maker"), Replica(server, "older")
        maker.book("r0", 0, [1])
        await take_all(older, maker)
        back = Replica(server, "back", before=maker)
        assert not any(back.mirror.claim())
        back.mirror.settled = back.mirror.own
        await take_all(back, maker)
        await read_view(server, back, older)
        assert [count(each, "r", 1) for each in (older, back)] == [1, 1]

    run(scenario)


def test_what_a_process_left_out_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many wait for their rank there; another process learns of their writer from its view."""
    monkeypatch.setattr(mirror, "MAX_WAITING", 1)

    async def scenario(server: MemoryServer, nursery: trio.Nursery) -> None:
        maker, other = Replica(server, "maker"), Replica(server, "other")
        crowded = Replica(server, "crowded", registers=True)
        reader = Replica(server, "reader")
        maker.book("r0", 0, [1])
        await take_all(reader, maker)
        for number in range(1, 3):
            maker.book(f"r{number}", 0, [number])
        for each in crowded, other:
            await take_all(each, maker)
        assert crowded.mirror.stats.left_out == 2
        await read_view(server, reader, crowded)
        await read_view(server, other, reader)
        assert count(other, "r", 3) == 3
        await take_all(reader, maker)
        assert count(reader, "r", 3) == 3

    run(scenario)


def serve_when_eased(replica: Replica) -> None:
    """Has a selection wait on a replica until there is less load."""
    loads = replica.tracker.ledger.loads

    def serve() -> None:
        loads.on_eased(None)
        replica.book("waited0", 0, [2])

    loads.on_eased(serve)


def test_what_waited_for_an_end_elsewhere_is_shared() -> None:
    async def scenario(server: MemoryServer, nursery: trio.Nursery) -> None:
        one, two = Replica(server, "one"), Replica(server, "two")
        nursery.start_soon(one.run)
        nursery.start_soon(two.run)
        two.book("r0", 0, [1])
        await trio.sleep(5)
        serve_when_eased(one)
        two.slots.end(two.tracker, "r0")
        await trio.sleep(5)
        assert count(one, "waited", 1) == count(two, "waited", 1) == 1

    run(scenario)


def test_what_waited_for_an_end_by_replica_sync_is_shared() -> None:
    async def scenario(server: MemoryServer, nursery: trio.Nursery) -> None:
        one, two = Replica(server, "one"), Replica(server, "two")
        nursery.start_soon(one.run)
        nursery.start_soon(two.run)
        take = partial(one.slots.apply, now=trio.current_time(), eases=False)
        for step in (Step.ADD, Step.FREE):
            hashes = array("Q", [1]).tobytes()
            event = Lifecycle(KEY, 4, "r0", 1, 0, step, hashes, 4)
            if step is Step.FREE:
                serve_when_eased(one)
            assert one.deduplicator.apply(event, take, one.slots.ease) is Outcome.APPLIED
        await trio.sleep(5)
        assert count(one, "waited", 1) == count(two, "waited", 1) == 1

    run(scenario)


def test_what_replicas_send_at_the_start_has_nothing_restored_be_shared() -> None:
    journal = Journal(1000)
    slots = SlotTrackers(1e9, Ledgers(journals=[journal]))
    slots.register(KEY, 1, 4, 0, RANKS)
    deduplicator = Deduplicator(journal, lambda: 0.0)
    deduplicator.pause()
    journal.take()
    event = Lifecycle(KEY, 4, "r0", 1, 0, Step.ADD, b"", 4)
    take = partial(slots.apply, now=0.0, eases=False)
    assert deduplicator.apply(event, take, slots.ease) is Outcome.APPLIED
    ledger = slots.ledger_of(KEY)
    for name in ("restored", "new"):
        assert ledger.add(name, 0, b"", 4, 0.0) == ADDED
        assert (len(journal) > 0) is (name == "new")
        deduplicator.resume()


def test_what_ended_here_stays_so_though_a_view_has_it() -> None:
    """A client ends a request that only replica sync announced; then an older view is merged."""

    async def scenario(server: MemoryServer, nursery: trio.Nursery) -> None:
        here, there = Replica(server, "here"), Replica(server, "there")
        there.book("r0", 0, [1])
        there.mirror.position = Position(1000, 5)
        pieces = [piece async for piece in there.views._pieces()]
        here.journal.pause()  # as when replica sync applies an event
        here.book("r0", 0, [1])
        here.journal.resume()
        here.slots.end(here.tracker, "r0")
        await here.outbox.drain()
        merge_view(here, there, pieces, 0.0)
        assert count(there, "r", 1) == 1
        assert count(here, "r", 1) == 0

    run(scenario)


def test_what_was_restored_and_ended_here_stays_so_though_a_view_has_it() -> None:
    """A process that restored a request ends it; then a view is merged that names its first dot."""

    async def scenario(server: MemoryServer, nursery: trio.Nursery) -> None:
        there = Replica(server, "there")
        there.book("old0", 0, list(range(128)))
        there.book("r0", 0, [1])
        pieces = [piece async for piece in there.views._pieces()]
        await trio.sleep(1)
        back = Replica(server, "back", before=there)
        for _ in back.mirror.claim():
            pass
        back.slots.end(back.tracker, "old0")
        await back.outbox.drain()
        merge_view(back, there, pieces, 1.0)
        assert list(back.live(["old0", "r0"])) == ["r0"]

    run(scenario)


def test_steps_behind_an_end_that_came_before_the_booking_are_dropped() -> None:
    """Two replicas end a request; a third one gets both ends before the booking."""

    async def scenario(server: MemoryServer, nursery: trio.Nursery) -> None:
        maker, *enders = (Replica(server, name) for name in ("maker", "one", "two"))
        late = Replica(server, "late")
        maker.book("r0", 0, [1])
        await maker.outbox.drain()
        [booking] = maker.outbox.entries
        for number, ender in enumerate(enders):
            assert list(ender.mirror.take(booking, Position(1, 0), 0.0)) == []
            ender.slots.end(ender.tracker, "r0")
            await ender.outbox.drain()
            [end] = ender.outbox.entries
            assert list(late.mirror.take(end, Position(2, number), 0.0)) == []
        assert list(late.mirror.take(booking, Position(3, 0), 0.0)) == []
        assert count(late, "r", 1) == 0
        assert (late.mirror.stats.left_out, late.mirror._held, late.mirror._early) == (0, 0, {})

    run(scenario)


def test_an_entry_is_read_again_if_the_session_ends_before_it_is_applied() -> None:
    """Its writer is gone then, and no view has it: only the stream does."""

    async def scenario(server: MemoryServer, nursery: trio.Nursery) -> None:
        here, there = Replica(server, "here"), Replica(server, "there")
        nursery.start_soon(here.run)
        nursery.start_soon(there.run)
        await trio.sleep(5)
        async with here._at_rest:
            there.book("r0", 0, [1])
            await trio.sleep(0.1)
            there.kill()
            server.is_gone = True
            await trio.sleep(5)
        server.is_gone = False
        await trio.sleep(5)
        assert count(here, "r", 1) == 1
        assert here.mirror.stats.gaps == 0

    run(scenario)


def test_others_run_while_many_ends_are_numbered() -> None:
    many = 1000

    async def scenario(server: MemoryServer, nursery: trio.Nursery) -> None:
        replica = Replica(server, "one")
        for number in range(many):
            replica.book(f"r{number}", 0, [number])
        await replica.outbox.drain()
        before, ends = replica.mirror.own, replica.outbox.shared_number
        for number in range(many):
            replica.slots.end(replica.tracker, f"r{number}")
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await trio.lowlevel.checkpoint()

        nursery.start_soon(count_turns)
        await replica.outbox.drain()
        nursery.cancel_scope.cancel()
        assert replica.mirror.own == before + many
        assert turns > many // NUMBERED_AT_ONCE // 2
        entries = list(replica.outbox.entries)
        assert [each.first for each in entries[1:]] == [each.last + 1 for each in entries[:-1]]
        assert replica.outbox.shared_number == ends

    run(scenario)


def test_a_view_that_the_server_refuses_leaves_nothing_open() -> None:
    async def scenario(server: MemoryServer, nursery: trio.Nursery) -> None:
        writer = Replica(server, "writer")
        writer.book("r0", 0, [1])
        server.is_full = True
        with pytest.raises(MemoryError):
            await writer.views.write(server, Keys("kvd"), 0.0)  # type: ignore[arg-type]
        gc.collect()  # a generator that is still open would warn
        server.is_full = False
        await writer.views.write(server, Keys("kvd"), 0.0)  # type: ignore[arg-type]
        assert writer.views.stats.written == 1

    run(scenario)


def test_what_only_a_view_can_say_is_not_shared_before_it() -> None:
    """A process that is restarted in between would end what nobody has heard of."""

    async def scenario(server: MemoryServer, nursery: trio.Nursery) -> None:
        writer = Replica(server, "writer", 600)
        nursery.start_soon(writer.run)
        writer.book("r0", 0, [1])
        await trio.sleep(5)
        push, is_open = server.rpush, trio.Event()

        async def push_late(name: str, values: Iterable[bytes]) -> int:
            await is_open.wait()
            return await push(name, values)

        server.rpush = push_late  # type: ignore[method-assign]
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

    run(scenario)


class LateAnswers(MemoryServer):
    """A server whose answers about the end of the stream are outdated when they arrive."""

    async def xrevrange(self, *arguments: Any, **options: Any) -> Any:
        found = await super().xrevrange(*arguments, **options)
        await trio.sleep(0.05)
        return found


class Unsteady(MemoryServer):
    """A server that fails where entries are read again, and may lose entries before it is asked."""

    failures = 0
    loses = False

    async def xrange(self, *arguments: Any, **options: Any) -> Any:
        if self.failures:
            self.failures -= 1
            raise ConnectionError
        return await super().xrange(*arguments, **options)

    async def xadd(self, *arguments: Any, **options: Any) -> bytes:
        found = await super().xadd(*arguments, **options)
        if self.loses:
            self.entries.clear()
        return found


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_sessions_that_end_while_they_join_cost_no_booking(failures: int) -> None:
    """What a restored process had sent is only in the stream, behind the views that it merges."""

    async def scenario(nursery: trio.Nursery) -> None:
        server = Unsteady(1000)
        first, second = Replica(server, "first"), Replica(server, "second")
        for each in second, first:
            nursery.start_soon(each.run)
            await trio.sleep(LEASE_S)
        for number in range(5):
            second.book(f"r{number}", 0, [number])
        await trio.sleep(LEASE_S)
        second.kill()
        await trio.sleep(2 * LEASE_S)  # it is gone
        server.failures = failures
        first.slots.end(first.tracker, "r0")
        await trio.sleep(1)
        back = Replica(server, "back", before=second)
        nursery.start_soon(back.run)
        await trio.sleep(5 * LEASE_S)
        assert server.failures == 0
        assert list(first.live(["r0", "r1", "r2", "r3", "r4"])) == ["r1", "r2", "r3", "r4"]
        assert first.live(["r0", "r1", "r2"]) == back.live(["r0", "r1", "r2"])

    run(lambda _, nursery: scenario(nursery))


def test_a_server_emptied_while_a_process_joins_costs_no_booking() -> None:
    """The first session has merged a view; the next one finds nobody and nothing."""

    async def scenario(nursery: trio.Nursery) -> None:
        server = Unsteady(1000)
        before = Replica(server, "before")
        nursery.start_soon(before.run)
        await trio.sleep(LEASE_S)
        for number in range(5):
            before.book(f"r{number}", 0, [number])
        await trio.sleep(LEASE_S)
        before.kill()
        await trio.sleep(2 * LEASE_S)
        server.failures = 1
        back = Replica(server, "back", before=before)
        nursery.start_soon(back.run)
        while server.failures:  # noqa: ASYNC110  no event signals it
            await trio.sleep(0.01)
        server.flush()
        await trio.sleep(2 * LEASE_S)
        assert back.mirror.stats.views == 1
        assert count(back, "r", 5) == 5

    run(lambda _, nursery: scenario(nursery))


def test_what_the_server_lost_before_anyone_read_it_has_not_ended() -> None:
    """The process that had sent it restores it, and the views of others do not have it."""

    async def scenario(nursery: trio.Nursery) -> None:
        server = Unsteady(1000)
        first, second = Replica(server, "first"), Replica(server, "second")
        for each in first, second:
            nursery.start_soon(each.run)
        await trio.sleep(LEASE_S)
        server.loses = True
        shared = second.shared.last
        second.book("r0", 0, [1])
        while second.shared.last == shared:  # noqa: ASYNC110  no event signals it
            await trio.sleep(0.001)
        server.loses = False
        second.kill()
        back = Replica(server, "back", before=second)
        nursery.start_soon(back.run)
        await trio.sleep(5 * LEASE_S)
        assert count(back, "r", 1) == count(first, "r", 1) == 1

    run(lambda _, nursery: scenario(nursery))


class Settings(NoRegistrations):
    """Three router settings of one model, made by calls."""

    changes = 1

    def router_settings(self) -> Any:
        yield ("m", "default"), {"first": 1, "second": 2, "third": 3}


def test_rows_beyond_the_bound_of_one_comparison_are_written_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvd.shared_state.catalog.MAX_ROWS", 2)

    async def write(command: Awaitable[Any]) -> bool:
        await command
        return True

    async def main() -> None:
        server: Any = MemoryServer(1000)
        catalog = Catalog(Settings(), {})  # type: ignore[arg-type]
        for written in (2, 3, 3):
            await catalog.sync(server, Keys("kvd"), write)
            assert len(server.values[Keys("kvd").catalog]) == written
            assert catalog.stats.written == written

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_a_server_that_has_everything_is_not_read_again() -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            server = LateAnswers(1000)
            replicas = [Replica(server, name) for name in ("first", "second")]
            for each in replicas:
                nursery.start_soon(each.run)
            for number in range(1000):
                replicas[number % 2].book(f"r{number}", 0, [number])
                await trio.sleep(0.01)
            assert [each.standing.stats.lost_stream for each in replicas] == [0, 0]
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))
