"""The reader of chunked bodies, with its input cut in every way."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.http.body import MAX_LINE_BYTES, OVERHEAD_FLOOR_BYTES, ChunkedBody
from kvd.http.errors import Refusal

CHUNKS = st.lists(st.binary(min_size=1, max_size=50) | st.just(b"\r\n\r\n\r\n"), max_size=20)
RESTS = st.binary(max_size=20) | st.just(b"\r\n\r\n0\r\n\r\n")
TRAILERS = st.sampled_from([b"", b"a: b\r\n", b"upgrade: x\r\nconnection: upgrade, close\r\n"])


def _encode(chunks: list[bytes], trailer: bytes = b"a: b\r\n") -> bytes:
    body = b"".join(b"%X;x=y\r\n%b\r\n" % (len(c), c) for c in chunks)
    return body + b"000\r\n" + trailer + b"\r\n"


@given(CHUNKS, TRAILERS, RESTS, st.data())
def test_any_pieces_give_the_same_body_and_rest(
    chunks: list[bytes], trailer: bytes, rest: bytes, data: st.DataObject
) -> None:
    encoded = _encode(chunks, trailer)
    body = ChunkedBody(limit=1000)
    at = 0
    while at < len(encoded):
        assert body.wanted
        size = data.draw(st.integers(1, 30))
        body.feed(encoded[at : at + size] + (rest if at + size >= len(encoded) else b""))
        at += size
    assert not body.wanted
    assert (body.data.getvalue(), body.rest) == (b"".join(chunks), rest)


@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_awaited_or_refused(data: bytes) -> None:
    try:
        ChunkedBody(limit=50).feed(data)
    except Refusal as refusal:
        assert refusal.status in (400, 413)


def test_the_limit_is_exact() -> None:
    body = ChunkedBody(limit=4)
    body.feed(_encode([b"ab", b"cd"]))
    assert body.data.getvalue() == b"abcd"
    with pytest.raises(Refusal) as refused:
        ChunkedBody(limit=4).feed(b"2\r\nab\r\n3\r\ncde")
    assert refused.value.status == 413


def test_framing_is_bounded() -> None:
    body = ChunkedBody(limit=10**5)
    body.feed(b"1\r\nx\r\n" * 10**4)  # one byte in each chunk is allowed
    small = ChunkedBody(limit=10)
    with pytest.raises(Refusal, match="more framing"):
        for _ in range(OVERHEAD_FLOOR_BYTES):
            small.feed(b"1;" + b"e" * 4000 + b"\r\nx\r\n")


@pytest.mark.parametrize("begin", [b"1;", b"1\r\na\r\n0\r\n", b"0\r\na: b\r\n", b"0\r\na: "])
def test_a_line_and_all_trailers_are_bounded(begin: bytes) -> None:
    body = ChunkedBody(limit=10**6)
    body.feed(begin)
    with pytest.raises(Refusal, match="too long"):
        for _ in range(MAX_LINE_BYTES):
            body.feed(b"x: y\r\n" if begin.endswith(b"\n") else b"x")


@pytest.mark.parametrize(
    "piece", [b"3\r\nabc\r\n0\r\n\r\n", b"3\r\nab", b"no size\r\n", b"9\r\n123456789"]
)
def test_a_body_needs_no_collector_to_go(piece: bytes) -> None:
    """That holds for a body that is whole, cut short, malformed, or over its limit."""
    gc.disable()
    try:
        body = ChunkedBody(limit=4)
        kept = weakref.ref(body)
        with contextlib.suppress(Refusal):
            body.feed(piece)
        del body
        assert kept() is None
    finally:
        gc.enable()
