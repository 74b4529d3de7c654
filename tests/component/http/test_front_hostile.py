"""A hostile client loses its own connection and harms no other client."""

from __future__ import annotations

import contextlib
import json
import random

import pytest
import trio

from kvd.http.auth import AccessPolicy, Token
from kvd.http.routes import Scope
from tests.support.budget import scaled
from tests.support.descriptors import open_descriptors
from tests.support.serving import (
    BIG,
    HASTY,
    SOON,
    TEST_SECONDS,
    Client,
    Running,
    eventually,
    serving,
)

pytestmark = pytest.mark.usefixtures("layers")

MUTATED = {"plain": scaled(240), "tls": scaled(36)}  # a handshake takes milliseconds

GARBAGE = {
    "not http": b"hello\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "http/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "http/2": b"GET / HTTP/2.0\r\n\r\n",
    "http/0.9": b"GET /\r\n\r\n",
    "http/1.5": b"GET / HTTP/1.5\r\n\r\n",
    "lower-case method": b"get / HTTP/1.1\r\n\r\n",
    "question mark": b"GET ? HTTP/1.1\r\n\r\n",
    "no path": b"GET nope HTTP/1.1\r\n\r\n",
    "asterisk": b"OPTIONS * HTTP/1.1\r\n\r\n",
    "connect": b"CONNECT kvd:80 HTTP/1.1\r\n\r\n",
    "ftp": b"GET ftp://kvd/health HTTP/1.1\r\n\r\n",
    "non-ascii target": "GET /é HTTP/1.1\r\n\r\n".encode(),
    "control character in target": b"GET /\x01 HTTP/1.1\r\n\r\n",
    "bare LF": b"GET / HTTP/1.1\n\n",
    "bare LF between headers": b"GET / HTTP/1.1\r\na: b\n\r\n\r\n",
    "bare CR": b"GET / HTTP/1.1\ra: b\r\n\r\n",
    "folded header": b"GET / HTTP/1.1\r\na: b\r\n c\r\n\r\n",
    "space before colon": b"GET / HTTP/1.1\r\na : b\r\n\r\n",
    "no header name": b"GET / HTTP/1.1\r\n: b\r\n\r\n",
    "no colon": b"GET / HTTP/1.1\r\nab\r\n\r\n",
    "NUL in header": b"GET / HTTP/1.1\r\na: \0\r\n\r\n",
    "length and coding": b"POST /echo HTTP/1.1\r\ncontent-length: 5\r\n"
    b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "coding and length": b"POST /echo HTTP/1.1\r\ntransfer-encoding: chunked\r\n"
    b"content-length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": b"POST /echo HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
    "a length twice": b"POST /echo HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 1\r\n\r\na",
    "a list of lengths": b"POST /echo HTTP/1.1\r\ncontent-length: 1, 1\r\n\r\na",
    "signed length": b"POST /echo HTTP/1.1\r\ncontent-length: +1\r\n\r\na",
    "hexadecimal length": b"POST /echo HTTP/1.1\r\ncontent-length: 0x1\r\n\r\na",
    "no length": b"POST /echo HTTP/1.1\r\ncontent-length:\r\n\r\na",
    "endless length": b"POST /echo HTTP/1.1\r\ncontent-length: %d\r\n\r\na" % 10**30,
    "gzip": b"POST /echo HTTP/1.1\r\ntransfer-encoding: gzip\r\n\r\n",
    "gzip, chunked": b"POST /echo HTTP/1.1\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
    "chunked twice": b"POST /echo HTTP/1.1\r\ntransfer-encoding: chunked\r\n"
    b"transfer-encoding: chunked\r\n\r\n",
    "two hosts": b"GET /describe HTTP/1.1\r\nhost: kvd\r\nhost: kvd\r\n\r\n",
    "two empty hosts": b"GET /describe HTTP/1.1\r\nhost:\r\nhost:\r\n\r\n",
    "two hosts in 1.0": b"GET /describe HTTP/1.0\r\nhost: kvd\r\nhost: kvd\r\n\r\n",
    "chunked in 1.0": b"POST /echo HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
}

CHUNKED_HEAD = b"POST /echo HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
BAD_CHUNKS = {
    "no size": b"\r\n",
    "not hexadecimal": b"xyz\r\n",
    "signed": b"-1\r\n",
    "with 0x": b"0x1\r\n",
    "underscore": b"1_0\r\n",
    "huge": b"f" * 17 + b"\r\n",
    "longer than its size": b"1\r\nab\r\n",
    "endless line": b"1;" + b"x" * 5000,
    "LF in extension": b"1;\n\r\n",
    "CR in extension": b"1;\rx\r\n",
    "LF in trailer": b"0\r\na: \nb\r\n\r\n",
}
ALL_GARBAGE = GARBAGE | {f"chunk {name}": CHUNKED_HEAD + c for name, c in BAD_CHUNKS.items()}


async def test_garbage_is_refused_with_400_and_the_end_of_the_connection() -> None:
    async with serving() as running:
        for name, data in ALL_GARBAGE.items():
            async with running.client() as client:
                await client.send(data)
                reply = await client.read_reply()
                assert (name, reply.status, reply.persists()) == (name, 400, False)
                assert reply.headers["content-type"] == "application/json"
                assert json.loads(reply.body).keys() == {"error"}
                assert await client.read_to_end() == b""
        assert running.front.stats.malformed == len(ALL_GARBAGE)


@pytest.mark.parametrize("asked", ["http/2 preface", "http/2"])
async def test_who_begins_with_http_2_is_told_what_is_spoken(asked: str) -> None:
    async with serving() as running, running.client() as client:
        await client.send(GARBAGE[asked])
        assert b"HTTP/1.1 is spoken here" in (await client.read_reply()).body


NO_HOSTS = (
    *(b".", b"..", b"a..b", b".a", b"a." * 2 + b".", b"x" * 64, b"a." + b"x" * 64, b"ab." * 90),
    *(b":80", b"a:b", b"a:123456", b"a:80:80", b"a b", b"a,b", b"a/b", b"a@b", b"a%2e", b"*"),
    *(b"[]", b"[::1", b"[::1]x", b"[g::1]", b"[" + b":" * 46 + b"]", b"::1", b"\xfc", b"\xff.a"),
    *(b"xn--\x80", b"a\tb", b'"a"', b"a_b!", b"\xe2\x80\xae"),
)


@pytest.mark.parametrize("path", ["/health", "/app/health", "/nowhere"])
async def test_a_host_that_is_none_is_refused_at_the_head(path: str) -> None:
    """Otherwise code that reads it later may fail on it."""
    async with serving() as running:
        for host in NO_HOSTS:
            async with running.client() as client:
                await client.send(b"GET %b HTTP/1.1\r\nHost: %b\r\n\r\n" % (path.encode(), host))
                reply = await client.read_reply()
                assert (host, reply.status, reply.persists()) == (host, 400, False)
        assert running.front.stats.malformed == len(NO_HOSTS)


HOSTS = (b"", b"kvd", b"KVD.", b"a-b_c.d:80", b"127.0.0.1:8090", b"[::1]:1", b"[::ffff:1.2.3.4]",
         b"a:", b"x" * 63, b"xn--a", b"xn--zz--", b"-", b"_", b"0x7f.1")  # fmt: skip
NAMES = (  # headers that Quart, Werkzeug or the libraries below them might parse
    b"accept accept-charset accept-encoding accept-language cache-control content-disposition "
    b"content-encoding content-language content-md5 content-range content-type cookie date from "
    b"forwarded host- idempotency-key if-match if-modified-since if-none-match if-range pragma "
    b"if-unmodified-since max-forwards range referer remote-addr sec-websocket-key te traceparent "
    b"upgrade user-agent via x-forwarded-for x-forwarded-host x-forwarded-proto x-real-ip "
    b"x-http-method-override x-request-id access-control-request-method"
).split()
VALUES = (
    *(b"", b"a", b"=", b";", b'"', b",", b"%", b"\\", b"[", b"//[", b"W/", b"9" * 400, b"*;q=x"),
    *(b"a=b; c", b"bytes=0-", b"bytes=-", b"\xff\xfe", b"\xc3\xa9", b"=?utf-8?q?", b"Basic =="),
    *(b"multipart/form-data; boundary=", b"application/json; charset=nope", b"filename*=x''%ff"),
    *(b"Thu, 32 Foo 99999 99:99:99 GMT", b"Digest realm", b"text/plain; charset=\xff"),
)
TARGETS = (
    *(b"/", b"//", b"//[", b"/;", b"/%", b"/%00", b"/%ff", b"/?", b"/?a=%ff&&=;", b"/?%", b"/[::"),
    *(b"http://[/", b"http://a..b/", b"http://:x/", b"http://%/", b"/\xff", b"/a:b@c", b"/%2f%2e"),
)
TOKEN = Token("anybody", Scope.ANY, b"0123456789abcdef")  # its holder needs no host header


def _odd_head(chance: random.Random) -> bytes:
    """Returns a request that llhttp takes for well-formed, but that is odd."""
    target = b"/app/describe"
    if chance.random() < 0.3:
        target = chance.choice((b"", b"/app/describe", b"/app/named")) + chance.choice(TARGETS)
    headers = [b"authorization: Bearer " + TOKEN.secret, b"host: " + chance.choice(HOSTS)]
    headers += [b"%b: %b" % (n, chance.choice(VALUES)) for n in chance.choices(NAMES, k=3)]
    method = chance.choice((b"GET", b"POST", b"DELETE", b"PUT"))
    return b"%b %b HTTP/1.1\r\n%b\r\n\r\n" % (method, target, b"\r\n".join(headers))


async def test_no_head_makes_the_application_stumble(layers: str) -> None:
    """Whatever headers, URLs and queries contain, there is an answer and no traceback."""
    chance = random.Random(26)
    async with serving(policy=AccessPolicy((TOKEN,))) as running:
        for _ in range(MUTATED[layers] // 3):
            data = _odd_head(chance)
            async with running.client() as client:
                await client.send(data)
                assert (await client.read_reply()).status in (200, 400, 404, 405), data
        assert running.front.stats.handler_bugs == 0


async def test_garbage_may_end_in_any_way() -> None:
    async with serving() as running:
        await _check_alive(running)
        await running.until_empty()
        before = open_descriptors()
        for data in (*ALL_GARBAGE.values(), b"", b"GET", b"GET /health HTTP/1.1\r\n\r\n" * 30):
            for ending in ("close", "half-close", "reset", "reset at once"):
                async with running.client() as client:
                    await client.send(data)
                    await _end(client, ending)
        await _check_alive(running)
        await running.until_empty()
        assert open_descriptors() == before


async def _end(client: Client, ending: str) -> None:
    if ending == "half-close":
        await client.stream.send_eof()
        await client.read_to_end()
    elif ending == "reset":
        await trio.lowlevel.checkpoint()  # the server may have read some of it
        client.reset()
    elif ending == "reset at once":
        client.reset()


async def _check_alive(running: Running) -> None:
    async with running.client() as client:
        assert (await client.request("GET", "/health")).status == 200
        assert (await client.request("GET", "/app/health")).status == 200


HEADS = {
    "70 KB header": (b"GET / HTTP/1.1\r\na: " + b"x" * 70_000 + b"\r\n\r\n", 431),
    "an unfinished 20 KB header": (b"GET / HTTP/1.1\r\na: " + b"x" * 20_000, 431),
    "2,000 headers": (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 2000 + b"\r\n", 431),
    "101 headers": (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 101 + b"\r\n", 431),
    "100 headers": (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 100 + b"\r\n", 404),
    "16 KiB": (b"GET / HTTP/1.1\r\na: " + b"x" * (16384 - 23) + b"\r\n\r\n", 404),
    "16 KiB and a byte": (b"GET / HTTP/1.1\r\na: " + b"x" * (16384 - 22) + b"\r\n\r\n", 431),
    "8 KiB URL": (b"GET /" + b"x" * 8191 + b" HTTP/1.1\r\n\r\n", 404),
    "8 KiB and a byte URL": (b"GET /" + b"x" * 8192 + b" HTTP/1.1\r\n\r\n", 414),
}


@pytest.mark.parametrize("pieces", [1, 7])
async def test_a_head_over_a_limit_is_refused_and_the_limit_accepted(pieces: int) -> None:
    async with serving() as running:
        for name, (data, status) in HEADS.items():
            async with running.client() as client:
                size = len(data) // pieces + 1
                for start in range(0, len(data), size):
                    await client.send(data[start : start + size])
                assert (name, (await client.read_reply()).status) == (name, status)
        refused = sum(status != 404 for _, status in HEADS.values())
        assert running.front.stats.head_too_large == refused


async def test_a_slow_head_is_refused_at_its_deadline() -> None:
    async with serving() as running, running.client() as slow:
        await slow.request("GET", "/health")  # a handshake has the same deadline
        running.front.set_limits(HASTY)
        start = trio.current_time()  # the server may have the head before `send` returns
        await slow.send(b"GET /health HTTP/1.1\r\n")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_drip, slow)
            reply = await slow.read_reply()
            nursery.cancel_scope.cancel()
        assert (reply.status, reply.persists()) == (408, False)
        assert trio.current_time() - start >= SOON
        assert running.front.stats.head_timeouts == 1
        await _check_alive(running)


@pytest.mark.parametrize(("rest", "status"), [(b"", 408), (b"a: " + b"x" * 20_000, 431)])
async def test_a_head_request_is_refused_without_a_body_before_its_head_is_whole(
    rest: bytes, status: int
) -> None:
    async with serving() as running, running.client() as client:
        await client.request("GET", "/health")  # a handshake has the same deadline
        running.front.set_limits(HASTY)
        await client.send(b"HEAD /health HTTP/1.1\r\n" + rest)
        assert (await client.read_reply(bodiless=True)).status == status
        assert await client.read_to_end() == b""


async def _drip(client: Client) -> None:
    while True:
        await client.send(b"a: b\r\n")
        await trio.sleep(0.02)


@pytest.mark.parametrize("head", [b"content-length: 100\r\n", b"transfer-encoding: chunked\r\n"])
async def test_a_slow_body_is_refused_at_its_deadline(head: bytes) -> None:
    async with serving(body_s=SOON) as running, running.client() as slow:
        await slow.send(b"POST /echo HTTP/1.1\r\n" + head + b"\r\n1")
        reply = await slow.read_reply()
        assert (reply.status, reply.persists()) == (408, False)
        assert running.front.stats.body_timeouts == 1
        assert running.observed == [("POST", "/echo", 408)]


async def test_a_connection_that_says_nothing_is_closed_silently() -> None:
    async with serving() as running, running.client() as idle, running.client() as silent:
        await idle.request("GET", "/health")
        await silent.handshake()
        running.front.set_limits(HASTY)
        assert await silent.read_to_end() == b""
        assert running.front.stats.connections_open == 1  # a used connection may idle longer
        assert running.front.stats.head_timeouts == 1
        assert running.front.stats.idle_timeouts == 0


@pytest.mark.parametrize("path", ["/health", "/app/health"])
async def test_a_connection_that_says_nothing_more_is_closed_silently(path: str) -> None:
    async with serving(idle_s=SOON) as running, running.client() as idle:
        await idle.request("GET", path)
        assert await idle.read_to_end() == b""
        assert running.front.stats.idle_timeouts == 1


@pytest.mark.parametrize("path", ["/health", "/app/health"])
async def test_a_reset_between_two_requests_costs_nobody_an_answer(path: str) -> None:
    async with serving() as running:
        async with running.client() as client:
            await client.request("GET", path)
            client.reset()
            await running.until_empty()
        assert running.front.stats.client_gone == 0


@pytest.mark.parametrize("path", ["/big", "/app/big"])
async def test_a_client_that_does_not_read_is_cut_off(path: str) -> None:
    async with serving(send_s=SOON) as running, running.narrow_client() as deaf:
        await deaf.send(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        await running.until(send_timeouts=1)
        await running.until_empty()
        assert running.front.stats.client_gone == 1
        await _check_alive(running)


async def test_a_client_that_reads_slowly_is_served() -> None:
    deadline_s = 0.5
    async with serving(send_s=deadline_s) as running, running.narrow_client() as slow:
        await slow.send(b"GET /big HTTP/1.1\r\n\r\n")
        received, start = 0, trio.current_time()
        while trio.current_time() - start < 2 * deadline_s:
            received += len(await slow.stream.receive_some(32 * 1024))
            await trio.sleep(0.005)
        assert running.front.stats.send_timeouts == 0
        assert received < len(BIG)


async def test_an_asynchronous_handler_has_a_deadline() -> None:
    async with serving(handler_s=0.5) as running, running.client() as client:
        assert (await client.request("GET", "/slow?1")).body == b"late"
        reply = await client.request("GET", "/slow?60000")
        assert (reply.status, reply.persists()) == (503, False)
        assert running.front.stats.handler_timeouts == 1
        assert running.observed == [("GET", "/slow", 200), ("GET", "/slow", 503)]


async def test_clients_that_pipeline_and_leave_take_nothing_with_them() -> None:
    async with serving() as running:
        await _check_alive(running)
        await running.until_empty()
        before = open_descriptors()
        for number in range(30):
            async with running.client() as client:
                await client.send(b"GET /app/big HTTP/1.1\r\n\r\nGET /health HTTP/1.1\r\n\r\n" * 3)
                if number % 2:
                    client.reset()
        await running.until_empty()
        assert open_descriptors() == before
        await _check_alive(running)


async def test_a_refused_client_that_goes_on_sending_still_gets_its_answer() -> None:
    async with serving() as running, running.client() as client:
        body = b"x" * (20 * 1024 * 1024)
        head = b"POST /query HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_send_anyway, client, head + body)
            reply = await client.read_reply()
            assert reply.status == 413
            await running.until_empty()  # the server does not read on for ever either
            nursery.cancel_scope.cancel()


async def _send_anyway(client: Client, data: bytes) -> None:
    with contextlib.suppress(trio.BrokenResourceError):
        await client.send(data)


async def test_all_bodies_together_are_bounded() -> None:
    """The tasks of connections receive what has not come whole after a while, and count it."""
    size = 1_000_000
    async with (  # the refused client may take long to send the rest of its body
        serving(bodies_bytes=1_100_000, linger_s=TEST_SECONDS) as running,
        running.client() as first,
    ):
        head = (
            b"POST /query HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        )
        await first.send(head % (size + 1) + b"x" * size)
        await eventually(lambda: running.front._shared.body_bytes == size)
        async with running.client() as second:
            await second.send(head % (size + 1) + b"x" * size)
            reply = await second.read_reply()
            assert (reply.status, reply.persists()) == (503, False)
        assert running.front.stats.bodies_refused == 1
        await first.send(b"x")
        assert (await first.read_reply()).status == 200
        assert (await first.request("POST", "/query", b"x" * size)).status == 200


SEEDS = [
    b"GET /describe?a=b HTTP/1.1\r\nhost: kvd\r\naccept: */*\r\n\r\n",
    b"POST /echo HTTP/1.1\r\nhost: kvd\r\ncontent-type: application/json\r\n"
    b"content-length: 2\r\n\r\n{}",
    CHUNKED_HEAD + b"3\r\nabc\r\n0\r\n\r\n",
    b"POST /query HTTP/1.0\r\nexpect: 100-continue\r\nconnection: keep-alive\r\n"
    b"content-length: 3\r\n\r\nabc",
    b"GET /app/describe HTTP/1.1\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    b"connection: upgrade\r\n\r\n",
    b"HEAD http://[::1]/counted HTTP/1.1\r\n\r\n",
]


async def test_mutated_requests_never_hurt_the_server(layers: str) -> None:
    chance = random.Random(20)
    # Some mutated requests announce more than they send; the end of their stream ends those. Short
    # deadlines would end handshakes on a busy machine, too.
    async with serving() as running:
        await _check_alive(running)
        await running.until_empty()
        before = open_descriptors()
        limit = trio.CapacityLimiter(32)
        async with trio.open_nursery() as nursery:
            for _ in range(MUTATED[layers]):
                await limit.acquire_on_behalf_of(token := object())
                nursery.start_soon(_attack, running, _mutate(chance), limit, token)
        await running.until_empty()
        assert running.front.stats.handler_bugs == 0
        assert open_descriptors() == before
        await _check_alive(running)


def _mutate(chance: random.Random) -> bytes:
    data = bytearray(b"".join(chance.choices(SEEDS, k=chance.randint(1, 3))))
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data))
        piece = chance.choice((b"\r\n", b"\n", b"\0", b":", b" ", b"%", b"\xff", b"9", data[:40]))
        action = chance.randrange(4)
        if action == 0:
            data[at] = chance.randrange(256)
        elif action == 1:
            del data[at : at + chance.randint(1, 20)]
        else:
            data[at:at] = piece * chance.choice((1, 1, 2, 50))
        if not data:
            return b"\r\n"
    return bytes(data)


async def _attack(
    running: Running, data: bytes, limit: trio.CapacityLimiter, token: object
) -> None:
    try:
        async with running.client() as client:
            await client.send(data)
            await client.stream.send_eof()
            await client.read_to_end()
    except (trio.BrokenResourceError, OSError):
        pass  # the server may reset a connection whose bytes it has refused
    finally:
        limit.release_on_behalf_of(token)
