"""OpenAI's answers of a simulated engine, whole and as streams of events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

DEFAULT_TOKENS = 16  # of an answer whose length the request leaves open
DONE = b"data: [DONE]\n\n"


def words(count: int) -> list[str]:
    """Returns the tokens of an answer."""
    return [f" word{number}" for number in range(count)]


def usage(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def whole_answer(
    chat: bool, request_id: str, model: str, text: str, used: dict[str, Any]
) -> dict[str, Any]:
    """Returns the answer of a request that wants no stream."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "logprobs": None}
    if chat:
        choice["message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    kind = "chat.completion" if chat else "text_completion"
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
        "object": kind,
        "created": 0,
        "model": model,
        "choices": [choice],
        "usage": used,
    }


def chunk(chat: bool, request_id: str, model: str, piece: str | None, *, first: bool) -> bytes:
    """Returns one event of a stream; None for the last, which ends the answer."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": None if piece else "length"}
    if chat:
        choice["delta"] = {"content": piece or ""} | ({"role": "assistant"} if first else {})
    else:
        choice["text"] = piece or ""
    answer = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": 0,
        "model": model,
        "choices": [choice],
    }
    return event(answer)


def usage_event(request_id: str, model: str, used: dict[str, Any]) -> bytes:
    """Returns the event that tells a stream's usage."""
    return event({"id": request_id, "model": model, "choices": [], "usage": used})


def event(members: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % json.dumps(members).encode()


def error(status: int, text: str, kind: str = "server_error") -> dict[str, Any]:
    return {"error": {"message": text, "type": kind, "param": None, "code": status}}


def metrics(kind: str, block_size: int, blocks: int) -> str:
    """Returns what a scrape shows of the cache's configuration."""
    if kind != "vllm":
        return "sglang:num_running_reqs 0\n"
    return (
        "# TYPE vllm:cache_config_info gauge\n"
        f'vllm:cache_config_info{{block_size="{block_size}",enable_prefix_caching="True",'
        f'engine="0",num_gpu_blocks="{blocks}"}} 1.0\n'
    )


def pieces(text: list[str]) -> Iterator[tuple[str, bool]]:
    """Yields each token, and whether it is the first."""
    for at, word in enumerate(text):
        yield word, at == 0
