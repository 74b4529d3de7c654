"""GET /workers of a large fleet comes in slices, and is right whatever changes between them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from kvd.faces.indexer import routes as indexer
from kvd.faces.indexer.workers import SLICE_RANKS, instances_of, listed
from kvd.http.messages import Request
from kvd.index.partitions import State
from kvd.index.registry import Registry
from kvd.model import PartitionKey, RankKey
from tests.support.idle_listeners import IdleListeners

RANKS = 2_000
SOMEWHERE = "tcp://127.0.0.1:1"


class Fleet:
    def __init__(self, instances: int) -> None:
        self.state = State()
        self.registry = Registry(self.state, IdleListeners())
        for number in range(RANKS):
            key = RankKey(PartitionKey("m", "t"), number % instances, number // instances)
            self.registry.register(key, SOMEWHERE, 16, None)

    def pieces(self) -> Iterator[bytes]:
        """Yields the list, with an empty piece wherever other tasks may run."""
        return listed(instances_of(self.state, self.registry.registrations()), 0.0)

    async def listed(self, query: bytes = b"") -> Any:
        request = Request("GET", "/workers", query, [], b"")
        response = await indexer.workers(self.state, self.registry, request)
        body = response.body
        return json.loads(body if isinstance(body, bytes) else b"".join([p async for p in body]))


def check_slices(fleet: Fleet) -> None:
    """Checks that other tasks may run after every SLICE_RANKS ranks, or a few more."""
    stretch = longest = rests = 0
    for piece in fleet.pieces():
        stretch = stretch + piece.count(b'"status"') if piece else 0
        longest = max(longest, stretch)
        rests += not piece
    assert longest <= 2 * (SLICE_RANKS + 1)  # an instance of one rank shows it twice
    assert rests >= RANKS // SLICE_RANKS


async def test_many_instances() -> None:
    fleet = Fleet(instances=500)
    check_slices(fleet)
    rows = await fleet.listed()
    assert [row["instance_id"] for row in rows] == list(range(500))
    assert rows[7] == {
        "instance_id": 7,
        "source": "zmq",
        "status": "pending",
        "stream": "recovering",
        "model_name": "m",
        "tenant_id": "t",
        "block_size": 16,
        "questions": 0,
        "matched": 0,
        "endpoints": {str(rank): SOMEWHERE for rank in range(4)},
        "listeners": {
            str(rank): {"endpoint": SOMEWHERE, "status": "pending", "stream": "recovering"}
            for rank in range(4)
        },
    }


async def test_an_instance_of_many_ranks() -> None:
    fleet = Fleet(instances=1)
    check_slices(fleet)
    [row] = await fleet.listed()
    assert list(row["listeners"]) == list(row["endpoints"]) == [str(rank) for rank in range(RANKS)]


async def test_nobody() -> None:
    fleet = Fleet(instances=4)
    assert await fleet.listed(b"model_name=another") == []
    assert len(await fleet.listed(b"model_name=m&tenant_id=t")) == 4


async def test_the_fleet_may_leave_meanwhile() -> None:
    fleet = Fleet(instances=50)
    pieces = fleet.pieces()
    first = next(pieces)
    for instance_id in range(50):
        await fleet.registry.unregister(instance_id, "m", "t", None)
    rest = b"".join(pieces)
    assert len(json.loads(first + rest)) == 50
    assert await fleet.listed() == []


async def test_engines_are_shown_by_the_ids_that_they_give_themselves() -> None:
    fleet = Fleet(instances=RANKS)
    listener = fleet.registry.find_listener(RankKey(PartitionKey("m", "t"), 7, 0))
    assert listener is not None
    listener.meet(bytes(range(16)))
    shown = {row["instance_id"]: row["listeners"]["0"] for row in await fleet.listed()}
    assert shown[7]["publisher_id"] == "000102030405060708090a0b0c0d0e0f"
    assert "publisher_id" not in shown[8]
