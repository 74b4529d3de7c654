"""openai-python and LangChain: answers, streams, errors, retries, and streams that are cut."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

from examples.engine.options import Fault
from tests.clients.conftest import Gateway

openai = pytest.importorskip("openai", reason="the clients are not installed (make clients)")
# Warnings of the libraries themselves are not kvd's to fix.
pytestmark = pytest.mark.filterwarnings("default")

MESSAGES: Any = [{"role": "user", "content": "what is a prefix cache good for?"}]
WORDS = " word0 word1 word2 word3"


def plain(gateway: Gateway, **options: Any) -> Any:
    return gateway.opened(openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="secret", **options))


async def of_asyncio(task: Callable[[Any], Awaitable[Any]], gateway: Gateway) -> Any:
    """Runs a coroutine of asyncio's with an asynchronous client, in a thread."""

    async def run() -> Any:
        url = f"{gateway.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="secret") as client:
            return await task(client)

    return await trio.to_thread.run_sync(lambda: asyncio.run(run()))


async def test_an_answer_with_its_decision(gateway: Gateway) -> None:
    def ask() -> Any:
        chat = plain(gateway).chat.completions.with_raw_response
        return chat.create(model="demo", messages=MESSAGES, max_tokens=4)

    raw = await trio.to_thread.run_sync(ask)
    answer = raw.parse()
    assert answer.choices[0].message.content == WORDS
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert raw.headers["x-kvd-endpoint"] in [each.url for each in gateway.engines]
    assert answer._request_id == raw.headers["x-request-id"]
    heads = [head for each in gateway.engines for head in each.server.heads]
    assert [head[b"authorization"] for head in heads] == [b"Bearer secret"]


async def test_a_stream(gateway: Gateway) -> None:
    def ask() -> list[Any]:
        return list(
            plain(gateway).chat.completions.create(
                model="demo",
                messages=MESSAGES,
                max_tokens=4,
                stream=True,
                stream_options={"include_usage": True},
            )
        )

    chunks = await trio.to_thread.run_sync(ask)
    words = [each.choices[0].delta.content or "" for each in chunks if each.choices]
    assert "".join(words) == WORDS
    assert chunks[-1].usage.completion_tokens == 4


async def test_streams_of_an_asynchronous_client_side_by_side(gateway: Gateway) -> None:
    async def ask(client: Any) -> list[str]:
        async def one(number: int) -> str:
            stream = await client.completions.create(
                model="demo", prompt=f"{number} " * 40, max_tokens=4, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        return await asyncio.gather(*(one(number) for number in range(20)))

    assert await of_asyncio(ask, gateway) == [WORDS] * 20


async def test_a_stream_that_is_left_aborts_the_engine(gateway: Gateway) -> None:
    for each in gateway.engines:
        each.server.options.step_s = 0.005

    async def leave(client: Any) -> None:
        stream = await client.chat.completions.create(
            model="demo", messages=MESSAGES, max_tokens=100_000, stream=True
        )
        await anext(aiter(stream))
        await stream.close()

    await of_asyncio(leave, gateway)
    with trio.fail_after(60):
        while not any(each.server.aborted for each in gateway.engines):  # noqa: ASYNC110 - counted by a task
            await trio.sleep(0.01)


@pytest.mark.parametrize("fault", [Fault.CLOSE, Fault.AFTER_HEAD, Fault.REFUSE_503])
async def test_a_fault_that_the_gateway_mends_is_not_seen(gateway: Gateway, fault: Fault) -> None:
    gateway.engines[0].server.options.faults.append(fault)

    def ask() -> list[Any]:
        client = plain(gateway, max_retries=0)
        asked = {"model": "demo", "messages": MESSAGES, "max_tokens": 4}
        return [client.chat.completions.create(**asked) for _ in range(3)]

    for answer in await trio.to_thread.run_sync(ask):
        assert answer.choices[0].message.content == WORDS


async def test_a_refusal_of_all_is_tried_again_by_the_client(gateway: Gateway) -> None:
    for each in gateway.engines:
        each.server.options.faults.append(Fault.REFUSE_503)

    def ask() -> Any:
        client = plain(gateway, max_retries=2)
        return client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=4)

    answer = await trio.to_thread.run_sync(ask)
    assert answer.choices[0].message.content == WORDS
    assert gateway.requests == 3  # both engines refuse; a second later one answers


@pytest.mark.parametrize("fault", [Fault.AFTER_EVENT, Fault.IN_EVENT])
async def test_a_stream_that_is_cut_raises(gateway: Gateway, fault: Fault) -> None:
    """Within an event the gateway cannot report an error: half an event would not be JSON."""
    for each in gateway.engines:
        each.server.options.faults.append(fault)
    raised, why = {
        Fault.AFTER_EVENT: (openai.APIError, "broke off"),
        Fault.IN_EVENT: (openai.APIConnectionError, ""),
    }[fault]

    def ask() -> str:
        client = plain(gateway, max_retries=0)
        stream = client.chat.completions.create(
            model="demo", messages=MESSAGES, max_tokens=4, stream=True
        )
        text = ""
        with pytest.raises(raised, match=why or None):
            for chunk in stream:
                text += chunk.choices[0].delta.content or ""
        return text

    assert await trio.to_thread.run_sync(ask) == " word0"


async def test_errors_are_of_the_classes_that_callers_catch(gateway: Gateway) -> None:
    def ask() -> None:
        client = plain(gateway, max_retries=0)
        with pytest.raises(openai.NotFoundError) as unknown:
            client.chat.completions.create(model="nobody", messages=MESSAGES)
        assert unknown.value.code == "model_not_found"
        assert unknown.value.request_id
        with pytest.raises(openai.BadRequestError) as forbidden:
            client.chat.completions.create(
                model="demo", messages=MESSAGES, extra_body={"kv_transfer_params": {}}
            )
        assert forbidden.value.param == "kv_transfer_params"
        for each in gateway.engines:
            each.server.options.faults.append(Fault.REFUSE_500)
        with pytest.raises(openai.InternalServerError, match="simulated 500"):
            client.chat.completions.create(model="demo", messages=MESSAGES)

    await trio.to_thread.run_sync(ask)


async def test_models_are_listed(gateway: Gateway) -> None:
    def ask() -> list[Any]:
        client = plain(gateway)
        return [*client.models.list(), client.models.retrieve("demo")]

    assert [model.id for model in await trio.to_thread.run_sync(ask)] == ["demo", "demo"]


@pytest.mark.parametrize("stream", [False, True])
async def test_responses(gateway: Gateway, stream: bool) -> None:
    def ask() -> Any:
        asked = {"model": "demo", "input": "hello there", "max_output_tokens": 4}
        found = plain(gateway).responses.create(**asked, stream=stream)
        if not stream:
            return found
        *_, last = found
        assert last.type == "response.completed"
        return last.response

    assert (await trio.to_thread.run_sync(ask)).output_text == WORDS


async def test_langchain(gateway: Gateway) -> None:
    langchain = pytest.importorskip("langchain_openai")

    def chat() -> Any:
        made = langchain.ChatOpenAI(
            model="demo", base_url=f"{gateway.url}/v1", api_key="secret", max_tokens=4
        )
        gateway.opened(made.root_client)
        return made

    async def streamed() -> str:
        made = chat()
        text = "".join([str(piece.content) async for piece in made.astream("hello")])
        await made.root_async_client.close()
        return text

    answer = await trio.to_thread.run_sync(lambda: chat().invoke("hello"))
    assert answer.content == WORDS
    assert answer.usage_metadata["output_tokens"] == 4
    assert await trio.to_thread.run_sync(lambda: asyncio.run(streamed())) == WORDS
