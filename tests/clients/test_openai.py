"""openai-python in front of the gateway."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from examples.engine.options import EngineOptions, Fault
from tests.clients.common import PROMPT, THREE, Start, base_url, client_package, place, work
from tests.support.gateways import Client, serving, wait_serving
from tests.support.zmtp_fakes import until

openai = client_package("openai")

WORDS = " word0 word1 word2 word3"
HELLO = [{"role": "user", "content": "hello"}]


def connected(client: Client, **more: Any) -> Any:
    options = {"api_key": "none", "max_retries": 0, "timeout": 30, **more}
    return openai.OpenAI(base_url=f"{base_url(client)}/v1", **options)


async def test_chats(kvd_process: Start) -> None:
    async with serving(kvd_process, *THREE) as (client, running):

        def talk() -> None:
            with connected(client) as client_:
                chats = client_.chat.completions
                asked = {"model": "demo", "messages": HELLO, "max_tokens": 4}
                answer = chats.create(**asked)
                assert answer.choices[0].message.content == WORDS
                assert answer._request_id
                raw = chats.with_raw_response.create(
                    **asked, extra_headers={"x-request-id": "mine", "x-session-id": "s"}
                )
                assert raw.headers["x-request-id"] == "mine" == raw.parse()._request_id
                assert raw.headers["x-kvd-tokens"] in ("tokenize", "memory")
                assert place(raw.headers, running) in range(3)
                options = {"include_usage": True}
                events = list(chats.create(**asked, stream=True, stream_options=options))
                texts = [each.choices[0].delta.content for each in events if each.choices]
                assert "".join(filter(None, texts)) == WORDS
                assert events[-1].usage.completion_tokens == 4

        await work(talk)


async def test_many_chats_at_once(kvd_process: Start) -> None:
    async with serving(kvd_process, *THREE) as (client, _):

        async def stream(client_: Any, number: int) -> str:
            said = [{"role": "user", "content": f"{number} {PROMPT}"}]
            events = await client_.chat.completions.create(
                model="demo", messages=said, max_tokens=4, stream=True
            )
            return "".join([event.choices[0].delta.content or "" async for event in events])

        async def talk() -> list[str]:
            url = f"{base_url(client)}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client_:
                return await asyncio.gather(*(stream(client_, number) for number in range(16)))

        assert await work(asyncio.run, talk()) == [WORDS] * 16


async def test_errors_are_of_their_classes(kvd_process: Start) -> None:
    async with serving(kvd_process, EngineOptions()) as (client, running):

        def fail() -> None:
            with connected(client) as client_:
                create = client_.chat.completions.create
                with pytest.raises(openai.NotFoundError) as unknown:
                    create(model="nobody", messages=HELLO)
                assert unknown.value.code == "model_not_found"
                assert unknown.value.param == "model"
                assert unknown.value.request_id
                with pytest.raises(openai.BadRequestError) as forbidden:
                    create(model="demo", messages=HELLO, extra_body={"bootstrap_host": "me"})
                assert forbidden.value.code == "forbidden_parameter"
                with pytest.raises(openai.InternalServerError) as refused:
                    create(model="demo", messages=HELLO)
                assert refused.value.status_code == 503
                assert refused.value.response.headers["retry-after"] == "1"
                with pytest.raises(openai.RateLimitError):
                    create(model="demo", messages=HELLO)

        running[0].server.options.faults += [Fault.REFUSE_503, Fault.REFUSE_429]
        await work(fail)


async def test_its_retries_end_well(kvd_process: Start) -> None:
    async with serving(kvd_process, EngineOptions()) as (client, running):

        def ask() -> Any:
            with connected(client, max_retries=2) as client_:
                return client_.chat.completions.create(model="demo", messages=HELLO, max_tokens=4)

        running[0].server.options.faults.append(Fault.REFUSE_503)
        answer = await work(ask)
        assert answer.choices[0].message.content == WORDS
        assert running[0].server.requests == 2


@pytest.mark.parametrize("fault", [Fault.AFTER_EVENT, Fault.IN_EVENT])
async def test_a_stream_that_is_cut_is_an_error(kvd_process: Start, fault: Fault) -> None:
    async with serving(kvd_process, EngineOptions()) as (client, running):

        def read_chat() -> None:
            with connected(client) as client_, pytest.raises(openai.APIError) as cut:
                asked = {"model": "demo", "messages": HELLO, "stream": True}
                for _ in client_.chat.completions.create(**asked):
                    pass
            assert ("broke off" in str(cut.value)) == (fault is Fault.AFTER_EVENT)

        def read_response() -> None:
            seen = []
            with connected(client) as client_, pytest.raises(openai.APIConnectionError):
                for event in client_.responses.create(model="demo", input="hi", stream=True):
                    seen.append(event)
            if fault is Fault.AFTER_EVENT:
                assert (seen[-1].type, seen[-1].code) == ("error", "upstream_failed")
                numbers = [event.sequence_number for event in seen]
                assert numbers == list(range(len(seen)))

        for read in (read_chat, read_response):
            running[0].server.options.faults.append(fault)
            await work(read)
            await wait_serving(client, 1)


async def test_a_stream_that_is_left_is_aborted(kvd_process: Start) -> None:
    async with serving(kvd_process, EngineOptions(step_s=0.05)) as (client, running):

        def leave() -> None:
            with connected(client) as client_:
                asked = {"model": "demo", "messages": HELLO, "max_tokens": 10_000}
                with client_.chat.completions.create(**asked, stream=True) as stream:
                    next(iter(stream))

        await work(leave)
        await until(lambda: running[0].server.aborted == 1)


async def test_what_goes_by_load(kvd_process: Start) -> None:
    async with serving(kvd_process, *THREE) as (client, _):

        def ask() -> None:
            with connected(client) as client_:
                assert [card.id for card in client_.models.list()] == ["demo"]
                assert client_.models.retrieve("demo").id == "demo"
                completed = client_.completions.create(model="demo", prompt=[1, 2], max_tokens=2)
                assert completed.choices[0].text == " word0 word1"
                rows = client_.embeddings.create(
                    model="demo", input=["a", "bc"], encoding_format="float"
                )
                assert [row.embedding[0] for row in rows.data] == [1.0, 2.0]
                sound = ("a.wav", b"RIFF" + bytes(300_000))
                heard = client_.audio.transcriptions.create(model="demo", file=sound)
                assert heard.text.endswith(" bytes")
                with pytest.raises(openai.NotFoundError):
                    client_.audio.translations.create(model="nobody", file=sound)
                spoken = client_.audio.speech.create(model="demo", voice="any", input="hello")
                assert spoken.read().startswith(b"RIFF")

        await work(ask)


async def test_models_with_a_slash(kvd_process: Start) -> None:
    async with serving(kvd_process, EngineOptions(model="meta/llama")) as (client, _):
        with connected(client) as client_:
            card = await work(client_.models.retrieve, "meta/llama")
            assert card.id == "meta/llama"


async def test_responses_lead_to_the_engine_that_keeps_them(kvd_process: Start) -> None:
    async with serving(kvd_process, *THREE) as (client, running):

        def talk() -> None:
            with connected(client) as client_:
                responses = client_.responses
                asked = {"model": "demo", "max_output_tokens": 4}
                for number in range(6):
                    first = responses.with_raw_response.create(**asked, input=f"{number} hi")
                    where, previous = place(first.headers, running), first.parse()
                    assert previous.output_text == WORDS
                    for turn in range(3):
                        raw = responses.with_raw_response.create(
                            **asked, input=f"{turn}", previous_response_id=previous.id
                        )
                        assert place(raw.headers, running) == where
                        assert raw.headers["x-kvd-decision"] == "session"
                        previous = raw.parse()
                    assert responses.retrieve(previous.id).output_text == WORDS
                    assert responses.cancel(previous.id).id == previous.id
                    responses.delete(previous.id)
                    with pytest.raises(openai.NotFoundError, match="not found"):
                        responses.retrieve(previous.id)  # says its engine
                with pytest.raises(openai.NotFoundError) as unknown:
                    responses.retrieve("resp_nobody")
                assert unknown.value.code == "response_not_found"
                with pytest.raises(openai.NotFoundError) as unknown:
                    responses.create(**asked, input="x", previous_response_id="resp_nobody")
                assert unknown.value.code == "previous_response_not_found"

        await work(talk)


async def test_responses_are_followed_by_their_text(kvd_process: Start) -> None:
    async with serving(kvd_process, *THREE) as (client, running):

        def talk() -> None:
            with connected(client) as client_:
                for number in range(6):
                    items: list[Any] = [{"role": "user", "content": f"{number} {PROMPT}"}]
                    places = []
                    for turn in range(3):
                        with client_.responses.stream(
                            model="demo", input=items, max_output_tokens=4, store=False
                        ) as stream:
                            places.append(place(stream._raw_stream.response.headers, running))
                            answer = stream.get_final_response()
                        assert answer.output_text == WORDS
                        cached = answer.usage.input_tokens_details.cached_tokens
                        assert (cached > 0) == (turn > 0)
                        items += [each.model_dump(exclude_none=True) for each in answer.output]
                        items.append({"role": "user", "content": f"{turn}"})
                    assert len(set(places)) == 1

        await work(talk)
