"""The decoder with bytes of real engines, the plain model, and bytes that no engine should send.

data/engine_batches.jsonl has payloads recorded from the publishers of vLLM, SGLang and Dynamo.
"""

from __future__ import annotations

import json
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd_core.events.decoder import REASONS, Batch, decode
from tests.models import event_model
from tests.support.budget import scaled
from tests.support.processes import REPOSITORY

DATA = REPOSITORY / "tests" / "support" / "data" / "engine_batches.jsonl"
LINES = [json.loads(line) for line in DATA.read_text().splitlines()]
RECORDED = [(line["sender"], bytes.fromhex(line["payload"])) for line in LINES]
PAYLOADS = [payload for _, payload in RECORDED]
DIGEST = "00112233445566778899aabbccddeeff" * 2

# Stored [31, 32, 33, 34] under a parent and Removed, by engine version: payload, hash, parent.
STORED_BYTES = {
    "vllm-0.9.2": (
        "93cb41dac059c853a13e9196ab426c6f636b53746f72656491cf55c930b47208ab64d3ba01a8675ce71809941f"
        "20212204c000",
        0x55C930B47208AB64,
        0xBA01A8675CE71809,
    ),
    "vllm-0.10.2": (
        "93cb41dac059b52849879197ab426c6f636b53746f72656491cf461b812f5774bf57cfac3b12444857f523941f"
        "20212204c0a347505500",
        0x461B812F5774BF57,
        0xAC3B12444857F523,
    ),
    "vllm-0.14.1": (
        "93cb41dac059a709e80b9198ab426c6f636b53746f72656491cf0fe9ae1cae4fed97cf57c7d1144b1b1539941f"
        "20212204c0a3475055c000",
        0x0FE9AE1CAE4FED97,
        0x57C7D1144B1B1539,
    ),
    "vllm-0.20.2": (
        "93cb41dac05995d18a60919aab426c6f636b53746f72656491cf4622ae6c8425cc85cf6c5d1c0af93de3d5941f"
        "20212204c0a3475055c091c00000",
        0x4622AE6C8425CC85,
        0x6C5D1C0AF93DE3D5,
    ),
    "vllm-0.33.0": (
        "93cb41dac058db7c736991de000ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391"
        "cfb3eca7a75f140ee9b1706172656e745f626c6f636b5f68617368cf66ebf58b4f08f7b8a9746f6b656e5f6964"
        "73941f202122aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e"
        "616d65c0aa65787472615f6b65797391c0a967726f75705f69647800b26b765f63616368655f737065635f6b69"
        "6e64ae66756c6c5f617474656e74696f6e00",
        0xB3ECA7A75F140EE9,
        0x66EBF58B4F08F7B8,
    ),
    "sglang-0.5.12": (
        "93cb41dac05b5031a9059197ab426c6f636b53746f72656491d3ffada4bcbd2935e3d3cb488ed28a66f902941f"
        "20212204c0a347505500",
        0xFFADA4BCBD2935E3,
        0xCB488ED28A66F902,
    ),
    "sglang-0.5.23": (
        "93cb41dac05ad9b95dd59187a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391d3ff"
        "ada4bcbd2935e3b1706172656e745f626c6f636b5f68617368d3cb488ed28a66f902a9746f6b656e5f69647394"
        "1f202122aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da347505500",
        0xFFADA4BCBD2935E3,
        0xCB488ED28A66F902,
    ),
}
REMOVED_BYTES = {
    "vllm-0.9.2": (
        "93cb41dac059ceb3d5be9192ac426c6f636b52656d6f76656491cf22df47c5afe6c49100",
        0x22DF47C5AFE6C491,
    ),
    "vllm-0.14.1": (
        "93cb41dac059aa051a7f9193ac426c6f636b52656d6f76656491cfc90c79c17e1af9eca347505500",
        0xC90C79C17E1AF9EC,
    ),
    "vllm-0.20.2": (
        "93cb41dac05998b756e19194ac426c6f636b52656d6f76656491cf70955f3539ae4162a34750550000",
        0x70955F3539AE4162,
    ),
    "vllm-0.33.0": (
        "93cb41dac058decc07e49184a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391cf"
        "77eb84c583dcce2ea66d656469756da3475055a967726f75705f6964780000",
        0x77EB84C583DCCE2E,
    ),
    "sglang-0.5.3": (
        "93cb41dac05b57056c789192ac426c6f636b52656d6f76656491d3a6837b0b98b3482a00",
        0xA6837B0B98B3482A,
    ),
    "sglang-0.5.23": (
        "93cb41dac05ae45454489183a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391d3"
        "e0441608da98a77ba66d656469756da347505500",
        0xE0441608DA98A77B,
    ),
}


def pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, unicode_errors="surrogateescape")
    return packed


def batch(*events: Any, rank: Any = None) -> bytes:
    return pack([1.5, list(events), rank])


def stored(**members: Any) -> dict[str, Any]:
    """Returns a valid map event of one block; `members` replace its members or add to them."""
    return {
        "type": "BlockStored",
        "block_hashes": [101],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 4,
    } | members


def only(payload: bytes) -> dict[str, Any]:
    seen = decode(payload)
    assert (seen.bad, len(seen.events)) == ([], 1)
    return seen.events[0]


def agrees(payload: bytes) -> Batch:
    seen = decode(payload)
    expected = event_model.read(payload)
    expected.bad.sort(key=REASONS.index)
    assert seen._asdict() == vars(expected)
    return seen


# ---- engines


@pytest.mark.parametrize("sender", STORED_BYTES)
def test_stored_of_each_engine(sender):
    payload, block_hash, parent = STORED_BYTES[sender]
    seen = decode(bytes.fromhex(payload))
    numbers_groups = sender in ("vllm-0.20.2", "vllm-0.33.0")
    assert (seen.rank, seen.bad, seen.ignored) == (0, [], 0)
    assert seen.events == [
        {
            "type": "stored",
            "hashes": [block_hash],
            "parent": parent,
            "tokens": [31, 32, 33, 34],
            "pairs": False,
            "block_size": 4,
            "tier": "device",
            "kind": "full" if sender == "vllm-0.33.0" else None,
            "remote": False,
            "group": 0 if numbers_groups else None,
            "window": 0,
            "lora_name": "",
            "lora_id": None,
            "salt": "",
            "mm": None,
            "origin": None,
        }
    ]


@pytest.mark.parametrize("sender", REMOVED_BYTES)
def test_removed_of_each_engine(sender):
    payload, block_hash = REMOVED_BYTES[sender]
    event = only(bytes.fromhex(payload))
    assert (event["type"], event["hashes"], event["tier"]) == ("removed", [block_hash], "device")


@pytest.mark.parametrize("rank", [0, 1])
def test_cleared_of_a_rank(rank):
    head = "93cb41dac05ae80332e99181a474797065b0416c6c426c6f636b73436c6561726564"
    seen = decode(bytes.fromhex(head) + bytes([rank]))
    assert (seen.rank, seen.events) == (rank, [{"type": "cleared", "tier": None}])


def test_trtllm_through_dynamo():
    event = only(
        bytes.fromhex(
            "93cb41dac05c043cba119185a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392"
            "d380000000000000054db1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f69647398010203"
            "0405060708aa626c6f636b5f73697a650400"
        )
    )
    assert (event["hashes"], event["parent"]) == ([2**63 + 5, 77], None)
    assert (event["tokens"], event["tier"]) == ([1, 2, 3, 4, 5, 6, 7, 8], "device")


def test_recorded_batches_mean_what_the_model_says():
    for sender, payload in RECORDED:
        seen = agrees(payload)
        assert seen.begun, sender
        assert (seen.bad, len(seen.events)) == ([], seen.framed), sender


# ---- batches


@pytest.mark.parametrize(
    ("value", "rank"),
    [
        ([1.5, [stored()]], None),
        ([1, [stored()]], None),
        ([float("nan"), [stored()], None], None),
        ([1.5, [stored()], 3], 3),
        ([1.5, [stored()], 2**31 - 1, "more", {"a": [1]}], 2**31 - 1),
        ({"ts": 1.5, "events": [stored()], "data_parallel_rank": 3}, 3),
        ({"attn_dp_rank": 2, "dp_rank": None, "events": [stored()], "x": [[]]}, 2),
        ({"events": [stored()], 5: 6, b"events": 7}, None),
    ],
)
def test_forms_of_a_batch(value, rank):
    seen = agrees(pack(value))
    assert (seen.begun, seen.rank, len(seen.events), seen.bad) == (True, rank, 1, [])


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (5, "batch_shape"),
        (None, "batch_shape"),
        ("foo", "batch_shape"),
        ([], "batch_shape"),
        ([1.5], "batch_shape"),
        ([1.5, None, None], "batch_shape"),
        ([1.5, {}, 0], "batch_shape"),
        ({"ts": 1.5}, "batch_shape"),
        ({"ts": 1.5, "events": None}, "batch_shape"),
        (["x", [stored()], None], "timestamp"),
        ([None, [stored()], None], "timestamp"),
        ({"events": [stored()], "ts": True}, "timestamp"),
        ([1.5, [stored()], -1], "rank"),
        ([1.5, [stored()], 2**31], "rank"),
        ([1.5, [stored()], 0.0], "rank"),
        ([1.5, [stored(), 5], "0"], "rank"),
        ({"dp_rank": [0], "events": [stored()]}, "rank"),
    ],
)
def test_a_batch_that_is_refused_says_one_thing(value, reason):
    seen = agrees(pack(value))
    assert (seen.begun, seen.events, seen.bad) == (False, [], [reason])


def test_bytes_after_the_batch_do_not_cost_its_events():
    seen = decode(batch(stored(), rank=1) + b"\x00")
    assert (seen.rank, len(seen.events), seen.bad) == (1, 1, ["trailing"])


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "truncated"),
        (b"\xc1", "not_msgpack"),
        (b"\xc1\xc1", "not_msgpack"),
        (bytes.fromhex("dd7fffffff"), "truncated"),
        (bytes.fromhex("dfffffffff"), "truncated"),
        (b"\xff" * 20, "batch_shape"),
        (b"\x91" * 1_000_000, "batch_shape"),
        (b"\x92" * 1_000_000, "timestamp"),
        (b"\x92\x01" + b"\x91" * 1_000_000, "truncated"),
        (b"\x92\x01\x91" + b"\x92\xa3foo" * 1_000_000, "truncated"),
        (b"\x92\x01" + b"\xdd\xff\xff\xff\xff" * 100_000, "truncated"),
    ],
)
def test_broken_framing(payload, reason):
    assert decode(payload).bad == [reason]


@pytest.mark.parametrize("field", ["block_hashes", "token_ids", "extra_keys", "lora_name", "new"])
@pytest.mark.parametrize("head", ["dcffff", "ddffffffff", "dfffffffff", "c6ffffffff", "dbffffffff"])
def test_lengths_that_are_not_there_are_not_believed(field, head):
    broken = b"\x82\xa4type\xabBlockStored" + pack(field) + bytes.fromhex(head) + b"\x01" * 30
    seen = decode(b"\x92\x01\x92" + pack(stored()) + broken)
    assert (len(seen.events), seen.framed, seen.bad) == (1, 1, ["truncated"])


def test_events_before_a_cut_count():
    payload = batch(*[stored(block_hashes=[i]) for i in range(5)], rank=7)
    sizes = [len(decode(payload[:end]).events) for end in range(len(payload))]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (0, 5)
    for end in range(len(payload)):
        seen = decode(payload[:end])
        assert seen.bad == ["truncated"]
        assert seen.rank is None
        assert [event["hashes"] for event in seen.events] == [[i] for i in range(len(seen.events))]


def test_a_member_nested_deeply_costs_nothing():
    deep = b"\x91" * 1_000_000 + b"\x01"
    event = b"\x86\xa3new" + deep + pack(stored())[1:]
    seen = decode(b"\x93\x01\x92" + event + pack(stored()) + b"\x00")
    assert (seen.bad, len(seen.events)) == ([], 2)


# ---- events


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (5, "event_shape"),
        (None, "event_shape"),
        ([], "event_shape"),
        ([5, [1]], "event_shape"),
        ([[]], "event_shape"),
        ({}, "event_shape"),
        ({"block_hashes": [1]}, "event_shape"),
        (["Foo", 1], "unknown_type"),
        ({"type": "BlockMigrated", "block_hashes": [5]}, "unknown_type"),
        ({"event_type": "stored", "type": "BlockStored"} | stored(), "unknown_type"),
        ({"type": "BlockStored"}, "hashes"),
        (["BlockStored", None, None, None, None], "hashes"),
        (stored(block_hashes=101), "hashes"),
        (stored(block_hashes=["a"]), "hashes"),
        (stored(block_hashes=[1, 1.0]), "hashes"),
        (stored(block_hashes=[b""]), "hashes"),
        (stored(block_hashes=[True]), "hashes"),
        ({"type": "BlockRemoved", "block_hashes": [None]}, "hashes"),
        (["BlockRemoved"], "hashes"),
        (stored(parent_block_hash="x"), "parent"),
        (stored(parent_block_hash=[1]), "parent"),
        (stored(token_ids=None), "tokens"),
        (stored(token_ids=[2**32]), "tokens"),
        (stored(token_ids=[-1, 2, 3, 4]), "tokens"),
        (stored(token_ids=["1"]), "tokens"),
        (stored(token_ids=b"1234"), "tokens"),
        (stored(token_ids=[[1, 2], 3]), "tokens"),
        (stored(token_ids=[1, [2, 3]]), "tokens"),
        (stored(token_ids=[[1, 2, 3]]), "tokens"),
        (stored(token_ids=[[1, -2]]), "tokens"),
        (["BlockStored", [1], None], "tokens"),
        (stored(block_size=-4), "block_size"),
        (stored(block_size="4"), "block_size"),
        (stored(block_size=4.0), "block_size"),
        (stored(medium=5), "field_type"),
        (stored(medium=b"GPU"), "field_type"),
        (stored(lora_name=5), "field_type"),
        (stored(lora_name={"cache_salt": 5}), "field_type"),
        (stored(cache_salt=5), "field_type"),
        (stored(group_idx=-1), "field_type"),
        (stored(group_idx="0"), "field_type"),
        (stored(kv_cache_spec_kind=1), "field_type"),
        (stored(kv_cache_spec_sliding_window=-1), "field_type"),
        (stored(extra_keys="salt"), "field_type"),
        (stored(extra_keys=["salt"]), "field_type"),
        (stored(block_mm_infos=[5]), "field_type"),
        (stored(block_mm_infos=[{"mm_objects": [{"mm_hash": "5"}]}]), "field_type"),
        (stored(block_mm_infos=[{"mm_objects": [{}]}]), "field_type"),
        ({"type": "BlockRemoved", "block_hashes": [1], "medium": 5}, "field_type"),
    ],
)
def test_a_bad_event_costs_only_itself(event, reason):
    seen = agrees(batch(stored(block_hashes=[1]), event, stored(block_hashes=[2]), rank=3))
    assert [good["hashes"] for good in seen.events] == [[1], [2]]
    assert (seen.rank, seen.framed, seen.bad) == (3, 3, [reason])


def test_ignored_events_are_not_bad():
    seen = agrees(batch(["Ignored", 1, {}], {"type": "Ignored"}, stored()))
    assert (len(seen.events), seen.bad, seen.ignored) == (1, [], 2)


@pytest.mark.parametrize(
    ("medium", "tier"),
    [(medium, tier) for tier, media in event_model.TIERS.items() for medium in media]
    + [(medium, "unknown") for medium in ("gpu", "HOLOGRAM", "HOST", "SSD", "CPU ", "GPUX")],
)
def test_media(medium, tier):
    assert only(batch(stored(medium=medium)))["tier"] == tier
    assert only(batch(["BlockRemoved", [1], medium]))["tier"] == tier
    cleared = only(batch({"type": "AllBlocksCleared", "medium": medium}))
    assert cleared == {"type": "cleared", "tier": tier if medium else None}


def test_without_a_medium_it_is_the_device():
    assert only(batch(stored()))["tier"] == "device"
    assert only(batch(["BlockRemoved", [1], None]))["tier"] == "device"
    assert only(batch({"type": "AllBlocksCleared", "x": 1}))["tier"] is None
    assert only(batch(["AllBlocksCleared", "x", 1]))["tier"] is None


@pytest.mark.parametrize(
    ("kind", "meaning"),
    [(kind, meaning) for meaning, kinds in event_model.KINDS.items() for kind in kinds]
    + [("mamba", "other"), ("", "other"), (None, None)],
)
def test_kinds(kind, meaning):
    assert only(batch(stored(kv_cache_spec_kind=kind)))["kind"] == meaning


@pytest.mark.parametrize(
    ("locality", "remote"),
    [(None, False), ("LOCAL", False), ("REMOTE", True), ("GALACTIC", True), ("", True), (5, True)],
)
def test_locality(locality, remote):
    assert only(batch(stored(locality=locality, ownership="x")))["remote"] == remote
    head = ["BlockRemoved", [1], "GPU", 0, None, None]
    assert only(batch([*head, locality, "owner"]))["remote"] == remote


@pytest.mark.parametrize(
    ("tail", "group", "kind", "window", "mm"),
    [
        ([0], 0, None, 0, None),
        ([1, "sliding_window", 64], 1, "window", 64, None),
        ([None, "sliding_window", 64], None, "window", 64, None),
        ([None, None, 64, None], None, None, 64, None),
        (["full_attention"], None, "full", 0, None),
        ([2, 64], 2, None, 64, None),
        ([[{"mm_objects": [{"mm_hash": 9}, {"mm_hash": 3}]}]], None, None, 0, [[3, 9]]),
        ([[None], 1, "mla_attention", 32], 1, "full", 32, None),
        ([[5], 1], 1, None, 0, None),
        ([1.5, "mamba", b"x", "LOCAL"], None, "other", 0, None),
        ([-1, True, 2**64 - 1], None, None, 0, None),
        ([2**31, None, 2**31], None, None, 2**31, None),
        ([None] * 12, None, None, 0, None),
    ],
)
def test_tails_of_array_events(tail, group, kind, window, mm):
    head = ["BlockStored", [101], None, [1, 2, 3, 4], 4, None, "GPU", None, None]
    event = agrees(batch(head + tail)).events[0]
    assert (event["group"], event["kind"]) == (group, kind)
    assert (event["window"], event["mm"]) == (window, mm)


def test_pairs_are_flattened():
    event = only(batch(stored(token_ids=[[1, 70000], [70000, 3], [3, 4]])))
    assert (event["tokens"], event["pairs"]) == ([1, 70000, 3, 4], True)
    assert only(batch(stored(token_ids=[])))["pairs"] is False


@pytest.mark.parametrize("width", range(9))
def test_tokens_of_every_width(width):
    heads = [b"", b"\xcc", b"\xcd", b"\xce", b"\xcf", b"\xd0", b"\xd1", b"\xd2", b"\xd3"]
    size = [1, 1, 2, 4, 8, 1, 2, 4, 8][width]
    tokens = b"\x99" + (heads[width] + (5).to_bytes(size, "big")) * 9
    payload = b"\x92\x01\x91\x95\xabBlockStored\x91\x01\xc0" + tokens + b"\x04"
    assert only(payload)["tokens"] == [5] * 9


@pytest.mark.parametrize(
    ("block_hash", "folded"),
    [
        (-1, 2**64 - 1),
        (-(2**63), 2**63),
        (2**64 - 1, 2**64 - 1),
        (bytes(24) + b"\x80" + bytes(6) + b"\x65", 2**63 + 0x65),
        (b"\xaa" * 8 + (7).to_bytes(8, "big"), 7),
        (b"\x01\x02", 0x102),
    ],
)
def test_hashes_fold_to_64_bits(block_hash, folded):
    event = only(batch(stored(block_hashes=[block_hash], parent_block_hash=block_hash)))
    assert (event["hashes"], event["parent"]) == ([folded], folded)


@pytest.mark.parametrize(
    ("lora_id", "seen"), [(7, 7), (-1, -1), (None, None), ("7", None), (2**63, -(2**63))]
)
def test_no_lora_id_costs_an_event(lora_id, seen):
    assert only(batch(stored(lora_id=lora_id)))["lora_id"] == seen
    head = ["BlockStored", [1], None, [1, 2, 3, 4], 4]
    assert only(batch([*head, lora_id, "GPU"]))["lora_id"] == seen


@pytest.mark.parametrize(
    ("members", "salt", "mm"),
    [
        ({"cache_salt": "s"}, "s", None),
        ({"cache_salt": "s", "parent_block_hash": 5}, "s", None),
        ({"cache_salt": "s", "extra_keys": [["other"]]}, "s", None),
        ({"lora_name": {"cache_salt": "s", "x": 1}}, "s", None),
        ({"extra_keys": [["s"], None]}, "s", None),
        ({"extra_keys": [["s"]], "parent_block_hash": 5}, "", None),
        ({"extra_keys": [None, ["s"]]}, "", None),
        ({"extra_keys": [["a"]], "lora_name": "a"}, "", None),
        ({"extra_keys": [["a", "s"], ["a"]], "lora_name": "a"}, "s", None),
        ({"extra_keys": [["a", "a"]], "lora_name": "a"}, "a", None),
        ({"extra_keys": [["x", "dynamo-cache-salt:s"]]}, "s", None),
        ({"extra_keys": [["dynamo-cache-salt:"]]}, "", None),
        ({"extra_keys": [[[DIGEST, -12], "s"], [["cat", 3], DIGEST]]}, "s", "both"),
        ({"extra_keys": [[DIGEST]], "parent_block_hash": 5}, "", "first"),
        ({"extra_keys": [[DIGEST], None, [DIGEST]]}, "", "first"),
        ({"extra_keys": [["abc", 1, -1, 1.5, True], [DIGEST, None]]}, "", None),
        ({"extra_keys": [[DIGEST, {}], [[DIGEST, 1, 2]]]}, "", None),
        ({"extra_keys": [["s", b"cat"], [b""]]}, "s", "embeddings"),
        ({"extra_keys": [[[DIGEST, 3], ["cat", 4]], [["cat", 5]]]}, "", "first"),
        ({"extra_keys": [[DIGEST]], "block_mm_infos": [None, None]}, "", "first"),
        ({"extra_keys": [["s", DIGEST]], "block_mm_infos": [{"mm_objects": []}]}, "s", "first"),
    ],
)
def test_what_tells_equal_tokens_apart(members, salt, mm):
    event = agrees(batch(stored(block_hashes=[1, 2]) | members)).events[0]
    digest, cat, empty = 0x0011223344556677, *map(event_model.item_hash, ("cat", ""))
    objects = {
        "both": [[digest], sorted([cat, digest])],
        "first": [[digest], []],
        "embeddings": [[cat], [empty]],
        None: None,
    }
    assert (event["salt"], event["mm"]) == (salt, objects[mm])


def test_what_a_block_says_of_itself_is_bounded():
    for longest, reason in ((65_000, []), (65_536, ["field_type"])):
        for members in (
            {"extra_keys": [["s" * longest]]},
            {"lora_name": {"cache_salt": "s" * longest}},
        ):
            seen = decode(batch(stored(block_hashes=[1]) | members, stored(block_hashes=[2])))
            assert seen.bad == reason
            assert [event["hashes"] for event in seen.events] == [[1], [2]][len(reason) :]


def test_explicit_objects_win_and_are_sorted():
    infos = [None, {"mm_objects": [{"mm_hash": 9, "offsets": [[0, 1]]}, {"x": 1, "mm_hash": 3}]}]
    event = only(batch(stored(block_hashes=[1, 2], block_mm_infos=infos, extra_keys=[[DIGEST]])))
    assert event["mm"] == [[], [3, 9]]


def test_text_that_is_no_utf8_is_kept():
    event = only(batch(stored(lora_name="\udcff\udcfe")))
    assert event["lora_name"].encode("utf-8", "surrogateescape") == b"\xff\xfe"


def test_only_bytes_are_decoded():
    with pytest.raises(TypeError):
        decode("text")  # type: ignore[arg-type]


# ---- any bytes


def check_any(payload: bytes) -> None:
    """Checks that any bytes can be decoded, and that valid msgpack gives the model's result."""
    seen = decode(payload)
    assert set(seen.bad) <= set(REASONS)
    assert len(seen.events) + seen.ignored <= seen.framed
    assert seen.begun or not seen.events
    try:
        agrees_with_model = event_model.read(payload)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError, OverflowError):
        return
    agrees_with_model.bad.sort(key=REASONS.index)
    assert seen._asdict() == vars(agrees_with_model)


@given(st.binary(max_size=300))
def test_any_bytes_give_a_value(payload):
    check_any(payload)


@settings(max_examples=scaled(60))
@given(st.sampled_from(PAYLOADS), st.data())
def test_mutated_recordings_give_a_value(payload, data):
    mutated = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(mutated) - 1))
        end = at + data.draw(st.integers(0, 3))
        mutated[at:end] = data.draw(st.binary(max_size=4))
        if not mutated:
            break
    check_any(bytes(mutated))


U32 = st.integers(0, 2**32 - 1)
INTEGERS = st.one_of(st.integers(-3, 300), st.integers(-(2**63), 2**64 - 1))
JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), INTEGERS, st.floats(), st.text(max_size=5), st.binary()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=4,
)


def mostly(good: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.integers(0, 24).flatmap(lambda roll: good if roll else JUNK)


TEXTS = st.sampled_from(["", "a", "s", DIGEST, "dynamo-cache-salt:x", "dynamo-cache-salt:", "cat"])
OFFSETS = st.one_of(INTEGERS, st.integers(-20, 20))
ITEMS = mostly(st.one_of(TEXTS, st.tuples(TEXTS, OFFSETS), st.binary(max_size=40)))
OBJECTS = st.lists(st.fixed_dictionaries({"mm_hash": INTEGERS}), max_size=3)
INFO = st.fixed_dictionaries({"mm_objects": OBJECTS})


VALUES = {
    "block_hashes": mostly(
        st.lists(mostly(st.one_of(INTEGERS, st.binary(max_size=40))), max_size=4)
    ),
    "parent_block_hash": mostly(st.one_of(st.none(), INTEGERS, st.binary(max_size=40))),
    "token_ids": mostly(
        st.one_of(
            st.lists(U32, max_size=6),
            st.lists(st.tuples(U32, U32), max_size=6),
            st.lists(mostly(U32), max_size=6),
        )
    ),
    "block_size": mostly(st.sampled_from([0, 4, 16])),
    "lora_id": mostly(st.one_of(st.none(), INTEGERS)),
    "medium": mostly(st.sampled_from(["GPU", "CPU", "cpu", "DISK", "gpu", "", None])),
    "lora_name": mostly(st.sampled_from([None, "", "a", {"cache_salt": "s"}])),
    "extra_keys": mostly(st.lists(st.one_of(st.none(), st.lists(ITEMS, max_size=3)), max_size=4)),
    "group_idx": mostly(st.integers(0, 3)),
    "kv_cache_spec_kind": mostly(st.sampled_from(["full_attention", "sliding_window", "mamba"])),
    "kv_cache_spec_sliding_window": mostly(st.integers(0, 2**40)),
    "locality": mostly(st.sampled_from(["LOCAL", "REMOTE", "", None])),
    "block_mm_infos": mostly(st.lists(st.one_of(st.none(), INFO), max_size=4)),
    "session_id": JUNK,
    "origin": mostly(st.sampled_from(["NEW", "REUSED", "new", "", None])),
    "remaining_copy_counts": mostly(st.lists(mostly(st.integers(0, 2**33)), max_size=4)),
}
TAG = mostly(st.sampled_from(["BlockStored"] * 6 + [*event_model.TAGS, "Foo"]))


@st.composite
def map_events(draw: st.DrawFn) -> dict[str, Any]:
    further = dict(VALUES)
    needed = {name: further.pop(name) for name in ("block_hashes", "token_ids")}
    event = draw(st.fixed_dictionaries({"type": TAG} | needed, optional=further))
    if draw(st.booleans()) and not isinstance(event.get("lora_name"), dict):
        event["cache_salt"] = draw(mostly(st.sampled_from(["", "s", None])))
    names = draw(st.permutations(list(event)))
    return {name: event[name] for name in names}


@st.composite
def array_events(draw: st.DrawFn) -> list[Any]:
    tag = draw(TAG)
    names = event_model.STORED if tag == "BlockStored" else event_model.REMOVED
    fields = [draw(VALUES[name]) for name in names]
    tails = [VALUES[name] for name in (*event_model.TAIL, "block_mm_infos")]
    tail = draw(
        st.one_of(
            st.tuples(*[st.one_of(st.none(), values) for values in tails[:4]], JUNK),
            st.lists(st.one_of(*tails), max_size=6),
        )
    )
    event = [tag, *fields, *tail]
    return event[: draw(st.integers(0, len(event)))] if draw(st.booleans()) else event


EVENTS = mostly(st.one_of(map_events(), array_events()))


@pytest.mark.slow("draws nested events of any shape")
@settings(max_examples=scaled(16), deadline=None)
@given(st.lists(EVENTS, max_size=4), mostly(st.one_of(st.none(), st.integers(0, 9))), st.booleans())
def test_events_of_any_members_mean_what_the_model_says(events, rank, as_map):
    value: Any = [1.5, events, rank]
    if as_map:
        value = {"events": events, "dp_rank": rank, "ts": 1}
    agrees(msgpack.packb(value))
