"""The replica plane and a live Dynamo's slot tracker understand each other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
import trio

from kvd.net.zsocket import make_context
from kvd.wire.lifecycle import Lifecycle, Step
from tests.support import http_client
from tests.support.ports import find_free_port
from tests.support.processes import Server
from tests.support.replicating import PARTITION, Process, add, event, start
from tests.support.zmtp_fakes import until

pytestmark = pytest.mark.peer


@pytest.fixture
async def process(nursery: trio.Nursery) -> AsyncIterator[Process]:
    context = make_context()
    yield await start(nursery, context)
    context.destroy(linger=0)


WORKER = {"worker_id": 7, "model_name": "m", "block_size": 16, "dp_start": 0, "dp_size": 2}


class Peer:
    """A live slot tracker of Dynamo."""

    def __init__(self, server: Server, port: int) -> None:
        self.server = server
        self.endpoint = f"tcp://127.0.0.1:{port}"
        assert self.post("/register", **WORKER) == 201

    def post(self, path: str, **members: object) -> int:
        answer = http_client.post(self.server.base_url + path, json=members)
        return answer.status_code

    def do(self, step: str, request_id: str, **members: object) -> int:
        return self.post(step, model_name="m", request_id=request_id, **members)

    def load(self, dp_rank: int) -> tuple[int, int]:
        rows = http_client.get(self.server.base_url + "/loads").json()
        row = next(row for row in rows if row["dp_rank"] == dp_rank)
        return row["active_prefill_tokens"], row["active_decode_blocks"]


@pytest.fixture
async def peer(process: Process, peer_process: Callable[..., Server]) -> Peer:
    """A peer and `process` that listen to each other."""
    port = find_free_port()
    flags = ("--replica-sync-port", str(port), "--replica-sync-peers", process.endpoint)
    made = Peer(peer_process(*flags, service="slot_tracker"), port)
    process.replicas.register(made.endpoint)
    number = 0

    def hears() -> bool:
        """Returns whether each hears the other; a request of ours cannot be added again there."""
        nonlocal number
        number += 1
        process.plane.publish(add(f"hello{number}"))
        added = {"worker_id": 7, "dp_rank": 0, "sequence_hashes": [1]}
        known = made.do("/add", f"hello{number}", **added) == 409
        assert made.do("/free", f"hello{number}") == 200
        return known and process.stats.received > 0

    await until(hears)
    last = event(Step.FREE, f"hello{number}")
    await until(lambda: process.ledger.seen[-1] == last)
    process.ledger.seen.clear()
    return made


async def test_what_the_peer_says_is_understood(process: Process, peer: Peer) -> None:
    placed = {"worker_id": 7, "dp_rank": 1}
    assert peer.do("/add", "r", **placed, sequence_hashes=[1, -1], new_isl_tokens=48) == 201
    assert peer.do("/prefill_complete", "r") == 200
    assert peer.do("/free", "r") == 200
    await until(lambda: len(process.ledger.seen) == 3)
    hashes = (1).to_bytes(8, "little") + b"\xff" * 8
    assert process.ledger.seen == [
        Lifecycle(PARTITION, 16, "r", 7, 1, Step.ADD, hashes, 48),
        Lifecycle(PARTITION, 16, "r", 7, 1, Step.PREFILL_COMPLETE),
        Lifecycle(PARTITION, 16, "r", 7, 1, Step.FREE),
    ]
    assert sum(process.stats.refused.values()) == 0


async def test_what_we_say_is_understood_by_the_peer(process: Process, peer: Peer) -> None:
    hashes = bytes(range(8 * 12))
    request = Lifecycle(PARTITION, 16, "ours", 7, 1, Step.ADD, hashes, 48, 9, "L")
    process.plane.publish(request)
    await until(lambda: peer.load(1) == (48, 12))
    process.plane.publish(Lifecycle(PARTITION, 16, "ours", 7, 1, Step.PREFILL_COMPLETE))
    await until(lambda: peer.load(1) == (0, 12))
    process.plane.publish(Lifecycle(PARTITION, 16, "none", 7, 1, Step.ADD))
    process.plane.publish(Lifecycle(PARTITION, 16, "ours", 7, 1, Step.FREE))
    await until(lambda: peer.load(1) == (0, 0))
    # It knows the request without blocks and tokens, too.
    assert peer.do("/prefill_complete", "none") == 200


async def test_either_ends_what_the_other_has_admitted(process: Process, peer: Peer) -> None:
    process.do(Lifecycle(PARTITION, 16, "ours", 7, 0, Step.ADD, bytes(8), 5))
    await until(lambda: peer.load(0) == (5, 1))
    assert peer.do("/free", "ours") == 200
    await until(lambda: "ours" not in process.ledger.live)
