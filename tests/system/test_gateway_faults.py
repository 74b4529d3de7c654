"""Engines that die, hang and come back under traffic: exactly how many requests fail.

While no byte has reached its client, a request never fails because one engine did.
"""

from __future__ import annotations

import json
import signal
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import cast

import httpx
import pytest
import trio

from examples.engine.options import EngineOptions, Fault
from tests.support.gateway_load import BROKEN, CLIENTS, PROMPT, TOKENS, EngineProcess, Load
from tests.support.gateways import (
    CHAT,
    Answered,
    Client,
    gateway_of,
    outcome,
    scripted_engine,
    serving,
    tls_of,
    trusting,
    wait_metric,
    wait_serving,
)
from tests.support.processes import Server
from tests.support.serving import Client as ByteClient
from tests.support.zmtp_fakes import until

Start = Callable[..., Server]
ENGINES = 4


@asynccontextmanager
async def fleet(start: Start, folder: Path) -> AsyncIterator[tuple[Client, list[EngineProcess]]]:
    """Yields a client of a gateway, and the engines behind it, which are processes."""
    engines = [EngineProcess(folder) for _ in range(ENGINES)]
    try:
        async with gateway_of(start, [each.url for each in engines]) as client:
            yield client, engines
    finally:
        for each in engines:
            each.end()


@pytest.mark.parametrize("comes_back", [False, True])
async def test_an_engine_is_killed_under_load(
    kvd_process: Start, tmp_path: Path, comes_back: bool
) -> None:
    """Streams that have begun are visibly cut; all other requests are answered elsewhere."""
    async with fleet(kvd_process, tmp_path) as (client, engines):
        load = Load(client)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load.run)
            await load.until(20)
            for victim in engines[:2]:
                at = load.answered
                victim.end()
                await load.until(at + 40)
                if comes_back:
                    await trio.to_thread.run_sync(victim.start)
                    await load.until(at + 60)
            load.end()
        assert load.outcomes.keys() <= {"whole", "cut"}
        assert load.outcomes["cut"] <= CLIENTS * 2
        broken = (await client.metrics()).get(BROKEN, 0)
        assert broken == load.outcomes["cut"]
        if comes_back:
            await wait_serving(client, ENGINES)


async def test_an_engine_is_killed_with_some_answers_begun(
    kvd_process: Start, tmp_path: Path
) -> None:
    """All of its streams are cut; requests without any byte yet are answered elsewhere."""
    victim, other = EngineProcess(tmp_path, "--step-us", "1000000000"), EngineProcess(tmp_path)
    try:
        async with gateway_of(kvd_process, [victim.url]) as client:
            met: Counter[tuple[bool, str]] = Counter()
            begun = 0

            async def ask(number: int, *, stream: bool) -> None:
                nonlocal begun
                ids = [number * 100 + at for at in range(64)]
                body = {"model": "demo", "prompt": ids, "max_tokens": TOKENS, "stream": stream}
                data, clean = b"", True
                async with client.http.stream("POST", "/v1/completions", json=body) as response:
                    begun += stream
                    try:
                        async for piece in response.aiter_raw():
                            data += piece
                    except httpx.RemoteProtocolError:
                        clean = False
                answered = Answered(response.status_code, response.headers, data, clean)
                met[stream, outcome(answered, stream=stream)] += 1

            async with trio.open_nursery() as nursery:
                for number in range(CLIENTS):
                    nursery.start_soon(partial(ask, number, stream=bool(number % 2)))
                await until(lambda: begun == CLIENTS // 2)
                await wait_metric(client, "kvd_gateway_running_requests", CLIENTS)
                added = await client.post("/upstreams", {"url": other.url})
                assert added.status == 201
                await wait_serving(client, 2)
                victim.end()
            assert met == {(True, "cut"): CLIENTS // 2, (False, "whole"): CLIENTS // 2}
    finally:
        victim.end()
        other.end()


async def test_all_engines_end_and_come_back_one_by_one(kvd_process: Start, tmp_path: Path) -> None:
    """In a rolling restart no request without any byte yet waits or fails."""
    async with fleet(kvd_process, tmp_path) as (client, engines):
        load = Load(client)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load.run)
            await load.until(20)
            for each in engines:
                each.end()
                await trio.to_thread.run_sync(each.start)
                await wait_serving(client, ENGINES)
            load.end()
        assert load.outcomes.keys() <= {"whole", "cut"}
        broken = (await client.metrics()).get(BROKEN, 0)
        assert broken == load.outcomes["cut"]


async def test_a_stopped_engine_holds_up_its_own_requests_only(
    kvd_process: Start, tmp_path: Path
) -> None:
    """After SIGSTOP the kernel still takes connections and requests, but nothing answers them."""
    engines = [EngineProcess(tmp_path) for _ in range(2)]
    try:
        flags = ("--gateway-silence-s", "1")
        async with gateway_of(kvd_process, [each.url for each in engines], flags) as client:
            engines[0].signal(signal.SIGSTOP)
            met: Counter[tuple[int, str]] = Counter()
            async with trio.open_nursery() as nursery:

                async def ask(number: int) -> None:
                    ids = [number * 100 + at for at in range(64)]
                    body = {"model": "demo", "prompt": ids, "max_tokens": 2}
                    answered = await client.post("/v1/completions", body)
                    met[answered.status, answered.headers.get("x-should-retry", "")] += 1

                for number in range(8):
                    nursery.start_soon(ask, number)
            assert met.keys() == {(200, ""), (504, "false")}
            assert met.total() == 8
            metrics = await client.metrics()
            assert (
                metrics['kvd_gateway_refusals_total{code="upstream_timeout"}'] == met[504, "false"]
            )
            engines[0].signal(signal.SIGCONT)
            await wait_serving(client, 2)
    finally:
        for each in engines:
            each.end()


@pytest.mark.parametrize("idle_ms", [1, 5, 20])
async def test_engines_that_close_idle_connections_at_once(
    kvd_process: Start, idle_ms: int
) -> None:
    """Now and then a kept connection closes as a request is sent; no client notices."""
    async with serving(kvd_process, EngineOptions(idle_s=idle_ms / 1000)) as (client, _):
        for number in range(36):
            answered = await client.chat(PROMPT, stream=bool(number % 2))
            assert (answered.status, answered.clean) == (200, True)
            await trio.sleep(idle_ms / 1000 * (number % 3) / 2)  # about when it closes


@pytest.mark.parametrize("retry_after", [None, "7"])
async def test_a_refusal_of_all_says_when_to_come_again(
    kvd_process: Start, retry_after: str | None
) -> None:
    three = EngineOptions(), EngineOptions(), EngineOptions()
    async with serving(kvd_process, *three) as (client, running):
        for each in running:
            each.server.options.faults.append(Fault.REFUSE_503)
            each.server.options.retry_after = retry_after
        answered = await client.chat(PROMPT)
        assert answered.status == 503
        assert answered.headers["retry-after"] == (retry_after or "1")
        assert sum(each.server.requests for each in running) == 2  # one more engine, once


async def test_a_client_that_has_said_all_may_close_its_half(kvd_process: Start) -> None:
    """As `nc -N` does. A client that has gone looks the same until something is sent to it."""
    async with serving(kvd_process, EngineOptions()) as (client, _):
        body = b'{"model":"demo","max_tokens":3,"messages":[{"role":"user","content":"hello"}]}'
        stream = await trio.open_tcp_stream("127.0.0.1", client.http.base_url.port or 0)
        async with stream:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            await stream.send_all(head.encode() + body)
            stream.socket.shutdown(socket.SHUT_WR)
            received = b""
            while piece := await stream.receive_some(65536):
                received += piece
        # kvd cannot tell the two cases apart: it answers, or gives the request up
        assert received == b"" or received.startswith(b"HTTP/1.1 200 ")
        assert (await client.chat(PROMPT)).status == 200


@pytest.mark.parametrize(
    ("head", "body", "status"),
    [
        ("Content-Length: 99999999999", b"{}", 413),
        ("Content-Length: 9999999999999999999999", b"{}", 400),
        ("Transfer-Encoding: chunked", b"zz\r\n", 400),
        ("X-Long: " + "a" * 100_000 + "\r\nContent-Length: 2", b"{}", 431),
        ("Content-Length: 2\r\nContent-Length: 3", b"{}", 400),
        ("Content-Length: 2\r\nTransfer-Encoding: chunked", b"{}", 400),
    ],
)
async def test_what_cannot_be_a_request_is_refused(
    kvd_process: Start, head: str, body: bytes, status: int
) -> None:
    async with serving(kvd_process, EngineOptions()) as (client, running):
        stream = await trio.open_tcp_stream("127.0.0.1", client.http.base_url.port or 0)
        async with stream:
            start = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n{head}\r\n\r\n"
            await stream.send_all(start.encode() + body)
            assert b" %d " % status in await stream.receive_some(65536)
        assert running[0].server.requests == 0
        assert (await client.chat(PROMPT)).status == 200


class SlowlyRead:
    """A connection that is read in small pieces, with a pause now and then."""

    def __init__(self, below: trio.SocketStream) -> None:
        self.send_all = below.send_all
        self._receive_some = below.receive_some
        self._pieces = 0

    async def receive_some(self) -> bytes | bytearray:
        self._pieces += 1
        if self._pieces % 64 == 0:
            await trio.sleep(0.005)
        return await self._receive_some(4096)


@pytest.mark.parametrize("behind_tls", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_stream_of_a_client_that_reads_slowly_is_whole(
    kvd_process: Start, certificate: Path, stream: bool, behind_tls: bool
) -> None:
    """The answer is much longer than the buffers, so the engine waits for the client."""
    tokens, tls = 20_000, tls_of(certificate) if behind_tls else None
    flags = trusting(certificate)
    async with serving(kvd_process, EngineOptions(), flags=flags, tls=tls) as (client, running):
        body = {"model": "demo", "prompt": [1, 2, 3], "max_tokens": tokens, "stream": stream}
        base = client.http.base_url
        assert base.port is not None
        async with await trio.open_tcp_stream(base.host, base.port) as connection:
            reader = ByteClient(cast("trio.SocketStream", SlowlyRead(connection)))
            content = json.dumps(body).encode()
            reply = await reader.request("POST", "/v1/completions", content, host="localhost")
        assert reply.body.count(b"word19999") == 1
        assert running[0].server.aborted == 0
        await wait_metric(client, 'kvd_gateway_relayed_requests_total{outcome="complete"}', 1)


@pytest.mark.parametrize("fault", [Fault.AFTER_EVENT, Fault.IN_EVENT, None])
async def test_a_broken_stream_is_no_whole_one_to_http_1_0(
    kvd_process: Start, fault: Fault | None
) -> None:
    """In HTTP/1.0 only the connection's end delimits a stream, so a broken one ends in a reset."""
    async with serving(kvd_process, EngineOptions(step_s=0.01)) as (client, [engine]):
        if fault is not None:
            engine.server.options.faults.append(fault)
        ids = json.dumps(list(range(100)))
        body = b'{"model":"demo","stream":true,"max_tokens":4,"prompt":%b}' % ids.encode()
        head = b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body)
        base = client.http.base_url
        assert base.port is not None
        async with await trio.open_tcp_stream(base.host, base.port) as stream:
            await stream.send_all(head + body)
            received, is_reset = b"", False
            try:
                while piece := await stream.receive_some():
                    received += piece
            except trio.BrokenResourceError:
                is_reset = True
        assert b"word0" in received
        assert is_reset == (fault is not None)
        assert received.endswith(b"data: [DONE]\n\n") == (fault is None)


EVENT, LAST = b'data: {"x":1}\n\n', b"data: [DONE]\n\n"
FILLED = "kvd_gateway_relay_fillers_total"


@pytest.mark.parametrize("case", ["filled", "broken", "short"])
async def test_a_stream_of_an_announced_length(kvd_process: Start, case: str) -> None:
    """What the gateway adds is not in that length, so the client gets chunks."""
    gateway: list[Client] = []
    size = len(EVENT + LAST) + (0 if case == "filled" else 50)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n"

    async def script(stream: trio.SocketStream) -> None:
        await stream.send_all(head % size + EVENT)
        if case == "filled":
            while (await gateway[0].metrics())[FILLED] == 0:  # noqa: ASYNC110 - another process
                await trio.sleep(0.01)
        if case != "broken":
            await stream.send_all(LAST)

    flags = ("--gateway-filler-s", "0.1") if case == "filled" else ()
    async with (
        scripted_engine(script) as url,
        gateway_of(kvd_process, [url], flags) as client,
    ):
        gateway.append(client)
        answered = await client.chat(PROMPT, stream=True)
        assert answered.status == 200
        assert answered.clean == (case != "broken")
        assert answered.events[0] == {"x": 1}
        if case == "broken":
            assert answered.events[1]["error"]["code"] == "upstream_failed"
        else:
            assert answered.events[1:] == ["[DONE]"]
        assert (b": keep-alive\n\n" in answered.body) == (case == "filled")


async def test_a_last_event_without_its_empty_line_is_ended(kvd_process: Start) -> None:
    """Clients would drop it, as they do any event that does not end so."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    last = b'data: {"type":"response.completed"}\n'

    async def script(stream: trio.SocketStream) -> None:
        await stream.send_all(head + EVENT)
        await stream.send_all(last)

    async with scripted_engine(script) as url, gateway_of(kvd_process, [url]) as client:
        asked = {"model": "demo", "input": PROMPT, "stream": True}
        answered = await client.post("/v1/responses", asked)
        assert (answered.status, answered.clean) == (200, True)
        assert answered.body == EVENT + last + b"\n"


async def test_a_request_ends_once_if_both_sides_end_it(kvd_process: Start) -> None:
    """The engine breaks off, and the client has left before it can be sent an error event."""
    breaks, broken, servers = trio.Event(), trio.Event(), []
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    chunked = b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n"

    def start(*flags: str, face: str) -> Server:
        servers.append(kvd_process(*flags, face=face))
        return servers[0]

    async def script(stream: trio.SocketStream) -> None:
        await stream.send_all(head + chunked % (len(EVENT), EVENT))
        await breaks.wait()
        await stream.aclose()
        broken.set()

    async with scripted_engine(script) as url, gateway_of(start, [url]) as client:
        pid = servers[0].process.pid
        body = b'{"model":"demo","stream":true}'
        request = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b"
        stream = await trio.open_tcp_stream("127.0.0.1", client.http.base_url.port or 0)
        async with stream:
            await stream.send_all(request % (CHAT.encode(), len(body), body))
            while EVENT not in await stream.receive_some():
                pass
            servers[0].process.send_signal(signal.SIGSTOP)
            try:
                await until(lambda: ") T " in Path(f"/proc/{pid}/stat").read_text())
                breaks.set()
                await broken.wait()
                forgetful = struct.pack("ii", 1, 0)
                stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, forgetful)
            finally:
                await stream.aclose()
                servers[0].process.send_signal(signal.SIGCONT)
        await wait_metric(client, "kvd_gateway_running_requests", 0)
        ended = {
            name: value
            for name, value in (await client.metrics()).items()
            if name.startswith("kvd_gateway_relayed_requests_total")
        }
        assert sum(ended.values()) == 1, ended
