"""Frames of lifecycle events: those recorded from Dynamo, byte for byte, and invalid ones."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.model import PartitionKey
from kvd.wire.fields import U32_MAX, U64_MAX, Refused
from kvd.wire.lifecycle import (
    BOUNDS,
    MAX_HASHES,
    MAX_TOKENS,
    TOPIC,
    Face,
    Lifecycle,
    Step,
    decode,
    encode,
)

PARTITION = PartitionKey("m", "default")
TEXT = st.text("aé\U0001f600:", max_size=9)
U64 = st.integers(0, U64_MAX) | st.sampled_from([0, 127, 128, 2**32 - 1, 2**32, 2**63, U64_MAX])


def hashes(*values: int) -> bytes:
    return array("Q", values).tobytes()


R1 = Lifecycle(PARTITION, 16, "r1", 7, 1, Step.ADD, hashes(101, 2**64 - 22, 303), 48)

HEAD = (
    "84aa6d6f64656c5f6e616d65a16dad726f7574696e675f67726f7570a764656661756c74aa626c6f636b5f73697a65"
    "10a56576656e7485aa726571756573745f6964"
)
WORKER = "a6776f726b657282a9776f726b65725f6964"
RANK = "a764705f72616e6b"
ADD = "a46461746181aa4164645265717565737484ae746f6b656e5f73657175656e6365"
TRACK = "b4747261636b5f70726566696c6c5f746f6b656e73"
EXPECTED = "b665787065637465645f6f75747075745f746f6b656e73"
HINT = "b170726566696c6c5f6c6f61645f68696e74"
TOKENS = "82d920696e697469616c5f6566666563746976655f70726566696c6c5f746f6b656e73"
DURATION = "b965787065637465645f70726566696c6c5f6475726174696f6ec0"
ROUTER = "a9726f757465725f6964cf"
LORA = "a96c6f72615f6e616d65"

# Recorded from Dynamo 1.6.1: the step that was taken, its publisher's id, the payload.
GOLDEN: dict[str, tuple[Lifecycle, int, str]] = {
    "add": (
        R1,
        0x6DD33B01D12B9833,
        f"{HEAD}a27231{WORKER}07{RANK}01{ADD}9365cfffffffffffffffeacd012f{TRACK}c3{EXPECTED}c0"
        f"{HINT}{TOKENS}30{DURATION}{ROUTER}6dd33b01d12b9833{LORA}c0",
    ),
    "add nothing": (
        Lifecycle(PARTITION, 16, "r2", 7, 0, Step.ADD),
        0x6DD33B01D12B9833,
        f"{HEAD}a27232{WORKER}07{RANK}00{ADD}90{TRACK}c2{EXPECTED}c0{HINT}c0"
        f"{ROUTER}6dd33b01d12b9833{LORA}c0",
    ),
    "prefill complete": (
        Lifecycle(PARTITION, 16, "r1", 7, 1, Step.PREFILL_COMPLETE),
        0x6DD33B01D12B9833,
        f"{HEAD}a27231{WORKER}07{RANK}01a464617461b44d61726b50726566696c6c436f6d706c65746564"
        f"{ROUTER}6dd33b01d12b9833{LORA}c0",
    ),
    "free": (
        Lifecycle(PARTITION, 16, "r1", 7, 1, Step.FREE),
        0xCDD3DAC96AD14716,
        f"{HEAD}a27231{WORKER}07{RANK}01a464617461a446726565{ROUTER}cdd3dac96ad14716{LORA}c0",
    ),
    "selected": (
        Lifecycle(PARTITION, 16, "r1", 1, 0, Step.ADD, hashes(101, 2**64 - 22), 48, 9, "L"),
        0x2D41F29F4D20A34C,
        f"{HEAD}a27231{WORKER}01{RANK}00{ADD}9265cfffffffffffffffea{TRACK}c3{EXPECTED}09"
        f"{HINT}{TOKENS}30{DURATION}{ROUTER}2d41f29f4d20a34c{LORA}a14c",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_what_the_peer_publishes_is_read(name: str) -> None:
    event, router_id, payload = GOLDEN[name]
    assert decode([TOPIC, bytes.fromhex(payload)]) == replace(event, router_id=router_id)


def test_hashes_are_signed_or_unsigned() -> None:
    signed = [101, -22, -(2**63), 2**64 - 1, 2**63 - 1]
    event = decode([TOPIC, msgpack.packb(frame(token_sequence=signed))])
    assert event.hashes == hashes(*(each % 2**64 for each in signed))


@pytest.mark.parametrize("name", GOLDEN)
def test_the_same_is_written_but_for_the_second_name_of_the_tenant(name: str) -> None:
    event, router_id, payload = GOLDEN[name]
    both = encode(event, router_id)
    assert both[0] == 0x85  # a map of 5
    second = msgpack.packb("tenant_id") + msgpack.packb("default")
    assert both.count(second) == 1
    assert (b"\x84" + both[1:].replace(second, b"")).hex() == payload


EVENTS = st.builds(
    Lifecycle,
    st.builds(PartitionKey, TEXT, TEXT),
    st.integers(1, U32_MAX),
    TEXT,
    U64,
    st.integers(0, U32_MAX),
    st.just(Step.ADD),
    st.builds(lambda values: hashes(*values), st.lists(U64, max_size=9)),
    st.integers(0, MAX_TOKENS),
    st.none() | st.integers(0, U32_MAX),
    st.none() | TEXT,
) | st.builds(
    Lifecycle,
    st.builds(PartitionKey, TEXT, TEXT),
    st.integers(1, U32_MAX),
    TEXT,
    U64,
    st.integers(0, U32_MAX),
    st.sampled_from([Step.PREFILL_COMPLETE, Step.FREE]),
    lora_name=st.none() | TEXT,
)


@given(EVENTS, st.none() | st.sampled_from(list(Face)), U64)
def test_what_is_written_is_read(event: Lifecycle, face: Face | None, router_id: int) -> None:
    event = replace(event, face=face)
    assert decode([TOPIC, encode(event, router_id)]) == replace(event, router_id=router_id)


def test_the_largest_request_is_read_and_a_larger_one_is_not() -> None:
    event = replace(R1, hashes=b"\xff" * 8 * MAX_HASHES)
    payload = encode(event, 1)
    assert len(payload) < BOUNDS.payload_bytes
    assert decode([TOPIC, payload]) == replace(event, router_id=1)
    larger = replace(R1, hashes=b"\xff" * 8 * (MAX_HASHES + 1))
    assert decode([TOPIC, encode(larger, 1)]) is Refused.MSGPACK


# ---- variations of the first golden frame


def frame(**changes: Any) -> dict[str, Any]:
    """Returns the envelope with members changed by name, at any level; `...` leaves one out.

    Names that it does not have become further members of the envelope.
    """
    hint = {"initial_effective_prefill_tokens": 48, "expected_prefill_duration": None}
    request = {
        "token_sequence": [101, 2**64 - 22, 303],
        "track_prefill_tokens": True,
        "expected_output_tokens": None,
        "prefill_load_hint": hint,
    }
    worker = {"worker_id": 7, "dp_rank": 1}
    event = {
        "request_id": "r1",
        "worker": worker,
        "data": {"AddRequest": request},
        "router_id": 5,
        "lora_name": None,
    }
    envelope = {"model_name": "m", "routing_group": "default", "block_size": 16, "event": event}
    for name, value in changes.items():
        levels = (envelope, event, worker, request, hint)
        level: dict[str, Any] = next((level for level in levels if name in level), envelope)
        level[name] = value
        if value is ...:
            del level[name]
    return envelope


def read(envelope: object) -> Lifecycle | Refused:
    return decode([TOPIC, msgpack.packb(envelope)])


ADDED = frame()["event"]["data"]["AddRequest"]
LISTED_ADD = {"AddRequest": [[101, 2**64 - 22, 303], True, None, [48, None]]}
BARE_HINT = {"initial_effective_prefill_tokens": 48}
UNTIMED_HINT = {"initial_effective_prefill_tokens": 48, "expected_prefill_duration": [3, 5]}

# Dynamo was observed to accept all of these.
TAKEN: dict[str, tuple[object, Lifecycle]] = {
    "as it is": (frame(), R1),
    "older name": (frame(routing_group=..., tenant_id="default"), R1),
    "both names": (frame(tenant_id="default"), R1),
    "a face": (frame(face="selection"), replace(R1, face=Face.SELECTION)),
    "a face of others": (frame(face="conductor"), R1),
    "something else under its name": (frame(face=["selection"]), R1),
    "further members": (frame(sequence=9, other={"a": [1, 2.5, None, b"x"]}), R1),
    "no lora": (frame(lora_name=...), R1),
    "lora": (frame(lora_name="L"), replace(R1, lora_name="L")),
    "no expected output": (frame(expected_output_tokens=...), R1),
    "no hashes": (frame(token_sequence=...), replace(R1, hashes=b"")),
    "nil for hashes": (frame(token_sequence=None), replace(R1, hashes=b"")),
    "no track": (frame(track_prefill_tokens=...), R1),
    "not tracked": (frame(track_prefill_tokens=False), replace(R1, prefill_tokens=0)),
    "no hint": (frame(prefill_load_hint=...), replace(R1, prefill_tokens=0)),
    "nil for a hint": (frame(prefill_load_hint=None), replace(R1, prefill_tokens=0)),
    "hint without duration": (frame(prefill_load_hint=BARE_HINT), R1),
    "hint with duration": (frame(prefill_load_hint=UNTIMED_HINT), R1),
    "most tokens": (
        frame(initial_effective_prefill_tokens=MAX_TOKENS),
        replace(R1, prefill_tokens=MAX_TOKENS),
    ),
    "nobody's": (frame(router_id=0), R1),
    "listed worker": (frame(worker=[7, 1]), R1),
    "listed request": (frame(data=LISTED_ADD), R1),
    "listed event": (frame(event=["r1", [7, 1], LISTED_ADD, 5, None]), R1),
    "listed": (["m", "default", 16, ["r1", [7, 1], LISTED_ADD, 5, None]], R1),
    "free as a map": (
        frame(data={"Free": None}),
        Lifecycle(PARTITION, 16, "r1", 7, 1, Step.FREE),
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name: str) -> None:
    envelope, event = TAKEN[name]
    decoded = read(envelope)
    assert not isinstance(decoded, Refused), decoded
    assert replace(decoded, router_id=event.router_id) == event


ENVELOPES: dict[str, object] = {
    "number": 5,
    "text": "event",
    "short list": ["m", "default", 16],
    "long list": ["m", "default", 16, frame()["event"], None],
    "no model": frame(model_name=...),
    "no tenant": frame(routing_group=...),
    "nil tenant": frame(routing_group=None),
    "number for a tenant": frame(tenant_id=5),
    "no block size": frame(block_size=...),
    "float block size": frame(block_size=16.0),
}
EVENTS_REFUSED: dict[str, object] = {
    "no event": frame(event=...),
    "short event": frame(event=["r1", [7, 1], "Free", 5]),
    "no request": frame(request_id=...),
    "bytes for a request": frame(request_id=b"r1"),
    "no worker": frame(worker=...),
    "listed short worker": frame(worker=[7]),
    "no rank": frame(dp_rank=...),
    "bool for a rank": frame(dp_rank=True),
    "no router": frame(router_id=...),
    "number for a lora": frame(lora_name=5),
    "nil for an add": frame(data={"AddRequest": None}),
    "add without content": frame(data="AddRequest"),
    "nil for track": frame(track_prefill_tokens=None),
    "hint without tokens": frame(initial_effective_prefill_tokens=...),
    "float hint": frame(initial_effective_prefill_tokens=48.0),
}
STEPS: dict[str, object] = {
    "no data": frame(data=...),
    "other step": frame(data="Touch"),
    "lower case": frame(data="free"),
    "other map": frame(data={"Touch": None}),
    "free with content": frame(data={"Free": {}}),
    "two steps": frame(data={"AddRequest": ADDED, "Free": None}),
    "no step": frame(data={}),
    "listed step": frame(data=["Free"]),
    "numbered step": frame(data=1),
}
HASHES: dict[str, object] = {
    "negative text": frame(token_sequence=[-1, "1"]),
    "float": frame(token_sequence=[1.0]),
    "text": frame(token_sequence=["1"]),
    "nil": frame(token_sequence=[None]),
    "nested": frame(token_sequence=[[1]]),
    "bytes": frame(token_sequence=b"12345678"),
    "map": frame(token_sequence={}),
}
RANGES: dict[str, object] = {
    "block size": frame(block_size=2**32),
    "negative block size": frame(block_size=-1),
    "negative worker": frame(worker_id=-1),
    "rank": frame(dp_rank=2**32),
    "router": frame(router_id=-5),
    "expected output": frame(expected_output_tokens=2**32),
    "prefill tokens": frame(initial_effective_prefill_tokens=MAX_TOKENS + 1),
    "uncounted prefill tokens": frame(
        initial_effective_prefill_tokens=U64_MAX, track_prefill_tokens=False
    ),
}
PAYLOADS: dict[str, bytes] = {
    "empty": b"",
    "never used": b"\xc1",
    "cut": msgpack.packb(frame())[:-1],
    "too much": msgpack.packb(frame()) + b"\xc0",
    "no text": msgpack.packb(frame()).replace(b"default", b"defaul\xff"),
    "twice": b"\x85" + msgpack.packb(frame())[1:] + msgpack.packb("event") + b"\xc0",
    "number for a key": msgpack.packb({5: 5}),
    "extension": msgpack.packb(msgpack.ExtType(5, b"x")),
    "timestamp": b"\xd7\xff" + b"\xff" * 8,
    "long name": msgpack.packb(frame(model_name="m" * (BOUNDS.text_bytes + 1))),
    "headers of arrays": b"\xdd\x00\x03\xff\xff" * 500,
    "deep": b"\x91" * 100_000 + b"\xc0",
    "empty maps": b"\xdd\x00\x03\xff\xff" + b"\x80" * (2**18 - 1),
    "arrays": msgpack.packb([[0] * (MAX_HASHES - 1)] * 3),
    "too long": msgpack.packb(bytes(BOUNDS.payload_bytes)),
}
REFUSED: dict[Refused, dict[str, Any]] = {
    Refused.ENVELOPE: ENVELOPES,
    Refused.TENANTS: {"tenants": frame(tenant_id="other")},
    Refused.EVENT: EVENTS_REFUSED,
    Refused.STEP: STEPS,
    Refused.HASHES: HASHES,
    Refused.RANGE: RANGES,
}


@pytest.mark.parametrize(
    ("reason", "name"), [(reason, name) for reason, names in REFUSED.items() for name in names]
)
def test_refused(reason: Refused, name: str) -> None:
    assert read(REFUSED[reason][name]) is reason


@pytest.mark.parametrize("name", PAYLOADS)
def test_no_payload(name: str) -> None:
    assert decode([TOPIC, PAYLOADS[name]]) is Refused.MSGPACK


def test_frames_around_it() -> None:
    payload = msgpack.packb(frame())
    for frames in ([], [TOPIC], [payload], [TOPIC, payload, b""], [b"", TOPIC, payload]):
        assert decode(frames) is Refused.FRAMES
    for topic in (b"", TOPIC[:-1], TOPIC + b"1", b"dynamo.session-affinity.v1"):
        assert decode([topic, payload]) is Refused.TOPIC


VALUES = st.recursive(
    st.none() | st.booleans() | U64 | st.integers(-(2**63), -1) | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner),
    max_leaves=9,
)
MEMBERS = [
    "tenant_id",
    *frame(),
    *frame()["event"],
    *frame()["event"]["worker"],
    *ADDED,
    *BARE_HINT,
]


@given(st.dictionaries(st.sampled_from(MEMBERS), VALUES, max_size=3))
def test_any_value_anywhere_is_an_event_or_refused(changes: dict[str, Any]) -> None:
    check(msgpack.packb(frame(**changes)))


@given(
    st.sampled_from([bytes.fromhex(payload) for _, _, payload in GOLDEN.values()]),
    st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=3), st.integers(0, 3)), max_size=4),
)
def test_any_damage_leaves_an_event_or_is_refused(
    payload: bytes, damages: list[tuple[int, bytes, int]]
) -> None:
    for at, put, taken in damages:
        payload = payload[:at] + put + payload[at + taken :]
    check(payload)


def check(payload: bytes) -> None:
    """Checks that a decoded frame can be encoded and decoded again, so that it is within bounds."""
    decoded = decode([TOPIC, payload])
    if not isinstance(decoded, Refused):
        assert decode([TOPIC, encode(decoded, decoded.router_id)]) == decoded
