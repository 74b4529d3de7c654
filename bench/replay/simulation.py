"""Replays requests in simulated time: arrivals are routed, engines work, routers hear of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Protocol

from bench.replay.cache import Cache
from bench.replay.engine import Engine, Job, Speed
from bench.replay.trace import Request


class Router(Protocol):
    """Who chooses an engine; one router sees all requests and events, without delay."""

    def hear(self, engine: int, batch: bytes) -> None:
        """Takes a batch of KV events."""

    def route(self, request: Request, held: Sequence[int], now: float) -> int:
        """Chooses an engine and books the request there; `held` is the truth of all caches."""
        ...

    def prefill_complete(self, request: Request) -> None: ...

    def finished(self, request: Request) -> None: ...


@dataclass(frozen=True)
class Fleet:
    """What is simulated."""

    engines: int = 8
    capacity: int = 2000  # blocks of each engine
    speed: Speed = field(default_factory=Speed)


@dataclass(frozen=True)
class Outcome:
    """What became of all requests."""

    jobs: list[Job]  # in order of arrival
    engines: list[Engine]
    live: list[list[int]]  # requests on each engine, at every arrival


def replay(requests: Sequence[Request], fleet: Fleet, router: Router) -> Outcome:
    """Returns when every request has been served."""
    engines = [
        Engine(
            Cache(fleet.capacity, partial(router.hear, number)),
            fleet.speed,
            lambda job: router.prefill_complete(job.request),
            lambda job: router.finished(job.request),
        )
        for number in range(fleet.engines)
    ]
    due = [inf] * fleet.engines
    jobs: list[Job] = []
    live: list[list[int]] = []

    def work_until(end_s: float) -> None:
        while (at := min(due)) <= end_s and at < inf:
            number = due.index(at)
            engines[number].work(at)
            due[number] = engines[number].due_s()

    for request in requests:
        work_until(request.arrival_s)
        live.append([engine.live for engine in engines])
        held = [engine.cache.held(request.blocks) for engine in engines]
        number = router.route(request, held, request.arrival_s)
        jobs.append(engines[number].submit(request, request.arrival_s))
        due[number] = engines[number].due_s()
    work_until(inf)
    return Outcome(jobs, engines, live)
