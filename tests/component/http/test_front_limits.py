"""A bound that is reached refuses and counts what exceeds it, and lifts by itself."""

from __future__ import annotations

import resource
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import trio

from kvd.http.auth import AccessPolicy, Token
from kvd.http.messages import Request, Response
from kvd.http.routes import Route, Scope
from kvd.http.transport import ConnectionPhase
from tests.support.descriptors import lowest_free_descriptor
from tests.support.little_memory import little_memory
from tests.support.loglines import logged
from tests.support.serving import (
    BIG,
    ROUTES,
    TEST_SECONDS,
    Client,
    Running,
    echo,
    eventually,
    serving,
)

BODY_TO_COME = (
    b"POST /echo HTTP/1.1\r\nhost: kvd\r\ncontent-type: application/json\r\n"
    b"content-length: 9\r\n\r\n"
)


async def test_connections_over_the_bound_are_answered_503() -> None:
    """They are refused while all other connections have a request under way."""
    async with serving(connections=200) as running:
        with ExitStack() as opened:
            sockets = [opened.enter_context(_connect(running)) for _ in range(200)]
            for sock in sockets:
                sock.sendall(BODY_TO_COME)
            await running.until(requests=200)
            for sock in [opened.enter_context(_connect(running)) for _ in range(70)]:
                client = _client(sock)
                reply = await client.read_reply()
                assert (reply.status, reply.persists()) == (503, False)
                assert reply.body == b'{"error": "too many connections"}'
            stats = running.front.stats
            assert (stats.connections_refused, stats.connections_displaced) == (70, 0)
            for sock in sockets:
                sock.sendall(b"x" * 9)
                assert (await _client(sock).read_reply()).body == b"x" * 9
        await running.until_empty()
        async with running.client() as client:
            assert (await client.request("GET", "/health")).status == 200


def _timer_of_peer(sock: socket.socket) -> str:
    """Returns the kind of the timer that the kernel keeps for the other end of a connection."""
    ports = [port for _, port in (sock.getpeername(), sock.getsockname())]
    rows = map(str.split, Path("/proc/net/tcp").read_text().splitlines()[1:])
    [timer] = [
        row[5].partition(":")[0]
        for row in rows
        if [int(each.partition(":")[2], 16) for each in row[1:3]] == ports
    ]
    return timer


async def test_clients_whose_hosts_are_gone_are_found() -> None:
    """The kernel probes a silent connection: otherwise its request would run to its end."""
    keepalive = "02"  # the timer that a connection waits for
    async with serving() as running:
        with _connect(running) as sock:
            sock.sendall(BODY_TO_COME)
            await running.until(requests=1)
            assert _timer_of_peer(sock) == keepalive


async def test_who_is_missed_least_makes_way(layers: str) -> None:
    """First strangers between requests go, then those without any, then known clients between.

    Among equals the oldest goes first.
    """
    open_route = Route("GET", "/open", echo, hot=True, scope=Scope.OPEN)
    routes = (*ROUTES, open_route)
    async with (
        serving(routes=routes, connections=8) as running,
        AsyncExitStack() as opened,
    ):

        async def come(ask: str = "") -> Client:
            client = await opened.enter_async_context(running.client())
            if ask:
                assert (await client.request("GET", ask)).status == 200
            elif layers == "tls":
                await client.send(b"")  # shakes hands
            return client

        stats, total = running.front.stats, 0

        async def expect(gone: Client) -> None:
            """Connects one more client with a request under way, for which `gone` must go."""
            nonlocal total
            busy = await come()
            await busy.send(BODY_TO_COME)
            total += 1
            await running.until(connections_displaced=total)
            assert await gone.read_to_end() == b""

        known = [await come("/describe"), await come("/app/describe")]
        new = [await come(), await come()]
        begun = await come()
        await begun.send(b"GET /describe HTTP/1.1\r\n")
        await eventually(lambda: _phases(running)[ConnectionPhase.HEAD] == 1)
        unknown = [await come("/open"), await come("/open"), await come("/open")]
        for gone in (*unknown, *new, begun, *known):
            await expect(gone)
        assert (stats.connections_open, stats.connections_displaced) == (8, 8)
        async with running.client() as late:
            assert await late.read_to_end() != b"" or layers == "tls"  # refused
        assert stats.connections_refused == 1
        assert stats.idle_timeouts == stats.head_timeouts == 0


async def test_who_was_sent_an_answer_in_parts_is_idle_afterwards(layers: str) -> None:
    """It makes way for others, and does not delay a stop."""
    large = Route(
        "GET", "/large", lambda _: Response(200, bytes(32 << 20)), hot=True, scope=Scope.READ
    )
    async with (
        serving(routes=(*ROUTES, large), connections=1) as running,
        running.client() as client,
    ):
        reply = await client.request("GET", "/large")
        assert len(reply.body) == 32 << 20
        await eventually(lambda: _phases(running)[ConnectionPhase.IDLE] == 1)
        async with running.client() as other:
            await other.send(BODY_TO_COME)
            await running.until(connections_displaced=1)
        assert await client.read_to_end() == b""


def _phases(running: Running) -> Counter[ConnectionPhase]:
    return Counter(connection.phase for connection in running.front._running)


async def test_a_crowd_of_strangers_shuts_nobody_out(layers: str) -> None:
    """Strangers take all connections, whatever they have sent, and more of them keep coming."""
    openings = (
        b"",
        b"GET /open HTTP/1.1\r\n\r\n",
        b"GET",
        b"POST /echo HTTP/1.1\r\ncontent-length: 9\r\n\r\n",  # without a token
        b"GET /open HTTP/1.1\r\ncontent-length: 9\r\n\r\n",
    )
    open_route = Route("GET", "/open", echo, hot=True, scope=Scope.OPEN)
    holder = {"authorization": "Bearer 0123456789abcdef"}
    policy = AccessPolicy((Token("t", Scope.ANY, b"0123456789abcdef"),))
    async with (
        serving(routes=(*ROUTES, open_route), policy=policy, connections=20) as running,
        AsyncExitStack() as opened,
        running.client() as operator,
    ):
        assert (await operator.request("GET", "/describe", **holder)).status == 200
        for number in range(60):
            client = await opened.enter_async_context(running.client())
            await client.send(openings[number % len(openings)])
            await running.until(connections_total=2 + number)
            if number % 10 == 9:
                assert (await operator.request("GET", "/app/describe", **holder)).status == 200
                async with running.client() as late:
                    assert (await late.request("GET", "/describe", **holder)).status == 200
                    running.front.stats.connections_total -= 1  # this one is not of the crowd
        assert running.front.stats.connections_refused == 0


async def test_strangers_who_came_later_still_go_before_anybody_known() -> None:
    """All strangers found by the last search for them have left by themselves meanwhile."""
    holder = {"authorization": "Bearer 0123456789abcdef"}
    policy = AccessPolicy((Token("t", Scope.ANY, b"0123456789abcdef"),))
    async with (
        serving(policy=policy, connections=4) as running,
        running.client() as operator,
        AsyncExitStack() as later,
    ):
        stats = running.front.stats
        assert (await operator.request("GET", "/describe", **holder)).status == 200

        async def come(opened: AsyncExitStack) -> None:
            total = stats.connections_total + 1
            await opened.enter_async_context(running.client())
            await running.until(connections_total=total)

        async with AsyncExitStack() as first:
            for _ in range(3):
                await come(first)
            await come(later)
            assert stats.connections_displaced == 1
        await eventually(lambda: stats.connections_open == 2)
        for _ in range(3):
            await come(later)
        assert stats.connections_displaced == 2
        assert (await operator.request("GET", "/describe", **holder)).status == 200


async def test_those_who_wait_take_nobody_s_place() -> None:
    """Waiting clients must not use up the connections that could end the wait; later they count."""
    released = trio.Event()

    async def hold(request: Request) -> Response:
        await released.wait()
        return Response(200, b"late", b"text/plain")

    routes = (*ROUTES, Route("GET", "/hold", hold, hot=True))
    async with serving(routes=routes, connections=10) as running, AsyncExitStack() as opened:
        stats = running.front.stats
        newcomers = []
        for number in range(1, 41):
            newcomers.append(await opened.enter_async_context(running.client()))
            await newcomers[-1].send(b"GET /hold HTTP/1.1\r\nhost: kvd\r\n\r\n")
            await eventually(lambda number=number: stats.connections_waiting == number)
        for path in ("/describe", "/app/describe"):
            async with running.client() as operator:
                assert (await operator.request("GET", path)).status == 200
        released.set()
        for client in newcomers:
            assert (await client.read_reply()).body == b"late"
        assert stats.connections_waiting == stats.connections_refused == 0
        async with running.client() as client:  # one that has waited makes way
            assert (await client.request("GET", "/describe")).status == 200
        assert (stats.connections_refused, stats.connections_displaced) == (0, 1)


def _client(sock: socket.socket) -> Client:
    return Client(trio.SocketStream(trio.socket.from_stdlib_socket(sock)))


def _connect(running: Running) -> socket.socket:
    """Connects through the backlog alone, without letting the server run."""
    return socket.create_connection(running.address)


@contextmanager
def _descriptors(more: int) -> Iterator[None]:
    """Lets this process, in which the server runs, open so many more descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free_descriptor() + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_shortage_of_descriptors_pauses_accepting() -> None:
    """Clients whose answers are under way do not make way."""
    async with serving() as running, AsyncExitStack() as opened:
        lines = opened.enter_context(logged())
        early = [await opened.enter_async_context(running.narrow_client()) for _ in range(3)]
        for client in early:
            await client.send(b"GET /big HTTP/1.1\r\nhost: kvd\r\n\r\n")
        await running.until(requests=3)
        sockets = [opened.enter_context(_connect(running)) for _ in range(40)]
        with _descriptors(0):
            await running.until(accept_pauses=2)
            assert lines().count("event=accept_paused") == 1
            assert running.front.stats.connections_open == 3
            for client in early:
                assert (await client.read_reply()).body == BIG
            await running.until(connections_total=43)  # now they make way
        last = _client(sockets[-1])
        assert (await last.request("GET", "/health")).status == 200


async def test_idle_strangers_make_way_in_a_shortage_of_descriptors() -> None:
    async with serving() as running, running.client() as known, AsyncExitStack() as opened:
        assert (await known.request("GET", "/describe")).status == 200
        for _ in range(40):
            opened.enter_context(_connect(running))
        newcomer = _client(opened.enter_context(_connect(running)))
        with _descriptors(10):
            assert (await newcomer.request("GET", "/describe")).status == 200
            assert (await known.request("GET", "/describe")).status == 200
        assert running.front.stats.connections_displaced >= 30


NEEDS_NONE = ("GET /describe", "GET /app/describe", "DELETE /gone/a", "POST /nowhere", "PUT /echo")


async def test_a_body_without_memory_for_it_is_refused() -> None:
    size = 6 * 2**20
    head = b"POST /query HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    async with serving(linger_s=TEST_SECONDS) as running, running.client() as client:
        request = head % size + b"x" * size

        async def send() -> None:
            with suppress(trio.BrokenResourceError):  # it may not be read to its end
                await client.send(request)

        async with trio.open_nursery() as nursery:
            with little_memory(2**20):
                nursery.start_soon(send)
                reply = await client.read_reply()
            assert (reply.status, reply.persists()) == (503, False)
            stats = running.front.stats
            assert (stats.bodies_refused, stats.bugs) == (1, 0)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("what", NEEDS_NONE)
async def test_a_body_that_nobody_needs_is_not_waited_for(what: str, layers: str) -> None:
    """Nor is it kept: the answer comes before the body, and the connection ends with it."""
    async with serving() as running:
        for length in ("content-length: 100000000", "transfer-encoding: chunked"):
            for expecting in ("", "expect: 100-continue\r\n"):
                async with running.client() as client:
                    head = f"{what} HTTP/1.1\r\nhost: kvd\r\n{length}\r\n{expecting}\r\n"
                    await client.send(head.encode())
                    reply = await client.read_reply()
                    assert reply.status in (200, 404, 405) and not reply.persists()
                    await client.send(b"x" * 1000)  # the server reads and drops these bytes
                    await client.stream.send_eof()
                    assert await client.read_to_end() == b""
        assert running.front._shared.body_bytes == 0


async def test_a_client_that_goes_on_with_such_a_body_is_lingered_for_once() -> None:
    head = b"GET /describe HTTP/1.1\r\nhost: kvd\r\ncontent-length: 100000000\r\n\r\n"
    async with serving(linger_s=0.1) as running, running.client() as client:
        await client.send(head)
        await client.read_reply()
        with suppress(trio.BrokenResourceError):
            while True:
                await client.send(b"x")
                await trio.lowlevel.checkpoint()
        await running.until_empty()
        assert running.front.stats.linger_timeouts == 1


@pytest.mark.parametrize("what", NEEDS_NONE)
async def test_a_body_that_nobody_needs_and_is_there_is_passed_over(what: str) -> None:
    async with serving() as running, running.client() as client:
        for _ in range(3):
            head = f"{what} HTTP/1.1\r\nhost: kvd\r\ncontent-length: 2\r\n\r\n"
            await client.send(head.encode() + b"{}GET /describe HTTP/1.1\r\nhost: kvd\r\n\r\n")
            reply = await client.read_reply()
            assert reply.status in (200, 404, 405) and reply.persists()
            assert reply.status != 200 or reply.body[-2:] in (b" 0", b"a")  # body bytes it got
            assert (await client.read_reply()).body == b"GET /describe b'' 0"


@pytest.mark.parametrize("path", ["/query", "/app/query"])
async def test_a_compressed_body_is_not_read(path: str, layers: str) -> None:
    async with serving() as running:
        async with running.client() as client:
            assert (
                await client.request("POST", path, b"{}", content_encoding="identity")
            ).persists()
            head = f"POST {path} HTTP/1.1\r\nhost: kvd\r\ncontent-length: 5\r\n"
            await client.send(f"{head}content-encoding: gzip\r\n\r\n".encode())
            reply = await client.read_reply()
            assert (reply.status, reply.persists()) == (415, False)
            assert reply.headers["accept-encoding"] == "identity"
            assert reply.body == b'{"error": "the body must not be compressed"}'
        assert running.front.stats.encoded == 1
