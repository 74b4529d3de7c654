"""Reservations and held selections through their whole lives, compared with a plain model.

Nothing here waits for a clock: the tests set it, and their steps make held selections answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
import trio
import trio.testing

from kvd.errors import BadRequest, Conflict, NotFound, Unavailable
from kvd.model import PartitionKey
from kvd.selection.candidates import Candidates
from kvd.selection.options import RouterOptions
from kvd.selection.queue import QueuePolicy
from kvd.selection.requests import Constraints, QueuedRequest
from kvd.selection.scheduler import SERVED_AT_ONCE, Scheduler
from kvd.selection.worker_record import WorkerRecord
from kvd.wire.lifecycle import Lifecycle as Event
from kvd.wire.lifecycle import Outcome, Step
from kvd_core.base.hashing import sequence_hashes
from kvd_core.ledger.ledger import Ledger
from tests.models import selector_model
from tests.models.ledger_model import ModelLedger
from tests.models.selector_model import ModelPool, ModelPrompt, ModelRank, ModelSettings
from tests.support.budget import scaled
from tests.support.cancelling import every_checkpoint
from tests.support.hashes import packed
from tests.support.held_selections import BATCH, OPTIONS, Caller, batched, calls, ready, settled
from tests.support.selecting import BLOCK_SIZE, EXPIRY_S, M, N, Service, lookup, worker

SMALL_BATCH = 6  # so small that workers are often busy
ONLY = {number: Constraints(allowed=frozenset([number])) for number in range(1, 5)}


def small(worker_id: int, key: PartitionKey = M, **members: Any) -> WorkerRecord:
    return worker(worker_id, key, max_num_batched_tokens=SMALL_BATCH, **members)


# ---- the whole life of reservations, against a model


class Life:
    """A service and its model, which must agree under random steps."""

    KEYS = (M, M, N)
    NAMES = tuple(f"r{number}" for number in range(30))

    def __init__(self, service: Service, rng: Random) -> None:
        self.service = service
        self.rng = rng
        self.ledgers = {key: ModelLedger() for key in set(self.KEYS)}
        self.callers: dict[str, Caller] = {}
        self.steps = 0
        self.served = 0  # held selections that were served

    def home(self, name: str) -> ModelLedger | None:
        return next((one for one in self.ledgers.values() if name in one.requests), None)

    def blocks(self) -> list[int]:
        """Returns a prefix of one of few prompts, now and then with a block of its own."""
        root = self.rng.choice((1, 2))
        prompt = [root * 10 + number for number in range(self.rng.randrange(7))]
        return prompt + [self.rng.getrandbits(60)] * (self.rng.random() < 0.3)

    async def step(self, nursery: trio.Nursery) -> None:
        self.steps += 1
        kinds: dict[Callable[[], Awaitable[None] | None], int] = {
            partial(self.select, nursery): 9,
            self.reserve: 4,
            self.prefill_complete: 4,
            self.output_block: 3,
            self.free: 4,
            self.replica: 3,
            self.expire: 1,
            self.leave: 1,
            self.change: 1,
        }
        (kind,) = self.rng.choices(list(kinds), list(kinds.values()))
        unfinished = kind()
        if unfinished is not None:
            await unfinished
        await settled()
        self.collect()

    def select(self, nursery: trio.Nursery) -> None:
        """Selects at temperature 0; the result must be one of those that the model allows."""
        key, name = self.rng.choice(self.KEYS), self.rng.choice([None, *self.NAMES])
        constraints = self.rng.choice([None, None, None, *ONLY.values()])
        blocks = self.blocks()
        members = {"key": key, "reservation_id": name, "constraints": constraints}
        expected = self.expected(key, blocks, constraints)
        waits = key in self.service.selections.candidates and self.service.candidates(
            key
        ).queue.waits(constraints)
        try:
            answer = self.service.select(blocks, **members)
        except Unavailable:
            assert expected == selector_model.NONE
        except Conflict:
            assert name is not None and self.home(name) is not None
        else:
            if isinstance(answer, QueuedRequest):
                assert waits or expected == selector_model.BUSY
                label = name or f"anonymous {self.steps}"
                if label in self.callers:
                    label = f"{name} again {self.steps}"
                self.callers[label] = caller = Caller(self.service, answer)
                nursery.start_soon(caller.run)
            else:
                assert not waits and (answer["worker_id"], answer["dp_rank"]) in expected
                self.booked(name, answer, blocks, key)

    def expected(self, key: PartitionKey, blocks: list[int], constraints: Any) -> Any:
        """Returns NONE, BUSY, or the ranks of the lowest cost."""
        ledger, ranks = self.ledgers[key], []
        rolling = sequence_hashes(blocks)
        for rank in sorted(ledger.ranks):
            if constraints is None or rank[0] in constraints.allowed:
                prefill, decode, requests = ledger.load(rank)
                live = ledger.depth(rank, rolling)
                ranks.append(
                    ModelRank(*rank, 0, 0, 0, live, prefill, decode, requests, SMALL_BATCH)
                )
        settings = ModelSettings(queue_threshold=1.0)
        prompt = ModelPrompt(len(blocks) * BLOCK_SIZE, len(blocks), BLOCK_SIZE)
        pool = ModelPool(ranks, prompt)
        chosen = pool.choose(settings, None, 0)
        if chosen < 0:
            return chosen
        least = pool.least_prefill(settings, None)
        costs = {
            (rank.worker_id, rank.dp_rank): selector_model.terms(rank, settings, prompt, least)[4]
            for rank in (ranks[i] for i in pool.open(settings, None))
        }
        return {rank for rank, cost in costs.items() if cost == min(costs.values())}

    def booked(self, name: str | None, answer: Any, blocks: list[int], key: PartitionKey) -> None:
        if name is not None:
            tokens = answer["effective_prefill_tokens"]
            assert tokens == len(blocks) * BLOCK_SIZE
            rank = answer["worker_id"], answer["dp_rank"]
            self.add(name, rank, blocks, tokens, key)

    def add(
        self, name: str, rank: tuple[int, int], blocks: list[int], tokens: int, key: PartitionKey
    ) -> None:
        rolling = sequence_hashes(blocks)
        assert self.home(name) is None
        assert self.ledgers[key].add(name, rank, rolling, tokens, self.service.now, None) == 0

    def collect(self) -> None:
        """Takes the answers of held selections, and books them in the model."""
        for label, caller in list(self.callers.items()):
            if caller.error is not None or caller.answer is not None or caller.scope.cancel_called:
                del self.callers[label]
            if caller.answer is not None:
                key = PartitionKey(caller.answer["model_name"], "t")
                blocks = list(array("Q", caller.held.prompt.local_hashes))
                name = caller.answer.get("reservation_id")
                self.booked(name, caller.answer, blocks, key)
                self.served += 1

    def reserve(self) -> None:
        key, name, blocks = self.rng.choice(self.KEYS), self.rng.choice(self.NAMES), self.blocks()
        rank = self.rng.randint(1, 3), self.rng.randrange(2)
        tokens = self.rng.choice((0, 0, 1, 40, 120))
        try:
            self.service.reserve(name, rank, blocks, tokens, key)
        except Unavailable:
            assert not self.ledgers[key].ranks
        except NotFound:
            assert rank not in self.ledgers[key].ranks
        except Conflict:
            assert self.home(name) is not None
        else:
            self.add(name, rank, blocks, tokens, key)

    def known(self, name: str, done: Any) -> None:
        """Takes a step, which must fail if and only if the reservation does not exist."""
        home = self.home(name)
        try:
            done()
        except NotFound:
            assert home is None
        else:
            assert home is not None

    def prefill_complete(self) -> None:
        name = self.rng.choice(self.NAMES)
        self.known(name, lambda: self.service.selections.reservations.prefill_complete(name))
        if home := self.home(name):
            home.prefill_complete(name)

    def output_block(self) -> None:
        name, fraction = self.rng.choice(self.NAMES), self.rng.choice((None, 0.0, 0.5, 1.0))
        self.known(name, lambda: self.service.selections.reservations.output_block(name, fraction))
        if home := self.home(name):
            home.output_block(name, fraction)

    def free(self) -> None:
        name = self.rng.choice(self.NAMES)
        self.known(name, lambda: self.service.selections.reservations.free(name))
        if home := self.home(name):
            home.free(name)

    def replica(self) -> None:
        key, name, blocks = self.rng.choice(self.KEYS), self.rng.choice(self.NAMES), self.blocks()
        rank = self.rng.randint(1, 3), self.rng.randrange(2)
        place = key, BLOCK_SIZE, name, *rank
        rolling = packed(sequence_hashes(blocks))
        step = self.rng.choice(list(Step))
        event = Event(*place, step, rolling, 40) if step is Step.ADD else Event(*place, step)
        published = len(self.service.events)
        before = self.home(name)
        outcome = self.service.selections.reservations.apply(event, self.service.now)
        assert len(self.service.events) == published or step is not Step.ADD
        ledger = self.ledgers[key]
        if outcome is Outcome.APPLIED and step is Step.ADD:
            self.add(name, rank, blocks, 40, key)
        elif outcome is Outcome.APPLIED:
            assert before is ledger and ledger.requests[name].rank == rank
            ledger.free(name) if step is Step.FREE else ledger.prefill_complete(name)
        elif step is Step.ADD:
            assert rank not in ledger.ranks or before is not None
        else:
            assert before is not ledger or ledger.requests[name].rank != rank

    def expire(self) -> None:
        self.service.now += self.rng.choice((1.0, 30.0, 60.0))
        self.service.expire()
        for ledger in self.ledgers.values():
            ledger.expire(self.service.now - EXPIRY_S, 1000)

    def leave(self) -> None:
        """Has a waiting caller leave."""
        if self.callers:
            self.rng.choice(list(self.callers.values())).scope.cancel()

    async def change(self) -> None:
        """Registers, changes, moves or deletes a worker."""
        worker_id, key = self.rng.randint(1, 3), self.rng.choice(self.KEYS)
        if self.rng.random() < 0.2:
            try:
                await self.service.selections.workers.delete(worker_id)
            except NotFound:
                return
            size = 0
        else:
            size = self.rng.randint(1, 2)
            await self.service.selections.workers.put(
                small(worker_id, key, data_parallel_size=size)
            )
        for of, ledger in self.ledgers.items():
            wanted = {(worker_id, rank) for rank in range(size)} if of == key else set()
            for rank in [rank for rank in ledger.ranks if rank[0] == worker_id]:
                if rank not in wanted or size == 0:
                    ledger.remove_rank(rank)
            for rank in wanted:
                ledger.add_rank(rank)

    def check(self) -> None:
        self.service.check()
        assert self.service.selections.scheduler.held == len(self.callers)
        for key, ledger in self.ledgers.items():
            candidates = self.service.selections.candidates.get(key)
            if candidates is None:
                assert not ledger.ranks
                continue
            names = {
                name
                for name, of in self.service.selections.reservations.owner_of.items()
                if of is candidates
            }
            assert names == set(ledger.requests)
            assert {(each.worker_id, each.dp_rank) for each in candidates.pool.candidates} == set(
                ledger.ranks
            )
            for rank in ledger.ranks:
                number = candidates.ledger.rank_of(*rank)
                assert number is not None and candidates.ledger.load(number) == ledger.load(rank)


@pytest.mark.parametrize("seed", range(scaled(3)))
async def test_any_life_of_reservations_goes_as_in_the_model(seed: int) -> None:
    service = await ready(small(1, data_parallel_size=2), small(2), small(3, N))
    life = Life(service, Random(seed))
    for ledger, ranks in ((M, [(1, 0), (1, 1), (2, 0)]), (N, [(3, 0)])):
        for rank in ranks:
            life.ledgers[ledger].add_rank(rank)
    async with trio.open_nursery() as nursery:
        for _ in range(250):
            await life.step(nursery)
            life.check()
        service.selections.scheduler.stop()
        await settled()
        life.collect()
        life.check()
        assert not life.callers and life.served > 0
    for name in list(service.selections.reservations.owner_of):
        service.selections.reservations.free(name)
    assert all(row.ledger.stats()["blocks"] == 0 for row in service.selections.candidates.values())


# ---- held selections


async def busy_fleet(**settings: Any) -> Service:
    """Returns a service with two workers, busy with `a` and `b`."""
    service = await ready(batched(1), batched(2), **settings)
    service.reserve("a", (1, 0), [901], BATCH + 1)
    service.reserve("b", (2, 0), [902], BATCH + 1)
    return service


@pytest.mark.parametrize("tokens", [BATCH, BATCH + 1])
async def test_a_rank_is_busy_above_the_threshold(tokens: int) -> None:
    service = await ready(batched(1))
    service.reserve("a", (1, 0), [901], tokens)
    assert isinstance(service.select([1]), QueuedRequest) is (tokens > BATCH)
    await service.selections.workers.put(worker(2))  # without a batch size it is never busy
    service.reserve("b", (2, 0), [902], 10**6)
    assert not isinstance(service.select([1], constraints=ONLY[2]), QueuedRequest)


@pytest.mark.parametrize("by", ["prefill_complete", "free", "replica", "join", "expire"])
async def test_what_lets_a_held_selection_go(by: str, nursery: trio.Nursery) -> None:
    service = await busy_fleet()
    caller = calls(nursery, service, [1, 2], reservation_id="r")
    await settled()
    assert caller.answer is None and service.selections.scheduler.held == 1
    if by == "prefill_complete":
        service.selections.reservations.prefill_complete("b")
    elif by == "free":
        service.selections.reservations.free("b")
    elif by == "replica":
        event = Event(M, BLOCK_SIZE, "b", 2, 0, Step.FREE)
        assert service.selections.reservations.apply(event, service.now) is Outcome.APPLIED
    elif by == "join":
        await service.selections.workers.put(batched(3))
    else:
        service.now += EXPIRY_S + 1
        service.expire()
    await settled()
    assert caller.answer["worker_id"] in ({3} if by == "join" else {1, 2})
    if by not in ("join", "expire"):
        assert caller.answer["worker_id"] == 2
    assert (
        "r" in service.selections.reservations.owner_of and service.selections.scheduler.held == 0
    )
    service.check()


async def test_what_another_face_ends_lets_them_go(nursery: trio.Nursery) -> None:
    service = await ready(batched(1))
    other = Ledger(loads=service.candidates().ledger.loads)
    other.add("a", other.add_rank(1, 0), b"", BATCH + 1, service.now)
    assert other.loads.eased is None  # nothing is held
    callers = [calls(nursery, service, [1]) for _ in range(2)]
    service.check()
    assert other.loads.eased is not None
    other.prefill_complete("a")
    other.loads.eased()
    await settled()
    assert all(caller.answer["worker_id"] == 1 for caller in callers)
    service.check()
    assert other.loads.eased is None


async def test_prompts_that_came_hashed_end_with_the_block_size(nursery: trio.Nursery) -> None:
    service = await ready(batched(1))
    service.reserve("a", (1, 0), [901], BATCH + 1)
    before = service.candidates().ledger.loads
    caller = calls(nursery, service, [1])
    await service.selections.workers.put_all(M, [batched(1, block_size=2 * BLOCK_SIZE)])
    await settled()
    assert caller.answer is None
    assert str(caller.error) == "the block size of the workers changed while the request waited"
    assert before is not service.candidates().ledger.loads and before.eased is None
    service.check()


async def test_tokens_are_hashed_by_the_block_size_there_is_when_they_are_served(
    nursery: trio.Nursery,
) -> None:
    service = await ready(batched(1))
    service.reserve("a", (1, 0), [901], BATCH + 1)
    length = BATCH + 2
    callers = {
        name: calls(nursery, service, [1, 2], tokens=length, reservation_id=name)
        for name in ("b", "c")
    }
    hashed = calls(nursery, service, [1, 2], tokens=length, reservation_id="d")
    for caller in callers.values():
        caller.held.again = lookup([7], length)
    wide = batched(1, block_size=2 * BLOCK_SIZE)
    await service.selections.workers.put_all(M, [wide])
    await settled()  # nothing is booked now: the first is served, and keeps the others waiting
    answer = callers["b"].answer
    assert answer["block_size"] == 2 * BLOCK_SIZE
    assert service.selections.reservations.find("b")[1].blocks == 1
    assert callers["c"].answer is None and callers["c"].error is None
    # A selection that no worker can serve fails at once instead of waiting behind others.
    assert str(hashed.error) == "the block size of the workers changed while the request waited"
    service.selections.reservations.prefill_complete("b")
    await settled()
    assert callers["c"].answer["potential_decode_blocks"] == answer["potential_decode_blocks"]
    assert service.selections.stats.rehashed == 2
    service.check()


async def test_a_worker_with_more_room_lets_them_go(nursery: trio.Nursery) -> None:
    service = await busy_fleet()
    caller = calls(nursery, service, [1])
    await service.selections.workers.patch(
        2, lambda record: replace(record, max_num_batched_tokens=1000)
    )
    await settled()
    assert caller.answer["worker_id"] in (1, 2)  # once one is not busy, the cheapest is chosen


@pytest.mark.parametrize("policy", QueuePolicy)
async def test_the_order_of_those_held(policy: QueuePolicy, nursery: trio.Nursery) -> None:
    service = await busy_fleet(options=replace(OPTIONS, queue_policy=policy))
    urgencies: dict[str, dict[str, Any]] = {
        "first, long": {"tokens": 400},
        "second, short": {"tokens": 101},
        "third, jumps": {"tokens": 300, "priority_jump": 5.0},
        "last, strict": {"tokens": 500, "strict_priority": 1},
    }
    callers = {}
    for name, urgency in urgencies.items():
        callers[name] = calls(nursery, service, [1], reservation_id=name, **urgency)
        service.now += 1
    served: list[str] = []
    service.selections.reservations.prefill_complete("b")
    while len(served) < len(callers):  # each one makes the worker busy until its prefill is done
        await settled()
        (new,) = (name for name, one in callers.items() if one.answer and name not in served)
        served.append(new)
        service.selections.reservations.prefill_complete(new)
    by_policy = {
        QueuePolicy.FCFS: ["last, strict", "third, jumps", "first, long", "second, short"],
        QueuePolicy.WSPT: ["last, strict", "third, jumps", "second, short", "first, long"],
    }
    assert served == by_policy[policy]
    service.check()


async def test_constrained_ones_block_nobody(nursery: trio.Nursery) -> None:
    service = await busy_fleet()
    only_1 = calls(nursery, service, [1], constraints=ONLY[1])
    only_2 = calls(nursery, service, [1], constraints=ONLY[2])
    service.selections.reservations.free("b")
    await settled()
    assert only_1.answer is None and only_2.answer["worker_id"] == 2
    assert service.select([5])["worker_id"] == 2
    service.check()


async def test_only_those_who_wait_for_a_changed_rank_are_asked(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = await busy_fleet()
    asked: list[Any] = []
    serve = Scheduler._serve

    def noted(self: Scheduler, candidates: Candidates, held: QueuedRequest) -> int:
        asked.append(held.request.constraints)
        return serve(self, candidates, held)

    monkeypatch.setattr(Scheduler, "_serve", noted)
    only_1 = calls(nursery, service, [1], constraints=ONLY[1])
    only_2 = calls(nursery, service, [2], constraints=ONLY[2], tokens=400)
    for _ in range(2):  # each is tried once, and then sleeps until its rank changes
        service.selections.scheduler.drain_queues()
    assert asked == [ONLY[1], ONLY[2]]
    service.selections.reservations.free("b")
    assert asked[2:] == [ONLY[2]] and only_2.answer is None  # its task has yet to run
    await settled()
    assert only_2.answer["worker_id"] == 2 and only_1.answer is None
    assert len(asked) == 3
    service.selections.reservations.free("a")
    await settled()
    assert only_1.answer["worker_id"] == 1
    service.check()


async def test_many_who_can_be_served_are_so_in_several_passes(nursery: trio.Nursery) -> None:
    service = await busy_fleet()
    waiting = [calls(nursery, service, [1], constraints=ONLY[1], tokens=1) for _ in range(100)]
    await settled()
    service.selections.reservations.free("a")
    assert sum(each.held.done.is_set() for each in waiting) == SERVED_AT_ONCE
    await settled()
    assert all(each.answer["worker_id"] == 1 for each in waiting)
    service.check()


async def test_no_candidate_is_worth_waiting_for(nursery: trio.Nursery) -> None:
    service = await ready(batched(1), batched(2))
    for _ in range(10):
        assert service.select([1], affinity=(1, None))["worker_id"] == 1
    assert service.select([1], affinity=(1, 7))["worker_id"] in (1, 2)
    assert service.select([1], affinity=(2, 0), constraints=ONLY[1])["worker_id"] == 1
    service.reserve("a", (1, 0), [901], BATCH + 1)
    assert service.select([1], affinity=(1, 0))["worker_id"] == 2
    service.reserve("b", (2, 0), [902], BATCH + 1)
    caller = calls(nursery, service, [1], affinity=(1, 0))
    service.selections.reservations.free("b")
    await settled()
    assert caller.answer["worker_id"] == 2


async def test_nobody_is_left_to_serve_them(nursery: trio.Nursery) -> None:
    service = await busy_fleet()
    anyone, only_2 = calls(nursery, service, [1]), calls(nursery, service, [1], constraints=ONLY[2])
    await service.selections.workers.delete(2)
    await settled()
    assert only_2.error is not None and only_2.error.status == 503 and anyone.error is None
    await service.selections.workers.patch(1, lambda record: replace(record, endpoint=""))
    await settled()
    assert anyone.error is not None and anyone.error.status == 503
    assert service.selections.scheduler.held == 0 and not service.selections.reservations.owner_of
    service.check()


async def test_an_id_that_lives_is_a_conflict_at_once(nursery: trio.Nursery) -> None:
    service = await busy_fleet()
    first = calls(nursery, service, [1], reservation_id="r")
    second = calls(nursery, service, [1], reservation_id="r")  # the id is not taken yet
    with pytest.raises(Conflict):
        service.select([1], reservation_id="a")
    service.selections.reservations.free("a")
    service.selections.reservations.free("b")
    await settled()
    assert first.answer and second.error is not None and second.error.status == 409
    service.check()


async def test_constraints_that_contradict_each_other() -> None:
    service = await ready(batched(1))
    both = Constraints(allowed=frozenset([2]), pinned=(1, 0))
    with pytest.raises(BadRequest):
        service.select([1], constraints=both)
    for unmet in (
        Constraints(allowed=frozenset()),
        Constraints(pinned=(1, 1)),
        Constraints(taints=frozenset(["x"])),
    ):
        with pytest.raises(Unavailable):
            service.select([1], constraints=unmet)


@pytest.mark.parametrize("bound", [{"options": replace(OPTIONS, max_held=3)}, {"max_waiting": 3}])
async def test_so_many_wait_and_no_more(bound: dict[str, Any], nursery: trio.Nursery) -> None:
    """The number is bounded by the setting, or by the descriptors for clients."""
    service = await busy_fleet(**bound)
    callers = [calls(nursery, service, [1]) for _ in range(3)]
    with pytest.raises(Unavailable) as refused:
        service.select([1])
    assert refused.value.retry_after_s and service.selections.scheduler.held == 3
    callers[0].scope.cancel()
    await settled()
    calls(nursery, service, [1])
    service.selections.reservations.free("a")
    await settled()
    assert service.selections.scheduler.held == 0
    service.check()


async def test_nobody_waits_for_ever(autojump_clock: trio.testing.MockClock) -> None:
    service = await busy_fleet()
    held = service.select([1], reservation_id="r")
    start = trio.current_time()
    with pytest.raises(Unavailable) as late:
        await service.selections.scheduler.wait(held)
    assert trio.current_time() - start == pytest.approx(OPTIONS.max_wait_s)
    assert late.value.retry_after_s and service.selections.scheduler.held == 0
    service.selections.reservations.free("a")
    assert "r" not in service.selections.reservations.owner_of
    service.check()


async def test_a_caller_that_goes_away_leaves_no_trace() -> None:
    for cancelling in every_checkpoint():
        service = await busy_fleet()
        before = len(service.events)

        async def select(service: Service = service) -> bytes:
            held = service.selections.scheduler.select(
                service.ask(reservation_id="r"), lookup([1, 2])
            )
            assert isinstance(held, QueuedRequest)
            return await service.selections.scheduler.wait(held)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancelling.run, select)
            await settled()
            cancelled = cancelling.reached
            service.selections.reservations.free("a")
        assert ("r" in service.selections.reservations.owner_of) is not cancelled
        assert len(service.events) - before == (1 if cancelled else 2)
        assert service.selections.scheduler.held == len(service.candidates().queue) == 0
        service.check()


@pytest.mark.slow("hundreds of tasks")
async def test_hundreds_wait(nursery: trio.Nursery) -> None:
    service = await busy_fleet()
    rng = Random(4)
    lanes = [None, None, ONLY[1], ONLY[2], Constraints(pinned=(1, 0))]
    callers = [
        calls(
            nursery,
            service,
            [number],
            tokens=rng.choice((30, 120)),
            reservation_id=str(number),
            constraints=rng.choice(lanes),
            strict_priority=rng.randrange(3),
        )
        for number in range(600)
    ]
    await settled()
    assert service.selections.scheduler.held == 600
    for caller in rng.sample(callers, 60):
        caller.scope.cancel()
    await settled()
    assert service.selections.scheduler.held == 540
    service.selections.reservations.prefill_complete("a")
    service.selections.reservations.prefill_complete("b")
    while service.selections.scheduler.held:
        await settled()
        for name in list(service.selections.reservations.owner_of):
            service.selections.reservations.free(name)
    await settled()
    answered = [caller for caller in callers if caller.answer]
    assert len(answered) == 540 and all(caller.error is None for caller in callers)
    assert not service.candidates().queue._queues and not service.selections.reservations.owner_of
    assert service.candidates().ledger.stats()["blocks"] == 0
    service.check()


async def test_stopping_answers_all(nursery: trio.Nursery) -> None:
    service = await busy_fleet()
    await service.selections.workers.put(batched(3, N))
    service.reserve("c", (3, 0), [903], BATCH + 1, N)
    callers = [
        calls(nursery, service, [1], key=key, constraints=constraints)
        for key in (M, N)
        for constraints in (None, Constraints(pinned=(3 if key == N else 1, 0)))
        for _ in range(3)
    ]
    service.selections.scheduler.stop()
    with pytest.raises(Unavailable):
        service.select([1])
    await settled()
    assert [caller.error.status if caller.error else None for caller in callers] == [503] * 12
    service.selections.reservations.free("a")
    assert service.select([1])["worker_id"] == 1  # a selection that need not wait is served
    service.check()


# ---- without events


async def test_what_is_booked_counts_as_cached() -> None:
    service = await ready(worker(1), worker(2), options=RouterOptions(uses_kv_events=False))
    service.select([1, 2, 3])
    assert service.select([1, 2, 3])["overlap"]["longest_matched"] == 0
    booked = service.select([1, 2, 3], reservation_id="r")
    # Pinned: the saved prefill and the load cost the same, so either worker might be chosen.
    place = Constraints(pinned=(booked["worker_id"], 0))
    again = service.select([1, 2, 3, 4], constraints=place)
    assert again["overlap"]["gpu"] == 3 * BLOCK_SIZE
    assert again["effective_prefill_tokens"] == BLOCK_SIZE
    service.selections.reservations.free("r")
    assert service.select([1, 2])["overlap"]["gpu"] == 2 * BLOCK_SIZE
    service.now += 60
    service.reserve("s", (booked["worker_id"], 0), [1])
    service.now += 60  # the time to live of blocks that were not booked again
    service.expire()
    assert service.select([1, 2, 3])["overlap"]["gpu"] == BLOCK_SIZE
    service.check()
    await service.selections.workers.delete(booked["worker_id"])
    await service.selections.workers.put(worker(booked["worker_id"]))
    assert service.select([1])["overlap"]["gpu"] == 0
    service.check()


@pytest.mark.parametrize("seed", range(4))
async def test_predictions_are_those_of_ranks_that_are_there(seed: int) -> None:
    """They agree with the model whatever is booked, expires, is pruned or goes with its worker."""
    rng = Random(seed)
    options = RouterOptions(uses_kv_events=False, ttl_s=20.0, max_tree_size=30)
    service = await ready(worker(1, data_parallel_size=2), worker(2), options=options)
    booked: dict[tuple[int, int, tuple[int, ...]], float] = {}  # possible predictions, and expiries
    for number in range(300):
        kind = rng.random()
        prompt = [rng.choice((1, 2)) for _ in range(rng.randrange(8))]
        if kind < 0.6:
            if service.candidates().workers:
                chosen = service.select(prompt, reservation_id=str(number))
                rank = chosen["worker_id"], chosen["dp_rank"]
                for depth in range(1, len(prompt) + 1):
                    booked[(*rank, tuple(prompt[:depth]))] = service.now + options.ttl_s
        elif kind < 0.9:
            service.now += rng.choice((0.0, 1.0, 10.0))
            service.expire()
        elif kind < 0.95:
            await service.selections.workers.put(worker(1, data_parallel_size=rng.randint(1, 3)))
        elif 2 in service.selections.workers.entries:
            await service.selections.workers.delete(2)
        else:
            await service.selections.workers.put(worker(2))
        service.check()
        candidates = service.candidates()
        assert candidates.predicted() <= 30
        there = {(each.worker_id, each.dp_rank) for each in candidates.pool.candidates}
        booked = {
            key: until
            for key, until in booked.items()
            if key[:2] in there and until > service.now - (0 if 0.6 <= kind < 0.9 else 20)
        }
        lookup(prompt)(candidates.pool)
        for each in candidates.pool.explain(options.settings):
            depth = each.device_blocks
            assert not depth or (each.worker_id, each.dp_rank, tuple(prompt[:depth])) in booked
