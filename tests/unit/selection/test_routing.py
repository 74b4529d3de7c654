"""Router modes, busy thresholds and preferred taints, and changes of these at run time."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import trio

from kvd.errors import BadRequest, NotFound, Unavailable
from kvd.selection.options import RouterMode, RouterOptions
from kvd.selection.phases import Phase
from kvd.selection.policies import MEMBERS, OFF, Policy, RouterPolicy
from kvd.selection.requests import Constraints, QueuedRequest
from kvd.selection.worker_record import Role
from kvd_core.selector.settings import Settings
from tests.support.held_selections import BATCH, batched, calls, ready, settled
from tests.support.selecting import BLOCK_SIZE, M, N, Service, worker

OPTIONS = RouterOptions(Settings(queue_threshold=1.0))
SINGLE = (Phase.PREFILL, Phase.DECODE)


def routed(mode: RouterMode) -> RouterOptions:
    return replace(OPTIONS, settings=OPTIONS.settings.replace(mode=mode.core))


def chosen(service: Service, times: int, **members: Any) -> list[int]:
    return [service.select([1], **members)["worker_id"] for _ in range(times)]


def only(*workers: int) -> Constraints:
    return Constraints(allowed=frozenset(workers))


# ---- modes


async def test_turns_go_round() -> None:
    service = await ready(*map(worker, (1, 2, 3)), options=routed(RouterMode.ROUND_ROBIN))
    assert chosen(service, 7) == [1, 2, 3, 1, 2, 3, 1]


async def test_turns_are_fair_beside_constrained_requests() -> None:
    service = await ready(*map(worker, (1, 2, 3)), options=routed(RouterMode.ROUND_ROBIN))
    turns: Counter[int] = Counter()
    for _ in range(300):
        assert chosen(service, 1, constraints=only(1)) == [1]
        turns.update(chosen(service, 1))
    assert turns[2] == turns[3] == 150


async def test_turns_outlive_changes_of_the_fleet() -> None:
    service = await ready(*map(worker, (1, 2, 3)), options=routed(RouterMode.ROUND_ROBIN))
    assert chosen(service, 2) == [1, 2]
    await service.selections.workers.put(worker(4))
    assert chosen(service, 4) == [3, 4, 1, 2]
    await service.selections.workers.delete(3)
    assert chosen(service, 4) == [4, 1, 2, 4]


@pytest.mark.parametrize("size", [2, 3, 4])
async def test_phases_have_turns_of_their_own(size: int) -> None:
    """Otherwise, with an even number, every second worker would only prefill, the others decode."""
    records = [worker(number, role=Role.BOTH) for number in range(1, size + 1)]
    service = await ready(*records, options=routed(RouterMode.ROUND_ROBIN))
    turns: dict[str, Counter[int]] = {"prefill": Counter(), "decode": Counter()}
    for _ in range(6 * size):
        answer = service.select([1], phase=Phase.BOTH)
        turns["prefill"][answer["prefill"]["worker_id"]] += 1
        turns["decode"][answer["worker_id"]] += 1
    assert all(set(count.values()) == {6} and len(count) == size for count in turns.values())
    before = {one: service.select([1], phase=one)["worker_id"] for one in SINGLE}
    await service.selections.workers.put(worker(9, role=Role.PREFILL))
    assert service.select([1], phase=Phase.PREFILL)["worker_id"] == 9  # a new worker comes first
    after = {one: service.select([1], phase=one)["worker_id"] for one in SINGLE}
    assert all(after[one] == before[one] % size + 1 for one in SINGLE)


async def test_fleets_have_turns_of_their_own() -> None:
    records = [worker(1), worker(2), worker(3, N), worker(4, N)]
    service = await ready(*records, options=routed(RouterMode.ROUND_ROBIN))
    for one, other in ((1, 3), (2, 4), (1, 3)):
        assert chosen(service, 1) == [one] and chosen(service, 1, key=N) == [other]


async def test_the_fewest_requests() -> None:
    service = await ready(worker(1), worker(2), options=routed(RouterMode.LEAST_LOADED))
    service.reserve("a", (1, 0), [])
    service.reserve("b", (2, 0), list(range(100)))
    service.reserve("c", (1, 0), [])
    assert chosen(service, 3) == [2, 2, 2]


async def test_any() -> None:
    service = await ready(worker(1), worker(2), options=routed(RouterMode.RANDOM))
    service.reserve("a", (1, 0), list(range(100)))
    counts = Counter(chosen(service, 400))
    assert min(counts[1], counts[2]) > 150


@pytest.mark.parametrize("mode", [RouterMode.ROUND_ROBIN, RouterMode.RANDOM, RouterMode.KV])
async def test_all_modes_wait_while_all_are_busy(mode: RouterMode, nursery: trio.Nursery) -> None:
    service = await ready(batched(1), batched(2), options=routed(mode))
    service.reserve("a", (1, 0), [901], BATCH + 1)
    service.reserve("b", (2, 0), [902], BATCH + 1)
    callers = [calls(nursery, service, [1]) for _ in range(4)]
    await settled()
    service.selections.reservations.prefill_complete("b")
    await settled()
    assert [caller.answer["worker_id"] for caller in callers] == [2] * 4


async def test_direct_goes_where_the_request_says() -> None:
    service = await ready(
        batched(1, data_parallel_size=2), batched(2), options=routed(RouterMode.DIRECT)
    )
    service.reserve("a", (1, 1), [901], BATCH + 1)
    answer = service.select([1], constraints=Constraints(pinned=(1, 1)), reservation_id="r")
    assert (answer["worker_id"], answer["dp_rank"]) == (1, 1)  # however busy it is
    for constraints in (None, only(1)):
        with pytest.raises(BadRequest, match="pinned_worker must name"):
            service.select([1], constraints=constraints)
    with pytest.raises(Unavailable):
        service.select([1], constraints=Constraints(pinned=(3, 0)))


async def test_direct_does_not_wait_behind_others(nursery: trio.Nursery) -> None:
    service = await ready(batched(1))
    service.reserve("a", (1, 0), [901], BATCH + 1)
    pinned = Constraints(pinned=(1, 0))
    calls(nursery, service, [1], constraints=pinned)
    direct = OPTIONS.settings.replace(mode=RouterMode.DIRECT.core)
    assert not isinstance(service.select([1], constraints=pinned, settings=direct), QueuedRequest)
    service.selections.scheduler.stop()


async def test_the_mode_of_a_model_and_of_a_tenant() -> None:
    other = M._replace(tenant_id="other")
    service = await ready(worker(1), worker(2), worker(3, other), worker(4, N))
    tuning, candidates = service.selections.tuning, service.selections.candidates

    def modes() -> list[str]:
        return [RouterMode.of(candidates[key].settings) for key in (M, other, N)]

    tuning.change((M.model_name, None), {"mode": RouterMode.RANDOM.core})
    assert modes() == ["random", "random", "kv"]
    tuning.change(M, {"mode": RouterMode.ROUND_ROBIN.core})
    assert modes() == ["round-robin", "random", "kv"]
    assert tuning.changed_keys(("mode",)) == [(M.model_name, None), M]
    late = M._replace(tenant_id="late")
    await service.selections.workers.put(worker(5, late))
    assert RouterMode.of(candidates[late].settings) == "random"
    tuning.forget((M.model_name, None), ("mode",))
    assert modes() == ["round-robin", "kv", "kv"]
    tuning.forget(M, ("mode",))
    assert modes() == ["kv", "kv", "kv"] and tuning.changed_keys(("mode",)) == []
    for place in (("none", None), (M.model_name, "none")):
        with pytest.raises(NotFound):
            tuning.change(place, {"mode": RouterMode.RANDOM.core})
    with pytest.raises(ValueError, match="no such mode"):
        tuning.change(M, {"mode": 9})
    assert tuning.changed_keys(("mode",)) == []


# ---- policies


def by(policy: RouterPolicy) -> RouterOptions:
    return replace(OPTIONS, settings=OPTIONS.settings.replace(**policy.row))


@pytest.mark.parametrize("policy", RouterPolicy)
def test_a_policy_is_told_by_its_row(policy: RouterPolicy) -> None:
    settings = by(policy).settings
    assert settings.members["weighted"] == (policy != "dynamo")
    assert Policy.of(settings) == Policy(policy) == Policy.of(settings.replace(temperature=1))
    assert Policy.parse(policy) == Policy(policy) and str(Policy(policy)) == policy


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("KVD", "kvd"),
        ("kvd,hold_up=0,queued=0.5", "kvd"),
        ("kvd,session_bound=off,hold_up=0.2", "kvd,hold_up=0.2,session_bound=off"),
        ("ramjet,saturation=4e3", "ramjet,saturation=4000"),
        ("dynamo,overlap_weight=2", "dynamo,overlap_weight=2"),
    ],
)
def test_a_row_is_called_by_what_it_is_derived_from(text: str, name: str) -> None:
    policy = Policy.parse(text)
    assert str(policy) == name and Policy.parse(name) == policy
    assert Policy.of(OPTIONS.settings.replace(**policy.row)) == policy


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("best", "expected one of dynamo, kvd"),
        ("kvd,speed=1", "speed: no such weight of kvd"),
        ("kvd,overlap_weight=1", "overlap_weight: no such weight of kvd"),
        ("dynamo,hold_up=1", "hold_up: no such weight of dynamo"),
        ("kvd,hold_up", "hold_up: expected WEIGHT=NUMBER"),
        (f"kvd,hold_up={OFF}", "hold_up: expected a number"),
        ("kvd,hold_up=-0.1", "hold_up must lie in"),
        ("kvd,hold_up=nan", "hold_up must lie in"),
        ("kvd,queued=inf", "queued must lie in"),
    ],
)
def test_a_row_that_cannot_be_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Policy.parse(text)


@pytest.mark.parametrize("policy", [each for each in RouterPolicy if each != "dynamo"])
async def test_weighted_policies_take_idle_workers_in_turn(policy: RouterPolicy) -> None:
    service = await ready(*map(worker, (1, 2, 3)), options=by(policy))
    assert chosen(service, 5) == [1, 2, 3, 1, 2]


async def test_the_phase_that_decodes_goes_by_blocks_in_use() -> None:
    records = [worker(i, role=Role.DECODE) for i in (1, 2)]
    service = await ready(*records, options=by(RouterPolicy.LMETRIC))
    service.reserve("long", (1, 0), [901, 902, 903], 0)
    for number in range(2):
        service.reserve(f"short {number}", (2, 0), [910 + number], 0)
    assert chosen(service, 1) == [1]
    assert chosen(service, 3, phase=Phase.DECODE) == [2, 2, 2]


async def test_a_policy_replaces_all_that_the_one_before_has_said() -> None:
    service = await ready(worker(1))
    tuning, candidates = service.selections.tuning, service.selections.candidates[M]
    for text, weight in (("dynamo,overlap_weight=2", 2.0), ("kvd", 1.0)):
        tuning.change(M, Policy.parse(text).row, whole=MEMBERS)
        assert str(Policy.of(candidates.settings)) == text
        assert candidates.settings.members["overlap_weight"] == weight


async def test_the_policy_of_a_model_and_of_a_tenant() -> None:
    service = await ready(worker(1), worker(2, N))
    tuning, candidates = service.selections.tuning, service.selections.candidates

    def policies() -> list[str]:
        return [str(Policy.of(candidates[key].settings)) for key in (M, N)]

    tuning.change((M.model_name, None), RouterPolicy.KVD.row)
    assert policies() == ["kvd", "dynamo"]
    tuning.change(M, RouterPolicy.RAMJET.row)
    tuning.reload(by(RouterPolicy.LMETRIC).settings)
    assert policies() == ["ramjet", "lmetric"]
    assert tuning.changed_keys(MEMBERS) == [(M.model_name, None), M]
    tuning.forget(M, MEMBERS)
    assert policies() == ["kvd", "lmetric"]
    tuning.forget((M.model_name, None), MEMBERS)
    assert policies() == ["lmetric", "lmetric"] and tuning.changed_keys(MEMBERS) == []


# ---- busy thresholds


async def test_busy_workers_get_nothing_and_then_nobody_does() -> None:
    service = await ready(worker(1, total_kv_blocks=100), worker(2, total_kv_blocks=100))
    service.reserve("a", (1, 0), list(range(60)))
    name = "active_decode_blocks_threshold"
    service.selections.tuning.change(M, {name: 0.5})
    settings = service.candidates().settings
    assert set(chosen(service, 20, settings=settings)) == {2}
    service.reserve("b", (2, 0), list(range(1000, 1051)))
    with pytest.raises(Unavailable, match="overloaded") as refused:
        service.select([1], settings=settings)
    assert refused.value.retry_after_s
    service.selections.tuning.change(M, {name: 0.55})
    assert set(chosen(service, 20, settings=service.candidates().settings)) == {2}
    service.selections.tuning.forget(M, (name,))
    assert service.candidates().settings.members[name] is None


async def test_thresholds_add_up_and_their_models_win_over_the_defaults() -> None:
    tokens, share = "active_prefill_tokens_threshold", "active_decode_blocks_threshold"
    options = RouterOptions(Settings(active_prefill_tokens_threshold=1000))
    service = await ready(worker(1), worker(2, N), options=options)
    tuning = service.selections.tuning
    assert tuning.where_set((tokens, share)) == [(M.model_name, None), (N.model_name, None)]
    tuning.change((M.model_name, None), {share: 0.5})
    tuning.change(M, {tokens: None})
    members = service.candidates().settings.members
    assert (members[tokens], members[share]) == (None, 0.5)
    assert service.candidates(N).settings.members[tokens] == 1000
    wanted = [(M.model_name, None), M, (N.model_name, None)]
    assert tuning.where_set((tokens, share)) == wanted


# ---- preferred taints


async def test_what_is_preferred_multiplies_the_cost() -> None:
    records = [worker(1), worker(2, taints=("a",)), worker(3, taints=("a", "b", "a"))]
    service = await ready(*records)

    def preferences(**weights: float) -> dict[int, float]:
        answer = service.select([1], preferred=weights, explain=True)
        rows = answer["candidates"]
        for row in rows:
            base = row["prefill_cost"] + row["decode_cost"]
            assert row["cost"] == base * row["preference"]
        costs = {row["worker_id"]: row["cost"] for row in rows}
        assert costs[answer["worker_id"]] == min(costs.values())
        return {row["worker_id"]: row["preference"] for row in rows}

    liked = math.exp(-math.tanh(0.5))
    assert preferences(a=0.5) == {1: 1.0, 2: liked, 3: liked}
    assert preferences(a=0.5, b=-0.5) == {1: 1.0, 2: liked, 3: 1.0}
    assert preferences(a=-1e30)[2] == math.e
    assert preferences(a=1e30, b=1e30)[3] == 1 / math.e
    assert set(chosen(service, 20, preferred={"b": 0.1})) == {3}
    assert set(chosen(service, 20, preferred={"a": -0.1})) == {1}
    # A load that costs more than any preference.
    service.reserve("r", (3, 0), list(range(1000)), 1000 * BLOCK_SIZE)
    assert set(chosen(service, 20, preferred={"b": 9.0}, constraints=only(1, 3))) == {1}
