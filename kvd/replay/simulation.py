"""Replays requests in simulated time: routes arrivals, lets engines work, passes events on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Protocol

from kvd.replay.cache import Cache, Event
from kvd.replay.engine import Engine, Job, Speed
from kvd.replay.recording import RecordedRequest

REPORTED = 100  # requests of a replay between two reports of its progress


class Router(Protocol):
    """Chooses an engine."""

    def hear(self, engine: int, event: Event, now: float) -> None:
        """Takes a KV event of an engine."""

    def route(self, request: RecordedRequest, held: Callable[[], list[int]], now: float) -> int:
        """Chooses an engine and books the request there; `held` says what each cache really has."""
        ...

    def prefill_complete(self, request: RecordedRequest) -> None: ...

    def finished(self, request: RecordedRequest) -> None: ...


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """The engines that are simulated."""

    engines: int = 8
    capacity: int = 2000  # blocks of each engine
    block_size: int = 512  # tokens
    speed: Speed = field(default_factory=Speed)
    factors: tuple[float, ...] = (1.0,)  # for the speeds of the engines, in turn


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """The outcomes of all requests."""

    jobs: list[Job]  # in order of arrival
    chosen: list[int]  # the engine of each
    engines: list[Engine]


def replay(
    requests: Sequence[RecordedRequest],
    fleet: SimulatedFleet,
    router: Router,
    report: Callable[[int], None] = lambda served: None,
) -> ReplayOutcome:
    """Serves all requests and returns how; `report` is called with how many more have arrived.

    O(requests x (blocks of a prompt + engines)), some 0.1 ms a request.
    """
    engines = [
        Engine(
            Cache(fleet.capacity, partial(router.hear, number)),
            fleet.block_size,
            fleet.speed.times(fleet.factors[number % len(fleet.factors)]),
            lambda job: router.prefill_complete(job.request),
            lambda job: router.finished(job.request),
        )
        for number in range(fleet.engines)
    ]
    due = [inf] * fleet.engines
    jobs: list[Job] = []
    chosen: list[int] = []

    def work_until(end_s: float) -> None:
        while (at := min(due)) <= end_s and at < inf:
            number = due.index(at)
            engines[number].work(at)
            due[number] = engines[number].due_s()

    for count, request in enumerate(requests, 1):
        work_until(request.arrival_s)
        held = partial(_held, engines, request)
        number = router.route(request, held, request.arrival_s)
        jobs.append(engines[number].submit(request, request.arrival_s))
        chosen.append(number)
        due[number] = engines[number].due_s()
        if count % REPORTED == 0:
            report(REPORTED)
    work_until(inf)
    report(len(requests) % REPORTED)
    return ReplayOutcome(jobs, chosen, engines)


def _held(engines: Sequence[Engine], request: RecordedRequest) -> list[int]:
    return [engine.cache.held(request.blocks) for engine in engines]
