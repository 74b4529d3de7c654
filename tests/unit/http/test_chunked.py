"""The decoder of chunked bodies, against every way to cut its input."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.http.chunked import OVERHEAD_FLOOR_BYTES, Dechunker
from kvd.http.errors import Refusal

CHUNKS = st.lists(st.binary(min_size=1, max_size=50), max_size=20)


def _encode(chunks: list[bytes]) -> bytes:
    return b"".join(b"%X ;x=y\r\n%b\r\n" % (len(c), c) for c in chunks) + b"000\r\na: b\r\n\r\n"


@given(CHUNKS, st.binary(max_size=20), st.data())
def test_any_pieces_give_the_same_body_and_rest(
    chunks: list[bytes], rest: bytes, data: st.DataObject
) -> None:
    encoded = _encode(chunks)
    decoder = Dechunker(limit=1000)
    at = 0
    while at < len(encoded):
        assert not decoder.done
        size = data.draw(st.integers(1, 30))
        decoder.feed(encoded[at : at + size] + (rest if at + size >= len(encoded) else b""))
        at += size
    assert decoder.done
    assert decoder.take() == (b"".join(chunks), rest)


@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_awaited_or_refused(data: bytes) -> None:
    decoder = Dechunker(limit=50)
    try:
        decoder.feed(data)
    except Refusal as refusal:
        assert refusal.status in (400, 413)


def test_the_limit_is_exact() -> None:
    decoder = Dechunker(limit=4)
    decoder.feed(_encode([b"ab", b"cd"]))
    assert decoder.take()[0] == b"abcd"
    with pytest.raises(Refusal) as refused:
        Dechunker(limit=4).feed(b"2\r\nab\r\n3\r\n")
    assert refused.value.status == 413


def test_framing_is_bounded() -> None:
    decoder = Dechunker(limit=10**5)
    decoder.feed(b"1\r\nx\r\n" * 10**4)  # one byte a chunk is bad manners, not an attack
    small = Dechunker(limit=10)
    with pytest.raises(Refusal, match="more framing"):
        for _ in range(OVERHEAD_FLOOR_BYTES):
            small.feed(b"1;" + b"e" * 4000 + b"\r\nx\r\n")
