"""Disaggregated serving: which worker serves which phase, what is booked and announced."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import trio

from kvd.errors import Conflict, NotFound, Unavailable
from kvd.selection.options import RouterOptions
from kvd.selection.phases import PREFILL_SUFFIX, Phase, serves
from kvd.selection.requests import Constraints, QueuedRequest, Retry
from kvd.selection.worker_record import Role
from kvd.wire.lifecycle import Outcome, Step
from kvd_core.base.hashing import sequence_hashes
from tests.support.hashes import packed
from tests.support.held_selections import (
    BATCH,
    OPTIONS,
    batched,
    calls,
    disaggregated,
    ready,
    settled,
)
from tests.support.little_memory import little_memory
from tests.support.selecting import BLOCK_SIZE, M, Service, lookup, worker

PROMPT = [11, 12, 13]
TOKENS = len(PROMPT) * BLOCK_SIZE


def loads(service: Service) -> dict[int, tuple[int, int, int]]:
    """Returns tokens being prefilled, blocks in use and requests by worker."""
    candidates = service.candidates()
    found = {}
    for each in candidates.pool.candidates:
        load = candidates.ledger.load(each.ledger_rank)
        found[each.worker_id] = (load[0], load[1], load[2])
    return found


def test_who_serves_what() -> None:
    table = {
        None: (True, False, True, True),
        Role.BOTH: (True, True, True, True),
        Role.PREFILL: (False, True, False, False),
        Role.DECODE: (True, False, True, True),
    }
    for role, wanted in table.items():
        phases = (None, Phase.PREFILL, Phase.DECODE, Phase.BOTH)
        assert tuple(serves(role, phase) for phase in phases) == wanted


async def test_prefill_goes_by_cache_and_prefill_load() -> None:
    service = await disaggregated()
    service.reserve("a", (2, 0), list(range(1000)))  # blocks in use have no effect on prefill
    service.reserve("b", (1, 0), [901], 8)
    answer = service.select(PROMPT, phase=Phase.PREFILL, reservation_id="r", explain=True)
    assert (answer["worker_id"], answer["phase"]) == (2, "prefill")
    rows = {row["worker_id"]: row for row in answer["candidates"]}
    assert [rows[each]["decode_cost"] for each in rows] == [0.0] * 4
    assert [rows[each]["eligible"] for each in (1, 2, 3, 4)] == [True, True, False, False]
    assert (rows[1]["cost"], rows[2]["cost"]) == (5.0, 3.0)
    assert loads(service)[2] == (TOKENS, 1000, 2)  # a prefill has no blocks of its own
    service.selections.reservations.prefill_complete("r")
    assert loads(service)[2] == (0, 1000, 2)


async def test_decode_goes_by_blocks_in_use_alone() -> None:
    service = await disaggregated()
    service.reserve("a", (4, 0), [901], BATCH * 100)  # makes it busy, which does not matter
    service.reserve("b", (3, 0), [902, 903])
    answer = service.select(PROMPT, phase=Phase.DECODE, reservation_id="r", explain=True)
    assert (answer["worker_id"], answer["phase"]) == (4, "decode")
    rows = {row["worker_id"]: row for row in answer["candidates"]}
    assert [rows[each]["prefill_cost"] for each in rows] == [0.0] * 4
    assert (rows[3]["cost"], rows[4]["cost"]) == (5.0, 4.0)
    assert loads(service)[4] == (BATCH * 100, 4, 2)  # a decode has no prefill tokens of its own


async def test_whole_requests_go_past_prefill_workers() -> None:
    service = await disaggregated()
    service.reserve("a", (3, 0), list(range(100)))
    service.reserve("b", (4, 0), list(range(100)))
    chosen = {service.select(PROMPT)["worker_id"] for _ in range(30)}
    assert chosen == {3, 4}
    for worker_id in (3, 4):
        await service.selections.workers.delete(worker_id)
    with pytest.raises(Unavailable, match="no endpoints available"):
        service.select(PROMPT)
    with pytest.raises(Unavailable, match="no decode worker"):
        service.select(PROMPT, phase=Phase.DECODE)
    assert service.select(PROMPT, phase=Phase.PREFILL)["worker_id"] in (1, 2)


async def test_both_in_one_step() -> None:
    service = await disaggregated()
    service.reserve("a", (1, 0), [901], 50)
    service.reserve("b", (3, 0), [902])
    answer = service.select(PROMPT, phase=Phase.BOTH, reservation_id="r", selection_id="s")
    assert (answer["worker_id"], answer["phase"], answer["reservation_id"]) == (4, "decode", "r")
    prefill = answer["prefill"]
    assert (prefill["worker_id"], prefill["phase"]) == (2, "prefill")
    assert prefill["reservation_id"] == "r:prefill"
    assert prefill["selection_id"] == answer["selection_id"] == "s"
    assert prefill.keys() == answer.keys() - {"prefill"}
    assert loads(service)[2] == (TOKENS, 0, 1) and loads(service)[4] == (0, 3, 1)
    service.check()


async def test_selecting_both_books_nothing() -> None:
    service = await disaggregated()
    answer = service.select(PROMPT, phase=Phase.BOTH)
    assert "reservation_id" not in answer and "reservation_id" not in answer["prefill"]
    assert not service.selections.reservations.owner_of


async def test_one_worker_may_serve_both() -> None:
    service = await ready(worker(1, role=Role.BOTH))
    answer = service.select(PROMPT, phase=Phase.BOTH, reservation_id="r")
    assert answer["worker_id"] == answer["prefill"]["worker_id"] == 1
    assert loads(service)[1] == (TOKENS, 3, 2)


@pytest.mark.parametrize("by", ["prefill_complete", "free"])
async def test_completion_ends_the_prefill_booking(by: str) -> None:
    service = await disaggregated()
    service.select(PROMPT, phase=Phase.BOTH, reservation_id="r")
    reservations = service.selections.reservations
    getattr(reservations, by)("r")
    assert set(reservations.owner_of) == ({"r"} if by == "prefill_complete" else set())
    assert sum(load[0] for load in loads(service).values()) == 0
    if by == "prefill_complete":
        reservations.prefill_complete("r")
        reservations.free("r")
    with pytest.raises(NotFound):
        reservations.free("r")
    assert all(load == (0, 0, 0) for load in loads(service).values())
    service.check()


@pytest.mark.parametrize("by", ["prefill_complete", "free"])
async def test_a_decode_worker_that_leaves_takes_the_prefill_booking_not_along(by: str) -> None:
    service = await disaggregated()
    answer = service.select(PROMPT, phase=Phase.BOTH, reservation_id="r")
    await service.selections.workers.delete(answer["worker_id"])
    reservations = service.selections.reservations
    assert set(reservations.owner_of) == {"r:prefill"}
    getattr(reservations, by)("r")
    assert not reservations.owner_of
    with pytest.raises(NotFound):
        getattr(reservations, by)("r")


async def test_both_are_booked_anew_when_one_worker_has_left() -> None:
    service = await disaggregated()
    asked = {"phase": Phase.BOTH, "reservation_id": "r", "retry": Retry(("r", "k"), b"1")}
    first = service.select(PROMPT, **asked)
    await service.selections.workers.delete(first["prefill"]["worker_id"])
    assert service.select(PROMPT, **asked) == first  # r still lives
    await service.selections.workers.put(batched(first["prefill"]["worker_id"], role=Role.PREFILL))
    service.selections.reservations.free("r")
    first = service.select(PROMPT, **asked)
    await service.selections.workers.delete(first["worker_id"])
    with pytest.raises(Conflict):
        service.select(PROMPT, **asked | {"retry": Retry(("r", "k"), b"2")})
    again = service.select(PROMPT, **asked)
    assert again["worker_id"] != first["worker_id"]
    assert service.selections.reservations.owner_of.keys() == {"r", "r:prefill"}
    assert sum(load[2] for load in loads(service).values()) == 2
    service.check()


async def test_what_is_left_of_both_is_given_back(nursery: trio.Nursery) -> None:
    service = await disaggregated()
    service.reserve("a", (1, 0), [901], BATCH + 1)
    service.reserve("b", (2, 0), [902], BATCH + 1)
    caller = calls(nursery, service, PROMPT, phase=Phase.BOTH, reservation_id="r")
    await settled()
    service.selections.reservations.free("b")
    await settled()
    await service.selections.workers.delete(caller.answer["worker_id"])
    assert set(service.selections.reservations.owner_of) == {"a", "r:prefill"}
    service.selections.scheduler.take_back(caller.held)  # its answer has reached no client
    assert set(service.selections.reservations.owner_of) == {"a"}
    assert service.selections.reservations.given_back == 1
    service.check()


async def test_both_are_booked_or_neither_where_memory_ends() -> None:
    """A decode worker keeps the hashes of its prompts, a prefill worker only their tokens."""
    service = await disaggregated()
    service.selections.reservations.steps.subscribers.clear()  # there are no replicas
    # All of one length, so that only what is booked takes further memory.
    prompts = [bytes([at + 1]) * 8 * 2**17 for at in range(16)]

    def reserve(name: str, prompt: bytes) -> None:
        ask = service.ask(phase=Phase.BOTH, reservation_id=name)
        service.selections.scheduler.select(ask, lambda pool: pool.match(prompt, prompt, 4))

    reserve("first", bytes(8 * 2**17))
    booked = 1
    with little_memory(4 * 2**20), pytest.raises(MemoryError):
        for at, prompt in enumerate(prompts):
            reserve(f"r{at}", prompt)
            booked += 1
    assert 1 < booked < len(prompts)
    assert len(service.selections.reservations.owner_of) == 2 * booked
    assert sum(load[2] for load in loads(service).values()) == 2 * booked
    service.check()


async def test_either_id_that_lives_is_a_conflict() -> None:
    service = await disaggregated()
    service.reserve("r:prefill", (1, 0), [901])
    service.reserve("s", (1, 0), [902])
    before = loads(service)
    for name in ("r", "s"):
        with pytest.raises(Conflict):
            service.select(PROMPT, phase=Phase.BOTH, reservation_id=name)
    assert loads(service) == before and len(service.selections.reservations.owner_of) == 2


async def test_without_a_prefill_worker_decode_serves_all_of_it() -> None:
    service = await ready(batched(3, role=Role.DECODE), batched(4), options=OPTIONS)
    answer = service.select(PROMPT, phase=Phase.BOTH, reservation_id="r")
    assert answer["prefill"] is None and "phase" not in answer
    assert answer["fallback"] == "decode only: no prefill worker is available"
    assert loads(service)[answer["worker_id"]] == (TOKENS, 3, 1)
    assert set(service.selections.reservations.owner_of) == {"r"}
    with pytest.raises(Unavailable, match="no prefill worker is available"):
        service.select(PROMPT, phase=Phase.PREFILL)


async def test_overloaded_prefill_workers_are_not_available() -> None:
    service = await disaggregated()
    settings = OPTIONS.settings.replace(active_prefill_tokens_threshold=5)
    service.reserve("a", (1, 0), [901], 6)
    service.reserve("b", (2, 0), [901], 6)
    answer = service.select(PROMPT, phase=Phase.BOTH, settings=settings)
    assert answer["fallback"] == "decode only: all prefill workers are overloaded"


async def test_both_wait_for_a_prefill_worker_and_hold_nobody_up(nursery: trio.Nursery) -> None:
    service = await disaggregated()
    service.reserve("a", (1, 0), [901], BATCH + 1)
    service.reserve("b", (2, 0), [902], BATCH + 1)
    both = calls(nursery, service, PROMPT, phase=Phase.BOTH, reservation_id="r")
    alone = calls(nursery, service, PROMPT, phase=Phase.PREFILL)
    assert service.select(PROMPT)["worker_id"] in (3, 4)
    assert service.select(PROMPT, phase=Phase.DECODE)["worker_id"] in (3, 4)
    await settled()
    assert both.answer is None and alone.answer is None
    assert service.selections.reservations.owner_of.keys() == {"a", "b"}
    service.selections.reservations.prefill_complete("b")
    await settled()
    assert both.answer["prefill"]["worker_id"] == alone.answer["worker_id"] == 2
    assert service.selections.reservations.owner_of.keys() == {"a", "b", "r", "r:prefill"}
    service.check()


async def test_constraints_of_both_phases() -> None:
    service = await disaggregated()
    constraints = Constraints(frozenset([1, 3, 4]), pinned=(3, 0))
    answer = service.select(PROMPT, phase=Phase.BOTH, constraints=constraints)
    assert (answer["worker_id"], answer["prefill"]["worker_id"]) == (3, 1)
    answer = service.select(PROMPT, phase=Phase.BOTH, affinity=(4, None))
    assert answer["worker_id"] == 4


async def test_replicas_hear_of_both_bookings() -> None:
    service, replica = await disaggregated(), await disaggregated()
    answer = service.select(PROMPT, phase=Phase.BOTH, reservation_id="r")
    rolling = packed(sequence_hashes(PROMPT))
    decode, prefill = service.events
    assert (decode.request_id, prefill.request_id) == ("r", "r:prefill")
    assert (decode.worker_id, prefill.worker_id) == (
        answer["worker_id"],
        answer["prefill"]["worker_id"],
    )
    assert (decode.hashes, prefill.hashes) == (rolling, b"")
    assert (decode.prefill_tokens, prefill.prefill_tokens) == (0, TOKENS)

    def mirror(of: Service, to: Service) -> None:
        for event in of.events:
            assert to.selections.reservations.apply(event, to.now) is Outcome.APPLIED
        of.events.clear()

    mirror(service, replica)
    assert loads(replica) == loads(service)
    replica.selections.reservations.prefill_complete("r")  # at the other replica
    assert [(event.request_id, event.step) for event in replica.events] == [
        ("r:prefill", Step.PREFILL_COMPLETE),
        ("r:prefill", Step.FREE),
        ("r", Step.PREFILL_COMPLETE),
    ]
    mirror(replica, service)
    assert loads(replica) == loads(service)
    assert service.selections.reservations.owner_of.keys() == {"r"}


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
async def test_a_phase_is_reserved_as_it_is_selected(phase: Phase) -> None:
    one, two = await disaggregated(), await disaggregated()
    chosen = one.select(PROMPT, phase=phase, reservation_id="r")
    rank = chosen["worker_id"], chosen["dp_rank"]
    tokens = chosen["effective_prefill_tokens"]
    two.selections.reservations.reserve_on_rank(
        M, "r", rank, lookup(PROMPT), tokens, predicts=True, phase=phase
    )
    assert loads(one) == loads(two) and one.events == two.events


async def test_roles_can_change() -> None:
    service = await disaggregated()
    await service.selections.workers.put(batched(1, role=Role.DECODE))
    await service.selections.workers.put(batched(2, role=Role.DECODE))
    assert service.select(PROMPT, phase=Phase.BOTH)["prefill"] is None
    assert not isinstance(service.select(PROMPT), QueuedRequest)
    assert service.candidates().whole_mask is None


def test_a_fleet_without_prefill_workers_has_no_mask() -> None:
    async def run() -> Any:
        return (await ready(worker(1), worker(2, role=Role.BOTH))).candidates()

    candidates = trio.run(run)
    assert (
        candidates.pool
        and candidates.whole_mask is None
        and candidates.eligible(None, Phase.PREFILL) == b"\0\1"
    )


@pytest.mark.parametrize("seed", range(6))
async def test_replicas_agree_whatever_happens_to_phases(seed: int) -> None:
    """Random steps at either of two replicas; each gets the other's events at once."""
    pair = await disaggregated(RouterOptions()), await disaggregated(RouterOptions())
    rng = Random(seed)
    for _ in range(300):
        at = rng.randrange(2)
        service, other = pair[at], pair[1 - at]
        name = f"r{rng.randrange(12)}{rng.choice(('', '', '', PREFILL_SUFFIX))}"
        before = loads(service), dict(service.selections.reservations.owner_of)
        try:
            await step(service, name, rng)
        except (Conflict, NotFound):
            assert (loads(service), dict(service.selections.reservations.owner_of)) == before
        for event in service.events:
            assert other.selections.reservations.apply(event, other.now) is Outcome.APPLIED
        service.events.clear()
        assert loads(service) == loads(other)
        assert (
            service.selections.reservations.owner_of.keys()
            == other.selections.reservations.owner_of.keys()
        )
        service.check()
    for name in list(pair[0].selections.reservations.owner_of):
        if name in pair[0].selections.reservations.owner_of:
            pair[0].selections.reservations.free(name)
    assert all(load == (0, 0, 0) for load in loads(pair[0]).values())


async def step(service: Service, name: str, rng: Random) -> None:
    reservations = service.selections.reservations
    blocks = [10 + number for number in range(rng.randrange(5))] + [rng.getrandbits(50)]
    kind = rng.choice(("select", "select", "reserve", "complete", "free", "free"))
    if kind == "select":
        service.select(blocks, phase=rng.choice((None, *Phase)), reservation_id=name)
    elif kind == "reserve":
        phase = rng.choice((None, Phase.PREFILL, Phase.DECODE))
        rank = rng.randint(1, 4), 0
        reservations.reserve_on_rank(M, name, rank, lookup(blocks), 7, predicts=True, phase=phase)
    elif kind == "complete":
        reservations.prefill_complete(name)
    else:
        reservations.free(name)
