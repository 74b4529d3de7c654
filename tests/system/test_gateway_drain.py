"""SIGTERM at a gateway: idle connections end at once, others after their answers."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import trio

from examples.engine.options import EngineOptions
from tests.support.gateways import (
    CHAT,
    engines,
    gateway_of,
    outcome,
    scripted_engine,
    wait_metric,
)
from tests.support.processes import Server
from tests.support.zmtp_fakes import NOT_MY_FAULT_S

Start = Callable[..., Server]
IDLE, STREAMS = 32, 8
LAST = b"data: [DONE]\n\n\r\n0\r\n\r\n"
ASKED = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def idle_connection(port: int) -> trio.SocketStream:
    """Returns a connection that has been answered once and stays open."""
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    await stream.send_all(ASKED)
    received = b""
    while not received.endswith(b"\r\n\r\n"):
        received += await stream.receive_some(4096)
    assert received.startswith(b"HTTP/1.1 200 ")
    return stream


@pytest.mark.parametrize(("ends", "came"), [("by itself", "whole"), ("by its engine", "cut")])
async def test_idle_connections_end_at_once_and_streams_with_their_answers(
    kvd_process: Start, ends: str, came: str
) -> None:
    flags = ("--http-graceful-s", str(10 * NOT_MY_FAULT_S))
    step_s = 0.02 if ends == "by itself" else 1e6
    met: Counter[str] = Counter()
    started: list[Server] = []

    def start(*given: str, face: str) -> Server:
        started.append(kvd_process(*given, face=face))
        return started[0]

    async with (
        engines(EngineOptions(step_s=step_s)) as (engine,),
        gateway_of(start, [engine.url], flags) as client,
    ):
        (server,) = started
        idle = [await idle_connection(server.port) for _ in range(IDLE)]

        async def ask(number: int) -> None:
            answered = await client.chat(f"{number}", stream=True, max_tokens=32)
            met[outcome(answered, stream=True)] += 1
            assert (came == "cut") == (b"upstream_failed" in answered.body)

        async with trio.open_nursery() as nursery:
            for number in range(STREAMS):
                nursery.start_soon(ask, number)
            await wait_metric(client, "kvd_gateway_running_requests", STREAMS)
            server.process.send_signal(signal.SIGTERM)
            with trio.fail_after(NOT_MY_FAULT_S):
                for each in idle:
                    assert await each.receive_some(1) == b""
                    await each.aclose()
            if ends == "by its engine":
                engine.end()
        assert met == {came: STREAMS}
        assert await trio.to_thread.run_sync(partial(server.process.wait, NOT_MY_FAULT_S)) == 0


@pytest.mark.parametrize("together", [False, True])
async def test_a_request_that_has_come_is_answered(kvd_process: Start, together: bool) -> None:
    started: list[Server] = []
    goes_on = trio.Event()

    def start(*given: str, face: str) -> Server:
        started.append(kvd_process(*given, face=face))
        return started[0]

    async def script(stream: trio.SocketStream) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
        await stream.send_all(head + b"data: 1\n\n")
        await goes_on.wait()
        await stream.send_all(b"data: [DONE]\n\n")

    body = b'{"model":"demo","stream":true}'
    request = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b"
    asked = request % (CHAT.encode(), len(body), body)
    async with scripted_engine(script) as url, gateway_of(start, [url]) as client:
        (server,) = started
        async with await trio.open_tcp_stream("127.0.0.1", server.port) as stream:
            await stream.send_all(asked * 2 if together else asked)
            received = b""
            while b"data: 1\n\n" not in received:
                received += await stream.receive_some()
            if not together:
                await stream.send_all(asked)
            idle = await idle_connection(server.port)
            await wait_metric(client, "kvd_gateway_running_requests", 1)
            server.process.send_signal(signal.SIGTERM)
            with trio.fail_after(NOT_MY_FAULT_S):
                assert await idle.receive_some(1) == b""  # so the drain has begun
                await idle.aclose()
                goes_on.set()
                while piece := await stream.receive_some():
                    received += piece
        assert received.count(LAST) == 2
        assert received.count(b"\r\nconnection: close\r\n") == 1
    assert await trio.to_thread.run_sync(partial(server.process.wait, NOT_MY_FAULT_S)) == 0
