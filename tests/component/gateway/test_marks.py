"""Streams whose last event is missing, though the engine ends their bodies as it should."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import trio

from examples.engine.options import EngineOptions
from kvd.gateway.dns_names import Wanted
from tests.support.gateways import engines
from tests.support.inner_gateways import inner_gateway

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n%b"
BODY = b'{"model":"demo","prompt":[1,2],"stream":true}'
ASKED = b"POST /v1/completions HTTP/1.1\r\nhost: kvd\r\ncontent-length: %d\r\n\r\n%b"


@pytest.mark.parametrize("text", [b"a", b"[DONE]"])
async def test_a_stream_that_comes_in_one_piece_is_not_whole_without_its_mark(text: bytes) -> None:
    """Its client is told, and so cannot have been promised how long the answer is."""
    events = b'data: {"choices":[{"index":0,"text":"%b"}]}\n\n' % text

    async def serve(stream: trio.SocketStream) -> None:
        # The gateway may close connections of its own probes; only the client's answer counts.
        with contextlib.suppress(trio.BrokenResourceError):
            async with stream:
                if (await stream.receive_some()).startswith(b"POST"):
                    await stream.send_all(HEAD % (len(events), events))

    async with (
        engines(EngineOptions(events=False)) as (one,),
        inner_gateway(Wanted(one.url)) as inner,
    ):
        await inner.until_serving(one.url)
        one.end()
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(trio.serve_tcp, serve, one.port, host=one.host))  # type: ignore[arg-type]
            async with inner.running.client() as client:
                await client.send(ASKED % (len(BODY), BODY))
                head, _, answer = (await client.read_to_end()).partition(b"\r\n\r\n")
            nursery.cancel_scope.cancel()
    assert b"content-length" not in head
    assert events in answer
    assert b"the engine broke off its answer" in answer
    assert not answer.endswith(b"0\r\n\r\n")
