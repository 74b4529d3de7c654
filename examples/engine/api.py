"""Answers of a simulated engine in the forms of each API, whole and as streams of events."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

DEFAULT_TOKENS = 16  # of an answer whose length the request leaves open
DONE = b"data: [DONE]\n\n"

Members = dict[str, Any]


def words(count: int) -> list[str]:
    """Returns the tokens of an answer."""
    return [f" word{number}" for number in range(count)]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request."""

    prompt: int
    cached: int  # tokens of the prompt
    completion: int


@dataclass(frozen=True, slots=True)
class Form(ABC):
    """How one API words an answer."""

    request_id: str
    model: str
    # Members that limit the answer's length; the first one that is present counts.
    limits: ClassVar[tuple[str, ...]] = ("max_tokens",)
    ends: ClassVar[bytes] = DONE  # the very last event of a stream

    @abstractmethod
    def whole(self, text: str, used: Usage) -> Members:
        """Returns the answer of a request that wants no stream."""

    @abstractmethod
    def opening(self, used: Usage) -> Iterator[bytes]:
        """Yields the events of a stream before its first token."""

    @abstractmethod
    def piece(self, word: str, *, first: bool) -> bytes:
        """Returns the event of one token."""

    @abstractmethod
    def closing(self, text: str, used: Usage, *, with_usage: bool) -> Iterator[bytes]:
        """Yields the events after the last token, except the very last one, `ends`."""

    @staticmethod
    def error(status: int, text: str, kind: str = "server_error") -> Members:
        """Returns the body of an error."""
        return error(status, text, kind)


class _Completions(Form):
    """What the two older APIs of OpenAI have in common: events without a name."""

    kind: ClassVar[str]
    whole_kind: ClassVar[str]
    prefix: ClassVar[str]

    def whole(self, text: str, used: Usage) -> Members:
        choice = {"index": 0, "finish_reason": "length", "logprobs": None, **self._whole_text(text)}
        return self._members(self.whole_kind, choice) | {"usage": _usage(used)}

    def opening(self, used: Usage) -> Iterator[bytes]:
        return iter(())

    def piece(self, word: str, *, first: bool) -> bytes:
        return self._event({"index": 0, "finish_reason": None, **self._added(word, first)})

    def closing(self, text: str, used: Usage, *, with_usage: bool) -> Iterator[bytes]:
        yield self._event({"index": 0, "finish_reason": "length", **self._added("", False)})
        if with_usage:
            yield event(self._members(self.kind) | {"usage": _usage(used)})

    def _event(self, choice: Members) -> bytes:
        return event(self._members(self.kind, choice))

    def _members(self, kind: str, *choices: Members) -> Members:
        name = f"{self.prefix}-{self.request_id}"
        members: Members = {"id": name, "object": kind, "created": 0, "model": self.model}
        return {**members, "choices": list(choices)}

    @abstractmethod
    def _whole_text(self, text: str) -> Members: ...

    @abstractmethod
    def _added(self, word: str, first: bool) -> Members: ...


class Chat(_Completions):
    """`/v1/chat/completions`."""

    kind = "chat.completion.chunk"
    whole_kind = "chat.completion"
    prefix = "chatcmpl"
    limits = ("max_completion_tokens", "max_tokens")

    def _whole_text(self, text: str) -> Members:
        return {"message": {"role": "assistant", "content": text}}

    def _added(self, word: str, first: bool) -> Members:
        return {"delta": {"content": word} | ({"role": "assistant"} if first else {})}


class Completion(_Completions):
    """`/v1/completions`."""

    kind = whole_kind = "text_completion"
    prefix = "cmpl"

    def _whole_text(self, text: str) -> Members:
        return {"text": text}

    def _added(self, word: str, first: bool) -> Members:
        return {"text": word}


class Messages(Form):
    """Anthropic's `/v1/messages`: events with names, and no `[DONE]`."""

    ends = b'event: message_stop\ndata: {"type": "message_stop"}\n\n'

    def whole(self, text: str, used: Usage) -> Members:
        content = [{"type": "text", "text": text}]
        return self._message(content, "max_tokens", used)

    def opening(self, used: Usage) -> Iterator[bytes]:
        yield _named("message_start", message=self._message([], None, used))
        yield _named("content_block_start", index=0, content_block={"type": "text", "text": ""})
        yield _named("ping")

    def piece(self, word: str, *, first: bool) -> bytes:
        return _named("content_block_delta", index=0, delta={"type": "text_delta", "text": word})

    def closing(self, text: str, used: Usage, *, with_usage: bool) -> Iterator[bytes]:
        yield _named("content_block_stop", index=0)
        delta = {"stop_reason": "max_tokens", "stop_sequence": None}
        yield _named("message_delta", delta=delta, usage=self._usage(used))

    @staticmethod
    def error(status: int, text: str, kind: str = "server_error") -> Members:
        kinds = {404: "not_found_error", 429: "rate_limit_error", 503: "overloaded_error"}
        return {"type": "error", "error": {"type": kinds.get(status, "api_error"), "message": text}}

    def _message(self, content: list[Members], stop: str | None, used: Usage) -> Members:
        return {
            "id": f"msg_{self.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": stop,
            "stop_sequence": None,
            "usage": self._usage(used),
        }

    def _usage(self, used: Usage) -> Members:
        return {
            "input_tokens": used.prompt - used.cached,
            "cache_read_input_tokens": used.cached,
            "output_tokens": used.completion,
        }


class Responses(Form):
    """OpenAI's `/v1/responses`: events with names and numbers."""

    limits = ("max_output_tokens",)
    ends = b""

    def whole(self, text: str, used: Usage) -> Members:
        usage = {
            "input_tokens": used.prompt,
            "input_tokens_details": {"cached_tokens": used.cached},
            "output_tokens": used.completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": used.prompt + used.completion,
        }
        return self._response("completed", [self._item(text)], usage)

    def opening(self, used: Usage) -> Iterator[bytes]:
        begun = self._response("in_progress", [], None)
        yield _named("response.created", sequence_number=0, response=begun)
        item = self._item("") | {"status": "in_progress", "content": []}
        added = {"output_index": 0, "item": item}
        yield _named("response.output_item.added", sequence_number=1, **added)
        part = {**self._place(), "part": _text_part("")}
        yield _named("response.content_part.added", sequence_number=2, **part)

    def piece(self, word: str, *, first: bool) -> bytes:
        number = 3 if first else 4  # clients do not count them
        members = {**self._place(), "delta": word, "logprobs": []}
        return _named("response.output_text.delta", sequence_number=number, **members)

    def closing(self, text: str, used: Usage, *, with_usage: bool) -> Iterator[bytes]:
        members = {**self._place(), "text": text, "logprobs": []}
        yield _named("response.output_text.done", sequence_number=5, **members)
        part = {**self._place(), "part": _text_part(text)}
        yield _named("response.content_part.done", sequence_number=6, **part)
        item = {"output_index": 0, "item": self._item(text)}
        yield _named("response.output_item.done", sequence_number=7, **item)
        whole = self.whole(text, used)
        yield _named("response.completed", sequence_number=8, response=whole)

    def _place(self) -> Members:
        return {"item_id": f"item_{self.request_id}", "output_index": 0, "content_index": 0}

    def _item(self, text: str) -> Members:
        return {
            "id": f"item_{self.request_id}",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [_text_part(text)],
        }

    def _response(self, status: str, output: list[Members], usage: Members | None) -> Members:
        return {
            "id": f"resp_{self.request_id}",
            "object": "response",
            "created_at": 0,
            "status": status,
            "model": self.model,
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": usage,
        }


FORMS: dict[str, type[Form]] = {
    "/v1/chat/completions": Chat,
    "/v1/completions": Completion,
    "/v1/messages": Messages,
    "/v1/responses": Responses,
}


def event(members: Members) -> bytes:
    return b"data: %b\n\n" % json.dumps(members).encode()


def _named(name: str, **members: Any) -> bytes:
    return b"event: %b\n%b" % (name.encode(), event({"type": name, **members}))


def _text_part(text: str) -> Members:
    return {"type": "output_text", "text": text, "annotations": []}


def _usage(used: Usage) -> Members:
    return {
        "prompt_tokens": used.prompt,
        "completion_tokens": used.completion,
        "total_tokens": used.prompt + used.completion,
        "prompt_tokens_details": {"cached_tokens": used.cached},
    }


def error(status: int, text: str, kind: str = "server_error") -> Members:
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
