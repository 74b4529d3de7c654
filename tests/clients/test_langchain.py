"""LangChain's client of OpenAI's API in front of the gateway."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from examples.engine.options import EngineOptions, Fault
from tests.clients.common import Start, base_url, client_package, work
from tests.support.gateways import serving

langchain_openai = client_package("langchain_openai")
openai = client_package("openai")

WORDS = " word0 word1 word2 word3"


async def test_chats(kvd_process: Start) -> None:
    async with serving(kvd_process, EngineOptions()) as (client, running):
        url = f"{base_url(client)}/v1"

        def model(**more: Any) -> Any:
            options = {"base_url": url, "api_key": "none", "model": "demo", "max_retries": 0}
            return langchain_openai.ChatOpenAI(max_tokens=4, timeout=30, **options, **more)

        def talk() -> None:
            assert model().invoke("hello").content == WORDS
            parts = list(model(stream_usage=True).stream("hello"))
            assert "".join(part.content for part in parts) == WORDS
            used = [part.usage_metadata for part in parts if part.usage_metadata]
            assert used[-1]["output_tokens"] == 4

        async def read() -> None:
            model_ = model()
            assert "".join([part.content async for part in model_.astream("hello")]) == WORDS
            running[0].server.options.faults.append(Fault.AFTER_EVENT)
            with pytest.raises(openai.APIError, match="broke off"):
                async for _ in model_.astream("hello"):
                    pass

        await work(talk)
        await work(asyncio.run, read())
