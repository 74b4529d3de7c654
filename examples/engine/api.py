"""Answers of a simulated engine in the words of each API, whole and as streams of events.

    opening events │ one event a token │ closing events

OpenAI's chats and completions are here; its responses and Anthropic's messages are in files of
their own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

DEFAULT_TOKENS = 16  # of an answer whose length the request leaves open
DONE = b"data: [DONE]\n\n"
# What the length of an answer is called; the first that is there decides.
LENGTHS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


@dataclass(frozen=True, slots=True)
class Made:
    """One answer."""

    request_id: str
    model: str
    words: list[str]  # its tokens
    prompt_tokens: int
    cached_tokens: int  # of these

    @property
    def text(self) -> str:
        return "".join(self.words)


class Api(Protocol):
    """How an API says it."""

    def whole(self, made: Made) -> dict[str, Any]:
        """Returns the answer of a request that wants no stream."""

    def opening(self, made: Made) -> list[bytes]:
        """Returns the events of a stream before its first token."""

    def token(self, made: Made, at: int) -> bytes:
        """Returns the event of one token."""

    def closing(self, made: Made, *, with_usage: bool) -> list[bytes]:
        """Returns the events behind the last token."""

    def error(self, status: int, text: str, kind: str = "server_error") -> dict[str, Any]:
        """Returns the body of an error."""


def length_of(members: dict[str, Any]) -> int:
    """Returns how many tokens the answer to a request has."""
    said = (members.get(name) for name in LENGTHS)
    return next((each for each in said if each), DEFAULT_TOKENS)


def words(count: int) -> list[str]:
    """Returns the tokens of an answer."""
    return [f" word{number}" for number in range(count)]


class OpenAi:
    """Chats, or completions."""

    def __init__(self, *, chat: bool) -> None:
        self._chat = chat

    def whole(self, made: Made) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "logprobs": None}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": made.text}
        else:
            choice["text"] = made.text
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head(made, kind), "choices": [choice], "usage": usage(made)}

    def opening(self, made: Made) -> list[bytes]:
        return []

    def token(self, made: Made, at: int) -> bytes:
        return self._chunk(made, made.words[at], first=at == 0)

    def closing(self, made: Made, *, with_usage: bool) -> list[bytes]:
        events = [self._chunk(made, None, first=False)]
        if with_usage:
            last = {**self._head(made, self._chunk_kind), "choices": [], "usage": usage(made)}
            events.append(event(last))
        return [*events, DONE]

    def error(self, status: int, text: str, kind: str = "server_error") -> dict[str, Any]:
        return error(status, text, kind)

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _head(self, made: Made, kind: str) -> dict[str, Any]:
        name = f"{'chatcmpl' if self._chat else 'cmpl'}-{made.request_id}"
        return {"id": name, "object": kind, "created": 0, "model": made.model}

    def _chunk(self, made: Made, piece: str | None, *, first: bool) -> bytes:
        choice: dict[str, Any] = {"index": 0, "finish_reason": None if piece else "length"}
        if self._chat:
            choice["delta"] = {"content": piece or ""} | ({"role": "assistant"} if first else {})
        else:
            choice["text"] = piece or ""
        return event({**self._head(made, self._chunk_kind), "choices": [choice]})


def usage(made: Made) -> dict[str, Any]:
    return {
        "prompt_tokens": made.prompt_tokens,
        "completion_tokens": len(made.words),
        "total_tokens": made.prompt_tokens + len(made.words),
        "prompt_tokens_details": {"cached_tokens": made.cached_tokens},
    }


def event(members: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % json.dumps(members).encode()


def named_event(members: dict[str, Any]) -> bytes:
    """Returns an event with its type as its name, too."""
    return b"event: %b\n%b" % (members["type"].encode(), event(members))


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
