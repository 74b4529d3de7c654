"""A batch's publisher id: where its 16 bytes may be, and which values are no id."""

from __future__ import annotations

from typing import Any

import msgpack
from hypothesis import example, given
from hypothesis import strategies as st

from kvd_core.events.decoder import decode, publisher
from kvd_core.zmq.drain import Inbox, InboxSpace

ID = bytes(range(16))
OTHER = bytes(range(1, 17))
HEARTBEAT = bytes.fromhex("94cb3ff80000000000009000c410000102030405060708090a0b0c0d0e0f")
FOREVER_NS = 10**12

NO_IDS = [
    *(bytes(length) for length in range(65) if length != 16),
    None,
    "",
    "x" * 16,
    0,
    -1,
    2**64 - 1,
    1.5,
    True,
    [ID],
    {"id": ID},
    msgpack.ExtType(1, ID),
]


def test_the_heartbeat_of_the_document() -> None:
    assert publisher(HEARTBEAT) == ID
    assert decode(HEARTBEAT) == (True, 0, [], [], 0, 0)
    assert publisher(b"\x93" + HEARTBEAT[1:-18]) == b""


def test_an_id_is_found_in_every_form() -> None:
    event = ["BlockRemoved", [1], "GPU"]
    for batch in (
        [1.5, [], None, ID],
        [1.5, [event] * 300, 7, ID],
        [1.5, [event], 7, ID, "behind it"],
        [*[1.5, [], 0, ID], *range(30)],  # an array whose header is long
        {"ts": 1.5, "events": [event], "publisher_id": ID},
        {"publisher_id": ID, "events": [event]},
        {"publisher_id": OTHER, 3: 4, "events": [], "x": "publisher_id"} | {"publisher_id": ID},
    ):
        payload = msgpack.packb(batch)
        assert publisher(payload) == ID, batch
        assert decode(payload).bad == []
    assert publisher(msgpack.packb([1.5, [], 0]) + b"\xc4\x10" + ID) == b""
    long_bin = b"\x94" + msgpack.packb(1.5) + b"\x90\xc0" + b"\xc5\x00\x10" + ID
    assert publisher(long_bin) == ID


def test_anything_else_says_nothing_and_costs_nothing() -> None:
    event = {"type": "BlockRemoved", "block_hashes": [1]}
    for value in NO_IDS:
        for batch in ([1.5, [event], 0, value], {"events": [event], "publisher_id": value}):
            payload = msgpack.packb(batch)
            assert publisher(payload) == b"", batch
            seen = decode(payload)
            assert (len(seen.events), seen.bad) == (1, []), batch


def plainly(batch: Any) -> bytes:
    if isinstance(batch, dict):
        found = batch.get("publisher_id")
    else:
        found = batch[3] if isinstance(batch, list) and len(batch) > 3 else None
    return found if isinstance(found, bytes) and len(found) == 16 else b""


VALUES = st.one_of(
    st.sampled_from([ID, OTHER, b"\xc4\x10" + bytes(16), "x" * 16 + "y", None, 0, [], [ID]]),
    st.binary(max_size=40),
)
BATCHES = st.one_of(
    st.lists(VALUES, max_size=6),
    st.dictionaries(st.sampled_from(["ts", "events", "publisher_id", "x"]), VALUES),
)


@given(st.lists(BATCHES, max_size=6))
def test_an_inbox_tells_when_another_one_speaks(batches: list[Any]) -> None:
    inbox = Inbox(InboxSpace())
    met: list[tuple[int, bytes]] = []
    taken: list[int] = []
    speaker = b""
    for number, batch in enumerate(batches):
        inbox.push(number, msgpack.packb(batch))
    inbox.drain(
        lambda seq, payload: taken.append(seq),
        100,
        FOREVER_NS,
        speaker,
        lambda publisher: met.append((len(taken), publisher)),
    )
    expected = []
    for number, batch in enumerate(batches):
        if plainly(batch) != speaker:
            speaker = plainly(batch)
            expected.append((number, speaker))
    assert met == expected
    assert taken == list(range(len(batches)))


@given(st.binary(max_size=60))
@example(b"\x84")
@example(b"\x94" + bytes(40))
@example(b"\xde\xff\xff\xacpublisher_id\xc4\x10")
def test_any_bytes_are_read(payload: bytes) -> None:
    found = publisher(payload)
    assert found in (b"", payload[payload.find(found) :][:16])
