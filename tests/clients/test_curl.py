"""curl, as people use it in a shell."""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import partial

import pytest
import trio

from tests.clients.conftest import Gateway

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")


async def curl(*arguments: str, body: bytes = b"") -> str:
    command = ["curl", "-sS", "--noproxy", "*", *arguments]
    run = partial(subprocess.run, command, input=body, capture_output=True, check=True)
    ended = await trio.to_thread.run_sync(run)
    return ended.stdout.decode()


async def test_an_answer_and_its_headers(gateway: Gateway) -> None:
    payload = '{"model":"demo","max_tokens":2,"messages":[{"role":"user","content":"hi"}]}'
    shown = await curl("-i", f"{gateway.url}/v1/chat/completions", "-d", payload)
    head, _, body = shown.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 OK\r\n")
    assert "x-kvd-decision: overlap\r\n" in head
    assert json.loads(body)["choices"][0]["message"]["content"] == " word0 word1"


async def test_a_stream_arrives_unbuffered(gateway: Gateway) -> None:
    payload = '{"model":"demo","max_tokens":3,"prompt":"hi","stream":true}'
    shown = await curl("-N", f"{gateway.url}/v1/completions", "-d", payload)
    assert shown.endswith("data: [DONE]\n\n")
    assert shown.count("data: ") == 5


async def test_a_large_body_that_asks_first(gateway: Gateway) -> None:
    """Above 1 MiB curl sends `Expect: 100-continue`, and waits a second for the answer."""
    text = "word" * 500_000
    payload = json.dumps({"model": "demo", "max_tokens": 1, "prompt": text}).encode()
    url = f"{gateway.url}/v1/completions"
    shown = await curl("-i", url, "--data-binary", "@-", body=payload)
    assert shown.startswith("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
