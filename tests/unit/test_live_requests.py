"""The life of requests, common to slot trackers and reservations, as observers see it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import pytest

from kvd.errors import NotFound
from kvd.model import PartitionKey
from kvd.slots.live_requests import LiveRequests, Moment
from kvd.slots.trackers import SlotTrackers
from kvd.wire.lifecycle import Lifecycle, Outcome, Step
from kvd_core.json.scan import BodyScanner
from tests.support.selecting import BLOCK_SIZE, EXPIRY_S, Service, worker
from tests.support.selecting import M as KEY

BEGIN = 1000.0  # seconds
NO_PROMPT = BodyScanner({"sequence_hashes": "i64"}, ())


class Face(Protocol):
    """A face with worker 1, which has one rank."""

    now: float
    requests: LiveRequests[Any]

    def book(self, name: str, tokens: int) -> None: ...
    def complete(self, name: str) -> None: ...
    def free(self, name: str) -> None: ...
    def undo(self, name: str) -> None: ...
    async def remove(self) -> None: ...


class Slots:
    def __init__(self) -> None:
        self.now = BEGIN
        self.requests = self.slots = SlotTrackers(EXPIRY_S, clock=lambda: self.now)

    async def start(self) -> Slots:
        self.slots.register(KEY, 1, BLOCK_SIZE, 0, 1)
        return self

    def book(self, name: str, tokens: int) -> None:
        NO_PROMPT.scan(b'{"sequence_hashes":[]}')
        tracker = self.slots.tracker(*KEY)
        assert self.slots.add(tracker, name, 1, 0, NO_PROMPT, tokens, self.now, None)

    def complete(self, name: str) -> None:
        self.slots.prefill_complete(self.slots.tracker(*KEY), name)

    def free(self, name: str) -> None:
        self.slots.end(self.slots.tracker(*KEY), name)

    def undo(self, name: str) -> None:
        self.slots.undoing(self.slots.tracker(*KEY), name, self.now)()

    async def remove(self) -> None:
        await self.slots.unregister(KEY, 1)


class Selection(Service):
    @property
    def requests(self) -> LiveRequests[Any]:
        return self.selections.reservations

    async def start(self) -> Selection:
        await self.selections.workers.put(worker())
        return self

    def book(self, name: str, tokens: int) -> None:
        self.reserve(name, (1, 0), [], tokens)

    def complete(self, name: str) -> None:
        self.selections.reservations.prefill_complete(name)

    def free(self, name: str) -> None:
        self.selections.reservations.free(name)

    def undo(self, name: str) -> None:
        self.selections.reservations.undoing(self.candidates(), name, self.now)()

    async def remove(self) -> None:
        await self.selections.workers.delete(1)


@pytest.fixture(params=[Slots, Selection])
async def face(request: pytest.FixtureRequest) -> Face:
    made: Face = await request.param().start()
    return made


def observed(face: Face) -> list[Moment]:
    moments: list[Moment] = []
    face.requests.moments.subscribe(moments.append)
    return moments


def in_short(moments: list[Moment]) -> list[tuple[float, Step, str]]:
    assert {moment.key for moment in moments} == {PartitionKey(*KEY)}
    return [(moment.time - BEGIN, moment.step, moment.request_id) for moment in moments]


async def test_an_observer_hears_of_each_step_with_its_time_and_the_request(face: Face) -> None:
    moments = observed(face)
    for later, step in enumerate((lambda name: face.book(name, 48), face.complete, face.free)):
        face.now = BEGIN + later
        step("r")
    steps = [Step.ADD, Step.PREFILL_COMPLETE, Step.FREE]
    assert in_short(moments) == [(at, step, "r") for at, step in enumerate(steps)]
    lives = [moment.live for moment in moments]
    assert [live and (live.admitted_at, live.tokens) for live in lives] == [(BEGIN, 48)] * 3
    assert [live and live.prefill_complete for live in lives] == [False, False, True]


async def test_what_is_repeated_or_unknown_is_no_moment_of_a_request(face: Face) -> None:
    face.book("r", 1)
    moments = observed(face)
    for unknown in (face.complete, face.free):
        with contextlib.suppress(NotFound):  # some of these are refused, others ignored
            unknown("x")
    assert moments == []
    face.complete("r")
    face.complete("r")  # a repetition, as the client may not know that the first one arrived
    assert [moment.live and moment.live.prefill_complete for moment in moments] == [False, True]


async def test_a_replicas_steps_are_moments_of_the_same_kind(face: Face) -> None:
    moments = observed(face)
    add = Lifecycle(KEY, BLOCK_SIZE, "r", 1, 0, Step.ADD, b"", 48)
    for later, step in enumerate(Step):
        event = replace(add, step=step)
        assert face.requests.apply(event, BEGIN + later) is Outcome.APPLIED
        if step is Step.FREE:
            assert face.requests.apply(event, BEGIN + later) is Outcome.UNKNOWN_REQUEST
    assert in_short(moments) == [(at, step, "r") for at, step in enumerate(Step)]
    assert [moment.live and moment.live.tokens for moment in moments] == [48] * 3


def expired(face: Face) -> None:
    for _ in face.requests.expire(BEGIN + EXPIRY_S + 1):
        pass


@pytest.mark.parametrize("end", [expired, lambda face: face.remove(), lambda face: face.undo("r")])
async def test_ends_that_no_client_asked_for(face: Face, end: Callable[[Face], Any]) -> None:
    face.book("r", 48)
    moments = observed(face)
    if (waiting := end(face)) is not None:
        await waiting
    (moment,) = moments
    assert (moment.step, moment.request_id) == (Step.FREE, "r")
    requests = face.requests
    given_back = requests.given_back == 1
    assert (moment.live is not None) is given_back
    assert requests.expired + requests.removed + requests.given_back == 1


async def test_an_observer_may_look_at_what_there_is_while_it_is_told(face: Face) -> None:
    """It is notified within the step: a beginning request is already booked, an ending one gone."""
    seen: list[bool] = []
    (owner,) = face.requests._owners.values()
    face.requests.moments.subscribe(
        lambda moment: seen.append(owner.ledger.request(moment.request_id) is not None)
    )
    face.book("r", 48)
    face.complete("r")
    face.free("r")
    assert seen == [True, True, False]
