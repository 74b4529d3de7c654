"""Parsing of request heads: by llhttp in any pieces, and by the fast path's own reader."""

from __future__ import annotations

import itertools
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.http.errors import Refusal
from kvd.http.fast_path import names_host, plain_head
from kvd.http.head import Head, HeadParser
from kvd.http.limits import HttpLimits

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
    assert _facts(head)[:3] == ("POST", b"/query", b"a=%20")
    assert head.headers[:3] == [(b"host", b"kvd"), (b"empty", b""), (b"x-trace", b"a b")]
    assert _facts(head)[4] == (17, True, True, True)


def test_blanks_around_a_value_are_no_part_of_it() -> None:
    parser = HeadParser()
    parser.feed(b"GET / HTTP/1.1\r\nhost: \t kvd \t\r\nx:  a b \t \r\n\r\n")
    assert parser.finish(HttpLimits()).headers == [(b"host", b"kvd"), (b"x", b"a b")]


@pytest.mark.parametrize(
    ("head", "silent"),
    [
        (b"HEAD / HTTP/1.1\r\nhost: a b\r\n\r\n", True),
        (b"HEAD / HTTP/1.1\r\ncontent-length: x\r\n\r\n", True),  # llhttp refuses this one
        (b"GET / HTTP/1.1\r\nhost: a b\r\n\r\n", False),
        (b"GET / HTTP/1.1\r\ncontent-length: x\r\n\r\n", False),
        (b"\0", False),
    ],
)
def test_a_refused_head_says_whether_its_answer_has_a_body(head: bytes, silent: bool) -> None:
    parser = HeadParser()
    with pytest.raises(Refusal) as refused:
        parser.feed(head)
        parser.finish(HttpLimits())
    assert (refused.value.status, refused.value.silent) == (400, silent)


@given(st.binary(max_size=60), st.integers(0, len(HEAD)))
def test_any_bytes_are_a_head_or_refused(noise: bytes, at: int) -> None:
    parser = HeadParser()
    try:
        parser.feed(HEAD[:at] + noise + HEAD[at:])
        parser.finish(HttpLimits())
    except Refusal as refusal:
        assert refusal.status in (400, 417)


SEEDS = (
    b"POST /query HTTP/1.1\r\nHost: kvd\r\nContent-Type: application/json\r\n"
    b"Content-Length: 17\r\n\r\n",
    b"GET /health?x=1&y=%20 HTTP/1.1\r\nhost:kvd\r\nconnection: Keep-Alive\r\nempty:\r\n\r\n",
    b"POST /query HTTP/1.1\r\ncontent-length: 0\r\nx-trace-id: a b  \r\naccept: */*\r\n\r\n",
    HEAD,
)
PIECES = st.sampled_from(
    [b"\r\n", b"\n", b"\r", b"\0", b":", b" ", b"\t", b"?", b"#", b"%", b"\xff", b"9", b"-1", b"+",
     b"HTTP/1.0", b"expect: 100-continue\r\n", b"transfer-encoding: chunked\r\n", b"chunked",
     b"content-length: 5\r\n", b"Connection: close\r\n", b"upgrade: h2c\r\n", b" folded\r\n",
     b"content-type: text/plain\r\n", b"proxy-connection: close\r\n", b"HEAD ", b"http://kvd",
     b"host: a.b:1\r\n", b"host: [::1]\r\n", b"host:\r\n", b"host: a..b\r\n", b".", b"[", b"x" * 60,
     b"content-encoding: gzip\r\n", b"content-encoding: identity\r\n"]
)  # fmt: skip


@given(
    st.sampled_from(SEEDS),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 6), PIECES), max_size=3),
)
def test_a_plain_head_is_what_llhttp_makes_of_it(
    seed: bytes, edits: list[tuple[float, int, bytes]]
) -> None:
    """Each edit replaces some bytes of the head by a piece."""
    data = seed
    for where, length, piece in edits:
        at = int(where * len(data))
        data = data[:at] + piece + data[at + length :]
    found = plain_head(data)
    if found is None:
        return
    size, route, query, headers, length, json, keyed = found
    parser = HeadParser()
    parser.feed(data[:size])
    head = parser.finish(HttpLimits())
    assert b"%b %b" % (head.method.encode(), head.path) == route
    # llhttp keeps spaces at the end of a value, which RFC 9112 §5 removes.
    assert [(name, value.rstrip()) for name, value in head.headers] == headers
    assert (head.query, head.length) == (query, length)
    assert (head.http11, head.keep_alive, head.expects_continue) == (True, True, False)
    assert not head.encoded
    assert keyed == any(name == b"idempotency-key" for name, _ in headers)
    assert json == (dict(reversed(headers)).get(b"content-type") == b"application/json")


@given(st.text("aA0.-_:[]xf", max_size=70) | st.text(max_size=9))
def test_a_host_can_be_read_by_everybody(host: str) -> None:
    if names_host(host.encode()):
        host.partition(":")[0].encode("idna")
        split = urlsplit(f"http://{host}/")
        assert split.port is None or split.port < 100_000
        assert split.username is None and split.path == "/"


def test_codings_that_change_nothing_are_none() -> None:
    for value in (b"identity", b"Identity , identity", b"", b"gzip", b"identity, br", b"x"):
        parser = HeadParser()
        parser.feed(b"POST /query HTTP/1.1\r\ncontent-encoding: %b\r\n\r\n" % value)
        plain = value.strip().lower() in (b"identity", b"identity , identity", b"")
        assert parser.finish(HttpLimits()).encoded is not plain


def test_usual_heads_are_plain() -> None:
    assert [plain_head(head) is not None for head in SEEDS] == [True, True, True, False]
    assert plain_head(SEEDS[0] + b"body") == plain_head(SEEDS[0])
    for end in range(len(SEEDS[0])):
        assert plain_head(SEEDS[0][:end]) is None
    long = b"GET / HTTP/1.1\r\na: " + b"x" * 4096 + b"\r\n\r\n"
    many = b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 49 + b"\r\n"
    assert plain_head(long) is plain_head(many) is None
    unusual = (b"PUT /", b"GET *", b"GET  /", b"get /", b"GET http://kvd/", b"GET /a#b")
    assert [plain_head(start + b" HTTP/1.1\r\n\r\n") for start in unusual] == [None] * 6
