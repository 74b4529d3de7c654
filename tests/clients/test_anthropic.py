"""The anthropic client on /v1/messages, which engines serve as well."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from examples.engine.options import Fault
from tests.clients.conftest import Gateway

anthropic = pytest.importorskip("anthropic", reason="the clients are not installed (make clients)")
pytestmark = pytest.mark.filterwarnings("default")

ASKED: Any = {
    "model": "demo",
    "max_tokens": 4,
    "system": "Answer in one word.",
    "messages": [{"role": "user", "content": "what is a prefix cache good for?"}],
}
WORDS = " word0 word1 word2 word3"


def plain(gateway: Gateway, **options: Any) -> Any:
    return gateway.opened(anthropic.Anthropic(base_url=gateway.url, api_key="secret", **options))


async def test_an_answer(gateway: Gateway) -> None:
    answer = await trio.to_thread.run_sync(lambda: plain(gateway).messages.create(**ASKED))
    assert answer.content[0].text == WORDS
    assert answer._request_id


async def test_a_stream(gateway: Gateway) -> None:
    def ask() -> tuple[str, Any]:
        with plain(gateway).messages.stream(**ASKED) as stream:
            return "".join(stream.text_stream), stream.get_final_message()

    streamed, message = await trio.to_thread.run_sync(ask)
    assert streamed == WORDS
    assert message.stop_reason == "max_tokens"


async def test_a_stream_that_is_cut_raises(gateway: Gateway) -> None:
    for each in gateway.engines:
        each.server.options.faults.append(Fault.AFTER_EVENT)

    def ask() -> None:
        client = plain(gateway, max_retries=0)
        with (
            pytest.raises(anthropic.APIStatusError, match="broke off"),
            client.messages.stream(**ASKED) as stream,
        ):
            stream.until_done()

    await trio.to_thread.run_sync(ask)


async def test_errors_are_of_the_classes_that_callers_catch(gateway: Gateway) -> None:
    def ask() -> None:
        client = plain(gateway, max_retries=0)
        with pytest.raises(anthropic.NotFoundError) as unknown:
            client.messages.create(**ASKED | {"model": "nobody"})
        assert unknown.value.body["error"]["type"] == "not_found_error"
        assert unknown.value.request_id
        for each in gateway.engines:
            each.server.options.faults.append(Fault.REFUSE_503)
        with pytest.raises(anthropic.InternalServerError):
            client.messages.create(**ASKED)

    await trio.to_thread.run_sync(ask)


async def test_a_conversation_stays_with_its_session(gateway: Gateway) -> None:
    def ask() -> set[str]:
        create = plain(gateway).messages.with_raw_response.create
        headers = {"x-claude-code-session-id": "one"}
        answers = [create(**ASKED, extra_headers=headers) for _ in range(6)]
        return {each.headers["x-kvd-endpoint"] for each in answers}

    assert len(await trio.to_thread.run_sync(ask)) == 1
