"""/metrics counts each selection under one outcome, and compares each choice with the best one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import trio

from kvd.errors import BadRequest, Conflict, KvdError, Unavailable
from kvd.faces.selection.choice_metrics import COUNTED, choice_families
from kvd.faces.selection.speed_metrics import speed_families
from kvd.selection.options import RouterMode, RouterOptions
from kvd.selection.phases import Phase
from kvd.selection.requests import Constraints, QueuedRequest, Retry
from kvd.selection.stats import PHASES, SelectionOutcome
from kvd.selection.worker_record import Role
from kvd.telemetry.metrics import BREATH, RequestMetrics, render
from kvd_core.base.hashing import sequence_hashes
from kvd_core.selector.choice_stats import CHOICE_PHASES, MODES, OUTCOMES
from kvd_core.selector.choice_stats import PHASES as CORE_PHASES
from kvd_core.selector.settings import ROUND_ROBIN, Settings
from tests.support.exposition import parse
from tests.support.held_selections import (
    BATCH,
    OPTIONS,
    batched,
    calls,
    disaggregated,
    ready,
    settled,
)
from tests.support.http_client import Client
from tests.support.processes import Server
from tests.support.selecting import BLOCK_SIZE, EXPIRY_S, M, Service

PROMPT = [11, 12, 13, 14]


def samples(service: Service, most_ranks: int = 0) -> dict[str, float]:
    requests = RequestMetrics("kvd_selection")
    requests.counts.observe("/select", "POST", 200, 0.001)
    families = choice_families(service.selections, requests, most_ranks)
    return parse(b"".join(render(families)).decode())


def decisions(service: Service, mode: str = "kv") -> dict[tuple[str, str], float]:
    """Returns how many selections of a mode have ended, by phase and outcome."""
    found = {}
    for phase in ("whole", "prefill", "decode", "both"):
        for outcome in SelectionOutcome:
            labels = f'mode="{mode}",phase="{phase}",outcome="{outcome.name.lower()}"'
            number = samples(service).get(f"kvd_selection_decisions_total{{{labels}}}")
            if number:
                found[phase, outcome.name] = number
    return found


def cache(service: Service, worker_id: int, blocks: int, tier: int = 0) -> None:
    """Lets a worker cache this many blocks of PROMPT."""
    (row,) = (each for each in service.candidates().pool.candidates if each.worker_id == worker_id)
    assert row.worker is not None
    names, parent = sequence_hashes(PROMPT[:blocks]), None
    row.worker.store(0, names, PROMPT[:blocks], parent=parent, tier=tier)


def test_the_core_has_room_for_every_name() -> None:
    assert len(RouterMode) == MODES
    assert len(PHASES) == CORE_PHASES == CHOICE_PHASES + 1
    assert PHASES[-1] is Phase.BOTH
    assert len(SelectionOutcome) <= OUTCOMES


async def test_the_chosen_beside_the_best() -> None:
    service = await ready(batched(1), batched(2), batched(3))
    cache(service, 1, 3)
    cache(service, 2, 1, tier=1)
    only = Constraints(allowed=frozenset([2, 3]))
    assert service.select(PROMPT)["worker_id"] == 1
    assert service.select(PROMPT, constraints=only)["worker_id"] == 2
    assert service.select(PROMPT, affinity=(3, None))["worker_id"] == 3
    found = samples(service)
    phase = '{phase="whole"}'
    assert found[f"kvd_selection_choices_total{phase}"] == 3
    assert found[f"kvd_selection_chosen_overlap_blocks_total{phase}"] == 3 + 1 + 0
    assert found[f"kvd_selection_best_overlap_blocks_total{phase}"] == 3 + 1 + 3
    assert found[f"kvd_selection_prompt_tokens_total{phase}"] == 3 * 4 * BLOCK_SIZE
    cached = 3 * BLOCK_SIZE + 3  # 0.75 of a block in host memory
    assert found[f"kvd_selection_cached_tokens_total{phase}"] == cached
    assert found[f"kvd_selection_effective_prefill_tokens_total{phase}"] == 48 - cached
    regret = "kvd_selection_regret_blocks"
    assert found[f"{regret}_sum{phase}"] == 3
    levels = [found[f'{regret}_bucket{{phase="whole",le="{le}"}}'] for le in (0, 1, 2, 4, "+Inf")]
    assert levels == [2, 2, 2, 3, 3]
    router = "dynamo_component_router"
    assert found[f"{router}_requests_total"] == 3
    assert found[f"{router}_input_sequence_tokens_sum"] == 48
    assert found[f'{router}_input_sequence_tokens_bucket{{le="8"}}'] == 0
    assert found[f'{router}_input_sequence_tokens_bucket{{le="16"}}'] == 3
    rates = [found[f'{router}_kv_hit_rate_bucket{{le="{le}"}}'] for le in ("0.0", "0.2", "0.3")]
    assert rates == [1, 1, 2]
    assert found[f"{router}_kv_hit_rate_sum"] == 0.75 + 0.25
    assert found[f"{router}_kv_selected_cached_prefix_tokens_total"] == 4 * BLOCK_SIZE
    assert found[f"{router}_kv_best_eligible_cached_prefix_tokens_total"] == 7 * BLOCK_SIZE
    assert found['dynamo_router_overhead_total_ms_bucket{le="0.8"}'] == 0
    assert found["dynamo_router_overhead_total_ms_sum"] == 1


async def test_who_could_not_be_chosen_is_not_the_best() -> None:
    settings = Settings(mode=ROUND_ROBIN, queue_threshold=1.0, active_prefill_tokens_threshold=150)
    service = await ready(batched(1), batched(2), batched(3), options=RouterOptions(settings))
    cache(service, 1, 4)
    cache(service, 2, 3)
    service.reserve("over", (1, 0), [901], 151)
    service.reserve("busy", (2, 0), [902], BATCH + 1)
    assert service.select(PROMPT, settings=settings)["worker_id"] == 3
    assert samples(service)['kvd_selection_best_overlap_blocks_total{phase="whole"}'] == 0
    assert decisions(service, "round-robin") == {("whole", "SERVED"): 1}


async def test_who_is_thought_to_cache_it_is_the_best() -> None:
    service = await ready(batched(1), batched(2), options=RouterOptions(predicted_ttl_s=9.0))
    booked = service.select(PROMPT, reservation_id="r")["worker_id"]
    assert service.select(PROMPT, affinity=(3 - booked, None))["worker_id"] == 3 - booked
    found = samples(service)
    assert found['kvd_selection_best_overlap_blocks_total{phase="whole"}'] == 4
    assert found['kvd_selection_chosen_overlap_blocks_total{phase="whole"}'] == 0


REFUSED: dict[str, tuple[type[KvdError], dict[str, Any]]] = {
    "NO_WORKERS": (Unavailable, {"key": M._replace(tenant_id="nobody")}),
    "NOT_ELIGIBLE": (Unavailable, {"constraints": Constraints(taints=frozenset(["x"]))}),
    "CONFLICT": (Conflict, {"reservation_id": "lives"}),
    "INVALID": (
        BadRequest,
        {"constraints": Constraints(allowed=frozenset([1]), pinned=(2, 0))},
    ),
}


@pytest.mark.parametrize("outcome", REFUSED)
async def test_what_is_refused_at_once(outcome: str) -> None:
    service = await ready(batched(1))
    service.reserve("lives", (1, 0), [901])
    error, members = REFUSED[outcome]
    with pytest.raises(error):
        service.select(PROMPT, **members)
    assert decisions(service) == {("whole", outcome): 1}
    assert samples(service)['kvd_selection_choices_total{phase="whole"}'] == 0


async def test_what_is_overloaded_and_who_asks_again() -> None:
    settings = Settings(active_prefill_tokens_threshold=BATCH)
    service = await ready(batched(1), options=RouterOptions(settings))
    retry = Retry((None, "k"), b"")
    for _ in range(2):
        service.select(PROMPT, reservation_id="r", retry=retry)
    service.reserve("a", (1, 0), [901], BATCH)
    with pytest.raises(Unavailable):
        service.select(PROMPT)
    outcomes = ("SERVED", "REPEATED", "OVERLOADED")
    assert decisions(service) == {("whole", outcome): 1 for outcome in outcomes}


async def test_what_waits_ends_in_one_way(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    service = await ready(batched(1), options=replace(OPTIONS, max_held=3))
    service.reserve("a", (1, 0), [901], BATCH + 1)
    callers = [calls(nursery, service, [number]) for number in range(3)]
    await settled()
    with pytest.raises(Unavailable):
        service.select(PROMPT)
    assert samples(service)["kvd_selection_waiting"] == 3
    service.now += 2
    callers[0].scope.cancel()
    await settled()
    service.selections.scheduler.stop()
    assert decisions(service) == {
        ("whole", "QUEUE_FULL"): 1,
        ("whole", "LEFT"): 1,
        ("whole", "STOPPING"): 2,
    }
    await settled()
    found = samples(service)
    assert found["kvd_selection_waiting"] == 0
    assert found["kvd_selection_wait_seconds_count"] == 3
    assert found["kvd_selection_wait_seconds_sum"] == 6
    assert found['kvd_selection_held_total{mode="kv",phase="whole"}'] == 3


async def test_who_waits_too_long_and_who_is_served(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    service = await ready(batched(1))
    service.reserve("a", (1, 0), [901], BATCH + 1)
    held = service.select(PROMPT)
    with pytest.raises(Unavailable):
        await service.selections.scheduler.wait(held)
    caller = calls(nursery, service, PROMPT, phase=None)
    await settled()
    service.selections.reservations.free("a")
    await settled()
    assert caller.answer
    assert decisions(service) == {("whole", "TIMED_OUT"): 1, ("whole", "SERVED"): 1}


async def test_both_phases_are_one_request_and_two_choices() -> None:
    service = await disaggregated()
    cache(service, 1, 2)
    cache(service, 3, 4)
    assert not isinstance(service.select(PROMPT, phase=Phase.BOTH), QueuedRequest)
    service.select(PROMPT, phase=Phase.DECODE)
    assert decisions(service) == {("both", "SERVED"): 1, ("decode", "SERVED"): 1}
    found = samples(service)
    choices = {
        phase: found[f'kvd_selection_choices_total{{phase="{phase}"}}']
        for phase in ("whole", "prefill", "decode")
    }
    assert choices == {"whole": 0, "prefill": 1, "decode": 2}
    assert found['kvd_selection_best_overlap_blocks_total{phase="prefill"}'] == 2
    assert found["dynamo_component_router_requests_total"] == 2
    assert found["dynamo_component_router_kv_hit_rate_count"] == 1  # decode choices have none
    assert found["kvd_selection_fallbacks_total"] == 0


async def test_a_fallback_is_a_request_for_both_with_a_whole_choice() -> None:
    service = await ready(batched(3, role=Role.DECODE))
    service.select(PROMPT, phase=Phase.BOTH)
    found = samples(service)
    assert found["kvd_selection_fallbacks_total"] == 1
    assert found['kvd_selection_choices_total{phase="whole"}'] == 1
    assert decisions(service) == {("both", "SERVED"): 1}


async def test_reservations_that_end_by_themselves() -> None:
    service = await ready(batched(1), batched(2))
    service.reserve("old", (1, 0), [1])
    service.now += EXPIRY_S + 1
    service.expire()
    service.reserve("gone", (2, 0), [1])
    await service.selections.workers.delete(2)
    reservations = service.selections.reservations
    assert (reservations.expired, reservations.removed) == (1, 1)


async def test_loads_rank_by_rank_while_there_are_few() -> None:
    service = await ready(batched(1), batched(2))
    service.reserve("a", (2, 0), [1, 2], 7)
    rank = '{model_name="m",tenant_id="t",worker_id="2",dp_rank="0"}'
    found = samples(service, most_ranks=2)
    assert found["kvd_selection_ranks"] == 2
    assert found[f"kvd_selection_prefill_tokens{rank}"] == 7
    assert found[f"kvd_selection_decode_blocks{rank}"] == 2
    assert found[f"kvd_selection_rank_requests{rank}"] == 1
    assert not any("worker_id" in name for name in samples(service, most_ranks=1))


async def test_ranks_of_many_workers_are_counted_with_rests_between() -> None:
    endpoints = [f"tcp://10.0.0.1:{port}" for port in range(1, 2 * COUNTED + 1)]
    records = (
        batched(number, kv_events_endpoint=each, kv_events_endpoints={})
        for number, each in enumerate(endpoints)
    )
    service = await ready(*records)
    families = list(choice_families(service.selections, RequestMetrics("x"), 0))
    assert families.count(None) == 2
    assert samples(service)["kvd_selection_ranks"] == 2 * COUNTED


async def test_speeds_rank_by_rank_are_looked_up_with_rests_between() -> None:
    ranks = 3 * BREATH
    service = await ready(batched(1, data_parallel_size=ranks, prefill_tokens_per_s=500.0))
    families = list(speed_families(service.selections, ranks))
    assert families.count(None) == 3
    found = parse(b"".join(render(families)).decode())
    name = "kvd_selection_prefill_tokens_per_second"
    speeds = {each: speed for each, speed in found.items() if each.startswith(name)}
    assert set(speeds.values()) == {500.0} and len(speeds) == ranks
    families = list(speed_families(service.selections, ranks - 1))
    assert None not in families and name not in b"".join(render(families)).decode()


def test_a_running_kvd_counts_both_ways(kvd_process: Callable[..., Server]) -> None:
    server = kvd_process(face="select-service")
    prompt = {"token_ids": list(range(64))}
    with Client(server.base_url) as client:
        worker = {
            "worker_id": 1,
            "model_name": "default",
            "endpoint": "http://w",
            "block_size": 16,
            "kv_events_endpoint": "tcp://127.0.0.1:1",
        }
        assert client.post("/workers", json=worker).status_code == 201
        for more in ({}, {"explain": True}):  # the fast path answers the first one
            assert client.post("/select", json=prompt | more).status_code == 200
        found = parse(client.get("/metrics").text)
    labels = 'mode="kv",phase="whole",outcome="served"'
    assert found[f"kvd_selection_decisions_total{{{labels}}}"] == 2
    assert found["dynamo_router_overhead_total_ms_count"] == 2
