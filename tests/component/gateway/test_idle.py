"""A request that comes at the instant at which its connection was to end is answered."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from math import inf

import pytest
import trio

from examples.engine.options import EngineOptions
from kvd.gateway.dns_names import Wanted
from kvd.gateway.stats import Ended
from kvd.http.connection import Connection
from tests.support.gateways import CHAT, engines
from tests.support.inner_gateways import InnerGateway, inner_gateway
from tests.support.zmtp_fakes import NOT_MY_FAULT_S

BODY = b'{"model":"demo","max_tokens":2,"messages":[{"role":"user","content":"a"}]}'
STREAMED = BODY.replace(b"{", b'{"stream":true,', 1)
LINES = b"host: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
ASKED, ASKED_STREAMED = (
    b"POST %b HTTP/1.1\r\n" % CHAT.encode() + LINES % len(body) + body for body in (BODY, STREAMED)
)


async def answer(stream: trio.SocketStream) -> bytes:
    """Returns the status line of the next answer, nothing if the connection has ended."""
    data = b""
    with trio.fail_after(NOT_MY_FAULT_S):
        while piece := await stream.receive_some():
            data += piece
            head, _, body = data.partition(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            if length is not None and len(body) == int(length[1]):
                return head.partition(b"\r\n")[0]
    return b""


def idle_for_long(inner: InnerGateway, connection: Connection) -> None:
    connection.since = -inf
    connection.end_if_idle_for_long()


def displaced(inner: InnerGateway, connection: Connection) -> None:
    inner.running.front._make_room()


async def test_a_first_request_as_another_connection_comes() -> None:
    """Its connection is the only one that could make room, and has asked nothing before."""
    options = EngineOptions(events=False)
    async with engines(options) as (engine,), inner_gateway(Wanted(engine.url)) as inner:
        await inner.until_serving(engine.url)
        async with await trio.open_tcp_stream(*inner.running.address) as stream:
            await inner.running.until(connections_open=1)
            os.write(stream.socket.fileno(), ASKED)  # the gateway does not run meanwhile
            (connection,) = inner.running.front._running
            displaced(inner, connection)
            assert await answer(stream) == b"HTTP/1.1 200 OK"


@pytest.mark.parametrize("end", [idle_for_long, displaced])
async def test_a_request_at_the_last_instant(
    end: Callable[[InnerGateway, Connection], None],
) -> None:
    options = EngineOptions(events=False)
    async with engines(options) as (engine,), inner_gateway(Wanted(engine.url)) as inner:
        await inner.until_serving(engine.url)
        async with await trio.open_tcp_stream(*inner.running.address) as stream:
            await stream.send_all(ASKED)
            assert await answer(stream) == b"HTTP/1.1 200 OK"
            (connection,) = inner.running.front._running
            os.write(stream.socket.fileno(), ASKED)  # the gateway does not run meanwhile
            end(inner, connection)
            assert await answer(stream) == b"HTTP/1.1 200 OK"
            end(inner, connection)
            assert await answer(stream) == b""


async def test_a_request_just_after_the_last_look_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that stops has looked for it, and ends the connection without beginning it."""
    looks, found = Connection._unread, list[bool]()

    def looks_too_early(self: Connection) -> bool:
        found.append(looks(self))
        if found == [False, False]:  # before the time for a request, and after it
            os.write(stream.socket.fileno(), ASKED)
        return found[-1]

    monkeypatch.setattr("kvd.http.connection.LAST_REQUEST_S", 0)
    options = EngineOptions(events=False)
    async with engines(options) as (engine,), inner_gateway(Wanted(engine.url)) as inner:
        await inner.until_serving(engine.url)
        async with await trio.open_tcp_stream(*inner.running.address) as stream:
            await stream.send_all(ASKED_STREAMED)
            data = bytes(await stream.receive_some())  # its head announces no end
            (connection,) = inner.running.front._running
            connection.shared.stopping = True
            monkeypatch.setattr(Connection, "_unread", looks_too_early)
            with trio.fail_after(NOT_MY_FAULT_S), suppress(trio.BrokenResourceError):
                while piece := await stream.receive_some():
                    data += piece
            assert data.count(b"HTTP/1.1 ") == data.count(b"[DONE]") == 1
            assert found[:2] == [False, False] and engine.server.requests == 1
            assert inner.stats.ended == {Ended.COMPLETE: 1}
