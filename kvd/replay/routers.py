"""Routers of a replay: one or several of kvd's selectors, which get events at once or late.

Delayed    events wait for their time          (none: events come at once)
  └ SeveralRouters each request asks one of them   (none: one router)
      └ CoreRouter    index, ledger and pool of kvd_core
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from kvd.replay.cache import Event, Stored
from kvd.replay.policies import Chooser
from kvd.replay.recording import RecordedRequest, ReplayError
from kvd.replay.simulation import Router, SimulatedFleet
from kvd_core.index.prefix_index import IngestStats, PrefixIndex
from kvd_core.ledger.ledger import ADDED, Ledger
from kvd_core.selector.selector import Candidate, Pool
from kvd_core.selector.settings import Settings

Held = Callable[[], list[int]]


@dataclass(frozen=True, slots=True)
class Routing:
    """The routing of a replay's requests."""

    policy: Chooser
    routers: int = 1
    synced: bool = True  # routers know each other's bookings, at once
    delay_s: tuple[float, float] = (0.0, 0.0)  # of KV events, drawn from this range
    joins_s: float | None = None  # when the last engine joins; None: it is there from the start

    def router(self, fleet: SimulatedFleet, seed: int) -> Router:
        """Returns a router for a fleet; `seed` decides among equals, and all else that is random.

        Raises ReplayError.
        """
        if self.joins_s is not None and fleet.engines == 1:
            raise ReplayError("--joins needs at least two engines")
        random = Random(seed)
        made = [
            CoreRouter(fleet, self.policy.settings(), random.getrandbits(64), self.joins_s)
            for _ in range(self.routers)
        ]
        router: Router = made[0]
        if self.routers > 1:
            router = SeveralRouters(made, random.getrandbits(64), synced=self.synced)
        if self.delay_s[1] > 0:
            router = Delayed(router, fleet.engines, self.delay_s, random.getrandbits(64))
        return router


class CoreRouter:
    """Routes as kvd does with these settings, in any of its modes, but without a queue."""

    def __init__(
        self, fleet: SimulatedFleet, settings: Settings, seed: int, joins_s: float | None = None
    ) -> None:
        self.settings = settings
        self.index = PrefixIndex(fleet.block_size, IngestStats())
        self.ledger = Ledger()
        self._random = Random(seed)
        self._joins_s = joins_s
        # The engines that may be chosen before the last one joins.
        self._before = bytes([1] * (fleet.engines - 1) + [0])
        self._workers = [self.index.add_worker(number) for number in range(fleet.engines)]
        for worker in self._workers:
            worker.register(0)
        ranks = [
            Candidate(number, 0, worker, self.ledger.add_rank(number, 0))
            for number, worker in enumerate(self._workers)
        ]
        self.pool = Pool(self.index, self.ledger, fleet.block_size, ranks)

    def hear(self, engine: int, event: Event, now: float) -> None:
        # An id names a block and all before it, so it serves as engine hash and as local hash.
        if isinstance(event, Stored):
            self._workers[engine].store(0, event.blocks, event.blocks, event.parent)
        else:
            self._workers[engine].drop(0, event.blocks)

    def route(self, request: RecordedRequest, held: Held, now: float) -> int:
        self._match(request)
        joined = self._joins_s is None or now >= self._joins_s
        eligible = None if joined else self._before
        chosen = self.pool.choose(self.settings, eligible, self._random.getrandbits(64))
        self._reserve(request, chosen, now)
        return chosen

    def mirror(self, request: RecordedRequest, chosen: int, now: float) -> None:
        """Books another router's choice."""
        self._match(request)
        self._reserve(request, chosen, now)

    def judge(self, request: RecordedRequest, chosen: int, now: float) -> bool:
        """Books another router's choice; returns whether no rank costs less."""
        self._match(request)
        costs = [row.cost for row in self.pool.explain(self.settings)]
        self._reserve(request, chosen, now)
        return costs[chosen] == min(costs)

    def prefill_complete(self, request: RecordedRequest) -> None:
        self.ledger.prefill_complete(request.name)

    def finished(self, request: RecordedRequest) -> None:
        self.ledger.free(request.name)

    def _match(self, request: RecordedRequest) -> None:
        self.pool.match(request.hashes, request.hashes, request.input_tokens)

    def _reserve(self, request: RecordedRequest, chosen: int, now: float) -> None:
        tokens = self.pool.effective_prefill_tokens(chosen, self.settings)
        if self.pool.reserve(request.name, chosen, tokens, now) != ADDED:
            raise ValueError(f"{request.name} cannot be booked")


class SeveralRouters:
    """Routers behind one address: each request asks one at random; all get all KV events."""

    def __init__(self, routers: Sequence[CoreRouter], seed: int, *, synced: bool) -> None:
        self._routers = routers
        self._random = Random(seed)
        self._synced = synced
        self._asked: dict[str, CoreRouter] = {}  # by request; empty with sync

    def hear(self, engine: int, event: Event, now: float) -> None:
        for router in self._routers:
            router.hear(engine, event, now)

    def route(self, request: RecordedRequest, held: Held, now: float) -> int:
        asked = self._random.choice(self._routers)
        chosen = asked.route(request, held, now)
        if not self._synced:
            self._asked[request.name] = asked
            return chosen
        for router in self._routers:
            if router is not asked:
                router.mirror(request, chosen, now)
        return chosen

    def prefill_complete(self, request: RecordedRequest) -> None:
        for router in self._those_of(request):
            router.prefill_complete(request)

    def finished(self, request: RecordedRequest) -> None:
        for router in self._those_of(request):
            router.finished(request)
        self._asked.pop(request.name, None)

    def _those_of(self, request: RecordedRequest) -> Sequence[CoreRouter]:
        return self._routers if self._synced else [self._asked[request.name]]


class _Late(NamedTuple):
    due_s: float
    event: Event
    happened_s: float


class Delayed:
    """Passes events on to a router late, those of each engine in order."""

    def __init__(
        self, router: Router, engines: int, delay_s: tuple[float, float], seed: int
    ) -> None:
        self._router = router
        self._delay_s = delay_s
        self._random = Random(seed)
        self._late: list[deque[_Late]] = [deque() for _ in range(engines)]

    def hear(self, engine: int, event: Event, now: float) -> None:
        waiting = self._late[engine]
        due_s = now + self._random.uniform(*self._delay_s)
        if waiting:
            due_s = max(due_s, waiting[-1].due_s)
        waiting.append(_Late(due_s, event, now))

    def route(self, request: RecordedRequest, held: Held, now: float) -> int:
        for engine, waiting in enumerate(self._late):
            while waiting and waiting[0].due_s <= now:
                late = waiting.popleft()
                self._router.hear(engine, late.event, late.happened_s)
        return self._router.route(request, held, now)

    def prefill_complete(self, request: RecordedRequest) -> None:
        self._router.prefill_complete(request)

    def finished(self, request: RecordedRequest) -> None:
        self._router.finished(request)
