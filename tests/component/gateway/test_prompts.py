"""The tokens of a prompt are those that the engine would compute for it now."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
import trio

from examples.engine import server
from examples.engine.options import EngineOptions, Fault
from kvd.gateway.dns_names import Wanted
from kvd_core.relay.relay import ExchangeOutcome
from tests.support.gateways import Answered, Client, Running, engines
from tests.support.inner_gateways import InnerGateway, inner_gateway
from tests.support.resolving import Names
from tests.support.zmtp_fakes import until

TEXT = "a sentence of more than one block " * 8


@asynccontextmanager
async def fleet(
    options: EngineOptions,
) -> AsyncIterator[tuple[Client, InnerGateway, Running]]:
    """Yields a client of a gateway in front of one engine."""
    async with engines(options) as (engine,), gateway(engine.url) as (client, inner):
        yield client, inner, engine


@asynccontextmanager
async def gateway(url: str) -> AsyncIterator[tuple[Client, InnerGateway]]:
    """Yields a client of a gateway in front of the engine at a URL."""
    async with inner_gateway(Wanted(url)) as inner:
        host, port = inner.running.address
        async with httpx.AsyncClient(
            base_url=f"http://{host}:{port}", trust_env=False, verify=False, timeout=60
        ) as http:
            await inner.until_serving(url)
            yield Client(http), inner


async def come_back(client: Client, inner: InnerGateway, engine: Running) -> None:
    """Restarts an engine, and waits until it has been asked again what it is."""
    engine.end()
    assert (await client.chat("is it gone?")).status in (502, 503)
    await until(lambda: all(one.cache_address is None for one in inner.upstreams))
    await engine.start()
    await inner.until_serving(engine.url)


def source(answered: Answered) -> str:
    assert answered.status == 200
    return answered.headers["x-kvd-tokens"]


async def test_another_model_under_the_same_name() -> None:
    async with fleet(EngineOptions(events=False)) as (client, inner, engine):
        assert [source(await client.chat(TEXT)) for _ in range(2)] == ["tokenize", "memory"]
        await come_back(client, inner, engine)
        assert source(await client.chat(TEXT)) == "memory"
        engine.server.options.root = "/models/next"
        await come_back(client, inner, engine)
        assert [source(await client.chat(TEXT)) for _ in range(2)] == ["tokenize", "memory"]


async def test_an_engine_that_was_restarted_caches_nothing() -> None:
    async with fleet(EngineOptions(events=False)) as (client, inner, engine):
        matched = []
        for restarts in (False, False, True, False):
            if restarts:
                await come_back(client, inner, engine)
                engine.server.reset()
            answered = await client.chat(TEXT)
            matched.append(int(answered.headers["x-kvd-matched-tokens"]))
            cached = answered.json["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert matched[-1] == cached
        assert [count > 0 for count in matched] == [False, True, False, True]


async def test_another_address_is_that_of_another_cache() -> None:
    names = Names()
    trio.socket.set_custom_hostname_resolver(names)
    names.known["engine.test"] = ["127.0.0.1"]
    options = EngineOptions(events=False)
    async with engines(options, options, side_by_side=True) as (one, other):
        named = one.url.replace(one.host, "engine.test")
        async with gateway(named) as (client, inner):
            (upstream,) = inner.upstreams
            matched = []
            # Nothing listens at the third address.
            for addresses in ([one.host], [one.host], ["127.0.0.3", one.host], [other.host]):
                if addresses != names.known["engine.test"]:
                    names.known["engine.test"] = addresses
                    upstream.unreached = addresses[0] == "127.0.0.3"
                    upstream.note_gone("it has not answered in time", ExchangeOutcome.NO_ANSWER)
                    await until(lambda at=addresses[-1]: upstream.address == at)
                    await inner.until_serving(named)
                answered = await client.chat(TEXT)
                matched.append(int(answered.headers["x-kvd-matched-tokens"]) > 0)
            assert matched == [False, True, True, False]


async def test_another_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet(EngineOptions(events=False)) as (client, inner, engine):
        assert [source(await client.chat(TEXT)) for _ in range(2)] == ["tokenize", "memory"]
        monkeypatch.setattr(server, "BLOCK_SIZE", 2 * server.BLOCK_SIZE)
        await come_back(client, inner, engine)
        assert [source(await client.chat(TEXT)) for _ in range(2)] == ["tokenize", "memory"]
        answered = await client.chat(TEXT)
        counts = [int(answered.headers[f"x-kvd-{name}-tokens"]) for name in ("prompt", "matched")]
        assert counts[0] // 32 * 32 == counts[1]


async def test_tools_that_a_request_may_do_without() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    async with fleet(EngineOptions(events=False)) as (client, _, _):
        for choice in ("auto", "none"):
            asks = {"tools": tools, "tool_choice": choice}
            sources = [source(await client.chat(TEXT, **asks)) for _ in range(2)]
            assert sources == ["tokenize", "memory"]


async def test_the_longest_of_several_texts_is_rendered() -> None:
    async with fleet(EngineOptions(events=False, renders=True)) as (client, inner, _):
        found = []
        for prompt in (TEXT, [TEXT, "short"], ["short", TEXT, "also"]):
            body = {"model": "demo", "stop": ["short"], "prompt": prompt, "max_tokens": 4}
            answered = await client.post("/v1/completions", body)
            found.append((source(answered), answered.headers["x-kvd-prompt-tokens"]))
        assert found == [found[0]] * 3
        assert found[0][0] == "render"
        assert inner.stats.token_source_failures.total() == 0


async def test_a_count_of_tokens_caches_nothing() -> None:
    async with fleet(EngineOptions(events=False, renders=True)) as (client, _, _):
        body = {"model": "demo", "max_tokens": 4, "messages": [{"role": "user", "content": TEXT}]}
        assert source(await client.post("/v1/messages/count_tokens", body)) == "none"
        answered = await client.post("/v1/messages", body)
        assert source(answered) == "render"
        assert answered.headers["x-kvd-matched-tokens"] == "0"


async def test_log_probabilities_of_a_prompt_are_in_no_cache() -> None:
    async with fleet(EngineOptions(events=False)) as (client, _, _):

        async def matched(path: str, body: dict[str, object]) -> int:
            answered = await client.post(path, {"model": "demo", "max_tokens": 4, **body})
            return int(answered.headers["x-kvd-matched-tokens"])

        chat: dict[str, object] = {"messages": [{"role": "user", "content": TEXT}]}
        for path, body in (("/v1/completions", {"prompt": TEXT}), ("/v1/chat/completions", chat)):
            await matched(path, body)
            assert await matched(path, {**body, "prompt_logprobs": 1}) == 0
            assert await matched(path, {**body, "echo": True, "logprobs": 1}) == 0
            assert await matched(path, body) > 0


async def test_what_an_engine_refuses_is_not_predicted_to_be_cached() -> None:
    async with fleet(EngineOptions(events=False)) as (client, inner, engine):
        options = engine.server.options
        shared = f"{TEXT} is what all of them have"
        assert source(await client.chat(shared)) == "tokenize"

        async def refused(name: str) -> None:
            prompt = f"{shared} {name} {TEXT}"
            assert (await client.chat(prompt)).status >= 400, name
            options.max_model_len = usual
            if name == "gone":
                engine.server.reset()
                await engine.start()
            await inner.until_serving(engine.url)
            await client.chat(shared)
            answered = await client.chat(prompt)
            matched = int(answered.headers["x-kvd-matched-tokens"])
            assert 0 < matched == answered.json["usage"]["prompt_tokens_details"]["cached_tokens"]

        usual = options.max_model_len
        options.max_model_len = 10
        await refused("too long")
        for fault in (Fault.REFUSE_429, Fault.REFUSE_503):
            options.faults.append(fault)
            await refused(fault.name)
        engine.end()
        await refused("gone")


async def test_images_are_in_no_tokens() -> None:
    """Only the turns before them are known, and the conversation stays where it is."""
    image = {"url": "data:image/png;base64," + "a" * 100_000}
    shown = {"role": "user", "content": [{"type": "image_url", "image_url": image}]}
    dialogue = [{"role": role, "content": TEXT} for role in ("user", "assistant")]
    async with fleet(EngineOptions(events=False)) as (client, inner, _):

        async def ask(*messages: object) -> tuple[str, ...]:
            body = {"model": "demo", "max_tokens": 4, "messages": messages}
            answered = await client.post("/v1/chat/completions", body)
            names = "tokens", "decision", "prompt-tokens", "matched-tokens"
            return tuple(answered.headers.get(f"x-kvd-{name}", "") for name in names)

        assert await ask(shown) == ("none", "load", "", "")
        assert inner.selections.choice_stats.lengths()[1] < 100  # its data is not counted
        assert await ask(shown, *dialogue) == ("none", "session", "", "")
        asked = await ask(*dialogue)
        assert asked[:2] == ("tokenize", "predicted")
        for _ in range(2):
            source, decision, count, matched = await ask(*dialogue, shown)
            assert source == "memory"
            assert int(asked[2]) < int(count) < int(asked[2]) + 100
            assert int(matched) == int(asked[2]) // 16 * 16
        assert decision == "session"


async def test_reasoning_under_its_former_name() -> None:
    """Engines are asked for the tokens of what they compute: all messages, with their reasoning."""
    for kind in ("vllm", "sglang"):
        async with fleet(EngineOptions(kind=kind, events=False)) as (client, _, _):
            for name in ("reasoning", "reasoning_content"):
                thought = {"role": "assistant", "content": "so", name: f"{TEXT} {name}"}
                body = {"model": "demo", "messages": [thought], "max_tokens": 4}
                answered = await client.post("/v1/chat/completions", body)
                assert source(answered) == "tokenize"
                count = int(answered.headers["x-kvd-prompt-tokens"])
                assert count == answered.json["usage"]["prompt_tokens"]


async def test_null_stands_for_no_value() -> None:
    async with fleet(EngineOptions(events=False)) as (client, _, _):
        nulls = dict.fromkeys(("documents", "reasoning_effort", "truncate_prompt_tokens"))
        assert source(await client.chat(TEXT, **nulls)) == "tokenize"
        assert source(await client.chat(TEXT, reasoning_effort="high")) == "none"


async def test_truncated_conversations_are_not_remembered() -> None:
    """The blocks of one turn are not those with which the next one begins."""
    async with fleet(EngineOptions(events=False, renders=True)) as (client, _, _):
        turns = [TEXT]
        for _ in range(3):
            answered = await client.chat(*turns, truncate_prompt_tokens=40)
            assert source(answered) == "render"
            usage = answered.json["usage"]
            assert int(answered.headers["x-kvd-prompt-tokens"]) == usage["prompt_tokens"] == 40
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert int(answered.headers["x-kvd-matched-tokens"]) == cached
            turns.append("and so on and so on")


async def test_reports_of_cached_tokens_are_compared_where_they_are_of_the_prompt() -> None:
    async with fleet(EngineOptions(events=False, renders=True)) as (client, inner, _):
        stats = inner.stats
        messages = [{"role": "user", "content": TEXT}]
        compared = [
            ("/v1/messages", {"messages": messages}),
            ("/v1/messages", {"messages": messages, "stream": True}),
            ("/v1/chat/completions", {"messages": messages, "n": 1}),
            ("/v1/responses", {"input": TEXT}),
            ("/v1/completions", {"prompt": [f'{TEXT} "a", b']}),
            ("/v1/completions", {"prompt": [[1, 2] * 30]}),
        ]
        for path, members in compared:
            before = stats.reported_cached_tokens
            for _ in range(2):
                answered = await client.post(path, {"model": "demo", "max_tokens": 4, **members})
                assert answered.status == 200
            assert stats.reported_cached_tokens > before, path
        assert stats.reported_matched_tokens == stats.reported_cached_tokens
        before = stats.reported_cached_tokens
        for members in (
            {"prompt": TEXT, "n": 2},
            {"prompt": [TEXT, "b"]},
            {"prompt": [[1, 2] * 30, [3]]},
        ):
            for _ in range(2):
                await client.post("/v1/completions", {"model": "demo", "max_tokens": 4, **members})
        assert stats.reported_cached_tokens == before


async def test_all_of_a_turn_known_in_part_is_predicted_to_be_cached() -> None:
    async with fleet(EngineOptions(events=False)) as (client, inner, _):
        turns = []
        for turn in range(4):
            turns.append(f"{TEXT} {turn}")
            answered = await client.chat(*turns)
            assert source(answered) == ("memory" if turn else "tokenize")
            cached = answered.json["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert int(answered.headers["x-kvd-matched-tokens"]) == cached
            assert (cached > 0) == (turn > 0)
            await until(lambda: len(inner.tokens.conversations) == len(turns))
