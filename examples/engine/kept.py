"""The responses that a simulated engine keeps, for requests that continue them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

MAX_KEPT = 1000  # responses


class KeptResponses:
    """Responses by their id, each with the conversation up to it."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[dict[str, Any], list[Any]]] = OrderedDict()

    def conversation(self, members: dict[str, Any]) -> list[Any] | None:
        """Returns the conversation that a request continues, and its input; None if unknown."""
        previous = members.get("previous_response_id")
        if previous is not None and previous not in self._kept:
            return None
        question = members.get("input") or []
        turns = [{"role": "user", "content": question}] if isinstance(question, str) else question
        return [*(self._kept[previous][1] if previous is not None else []), *turns]

    def keep(self, response: dict[str, Any], conversation: list[Any]) -> None:
        self._kept[response["id"]] = response, [*conversation, *response["output"]]
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    def show(self, name: str) -> dict[str, Any] | None:
        """Returns a response, None if it is not kept."""
        return self._kept[name][0] if name in self._kept else None

    def forget(self, name: str) -> dict[str, Any] | None:
        """Forgets a response; returns the answer that confirms it, None if it was not kept."""
        gone = self._kept.pop(name, None)
        return None if gone is None else {"id": name, "object": "response", "deleted": True}
