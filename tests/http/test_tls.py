"""The TLS listener, with a certificate made here by the `openssl` command."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from serving import (
    ECHO_LIMIT,
    PATIENT,
    PUBLIC,
    QUICK,
    ROUTES,
    TEST_SECONDS,
    Client,
    Reply,
    eventually,
    open_descriptors,
)

from kvd.http.app import build_app
from kvd.http.certificates import load_terms
from kvd.http.limits import HttpLimits
from kvd.http.listeners import open_listeners
from kvd.http.options import TlsFiles
from kvd.http.permits import Permits
from kvd.http.reception import Reception
from kvd.http.tls import TlsServer


class RunningTls:
    def __init__(self, certificate: Path, limits: HttpLimits) -> None:
        reception = Reception(Permits(PUBLIC))
        app = build_app(ROUTES, limits, reception)
        files = TlsFiles(certificate / "cert.pem", certificate / "key.pem")
        self.server = TlsServer(ROUTES, app, load_terms(files), limits, reception)
        self.stop = trio.Event()
        self.ended = trio.Event()
        self.address = ("", 0)
        self.trust = ssl.create_default_context(cafile=certificate / "cert.pem")

    async def serve(self, task_status: trio.TaskStatus[None]) -> None:
        listeners = await open_listeners("127.0.0.1:0")
        self.address = listeners[0].getsockname()
        await self.server.serve(listeners, self.stop, task_status=task_status)
        self.ended.set()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        plain = await trio.open_tcp_stream(*self.address)
        stream = trio.SSLStream(
            plain, self.trust, server_hostname="127.0.0.1", https_compatible=True
        )
        try:
            yield Client(stream)  # type: ignore[arg-type]
        finally:
            await trio.aclose_forcefully(stream)

    async def until_empty(self) -> None:
        await eventually(lambda: not self.server.stats.connections_open)


@asynccontextmanager
async def serving_tls(
    certificate: Path, limits: HttpLimits = PATIENT, **changes: float
) -> AsyncIterator[RunningTls]:
    running = RunningTls(certificate, replace(limits, **changes))  # type: ignore[arg-type]
    with trio.fail_after(TEST_SECONDS):
        async with trio.open_nursery() as nursery:
            await nursery.start(running.serve)
            yield running
            running.stop.set()
            await running.ended.wait()
    assert running.server.stats.bugs == 0
    assert running.server.stats.connections_open == 0


async def _check_alive(running: RunningTls) -> None:
    async with running.client() as client:
        assert (await client.request("GET", "/health")).status == 200


async def test_requests_are_answered_as_on_the_plain_port(certificate: Path) -> None:
    async with serving_tls(certificate) as running, running.client() as client:
        reply = await client.request("POST", "/query?a=1", b"{}")
        assert (reply.status, reply.body) == (200, b"POST /query b'a=1' 2")
        assert "server" not in reply.headers
        assert (await client.request("GET", "/counted")).body == b"012"
        assert (await client.request("GET", "/nope")).body == b'{"error": "not found"}'
        assert (await client.request("POST", "/echo", b"x", content_type="a/b")).status == 415
        assert (await client.request("POST", "/echo", b"x" * ECHO_LIMIT)).status == 200
        assert (await client.request("GET", "/bug")).body == b'{"error": "internal error"}'
    async with serving_tls(certificate) as running, running.client() as client:
        assert (await client.request("POST", "/echo", b"x" * (ECHO_LIMIT + 1))).status == 413


@pytest.mark.parametrize("settings", ["A", "AAAA", "AAMAAABkAARAAAAAAAIAAAAA"])
@pytest.mark.parametrize("upgrade", ["h2c", "websocket"])
async def test_an_upgrade_ends_at_most_its_own_connection(
    certificate: Path, upgrade: str, settings: str
) -> None:
    headers = {
        "upgrade": upgrade,
        "connection": "Upgrade",
        "http2_settings": settings,
        "sec_websocket_version": "13",
        "sec_websocket_key": "AAAAAAAAAAAAAAAAAAAAAA==",
    }
    async with serving_tls(certificate, QUICK) as running:
        async with running.client() as client:
            reply = await client.request("GET", "/health", **headers)
            assert reply.status == 200  # declined
        await _check_alive(running)


@pytest.mark.parametrize(
    "data",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\na: " + b"x" * 70_000 + b"\r\n\r\n",
        b"\0" * 100,
        b"GET /big HTTP/1.1\r\nhost: kvd\r\n\r\n" * 30,
        b"POST /echo HTTP/1.1\r\nhost: kvd\r\ncontent-length: 9\r\n\r\n",
        b"",
    ],
    ids=["http/2", "long head", "zeros", "pipelined", "no body", "nothing"],
)
async def test_bad_clients_leave_nothing_behind(certificate: Path, data: bytes) -> None:
    async with serving_tls(certificate, QUICK) as running:
        await _check_alive(running)
        await running.until_empty()
        before = open_descriptors()
        for _ in range(3):
            # On a busy machine the deadline may pass before the handshake is done.
            with suppress(trio.BrokenResourceError):
                async with running.client() as client:
                    await client.send(data)
        async with await trio.open_tcp_stream(*running.address) as plain:
            await plain.send_all(data or b"x")
            await running.until_empty()
        assert open_descriptors() == before
        await _check_alive(running)


async def test_what_follows_the_last_request_takes_nothing_from_its_answer(
    certificate: Path,
) -> None:
    health = b"GET /health HTTP/1.1\r\nhost: kvd\r\n\r\n"
    last = b"GET /counted HTTP/1.1\r\nhost: kvd\r\nconnection: close\r\n\r\n"
    # A page's request: refused, which ends the connection.
    refused = b"GET /counted HTTP/1.1\r\nhost: a.example\r\norigin: http://a\r\n\r\n"
    async with serving_tls(certificate) as running:
        for sent, ends in ((last, b"0\r\n\r\n"), (refused, b"}")):
            for more in (health, health * 30, b"\0" * 100):
                async with running.client() as client:
                    await client.send(health + sent + more)
                    got = b""
                    while data := await client.stream.receive_some():
                        got += data
                assert got.count(b"HTTP/1.1 ") == 2 and got.endswith(ends), got


async def test_idle_and_silent_connections_expire(certificate: Path) -> None:
    async with serving_tls(certificate, QUICK) as running, running.client() as idle:
        assert (await idle.request("GET", "/health")).status == 200
        async with await trio.open_tcp_stream(*running.address):  # no handshake
            await running.until_empty()
        assert running.server.stats.idle_timeouts == 1


async def test_an_asynchronous_handler_has_a_deadline(certificate: Path) -> None:
    async with serving_tls(certificate, QUICK) as running, running.client() as client:
        assert (await client.request("GET", "/slow?60000")).status == 503


async def test_a_stop_answers_what_is_under_way(certificate: Path) -> None:
    async with serving_tls(certificate) as running, running.client() as idle:
        await idle.request("GET", "/health")
        async with running.client() as busy, trio.open_nursery() as nursery:
            replies: list[Reply] = []
            nursery.start_soon(_request_slow, busy, replies)
            await eventually(lambda: running.server.stats.requests == 2)
            start = trio.current_time()
            running.stop.set()
            await running.ended.wait()
            assert trio.current_time() - start < PATIENT.graceful_seconds
        assert [reply.status for reply in replies] == [200]


async def _request_slow(client: Client, replies: list[Reply]) -> None:
    replies.append(await client.request("GET", "/slow?100"))


@pytest.mark.parametrize("send_seconds", [0.1, 60.0])
async def test_a_client_that_does_not_read_holds_no_stop(
    certificate: Path, send_seconds: float
) -> None:
    opened = serving_tls(certificate, send_seconds=send_seconds)
    async with opened as running, running.client() as deaf:
        await deaf.send(b"GET /big HTTP/1.1\r\nhost: kvd\r\n\r\n")
        await eventually(lambda: running.server.stats.requests == 1)
        start = trio.current_time()
        running.stop.set()
        await running.ended.wait()
        assert trio.current_time() - start < 2 * PATIENT.graceful_seconds
