"""Payloads of KV events in every form, and the members of standard events."""

from __future__ import annotations

import json
import random
from typing import Any

import msgpack
import pytest

from kvd.wire import kv_events
from kvd.wire.kv_events import MAX_EVENTS

EVENT = {"event_type": "stored", "event_id": 1, "seq_hashes": [1]}
ENGINE = ["BlockRemoved", [1]]


def packed(payload: bytes, part_bytes: int = 7) -> bytes:
    """Returns a payload as msgpack, the form that publications take."""
    if not kv_events.is_json(payload):
        return payload
    text = kv_events.json_text(payload)
    while text.read(part_bytes):
        pass
    return text.packed()


@pytest.mark.parametrize("write", [msgpack.packb, lambda value: json.dumps(value).encode()])
@pytest.mark.parametrize(
    ("value", "events", "rank"),
    [
        ([1.5, [EVENT, ENGINE], 3], [EVENT, ENGINE], 3),
        ([1, [EVENT]], [EVENT], None),
        ([1, [EVENT], None], [EVENT], None),
        ([1, []], [], None),
        ({"ts": 1, "events": [EVENT]}, [EVENT], None),
        ({"events": [EVENT], "data_parallel_rank": 1}, [EVENT], 1),
        ({"events": [EVENT], "dp_rank": 2}, [EVENT], 2),
        ({"events": [EVENT], "dp_rank": None, "attn_dp_rank": 4}, [EVENT], 4),
        ([EVENT, EVENT], [EVENT, EVENT], None),
        (EVENT, [EVENT], None),
        ({"type": "AllBlocksCleared"}, [{"type": "AllBlocksCleared"}], None),
    ],
)
def test_a_batch_comes_in_many_forms(
    write: Any, value: object, events: list[object], rank: int | None
) -> None:
    batch = kv_events.read_batch(packed(write(value)))
    assert ([unpacked(each) for each in batch.events], batch.rank) == (events, rank)


def unpacked(event: object) -> object:
    """Returns an event of a batch, unpacked also if it is an engine's own."""
    found = kv_events.read_event(event)
    return msgpack.unpackb(found.packed) if isinstance(found, kv_events.RawEvent) else found


KEYS = ("events", "type", "event_type", "ts", "dp_rank", "attn_dp_rank", 7)


def anything(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(9 if depth < 4 else 6)
    if kind < 6:
        return rng.choice((None, True, 0, 3, -1, 2**31, 1.5, "x", b"y", EVENT, ENGINE))
    if kind == 6:
        return {rng.choice(KEYS): anything(rng, depth + 1) for _ in range(rng.randrange(4))}
    return [anything(rng, depth + 1) for _ in range(rng.randrange(4))]


def outcome(payload: bytes) -> tuple[list[object], int | None] | str:
    try:
        batch = kv_events.read_batch(packed(payload))
    except ValueError as error:
        return str(error)
    return [unpacked(each) for each in batch.events], batch.rank


@pytest.mark.parametrize("seed", range(6))
def test_what_is_taken_apart_is_what_would_be_read(seed: int) -> None:
    """A value gives the same batch in JSON and in msgpack."""
    rng = random.Random(seed)
    for _ in range(300):
        value = anything(rng)
        packed, text = msgpack.packb(value), json.dumps(value, default=repr)
        if json.loads(text) == value:
            assert outcome(packed) == outcome(b" " + text.encode())
        for cut in (packed[: rng.randrange(len(packed))], packed + b"\0"):
            assert kv_events.is_json(cut) or outcome(cut) == "msgpack"


def test_events_beyond_the_bound_are_counted() -> None:
    for payload in (
        msgpack.packb([0, [7] * (MAX_EVENTS + 3), 1]),
        json.dumps([0, [7] * (MAX_EVENTS + 3), 1]).encode(),
    ):
        batch = kv_events.read_batch(packed(payload))
        assert (len(batch.events), batch.beyond, batch.rank) == (MAX_EVENTS, 3, 1)


def test_blanks_may_precede_json() -> None:
    assert len(kv_events.read_batch(packed(b' \n[1, [{"event_type": "cleared"}]]')).events) == 1


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"", "msgpack"),
        (b"\xc1", "msgpack"),
        (b"\x93\x01", "msgpack"),
        (b"\x01", "batch_shape"),
        (msgpack.packb("text"), "batch_shape"),
        (msgpack.packb([1, 2, 3]), "batch_shape"),
        (msgpack.packb({"a": 1}), "batch_shape"),
        (msgpack.packb([1, [], -1]), "rank"),
        (msgpack.packb([1, [], 1.0]), "rank"),
        (msgpack.packb([1, [], 2**31]), "rank"),
        (b'{"event_type":', "json"),
        (b"[1,2", "json"),
        (b"[" * 100_000, "json"),
    ],
)
def test_other_payloads_are_refused(payload: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        kv_events.read_batch(packed(payload))


NUMBERS = (0, 1, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**63, 2**64 - 1)
SCALARS = (*NUMBERS, *(-n for n in NUMBERS[1:10]), -(2**63), 1.5, -2e-9, 1e300, True, False, None)
TEXTS = ("", "x" * 31, "x" * 32, "x" * 255, "x" * 256, 'ü"\\\n\0日本', "\U0001f600")


def value_of(rng: random.Random, depth: int) -> Any:
    if depth == 0 or rng.random() < 0.3:
        return rng.choice((*SCALARS, *TEXTS))
    if rng.random() < 0.5:
        return [value_of(rng, depth - 1) for _ in range(rng.randrange(5))]
    return {rng.choice(TEXTS): value_of(rng, depth - 1) for _ in range(rng.randrange(5))}


@pytest.mark.parametrize("seed", range(6))
def test_json_is_the_same_as_msgpack_wherever_it_is_cut(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        value = [value_of(rng, 4)]
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode()
        read = msgpack.unpackb(packed(text, rng.randint(1, 40)))
        assert read == value and repr(read) == repr(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b"[-0]", [0]),
        (b"[18446744073709551616]", [2.0**64]),
        (b"[-9223372036854775809]", [-(2.0**63)]),
        (b" 7", 7),
        (b' {"a":1,"a":[]}', {"a": []}),
    ],
)
def test_json_that_msgpack_has_no_word_for(text: bytes, value: object) -> None:
    assert msgpack.unpackb(packed(text)) == value


@pytest.mark.parametrize(
    "text",
    [b"[NaN]", b"[1] 2", b"[01]", b'["\\ud800"]', b'["\xff"]', b"{", b"[1,]", b"[tru]", b" "],
)
def test_what_is_no_json_is_said_to_be_none(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"^json$"):
        packed(text)


@pytest.mark.parametrize(
    ("value", "hash"),
    [
        (0, 0),
        (2**64 - 1, 2**64 - 1),
        (-1, 2**64 - 1),
        (-(2**63), 2**63),
        (b"\x01", 1),
        (bytes(24) + b"\x00\x00\x00\x00\x00\x00\x01\x02", 0x102),
        ("17", 17),
        ("-1", 2**64 - 1),
        ("0xff", 255),
    ],
)
def test_hashes_are_64_bits(value: object, hash: int) -> None:
    assert kv_events.hash_of(value) == hash


@pytest.mark.parametrize(
    "value", [2**64, -(2**63) - 1, b"", 1.0, True, None, "", "x", "0x", "1" * 21, "0x" + "1" * 17]
)
def test_other_values_are_no_hashes(value: object) -> None:
    with pytest.raises(ValueError, match="hash"):
        kv_events.hash_of(value)


HEX = "00112233445566778899aabbccddeeff00112233445566778899aabb12345678"


@pytest.mark.parametrize(
    ("key", "hash"),
    [
        ("14643705804678351452", 14643705804678351452),
        ("0xcb38e4d7fb2dca5c", 0xCB38E4D7FB2DCA5C),
        (f"prefix@llama@tp_rank:0@pcp0@dcp0@pp_rank:0@{HEX}", 0x8899AABB12345678),
        (f"llama@tp_rank:1@pcp0@dcp0@pp_rank:0@group:2@{HEX}", 0x8899AABB12345678),
        (f"llama@pcp0@dcp0@head_or_tp_rank:0@pp_rank:0@{HEX}@12", 0x8899AABB12345678),
        (f"{HEX}_0_k", 0x0011223344556677),
        (f"{HEX}_3_v", 0x0011223344556677),
        (f"meta-llama-Llama-3.1-8B_{HEX}_0_k", 0x0011223344556677),
        (f"pool 7_meta-llama-Llama_{HEX}_0_1_v", 0x0011223344556677),
        (f"deepseek-ai-DeepSeek-V3__v2_{HEX}__k", 0x0011223344556677),
        (f"{'ab' * 32}_{HEX}_12_k", 0x0011223344556677),
        (f"{'ab' * 32}_0_k_{HEX}_12_k", 0x0011223344556677),
        (f"llama_{HEX}_0_draft_k", None),
        (f"llama_{HEX}_0_swa_k", None),
        (f"llama_{HEX}__indexer", None),
        (f"llama_{HEX}_0_conv_1", None),
        (f"llama_{HEX}_0_temporal", None),
        (f"llama_{HEX[1:]}_0_k", None),
        (f"llama_0{HEX}_0_k", None),
        (f"llama{HEX}_0_k", None),
        (HEX, 0x8899AABB12345678),
        (17, 17),
        ("", None),
        ("llama@tp_rank:0", None),
        ("session-17", None),
        (1.5, None),
        (f"{'@' * 4000}{HEX}", 0x8899AABB12345678),
        (f"{'@' * 4096}{HEX}", None),
    ],
)
def test_object_keys_name_blocks(key: object, hash: int | None) -> None:
    assert kv_events.object_hash(key) == hash


def test_an_event_without_hashes_may_name_its_object() -> None:
    assert kv_events.hashes({"seq_hashes": [1], "block_hashes": [2], "object_key": "3"}) == [1]
    assert kv_events.hashes({"seq_hashes": [], "block_hashes": [2], "object_key": "3"}) == [2]
    assert kv_events.hashes({"seq_hashes": [], "block_hashes": [], "object_key": "3"}) == [3]
    assert kv_events.hashes({"seq_hashes": [], "object_key": "unread"}) == []
    for event in ({}, {"seq_hashes": None, "object_key": "3"}, {"seq_hashes": "x"}):
        with pytest.raises(ValueError, match="seq_hashes"):
            kv_events.hashes(event)


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ({"object_key": f"llama@tp_rank:0@{HEX}"}, True),
        ({"object_key": f"{HEX}_0_k"}, True),
        ({"connector_block_hash": HEX}, True),
        ({"connector_block_hash": 17, "object_key": "17"}, True),
        ({"object_key": "17"}, False),
        ({"object_key": 17}, False),
        ({"object_key": "unread"}, False),
        ({"object_key": f"{HEX}_0_k", "block_hashes": [1]}, False),
        ({}, False),
    ],
)
def test_connectors_name_objects_by_their_engine_s_hashes(members: Any, named: bool) -> None:
    assert kv_events.names_object({"seq_hashes": []} | members) is named


def test_tokens_are_u32() -> None:
    assert kv_events.tokens({"token_ids": [0, 2**32 - 1]}) == [0, 2**32 - 1]
    for nothing in ({}, {"token_ids": None}, {"token_ids": []}):
        assert kv_events.tokens(nothing) is None
    for wrong in ("", "abcd", [1.0], [True], [-1], [2**32], ["1"], [[1, 2]], {}, 0):
        with pytest.raises(ValueError, match="token_ids"):
            kv_events.check_tokens(kv_events.tokens({"token_ids": wrong}) or [])
