"""OpenAI's Responses API of a simulated engine, with those that it keeps."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from examples.engine.api import Made, error, named_event

MAX_KEPT = 1000  # responses


class Responses:
    """Responses, whole and as events; a later request can go on from one that was kept."""

    def __init__(self) -> None:
        self.kept: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._said: dict[str, list[Any]] = {}  # the conversation up to a response

    def conversation(self, members: dict[str, Any]) -> list[Any] | None:
        """Returns all that a request goes on from, and says; None if that was not kept."""
        previous = members.get("previous_response_id")
        if previous is not None and previous not in self._said:
            return None
        said = members.get("input") or []
        items = [{"role": "user", "content": said}] if isinstance(said, str) else list(said)
        begin = self._said[previous] if previous is not None else []
        return [*begin, *items]

    def keep(self, members: dict[str, Any], made: Made) -> None:
        """Keeps a response, unless its client does not want that."""
        said = self.conversation(members)
        if members.get("store") is False or said is None:
            return
        response = self.whole(made)
        self.kept[response["id"]] = response
        self._said[response["id"]] = [*said, *response["output"]]
        if len(self.kept) > MAX_KEPT:
            del self._said[self.kept.popitem(last=False)[0]]

    def forget(self, name: str) -> dict[str, Any] | None:
        """Forgets a response; returns what says so, None if it was not kept."""
        if self.kept.pop(name, None) is None:
            return None
        del self._said[name]
        return {"id": name, "object": "response", "deleted": True}

    def whole(self, made: Made) -> dict[str, Any]:
        cached = {"cached_tokens": made.cached_tokens, "cache_write_tokens": 0}
        used = {
            "input_tokens": made.prompt_tokens,
            "input_tokens_details": cached,
            "output_tokens": len(made.words),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": made.prompt_tokens + len(made.words),
        }
        item = self._item(made, "completed", [self._part(made.text)])
        return self._response(made, "completed") | {"output": [item], "usage": used}

    def opening(self, made: Made) -> list[bytes]:
        begun = self._response(made, "in_progress")
        item = self._item(made, "in_progress", [])
        return numbered(
            0,
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
            {"type": "response.output_item.added", "output_index": 0, "item": item},
            self._at(made, "response.content_part.added") | {"part": self._part("")},
        )

    def token(self, made: Made, at: int) -> bytes:
        delta = {"delta": made.words[at], "logprobs": []}
        return numbered(4 + at, self._at(made, "response.output_text.delta") | delta)[0]

    def closing(self, made: Made, *, with_usage: bool) -> list[bytes]:
        whole = self.whole(made)
        text = {"text": made.text, "logprobs": []}
        item = whole["output"][0]
        return numbered(
            4 + len(made.words),
            self._at(made, "response.output_text.done") | text,
            self._at(made, "response.content_part.done") | {"part": item["content"][0]},
            {"type": "response.output_item.done", "output_index": 0, "item": item},
            {"type": "response.completed", "response": whole},
        )

    def error(self, status: int, text: str, kind: str = "server_error") -> dict[str, Any]:
        return error(status, text, kind)

    def _response(self, made: Made, status: str) -> dict[str, Any]:
        return {
            "id": f"resp_{made.request_id}",
            "object": "response",
            "created_at": 0,
            "status": status,
            "model": made.model,
            "output": [],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
        }

    def _item(self, made: Made, status: str, content: list[Any]) -> dict[str, Any]:
        name = f"msg_{made.request_id}"
        item = {"id": name, "type": "message", "role": "assistant", "status": status}
        return item | {"content": content}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _at(self, made: Made, kind: str) -> dict[str, Any]:
        name = f"msg_{made.request_id}"
        return {"type": kind, "item_id": name, "output_index": 0, "content_index": 0}


def numbered(first: int, *events: dict[str, Any]) -> list[bytes]:
    """Returns events of a stream, of which the first has this number."""
    return [
        named_event({**members, "sequence_number": number})
        for number, members in enumerate(events, first)
    ]
