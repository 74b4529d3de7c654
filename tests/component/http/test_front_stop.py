"""A stop answers requests under way, and no client can delay it beyond the graceful deadline."""

from __future__ import annotations

import pytest
import trio

from kvd.http.relayed import RelayedRequest
from kvd.http.routes import Route, Scope
from tests.support.serving import PATIENT, TEST_SECONDS, Running, missing, serving

pytestmark = pytest.mark.usefixtures("layers")


NOT_WAITED_FOR_S = 2 * TEST_SECONDS  # a stop that waited for it would fail the test


async def _end(running: Running) -> None:
    running.stop.set()
    await running.ended.wait()


async def test_idle_connections_do_not_delay_a_stop() -> None:
    async with (
        serving(graceful_s=NOT_WAITED_FOR_S) as running,
        running.client() as fresh,
        running.client() as used,
    ):
        await used.request("GET", "/health")
        await used.request("GET", "/app/health")
        await running.until(connections_open=2)
        await _end(running)
        assert await fresh.read_to_end() == await used.read_to_end() == b""
        assert running.front.stats.cut_at_stop == 0


async def test_a_request_under_way_is_answered_and_its_connection_closed() -> None:
    async with (
        serving(graceful_s=NOT_WAITED_FOR_S) as running,
        running.client() as client,
    ):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_expect_late, client.request)
            await running.until(requests_app=1)
            await _end(running)
        assert await client.read_to_end() == b""
        with pytest.raises(OSError, match="all attempts to connect"):
            await trio.open_tcp_stream(*running.address)


async def _expect_late(request: object) -> None:
    reply = await request("GET", "/slow?100")  # type: ignore[operator]
    assert (reply.status, reply.body, reply.persists()) == (200, b"late", False)


async def test_a_request_that_is_still_coming_may_finish() -> None:
    async with serving() as running, running.client() as head, running.client() as body:
        await head.send(b"GET /describe HTTP/1.1\r\n")
        await body.send(b"POST /echo HTTP/1.1\r\ncontent-length: 2\r\n\r\n")
        await running.until(connections_open=2, requests=1)
        running.stop.set()
        await running.until_refusing()
        await head.send(b"\r\n")
        await body.send(b"{}")
        replies = [await head.read_reply(), await body.read_reply()]
        assert [reply.status for reply in replies] == [200, 415]
        assert not any(reply.persists() for reply in replies)
        await running.ended.wait()


async def test_who_has_just_connected_may_still_send_a_request() -> None:
    """If the sockets are passed on, the next process would not have this connection."""
    async with serving() as running, running.client() as client:
        await running.until(connections_open=1)
        running.stop.set()
        await running.until_refusing()
        reply = await client.request("GET", "/describe")
        assert (reply.status, reply.persists()) == (200, False)
        await running.ended.wait()
        assert running.front.stats.cut_at_stop == 0


async def test_a_request_that_had_arrived_is_answered() -> None:
    async with serving() as running, running.client() as client:
        await client.request("GET", "/health")
        await client.send(b"GET /describe HTTP/1.1\r\n\r\n")
        running.stop.set()  # before the front has read it
        assert (await client.read_reply()).status == 200
        assert await client.read_to_end() == b""


async def test_who_was_not_told_of_a_stop_may_still_send_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The head of a relayed answer may have gone to the client before the stop."""
    monkeypatch.setattr("kvd.http.connection.LAST_REQUEST_S", NOT_WAITED_FOR_S)
    goes_on = trio.Event()

    async def relays(request: RelayedRequest) -> bool:
        head, _, persists = request.answer_head(200, b"", 2)
        await request.send_piece(b"o", chunked=False, head=head)
        await goes_on.wait()
        await request.send_piece(b"k", chunked=False)
        return persists

    route = Route("POST", "/relayed", missing, hot=True, scope=Scope.READ, relays=relays)
    async with (
        serving(routes=(route,)) as running,
        running.client() as asks_again,
        running.client() as leaves,
    ):
        for client in (asks_again, leaves):
            await client.send(b"POST /relayed HTTP/1.1\r\ncontent-length: 0\r\n\r\n")
        await running.until(connections_waiting=2)
        running.stop.set()
        await running.until_refusing()
        goes_on.set()
        for client in (asks_again, leaves):
            reply = await client.read_reply()
            assert (reply.status, reply.body, reply.persists()) == (200, b"ok", True)
        reply = await asks_again.request("POST", "/relayed")
        assert (reply.status, reply.body, reply.persists()) == (200, b"ok", False)
        assert await asks_again.read_to_end() == b""
        await leaves.stream.send_eof()
        await running.ended.wait()
        assert running.front.stats.cut_at_stop == 0


@pytest.mark.parametrize("path", ["/big", "/app/big", "/slow?60000"])
async def test_what_does_not_end_is_cut_off_at_the_graceful_deadline(path: str) -> None:
    async with serving() as running, running.narrow_client() as deaf:
        await deaf.send(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        await running.until(requests=1)
        start = trio.current_time()
        await _end(running)
        assert trio.current_time() - start >= PATIENT.graceful_s
        assert running.front.stats.cut_at_stop == 1


async def test_a_cancelled_server_ends_at_once() -> None:
    async with (
        serving(graceful_s=NOT_WAITED_FOR_S) as running,
        running.client() as client,
        running.client() as busy,
    ):
        await client.request("GET", "/health")
        await busy.send(b"GET /slow?60000 HTTP/1.1\r\n\r\n")
        await running.until(requests_app=1)
        running.scope.cancel()
        await running.ended.wait()
