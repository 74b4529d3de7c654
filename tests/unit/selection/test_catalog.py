"""The worker catalog: which workers can be scheduled, and the effects of changing a worker."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.errors import BadRequest, Conflict, Invalid, KvdError, NotFound, Unavailable
from kvd.faces.indexer.workers import SLICE_RANKS
from kvd.faces.selection.records import row
from kvd.faces.selection.workers import listed
from kvd.index import registry
from kvd.model import PartitionKey, RankKey
from kvd.selection.admission import CHECKED_AT_ONCE, OWNER
from kvd.selection.candidates import Absence
from kvd.selection.membership import LISTENED_SLICE
from kvd.selection.options import RouterMode, RouterOptions
from kvd.selection.requests import QueuedRequest
from kvd.selection.stats import SelectionOutcome, Unserved
from kvd.selection.tuning import TuningKey
from kvd.selection.worker_record import ENDPOINTS_AT_ONCE, MAX_DP_SIZE, WorkerRecord
from kvd.selection.workers import LISTED_AT_ONCE, RECONSIDERED
from kvd.slots.live_requests import REMOVAL_SLICE
from kvd.wire.endpoints import Addresses
from kvd.wire.lifecycle import Lifecycle as Event
from kvd.wire.lifecycle import Outcome, Step
from kvd_core.ledger import ledger
from kvd_core.selector.settings import Settings
from tests.support.budget import scaled
from tests.support.cancelling import every_checkpoint
from tests.support.selecting import BLOCK_SIZE, EXPIRY_S, M, N, Service, worker
from tests.support.zmtp_fakes import NOT_MY_FAULT_S

# ---- schedulable workers


@pytest.mark.parametrize(
    ("members", "reasons"),
    [
        ({}, []),
        ({"endpoint": None}, ["endpoint is required"]),
        ({"endpoint": ""}, ["endpoint is required"]),
        ({"block_size": None}, ["block_size must be greater than 0"]),
        ({"block_size": 0}, ["block_size must be greater than 0"]),
        ({"block_size": 2**32}, ["block_size must be below 2^32"]),
        ({"data_parallel_size": 0}, ["data_parallel_size must be greater than 0"]),
        (
            {"data_parallel_size": MAX_DP_SIZE + 1},
            [f"data_parallel_size must be at most {MAX_DP_SIZE}, and each dp_rank below 2^32"],
        ),
        (
            {"data_parallel_start_rank": 2**32 - 1, "data_parallel_size": 2},
            [f"data_parallel_size must be at most {MAX_DP_SIZE}, and each dp_rank below 2^32"],
        ),
        ({"data_parallel_start_rank": 2**32 - 2, "data_parallel_size": 2}, []),
        (
            {"kv_events_endpoints": {}},
            ["kv_events endpoint is required for dp_rank 0"],
        ),
        ({"kv_events_endpoints": {}, "kv_events_endpoint": "tcp://10.2.3.4:5"}, []),
        (
            {
                "kv_events_endpoints": {1: "tcp://10.2.3.4:5"},
                "kv_events_endpoint": "tcp://10.2.3.4:6",
                "data_parallel_size": 3,
            },
            [f"kv_events endpoint is required for dp_rank {rank}" for rank in (0, 2)],
        ),
        ({"replay_endpoint": "tcp://10.2.3.4:5", "data_parallel_size": 2}, []),
        ({"max_num_batched_tokens": None}, []),
        (
            {"endpoint": None, "block_size": None, "kv_events_endpoints": {}},
            [
                "endpoint is required",
                "block_size must be greater than 0",
                "kv_events endpoint is required for dp_rank 0",
            ],
        ),
    ],
)
async def test_reasons(members: dict[str, Any], reasons: list[str]) -> None:
    service = Service()
    entry = await service.selections.workers.put(worker(**members))
    assert entry.reasons == reasons
    assert entry.lifecycle == ("incomplete" if reasons else "schedulable")
    assert entry.record.shown(entry.lifecycle, entry.reasons).get(
        "not_schedulable_reasons", []
    ) == (reasons)
    service.check()


@pytest.mark.parametrize("member", ["kv_events_endpoint", "replay_endpoint"])
@pytest.mark.parametrize("address", ["nowhere", "tcp://10.2.3.4", "tcp://1.2.3.4:0x1"])
async def test_an_address_that_is_none_is_a_reason(member: str, address: str) -> None:
    service = Service()
    endpoints: dict[str, Any] = {member: address}
    if member == "kv_events_endpoint":
        endpoints["kv_events_endpoints"] = {}
    entry = await service.selections.workers.put(worker(**endpoints))
    assert len(entry.reasons) == 1 and not service.listeners.running


async def test_without_events_nobody_is_listened_to() -> None:
    service = Service(RouterOptions(uses_kv_events=False))
    entry = await service.selections.workers.put(
        worker(kv_events_endpoints={}, data_parallel_size=2)
    )
    assert entry.reasons == [] and service.listeners.starts == 0
    service.check()
    await service.selections.workers.delete(1)
    service.check()
    assert not service.state.partitions


async def test_a_block_size_is_that_of_the_others() -> None:
    service = Service()
    selections = service.selections
    await selections.workers.put(worker(1))
    (reason,) = (await selections.workers.put(worker(2, block_size=8))).reasons
    assert reason == "block_size 8 differs from 4 of its model"
    assert (await selections.workers.put(worker(3, N, block_size=8))).reasons == []
    assert (
        await selections.workers.put(worker(1, block_size=16))
    ).reasons == []  # there is no other worker to differ from
    service.check()


async def test_ranks_that_are_not_there_cost_nothing() -> None:
    service = Service()
    put = service.selections.workers.put
    entry = await put(replace(worker(), data_parallel_size=2**32 - 1))
    shown = json.loads(b"".join(row(service.selections.workers, entry)))
    assert shown["lifecycle"] == "incomplete" and "listeners" not in shown


async def test_a_long_list_rests_after_some_ranks() -> None:
    ids = range(1, 2 * SLICE_RANKS + 1)
    one, many = worker(200, N), worker(201, N, data_parallel_size=SLICE_RANKS)
    service = await ready(*map(worker, ids), one, many)
    pieces = list(listed(service.selections, await service.selections.workers.listed(None, None)))
    assert [row["worker_id"] for row in json.loads(b"".join(pieces))] == [*ids, 200, 201]
    assert pieces.count(b"") == 3 and pieces[-2:] == [b"", b"]"]
    assert list(listed(service.selections, [])) == [b"[]"]


async def test_a_long_list_is_found_in_slices(nursery: trio.Nursery) -> None:
    service, count = await ready(worker(1)), 3 * LISTED_AT_ONCE
    workers = service.selections.workers
    (entry,) = workers.entries.values()
    for number in range(2, count + 1):
        workers.entries[number] = replace(entry, record=worker(number))
    begun, seen = trio.Event(), list[int]()

    async def look() -> None:
        begun.set()
        seen.extend(one.record.worker_id for one in await workers.listed(None, None))

    nursery.start_soon(look)
    await begun.wait()
    del workers.entries[count]
    await trio.testing.wait_all_tasks_blocked()
    assert seen == [*range(1, count)]


async def test_many_ranks_are_listened_to_in_slices(nursery: trio.Nursery) -> None:
    service, ranks = Service(), 4 * LISTENED_SLICE
    heard = [0]

    async def watch() -> None:
        while True:
            heard.append(len(service.listeners.running))
            await trio.lowlevel.checkpoint()

    nursery.start_soon(watch)
    await service.selections.workers.put(worker(data_parallel_size=ranks))
    assert max(after - before for before, after in pairwise(heard)) <= 2 * LISTENED_SLICE
    assert len(service.listeners.running) == ranks
    service.check()


async def test_a_new_pool_has_the_ranks_of_the_former_one() -> None:
    service = await ready(worker(1, data_parallel_size=2), worker(3))
    candidates = service.candidates()
    before = candidates.pool.candidates
    await service.selections.workers.put(worker(2))
    after = candidates.pool.candidates
    assert [each.worker_id for each in after] == [1, 1, 2, 3]
    assert set(before) < set(after)
    service.check()


class Unsearched(dict[tuple[int, int], Absence]):
    """Absent ranks, of which there may be ten thousands: nobody may go through all of them."""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        raise AssertionError


async def test_a_worker_that_leaves_is_not_searched_for_among_all_absent_ranks() -> None:
    service = await ready(worker(1, data_parallel_size=2), worker(3))
    absence = Absence(0.0, heard=True, reachable=False)
    candidates = service.candidates()
    candidates.absent = Unsearched(dict.fromkeys([(1, 0), (1, 1), (3, 0)], absence))
    await service.selections.workers.delete(1)
    assert candidates.absent == {(3, 0): absence}


async def test_many_endpoints_are_checked_in_slices(nursery: trio.Nursery) -> None:
    service, ranks, passes = Service(), 4 * ENDPOINTS_AT_ONCE, 0

    async def watch() -> None:
        nonlocal passes
        while True:
            passes += 1
            await trio.lowlevel.checkpoint()

    nursery.start_soon(watch)
    endpoints = dict.fromkeys(range(ranks), "tcp://10.0.0.1:5000") | {ranks - 1: "tcp://8.8.8.8:1"}
    record = worker(data_parallel_size=ranks, kv_events_endpoints=endpoints)
    with pytest.raises(BadRequest):
        await service.selections.workers.put(record)
    assert passes >= 3
    slices, before = 4 * 4 - 4, passes  # of addresses, of reasons, and of ranks in the registry
    endpoints = dict.fromkeys(range(4 * ranks), "tcp://10.0.0.1:5000")
    record = worker(data_parallel_size=4 * ranks, kv_events_endpoints=endpoints)
    await service.selections.workers.put(replace(record, endpoint=None))
    assert passes - before >= 2 * slices


async def test_ranks_are_checked_in_slices() -> None:
    addresses = Addresses("tcp://10.0.0.1:5000")
    ranks = ((RankKey(M, 1, each), addresses) for each in range(registry.CHECKED_AT_ONCE + 1))
    checks = Service().registry.check(M, ranks, BLOCK_SIZE, OWNER, ())
    assert len(list(checks)) == 1


# ---- upsert


async def ready(*records: WorkerRecord, **members: Any) -> Service:
    service = Service(**members)
    for record in records:
        assert (await service.selections.workers.put(record)).reasons == []
    return service


def shown(service: Service) -> Any:
    """Returns everything that a change of the catalog may affect."""
    selections = service.selections
    listeners = {key: id(each) for key, each in service.listeners.running.items()}
    loads = {
        key: candidates.ledger.project(b"", 0) for key, candidates in selections.candidates.items()
    }
    return (
        dict(selections.workers.entries),
        listeners,
        service.listeners.starts,
        loads,
        set(selections.reservations.owner_of),
    )


TWO = worker(1, data_parallel_size=2, replay_endpoint="tcp://10.0.0.1:6000")


@pytest.mark.parametrize(
    "members",
    [
        {"endpoint": None},
        {"endpoint": ""},
        {"block_size": 8},
        {"block_size": None},
        {"data_parallel_size": 0},
        {"data_parallel_size": 3},
        {"kv_events_endpoints": {}},
        {"kv_events_endpoints": {0: "tcp://10.0.0.1:1", 1: "nowhere"}},
        {"replay_endpoint": "nowhere"},
        {"model_name": "n", "block_size": 16},
    ],
    ids=str,
)
async def test_a_bad_upsert_of_a_live_worker_changes_nothing(members: dict[str, Any]) -> None:
    service = await ready(TWO, worker(2), worker(3, N))
    service.reserve("r", (1, 1), [1, 2], 8)
    before = shown(service)
    with pytest.raises(Conflict):
        await service.selections.workers.put(replace(TWO, **members))
    assert shown(service) == before and len(service.events) == 1
    service.check()


@pytest.mark.parametrize("taken", ["address", "block size", "no room"])
async def test_an_upsert_that_cannot_be_listened_to_changes_nothing(taken: str) -> None:
    """Another face has registered the rank differently, or has taken all the room."""
    service = await ready(TWO, max_ranks=3)
    service.reserve("r", (1, 0), [1, 2], 8)
    wanted = replace(TWO, endpoint="http://elsewhere")
    if taken == "address":
        service.registry.register(RankKey(M, 1, 0), "tcp://10.0.0.1:5000", 4, TWO.replay_endpoint)
        endpoints = {0: "tcp://10.0.0.1:7000", 1: "tcp://10.0.0.1:7001"}
        wanted = replace(TWO, kv_events_endpoints=endpoints)
    elif taken == "block size":
        service.registry.register(RankKey(M, 9, 0), "tcp://10.0.0.9:1", BLOCK_SIZE, None)
        wanted = replace(TWO, block_size=8)
    else:
        wanted = worker(1, data_parallel_size=4)
    before = shown(service)
    with pytest.raises(Conflict):
        await service.selections.workers.put(wanted)
    assert shown(service) == before
    service.check()


async def test_a_new_worker_that_cannot_be_listened_to_is_incomplete() -> None:
    service = await ready(TWO, max_ranks=2)
    entry = await service.selections.workers.put(worker(2))
    assert entry.reasons == ["the limit of 2 listeners is reached"]
    service.check()
    await service.selections.workers.delete(1)
    assert (await service.selections.workers.put(worker(2))).reasons == []
    service.check()


async def test_an_incomplete_worker_becomes_schedulable() -> None:
    service = Service()
    await service.selections.workers.put(worker(endpoint=None))
    with pytest.raises(Unavailable):
        service.select([1])
    entry = await service.selections.workers.put(worker())
    assert entry.reasons == [] and service.select([1])["worker_id"] == 1
    service.check()


@pytest.mark.parametrize(
    ("change", "kept", "restarted"),
    [
        ({}, "ab", 0),
        ({"endpoint": "http://elsewhere"}, "ab", 0),
        ({"max_num_batched_tokens": 7, "total_kv_blocks": 9, "taints": ("x",)}, "ab", 0),
        ({"data_parallel_size": 3}, "ab", 1),
        ({"data_parallel_size": 1}, "a", 0),
        ({"data_parallel_start_rank": 1, "data_parallel_size": 1}, "b", 0),
        ({"kv_events_endpoints": {0: "tcp://10.0.0.1:1", 1: "tcp://10.0.0.1:5001"}}, "ab", 1),
        ({"replay_endpoint": "tcp://10.0.0.1:9"}, "ab", 2),
        ({"replay_endpoint": None}, "ab", 2),
        ({"block_size": 8}, "", 2),
        ({"model_name": "n"}, "", 2),
        ({"tenant_id": "u"}, "", 2),
    ],
    ids=str,
)
async def test_what_an_upsert_keeps(change: dict[str, Any], kept: str, restarted: int) -> None:
    """It keeps the requests of ranks that stay, and the listeners whose addresses stay."""
    ranks = {rank: f"tcp://10.0.0.1:{5000 + rank}" for rank in range(3)}
    old = replace(TWO, kv_events_endpoints=ranks)
    service = await ready(old)
    service.reserve("a", (1, 0), [1, 2], 8)
    service.reserve("b", (1, 1), [1, 2], 8)
    starts = service.listeners.starts
    assert (await service.selections.workers.put(replace(old, **change))).reasons == []
    assert "".join(sorted(service.selections.reservations.owner_of)) == kept
    assert service.listeners.starts - starts == restarted
    freed = {event.request_id for event in service.events if event.step is Step.FREE}
    assert freed == {"a", "b"} - set(kept)  # replicas are notified
    service.check()


async def test_a_worker_has_one_place() -> None:
    service = await ready(worker(1), worker(2))
    await service.selections.workers.put(worker(1, N))
    assert service.select([1], key=N)["worker_id"] == 1
    assert {service.select([1])["worker_id"] for _ in range(20)} == {2}
    found = await service.selections.workers.listed(None, None)
    assert [entry.record.key for entry in found] == [M, N]
    assert len(await service.selections.workers.listed("m", None)) == 1
    assert len(await service.selections.workers.listed("m", "other")) == 0
    service.check()


# ---- patch and delete


async def test_a_patch_may_end_a_worker() -> None:
    service = await ready(TWO)
    service.reserve("a", (1, 0), [1, 2], 8)
    entry = await service.selections.workers.patch(1, lambda record: replace(record, endpoint=""))
    assert (
        entry.reasons
        and not service.selections.reservations.owner_of
        and not service.listeners.running
    )
    service.check()
    entry = await service.selections.workers.patch(
        1, lambda record: replace(record, endpoint="http://x")
    )
    assert entry.reasons == [] and len(service.listeners.running) == 2
    with pytest.raises(NotFound):
        await service.selections.workers.patch(2, lambda record: record)
    service.check()


async def test_what_is_deleted_is_gone() -> None:
    service = await ready(TWO, worker(2))
    service.reserve("a", (1, 0), [1, 2], 8)
    service.reserve("b", (2, 0), [1, 2], 8)
    assert (await service.selections.workers.delete(1)).record == TWO
    assert set(service.selections.reservations.owner_of) == {"b"}
    with pytest.raises(NotFound):
        await service.selections.workers.delete(1)
    with pytest.raises(NotFound):
        service.selections.reservations.free("a")
    service.reserve("a", (2, 0), [1], 4)  # the id is free
    service.check()
    await service.selections.workers.delete(2)
    assert not service.listeners.running and not service.state.partitions
    assert service.selections.candidates.keys() == {M}  # it stays listed, without loads
    service.check()


async def test_what_is_booked_on_a_leaving_worker_ends_in_slices(nursery: trio.Nursery) -> None:
    service = await ready(worker(1), worker(2))
    many = 6 * REMOVAL_SLICE
    for number in range(many):
        service.reserve(str(number), (1, 0), [1, number], 8)
    live, stats = service.selections.reservations.owner_of, service.candidates().ledger.stats
    nursery.start_soon(service.selections.workers.delete, 1)
    seen = set()
    while live:
        await trio.lowlevel.checkpoint()
        seen.add(len(live))
        assert stats()["requests"] == len(live)
        service.candidates().ledger.verify()
        if len(live) < many:
            assert 1 not in service.selections.workers.entries
            assert service.select([1, 2])["worker_id"] == 2
            with pytest.raises(NotFound):
                service.reserve("late", (1, 0), [1])
    assert len(seen) > 3  # at least, as either of two tasks may run first in a pass
    await trio.testing.wait_all_tasks_blocked()
    service.check()


async def test_idle_ranks_of_a_worker_leave_together(nursery: trio.Nursery) -> None:
    many = 6 * REMOVAL_SLICE
    service = await ready(worker(1, data_parallel_size=many, without_kv_events=True), worker(2))
    stats = service.candidates().ledger.stats
    nursery.start_soon(service.selections.workers.delete, 1)
    seen = []
    while stats()["ranks"] > 1:
        seen.append(stats()["ranks"])
        service.candidates().ledger.verify()
        await trio.lowlevel.checkpoint()
    assert set(seen) == {many + 1}
    await trio.testing.wait_all_tasks_blocked()
    service.check()


async def test_ranks_that_stay_serve_while_others_leave_in_slices(nursery: trio.Nursery) -> None:
    service = await ready(TWO)
    many = 6 * REMOVAL_SLICE
    for number in range(many):
        service.reserve(str(number), (1, 1), [1, number], 8)
    service.reserve("stays", (1, 0), [1, 2], 8)
    live = service.selections.reservations.owner_of
    nursery.start_soon(service.selections.workers.put, replace(TWO, data_parallel_size=1))
    seen = set()
    while len(live) > 1:
        await trio.lowlevel.checkpoint()
        seen.add(len(live))
        answer = service.select([1, 2])
        assert answer["worker_id"] == 1
        assert answer["dp_rank"] == 0 or len(live) > many
    assert len(seen) > 3
    assert set(live) == {"stays"}
    await trio.testing.wait_all_tasks_blocked()
    service.check()


MANY = worker(1, data_parallel_size=3 * LISTENED_SLICE)


@pytest.mark.parametrize(
    "new",
    [replace(MANY, taints=("x",)), worker(1, data_parallel_size=9 * LISTENED_SLICE)],
    ids=["another taint", "more ranks"],
)
async def test_a_worker_of_many_ranks_serves_while_it_changes(
    new: WorkerRecord, nursery: trio.Nursery
) -> None:
    service = await ready(MANY)
    nursery.start_soon(service.selections.workers.put, new)
    while service.selections.workers.entries[1].record != new:
        assert service.select([1, 2])["worker_id"] == 1
        await trio.lowlevel.checkpoint()
    service.check()


OTHERS = worker(1, data_parallel_start_rank=2, data_parallel_size=2)


def booked(service: Service, *ranks: tuple[int, int]) -> int:
    """Books so many requests on these ranks that ending them takes many slices; returns them."""
    many = 6 * REMOVAL_SLICE
    for number in range(many):
        service.reserve(str(number), ranks[number % len(ranks)], [1, number], 8)
    return many


async def test_other_ranks_of_a_worker_serve_while_the_old_ones_leave(
    nursery: trio.Nursery,
) -> None:
    service = await ready(TWO)
    many = booked(service, (1, 0), (1, 1))
    live = service.selections.reservations.owner_of
    nursery.start_soon(service.selections.workers.put, OTHERS)
    seen = set()
    while live:
        await trio.lowlevel.checkpoint()
        seen.add(len(live))
        service.candidates().ledger.verify()
        if len(live) < many:
            assert service.select([1, 2])["dp_rank"] in (2, 3)
            assert service.selections.workers.entries[1].record == OTHERS
            with pytest.raises(NotFound):
                service.reserve("late", (1, 0), [1])
    assert len(seen) > 3
    await trio.testing.wait_all_tasks_blocked()
    service.check()


async def test_a_worker_serves_another_model_while_its_old_reservations_end(
    nursery: trio.Nursery,
) -> None:
    service = await ready(TWO, worker(2))
    many = booked(service, (1, 0), (1, 1))
    live = service.selections.reservations.owner_of
    moved = worker(1, N, block_size=2 * BLOCK_SIZE)
    nursery.start_soon(service.selections.workers.put, moved)
    while live:
        await trio.lowlevel.checkpoint()
        if len(live) < many:
            assert service.select([1, 2], key=N)["worker_id"] == 1
            assert service.select([1, 2])["worker_id"] == 2
    await trio.testing.wait_all_tasks_blocked()
    service.check()


async def test_those_that_wait_get_new_ranks_before_the_old_ones_have_left(
    nursery: trio.Nursery,
) -> None:
    busy = {"max_num_batched_tokens": 100}
    service = Service(RouterOptions(Settings(queue_threshold=1.0)))
    await service.selections.workers.put(replace(TWO, **busy))
    booked(service, (1, 0), (1, 1))
    live = service.selections.reservations.owner_of
    held = service.select([1, 2])
    assert isinstance(held, QueuedRequest)
    nursery.start_soon(service.selections.scheduler.wait, held)
    nursery.start_soon(service.selections.workers.put, replace(OTHERS, **busy))
    while held.answer is None:
        await trio.lowlevel.checkpoint()
    assert live
    assert isinstance(held.answer, bytes) and json.loads(held.answer)["dp_rank"] in (2, 3)
    await trio.testing.wait_all_tasks_blocked()
    assert not live
    service.check()


@pytest.mark.parametrize("why", ["another block size", "no room for both"])
async def test_new_ranks_come_after_the_old_ones_where_both_do_not_fit(
    why: str, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = await ready(TWO)
    booked(service, (1, 0), (1, 1))
    live = service.selections.reservations.owner_of
    after = OTHERS
    if why == "another block size":  # a new ledger, which has none of the old reservations
        after = replace(TWO, block_size=2 * BLOCK_SIZE)
    else:
        monkeypatch.setattr(ledger, "MAX_RANKS", 3)
    nursery.start_soon(service.selections.workers.put, after)
    while live:
        await trio.lowlevel.checkpoint()
        assert service.candidates().workers in ({}, {1: TWO}) or not live
        for name in live:
            service.selections.reservations.find(name)
    await trio.testing.wait_all_tasks_blocked()
    assert service.selections.workers.entries[1].record == after
    assert service.select([1, 2])["worker_id"] == 1
    service.check()


async def test_replicas_book_nothing_on_ranks_that_leave(nursery: trio.Nursery) -> None:
    """The end of such a booking there would also end the request on the replica."""
    service = await ready(TWO)
    many = booked(service, (1, 0), (1, 1))
    reservations = service.selections.reservations
    nursery.start_soon(service.selections.workers.put, OTHERS)
    seen = set()
    while reservations.owner_of:
        await trio.lowlevel.checkpoint()
        if 0 < len(reservations.owner_of) < many:
            for dp_rank in TWO.ranks:
                add = Event(M, BLOCK_SIZE, "theirs", 1, dp_rank, Step.ADD, b"", 8, router_id=1)
                seen.add(reservations.apply(add, service.now))
    assert seen == {Outcome.UNKNOWN_RANK}
    await trio.testing.wait_all_tasks_blocked()
    service.check()


async def test_replicas_are_notified_of_steps_while_the_last_worker_leaves(
    nursery: trio.Nursery,
) -> None:
    """Replicas would drop a step with another block size than theirs."""
    service = await ready(TWO)
    booked(service, (1, 1))
    reservations = service.selections.reservations
    nursery.start_soon(service.selections.workers.delete, 1)
    while service.candidates().workers:
        await trio.lowlevel.checkpoint()
    last = list(reservations.owner_of)[-1]
    reservations.prefill_complete(last)
    reservations.free(last)
    steps = [each for each in service.events if each.request_id == last]
    assert [each.step for each in steps] == [Step.ADD, Step.PREFILL_COMPLETE, Step.FREE]
    assert {each.block_size for each in steps} == {BLOCK_SIZE}
    await trio.testing.wait_all_tasks_blocked()
    service.check()


@pytest.mark.parametrize("later", range(1, 7))
async def test_bookings_can_be_ended_while_their_worker_changes(
    later: int, nursery: trio.Nursery
) -> None:
    service = await ready(TWO)
    for name in "abc":
        service.reserve(name, (1, 0), [1, 2], 8)
    for change in ({"replay_endpoint": None}, {"data_parallel_size": 1}):
        nursery.start_soon(service.selections.workers.put, replace(TWO, **change))
        for _ in range(later):  # meanwhile its listeners are about to end
            await trio.lowlevel.checkpoint()
        service.selections.reservations.prefill_complete("c")
        service.selections.reservations.free("ab"[len(service.events) > 5])
        assert service.select([1, 2])["worker_id"] == 1
        await trio.testing.wait_all_tasks_blocked()
        service.check()
    assert set(service.selections.reservations.owner_of) == {"c"}


# ---- the whole catalog of a model


async def test_a_set_is_idempotent() -> None:
    service = await ready(worker(1), worker(2), worker(5, N))
    service.reserve("a", (1, 0), [1], 4)
    service.reserve("b", (2, 0), [1], 4)
    wanted = [worker(2), worker(3), worker(5)]  # 5 moves here from another model
    for _ in range(3):
        entries = await service.selections.workers.put_all(M, wanted)
        assert [entry.record for entry in entries] == wanted
        found = await service.selections.workers.listed(None, None)
        assert [entry.record for entry in found] == wanted
        assert set(service.selections.reservations.owner_of) == {"b"}
        service.check()
    assert service.listeners.starts == 5
    assert await service.selections.workers.put_all(M, []) == []
    assert not service.selections.workers.entries and not service.listeners.running
    service.check()


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (worker(3, endpoint=None), Invalid),
        (worker(3, block_size=8), Invalid),
        (worker(3, kv_events_endpoints={0: "nowhere"}), Invalid),
        (worker(3, data_parallel_size=9), Unavailable),
        (worker(9, kv_events_endpoints={0: "tcp://10.2.3.4:1"}), Conflict),
    ],
)
async def test_a_set_with_a_bad_worker_changes_nothing(
    bad: WorkerRecord, error: type[KvdError]
) -> None:
    service = await ready(worker(1), worker(2), worker(5, N), max_ranks=10)
    service.registry.register(RankKey(M, 9, 0), "tcp://10.0.0.9:1", BLOCK_SIZE, None)
    service.reserve("a", (1, 0), [1], 4)
    before = shown(service)
    for records in ([worker(2), bad], [bad, worker(2)], [bad, worker(5)]):
        with pytest.raises(error):
            await service.selections.workers.put_all(M, records)
        assert shown(service) == before
    service.check()


async def test_a_set_may_change_the_block_size() -> None:
    service = await ready(worker(1), worker(2), worker(3))
    service.reserve("a", (1, 0), [1], 4)
    wanted = [worker(each, block_size=8) for each in (1, 2, 4)]
    entries = await service.selections.workers.put_all(M, wanted)
    assert [entry.reasons for entry in entries] == [[], [], []]
    assert [entry.record for entry in await service.selections.workers.listed(None, None)] == wanted
    assert not service.selections.reservations.owner_of
    service.check()


async def test_a_set_without_a_worker_in_common_always_has_someone_to_select(
    nursery: trio.Nursery,
) -> None:
    busy = RouterOptions(Settings(queue_threshold=0.0))
    service = await ready(worker(1, max_num_batched_tokens=1), options=busy)
    service.reserve("a", (1, 0), [1], 4)
    held = service.select([7, 8])
    answers: list[bytes] = []

    async def wait() -> None:
        answers.append(await service.selections.scheduler.wait(held))

    nursery.start_soon(wait)
    nursery.start_soon(service.selections.workers.put_all, M, [worker(2), worker(3)])
    await trio.testing.wait_all_tasks_blocked()
    assert len(answers) == 1 and b'"worker_id":1,' not in answers[0]
    service.check()


async def test_many_workers_of_a_set_are_checked_and_join_in_slices(
    nursery: trio.Nursery,
) -> None:
    old, many = 200, 4 * CHECKED_AT_ONCE
    service = await ready(worker(old))
    entries = service.selections.workers.entries
    nursery.start_soon(
        service.selections.workers.put_all, M, [worker(each) for each in range(many)]
    )
    seen = Counter[int]()
    while old in entries:
        await trio.lowlevel.checkpoint()
        seen[len(entries)] += 1
        service.select([1, 2])
    assert seen[1] > 3  # at least, as either of two tasks may run first in a pass
    assert len(seen) > many // 2
    service.check()


async def test_a_client_that_goes_away_leaves_no_half_set() -> None:
    sets = set()
    for cancelling in every_checkpoint():
        service = await ready(TWO)
        wanted = [worker(each) for each in (2, 3, 4)]
        await cancelling.run(partial(service.selections.workers.put_all, M, wanted))
        sets.add(tuple(service.selections.workers.entries))
        service.check()
    assert sets <= {(1,), (2, 3, 4)}


# ---- the other faces


@pytest.mark.parametrize("first", ["indexer", "selection"])
@pytest.mark.parametrize("leaves", ["indexer", "selection"])
async def test_a_worker_of_two_faces_is_listened_to_once(first: str, leaves: str) -> None:
    service = Service()
    key, record = RankKey(M, 1, 0), worker(1)
    faces = ["indexer", "selection"]
    for face in faces if first == "indexer" else reversed(faces):
        if face == "indexer":
            service.registry.register(key, "tcp://10.0.0.1:5000", BLOCK_SIZE, None)
        else:
            assert (await service.selections.workers.put(record)).reasons == []
    (listener,) = service.listeners.running.values()
    index_worker = service.state.partitions[M].workers[1]
    index_worker.store(0, [1, 2], [1, 2])
    service.check()
    if leaves == "indexer":
        await service.registry.unregister(1, "m", "t", None)
        assert service.select([1, 2])["overlap"]["gpu"] == 2 * BLOCK_SIZE
    else:
        await service.selections.workers.delete(1)
    assert list(service.listeners.running.values()) == [listener]
    assert service.state.partitions[M].workers[1] is index_worker
    service.check()
    if leaves == "indexer":
        await service.selections.workers.delete(1)
    else:
        await service.registry.unregister(1, "m", "t", None)
    assert not service.listeners.running and not service.state.partitions
    service.check()


async def test_another_address_elsewhere_is_a_reason() -> None:
    service = Service()
    service.registry.register(RankKey(M, 1, 0), "tcp://10.0.0.1:1", BLOCK_SIZE, None)
    assert (await service.selections.workers.put(worker(1))).reasons == [
        "instance 1 dp_rank 0 already registered"
    ]
    await service.registry.unregister(1, "m", "t", None)
    assert (await service.selections.workers.put(worker(1))).reasons == []
    service.check()


# ---- any sequence of changes

IDS = st.integers(1, 4)
RECORDS = st.builds(
    worker,
    IDS,
    st.sampled_from([M, M, N]),
    endpoint=st.sampled_from(["http://a", "http://b", None]),
    block_size=st.sampled_from([4, 4, 4, 8]),
    data_parallel_size=st.integers(1, 3),
    data_parallel_start_rank=st.sampled_from([None, 1]),
    replay_endpoint=st.sampled_from([None, None, "tcp://10.0.0.1:9", "nowhere"]),
    max_num_batched_tokens=st.sampled_from([None, 100]),
)
STEPS = st.one_of(
    st.tuples(st.just("put"), RECORDS),
    st.tuples(st.just("put"), RECORDS),
    st.tuples(st.just("patch"), IDS, st.sampled_from(["http://c", ""])),
    st.tuples(st.just("delete"), IDS),
    st.tuples(st.just("put_all"), st.lists(RECORDS, max_size=3)),
    st.tuples(st.just("reserve"), IDS, st.integers(0, 3), st.integers(0, 99)),
    st.tuples(st.just("indexer"), IDS, st.integers(0, 1), st.sampled_from([4, 4, 8])),
    st.tuples(st.just("no indexer"), IDS),
)


async def step(service: Service, kind: str, *rest: Any) -> None:
    selections = service.selections
    if kind == "put":
        await selections.workers.put(rest[0])
    elif kind == "patch":
        await selections.workers.patch(rest[0], lambda record: replace(record, endpoint=rest[1]))
    elif kind == "delete":
        await selections.workers.delete(rest[0])
    elif kind == "put_all":
        records = {record.worker_id: replace(record, model_name="m") for record in rest[0]}
        await selections.workers.put_all(M, list(records.values()))
    elif kind == "reserve":
        service.reserve(str(rest[2]), (rest[0], rest[1]), [1, 2, 3], 12)
    elif kind == "indexer":
        worker_id, dp_rank, block_size = rest
        endpoint = worker(worker_id, data_parallel_size=2).kv_events_endpoints[dp_rank]
        service.registry.register(RankKey(M, worker_id, dp_rank), endpoint, block_size, None)
    else:
        await service.registry.unregister(rest[0], "m", "t", None)


@pytest.mark.slow("checks all of the state after each change")
@settings(deadline=None, max_examples=scaled(16))
@given(st.booleans(), st.lists(STEPS, max_size=25))
def test_any_row_of_changes_leaves_all_in_agreement(
    uses_events: bool, steps: list[tuple[Any, ...]]
) -> None:
    async def run() -> None:
        service = Service(RouterOptions(uses_kv_events=uses_events), max_ranks=9)
        for kind, *rest in steps:
            before = shown(service)
            try:
                await step(service, kind, *rest)
            except KvdError:
                assert shown(service) == before
            service.check()

    trio.run(run)


@pytest.mark.parametrize(
    "steps",
    [
        [("put", replace(TWO, replay_endpoint=None))],
        [("put", replace(TWO, model_name="n"))],
        [("delete", 1)],
        [("put_all", [worker(2), worker(3)])],
        [("put_all", [worker(1, block_size=8)])],
    ],
)
async def test_a_client_that_goes_away_leaves_no_half_worker(steps: list[tuple[Any, ...]]) -> None:
    for cancelling in every_checkpoint():
        service = await ready(TWO)
        service.reserve("a", (1, 0), [1, 2], 8)

        async def change(service: Service = service) -> None:
            for kind, *rest in steps:
                await step(service, kind, *rest)

        await cancelling.run(change)
        service.check()
        for worker_id in list(service.selections.workers.entries):
            await service.selections.workers.delete(worker_id)
        service.check()
        assert not service.listeners.running and not service.selections.reservations.owner_of
        service.now += EXPIRY_S


# ---- workers that conflict with other registrations


async def test_a_conflict_ends_with_the_other_registration() -> None:
    service = Service()
    service.registry.register(RankKey(M, 1, 0), "tcp://10.0.0.1:1", BLOCK_SIZE, None)
    entry = await service.selections.workers.put(worker(1))
    assert entry.lifecycle == "incomplete" and entry.blocked
    service.registry.register(RankKey(N, 9, 0), "tcp://10.0.0.9:1", BLOCK_SIZE, None)
    await service.registry.unregister(9, "n", "t", None)  # not the conflicting one
    assert service.selections.workers.entries[1].reasons
    await service.registry.unregister(1, "m", "t", None)
    assert service.selections.workers.entries[1].reasons == []
    assert service.select([1])["worker_id"] == 1
    service.check()


@pytest.mark.parametrize("by", ["delete", "patch", "move", "put_all"])
async def test_a_block_size_is_free_when_its_last_worker_leaves(by: str) -> None:
    service = await ready(worker(1))
    workers = service.selections.workers
    for number in (2, 3):
        assert (await workers.put(worker(number, block_size=8))).blocked
    assert (await workers.put(worker(4, block_size=16))).blocked
    if by == "delete":
        await workers.delete(1)
    elif by == "patch":
        await workers.patch(1, lambda record: replace(record, endpoint=""))
    elif by == "move":
        await workers.put(worker(1, N))
    else:
        await workers.put_all(N, [worker(1, N)])
    reasons = {number: workers.entries[number].reasons for number in (2, 3, 4)}
    assert reasons == {2: [], 3: [], 4: ["block_size 16 differs from 8 of its model"]}
    assert service.candidates().block_size == 8
    service.check()


async def test_who_is_blocked_by_nobody_is_left_alone() -> None:
    service = await ready(worker(1))
    entry = await service.selections.workers.put(worker(2, endpoint="", block_size=8))
    assert entry.reasons and not entry.blocked
    await service.selections.workers.delete(1)
    assert service.selections.workers.entries[2] is entry


async def test_those_that_wait_get_who_joins(nursery: trio.Nursery) -> None:
    service = Service(RouterOptions(Settings(queue_threshold=1.0)))
    workers = service.selections.workers
    service.registry.register(RankKey(M, 1, 0), "tcp://10.0.0.1:1", BLOCK_SIZE, None)
    await workers.put(worker(1))
    await workers.put(worker(2, max_num_batched_tokens=1))
    service.reserve("a", (2, 0), [901], 2)
    held = service.select([1])
    answers: list[bytes] = []

    async def wait() -> None:
        answers.append(await service.selections.scheduler.wait(held))

    nursery.start_soon(wait)
    await service.registry.unregister(1, "m", "t", None)
    await trio.testing.wait_all_tasks_blocked()
    assert b'"worker_id":1,' in answers[0]
    service.check()


async def test_many_are_judged_again_in_slices() -> None:
    service = await ready(worker(1))
    workers = service.selections.workers
    count = 2 * RECONSIDERED + 1
    for number in range(2, 2 + count):
        address = {0: f"tcp://10.0.0.1:{number}"}
        assert (
            await workers.put(worker(number, block_size=8, kv_events_endpoints=address))
        ).blocked
    await workers.delete(1)
    assert len(service.candidates().workers) == RECONSIDERED
    assert await workers.reconsider()
    assert not await workers.reconsider()
    assert len(service.candidates().workers) == count
    service.check()


async def judging_again(service: Service, nursery: trio.Nursery, until: Callable[[], bool]) -> None:
    """Takes away what blocks workers, and returns while they are judged again."""
    changing = service.selections.workers._changing
    nursery.start_soon(service.registry.unregister, 9, "n", "t", None)
    while not changing.locked():
        await trio.lowlevel.checkpoint()
    while not until():
        assert changing.locked()
        await trio.lowlevel.checkpoint()
    assert changing.locked()


async def test_many_ranks_of_a_blocked_worker_join_in_slices(nursery: trio.Nursery) -> None:
    ranks = 4 * LISTENED_SLICE
    service = Service(max_ranks=ranks)
    service.registry.register(RankKey(N, 9, 0), "tcp://10.0.0.9:1", BLOCK_SIZE, None)
    workers, running = service.selections.workers, service.listeners.running
    assert (await workers.put(worker(data_parallel_size=ranks))).blocked
    with trio.fail_after(NOT_MY_FAULT_S):
        await judging_again(service, nursery, lambda: 0 < len(running) < ranks)
        # A change of the worker comes after that.
        await workers.put(worker(data_parallel_size=ranks - 1))
    assert len(running) == ranks - 1
    service.check()


@pytest.mark.parametrize("change", ["delete", "put"])
async def test_a_worker_may_change_while_it_is_judged_again(
    nursery: trio.Nursery, change: str
) -> None:
    service = Service(max_ranks=4)
    service.registry.register(RankKey(N, 9, 0), "tcp://10.0.0.9:1", BLOCK_SIZE, None)
    workers, record = service.selections.workers, worker(data_parallel_size=5)
    assert (await workers.put(record)).blocked
    with trio.fail_after(NOT_MY_FAULT_S):
        await judging_again(service, nursery, lambda: True)
        if change == "delete":
            await workers.delete(record.worker_id)
            assert not workers.entries
        else:
            smaller = await workers.put(replace(record, data_parallel_size=4))
            assert (smaller.reasons, list(workers.entries.values())) == ([], [smaller])
    assert not workers._blocked
    service.check()


# ---- models and tenants without workers


def model(number: int) -> PartitionKey:
    return PartitionKey(f"model{number}", "t")


async def test_models_whose_workers_have_left_make_room_for_others() -> None:
    service = Service(RouterOptions(max_partitions=3))
    workers = service.selections.workers
    await workers.put(worker(1))
    for number in range(6):
        assert (await workers.put(worker(2, model(number)))).reasons == []
        service.reserve("a", (2, 0), [1], 4, model(number))
        await workers.delete(2)
        service.check()
    assert service.selections.candidates.keys() == {M, model(4), model(5)}
    await workers.put(worker(2, model(4)))  # this one has workers again, so the other one goes
    assert (await workers.put(worker(3, model(6)))).reasons == []
    assert service.selections.candidates.keys() == {M, model(4), model(6)}
    (reason,) = (await workers.put(worker(4, model(7)))).reasons
    assert reason == "the limit of 3 models and tenants is reached (max_partitions)"
    await workers.delete(2)
    assert workers.entries[4].reasons == []
    assert service.selections.candidates.keys() == {M, model(6), model(7)}
    service.check()


@pytest.mark.parametrize("changed", [model(0), (model(0).model_name, None)], ids=["tenant", "all"])
async def test_models_with_settings_of_their_own_are_not_replaced(changed: TuningKey) -> None:
    service = Service(RouterOptions(max_partitions=2))
    workers, tuning = service.selections.workers, service.selections.tuning
    for number in range(2):
        await workers.put(worker(1, model(number)))
    await workers.delete(1)
    tuning.change(changed, {"mode": RouterMode.RANDOM.core})
    assert (await workers.put(worker(1, model(2)))).reasons == []
    assert service.selections.candidates.keys() == {model(0), model(2)}
    assert (await workers.put(worker(2, model(3)))).blocked
    tuning.take_back(changed, ["mode"])
    assert (await workers.put(worker(2, model(3)))).reasons == []
    assert service.selections.candidates.keys() == {model(2), model(3)}


async def test_a_selection_that_waits_is_refused_though_its_model_is_replaced() -> None:
    service = Service(RouterOptions(Settings(queue_threshold=1.0), max_partitions=1))
    workers = service.selections.workers
    await workers.put(worker(1, max_num_batched_tokens=1))
    service.reserve("a", (1, 0), [901], 2)
    held = service.select([1])
    assert isinstance(held, QueuedRequest)
    await workers.delete(1)
    assert (await workers.put(worker(1, N))).reasons == []
    assert service.selections.candidates.keys() == {N}
    with pytest.raises(Unserved) as refused:
        await service.selections.scheduler.wait(held)
    assert refused.value.outcome is SelectionOutcome.NO_WORKERS
    service.check()
