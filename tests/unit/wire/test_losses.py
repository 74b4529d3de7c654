"""A stream tracks its losses: of which ranks, on which tiers, until when."""

from __future__ import annotations

import msgpack
import pytest

from kvd.index.partitions import State
from kvd.model import PartitionKey
from kvd.wire.applied_batches import BatchSink
from kvd.wire.cursor import Verdict
from kvd.wire.envelope import StreamIdentity
from kvd.wire.event_stream import EventStream
from kvd.wire.losses import HEARD_AFTER, Losses
from kvd.wire.standard_events import StandardEventStream
from kvd_core.index.prefix_index import ALL_TIERS, IngestStats, PrefixIndex

GPU, CPU, STORAGE, EXTERNAL = 1, 2, 4, 8
BLOCK = 4


def test_a_clear_ends_the_loss_of_its_own_rank_only() -> None:
    losses = Losses()
    losses.hear(0, named=True)
    losses.hear(1, named=True)
    assert not losses
    losses.lose("missing 5", 6)
    losses.clear(0, ALL_TIERS)
    assert losses.matter(6 + HEARD_AFTER)
    losses.clear(1, ALL_TIERS)
    assert losses.matter(5 + HEARD_AFTER)
    assert not losses.matter(6 + HEARD_AFTER)


def test_a_clear_ends_the_loss_of_its_own_tiers_only() -> None:
    losses = Losses()
    losses.hear(0, named=False)
    losses.lose("missing 5", 6)
    for tiers in (GPU, CPU, STORAGE | GPU):
        losses.clear(0, tiers)
        assert losses.matter(6)
    losses.clear(0, EXTERNAL)
    assert not losses.matter(6)


def test_a_rank_first_heard_after_a_loss_lacks_it_too() -> None:
    losses = Losses()
    losses.hear(0, named=True)
    losses.lose("missing 5", 6)
    losses.clear(0, ALL_TIERS)
    assert not losses.matter(10**6)
    losses.hear(1, named=True)
    assert losses.matter(10**6)
    losses.clear(1, ALL_TIERS)
    losses.hear(1, named=True)  # this rank has been heard before
    assert not losses.matter(10**6)


def test_what_a_known_rank_has_lost_is_its_own() -> None:
    losses = Losses()
    losses.hear(0, named=True)
    losses.hear(1, named=True)
    losses.lose_of(1, "batch 3 could not be decoded")
    losses.clear(0, ALL_TIERS)
    assert losses.matter(10**6)
    losses.hear(2, named=True)
    losses.clear(1, ALL_TIERS)
    assert not losses


def test_before_any_rank_is_heard_a_loss_is_somebody_s() -> None:
    losses = Losses()
    losses.lose("missing 0..4", 5)
    assert losses.matter(10**6)


# ---- with the real stream, as a listener feeds it


class Port:
    """An engine's port that several ranks share, and the listener of the registered one."""

    def __init__(self, expected: int = 0, stream: BatchSink | None = None) -> None:
        if stream is None:
            worker = PrefixIndex(BLOCK, IngestStats()).add_worker(1)
            worker.register(0)
            stream = worker.stream(0)
        self.listener = EventStream("1:0", "tcp://127.0.0.1:1", stream, None, expected)
        self.listener.connecting()
        self.listener.receiving()
        self.listener.joined()

    def take(self, seq: int, rank: int | None, *events: object) -> str:
        """Has the stream take a batch; returns its health behind it."""
        payload: bytes = msgpack.packb([seq + 0.5, events, rank])
        if self.listener.take(seq, payload) and self.listener.catch_up.judge() is not Verdict.STALE:
            self.listener.catch_up.apply_held()
        return self.listener.health(0.0)

    def go_on(self, seq: int, rank: int, batches: int) -> list[str]:
        return [self.take(seq + n, rank) for n in range(batches)]


def stored(name: int, **members: object) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": [name],
        "parent_block_hash": None,
        "token_ids": [name] * BLOCK,
        "block_size": BLOCK,
        **members,
    }


ALL_CLEARED = {"type": "AllBlocksCleared"}


def test_a_clear_of_one_rank_leaves_what_another_has_lost() -> None:
    port = Port()
    assert port.take(0, 1, stored(1)) == "exact"
    assert port.take(1, 0, stored(2)) == "exact"
    assert port.take(3, 0, stored(3)) == "degraded"  # batch 2 may have been rank 1's
    assert port.take(4, 0, ALL_CLEARED) == "degraded"
    assert port.listener.loss == "missing 2"
    assert port.take(5, 1, ALL_CLEARED, stored(4)) == "degraded"  # there may be further ranks
    assert port.go_on(6, 0, HEARD_AFTER - 3)[-2:] == ["degraded", "exact"]


def test_a_rank_that_is_heard_late_has_lost_what_came_before() -> None:
    port = Port()
    assert port.take(1, 0, stored(2)) == "degraded"  # batch 0 was rank 1's
    assert port.take(2, 0, ALL_CLEARED) == "degraded"
    assert port.go_on(3, 0, HEARD_AFTER)[-1] == "exact"
    assert port.take(HEARD_AFTER + 3, 1, stored(7)) == "degraded"
    assert port.listener.loss == "missing 0"
    assert port.take(HEARD_AFTER + 4, 1, ALL_CLEARED) == "exact"


def test_who_is_registered_again_has_lost_it_for_every_rank() -> None:
    port = Port(expected=2)
    assert port.take(2, 0, stored(8)) == "degraded"
    assert port.take(3, 0, ALL_CLEARED) == "degraded"
    assert port.listener.loss == "registered again"


def test_a_port_whose_batches_name_no_rank_has_one() -> None:
    port = Port()
    assert port.take(3, None, stored(8)) == "degraded"
    assert port.take(4, None, ALL_CLEARED) == "exact"
    assert port.take(5, 0, stored(9)) == "degraded"  # batches name ranks now: others may exist


def test_a_clear_of_the_device_leaves_what_lower_tiers_have_lost() -> None:
    port = Port()
    group = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    port.take(0, None, stored(5, **group))
    assert port.take(2, None, stored(6, **group)) == "degraded"  # batch 1 has offloaded block 5
    assert port.take(3, None, ALL_CLEARED) == "degraded"
    for seq, medium in enumerate(("CPU", "STORAGE"), 4):
        assert port.take(seq, None, {**ALL_CLEARED, "medium": medium}) == "degraded"
    assert port.take(6, None, {**ALL_CLEARED, "medium": "EXTERNAL"}) == "exact"


@pytest.mark.parametrize("flaw", ["of its rank", "of no rank"])
def test_a_batch_that_is_not_understood_is_lost_of_its_rank(flaw: str) -> None:
    port = Port()
    port.take(0, 0, stored(1))
    port.take(1, 1, stored(1))
    if flaw == "of its rank":
        assert port.take(2, 1, {"type": "BlockStored"}) == "degraded"
    elif port.listener.take(2, b"\xc1"):
        port.listener.catch_up.apply_held()
    assert port.take(3, 1, ALL_CLEARED) == ("exact" if flaw == "of its rank" else "degraded")


@pytest.mark.parametrize("standard", [False, True])
def test_no_clear_ends_what_a_publisher_of_a_conductor_has_lost(standard: bool) -> None:
    """It publishes for backends and ranks that are known by its events alone."""
    identity = StreamIdentity("m", "default", BLOCK, "", "", 0, store=False)
    source = State().add_source(PartitionKey("m", "default"), BLOCK, "a", "", "", 0, store=False)
    port = Port(stream=StandardEventStream(source, identity))
    where = {"tenant_id": "default", "backend_id": "w", "dp_rank": 0}
    cleared = {"event_type": "cleared", "event_id": 3, **where} if standard else ALL_CLEARED
    assert port.take(0, 0, stored(1)) == "exact"
    assert port.take(2, 0, stored(2)) == "degraded"
    assert port.take(3, 0, cleared) == "degraded"
    assert set(port.go_on(4, 0, HEARD_AFTER + 1)) == {"degraded"}
