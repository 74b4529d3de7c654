"""Workers whose engines are away: the state of their streams decides whether they are chosen."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import trio.testing

from kvd.faces.selection.choice_metrics import choice_families
from kvd.model import RankKey
from kvd.selection.options import RouterOptions
from kvd.selection.requests import Constraints
from kvd.selection.stats import Unserved
from kvd.selection.worker_record import WorkerLifecycle
from kvd.telemetry.metrics import RequestMetrics, render
from kvd.wire.event_stream import EventStream
from kvd_core.selector.settings import Settings
from tests.conformance.engine import Engine
from tests.support.http_client import Client
from tests.support.processes import Server
from tests.support.selecting import M, Service, worker

GRACE_S = 3.0
settled = trio.testing.wait_all_tasks_blocked


async def serving(*sizes: int, options: RouterOptions | None = None) -> Service:
    """Returns a service whose workers 1, 2 ... have these numbers of ranks, all connected."""
    service = Service(options or RouterOptions(disconnected_s=GRACE_S))
    for worker_id, size in enumerate(sizes, 1):
        record = worker(worker_id, data_parallel_size=size, max_num_batched_tokens=100)
        await service.selections.workers.put(record)
        for dp_rank in range(size):
            stream(service, worker_id, dp_rank).joined()
    return service


def stream(service: Service, worker_id: int, dp_rank: int = 0) -> EventStream:
    return service.listeners.running[RankKey(M, worker_id, dp_rank)]


def lose(service: Service, worker_id: int, dp_rank: int = 0) -> None:
    stream(service, worker_id, dp_rank).lost_connection("refused", service.now)


def pass_by(service: Service, seconds: float) -> None:
    service.now += seconds
    service.expire()


def chosen(service: Service, blocks: list[int], **members: Any) -> set[tuple[int, int]]:
    answers = [service.select(blocks, **members) for _ in range(40)]
    return {(answer["worker_id"], answer["dp_rank"]) for answer in answers}


def cache(service: Service, worker_id: int, blocks: list[int]) -> None:
    partition = service.state.partitions[M]
    partition.workers[worker_id].store(0, blocks, blocks, None)


async def test_who_has_gone_is_not_chosen_and_is_back_at_once() -> None:
    service = await serving(1, 1)
    cache(service, 1, [7, 8])
    assert chosen(service, [7, 8]) == {(1, 0)}
    lose(service, 1)
    assert chosen(service, [7, 8]) == {(1, 0), (2, 0)}  # its cache no longer counts
    pass_by(service, GRACE_S)
    assert chosen(service, [1]) == {(1, 0), (2, 0)}
    pass_by(service, 0.1)
    assert chosen(service, [7, 8]) == chosen(service, [1]) == {(2, 0)}
    await service.selections.workers.put(worker(3))  # makes a new pool
    assert chosen(service, [7, 8]) == {(2, 0), (3, 0)}
    stream(service, 1).joined()
    assert chosen(service, [7, 8]) == {(1, 0)}
    assert not service.candidates().absent
    service.check()


async def test_with_an_endless_grace_who_has_gone_is_chosen_without_its_cache() -> None:
    service = await serving(1, 1, options=RouterOptions(disconnected_s=math.inf))
    cache(service, 1, [7, 8])
    for worker_id in (1, 2):
        lose(service, worker_id)
    pass_by(service, 1e9)
    assert chosen(service, [7, 8]) == {(1, 0), (2, 0)}
    (entry, _) = await service.selections.workers.listed(None, None)
    assert service.selections.workers.lifecycle(entry) is WorkerLifecycle.SCHEDULABLE
    stream(service, 1).joined()
    assert chosen(service, [7, 8]) == {(1, 0)}


async def test_each_rank_is_judged_by_itself() -> None:
    service = await serving(2)
    lose(service, 1, 1)
    pass_by(service, GRACE_S + 1)
    assert chosen(service, [1]) == {(1, 0)}
    (entry,) = await service.selections.workers.listed(None, None)
    assert service.selections.workers.lifecycle(entry) is WorkerLifecycle.SCHEDULABLE
    assert service.selections.workers.absent(entry) == {
        1: "the event connection of dp_rank 1 was lost 4 s ago: refused"
    }
    lose(service, 1, 0)
    pass_by(service, GRACE_S + 1)
    assert service.selections.workers.lifecycle(entry) is WorkerLifecycle.UNSCHEDULABLE


async def test_metrics_count_who_cannot_be_chosen() -> None:
    service = await serving(1, 1)

    def counted() -> list[bytes]:
        text = b"".join(render(choice_families(service.selections, RequestMetrics("x"), 0)))
        return re.findall(rb"^kvd_selection_(?:absent_)?ranks (\d+)", text, re.MULTILINE)

    lose(service, 2)
    assert counted() == [b"2", b"0"]
    pass_by(service, GRACE_S + 1)
    assert counted() == [b"1", b"1"]


async def test_when_nobody_is_left_that_is_said() -> None:
    service = await serving(1, 1)
    for worker_id in (1, 2):
        lose(service, worker_id)
    pass_by(service, GRACE_S + 1)
    only = {"constraints": Constraints(allowed=frozenset([2]))}
    for members in ({}, only):
        with pytest.raises(Unserved, match="lost their event connections") as refused:
            service.select([1], **members)
        assert refused.value.retry_after_s == 1
    with pytest.raises(Unserved, match="no endpoints"):
        service.select([1], constraints=Constraints(allowed=frozenset([9])))
    stream(service, 1).joined()
    assert chosen(service, [1]) == {(1, 0)}
    with pytest.raises(Unserved, match="lost their event connections"):
        service.select([1], **only)


@pytest.mark.parametrize("unconnected_s", [None, 5.0])
async def test_who_was_never_connected_is_chosen_unless_that_is_set(
    unconnected_s: float | None,
) -> None:
    service = await serving(1, options=RouterOptions(unconnected_s=unconnected_s))
    await service.selections.workers.put(worker(2))
    pass_by(service, 5.0)
    assert chosen(service, [1]) == {(1, 0), (2, 0)}
    pass_by(service, 1.0)
    assert chosen(service, [1]) == ({(1, 0)} if unconnected_s else {(1, 0), (2, 0)})
    stream(service, 2).joined()
    assert chosen(service, [1]) == {(1, 0), (2, 0)}


async def test_it_can_be_switched_off() -> None:
    service = await serving(1, options=RouterOptions(disconnected_s=None))
    cache(service, 1, [7])
    lose(service, 1)
    pass_by(service, 1000.0)
    assert chosen(service, [7]) == {(1, 0)}
    assert service.select([7])["overlap"]["gpu"] == 4


async def test_a_paused_listener_takes_nobody_out() -> None:
    service = await serving(1)
    stream(service, 1).paused(service.now)
    pass_by(service, GRACE_S + 1)
    assert chosen(service, [1]) == {(1, 0)}


async def test_a_worker_that_joins_a_lost_stream_is_out_from_the_beginning() -> None:
    """A rank may have been lost before its worker comes, if another face listened to it."""
    service = await serving(1)
    record = worker(2)
    endpoint = record.events_endpoint(0)
    assert endpoint is not None
    service.registry.register(RankKey(M, 2, 0), endpoint, 4, None)
    stream(service, 2).joined()
    lose(service, 2)
    service.now += GRACE_S + 1
    await service.selections.workers.put(record)
    assert chosen(service, [1]) == {(1, 0)}
    await service.selections.workers.delete(2)
    stream(service, 2).joined()
    assert not service.candidates().absent


async def test_who_waits_is_judged_when_somebody_goes_or_comes(nursery: trio.Nursery) -> None:
    options = RouterOptions(Settings(queue_threshold=1.0), disconnected_s=GRACE_S)
    service = await serving(1, 1, options=options)
    for worker_id in (1, 2):
        service.reserve(f"busy {worker_id}", (worker_id, 0), [worker_id], 101)
    only_2 = service.select([1], constraints=Constraints(allowed=frozenset([2])))
    anyone = service.select([1], reservation_id="r")
    lose(service, 2)
    service.expire()
    assert only_2.answer is None and anyone.answer is None
    pass_by(service, GRACE_S + 1)
    assert "lost their event connections" in str(only_2.answer)
    assert anyone.answer is None  # worker 1 is busy
    service.selections.reservations.free("busy 2")
    assert anyone.answer is None  # worker 2 is idle, but away
    stream(service, 2).joined()
    assert b'"worker_id":2' in anyone.answer


def test_an_engine_that_dies_and_comes_back(kvd_process: Callable[..., Server]) -> None:
    engine = Engine("e")
    engine.bind()
    server = kvd_process("--router-disconnected-s=0", face="select-service")
    with Client(server.base_url) as client:
        record = {"worker_id": 1, "endpoint": "x", "block_size": 4}
        record["kv_events_endpoint"] = engine.endpoint("pub")
        assert client.post("/workers", json=record).json()["lifecycle"] == "schedulable"
        asked = {"token_ids": [1, 2, 3, 4], "explain": True}

        def heard() -> bool:
            answer = client.post("/select", json=asked).json()
            return "candidates" in answer and answer["candidates"][0]["stream"] is not None

        def gone() -> bool:
            answer = client.post("/select", json=asked)
            return answer.status_code == 503 and "lost their event" in answer.json()["error"]

        engine.wait_subscribed(1, 30.0)
        assert heard()
        engine.unbind()
        server.wait_until(gone, "gone")
        ready = client.get("/ready")
        assert ready.status_code == 503 and ready.json()["lifecycles"]["unschedulable"] == 1
        (row,) = client.get("/workers").json()
        assert row["lifecycle"] == "unschedulable" and list(row["disconnected_dp_ranks"]) == ["0"]
        assert "connection" in row["not_schedulable_reasons"][0]
        engine.bind()
        server.wait_until(heard, "back")
        assert client.get("/ready").status_code == 200
        (row,) = client.get("/workers").json()
        assert "disconnected_dp_ranks" not in row
    engine.unbind()
