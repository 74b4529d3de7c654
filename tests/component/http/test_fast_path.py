"""The fast path under a front: however requests come, each is answered once and in order."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from math import inf
from time import perf_counter

import pytest
import trio

from kvd.http.connection import Connection
from kvd.http.messages import Request, Response
from kvd.http.routes import Route, Scope
from kvd.http.transport import ConnectionPhase
from tests.support.serving import ROUTES, TEST_SECONDS, Client, Running, eventually, serving

# Bytes that the fast path receives at once, and of all arriving requests (kvd/http/fast_path.pyx).
LANE_BUFFER = 2 * 1024 * 1024
ARRIVING = 32 * 1024 * 1024


def request(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: kvd\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def test_requests_in_any_pieces_are_answered_in_order() -> None:
    bodies = [b"%03d" % number for number in range(40)]
    data = b"".join(request("/echo", body) for body in bodies)
    async with serving() as running, running.client() as client:
        for size in (1, 7, 83, 84, 85, 600, len(data)):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_send_in_pieces, client, data, size)
                for body in bodies:
                    assert (await client.read_reply()).body == body
        assert running.front.stats.requests == 7 * len(bodies)


async def _send_in_pieces(client: Client, data: bytes, size: int) -> None:
    for at in range(0, len(data), size):
        await client.send(data[at : at + size])
        await trio.lowlevel.checkpoint()


async def test_requests_as_long_as_the_buffer_hide_nothing_behind_them() -> None:
    """An edge-triggered epoll set does not report bytes that came before the last receive."""
    for excess in (-1, 0, 1):
        head = len(request("/query", b"")) + len(str(LANE_BUFFER)) - 1
        long = request("/query", b"x" * (LANE_BUFFER - head + excess))
        assert len(long) == LANE_BUFFER + excess
        async with serving() as running, running.client() as client:
            await client.send(long + request("/echo", b"abc"))
            assert (await client.read_reply()).status == 200
            assert (await client.read_reply()).body == b"abc"


@asynccontextmanager
async def _serving_without_sweeps() -> AsyncIterator[Running]:
    """Runs a front whose requests may take any time to arrive; one sweep alone does nothing."""
    async with serving() as running:
        running.front._shared.tick = inf
        yield running


def _only_connection(running: Running) -> Connection:
    [connection] = running.front._running
    return connection


async def test_a_request_that_arrives_in_two_parts_wakes_no_task() -> None:
    async with _serving_without_sweeps() as running, running.client() as client:
        assert (await client.request("POST", "/echo", b"abc")).body == b"abc"
        connection = _only_connection(running)
        data = request("/echo", b"abcdef") + request("/echo", b"ghi")
        for size in range(1, len(request("/echo", b"abcdef"))):
            with_head = data.find(b"\r\n\r\n") + 4 <= size
            await client.send(data[:size])
            await eventually(lambda kept=with_head: _begun(connection) == (kept, not kept))
            await client.send(data[size:])
            assert (await client.read_reply()).body == b"abcdef"
            assert (await client.read_reply()).body == b"ghi"
            await eventually(lambda: _begun(connection) == (False, False))


def _begun(connection: Connection) -> tuple[bool, bool]:
    """Returns whether the fast path, and whether the task, has the beginning of a request."""
    return connection._is_arriving(), connection.phase is ConnectionPhase.HEAD


async def test_a_slow_request_goes_on_in_its_task() -> None:
    data = request("/echo", b"abcdef")
    async with _serving_without_sweeps() as running, running.client() as client:
        await client.send(data[:-3])
        await eventually(lambda: _only_connection(running)._is_arriving())
        running.front._tick()
        running.front._tick()
        await eventually(lambda: _only_connection(running).phase is ConnectionPhase.BODY)
        await client.send(data[-3:])
        assert (await client.read_reply()).body == b"abcdef"


async def test_a_client_that_leaves_an_arriving_request_is_counted() -> None:
    async with _serving_without_sweeps() as running:
        async with running.client() as client:
            await client.send(request("/echo", b"abcdef")[:-3])
            await eventually(lambda: _only_connection(running)._is_arriving())
        await running.until(client_gone=1)


async def test_an_arriving_request_is_answered_at_a_stop() -> None:
    data = request("/echo", b"abcdef")
    async with _serving_without_sweeps() as running, running.client() as client:
        assert (await client.request("POST", "/echo", b"abc")).status == 200
        await client.send(data[:-3])
        await eventually(lambda: _only_connection(running)._is_arriving())
        running.stop.set()
        await eventually(lambda: running.front._shared.stopping)
        await client.send(data[-3:])
        reply = await client.read_reply()
        assert (reply.body, reply.persists()) == (b"abcdef", False)


async def test_requests_that_arrive_beyond_the_bound_go_to_their_tasks() -> None:
    data = request("/query", b"x" * (LANE_BUFFER - 1024))
    fitting = ARRIVING // len(data)
    async with _serving_without_sweeps() as running, AsyncExitStack() as opened:
        clients = [await opened.enter_async_context(running.client()) for _ in range(fitting + 2)]
        for client in clients:
            await client.send(data[:200])

        def begun() -> Counter[tuple[bool, bool]]:
            return Counter(
                (each._is_arriving(), each.phase is ConnectionPhase.BODY)
                for each in running.front._running
            )

        await eventually(lambda: begun() == {(True, False): fitting, (False, True): 2})
        for client in clients:
            await client.send(data[200:])
            assert (await client.read_reply()).status == 200


async def test_the_last_request_before_the_end_is_answered() -> None:
    async with serving() as running:
        async with running.client() as client:
            await client.send(request("/echo", b"abc"))
            await client.stream.send_eof()
            assert (await client.read_reply()).body == b"abc"
            assert await client.read_to_end() == b""
        assert running.front.stats.client_gone == 0


async def test_a_half_closed_connection_ends_after_its_answer() -> None:
    """The request and the end of the stream may come in one event, on a parked connection, too."""
    async with serving() as running:
        for _ in range(20):
            async with running.client() as client:
                assert (await client.request("POST", "/echo", b"abc")).status == 200
                await client.send(request("/echo", b"abc"))
                await client.stream.send_eof()
                assert (await client.read_reply()).body == b"abc"
                with trio.fail_after(TEST_SECONDS):
                    assert await client.read_to_end() == b""


async def test_urgent_data_hide_nothing_behind_them() -> None:
    """A receive stops in front of urgent data, although more has come."""
    async with serving() as running, running.client() as client:
        assert (await client.request("POST", "/echo", b"first")).body == b"first"
        with socket.socket(fileno=os.dup(client.stream.socket.fileno())) as sock:
            sock.send(request("/echo", b"abc"))
            sock.send(b"!", socket.MSG_OOB)
            sock.send(request("/echo", b"def"))
        with trio.fail_after(TEST_SECONDS):
            assert (await client.read_reply()).body == b"abc"
            assert (await client.read_reply()).body == b"def"


async def test_busy_connections_leave_room_for_others() -> None:
    """Sixteen clients send requests without a pause, and one asks for a slower route."""
    async with serving() as running, trio.open_nursery() as nursery:
        for _ in range(16):
            nursery.start_soon(_ask_for_ever, running)
        async with running.client() as client:
            for _ in range(5):
                assert (await client.request("GET", "/app/describe")).status == 200
        nursery.cancel_scope.cancel()


async def test_long_requests_of_many_connections_let_other_tasks_run() -> None:
    marks: list[str] = []

    def think(_: Request) -> Response:
        end = perf_counter() + 0.001
        while perf_counter() < end:
            pass
        marks.append("answer")
        return Response(200, b"{}")

    async def mark_passes() -> None:
        while True:
            marks.append("pass")
            await trio.lowlevel.checkpoint()

    long = Route("GET", "/long", think, hot=True, scope=Scope.READ)
    async with (
        serving(routes=(long,)) as running,
        AsyncExitStack() as opened,
        trio.open_nursery() as nursery,
    ):
        clients = [await opened.enter_async_context(running.client()) for _ in range(16)]
        for client in clients:
            assert (await client.request("GET", "/long")).status == 200
        nursery.start_soon(mark_passes)
        marks.clear()
        for client in clients:  # at once, so that the set reports all of them together
            os.write(client.stream.socket.fileno(), b"GET /long HTTP/1.1\r\nhost: kvd\r\n\r\n")
        for client in clients:
            assert (await client.read_reply()).status == 200
        nursery.cancel_scope.cancel()
    assert "answer answer answer" not in " ".join(marks)


@pytest.mark.parametrize("seconds", [0.0, 0.001])
async def test_clients_that_ask_again_at_once_take_turns(seconds: float) -> None:
    """No connection is served again before all others that have asked, however long it takes."""
    served: list[int] = []
    clients: list[Client] = []

    def ask_again(request: Request) -> Response:
        end = perf_counter() + seconds
        while perf_counter() < end:
            pass
        served.append(int(request.body))
        if len(served) < 80:
            os.write(clients[served[-1]].stream.socket.fileno(), request_of(served[-1]))
        return Response(200, b"{}")

    def request_of(number: int) -> bytes:
        return request("/again", b"%d" % number)

    again = Route("POST", "/again", ask_again, hot=True, scope=Scope.READ)
    async with serving(routes=(again, *ROUTES)) as running, AsyncExitStack() as opened:
        for number in range(8):
            clients.append(await opened.enter_async_context(running.client()))
            await clients[-1].send(request_of(number)[:-1])
        await eventually(lambda: all(each._is_arriving() for each in running.front._running))
        for number, client in enumerate(clients):  # the set reports all of them together
            os.write(client.stream.socket.fileno(), request_of(number)[-1:])
        await eventually(lambda: len(served) >= 80)
        turns = Counter(served)
        assert len(turns) == 8 and max(turns.values()) - min(turns.values()) <= 2, turns


async def _ask_for_ever(running: object) -> None:
    async with running.client() as client:  # type: ignore[attr-defined]
        while True:
            assert (await client.request("POST", "/echo", b"abc")).body == b"abc"
