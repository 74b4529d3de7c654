"""What is left of a client that has left: nothing that waits for Python's collector."""

from __future__ import annotations

import pytest
import trio

from examples.engine.options import EngineOptions
from kvd.gateway.dns_names import Wanted
from kvd.gateway.stats import Ended
from kvd.http.relayed import RelayedRequest
from tests.support.collecting import freed_at_once
from tests.support.gateways import CHAT, engines
from tests.support.inner_gateways import inner_gateway
from tests.support.zmtp_fakes import until

BODY = b'{"model":"demo","stream":true,"max_tokens":9,"messages":[{"role":"user","content":"a"}]}'
LINES = b"host: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
ASKED = b"POST %b HTTP/1.1\r\n" % CHAT.encode() + LINES % len(BODY) + BODY


@pytest.mark.parametrize("begun", [False, True])
async def test_the_request_of_a_client_that_left_needs_no_collector_to_go(begun: bool) -> None:
    """Its body may have megabytes."""
    options = EngineOptions(events=False)
    async with engines(options) as (engine,), inner_gateway(Wanted(engine.url)) as inner:
        await inner.until_serving(engine.url)
        async with await trio.open_tcp_stream(*inner.running.address) as stream:
            await stream.send_all(ASKED)  # from here on its tokens are known
            while not (await stream.receive_some()).endswith(b"0\r\n\r\n"):
                pass
        await inner.running.until_empty()
        options.prefill_s, options.step_s = 0 if begun else 60, 60
        with freed_at_once(RelayedRequest):
            async with await trio.open_tcp_stream(*inner.running.address) as stream:
                await stream.send_all(ASKED)
                await until(lambda: engine.server.requests == 2)
                if begun:
                    assert (await stream.receive_some()).startswith(b"HTTP/1.1 200 ")
            await until(lambda: inner.stats.ended[Ended.CLIENT_GONE] == 1)
            await inner.running.until_empty()
