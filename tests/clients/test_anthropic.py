"""Anthropic's client in front of the gateway."""

from __future__ import annotations

from typing import Any

import pytest

from examples.engine.options import EngineOptions, Fault
from tests.clients.common import PROMPT, THREE, Start, base_url, client_package, place, work
from tests.support.gateways import Client, serving, wait_serving

anthropic = client_package("anthropic")
httpx2 = client_package("httpx2")

WORDS = " word0 word1 word2 word3"
HELLO = [{"role": "user", "content": "hello"}]
ASKED = {"model": "demo", "max_tokens": 4, "messages": HELLO}


def connected(client: Client, **more: Any) -> Any:
    options = {"api_key": "sk-engine", "max_retries": 0, "timeout": 30, **more}
    return anthropic.Anthropic(base_url=base_url(client), **options)


async def test_messages(kvd_process: Start) -> None:
    async with serving(kvd_process, EngineOptions()) as (client, running):

        def talk() -> None:
            with connected(client) as client_:
                answer = client_.messages.create(**ASKED)
                assert answer.content[0].text == WORDS
                assert answer._request_id
                with client_.messages.stream(**ASKED) as stream:
                    assert "".join(stream.text_stream) == WORDS
                    assert stream.get_final_message().usage.output_tokens == 4
                    assert stream.request_id
                counted = client_.messages.count_tokens(model="demo", messages=HELLO)
                assert counted.input_tokens > 0
                assert [card.id for card in client_.models.list()] == ["demo"]

        await work(talk)
        # What engines read; they know no other header.
        assert running[0].server.heads[0][b"authorization"] == b"Bearer sk-engine"


async def test_errors_are_of_their_classes(kvd_process: Start) -> None:
    async with serving(kvd_process, EngineOptions()) as (client, running):

        def fail() -> None:
            with connected(client) as client_:
                with pytest.raises(anthropic.NotFoundError) as unknown:
                    client_.messages.create(**{**ASKED, "model": "nobody"})
                assert unknown.value.body["error"]["type"] == "not_found_error"
                assert unknown.value.request_id == unknown.value.body["request_id"]
                with pytest.raises(anthropic.APIStatusError) as refused:
                    client_.messages.create(**ASKED)
                assert refused.value.status_code == 503
                assert refused.value.body["error"]["message"] == "simulated 503"

        running[0].server.options.faults.append(Fault.REFUSE_503)
        await work(fail)


@pytest.mark.parametrize("fault", [Fault.AFTER_EVENT, Fault.IN_EVENT])
async def test_a_stream_that_is_cut_is_an_error(kvd_process: Start, fault: Fault) -> None:
    async with serving(kvd_process, EngineOptions()) as (client, running):

        def read() -> None:
            told = fault is Fault.AFTER_EVENT
            error = anthropic.APIError if told else httpx2.RemoteProtocolError
            with connected(client) as client_, pytest.raises(error) as cut:
                with client_.messages.stream(**ASKED) as stream:
                    stream.get_final_message()
            assert ("broke off" in str(cut.value)) == told

        running[0].server.options.faults.append(fault)
        await work(read)
        await wait_serving(client, 1)


async def test_conversations_are_followed_by_their_text(kvd_process: Start) -> None:
    """As Claude Code talks: marks of what to cache move, and a first block is for accounts."""
    async with serving(kvd_process, *THREE) as (client, running):

        def talk() -> None:
            with connected(client) as client_:
                for number in range(6):
                    said: list[Any] = []
                    places, decisions = [], []
                    for turn in range(3):
                        bill = f"x-anthropic-billing-header: {number}.{turn}"
                        mark = {"cache_control": {"type": "ephemeral"}}
                        text = {"type": "text", "text": f"{number} {turn} {PROMPT}"}
                        asking = [*said, {"role": "user", "content": [text | mark]}]
                        raw = client_.messages.with_raw_response.create(
                            model="demo",
                            max_tokens=4,
                            system=[
                                {"type": "text", "text": bill},
                                {"type": "text", "text": "Be brief."} | mark,
                            ],
                            messages=asking,
                        )
                        places.append(place(raw.headers, running))
                        decisions.append(raw.headers["x-kvd-decision"])
                        said.append({"role": "user", "content": [text]})
                        answer = raw.parse().content[0].text
                        said.append({"role": "assistant", "content": answer})
                    assert len(set(places)) == 1
                    assert decisions == ["load", "session", "session"]

        await work(talk)
