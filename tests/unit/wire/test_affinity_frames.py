"""Frames with the bindings of sessions: recorded from Dynamo, varied, and invalid ones."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.model import PartitionKey
from kvd.wire.affinity import MAX_SEQUENCE, TOPIC, Bound, Version, decode, encode
from kvd.wire.fields import U32_MAX, U64_MAX, Refused

# Recorded from Dynamo 1.6.1.
GOLDEN = bytes.fromhex(
    "87aa6d6f64656c5f6e616d65a16dad726f7574696e675f67726f7570a764656661756c74aa73657373696f6e5f6964"
    "a153a9776f726b65725f696401a764705f72616e6b00a873657175656e6365cf18ea05f7124e47f0a97772697465725f"
    "6964cf2d41f29f4d20a34c"
)
BOUND = Bound(
    PartitionKey("m", "default"), "S", 1, 0, Version(0x18EA05F7124E47F0, 0x2D41F29F4D20A34C)
)
MEMBERS: dict[str, Any] = msgpack.unpackb(GOLDEN)


def changed(**members: Any) -> Bound | Refused:
    given_ = {name: value for name, value in (MEMBERS | members).items() if value is not ...}
    return decode([TOPIC, msgpack.packb(given_)])


def test_the_live_peers_frame() -> None:
    assert decode([TOPIC, GOLDEN]) == BOUND


def test_what_is_written_has_both_names_of_the_tenant() -> None:
    assert msgpack.unpackb(encode(BOUND)) == MEMBERS | {"tenant_id": "default"}
    shorter = msgpack.unpackb(encode(BOUND))
    del shorter["tenant_id"]
    assert msgpack.packb(shorter) == GOLDEN  # to the byte


def test_what_may_differ() -> None:
    assert changed(routing_group=..., tenant_id="default") == BOUND
    assert changed(tenant_id="default", more=[]) == BOUND
    for dp_rank in (None, ...):
        bound = changed(dp_rank=dp_rank)
        assert isinstance(bound, Bound) and bound.dp_rank is None
    assert changed(session_id="") == Bound(BOUND.partition, "", 1, 0, BOUND.version)


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"model_name": ...}, Refused.ENVELOPE),
        ({"model_name": None}, Refused.ENVELOPE),
        ({"routing_group": ...}, Refused.ENVELOPE),
        ({"tenant_id": "other"}, Refused.TENANTS),
        ({"session_id": 5}, Refused.ENVELOPE),
        ({"session_id": ...}, Refused.ENVELOPE),
        ({"session_id": "x" * 5000}, Refused.MSGPACK),
        ({"worker_id": "1"}, Refused.ENVELOPE),
        ({"worker_id": -1}, Refused.RANGE),
        ({"dp_rank": U32_MAX + 1}, Refused.RANGE),
        ({"dp_rank": True}, Refused.ENVELOPE),
        ({"sequence": MAX_SEQUENCE + 1}, Refused.RANGE),
        ({"sequence": 1.0}, Refused.ENVELOPE),
        ({"writer_id": ...}, Refused.ENVELOPE),
    ],
)
def test_what_is_none(members: dict[str, Any], reason: Refused) -> None:
    assert changed(**members) is reason


def test_messages_that_are_none() -> None:
    assert decode([TOPIC]) is Refused.FRAMES
    assert decode([TOPIC, GOLDEN, b""]) is Refused.FRAMES
    assert decode([TOPIC + b"2", GOLDEN]) is Refused.TOPIC
    assert decode([TOPIC, GOLDEN[:-1]]) is Refused.MSGPACK
    assert decode([TOPIC, b"\x01"]) is Refused.ENVELOPE
    assert decode([TOPIC, b"\x90"]) is Refused.ENVELOPE


@given(st.binary(max_size=60))
def test_anything_is_decoded_or_refused(payload: bytes) -> None:
    decode([TOPIC, payload])


TEXT = st.text(max_size=9)


@given(
    TEXT,
    TEXT,
    TEXT,
    st.integers(0, U64_MAX),
    st.none() | st.integers(0, U32_MAX),
    st.integers(0, MAX_SEQUENCE),
    st.integers(0, U64_MAX),
)
def test_what_is_written_is_read(
    model: str, tenant: str, session: str, worker: int, rank: int | None, at: int, by: int
) -> None:
    bound = Bound(PartitionKey(model, tenant), session, worker, rank, Version(at, by))
    assert decode([TOPIC, encode(bound)]) == bound
