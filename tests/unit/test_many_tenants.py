"""Thousands of models and tenants: bounded, of a stated size, and independent of each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn, cast

import msgpack
import pytest

from kvd.errors import Unavailable
from kvd.faces.indexer.handlers import QueryHandler
from kvd.http.messages import Request, Response
from kvd.index.metrics import state_families
from kvd.index.partitions import SWEPT_PARTITIONS, State
from kvd.index.registry import Registry
from kvd.model import PartitionKey, RankKey
from kvd.telemetry.metrics import Family, render

TENANTS = 1_000
MAX_TENANT_BYTES = 40_000  # 31 KB each, as kvd/model.py says, plus the allocator's overhead
BLOCK_SIZE = 4


def rank(tenant: int | str, instance_id: int = 1) -> RankKey:
    return RankKey(PartitionKey("m", str(tenant)), instance_id, 0)


@pytest.fixture(scope="module")
def crowded() -> Iterator[State]:
    state = State()
    for tenant in range(TENANTS):
        state.add_rank(rank(tenant), BLOCK_SIZE)
    yield state


def test_an_empty_tenant_is_as_large_as_stated(crowded: State) -> None:
    sizes = {one.index.stats()["bytes"] for one in crowded.partitions.values()}
    assert 10_000 < min(sizes) <= max(sizes) < MAX_TENANT_BYTES


def test_a_tenant_beyond_the_bound_is_refused() -> None:
    state = State(max_partitions=3)
    for tenant in range(3):
        state.add_rank(rank(tenant), BLOCK_SIZE)
    with pytest.raises(Unavailable):
        state.add_rank(rank("one too many"), BLOCK_SIZE)
    assert (len(state.partitions), state.refused_partitions) == (3, 1)
    state.add_rank(rank(0, instance_id=2), BLOCK_SIZE)  # in an existing partition
    state.remove_rank(rank(1))
    state.add_rank(rank("another"), BLOCK_SIZE)
    assert set(state.partitions) == {rank(tenant).partition for tenant in (0, 2, "another")}


def series(state: State) -> list[tuple[str, object]]:
    """Returns the names and labels in /metrics for a state."""
    families = [family for family in state_families(state, 1) if isinstance(family, Family)]
    return [(family.name, sample[:2]) for family in families for sample in family.samples]


def test_tenants_make_no_series(crowded: State) -> None:
    alone = State()
    alone.add_rank(rank("x"), BLOCK_SIZE)
    assert series(crowded) == series(alone)


def test_a_scrape_rests_between_tenants(crowded: State) -> None:
    rests = [piece for piece in render(state_families(crowded, 1)) if not piece]
    assert len(rests) >= TENANTS // 64


class Unwalkable(dict[Any, Any]):
    """Partitions that can be looked up but not iterated over."""

    def _refuse(self) -> NoReturn:
        raise AssertionError("work for every tenant")

    __iter__ = keys = values = items = _refuse  # type: ignore[assignment]


def test_events_questions_and_removals_are_no_work_for_other_tenants(crowded: State) -> None:
    walkable = crowded.partitions
    query = QueryHandler(crowded, cast(Registry, None))  # it uses the registry for streams only
    crowded.partitions = Unwalkable(walkable)
    try:
        stream = crowded.add_rank(rank(5, instance_id=2), BLOCK_SIZE)
        stored = ["BlockStored", [7], None, [1, 2, 3, 4], BLOCK_SIZE]
        stream.apply(msgpack.packb([0.0, [stored]]))
        body = b'{"model_name": "m", "tenant_id": "5", "token_ids": [1, 2, 3, 4]}'
        request = Request("POST", "/query", b"", [], body)
        answer = cast(Response, query(request))
        assert b'"2":{"0":4}' in cast(bytes, answer.body)
        assert crowded.strays(2, "m", "5") == []
        crowded.remove_rank(rank(5, instance_id=2))
    finally:
        crowded.partitions = walkable


def test_a_sweep_goes_round(crowded: State) -> None:
    """Everything removed is freed once enough sweeps have come round to it."""
    freed = set()
    tenants = (0, 500, TENANTS - 1)
    for tenant in tenants:
        crowded.add_rank(rank(tenant, instance_id=3), BLOCK_SIZE)
        worker = crowded.partition("m", str(tenant)).workers[3]
        worker.store(0, list(range(1, 2000)), list(range(1, 2000)))
        crowded.remove_rank(rank(tenant, instance_id=3))
    for _ in range(2 * TENANTS // SWEPT_PARTITIONS + 2):
        while crowded.sweep(1000):
            pass
        freed |= {t for t in tenants if not crowded.partition("m", str(t)).index.stats()["blocks"]}
    assert freed == set(tenants)
