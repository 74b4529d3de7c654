"""Tunnels to engines with TLS: connections that fail, clients that do not read."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from examples.engine.options import EngineOptions
from kvd.gateway.dns_names import Wanted
from kvd.gateway.exchanges import ExchangeFailed, Exchanges, RelayLimits
from kvd.gateway.tunnels import Tunnel, UpstreamTls
from kvd.http.transport import FORGETFUL
from kvd.wire.urls import parse_upstream
from kvd_core.relay.relay import ExchangeOutcome
from tests.support.gateways import Running, engines, tls_of
from tests.support.inner_gateways import InnerGateway, inner_gateway
from tests.support.relaying import cut_off
from tests.support.serving import Reply
from tests.support.zmtp_fakes import NOT_MY_FAULT_S, until

HANDSHAKE_S = 0.5
CHAT = "/v1/completions"


@asynccontextmanager
async def served(
    certificate: Path, connect_s: float = NOT_MY_FAULT_S
) -> AsyncIterator[tuple[InnerGateway, Running]]:
    """Yields a gateway of one engine with TLS, once that serves, and the engine."""
    trust = UpstreamTls(ca_file=certificate / "cert.pem")
    async with (
        engines(EngineOptions(events=False), tls=tls_of(certificate)) as (one,),
        inner_gateway(Wanted(one.url), tls=trust, limits=RelayLimits(connect_s)) as inner,
    ):
        await inner.until_serving(one.url)
        yield inner, one


async def ask(inner: InnerGateway) -> Reply:
    body = json.dumps({"model": "demo", "prompt": [1, 2], "max_tokens": 1}).encode()
    async with inner.running.client() as client:
        return await client.request("POST", CHAT, body)


async def stay_silent(stream: trio.SocketStream) -> None:
    async with stream:
        await trio.sleep_forever()


async def speaks_plainly(stream: trio.SocketStream) -> None:
    async with stream:
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")


@pytest.mark.parametrize(
    ("serve", "cause", "text"),
    [
        (stay_silent, "connect_time", "no connection was accepted in time"),
        (speaks_plainly, "no_answer", "the connection was closed before an answer"),
        (None, "unreachable", "unreachable: nothing accepts connections there"),
    ],
)
async def test_a_connection_that_fails_has_its_own_cause(
    certificate: Path,
    serve: Callable[[trio.SocketStream], Awaitable[None]] | None,
    cause: str,
    text: str,
) -> None:
    connect_s = HANDSHAKE_S if serve is stay_silent else NOT_MY_FAULT_S
    async with served(certificate, connect_s) as (inner, one), trio.open_nursery() as nursery:
        one.end()
        if serve is not None:
            await nursery.start(
                partial(trio.serve_tcp, serve, one.port, host=one.host)  # type: ignore[arg-type]
            )
        reply = await ask(inner)
        assert reply.status == 502
        assert text in json.loads(reply.body)["error"]["message"]
        assert inner.stats.retries == {cause: 1}
        assert inner.serving() == set()
        nursery.cancel_scope.cancel()


STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PIECE = b"data: %b\n\n" % (b"x" * 65528)
LAST = b"data: [DONE]\n\n"
PIECES = 300  # much more than all buffers on the way hold


async def test_a_client_that_does_not_read_stops_an_engine_behind_tls(certificate: Path) -> None:
    sent = 0

    async def flood(stream: trio.SSLStream[trio.SocketStream]) -> None:
        # The gateway may close connections of its own probes; only the client's answer counts.
        with contextlib.suppress(trio.BrokenResourceError):
            await pour(stream)

    async def pour(stream: trio.SSLStream[trio.SocketStream]) -> None:
        nonlocal sent
        async with stream:
            if not (await stream.receive_some()).startswith(b"POST"):
                return
            await stream.send_all(STREAM)
            for _ in range(PIECES):
                await stream.send_all(b"%x\r\n%b\r\n" % (len(PIECE), PIECE))
                sent += 1
            await stream.send_all(b"%x\r\n%b\r\n0\r\n\r\n" % (len(LAST), LAST))

    async with served(certificate) as (inner, one), trio.open_nursery() as nursery:
        one.end()
        context = tls_of(certificate)
        where = {"host": one.host, "https_compatible": True}
        await nursery.start(partial(trio.serve_ssl_over_tcp, flood, one.port, context, **where))
        async with inner.running.narrow_client() as client:
            body = b'{"model":"demo","prompt":[1,2],"stream":true}'
            head = b"POST %b HTTP/1.1\r\nhost: kvd\r\ncontent-length: %d\r\n\r\n"
            await client.send(head % (CHAT.encode(), len(body)) + body)
            await until(lambda: inner.exchanges.relay.stats()["pauses"])
            assert sent < PIECES
            reply = await client.read_reply()
        assert (reply.status, reply.body) == (200, PIECE * PIECES + LAST)
        nursery.cancel_scope.cancel()


UNBOUNDED = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{}"


async def end_well(stream: trio.SSLStream[trio.SocketStream]) -> None:
    await stream.aclose()  # with a close_notify


async def stop(stream: trio.SSLStream[trio.SocketStream]) -> None:
    await trio.aclose_forcefully(stream)


async def reset(stream: trio.SSLStream[trio.SocketStream]) -> None:
    stream.transport_stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, FORGETFUL)
    await trio.aclose_forcefully(stream)


@pytest.mark.parametrize(("end", "status"), [(end_well, 200), (stop, 502), (reset, 502)])
async def test_a_body_that_ends_with_its_connection_is_whole_if_the_engine_says_so(
    certificate: Path,
    end: Callable[[trio.SSLStream[trio.SocketStream]], Awaitable[None]],
    status: int,
) -> None:
    async def serve(stream: trio.SSLStream[trio.SocketStream]) -> None:
        # The gateway may close connections of its own probes; only the client's answer counts.
        with contextlib.suppress(trio.BrokenResourceError):
            if (await stream.receive_some()).startswith(b"POST"):
                await stream.send_all(UNBOUNDED)
                await end(stream)

    async with served(certificate) as (inner, one), trio.open_nursery() as nursery:
        one.end()
        listen = partial(trio.serve_ssl_over_tcp, serve, one.port, tls_of(certificate))
        await nursery.start(partial(listen, host=one.host))
        reply = await ask(inner)
        assert reply.status == status
        if status == 200:
            assert reply.body == b"{}"
        else:
            assert "an answer was broken off" in json.loads(reply.body)["error"]["message"]
        nursery.cancel_scope.cancel()


REFUSAL = b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno"
LONG = b"x" * (32 * 1024 * 1024)  # much more than all buffers on the way hold
RESETS = 20  # in half of them the tunnel would first find that it can send no more


async def test_an_answer_is_heard_behind_which_an_engine_behind_tls_resets(
    certificate: Path,
) -> None:
    """An engine that refuses a long body closes without reading it, so that sending fails."""
    context = tls_of(certificate)

    async def refuse(plain: trio.SocketStream) -> None:
        with socket.socket(fileno=plain.socket.detach()) as taken:
            taken.settimeout(NOT_MY_FAULT_S)
            wrap = partial(context.wrap_socket, taken, server_side=True)
            with await trio.to_thread.run_sync(wrap) as secured:
                await trio.to_thread.run_sync(secured.recv, 1)
                await trio.testing.wait_all_tasks_blocked()  # no more of the body can be sent
                secured.sendall(REFUSAL)  # as no task runs before the end, both come together

    head = b"POST %b HTTP/1.1\r\nhost: e\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), len(LONG))
    trust = UpstreamTls(ca_file=certificate / "cert.pem").context()
    exchanges = Exchanges(RelayLimits())
    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio.serve_tcp, refuse, 0, host="127.0.0.1"))
        target = parse_upstream(f"https://127.0.0.1:{listener.socket.getsockname()[1]}")
        tunnel = Tunnel(target, trust, target.host, RelayLimits(NOT_MY_FAULT_S))
        nursery.start_soon(tunnel.run)
        nursery.start_soon(exchanges.run)
        engine = exchanges.relay.add_engine(tunnel.name, 0)
        for _ in range(RESETS):
            answer = await exchanges.ask(engine, head, LONG, len(REFUSAL))
            assert (answer.status, answer.held) == (413, b"no")
        nursery.cancel_scope.cancel()


async def test_an_engine_behind_tls_whose_host_is_gone_says_so_by_its_silence(
    certificate: Path,
) -> None:
    async def serve(stream: trio.SSLStream[trio.SocketStream]) -> None:
        await stream.receive_some()
        cut_off(stream.transport_stream)
        await trio.sleep_forever()

    trust = UpstreamTls(ca_file=certificate / "cert.pem").context()
    limits = RelayLimits(NOT_MY_FAULT_S, gone_s=1)
    exchanges = Exchanges(limits)
    async with trio.open_nursery() as nursery:
        listen = partial(trio.serve_ssl_over_tcp, serve, 0, tls_of(certificate), host="127.0.0.1")
        [listener] = await nursery.start(listen)
        port = listener.transport_listener.socket.getsockname()[1]
        target = parse_upstream(f"https://127.0.0.1:{port}")
        tunnel = Tunnel(target, trust, target.host, limits)
        nursery.start_soon(tunnel.run)
        nursery.start_soon(exchanges.run)
        engine = exchanges.relay.add_engine(tunnel.name, 0)
        with pytest.raises(ExchangeFailed) as failed:
            await exchanges.ask(engine, b"GET / HTTP/1.1\r\nhost: e\r\n\r\n", b"", 1)
        assert failed.value.outcome is ExchangeOutcome.NO_ANSWER
        nursery.cancel_scope.cancel()
