"""The gateway's questions to the selection service follow the client's request."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from examples.engine.options import EngineOptions
from kvd.gateway.choices import Placement, Question
from kvd.gateway.dns_names import Wanted
from kvd.gateway.stats import Ended
from kvd_core.selector.selector import Pool
from tests.support.gateways import engines
from tests.support.inner_gateways import InnerGateway, inner_gateway
from tests.support.serving import Client
from tests.support.zmtp_fakes import until

CHAT = "/v1/chat/completions"


class Asking:
    """A client of a gateway, and the questions to its selection service."""

    def __init__(self, inner: InnerGateway, client: Client, asked: list[Question]) -> None:
        self.running = inner.running
        self.choices, self.selections, self.stats = inner.choices, inner.selections, inner.stats
        self._client = client
        self._asked = asked

    async def about(self, path: str = CHAT, **members: Any) -> Question:
        """Sends a request with these members and `headers`; returns the gateway's question."""
        headers = members.pop("headers", {})
        body = json.dumps({"max_tokens": 2, "messages": [], **members}).encode()
        reply = await self._client.request("POST", path, body, **headers)
        assert reply.status == 200, reply.body
        return self._asked.pop()


@asynccontextmanager
async def asking(**options: Any) -> AsyncIterator[Asking]:
    """Yields a client of a gateway whose one engine publishes nothing: its cache is predicted."""
    asked: list[Question] = []
    async with (
        engines(EngineOptions(events=False, **options)) as (engine,),
        inner_gateway(Wanted(engine.url)) as inner,
        inner.running.client() as client,
    ):
        choose = inner.choices.choose

        async def noted(question: Question) -> Placement:
            asked.append(question)
            return await choose(question)

        inner.choices.choose = noted  # type: ignore[method-assign]
        await inner.until_serving(engine.url)
        yield Asking(inner, client, asked)


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
        members = {"messages": [{"role": "user", "content": "hi"}]}
        text = (await gateway.about("/v1/messages", **members)).session
        assert text is not None and text.startswith("text-")
        assert (await gateway.about("/v1/embeddings", input="hi")).session is None


async def test_an_engine_that_does_not_fit_is_named_each_time() -> None:
    """It fits once the engine has gone that it differs from."""
    async with asking() as gateway:
        (worker,) = gateway.selections.workers.entries.values()
        other = replace(worker.record, worker_id=7, block_size=8)
        for _ in range(2):
            reasons = await gateway.choices.register(other)
            assert reasons == ["block_size 8 differs from 16 of its model"]
        await gateway.choices.deregister(worker.record.worker_id)
        assert await gateway.choices.register(other) == []


def long_prompt(pool: Pool) -> None:
    pool.match(b"", b"", 1_000_000)


async def test_a_client_that_leaves_while_it_waits_for_a_free_rank_waits_no_more() -> None:
    async with asking() as gateway:
        (worker,) = gateway.selections.workers.entries.values()
        await gateway.choices.register(replace(worker.record, max_num_batched_tokens=40))
        busy = (await gateway.about())._replace(reservation_id="busy", lookup=long_prompt)
        await gateway.choices.choose(busy)
        async with gateway.running.client() as other:
            body = b'{"max_tokens": 2, "messages": []}'
            head = f"POST {CHAT} HTTP/1.1\r\nhost: kvd\r\ncontent-length: {len(body)}\r\n\r\n"
            await other.send(head.encode() + body)
            await until(lambda: gateway.selections.scheduler.held == 1)
        await until(lambda: gateway.selections.scheduler.held == 0)
        await gateway.running.until(client_gone=1)
        assert gateway.stats.ended[Ended.CLIENT_GONE] == 1
        assert list(gateway.selections.reservations.owner_of) == ["busy"]
        gateway.choices.free("busy")
        await gateway.about()
