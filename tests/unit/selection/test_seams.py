"""All parts of the selection service at once: each has to keep up with changes by the others.

Sessions, phases, modes, retries, thresholds, predictions, and a slot tracker on the same ranks are
used while workers come, change and go and clients leave. After every step all state that is kept
twice agrees, no request waits that a rank could serve, and in the end nothing is left.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import trio

from kvd.errors import KvdError
from kvd.selection.options import THRESHOLDS, RouterOptions
from kvd.selection.phases import PREFILL_SUFFIX, Phase, in_phase
from kvd.selection.requests import Constraints, QueuedRequest, Retry
from kvd.selection.service import Selections
from kvd.selection.worker_record import Role, WorkerRecord
from kvd.slots.shared_loads import Ledgers
from kvd.slots.trackers import SlotTrackers
from kvd_core.selector.selector import BUSY, OVERLOADED
from kvd_core.selector.settings import DIRECT, KV, LEAST_LOADED, RANDOM, ROUND_ROBIN, Settings
from tests.support.held_selections import Caller, settled
from tests.support.selecting import BLOCK_SIZE, EXPIRY_S, M, Service, lookup, worker

STEPS = 200
BATCH = 40  # tokens
MODES = (KV, RANDOM, ROUND_ROBIN, LEAST_LOADED)
SESSIONS = ("s1", "s2", "s3")
FEATURES: dict[str, dict[str, Any]] = {
    "events": {},
    "predicted": {"predicted_ttl_s": 10.0},
    "no events": {"uses_kv_events": False, "ttl_s": 30.0},
}


class Life:
    """One random life of a service, and of the slot tracker beside it."""

    def __init__(self, seed: int, nursery: trio.Nursery, features: dict[str, Any]) -> None:
        self.rng = rng = Random(seed)
        self.nursery = nursery
        settings = Settings(queue_threshold=1.0, mode=rng.choice(MODES))
        more = {"session_affinity_ttl_s": 20, "tracks_output_blocks": True, **features}
        self.service = service = Service(RouterOptions(settings, **more))
        clocks = (lambda: service.now), (lambda: int(service.now * 1e9))
        ledgers = Ledgers()
        parts = service.state, service.registry, service.options, EXPIRY_S, Random(seed)
        self.selections = service.selections = Selections(*parts, *clocks, ledgers=ledgers)
        self.selections.reservations.steps.subscribe(service.events.append)
        self.slots = SlotTrackers(EXPIRY_S, ledgers)
        self.callers: list[Caller] = []
        self.tracked: list[str] = []  # requests added to the slot tracker
        self.seen: Counter[str] = Counter()

    def record(self, worker_id: int) -> WorkerRecord:
        rng = self.rng
        return worker(
            worker_id,
            data_parallel_size=rng.choice((1, 1, 2)),
            max_num_batched_tokens=rng.choice((*[BATCH] * 5, None)),
            total_kv_blocks=rng.choice((None, 20)),
            role=rng.choice((None, *Role)),
            taints=rng.choice(((), ("x",), ("x", "y"))),
        )

    def name(self) -> str:
        return f"r{self.rng.randrange(40)}{self.rng.choice(('', '', '', PREFILL_SUFFIX))}"

    def live(self, names: Iterable[str]) -> str:
        """Returns one of these names, or any other."""
        return self.rng.choice([*names, self.name()])

    def select(self) -> None:
        rng = self.rng
        constraints: Constraints | None = Constraints(
            rng.choice((None,) * 4 + (frozenset(rng.sample(range(1, 5), 2)),)),
            rng.choice((None,) * 5 + ((rng.randint(1, 4), 0),)),
            rng.choice((frozenset(),) * 4 + (frozenset("x"),)),
        )
        settings = self.selections.settings(M)
        if rng.random() < 0.2:
            settings = settings.replace(mode=rng.choice((*MODES, DIRECT)))
        name = rng.choice((None, *[self.name()] * 3))
        retry = Retry((name, "k"), rng.choice((b"1", b"2"))) if name else None
        answer = self.service.select(
            [*range(10, 10 + rng.randrange(5)), *rng.sample(range(2**50), rng.randrange(14))],
            settings=settings,
            constraints=None if constraints == Constraints() else constraints,
            phase=rng.choice((None, None, *Phase)),
            reservation_id=name,
            retry=rng.choice((None, retry)),
            session_id=rng.choice((None, *SESSIONS)),
            preferred=rng.choice((None, {"x": 1.0})),
            affinity=rng.choice((None, None, (rng.randint(1, 5), None))),
            strict_priority=rng.randrange(2),
            explain=rng.random() < 0.3,
            expected_output_tokens=rng.choice((None, 10)),
        )
        if isinstance(answer, QueuedRequest):
            self.seen["held"] += 1
            self.callers.append(Caller(self.service, answer))
            self.nursery.start_soon(self.callers[-1].run)

    def step(self) -> None:
        rng, reservations = self.rng, self.selections.reservations
        kind = rng.choice(
            ("complete", "free", "output", "reserve", "cancel", "track", "untrack", "untrack")
        )
        if kind == "complete":
            reservations.prefill_complete(self.live(reservations.owner_of))
        elif kind == "free":
            reservations.free(self.live(reservations.owner_of))
        elif kind == "output":
            reservations.output_block(self.name(), rng.choice((None, 0.5)))
        elif kind == "reserve":
            rank = rng.randint(1, 4), 0
            phase = rng.choice((None, Phase.PREFILL, Phase.DECODE))
            reservations.reserve_on_rank(
                M, self.name(), rank, lookup([1, 2]), 8, predicts=True, phase=phase
            )
        elif kind == "cancel" and self.callers:
            rng.choice(self.callers).scope.cancel()
        elif kind == "track":
            self.track(rng.randint(1, 4), rng.choice((0, 50, 50)))
        elif kind == "untrack":
            tracker, name = self.slots.tracker(*M), self.live(self.tracked[-5:])
            rng.choice((self.slots.end, self.slots.prefill_complete))(tracker, name)

    def track(self, worker_id: int, tokens: int) -> None:
        tracker = self.slots.trackers.get(M)
        if tracker is None or worker_id not in tracker.workers:
            self.slots.register(M, worker_id, BLOCK_SIZE, 0, 2)
        tracker = self.slots.tracker(*M)
        rolling = array("Q", [1, 2]).tobytes()
        rank, name = tracker.rank(worker_id, 0), self.name()
        tracker.ledger.add(name, rank, rolling, tokens, self.service.now)
        self.tracked.append(name)

    async def change(self) -> None:
        rng, workers, tuning = self.rng, self.selections.workers, self.selections.tuning
        kind = rng.choice(("put", "put", "all", "delete", "break", "limit", "free", "mode", "age"))
        number = rng.randint(1, 4)
        if kind == "put":
            await workers.put(self.record(number))
        elif kind == "all":
            await workers.put_all(M, [self.record(each) for each in rng.sample(range(1, 6), 3)])
        elif kind == "delete":
            await workers.delete(number)
        elif kind == "break":
            await workers.patch(number, lambda known: replace(known, endpoint=None))
        elif kind == "limit":
            tuning.change(("m", rng.choice((None, "t"))), {rng.choice(THRESHOLDS): 0.5})
        elif kind == "free":
            tuning.forget(("m", None), THRESHOLDS)
            tuning.forget(("m", "t"), THRESHOLDS)
        elif kind == "mode":
            tuning.change(("m", None), {"mode": rng.choice(MODES)})
        elif rng.random() < 0.3:
            self.service.now += rng.choice((5, 60))
            self.service.expire()
            for _ in self.slots.expire(self.service.now):
                pass

    def check(self) -> None:
        self.service.check()
        affinity = self.selections.affinity
        assert affinity is not None
        assert affinity.leases.keys() <= self.selections.reservations.owner_of.keys()
        leases = Counter(id(binding) for _, binding in affinity.leases.values())
        for session in SESSIONS:
            binding = affinity.sessions.find((M, session), self.service.now)
            assert binding is None or binding.leases == leases[id(binding)]
        for held in self.selections.candidates[M].queue:
            self.check_waits(held)

    def check_waits(self, held: QueuedRequest) -> None:
        """Checks that all ranks that could serve it are busy, or excluded by a threshold."""
        request, candidates = held.request, self.selections.candidates[M]
        phase = Phase.PREFILL if request.phase is Phase.BOTH else request.phase
        eligible = candidates.eligible(request.constraints_in(phase), phase)
        if request.phase is Phase.BOTH and not any(eligible or b"\1"):
            phase, eligible = None, candidates.eligible(request.constraints, None)
        refusal = candidates.pool.refusal(in_phase(request.settings, phase), eligible)
        assert refusal in (BUSY, OVERLOADED), request

    async def attempt(self, what: Callable[[], Any]) -> None:
        try:
            done = what()
            if done is not None:
                await done
        except KvdError as error:
            self.seen[type(error).__name__] += 1
        await settled()
        self.check()

    async def end(self) -> None:
        for caller in self.callers:
            caller.scope.cancel()
        await settled()
        reservations = self.selections.reservations
        while reservations.owner_of:
            reservations.free(next(iter(reservations.owner_of)))
        for worker_id in [*self.slots.trackers[M].workers] if self.slots.trackers else []:
            await self.slots.unregister(M, worker_id)
        self.service.now += EXPIRY_S
        self.service.expire()
        self.check()
        for candidates in json.loads(self.selections.render_loads(None, None)):
            assert candidates["pending_count"] == 0
            for row in candidates["loads"]:
                assert not any(row[name] for name in row if name not in ("worker_id", "dp_rank"))
        assert self.selections.affinity is not None and not self.selections.affinity.leases
        assert len(self.selections.affinity.sessions) == len(reservations.retries) == 0


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("seed", range(3))
async def test_everything_at_once(seed: int, features: str, nursery: trio.Nursery) -> None:
    life = Life(seed, nursery, FEATURES[features])
    for number in (1, 2, 3, 4):
        await life.selections.workers.put(life.record(number))
    for _ in range(STEPS):
        life.service.now += life.rng.choice((0.001, 0.01, 0.1))
        what = life.rng.choices((life.select, life.step, life.change), (20, 8, 2))[0]
        await life.attempt(what)
    assert life.seen["held"] > 3 and {"Conflict", "NotFound", "Unserved"} <= life.seen.keys()
    await life.end()
