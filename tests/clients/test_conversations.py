"""Conversations through the APIs whose prompts the gateway does not tokenize."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from examples.engine.options import Fault
from tests.clients.conftest import Gateway

REASON = "the clients are not installed (make clients)"
openai = pytest.importorskip("openai", reason=REASON)
anthropic = pytest.importorskip("anthropic", reason=REASON)
pytestmark = pytest.mark.filterwarnings("default")

WORDS = " word0 word1 word2 word3"
PROMPT = " ".join(f"w{number}" for number in range(100))
CONVERSATIONS, TURNS = 6, 3
ASKED: Any = {"model": "demo", "max_output_tokens": 4}


def of_openai(gateway: Gateway) -> Any:
    return gateway.opened(
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="secret", max_retries=0)
    )


def of_anthropic(gateway: Gateway) -> Any:
    return gateway.opened(
        anthropic.Anthropic(base_url=gateway.url, api_key="secret", max_retries=0)
    )


async def test_responses_lead_to_the_engine_that_keeps_them(gateway: Gateway) -> None:
    def talk() -> None:
        responses = of_openai(gateway).responses
        for number in range(CONVERSATIONS):
            first = responses.with_raw_response.create(**ASKED, input=f"{number} hi")
            where, previous = first.headers["x-kvd-endpoint"], first.parse()
            for turn in range(TURNS):
                raw = responses.with_raw_response.create(
                    **ASKED, input=f"{turn}", previous_response_id=previous.id
                )
                assert raw.headers["x-kvd-endpoint"] == where
                assert raw.headers["x-kvd-decision"] == "session"
                previous = raw.parse()
                assert previous.output_text == WORDS
            assert responses.retrieve(previous.id).output_text == WORDS
            assert responses.cancel(previous.id).id == previous.id
            responses.delete(previous.id)
            with pytest.raises(openai.NotFoundError, match="Response with id"):  # of the engine
                responses.retrieve(previous.id)
        with pytest.raises(openai.NotFoundError) as unknown:
            responses.retrieve("resp_nobody")
        assert unknown.value.code == "response_not_found"
        with pytest.raises(openai.NotFoundError) as unknown:
            responses.create(**ASKED, input="x", previous_response_id="resp_nobody")
        assert unknown.value.code == "previous_response_not_found"

    await trio.to_thread.run_sync(talk)


async def test_a_response_whose_engine_is_gone_is_not_found(gateway: Gateway) -> None:
    def create(previous: str | None = None) -> Any:
        responses = of_openai(gateway).responses
        return responses.with_raw_response.create(
            **ASKED, input="hi", previous_response_id=previous
        )

    first = await trio.to_thread.run_sync(create)
    name = first.parse().id
    (keeper,) = (each for each in gateway.engines if each.url == first.headers["x-kvd-endpoint"])
    keeper.end()
    with pytest.raises(openai.APIStatusError) as failed:
        await trio.to_thread.run_sync(create, name)
    assert failed.value.code in ("upstream_failed", "previous_response_not_found")
    with pytest.raises(openai.NotFoundError) as unknown:
        await trio.to_thread.run_sync(create, name)
    assert unknown.value.code == "previous_response_not_found"


async def test_responses_are_followed_by_their_text(gateway: Gateway) -> None:
    def talk() -> None:
        create = of_openai(gateway).responses.with_raw_response.create
        for number in range(CONVERSATIONS):
            items: list[Any] = [{"role": "user", "content": f"{number} {PROMPT}"}]
            places, decisions = set(), []
            for turn in range(TURNS):
                raw = create(**ASKED, input=items, store=False)
                places.add(raw.headers["x-kvd-endpoint"])
                decisions.append(raw.headers["x-kvd-decision"])
                answer = raw.parse()
                assert (answer.usage.input_tokens_details.cached_tokens > 0) == (turn > 0)
                items += [each.model_dump(exclude_none=True) for each in answer.output]
                items.append({"role": "user", "content": f"{turn}"})
            assert len(places) == 1
            assert decisions == ["load", "session", "session"]

    await trio.to_thread.run_sync(talk)


async def test_messages_are_followed_by_their_text(gateway: Gateway) -> None:
    """Talks as Claude Code does: cache marks move, and a first block for billing changes."""

    def talk() -> None:
        create = of_anthropic(gateway).messages.with_raw_response.create
        mark = {"cache_control": {"type": "ephemeral"}}
        for number in range(CONVERSATIONS):
            history: list[Any] = []
            places, decisions = set(), []
            for turn in range(TURNS):
                bill = f"x-anthropic-billing-header: {number}.{turn}"
                text = {"type": "text", "text": f"{number} {turn} {PROMPT}"}
                raw = create(
                    model="demo",
                    max_tokens=4,
                    system=[
                        {"type": "text", "text": bill},
                        {"type": "text", "text": "Be brief."} | mark,
                    ],
                    messages=[*history, {"role": "user", "content": [text | mark]}],
                )
                places.add(raw.headers["x-kvd-endpoint"])
                decisions.append(raw.headers["x-kvd-decision"])
                answer = raw.parse().content[0].text
                history.append({"role": "user", "content": [text]})
                history.append({"role": "assistant", "content": answer})
            assert len(places) == 1
            assert decisions == ["load", "session", "session"]

    await trio.to_thread.run_sync(talk)
    head = gateway.engines[0].server.heads[0]
    assert head[b"authorization"] == b"Bearer secret"  # made from `x-api-key`


async def test_tokens_of_messages_are_counted(gateway: Gateway) -> None:
    messages = of_anthropic(gateway).messages
    history = [{"role": "user", "content": "hello"}]

    def count() -> Any:
        return messages.count_tokens(model="demo", messages=history)

    assert (await trio.to_thread.run_sync(count)).input_tokens > 0


async def test_a_stream_of_responses_that_is_cut(gateway: Gateway) -> None:
    for each in gateway.engines:
        each.server.options.faults.append(Fault.AFTER_EVENT)
    seen: list[Any] = []

    def read() -> None:
        stream = of_openai(gateway).responses.create(**ASKED, input="hi", stream=True)
        with pytest.raises(openai.APIConnectionError):
            for event in stream:
                seen.append(event)

    await trio.to_thread.run_sync(read)
    assert (seen[-1].type, seen[-1].code) == ("error", "upstream_failed")
    assert seen[-1].sequence_number == seen[-2].sequence_number + 1


async def test_what_goes_by_load(gateway: Gateway) -> None:
    def ask() -> None:
        client = of_openai(gateway)
        completed = client.completions.create(model="demo", prompt=[1, 2], max_tokens=2)
        assert completed.choices[0].text == " word0 word1"
        rows = client.embeddings.create(model="demo", input=["a", "bc"], encoding_format="float")
        assert [row.embedding[0] for row in rows.data] == [1.0, 2.0]
        sound = ("a.wav", b"RIFF" + bytes(300_000))
        heard = client.audio.transcriptions.create(model="demo", file=sound)
        assert heard.text.endswith(" bytes")
        with pytest.raises(openai.NotFoundError) as unknown:
            client.audio.transcriptions.create(model="nobody", file=sound)
        assert unknown.value.code == "model_not_found"
        spoken = client.audio.speech.create(model="demo", voice="any", input="hello")
        assert spoken.read().startswith(b"RIFF")

    await trio.to_thread.run_sync(ask)
