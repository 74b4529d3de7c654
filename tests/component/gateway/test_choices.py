"""The gateway asks the selection service by what the client's request says."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import trio

from examples.engine.options import EngineOptions
from kvd.faces.gateway.routes import gateway_routes
from kvd.gateway.chains import Chains
from kvd.gateway.choices import LocalChoices, Placement, Question
from kvd.gateway.dns_names import Wanted
from kvd.gateway.exchanges import Exchanges, RelayLimits
from kvd.gateway.forwarding import Forwarder
from kvd.gateway.stats import Ended, GatewayStats
from kvd.gateway.tokens import Tokens
from kvd.gateway.upstreams import Upstreams, UpstreamState
from kvd.index.partitions import State
from kvd.index.registry import Registry
from kvd.net.dialing import Dialer
from kvd.selection.options import RouterOptions
from kvd.selection.service import Selections
from kvd_core.selector.selector import Pool
from tests.support.gateways import engines
from tests.support.serving import Client, Running, serving
from tests.support.zmtp_fakes import NOT_MY_FAULT_S, until

CHAT = "/v1/chat/completions"


class Asking:
    """A client of a gateway, and what its selection service was asked, the last first."""

    choices: LocalChoices
    selections: Selections
    stats: GatewayStats

    def __init__(self, running: Running, client: Client, asked: list[Question]) -> None:
        self.running = running
        self._client = client
        self._asked = asked

    async def about(self, path: str = CHAT, **members: Any) -> Question:
        """Returns the selection for a request, which also has `headers`."""
        headers = members.pop("headers", {})
        body = json.dumps({"max_tokens": 2, "messages": [], **members}).encode()
        reply = await self._client.request("POST", path, body, **headers)
        assert reply.status == 200, reply.body
        return self._asked.pop()


@asynccontextmanager
async def asking(**options: Any) -> AsyncIterator[Asking]:
    """Yields a client of a gateway with one engine, of which all that it caches is predicted."""
    nobody: Any = None  # no engine here publishes anything
    asked: list[Question] = []
    state = State()
    clocks = trio.current_time, time.time_ns
    router = RouterOptions(session_affinity_ttl_s=60)
    registry = Registry(state, nobody)
    selections = Selections(state, registry, router, 1.0, Random(0), *clocks)
    choices = LocalChoices(selections, registry)
    choose = choices.choose

    async def noted(question: Question) -> Placement:
        asked.append(question)
        return await choose(question)

    choices.choose = noted  # type: ignore[method-assign]
    exchanges, stats = Exchanges(RelayLimits()), GatewayStats()
    tokens = Tokens(exchanges, stats, 1 << 20, NOT_MY_FAULT_S)
    async with engines(EngineOptions(events=False, **options)) as (engine,):
        upstreams = Upstreams([Wanted(engine.url)], exchanges, choices, Dialer())
        chains = Chains(stats, trio.current_time)
        forwarder = Forwarder(upstreams, choices, exchanges, stats, tokens, chains, 0)
        async with trio.open_nursery() as nursery:
            for part in (exchanges, upstreams, tokens):
                nursery.start_soon(part.run)
            await until(lambda: all(one.standing is UpstreamState.SERVING for one in upstreams))
            routes = gateway_routes(upstreams, choices, forwarder, 1 << 20)
            async with serving(routes=routes) as running, running.client() as client:
                gateway = Asking(running, client, asked)
                gateway.choices, gateway.selections, gateway.stats = choices, selections, stats
                yield gateway
            nursery.cancel_scope.cancel()


async def test_the_length_of_the_output() -> None:
    async with asking() as gateway:
        assert (await gateway.about()).expected_output_tokens == 2
        assert (await gateway.about(max_completion_tokens=1)).expected_output_tokens == 1
        hints = {"agent_hints": {"osl": 1}}
        assert (await gateway.about(nvext=hints)).expected_output_tokens == 1
        assert (await gateway.about(max_tokens=None)).expected_output_tokens is None


@pytest.mark.parametrize(("kind", "first"), [("vllm", -3), ("sglang", 3)])
async def test_what_goes_first_at_the_engine_waits_less(kind: str, first: int) -> None:
    async with asking(kind=kind) as gateway:
        assert (await gateway.about()).priority_jump == 0
        assert (await gateway.about(priority=first)).priority_jump == 3
        assert (await gateway.about(priority=-first)).priority_jump == 0
        headers = {"x-vllm-priority": str(first)}
        assert (await gateway.about(headers=headers)).priority_jump == 3
        hints = {"agent_hints": {"latency_sensitivity": 1.5, "priority": 9}}
        assert (await gateway.about(priority=first, nvext=hints)).priority_jump == 1.5


async def test_sessions_count_where_no_tokens_are_known() -> None:
    async with asking() as gateway:
        headers = {"x-session-id": "s"}
        assert (await gateway.about(headers=headers)).session is None
        assert (await gateway.about(headers=headers, documents=[])).session == "s"
        assert (await gateway.about("/v1/messages", headers=headers)).session == "s"
        told = {"messages": [{"role": "user", "content": "hi"}]}
        text = (await gateway.about("/v1/messages", **told)).session
        assert text is not None and text.startswith("text-")
        assert (await gateway.about("/v1/embeddings", input="hi")).session is None


def long_prompt(pool: Pool) -> None:
    pool.look(b"", b"", 1_000_000)


async def test_a_client_that_leaves_while_it_waits_for_a_free_rank_waits_no_more() -> None:
    async with asking() as gateway:
        (worker,) = gateway.selections.workers.entries.values()
        await gateway.choices.register(replace(worker.record, max_num_batched_tokens=40))
        busy = (await gateway.about())._replace(reservation_id="busy", look=long_prompt)
        await gateway.choices.choose(busy)
        async with gateway.running.client() as other:
            body = b'{"max_tokens": 2, "messages": []}'
            head = f"POST {CHAT} HTTP/1.1\r\nhost: kvd\r\ncontent-length: {len(body)}\r\n\r\n"
            await other.send(head.encode() + body)
            await until(lambda: gateway.selections.scheduler.held == 1)
        await until(lambda: gateway.selections.scheduler.held == 0)
        await gateway.running.until(client_gone=1)
        assert gateway.stats.ended[Ended.CLIENT_GONE] == 1
        assert list(gateway.selections.reservations.live) == ["busy"]
        gateway.choices.free("busy")
        await gateway.about()
