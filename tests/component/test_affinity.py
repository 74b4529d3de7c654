"""Sessions of the selection service: bound by bookings, followed, ended, announced to replicas."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.model import PartitionKey
from kvd.selection.affinity import Affinity
from kvd.selection.options import RouterOptions
from kvd.selection.requests import Constraints, QueuedRequest
from kvd.wire.affinity import Bound, Version
from kvd.wire.lifecycle import Lifecycle as Event
from kvd.wire.lifecycle import Outcome, Step
from kvd_core.selector.settings import Settings
from tests.support.selecting import BLOCK_SIZE, EXPIRY_S, M, Service, worker

TTL_S = 10
BATCH = 100  # tokens
OPTIONS = RouterOptions(Settings(queue_threshold=1.0), session_affinity_ttl_s=TTL_S)

Place = tuple[int, int]


class Sessions(Service):
    """Three workers with two ranks each, and the announcements of their sessions."""

    def __init__(self, options: RouterOptions = OPTIONS, seed: int = 1) -> None:
        super().__init__(options, seed=seed)
        affinity = self.selections.affinity
        assert affinity is not None
        self.affinity: Affinity = affinity
        self.bound: list[Bound] = []
        affinity.bindings.subscribe(self.bound.append)
        self.names = 0

    def book(self, session: str | None = "s", blocks: int = 1, **members: Any) -> Place:
        """Books a prompt that no rank caches; returns the rank."""
        name = members.pop("reservation_id", None) or f"r{self.names}"
        return self._place(self._ask(blocks, session_id=session, reservation_id=name, **members))

    def follow(self, session: str | None = "s", **members: Any) -> Place:
        return self._place(self._ask(1, session_id=session, **members))

    def _ask(self, blocks: int, **members: Any) -> Any:
        self.names += 1
        return self.select([10_000 * self.names + at for at in range(blocks)], **members)

    def _place(self, answer: Any) -> Place:
        assert not isinstance(answer, QueuedRequest)
        return answer["worker_id"], answer["dp_rank"]

    def free(self, reservation_id: str) -> None:
        self.selections.reservations.free(reservation_id)

    def take_bindings(self) -> list[tuple[str, int, int | None]]:
        bindings = [(each.session_id, each.worker_id, each.dp_rank) for each in self.bound]
        self.bound.clear()
        return bindings

    def others(self, place: Place) -> list[Place]:
        ranks = [(row.worker_id, row.dp_rank) for row in self.candidates().pool.candidates]
        return [each for each in ranks if each[0] != place[0]]


async def ready(options: RouterOptions = OPTIONS, seed: int = 1) -> Sessions:
    service = Sessions(options, seed)
    for number in (1, 2, 3):
        record = worker(number, data_parallel_size=2, max_num_batched_tokens=BATCH)
        await service.selections.workers.put(record)
    return service


async def test_a_booking_binds_and_all_follow() -> None:
    service = await ready()
    place = service.book(blocks=20)
    for _ in range(20):
        assert service.follow() == place
    assert service.book(blocks=20) == place
    assert service.follow(None) != place  # without the session: `place` is the busiest rank
    assert service.take_bindings() == [("s", *place)] * 2
    service.check()


async def test_a_session_leaves_a_rank_with_more_requests_than_the_bound() -> None:
    bound = Settings(session_bound=1.4)
    service = await ready(RouterOptions(bound, session_affinity_ttl_s=TTL_S))
    place = service.book()
    assert service.follow() == place
    assert service.book() == place
    # With six ranks, 1 request is at most 1.4 (1 / 6 + 1), and 2 are more than 1.4 (2 / 6 + 1).
    assert place not in [service.follow() for _ in range(4)]
    (after,) = {service.book()} - {place}
    assert service.follow() == after  # the session is bound there now
    service.check()


async def test_a_selection_binds_nothing() -> None:
    service = await ready()
    assert len({service.follow() for _ in range(40)}) > 1
    assert service.take_bindings() == [] and len(service.affinity.sessions) == 0


async def test_sessions_are_of_a_model_and_tenant() -> None:
    service = await ready()
    other = PartitionKey("other", "t")
    await service.selections.workers.put(worker(9, other))
    place = service.book(blocks=20)
    assert service.follow(key=other) == (9, 0)
    assert service.book(key=other) == (9, 0)
    assert service.follow() == place
    assert [bound.partition for bound in service.bound] == [M, other]


@pytest.mark.parametrize("by", ["free", "expire", "replica"])
async def test_the_time_begins_when_the_last_booking_ends(by: str) -> None:
    service = await ready()
    place = service.book(blocks=20, reservation_id="a")
    service.now += EXPIRY_S / 2
    assert service.book(blocks=20, reservation_id="b") == place
    service.free("a")
    service.take_bindings()
    service.now += EXPIRY_S / 2 - 1
    service.expire()
    assert service.follow() == place
    if by == "free":
        service.free("b")
    elif by == "expire":
        service.now += EXPIRY_S
        service.expire()
    else:
        event = Event(M, BLOCK_SIZE, "b", *place, Step.FREE)
        assert service.selections.reservations.apply(event, service.now) is Outcome.APPLIED
    assert service.take_bindings() == [("s", *place)]
    service.now += TTL_S - 1
    assert service.follow() == place
    service.now += 1
    service.expire()
    assert len({service.follow() for _ in range(40)}) > 1
    assert not service.affinity.leases and len(service.affinity.sessions) == 0
    service.check()


async def test_who_says_where_is_heard_first() -> None:
    service = await ready()
    place = service.book()
    other = service.others(place)[0]
    pinned = Constraints(pinned=other)
    assert service.follow(constraints=pinned) == other
    assert service.book(constraints=pinned) == other
    assert service.follow(affinity=other) == other
    assert service.book(affinity=other) == other
    allowed = Constraints(allowed=frozenset([other[0]]))
    assert service.follow(constraints=allowed)[0] == other[0]
    assert service.book(constraints=allowed)[0] == other[0]
    assert service.take_bindings() == [("s", *place)]
    for _ in range(9):
        assert service.follow() == place  # none of these bookings has moved it
    service.check()


async def test_constraints_that_leave_its_rank_do_not_matter() -> None:
    service = await ready()
    place = service.book(blocks=20)
    allowed = Constraints(allowed=frozenset([1, 2, 3]))
    for _ in range(9):
        assert service.follow(constraints=allowed) == place
    assert service.book("t", constraints=Constraints(allowed=frozenset([2])))[0] == 2
    assert service.follow("t")[0] == 2
    assert service.book("u", constraints=Constraints(pinned=(1, 0))) == (1, 0)
    assert len({service.follow("u") for _ in range(40)}) > 1


async def test_a_session_whose_worker_leaves_is_bound_anew() -> None:
    service = await ready()
    place = service.book(blocks=20, reservation_id="a")
    await service.selections.workers.delete(place[0])
    assert not service.affinity.leases
    assert service.follow()[0] != place[0]
    fresh = service.book()
    assert fresh[0] != place[0] and service.follow() == fresh
    await service.selections.workers.put(worker(place[0], data_parallel_size=2))
    assert service.follow() == fresh
    service.check()


async def test_a_shrunk_worker_is_left_as_well() -> None:
    service = Sessions()
    await service.selections.workers.put(worker(1, data_parallel_size=2))
    assert service.book(constraints=Constraints(allowed=frozenset([1])), blocks=9)
    service.reserve("x", service.follow(), list(range(50)))
    (bound,) = service.bound
    if bound.dp_rank == 0:
        smaller = worker(1, data_parallel_start_rank=1, data_parallel_size=1)
    else:
        smaller = worker(1, data_parallel_size=1)
    await service.selections.workers.put(smaller)
    left = 1 - (bound.dp_rank or 0)
    assert service.follow() == service.book() == (1, left)
    assert service.bound[-1].version > bound.version


async def test_its_rank_is_taken_though_busy_while_another_is_not() -> None:
    """As with Dynamo's router; when all ranks are busy, the request waits like any other."""
    service = await ready()
    place = service.book(blocks=BATCH)
    service.reserve("load", place, [1], BATCH + 1)
    assert service.follow() == place
    for number, other in enumerate([*service.others(place), (place[0], 1 - place[1])]):
        service.reserve(f"other {number}", other, [1], BATCH + 1)
    held = service.select([5], session_id="s")
    assert isinstance(held, QueuedRequest)
    service.free("other 0")  # the end of any request releases it, to the rank of its session
    answered = held.answer
    assert isinstance(answered, bytes) and f'"worker_id":{place[0]},'.encode() in answered


@pytest.mark.parametrize("constraints", [None, Constraints(allowed=frozenset([1, 2, 3]))])
async def test_an_overloaded_rank_is_left_for_good(constraints: Constraints | None) -> None:
    settings = Settings(active_prefill_tokens_threshold=BATCH)
    service = await ready(RouterOptions(settings, session_affinity_ttl_s=TTL_S))
    place = service.book()
    service.reserve("load", place, [1], BATCH + 1)
    assert service.follow() != place
    fresh = service.book(constraints=constraints)
    assert fresh != place
    service.free("load")
    assert service.follow() == fresh


# ---- replicas


def bound_to(worker_id: int, dp_rank: int | None, sequence: int = 10**18, **members: Any) -> Bound:
    fine = {"partition": M, "session_id": "s"} | members
    return Bound(fine["partition"], fine["session_id"], worker_id, dp_rank, Version(sequence, 5))


async def test_a_replica_is_believed_until_its_time_is_up() -> None:
    service = await ready()
    assert service.affinity.apply(bound_to(2, 1)) is Outcome.APPLIED
    for _ in range(9):
        assert service.follow() == (2, 1)
    service.now += TTL_S
    assert len({service.follow() for _ in range(40)}) > 1
    assert service.affinity.apply(bound_to(3, None)) is Outcome.APPLIED
    assert {service.follow() for _ in range(40)} == {(3, 0), (3, 1)}
    assert service.take_bindings() == []
    place = service.book()
    assert place[0] == 3 and service.take_bindings() == [
        ("s", 3, None)
    ]  # bound to a worker, as before


async def test_what_replicas_say_of_others_is_dropped() -> None:
    service = await ready()
    other = PartitionKey("none", "t")
    misfits = {
        Outcome.UNKNOWN_MODEL: bound_to(1, 0, partition=other),
        Outcome.UNKNOWN_WORKER: bound_to(4, 0),
        Outcome.UNKNOWN_RANK: bound_to(1, 2),
    }
    for outcome, bound in misfits.items():
        assert service.affinity.apply(bound) is outcome
    assert service.affinity.apply(bound_to(1, 0, 6)) is Outcome.APPLIED
    assert service.affinity.apply(bound_to(2, 0, 5)) is Outcome.OLDER
    assert service.follow() == (1, 0)


async def test_two_replicas_agree() -> None:
    one, two = await ready(seed=1), await ready(seed=2)
    for mine, theirs in ((one, two), (two, one)):
        mine.affinity.bindings.subscribe(theirs.affinity.apply)
    place = one.book(blocks=20, reservation_id="a")
    assert [two.follow() for _ in range(9)] == [place] * 9
    assert two.book(reservation_id="b") == place
    one.free("a")
    two.free("b")
    await one.selections.workers.delete(place[0])
    moved = one.book()
    assert moved != place and two.follow() == moved
