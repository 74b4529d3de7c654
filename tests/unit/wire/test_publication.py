"""A publisher's events change the index, event by event."""

from __future__ import annotations

import json
import random
from itertools import count
from typing import Any

import msgpack
import pytest

from kvd.index.partitions import State
from kvd.model import PartitionKey
from kvd.wire.envelope import MAX_BACKENDS, StreamIdentity
from kvd.wire.event_order import MAX_BEHIND, MAX_STREAMS
from kvd.wire.kv_events import MAX_BYTES, MAX_EVENTS, MAX_TEXT_BYTES
from kvd.wire.standard_events import StandardEventStream
from kvd_core.conductor.conductor import Source
from kvd_core.index.prefix_index import FLAWED
from tests.models.conductor_model import sequence_hashes
from tests.support.applying import apply_whole

TOKENS = list(range(1, 17))
STANDARD = sequence_hashes(TOKENS, 4, 1337)
KEY = PartitionKey("m", "default")


class Fleet:
    """Publishers of one model, and the conductor's answers about them."""

    def __init__(self) -> None:
        self.state = State()
        self.sources: dict[StandardEventStream, Source] = {}

    def add(
        self,
        instance: str = "a",
        *,
        store: bool = False,
        rank: int = 0,
        lora: str = "",
        salt: str = "",
        key: PartitionKey = KEY,
    ) -> StandardEventStream:
        source = self.state.add_source(key, 4, instance, lora, salt, rank, store=store)
        terms = StreamIdentity(key.model_name, key.tenant_id, 4, lora, salt, rank, store)
        made = StandardEventStream(source, terms)
        self.sources[made] = source
        return made

    def rows(
        self, lora: str = "", salt: str = "", tokens: list[int] = TOKENS
    ) -> dict[str, dict[str, Any]]:
        conductor = self.state.sized[("m", "default", 4)].conductor
        conductor.verify()
        by_tokens = conductor.match_tokens(tokens, lora, salt)
        hashes = sequence_hashes(tokens, 4, 1337)
        assert conductor.match_hashes(hashes, lora, salt) == by_tokens
        return by_tokens

    def row(self, instance: str = "a", **scope: Any) -> dict[str, Any]:
        return self.rows(**scope)[instance]


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


numbers = count(1)


def event(kind: str, **members: Any) -> dict[str, Any]:
    return {
        "event_type": kind,
        "event_id": next(numbers),
        "tenant_id": "default",
        "backend_id": "w",
        "medium": "gpu",
        "dp_rank": 0,
        **members,
    }


def stored(hashes: list[Any], **members: Any) -> dict[str, Any]:
    where = {"base_block_idx": 0, "parent_hash": None, "token_ids": None}
    return event("stored", seq_hashes=hashes, **(where | members))


def removed(hashes: list[Any], **members: Any) -> dict[str, Any]:
    return event("removed", seq_hashes=hashes, **members)


def apply(publication: StandardEventStream, *events: Any, rank: int | None = None) -> int:
    return apply_whole(publication, msgpack.packb([0.5, list(events), rank]))


@pytest.mark.parametrize(
    ("medium", "member"),
    [
        ("gpu", "GPU"), ("Device", "GPU"), ("", "GPU"), (None, "GPU"),
        ("cpu", "CPU"), ("CPU_PINNED", "CPU"), ("cpu_tier1", "CPU"), ("host", "CPU"),
        ("HOST_PINNED", "CPU"), ("dram", "CPU"),
        ("disk", "DISK"), ("CPU_TIER2", "DISK"), ("nvme", "DISK"), ("SSD", "DISK"),
        ("storage", "DISK"), ("fs", "DISK"),
        ("npu", "NPU"), ("3fs", "3FS"), ("external", "EXTERNAL"), ("HBM", "HBM"),
    ],
)  # fmt: skip
def test_a_medium_is_folded_or_its_own_member(
    fleet: Fleet, medium: str | None, member: str
) -> None:
    one = fleet.add()
    apply(one, stored(STANDARD[:2], medium=medium))
    row = fleet.row()
    assert row["longest_matched"] == row[member] == row["DP"]["0"] == 8
    assert sum(row[name] for name in row.keys() - {"longest_matched", "DP"}) == 8
    apply(one, removed(STANDARD[:1], medium=medium))
    assert fleet.row()["longest_matched"] == 0


def test_media_are_counted_each_by_itself(fleet: Fleet) -> None:
    one = fleet.add()
    apply(one, stored(STANDARD[:2]), stored(STANDARD[2:], medium="cpu"))
    assert fleet.row() == {
        "longest_matched": 16, "GPU": 8, "CPU": 8, "DISK": 0, "DP": {"0": 16},
    }  # fmt: skip


def test_ranks_are_not_joined_and_show_their_best(fleet: Fleet) -> None:
    one = fleet.add()
    apply(one, stored(STANDARD[:1]), stored(STANDARD[1:], dp_rank=1))
    assert fleet.row()["longest_matched"] == 4
    apply(one, stored(STANDARD[:1], dp_rank=1, medium="cpu"))
    assert fleet.row() == {
        "longest_matched": 16, "GPU": 12, "CPU": 4, "DISK": 0, "DP": {"0": 4, "1": 16},
    }  # fmt: skip


def test_a_store_serves_every_rank(fleet: Fleet) -> None:
    engine, pool = fleet.add(), fleet.add(store=True)
    apply(engine, stored(STANDARD[:1]), stored(STANDARD[:2], dp_rank=1))
    apply(pool, stored(STANDARD[1:3], dp_rank=None, medium=None))
    assert fleet.row() == {
        "longest_matched": 12, "GPU": 8, "CPU": 8, "DISK": 0, "DP": {"0": 4, "1": 8},
    }  # fmt: skip


def test_an_orphan_waits_for_its_parent_and_is_never_a_root(fleet: Fleet) -> None:
    one = fleet.add()
    apply(one, stored([902], parent_hash=901, base_block_idx=1, token_ids=TOKENS[4:8]))
    assert one.orphans == 1
    assert fleet.row(tokens=TOKENS[4:8])["longest_matched"] == 0
    apply(one, stored([901], token_ids=TOKENS[:4]))
    assert fleet.row()["longest_matched"] == 8


def test_events_with_tokens_must_say_where_they_belong(fleet: Fleet) -> None:
    one = fleet.add()
    nowhere = stored([901], token_ids=TOKENS[:4])
    del nowhere["base_block_idx"], nowhere["parent_hash"]
    deep = stored([901], token_ids=TOKENS[:4], base_block_idx=3)
    apply(one, nowhere, deep)
    assert (one.unlocated, fleet.row()["longest_matched"]) == (1, 0)
    apply(one, stored([901], token_ids=TOKENS[:4], base_block_idx=None))
    assert fleet.row()["longest_matched"] == 4


def test_a_block_under_two_names_goes_with_the_last(fleet: Fleet) -> None:
    one = fleet.add()
    apply(one, stored([1], token_ids=TOKENS[:4]), stored([2], token_ids=TOKENS[:4]))
    apply(one, stored([2], token_ids=TOKENS[:4]))
    apply(one, removed([1]))
    assert fleet.row()["GPU"] == 4
    apply(one, removed([2]))
    assert fleet.row()["GPU"] == 0


def test_a_name_that_comes_back_with_other_content_is_that(fleet: Fleet) -> None:
    one = fleet.add()
    other = [50, 51, 52, 53]
    apply(one, stored([1, 2], token_ids=TOKENS[:8]))
    apply(one, stored([2], token_ids=other, base_block_idx=None))
    assert fleet.row()["longest_matched"] == 4
    assert fleet.row(tokens=other)["longest_matched"] == 4
    # The name's old block may be the only thing that keeps its new parent in the index.
    apply(one, removed([1]), stored([3], token_ids=TOKENS[:4]), removed([3]))
    apply(one, stored([1, 2], token_ids=TOKENS[:8]))
    apply(one, removed([1]), stored([2], parent_hash=1, token_ids=other, base_block_idx=1))
    assert fleet.row()["longest_matched"] == 0


def test_namespaces_share_hashes_and_nothing_else(fleet: Fleet) -> None:
    one = fleet.add()
    apply(
        one,
        stored(STANDARD[:1], token_ids=TOKENS[:4]),
        stored(STANDARD[:2], token_ids=TOKENS[:8], lora_name="x"),
        stored(STANDARD[:3], token_ids=TOKENS[:12], additional_salt="s"),
        stored(STANDARD, lora_name="x", additional_salt="s"),
    )
    depths = {("", ""): 4, ("x", ""): 8, ("", "s"): 12, ("x", "s"): 16}
    for (lora, salt), depth in depths.items():
        assert fleet.row(lora=lora, salt=salt)["GPU"] == depth
    apply(one, removed(STANDARD[:1], lora_name="x"))
    for (lora, salt), depth in (depths | {("x", ""): 0}).items():
        assert fleet.row(lora=lora, salt=salt)["GPU"] == depth


def test_a_registration_supplies_what_events_leave_out(fleet: Fleet) -> None:
    one = fleet.add(lora="x", salt="s", rank=3)
    apply(one, stored(STANDARD[:2], lora_name=None, dp_rank=None))
    assert fleet.row(lora="x", salt="s")["DP"] == {"3": 8}
    apply(one, stored(STANDARD[:1], dp_rank=None), rank=5)
    assert fleet.row(lora="x", salt="s")["DP"] == {"3": 8, "5": 4}
    assert fleet.row()["longest_matched"] == 0


def test_events_of_others_are_counted_and_ignored(fleet: Fleet) -> None:
    one = fleet.add(lora="x", salt="s")
    apply(
        one,
        stored(STANDARD, model_name="other"),
        stored(STANDARD, tenant_id="other"),
        stored(STANDARD, block_size=8),
        stored(STANDARD, lora_name="y"),
        stored(STANDARD, additional_salt="t"),
    )
    assert one.mismatches == dict.fromkeys(
        ("model_name", "tenant_id", "block_size", "lora_name", "additional_salt"), 1
    )
    assert fleet.row(lora="x", salt="s")["longest_matched"] == 0


def test_a_batch_is_applied_in_order_of_its_numbers(fleet: Fleet) -> None:
    one = fleet.add()
    apply(one, removed(STANDARD[1:], event_id=5), stored(STANDARD, event_id=4))
    assert (fleet.row()["GPU"], one.order.gaps, one.order.stale) == (4, 0, 0)
    apply(one, stored(STANDARD, event_id=4))
    apply(one, stored(STANDARD, event_id=5))
    assert (fleet.row()["GPU"], one.order.stale) == (4, 2)


def test_holes_are_counted_unless_the_publisher_has_one_counter(fleet: Fleet) -> None:
    one = fleet.add()
    apply(one, stored(STANDARD[:1], event_id=1), stored(STANDARD[:1], event_id=2, medium="cpu"))
    apply(one, stored([7], event_id=3, tenant_id="other"))
    apply(one, stored(STANDARD[1:2], event_id=4))
    assert one.order.gaps == 0
    apply(one, stored(STANDARD[2:3], event_id=9))
    assert (one.order.gaps, fleet.row()["GPU"]) == (1, 12)


def test_bad_events_do_not_advance_their_stream(fleet: Fleet) -> None:
    one = fleet.add()
    assert apply(one, stored(["x"], event_id=9)) == FLAWED
    assert apply(one, stored(STANDARD[:1], event_id=3)) == 0
    assert (one.bad, fleet.row()["GPU"]) == ({"hash": 1}, 4)


def test_three_stale_events_in_a_row_are_a_new_beginning(fleet: Fleet) -> None:
    one = fleet.add()
    apply(one, stored(STANDARD, event_id=100))
    for number in (0, 1):
        apply(one, stored(STANDARD[number : number + 1], event_id=number))
    assert (fleet.row()["GPU"], one.order.beginnings) == (16, 0)
    apply(one, stored([5], event_id=2))
    assert (fleet.row()["GPU"], one.order.beginnings, one.order.stale) == (8, 1, 0)


def test_a_new_beginning_is_of_its_backend(fleet: Fleet) -> None:
    one = fleet.add()
    apply(one, stored(STANDARD[:2], event_id=50, backend_id="v"))
    apply(one, stored(STANDARD, event_id=100))
    for number in range(3):
        apply(one, stored([number], event_id=number))
    assert (fleet.row()["GPU"], one.order.beginnings) == (8, 1)
    apply(one, stored(STANDARD, event_id=50, backend_id="v"))
    assert one.order.stale == 1


def test_what_is_repeated_is_no_new_beginning(fleet: Fleet) -> None:
    one = fleet.add()
    for number in range(40):
        apply(one, stored(STANDARD if number < 10 else [number], event_id=number))
    for number in range(30, 40):
        apply(one, stored([number], event_id=number))
    assert (fleet.row()["GPU"], one.order.beginnings, one.order.stale) == (16, 0, 10)


def test_a_restart_forgets_blocks_and_numbers(fleet: Fleet) -> None:
    one = fleet.add()
    apply(one, stored(STANDARD, event_id=100))
    one.clear()
    assert fleet.row()["GPU"] == 0
    apply(one, stored(STANDARD[:1], event_id=0))
    assert (fleet.row()["GPU"], one.order.gaps, one.order.stale) == (4, 0, 0)


def test_streams_are_bounded(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_STREAMS == 65_536
    monkeypatch.setattr("kvd.wire.event_order.MAX_STREAMS", 2)
    one = fleet.add()
    for medium in ("gpu", "cpu", "disk"):
        apply(one, stored([1], medium=medium, event_id=9))
    apply(one, stored([1], medium="gpu", event_id=1))
    assert one.order.stale == 0  # the stream heard longest ago is forgotten


def test_backends_that_hold_nothing_make_room(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store's backends come and go for months, each under a new name."""
    assert MAX_BACKENDS == 4096
    monkeypatch.setattr("kvd.wire.envelope.MAX_BACKENDS", 8)
    store = fleet.add(store=True)
    usual: dict[str, Any] = {"dp_rank": None, "medium": "cpu"}
    apply(store, stored(STANDARD[:1], backend_id="stays", **usual))
    for number in range(100):
        name = f"pod-{number}"
        apply(store, stored(STANDARD[1:2], backend_id=name, **usual))
        assert fleet.row()["CPU"] == 8
        apply(store, event("cleared", backend_id=name, **usual))
        assert fleet.row()["CPU"] == 4
    assert not store.bad
    assert len(fleet.sources[store].holders()) < 8
    for number in range(10):
        apply(store, stored(STANDARD[1:2], backend_id=f"busy-{number}", **usual))
    assert store.bad == {"backends": 4}  # each of the others holds something
    apply(store, removed(STANDARD[:1], backend_id="stays", **usual))
    assert fleet.row()["CPU"] == 0


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (2, 0, 1)])
def test_the_order_of_engine_store_and_child_does_not_matter(
    fleet: Fleet, order: tuple[int, ...]
) -> None:
    engine, pool, other = fleet.add(), fleet.add(store=True), fleet.add("b")
    happens = (
        lambda: apply(engine, ["BlockStored", [501, 502], None, TOKENS[:8], 4, None, "GPU"]),
        lambda: apply(pool, stored([501, 502], dp_rank=None, medium="cpu")),
        lambda: apply(
            other, stored([77], parent_hash=502, base_block_idx=2, token_ids=TOKENS[8:12])
        ),
    )
    for each in order:
        happens[each]()
    rows = fleet.rows()
    assert (rows["a"]["GPU"], rows["a"]["CPU"], rows["a"]["longest_matched"]) == (8, 8, 8)
    apply(other, stored(STANDARD[:2], medium="cpu"))
    assert fleet.row("b") == {
        "longest_matched": 12, "GPU": 4, "CPU": 8, "DISK": 0, "DP": {"0": 12},
    }  # fmt: skip


def test_object_keys_of_a_connector_find_the_engine_s_blocks(fleet: Fleet) -> None:
    engine, pool = fleet.add(), fleet.add(store=True)
    digest = "ab" * 24 + "00000000000001f5"
    vllm = f"m@tp_rank:0@pcp0@dcp0@pp_rank:0@{digest}"
    sglang = "00000000000001f6" + "ab" * 24 + "_0_k"
    pair = {"dp_rank": None, "medium": "cpu", "block_hashes": []}
    apply(pool, stored([], object_key=vllm, **pair), stored([], object_key=sglang, **pair))
    apply(engine, ["BlockStored", [0x1F5, 0x1F6], None, TOKENS[:8], 4, None, "GPU"])
    assert fleet.row()["CPU"] == 8
    apply(pool, removed([], object_key=vllm, **pair))
    assert fleet.row()["longest_matched"] == 8
    assert fleet.row()["CPU"] == 4
    apply(pool, stored([], object_key="session-17", **pair))
    assert pool.ignored == {"object_key": 1}


@pytest.mark.parametrize("store_first", [True, False])
@pytest.mark.parametrize("registered", ["", "adapter"])
def test_objects_are_the_engine_s_blocks_whatever_adapter_and_salt(
    fleet: Fleet, registered: str, store_first: bool
) -> None:
    """A store does not know with which adapter and salt its engine has made the hashes."""
    engine, pool = fleet.add(lora=registered), fleet.add(store=True)
    pair: dict[str, Any] = {"dp_rank": None, "medium": "cpu", "event_id": None}
    objects = [{**pair, "object_key": f"m@tp_rank:{rank}@{501:032x}"} for rank in (0, 1)]
    store = {
        "type": "BlockStored", "block_hashes": [501], "parent_block_hash": None, "block_size": 4,
        "token_ids": TOKENS[:4], "lora_name": "adapter", "cache_salt": "salt", "medium": "GPU",
    }  # fmt: skip
    if not store_first:
        apply(engine, store)
    for each in objects:
        apply(pool, stored([], **each))
    if store_first:
        apply(engine, store)
    row = fleet.row(lora="adapter", salt="salt")
    assert (row["GPU"], row["CPU"]) == (4, 4)
    assert fleet.row()["longest_matched"] == fleet.row(lora="adapter")["longest_matched"] == 0
    apply(engine, ["BlockRemoved", [501], "GPU"])
    assert fleet.row(lora="adapter", salt="salt")["longest_matched"] == 4
    apply(pool, removed([], **objects[1]))
    assert fleet.row(lora="adapter", salt="salt")["longest_matched"] == 0
    apply(pool, stored([], **objects[0]))
    apply(engine, store)
    assert fleet.row(lora="adapter", salt="salt")["CPU"] == 4
    apply(pool, event("cleared", dp_rank=None, medium="cpu", event_id=None))
    assert fleet.row(lora="adapter", salt="salt")["CPU"] == 0


def test_an_engine_s_reset_is_of_its_rank_on_all_media(fleet: Fleet) -> None:
    one = fleet.add()
    apply(one, stored(STANDARD, medium="cpu"), stored(STANDARD, dp_rank=1, backend_id="v"))
    apply(one, {"type": "AllBlocksCleared"}, rank=0)
    assert fleet.row()["DP"] == {"0": 0, "1": 16}
    apply(one, ["AllBlocksCleared"], rank=1)
    assert fleet.row()["longest_matched"] == 0


def test_engine_events_are_read_by_their_own_decoder(fleet: Fleet) -> None:
    one = fleet.add()
    assert apply(one, ["BlockStored", "x", None, [], 4], 7, None, []) == FLAWED
    assert one.bad.total() == 4
    apply(one, ["BlockStored", [1], None, TOKENS[:4], 8, None, "GPU"])
    assert one.mismatches == {"block_size": 1}
    apply(one, ["BlockStored", [1, 2], None, TOKENS[:8], 4, None, "cxl"])
    apply(one, ["BlockStored", [1], None, [], 0, None, "CPU"])
    row = fleet.row()
    assert (row["CXL"], row["CPU"]) == (8, 4)
    apply(one, ["BlockRemoved", [1, 2], "cxl"])
    assert fleet.row()["longest_matched"] == 4


def test_images_are_kept_out(fleet: Fleet) -> None:
    one = fleet.add()
    keys = [["ab" * 32], None]
    apply(one, ["BlockStored", [1, 2], None, TOKENS[:8], 4, None, "GPU", None, keys])
    assert fleet.row()["longest_matched"] == 0


def test_texts_that_are_no_unicode_cost_their_event(fleet: Fleet) -> None:
    one = fleet.add()
    payload = msgpack.packb([0.5, [stored(STANDARD, lora_name="?")], None])
    assert apply_whole(one, payload.replace(b"\xa1?", b"\xa1\xff")) == FLAWED
    assert one.bad == {"text": 1}


def test_any_bytes_are_fine(fleet: Fleet) -> None:
    rng = random.Random(7)
    publications = [fleet.add(), fleet.add(store=True), fleet.add("b", lora="x", salt="s")]
    digest = "ab" * 24 + "00000000000001f5"
    payloads = [
        msgpack.packb(
            [0.5, [stored(STANDARD, token_ids=TOKENS), removed([1, -1, b"12345678"])], 1]
        ),
        msgpack.packb([0.5, [stored([], object_key=f"m@tp_rank:0@{digest}"), event("cleared")]]),
        msgpack.packb([0.5, [["BlockStored", [1, 2], None, TOKENS[:8], 4, None, "GPU"]], 0]),
        msgpack.packb({"events": [{"type": "BlockRemoved", "block_hashes": [1]}], "dp_rank": 2}),
        json.dumps([1, [stored(STANDARD), {"type": "AllBlocksCleared"}]]).encode(),
    ]
    for _ in range(3000):
        payload = bytearray(rng.choice(payloads))
        for _ in range(rng.randrange(4)):
            payload[rng.randrange(len(payload))] = rng.randrange(256)
        del payload[rng.choice((len(payload), rng.randrange(len(payload) + 1))) :]
        assert apply_whole(rng.choice(publications), bytes(payload)) in (0, FLAWED)
    fleet.rows()
    known = {reason for each in publications for reason in each.bad}
    assert all(len(reason) < 32 for reason in known) and len(known) < 64


def test_texts_of_events_are_bounded(fleet: Fleet) -> None:
    one = fleet.add()
    names = ("model_name", "tenant_id", "lora_name", "additional_salt", "backend_id", "medium")
    for name in names:
        assert apply(one, stored(STANDARD, **{name: "é" * (MAX_TEXT_BYTES // 2 + 1)})) == FLAWED
    assert one.bad == dict.fromkeys(names, 1)
    apply(one, stored(STANDARD, backend_id="x" * MAX_TEXT_BYTES))
    assert fleet.row()["GPU"] == 16


def test_texts_that_are_no_unicode_do_not_advance_their_stream(fleet: Fleet) -> None:
    one = fleet.add()
    payload = msgpack.packb([0.5, [stored(STANDARD, event_id=9, medium="?")], None])
    assert apply_whole(one, payload.replace(b"\xa1?", b"\xa1\xff")) == FLAWED
    apply(one, stored(STANDARD, event_id=9))
    assert (one.bad, one.order.stale, one.order.gaps) == ({"text": 1}, 0, 0)


def test_payloads_are_bounded(fleet: Fleet) -> None:
    one = fleet.add()
    events = [event("cleared")] * MAX_EVENTS
    assert apply(one, stored(STANDARD), *events) == FLAWED
    assert (one.bad, one.events) == ({"too_many": 1}, MAX_EVENTS)
    assert apply(one, event("cleared", junk=b"x" * MAX_BYTES)) == FLAWED
    assert one.bad == {"too_many": 1, "too_large": 1}
    # An engine's own events are not unpacked into Python objects, so these bounds do not apply.
    assert apply(one, *[["BlockRemoved", [1], "GPU"]] * (MAX_EVENTS + 1)) == 0


def test_low_numbers_that_are_repeated_are_no_new_beginning(fleet: Fleet) -> None:
    """A relay that sends everything again repeats the events heard before, word for word."""
    one = fleet.add()
    for number in range(100):
        apply(one, stored(STANDARD if number == 0 else [number], event_id=number))
    for number in range(60):
        apply(one, stored(STANDARD if number == 0 else [number], event_id=number))
    assert (fleet.row()["GPU"], one.order.beginnings, one.order.stale) == (16, 0, 60)


def test_a_new_beginning_may_begin_like_the_last(fleet: Fleet) -> None:
    """It begins with the same prompts; once an event differs, all of them count."""
    one = fleet.add()
    apply(one, stored(STANDARD, event_id=0))
    for number in range(1, 100):
        apply(one, stored([number], event_id=number))
    apply(one, stored(STANDARD, event_id=0))
    for number in (1, 2):
        apply(one, stored([number + 1000], event_id=number))
    assert (fleet.row()["GPU"], one.order.beginnings, one.order.stale) == (16, 1, 0)
    assert one._source.stats()["waiting"] == 2


def test_an_event_repeated_in_a_new_beginning_does_not_end_it(fleet: Fleet) -> None:
    one = fleet.add()
    apply(one, stored(STANDARD, event_id=100))
    for number in (0, 1, 1, 1, 2):
        apply(one, stored(STANDARD[number : number + 1], event_id=number))
    assert (fleet.row()["GPU"], one.order.beginnings, one.order.stale) == (12, 1, 2)


def test_a_later_moment_makes_another_event(fleet: Fleet) -> None:
    one = fleet.add()
    for moment in (1, 2):
        for number in range(10 if moment == 1 else 3):
            apply(one, stored(STANDARD[:1], event_id=number, timestamp=moment))
    assert one.order.beginnings == 1


def test_stale_events_are_kept_within_a_bound(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_BEHIND == 1_048_576
    monkeypatch.setattr("kvd.wire.event_order.MAX_BEHIND", 20)
    one = fleet.add()
    for medium in ("gpu", "cpu"):
        apply(one, stored(STANDARD, medium=medium, event_id=100))
    for number in (0, 1):
        for medium in ("gpu", "cpu"):
            apply(one, stored(list(range(8)), medium=medium, event_id=number, junk="x" * 1000))
    apply(one, stored([8], event_id=2))
    assert (one.order.beginnings, one.order.stale) == (0, 5)
    for number in (3, 4):
        apply(one, stored([8], event_id=number))
    assert (one.order.beginnings, fleet.row()["GPU"]) == (1, 0)


def test_no_medium_takes_the_place_of_another_member(fleet: Fleet) -> None:
    one = fleet.add()
    apply(one, stored(STANDARD, medium="dp"), stored(STANDARD, medium="longest_matched"))
    apply(one, ["BlockStored", [1], None, TOKENS[:4], 4, None, "dp"])
    assert one.ignored == {"media": 2}
    assert fleet.row()["DP"] == {"0": 16}
