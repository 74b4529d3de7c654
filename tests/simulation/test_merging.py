"""What replicas know after they have read each other's steps and views, without a session."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import msgpack
import pytest
import trio
from trio.testing import MockClock

from kvd.replica_sync.deduplication import Deduplicator
from kvd.shared_state import mirror
from kvd.shared_state.entries import Dot, Position, Unreadable
from kvd.shared_state.keys import Keys
from kvd.shared_state.merge import Merge
from kvd.shared_state.outbox import NUMBERED_AT_ONCE
from kvd.shared_state.pieces import Piece, ViewHead
from kvd.shared_state.progress import DOTS_AT_ONCE
from kvd.shared_state.views import ENDED_A_PIECE, ViewStats, read_head, read_pieces
from kvd.slots.shared_loads import Ledgers
from kvd.slots.trackers import SlotTrackers
from kvd.wire.lifecycle import Face, Lifecycle, Outcome, Step
from kvd_core.ledger.journal import Journal
from kvd_core.ledger.ledger import ADDED
from tests.simulation.sharing import KEY, RANKS, Replica, Scene, count


async def take_all(here: Replica, there: Replica) -> None:
    """Applies all steps that one replica has made, so far, to another."""
    await there.outbox.drain()
    for number, entry in enumerate(there.outbox.entries, 1):
        assert list(here.mirror.take(entry, Position(1, number), trio.current_time())) == []


async def book_for(maker: Replica, *others: Replica) -> None:
    """Books a request, r0, on one replica; the others read its step."""
    maker.book("r0", 0, [1])
    for each in others:
        await take_all(each, maker)


def restart(scene: Scene, before: Replica) -> Replica:
    """Starts a replica that restores another one's requests and claims them."""
    [back] = scene.make("back", before=before)
    assert not any(back.mirror.claim())
    return back


async def read_view(here: Replica, there: Replica, *, to_end: bool = True) -> None:
    """Writes a view on one replica, and merges it on another up to its end, or its pieces alone."""
    client: Any = there.server
    await there.views.write(client, Keys("kvd"), 0.0)
    head = await read_head(client, Keys("kvd"), there.name)
    assert head is not None
    merge = Merge(here.mirror, there.name, head)
    async for piece in read_pieces(client, Keys("kvd"), there.name, head, ViewStats()):
        assert not any(merge.take(piece, trio.current_time()))
    if to_end:
        assert not any(merge.finish())


def merge_view(here: Replica, there: Replica, pieces: list[Piece], age_s: float) -> None:
    """Merges a view that a replica has written of all that it has."""
    progress = there.mirror.progress
    numbers = {progress.writer: progress.own}
    head = ViewHead(1, 1, 1, numbers, progress.position, progress.own, served=[])
    merge = Merge(here.mirror, there.mirror.writer, head)
    for piece in pieces:
        assert list(merge.take(piece, trio.current_time() - age_s)) == []
    assert list(merge.finish()) == []


def test_views_of_earlier_versions_are_read_unless_they_are_partial() -> None:
    """And earlier versions read what is written now."""
    head = ViewHead(1, 0, 0, {"a": 3}, Position(5, 0), 3, served=[])
    members = msgpack.unpackb(head.packed())
    assert members["partial"] is False
    assert ViewHead.read(msgpack.packb(members)) == head
    assert ViewHead.read(msgpack.packb(members | {"partial": True})) is None


async def test_what_ends_while_its_view_is_merged_is_in_the_next_view(
    scene: Scene, autojump_clock: MockClock
) -> None:
    """Of the writer only the booking is known then, not all steps up to it."""
    maker, ender, other = scene.make("maker", "ender", "other")
    maker.book("r0", 0, [1])
    maker.book("r1", 0, [1])
    await read_view(other, maker)
    await read_view(ender, maker, to_end=False)
    assert count(ender, "r", 2) == count(other, "r", 2) == 2
    ender.slots.end(ender.tracker, "r0")
    await read_view(other, ender)
    assert list(other.live(["r0", "r1"])) == ["r1"]
    await read_view(ender, maker)
    assert list(ender.live(["r0", "r1"])) == ["r1"]


async def test_an_end_that_came_before_its_booking_is_in_a_view(
    scene: Scene, autojump_clock: MockClock
) -> None:
    maker, ender, reader, other = scene.make("maker", "ender", "reader", "other")
    await book_for(maker, ender, other)
    ender.slots.end(ender.tracker, "r0")
    await take_all(reader, ender)
    await read_view(other, reader)
    assert count(other, "r", 1) == 0
    await take_all(reader, maker)
    assert count(reader, "r", 1) == 0


async def test_many_ended_bookings_are_told_and_forgotten_in_slices(
    scene: Scene, autojump_clock: MockClock
) -> None:
    one, two = scene.make("one", "two")
    ended = [Dot("away", number) for number in range(10, 10 + 3 * ENDED_A_PIECE)]
    for dot in ended:
        one.mirror.progress.note_ended(dot)
    pieces = [piece.ended async for piece in one.views._pieces(ended)]
    assert [len(each) for each in pieces if each] == [ENDED_A_PIECE] * 3
    await read_view(two, one)
    assert set(two.mirror.progress.ended) == set(ended)
    two.mirror.progress.hear("away", ended[-1].number)
    rests = list(two.mirror.progress.forget_counted())
    assert len(rests) == len(ended) // DOTS_AT_ONCE
    assert not two.mirror.progress.ended


async def test_an_end_by_one_dot_ends_a_request_that_is_known_by_another(
    scene: Scene, autojump_clock: MockClock
) -> None:
    """Two restored the request, each on its own; who ends it knows of both dots."""
    [maker] = scene.make("maker")
    maker.book("r0", 0, [1])
    one, two = scene.make("one", "two", before=maker)
    [other] = scene.make("other")
    for each in one, two:
        assert not any(each.mirror.claim())
    await read_view(one, two)
    await read_view(other, two)
    other.mirror.progress.hear("one", one.mirror.progress.own)
    one.slots.end(one.tracker, "r0")
    for each in two, other:
        each.mirror.progress.hear("one", 1)
        await take_all(each, one)
    assert [count(each, "r", 1) for each in (one, two, other)] == [0, 0, 0]


async def test_an_end_without_room_is_told_by_dots_that_are_read_of_later(
    scene: Scene, autojump_clock: MockClock
) -> None:
    """Another process has restored the request, and the first view since is already written."""
    [ender] = scene.make("ender", room=600)
    ender.book("r0", 0, [1])
    await ender.outbox.drain()
    back = restart(scene, ender)
    while ender.journal.put(ord("X"), b""):
        pass
    ender.slots.end(ender.tracker, "r0")
    await read_view(back, ender)
    await read_view(ender, back)
    assert (ender.outbox.holes, count(ender, "r", 1), count(back, "r", 1)) == (1, 0, 1)
    assert not any(ender.mirror.prune())
    await take_all(back, ender)
    assert count(back, "r", 1) == 0


async def test_who_learns_of_an_end_by_one_dot_tells_it_by_the_others(
    scene: Scene, autojump_clock: MockClock
) -> None:
    """The maker came back and gave its own dot to the request, which only one other replica links.

    The one that ends it takes it for another request then.
    """
    maker, ender, other = scene.make("maker", "ender", "other")
    await book_for(maker, ender, other)
    back = restart(scene, maker)
    await read_view(other, back)
    ender.slots.end(ender.tracker, "r0")
    await read_view(ender, back)
    await take_all(other, ender)
    for each in ender, back:
        await take_all(each, other)
    assert [count(each, "r", 1) for each in (ender, other, back)] == [0, 0, 0]


async def test_who_refuses_a_request_that_has_ended_by_another_dot_says_so(
    scene: Scene, autojump_clock: MockClock
) -> None:
    maker, linker, other = scene.make("maker", "linker", "other")
    await book_for(maker, linker)
    back = restart(scene, maker)
    await read_view(back, linker)
    linker.slots.end(linker.tracker, "r0")
    await read_view(other, linker)
    await read_view(other, back)
    await take_all(back, other)
    assert [count(each, "r", 1) for each in (linker, other, back)] == [0, 0, 0]


async def test_who_restored_what_had_ended_learns_it_from_its_first_dot(
    scene: Scene, autojump_clock: MockClock
) -> None:
    """A view without the request is merged before an older one that has it."""
    maker, ender, older = scene.make("maker", "ender", "older")
    await book_for(maker, ender, older)
    ender.slots.end(ender.tracker, "r0")
    back = restart(scene, maker)
    await read_view(back, ender)
    await read_view(back, older)
    await take_all(older, ender)
    await read_view(older, back)
    assert [count(each, "r", 1) for each in (older, back)] == [0, 0]


async def test_who_restored_a_request_and_reads_its_booking_keeps_it(
    scene: Scene, autojump_clock: MockClock
) -> None:
    maker, older = scene.make("maker", "older")
    await book_for(maker, older)
    back = restart(scene, maker)
    back.mirror.progress.settled = back.mirror.progress.own
    await take_all(back, maker)
    await read_view(back, older)
    assert [count(each, "r", 1) for each in (older, back)] == [1, 1]


async def test_what_a_process_left_out_has_not_ended(
    scene: Scene, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many wait for their rank there; another process learns of their writer from its view."""
    monkeypatch.setattr(mirror, "MAX_WAITING", 1)
    maker, other, reader = scene.make("maker", "other", "reader")
    [crowded] = scene.make("crowded", registers=True)
    await book_for(maker, reader)
    for number in range(1, 3):
        maker.book(f"r{number}", 0, [number])
    for each in crowded, other:
        await take_all(each, maker)
    assert crowded.mirror.stats.left_out == 2
    await read_view(reader, crowded)
    await read_view(other, reader)
    assert count(other, "r", 3) == 3
    await take_all(reader, maker)
    assert count(reader, "r", 3) == 3


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


async def test_what_ended_here_stays_so_though_a_view_has_it(
    scene: Scene, autojump_clock: MockClock
) -> None:
    """A client ends a request that only replica sync announced; then an older view is merged."""
    here, there = scene.make("here", "there")
    there.book("r0", 0, [1])
    there.mirror.progress.position = Position(1000, 5)
    pieces = [piece async for piece in there.views._pieces([])]
    here.journal.pause()  # as when replica sync applies an event
    here.book("r0", 0, [1])
    here.journal.resume()
    here.slots.end(here.tracker, "r0")
    await here.outbox.drain()
    merge_view(here, there, pieces, 0.0)
    assert count(there, "r", 1) == 1
    assert count(here, "r", 1) == 0


async def test_what_was_restored_and_ended_here_stays_so_though_a_view_has_it(
    scene: Scene, autojump_clock: MockClock
) -> None:
    """A process that restored a request ends it; then a view is merged that names its first dot."""
    [there] = scene.make("there")
    there.book("old0", 0, list(range(128)))
    there.book("r0", 0, [1])
    pieces = [piece async for piece in there.views._pieces([])]
    await trio.sleep(1)
    back = restart(scene, there)
    back.slots.end(back.tracker, "old0")
    await back.outbox.drain()
    merge_view(back, there, pieces, 1.0)
    assert list(back.live(["old0", "r0"])) == ["r0"]


async def test_steps_behind_an_end_that_came_before_the_booking_are_dropped(
    scene: Scene, autojump_clock: MockClock
) -> None:
    """Two replicas end a request; a third one gets both ends before the booking."""
    maker, *enders, late = scene.make("maker", "one", "two", "late")
    maker.book("r0", 0, [1])
    await maker.outbox.drain()
    [booking] = maker.outbox.entries
    for number, ender in enumerate(enders):
        assert list(ender.mirror.take(booking, Position(1, 0), trio.current_time())) == []
        ender.slots.end(ender.tracker, "r0")
        await ender.outbox.drain()
        [end] = ender.outbox.entries
        assert list(late.mirror.take(end, Position(2, number), trio.current_time())) == []
    assert list(late.mirror.take(booking, Position(3, 0), trio.current_time())) == []
    assert count(late, "r", 1) == 0
    assert (late.mirror.left_out, len(late.mirror.held)) == (0, 0)


async def test_others_run_while_many_ends_are_numbered(
    scene: Scene, autojump_clock: MockClock
) -> None:
    many = 1000
    [replica] = scene.make("one")
    for number in range(many):
        replica.book(f"r{number}", 0, [number])
    await replica.outbox.drain()
    before, ends = replica.mirror.progress.own, replica.outbox.shared_number
    for number in range(many):
        replica.slots.end(replica.tracker, f"r{number}")
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    scene.nursery.start_soon(count_turns)
    await replica.outbox.drain()
    assert replica.mirror.progress.own == before + many
    assert turns > many // NUMBERED_AT_ONCE // 2
    entries = list(replica.outbox.entries)
    assert [each.first for each in entries[1:]] == [each.last + 1 for each in entries[:-1]]
    assert replica.outbox.shared_number == ends


async def test_a_view_that_the_server_refuses_leaves_nothing_open(
    scene: Scene, autojump_clock: MockClock
) -> None:
    [writer] = scene.make("writer")
    writer.book("r0", 0, [1])
    scene.server.is_full = True
    with pytest.raises(MemoryError):
        await writer.views.write(scene.server, Keys("kvd"), 0.0)
    gc.collect()  # a generator that is still open would warn
    scene.server.is_full = False
    await writer.views.write(scene.server, Keys("kvd"), 0.0)
    assert writer.views.stats.written == 1


async def test_a_view_that_seems_to_have_failed_is_not_mixed_with_the_next(
    scene: Scene, autojump_clock: MockClock
) -> None:
    """The server has its head, but the writer never knows; somebody reads it meanwhile."""
    writer, reader = scene.make("writer", "reader")
    writer.book("r0", 0, [1])
    write_head = scene.server.set

    async def write_without_answer(*arguments: Any, **options: Any) -> None:
        await write_head(*arguments, **options)
        raise TimeoutError

    scene.server.set = write_without_answer
    with pytest.raises(TimeoutError):
        await writer.views.write(scene.server, Keys("kvd"), 0.0)
    scene.server.set = write_head
    head = await read_head(scene.server, Keys("kvd"), "writer")
    assert head is not None
    writer.book("r1", 0, [1])
    await writer.views.write(scene.server, Keys("kvd"), 0.0)
    with pytest.raises(Unreadable):
        async for _ in read_pieces(scene.server, Keys("kvd"), "writer", head, ViewStats()):
            pass
    await read_view(reader, writer)
    assert count(reader, "r", 2) == 2


async def test_an_end_on_one_face_leaves_the_id_on_another_alone(
    scene: Scene, autojump_clock: MockClock
) -> None:
    """The reader missed a booking, and learns of it from a view."""
    maker, reader = scene.make("maker", "reader", reserves=True)
    await book_for(maker, reader)
    both = [(face, "r0") for face in Face]
    maker.book("r0", 0, [1], Face.SELECTION)
    await read_view(reader, maker)
    assert list(reader.booked(both)) == both
    maker.served[Face.SELECTION].end(maker.served[Face.SELECTION].trackers[KEY], "r0")
    await take_all(reader, maker)
    assert list(reader.booked(both)) == [(Face.SLOT_TRACKER, "r0")]
