"""Anthropic's Messages API of a simulated engine."""

from __future__ import annotations

from typing import Any

from examples.engine.api import Made, named_event


class Messages:
    """Messages, whole and as events."""

    def whole(self, made: Made) -> dict[str, Any]:
        block = {"type": "text", "text": made.text, "citations": None}
        return self._message(made) | {"content": [block], "usage": usage(made)}

    def opening(self, made: Made) -> list[bytes]:
        start = self._message(made) | {"stop_reason": None, "usage": usage(made, output=0)}
        block = {"type": "text", "text": "", "citations": None}
        return [
            named_event({"type": "message_start", "message": start}),
            named_event({"type": "content_block_start", "index": 0, "content_block": block}),
        ]

    def token(self, made: Made, at: int) -> bytes:
        delta = {"type": "text_delta", "text": made.words[at]}
        return named_event({"type": "content_block_delta", "index": 0, "delta": delta})

    def closing(self, made: Made, *, with_usage: bool) -> list[bytes]:
        delta = {"stop_reason": "max_tokens", "stop_sequence": None}
        return [
            named_event({"type": "content_block_stop", "index": 0}),
            named_event({"type": "message_delta", "delta": delta, "usage": usage(made)}),
            named_event({"type": "message_stop"}),
        ]

    def error(self, status: int, text: str, kind: str = "server_error") -> dict[str, Any]:
        kinds = {404: "not_found_error", 429: "rate_limit_error", 503: "overloaded_error"}
        told = {"type": kinds.get(status, "api_error"), "message": text}
        return {"type": "error", "error": told}

    def _message(self, made: Made) -> dict[str, Any]:
        return {
            "id": f"msg_{made.request_id}",
            "type": "message",
            "role": "assistant",
            "model": made.model,
            "content": [],
            "stop_reason": "max_tokens",
            "stop_sequence": None,
        }


def usage(made: Made, output: int | None = None) -> dict[str, Any]:
    return {
        "input_tokens": made.prompt_tokens - made.cached_tokens,
        "cache_read_input_tokens": made.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(made.words) if output is None else output,
    }
