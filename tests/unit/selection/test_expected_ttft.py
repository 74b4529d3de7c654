"""Expected times to the first token: learned from reservations, given in records, requested."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.errors import NotFound
from kvd.selection.phases import Phase
from kvd.selection.worker_record import Role
from kvd_core.selector.settings import LEAST_LOADED
from tests.support.held_selections import OPTIONS, batched, ready
from tests.support.selecting import M, Service, lookup, worker

FAST, SLOW = 10_000.0, 1_000.0  # tokens a second
BASE_S = 0.02


async def two_workers(**members: Any) -> Service:
    return await ready(worker(1, **members), worker(2, **members))


def serve(service: Service, worker_id: int, speed: float, tokens: int, number: int) -> None:
    """Serves a request on an idle rank that prefills so many tokens a second."""
    name = f"{worker_id}-{number}"
    blocks = [worker_id * 10_000_000 + number * 10_000 + at for at in range(tokens // 4)]
    service.reserve(name, (worker_id, 0), blocks, tokens)
    service.now += BASE_S + tokens / speed
    service.selections.reservations.prefill_complete(name)
    service.now += 0.1
    service.selections.reservations.free(name)


def learn(service: Service) -> None:
    for number in range(1, 25):
        serve(service, 1, FAST, 100 * number, number)
        serve(service, 2, SLOW, 100 * number, number)


async def test_speeds_are_learned_from_reservations() -> None:
    service = await two_workers()
    speeds = service.selections.speeds
    assert speeds.prefill((M, 1, 0)) is None
    learn(service)
    for worker_id, speed in ((1, FAST), (2, SLOW)):
        found = speeds.prefill((M, worker_id, 0))
        assert found is not None and not found.given
        assert 1 / found.token_s == pytest.approx(speed, rel=0.01)
        assert found.base_s == pytest.approx(BASE_S, abs=0.002)
        assert found.confidence > 0.9
    answer = service.select(list(range(250)), expected_ttft=True, explain=True)
    expected = {row["worker_id"]: row["expected_ttft_s"] for row in answer["candidates"]}
    assert expected[1] == pytest.approx(BASE_S + 1000 / FAST, rel=0.02)
    assert expected[2] == pytest.approx(BASE_S + 1000 / SLOW, rel=0.02)
    assert answer["expected_ttft_s"] == expected[answer["worker_id"]]
    service.check()


async def test_a_limit_is_kept_where_it_can_be() -> None:
    service = await two_workers()
    learn(service)
    for _ in range(5):
        answer = service.select(list(range(250)), slo_ttft_s=0.5)
        assert (answer["worker_id"], answer["slo_met"]) == (1, True)
    answer = service.select(list(range(250)), slo_ttft_s=0.01)
    assert answer["slo_met"] is False
    assert service.selections.stats.slo == {"met": 5, "missed": 1, "unknown": 0}


async def fast_and_slow() -> Service:
    """Returns a service with a busy fast worker 1 and an idle slow worker 2."""
    service = await ready(
        batched(1, prefill_tokens_per_s=FAST, total_kv_blocks=100),
        batched(2, prefill_tokens_per_s=SLOW),
    )
    service.reserve("before", (1, 0), list(range(1000, 1050)), 200)
    return service


async def test_a_busy_rank_may_keep_a_limit_while_another_is_idle() -> None:
    service = await fast_and_slow()
    answer = service.select(list(range(250)), slo_ttft_s=0.5)
    assert (answer["worker_id"], answer["slo_met"]) == (1, True)
    ask = service.ask(slo_ttft_s=0.5)
    [weighed] = service.selections.chooser.weigh(ask, lookup(list(range(250))))
    assert [chance.position for chance in weighed.chances] == [0]


async def test_a_mode_that_avoids_busy_ranks_keeps_no_limit_by_waiting() -> None:
    service = await fast_and_slow()
    settings = OPTIONS.settings.replace(mode=LEAST_LOADED)
    answer = service.select(list(range(250)), settings=settings, slo_ttft_s=0.5, explain=True)
    assert (answer["worker_id"], answer["slo_met"]) == (2, False)
    assert [row["eligible"] for row in answer["candidates"]] == [True, True]


async def test_an_overloaded_rank_refuses_no_request_for_its_limit() -> None:
    service = await fast_and_slow()
    settings = OPTIONS.settings.replace(active_decode_blocks_threshold=0.4)
    answer = service.select(list(range(250)), settings=settings, slo_ttft_s=0.5)
    assert (answer["worker_id"], answer["slo_met"]) == (2, False)


async def test_what_is_not_known_is_said() -> None:
    service = await two_workers()
    answer = service.select(list(range(10)), slo_ttft_s=0.5, explain=True)
    assert (answer["expected_ttft_s"], answer["slo_met"]) == (None, None)
    assert {row["expected_ttft_s"] for row in answer["candidates"]} == {None}
    assert service.selections.stats.slo["unknown"] == 1


async def test_a_prefill_elsewhere_counts_for_the_rank_that_computes_it() -> None:
    service = await ready(worker(1, role=Role.PREFILL), worker(2, role=Role.DECODE))
    service.reserve("beside", (2, 0), [1], 500)  # a prefill on the rank that decodes
    for number in range(1, 25):
        blocks = [number * 10_000 + at for at in range(25 * number)]
        service.select(blocks, phase=Phase.BOTH, reservation_id=f"{number}")
        service.now += BASE_S + 100 * number / FAST
        service.selections.reservations.prefill_complete(f"{number}")
        service.selections.reservations.free(f"{number}")
    found = service.selections.speeds.prefill((M, 1, 0))
    assert found is not None and 1 / found.token_s == pytest.approx(FAST, rel=0.01)
    assert service.selections.speeds.prefill((M, 2, 0)) is None
    assert service.selections.regret.accounts.keys() == {(M, 1, 0)}
    answer = service.select(list(range(250)), phase=Phase.BOTH, slo_ttft_s=0.5, explain=True)
    expected = pytest.approx(BASE_S + 1000 / FAST, rel=0.02)
    for part in (answer, answer["prefill"]):
        assert (part["expected_ttft_s"], part["slo_met"]) == (expected, True)
    assert {row["expected_ttft_s"] for row in answer["candidates"]} == {None}
    assert sum(service.selections.stats.slo.values()) == 1
    answer = service.select([1], phase=Phase.DECODE, expected_ttft=True)
    assert answer["expected_ttft_s"] is None
    service.check()


async def test_a_given_speed_wins() -> None:
    service = await two_workers(prefill_tokens_per_s=SLOW, decode_step_ms=50.0)
    learn(service)
    found = service.selections.speeds.prefill((M, 1, 0))
    assert found is not None and found.given
    assert (1 / found.token_s, found.base_s) == (SLOW, 0.05)
    answer = service.select(list(range(250)), expected_ttft=True)
    assert answer["expected_ttft_s"] == pytest.approx(0.05 + 1000 / SLOW)


async def test_the_queue_of_a_rank_is_waited_for() -> None:
    service = await two_workers(prefill_tokens_per_s=SLOW)
    service.reserve("before", (1, 0), list(range(1000, 1500)), 2000)
    answer = service.select(list(range(250)), explain=True)
    expected = {row["worker_id"]: row["expected_ttft_s"] for row in answer["candidates"]}
    assert expected == {1: pytest.approx(3.0), 2: pytest.approx(1.0)}


async def test_what_happened_is_held_against_what_was_expected() -> None:
    service = await two_workers()
    learn(service)
    accounts = service.selections.regret.accounts
    account = accounts[M, 1, 0]
    assert 0 < account.timed < 24  # the first ones had no expectation
    assert account.ttft_s == pytest.approx(account.expected_ttft_s, rel=0.05)
    before = account.timed
    serve(service, 1, FAST / 10, 1000, 99)  # the rank stalls
    assert account.timed == before + 1
    assert account.error_at(1.0) is not None


async def test_a_worker_that_leaves_is_forgotten() -> None:
    service = await two_workers()
    learn(service)
    await service.selections.workers.delete(1)
    service.expire()
    assert service.selections.speeds.prefill((M, 1, 0)) is None
    assert (M, 1, 0) not in service.selections.regret.accounts
    assert service.selections.speeds.prefill((M, 2, 0)) is not None


async def test_ends_without_a_prefill_teach_nothing() -> None:
    service = await two_workers()
    for number in range(30):
        service.reserve(f"{number}", (1, 0), [number], 4)
        service.now += 1.0
        service.selections.reservations.free(f"{number}")
    assert service.selections.speeds.prefill((M, 1, 0)) is None
    with pytest.raises(NotFound):
        service.selections.reservations.find("3")
