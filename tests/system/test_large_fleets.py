"""Answers with a row for each of many ranks come in pieces, and are of one moment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvd.slots.trackers import MAX_DP_SIZE
from kvd_core.ledger.ledger import WHOLE_ROWS_BYTES, Ledger
from tests.support.processes import Server
from tests.support.running import running_kvd
from tests.support.slot_bodies import BOOKED, MODEL

WORKERS = 3
LOADED = {"worker_id": 1, "dp_rank": 3}
PROMPT = {"model_name": MODEL, "sequence_hashes": [1, 2, 9], "new_isl_tokens": 16}


@pytest.fixture(scope="module")
def kvd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_kvd(tmp_path_factory.mktemp("kvd"), face="slot-tracker") as server:
        yield server


@pytest.fixture(scope="module")
def client(kvd: Server) -> Iterator[httpx.Client]:
    """A client of a slot tracker with so many ranks that rows are not rendered at once."""
    ledger = Ledger()
    ledger.add_ranks(0, 0, WORKERS * MAX_DP_SIZE)
    assert ledger.rows_bytes() > WHOLE_ROWS_BYTES
    worker = {"model_name": MODEL, "block_size": 16, "dp_start": 0, "dp_size": MAX_DP_SIZE}
    with httpx.Client(base_url=kvd.base_url, verify=False) as made:
        for worker_id in range(WORKERS):
            assert made.post("/register", json=worker | {"worker_id": worker_id}).is_success
        assert made.post("/add", json=BOOKED).is_success
        yield made


def rows(loaded: dict[str, int], others: dict[str, int], **more: str) -> list[dict[str, Any]]:
    ranks = [
        {"worker_id": worker_id, "dp_rank": dp_rank}
        for worker_id in range(WORKERS)
        for dp_rank in range(MAX_DP_SIZE)
    ]
    return [{**more, **rank, **(loaded if rank == LOADED else others)} for rank in ranks]


def streamed(response: httpx.Response) -> Any:
    assert response.status_code == 200
    assert response.headers["transfer-encoding"] == "chunked"
    return response.json()


@pytest.mark.parametrize("query", ["", f"?model_name={MODEL}"])
def test_loads_of_many_ranks(query: str, client: httpx.Client) -> None:
    names = {"model_name": MODEL, "tenant_id": "default"}
    loaded = {"active_prefill_tokens": 48, "active_decode_blocks": 3}
    expected = rows(loaded, dict.fromkeys(loaded, 0), **names)
    for _ in range(2):
        assert streamed(client.get(f"/loads{query}")) == expected
    assert client.get("/loads?model_name=another").json() == []


def test_projected_loads_of_many_ranks(client: httpx.Client) -> None:
    names = ("potential_prefill_tokens", "potential_decode_blocks", "active_requests")
    loaded, others = (dict(zip(names, row, strict=True)) for row in ((64, 4, 1), (16, 3, 0)))
    assert streamed(client.post("/potential_loads", json=PROMPT)) == rows(loaded, others)
    refused = client.post("/potential_loads", json=PROMPT | {"new_isl_tokens": -1})
    assert refused.status_code == 422
