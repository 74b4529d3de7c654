"""Predictions beside real events: what bookings add to an engine's events, and when that ends."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvd.selection.options import RouterOptions
from kvd_core.base.hashing import sequence_hashes
from tests.conformance.engine import Engine
from tests.conformance.failure import wait_until
from tests.support.http_client import Client
from tests.support.running import running_kvd
from tests.support.selecting import BLOCK_SIZE, M, N, Service, worker

TTL_S = 20.0
OPTIONS = RouterOptions(predicted_ttl_s=TTL_S)


async def ready(options: RouterOptions = OPTIONS, **members: Any) -> Service:
    service = Service(options)
    for number in (1, 2):
        await service.selections.workers.put(worker(number, **members))
    return service


def gpu(service: Service, blocks: list[int]) -> int:
    """Returns the most blocks of a prompt that any rank caches."""
    return max(depth(service, blocks))


def depth(service: Service, blocks: list[int]) -> list[int]:
    """Returns how many blocks of a prompt each rank caches."""
    rows = service.select(blocks, explain=True)["candidates"]
    return [row["device_blocks"] for row in rows]


def predicted(service: Service) -> int:
    return service.state.partitions[M].index.predicted()


async def test_what_is_booked_counts_as_cached_until_its_time_is_up() -> None:
    service = await ready()
    service.select([1, 2, 3])
    assert predicted(service) == 0  # a selection alone books nothing
    booked = service.select([1, 2, 3], reservation_id="r")
    service.selections.reservations.prefill_complete("r")
    again = service.select([1, 2, 3, 4])
    assert again["worker_id"] == booked["worker_id"]
    assert again["overlap"]["gpu"] == 3 * BLOCK_SIZE
    assert again["effective_prefill_tokens"] == BLOCK_SIZE
    service.selections.reservations.free("r")
    service.now += TTL_S - 1
    service.expire()
    assert gpu(service, [1, 2, 3]) == 3
    service.now += 1
    service.expire()
    assert (gpu(service, [1, 2, 3]), predicted(service)) == (0, 0)
    service.check()


async def test_a_reservation_predicts_as_well() -> None:
    service = await ready()
    service.reserve("r", (2, 0), [1, 2])
    assert gpu(service, [1, 2, 3]) == 2


async def test_an_eviction_ends_what_was_predicted() -> None:
    service = await ready()
    service.reserve("r", (1, 0), [1, 2])
    caches = service.state.partitions[M].workers[1]
    names = sequence_hashes([1, 2])
    caches.store(0, names, [1, 2])
    assert gpu(service, [1, 2]) == 2
    caches.drop(0, names[1:])
    assert gpu(service, [1, 2]) == 1
    caches.drop(0, names[:1])
    assert gpu(service, [1, 2]) == 0


async def test_a_rank_that_goes_takes_its_predictions_along() -> None:
    service = await ready(data_parallel_size=2)
    service.reserve("r", (1, 0), [1, 2])
    service.reserve("s", (1, 1), [5, 6])
    await service.selections.workers.put(worker(1, data_parallel_size=1))
    assert (gpu(service, [1, 2]), gpu(service, [5, 6])) == (2, 0)
    await service.selections.workers.delete(1)
    assert gpu(service, [1, 2]) == 0
    await service.selections.workers.put(worker(1, data_parallel_size=2))
    assert gpu(service, [1, 2]) == gpu(service, [5, 6]) == 0
    service.reserve("t", (1, 1), [5, 6])
    assert gpu(service, [5, 6]) == 2
    await service.selections.workers.delete(1)
    await service.selections.workers.delete(2)
    assert M not in service.state.partitions
    await service.selections.workers.put(worker(2))
    service.reserve("u", (2, 0), [7])  # in a new index
    assert gpu(service, [7]) == 1
    service.check()


async def test_they_are_of_a_model_and_tenant() -> None:
    service = await ready()
    await service.selections.workers.put(worker(3, N))
    service.reserve("r", (1, 0), [1, 2])
    assert service.select([1, 2], key=N)["overlap"]["gpu"] == 0


async def test_there_are_so_many_and_no_more() -> None:
    options = RouterOptions(predicted_ttl_s=TTL_S, max_tree_size=10, prune_target_ratio=0.5)
    service = await ready(options)
    for number in range(11):
        service.reserve(str(number), (1, 0), [100 + number])
    service.expire()
    assert predicted(service) == 5
    assert gpu(service, [110]) == 1 and gpu(service, [100]) == 0


async def test_they_are_no_part_of_the_index() -> None:
    service = await ready()
    before = service.state.partitions[M].index.stats()
    service.reserve("r", (1, 0), [1, 2])
    index = service.state.partitions[M].index
    stats = index.stats()
    assert {**stats, "bytes": 0} == {**before, "bytes": 0}
    assert stats["bytes"] > before["bytes"]
    assert index.match([1, 2]) == ({}, [])
    assert index.dump().read(1 << 20) == b""
    index.verify()


async def test_without_the_option_none_are_kept() -> None:
    service = await ready(RouterOptions())
    service.select([1, 2], reservation_id="r")
    assert service.state.partitions[M].index.predicted() == service.candidates().predicted() == 0


@pytest.mark.parametrize("seed", range(3))
async def test_a_prediction_never_hides_what_is_cached(seed: int) -> None:
    """Compared with a service without predictions, no rank ever caches less, nor more for ever."""
    rng = Random(seed)
    with_, without = await ready(), await ready(RouterOptions())

    for number in range(200):
        prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
        rank = rng.choice((1, 2)), 0
        kind = rng.random()
        for service in (with_, without):
            caches = service.state.partitions[M].workers[rank[0]]
            names = sequence_hashes(prompt)
            if kind < 0.4:
                service.reserve(f"r{number}", rank, prompt)
            elif kind < 0.6:
                caches.store(0, names, prompt)
            elif kind < 0.8:
                caches.drop(0, names[-1:])
            elif kind < 0.85:
                caches.clear(0)
            else:
                service.now += 3
                service.expire()
        depths = [depth(service, prompt) for service in (with_, without)]
        assert all(mine >= theirs for mine, theirs in zip(*depths, strict=True))
    for service in (with_, without):
        service.now += TTL_S
        service.expire()
    for _ in range(50):
        prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
        assert depth(with_, prompt) == depth(without, prompt)
    with_.check()


# ---- over HTTP, with an engine

PROMPT = {"model_name": "m", "token_ids": list(range(16))}


def overlap(client: Client) -> int:
    (row,) = client.post("/overlap_scores", json=PROMPT).json()["workers"]
    blocks: int = row["device_blocks"]
    return blocks


def until(client: Client, blocks: int) -> None:
    def problem() -> str | None:
        found = overlap(client)
        return None if found == blocks else f"{found} blocks instead of {blocks}"

    wait_until(problem, 10.0)


def test_between_a_booking_and_the_first_event(tmp_path: Path) -> None:
    engine = Engine("only")
    engine.bind()
    record = {
        "worker_id": 1,
        "model_name": "m",
        "endpoint": "http://worker:8000",
        "block_size": 4,
        "kv_events_endpoint": engine.endpoint("pub"),
    }
    environ = {"DYN_ROUTER_PREDICTED_TTL_SECS": "600"}
    with (
        running_kvd(tmp_path, face="select-service", environ=environ) as server,
        Client(server.base_url, timeout=20) as client,
    ):
        assert client.post("/workers", json=record).json()["lifecycle"] == "schedulable"
        empty = client.get("/dump").json()
        for path in ("/select", "/potential_loads"):
            assert client.post(path, json=PROMPT).status_code == 200
        assert overlap(client) == 0
        booking = PROMPT | {"reservation_id": "r"}
        assert client.post("/select_and_reserve", json=booking).status_code == 200
        assert overlap(client) == 4
        assert client.get("/dump").json() == empty
        stored = ["BlockStored", [1, 2, 3, 4], None, PROMPT["token_ids"], 4, None, None]
        engine.publish({"seq": 0, "batch": [1.0, [stored], None]})
        engine.publish({"seq": 1, "batch": [2.0, [["BlockRemoved", [4, 3], None]], None]})
        until(client, 2)
        cleared = ["AllBlocksCleared"]
        engine.publish({"seq": 2, "batch": [3.0, [cleared], None]})
        until(client, 0)
    engine.unbind()
