"""Connections to engines behind TLS that are not made: what the relay and a client hear of them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

from examples.engine.options import EngineOptions
from kvd.gateway.dns_names import Wanted
from kvd.gateway.exchanges import RelayLimits
from kvd.gateway.tunnels import UpstreamTls
from tests.support.gateways import Running, engines, tls_of
from tests.support.inner_gateways import InnerGateway, inner_gateway
from tests.support.serving import Reply

BRIEFLY = RelayLimits(connect_s=0.05)
CHAT = "/v1/completions"


@asynccontextmanager
async def served(certificate: Path) -> AsyncIterator[tuple[InnerGateway, Running]]:
    """Yields a gateway of one engine behind TLS, which serves, and that engine."""
    trust = UpstreamTls(ca=certificate / "cert.pem")
    async with (
        engines(EngineOptions(events=False), tls=tls_of(certificate)) as (one,),
        inner_gateway(Wanted(one.url), tls=trust, limits=BRIEFLY) as inner,
    ):
        await inner.until_serving(one.url)
        yield inner, one


async def ask(inner: InnerGateway) -> Reply:
    body = json.dumps({"model": "demo", "prompt": [1, 2], "max_tokens": 1}).encode()
    async with inner.running.client() as client:
        return await client.request("POST", CHAT, body)


async def says_nothing(stream: trio.SocketStream) -> None:
    async with stream:
        await trio.sleep_forever()


async def speaks_plainly(stream: trio.SocketStream) -> None:
    async with stream:
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")


@pytest.mark.parametrize(
    ("serve", "cause", "text"),
    [
        (says_nothing, "connect_time", "no connection was accepted in time"),
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
    async with served(certificate) as (inner, one), trio.open_nursery() as nursery:
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
