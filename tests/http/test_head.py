"""Parsing of request heads: pieces, and the memory of heads seen before."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvd.http.errors import Refusal
from kvd.http.head import KNOWN_HEAD_BYTES, KNOWN_HEADS, Head, HeadCache, HeadParser
from kvd.http.limits import HttpLimits
from kvd.http.table import RouteTable

TABLE = RouteTable(())

HEAD = (
    b"POST /query?a=%20 HTTP/1.1\r\nHost: kvd\r\nempty:\r\nX-Trace: a b\r\n"
    b"connection: keep-alive\r\nexpect: 100-continue\r\ncontent-length:  17 \r\n\r\n"
)


def _facts(head: Head) -> tuple[object, ...]:
    framing = (head.length, head.keep_alive, head.expects_continue, head.http11)
    return head.method, head.path, head.query, head.headers, framing


@given(st.lists(st.integers(0, len(HEAD)), max_size=10))
def test_any_pieces_give_the_same_head(cuts: list[int]) -> None:
    parser = HeadParser()
    places = [0, *sorted(cuts), len(HEAD)]
    for start, end in itertools.pairwise(places):
        parser.feed(HEAD[start:end])
    head = parser.finish(HttpLimits())
    assert _facts(head) == _facts(HeadCache(HttpLimits(), TABLE.bind).parse(HEAD))
    assert _facts(head)[:3] == ("POST", b"/query", b"a=%20")
    assert head.headers[:3] == [(b"host", b"kvd"), (b"empty", b""), (b"x-trace", b"a b")]
    assert _facts(head)[4] == (17, True, True, True)


@given(st.binary(max_size=60), st.integers(0, len(HEAD)))
def test_any_bytes_are_a_head_or_refused(noise: bytes, at: int) -> None:
    parser = HeadParser()
    try:
        parser.feed(HEAD[:at] + noise + HEAD[at:])
        parser.finish(HttpLimits())
    except Refusal as refusal:
        assert refusal.status in (400, 417)


def test_equal_heads_are_parsed_once_for_a_while() -> None:
    cache = HeadCache(HttpLimits(), TABLE.bind)
    first = cache.parse(HEAD)
    assert cache.parse(bytes(bytearray(HEAD))) is first
    for number in range(KNOWN_HEADS):
        cache.parse(b"GET /%d HTTP/1.1\r\n\r\n" % number)
    again = cache.parse(HEAD)
    assert again is not first and _facts(again) == _facts(first)


def test_long_heads_are_not_remembered() -> None:
    cache = HeadCache(HttpLimits(), TABLE.bind)
    long = b"GET / HTTP/1.1\r\na: " + b"x" * KNOWN_HEAD_BYTES + b"\r\n\r\n"
    assert cache.parse(long) is not cache.parse(long)
