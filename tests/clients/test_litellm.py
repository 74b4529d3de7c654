"""LiteLLM, which has one interface for several APIs."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from tests.clients.conftest import Gateway

pytestmark = pytest.mark.filterwarnings("ignore")  # LiteLLM's, about its types
WORDS = " word0 word1 word2 word3"


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the internet
    return pytest.importorskip("litellm", reason="the clients are not installed (make clients)")


async def test_every_api(gateway: Gateway, litellm: Any) -> None:
    there = {"api_base": f"{gateway.url}/v1", "api_key": "secret"}
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "num_retries": 0}

    def talk() -> None:
        answered = litellm.completion(model="openai/demo", **chat, **there)
        assert answered.choices[0].message.content == WORDS
        assert answered.usage.prompt_tokens > 0
        stream = litellm.completion(model="openai/demo", stream=True, **chat, **there)
        assert "".join(each.choices[0].delta.content or "" for each in stream) == WORDS
        with pytest.raises(litellm.NotFoundError, match="`nobody` does not exist"):
            litellm.completion(model="openai/nobody", **chat, **there)
        text = litellm.text_completion(
            model="text-completion-openai/demo", prompt="hi", max_tokens=4, **there
        )
        assert text.choices[0].text == WORDS
        elsewhere = {**there, "api_base": gateway.url}
        answered = litellm.completion(model="anthropic/demo", **chat, **elsewhere)
        assert answered.choices[0].message.content == WORDS
        assert litellm.embedding(model="openai/demo", input=["hi"], **there).data

    await trio.to_thread.run_sync(talk)
