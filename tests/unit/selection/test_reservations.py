"""Reservations that are retried or given back, and the weight of their output."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio

from kvd.errors import Conflict, NotFound
from kvd.faces.selection.booking_metrics import booking_families
from kvd.selection.immediate import ImmediateSteps
from kvd.selection.options import RouterOptions
from kvd.selection.requests import Retry
from kvd.telemetry.metrics import render
from kvd.wire.lifecycle import Lifecycle as Event
from kvd.wire.lifecycle import Outcome, Step
from tests.support.cancelling import every_checkpoint
from tests.support.held_selections import BATCH, OPTIONS, batched, calls, ready, settled
from tests.support.selecting import BLOCK_SIZE, EXPIRY_S, M, Service


async def busy(options: RouterOptions = OPTIONS) -> Service:
    """Returns a service with one worker, which is busy with `a`."""
    service = await ready(batched(1), options=options)
    service.reserve("a", (1, 0), [901], BATCH + 1)
    return service


def steps(service: Service, name: str) -> list[Step]:
    return [event.step for event in service.events if event.request_id == name]


# ---- callers that leave


async def test_a_caller_that_left_before_it_heard_keeps_nothing(nursery: trio.Nursery) -> None:
    service = await busy()
    caller = calls(nursery, service, [1, 2], reservation_id="r")
    await settled()
    caller.scope.cancel()
    service.selections.reservations.free("a")  # it is served, but its task is cancelled already
    assert "r" in service.selections.reservations.owner_of
    await settled()
    assert caller.answer is None
    assert "r" not in service.selections.reservations.owner_of
    assert steps(service, "r") == [Step.ADD, Step.FREE]
    service.check()


async def test_a_caller_that_is_served_before_it_leaves_hears(nursery: trio.Nursery) -> None:
    service = await busy()
    caller = calls(nursery, service, [1, 2], reservation_id="r")
    await settled()
    service.selections.reservations.free("a")
    caller.scope.cancel()
    await settled()
    assert caller.answer is not None and "r" in service.selections.reservations.owner_of
    service.selections.scheduler.take_back(caller.held)  # as its connection would
    assert "r" not in service.selections.reservations.owner_of
    service.check()


async def test_what_is_given_back_serves_the_next(nursery: trio.Nursery) -> None:
    service = await busy()
    first = calls(nursery, service, [1, 2], reservation_id="r1", tokens=BATCH + 1)
    second = calls(nursery, service, [1, 2], reservation_id="r2", tokens=BATCH + 1)
    await settled()
    first.scope.cancel()
    service.selections.reservations.free("a")
    await settled()
    assert list(service.selections.reservations.owner_of) == ["r2"]
    assert second.answer is not None
    service.check()


async def test_another_booking_of_the_same_id_is_not_given_back(nursery: trio.Nursery) -> None:
    service = await busy()
    caller = calls(nursery, service, [1, 2], reservation_id="r")
    await settled()
    service.selections.reservations.free("a")
    await settled()
    service.selections.reservations.free("r")
    service.now += 1
    service.reserve("r", (1, 0), [5])
    service.selections.scheduler.take_back(caller.held)
    assert "r" in service.selections.reservations.owner_of
    service.check()


async def test_selections_without_a_booking_leave_nothing(nursery: trio.Nursery) -> None:
    service = await busy()
    caller = calls(nursery, service, [1, 2])
    await settled()
    caller.scope.cancel()
    service.selections.reservations.free("a")
    await settled()
    service.selections.scheduler.take_back(caller.held)
    assert not service.selections.reservations.owner_of
    service.check()


async def test_a_caller_that_goes_at_any_moment_leaves_no_trace() -> None:
    for cancelling in every_checkpoint():
        service = await busy()

        async def select(service: Service = service) -> None:
            scheduler = service.selections.scheduler
            held = service.select([1, 2], reservation_id="r")
            answer = await scheduler.wait(held)
            try:
                await trio.lowlevel.checkpoint()  # stands for sending the answer
                assert answer
            except trio.Cancelled:
                scheduler.take_back(held)
                raise

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancelling.run, select)
            await settled()
            service.selections.reservations.free("a")
        assert ("r" in service.selections.reservations.owner_of) is not cancelling.reached
        assert service.selections.scheduler.held == 0
        service.check()


# ---- retries


def retry(given: str | None = "r", key: str = "k", content: bytes = b"1") -> Retry:
    return Retry((given, key), content)


async def test_the_same_request_has_the_same_answer_and_no_further_effect() -> None:
    service = await ready(batched(1), batched(2))
    asked = {"reservation_id": "r", "retry": retry()}
    first = service.select([1, 2], **asked)
    for _ in range(3):
        assert service.select([1, 2], **asked) == first
    assert steps(service, "r") == [Step.ADD]
    assert service.candidates().ledger.stats()["requests"] == 1
    assert service.selections.reservations.retries.repeated == 3
    service.check()


async def test_a_retry_without_an_id_gets_the_one_that_was_made() -> None:
    service = await ready(batched(1))
    first = service.select([1], reservation_id="made", retry=retry(None))
    again = service.select([1], reservation_id="made anew", retry=retry(None))
    assert again == first and again["reservation_id"] == "made"
    assert list(service.selections.reservations.owner_of) == ["made"]


@pytest.mark.parametrize("other", [retry(content=b"2"), retry(key="other"), retry("r", "k2"), None])
async def test_another_request_is_a_conflict(other: Retry | None) -> None:
    service = await ready(batched(1))
    service.select([1], reservation_id="r", retry=retry())
    with pytest.raises(Conflict):
        service.select([1], reservation_id="r", retry=other)
    assert service.candidates().ledger.stats()["requests"] == 1


async def test_a_key_is_that_of_its_reservation() -> None:
    service = await ready(batched(1))
    service.select([1], reservation_id="r", retry=retry("r"))
    service.select([1], reservation_id="s", retry=retry("s", content=b"2"))
    assert set(service.selections.reservations.owner_of) == {"r", "s"}


@pytest.mark.parametrize("by", ["free", "route", "expire", "delete", "replica"])
async def test_once_the_booking_has_ended_the_request_is_a_new_one(by: str) -> None:
    service = await ready(batched(1), batched(2))
    first = service.select([1], reservation_id="r", retry=retry())
    if by == "free":
        service.selections.reservations.free("r")
    elif by == "route":
        ImmediateSteps(service.selections).free("r")
    elif by == "expire":
        service.now += EXPIRY_S + 1
        service.expire()
    elif by == "delete":
        await service.selections.workers.delete(first["worker_id"])
    else:
        event = Event(M, BLOCK_SIZE, "r", first["worker_id"], 0, Step.FREE)
        assert service.selections.reservations.apply(event, service.now) is Outcome.APPLIED
    assert len(service.selections.reservations.retries) == 0  # nobody can ask for its answer
    service.now += 1
    assert service.select([1], reservation_id="r", retry=retry(content=b"2"))
    assert list(service.selections.reservations.owner_of) == ["r"]
    service.check()


async def test_answers_are_forgotten_at_the_bound() -> None:
    service = await ready(batched(1), options=replace(OPTIONS, max_retries=2))
    for name in ("a", "b", "c"):
        service.select([1], reservation_id=name, retry=retry(name))
    kept = service.selections.reservations.retries
    assert (len(kept), kept.forgotten) == (2, 1)
    with pytest.raises(Conflict):
        service.select([1], reservation_id="a", retry=retry("a"))
    assert service.select([1], reservation_id="b", retry=retry("b"))


async def test_ended_bookings_take_no_room() -> None:
    service = await ready(batched(1), options=replace(OPTIONS, max_retries=2))
    asked = {"reservation_id": "a", "retry": retry("a")}
    first = service.select([1], **asked)
    for name in ("b", "c", "d"):
        service.select([1], reservation_id=name, retry=retry(name))
        service.selections.reservations.free(name)
    kept = service.selections.reservations.retries
    assert (len(kept), kept.forgotten) == (1, 0)
    assert service.select([1], **asked) == first


async def test_both_of_two_that_wait_get_one_booking(nursery: trio.Nursery) -> None:
    service = await busy()
    callers = [
        calls(nursery, service, [1, 2], reservation_id=name, retry=retry(None))
        for name in ("made", "made anew")
    ]
    await settled()
    service.selections.reservations.free("a")
    await settled()
    assert callers[0].answer == callers[1].answer is not None
    assert list(service.selections.reservations.owner_of) == ["made"]
    service.selections.scheduler.take_back(callers[0].held)
    assert "made" in service.selections.reservations.owner_of  # the other caller has it, too
    service.selections.scheduler.take_back(callers[1].held)
    assert not service.selections.reservations.owner_of
    service.check()


async def test_metrics_say_so(nursery: trio.Nursery) -> None:
    options = replace(OPTIONS, predicted_ttl_s=9.0, session_affinity_ttl_s=9)
    service = await busy(options)
    caller = calls(nursery, service, [1, 2], reservation_id="r")
    await settled()
    caller.scope.cancel()
    service.selections.reservations.free("a")
    await settled()
    for _ in range(3):
        service.select([1, 2], reservation_id="s", session_id="s", retry=retry("s"))
    text = b"".join(render(booking_families(service.selections))).decode()
    lines = [line.split() for line in text.splitlines() if line[0] != "#"]
    assert {name: float(value) for name, value in lines} == {
        "kvd_selection_reservations": 1,
        "kvd_selection_given_back_total": 1,
        "kvd_selection_expired_total": 0,
        "kvd_selection_removed_total": 0,
        "kvd_selection_early_ends": 0,
        "kvd_selection_early_ends_forgotten_total": 0,
        "kvd_selection_retries_known": 1,
        "kvd_selection_retries_total": 2,
        "kvd_selection_retries_forgotten_total": 0,
        "kvd_selection_sessions": 1,
        "kvd_selection_sessions_dropped_total": 0,
        "kvd_selection_predicted_blocks": 3,  # 901, 1 and 2
    }


# ---- the weight of output


def decode_blocks(service: Service) -> int:
    rank = service.candidates().ledger.rank_of(1, 0)
    assert rank is not None
    return service.candidates().ledger.load(rank).decode_blocks


@pytest.mark.parametrize("tracks", [True, False])
async def test_output_blocks_fade_towards_the_expected_end(tracks: bool) -> None:
    service = await ready(batched(1), options=RouterOptions(tracks_output_blocks=tracks))
    service.select([], 1, reservation_id="r", expected_output_tokens=8 * BLOCK_SIZE)
    loads = []
    for _ in range(10):
        service.selections.reservations.output_block("r", None)
        loads.append(decode_blocks(service))
    weighed = [1, 2, 2, 2, 2, 2, 1, 0, 0, 0]  # n x (1 - n / 8), rounded
    assert loads == (weighed if tracks else list(range(1, 11)))
    service.check()


async def test_a_given_fraction_goes_before() -> None:
    service = await ready(batched(1), options=RouterOptions(tracks_output_blocks=True))
    service.select([], 1, reservation_id="r", expected_output_tokens=1000 * BLOCK_SIZE)
    for _ in range(4):
        service.selections.reservations.output_block("r", 0.25)
    assert decode_blocks(service) == 1


async def test_without_an_expectation_they_count_in_full() -> None:
    service = await ready(batched(1), options=RouterOptions(tracks_output_blocks=True))
    service.select([], 1, reservation_id="r")
    for _ in range(4):
        service.selections.reservations.output_block("r", None)
    assert decode_blocks(service) == 4
    with pytest.raises(NotFound):
        service.selections.reservations.output_block("x", None)


async def test_a_mirrored_booking_fades_as_well() -> None:
    service = await ready(batched(1), options=RouterOptions(tracks_output_blocks=True))
    add = Event(M, BLOCK_SIZE, "r", 1, 0, Step.ADD, b"", 0, 2 * BLOCK_SIZE)
    assert service.selections.reservations.apply(add, service.now) is Outcome.APPLIED
    for load in (1, 0):
        service.selections.reservations.output_block("r", None)
        assert decode_blocks(service) == load  # a half, rounded away from zero; then nothing


async def test_what_one_replica_has_freed_another_does_not_bring_back() -> None:
    service = await ready(batched(1))
    reservations = service.selections.reservations
    add = Event(M, BLOCK_SIZE, "r", 1, 0, Step.ADD, b"", 8, router_id=1)
    freed = replace(add, step=Step.FREE, router_id=2)
    assert reservations.apply(freed, service.now) is Outcome.UNKNOWN_REQUEST
    assert reservations.apply(add, service.now) is Outcome.ENDED
    assert not reservations.owner_of
    assert reservations.apply(freed, service.now) is Outcome.UNKNOWN_REQUEST
    service.select([1, 2], reservation_id="r")  # clients may use the id again at once
    assert reservations.apply(add, service.now) is Outcome.ENDED
    assert list(reservations.owner_of) == ["r"]


async def test_what_is_shown() -> None:
    service = await ready(batched(1))
    service.select([1, 2], reservation_id="r", expected_output_tokens=9)
    key, live = service.selections.reservations.find("r")
    assert (key, live.worker_id, live.blocks, live.expected_output_tokens) == (M, 1, 2, 9)
    with pytest.raises(NotFound):
        service.selections.reservations.find("x")
