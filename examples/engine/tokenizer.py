"""Token ids of texts and messages: the same text always has the same ids.

A token is a word with the blank before it, or a run of other characters. Its id is a hash, so
nothing has to be learned, and two words rarely have the same id.
"""

from __future__ import annotations

import json
import re
from typing import Any
from zlib import crc32

VOCABULARY = 100_000
SPECIAL = 16  # ids below this one mark the parts of messages
BEGIN, END, ASSISTANT = 1, 2, 3
WORD = re.compile(r"\s?\w+|\s?[^\w\s]+|\s+")


def ids_of_text(text: str) -> list[int]:
    """Returns the ids of a text's tokens."""
    return [
        SPECIAL + crc32(word.encode("utf-8", "surrogatepass")) % (VOCABULARY - SPECIAL)
        for word in WORD.findall(text)
    ]


def ids_of_messages(messages: list[Any]) -> list[int]:
    """Returns the ids of a conversation, with the mark after which the answer begins."""
    ids: list[int] = []
    for message in messages:
        content = message.get("content") or ""
        text = content if isinstance(content, str) else json.dumps(content)
        thought = message.get("reasoning") or ""
        each = (str(message.get("role")), thought, text)
        ids += [BEGIN, *(one for part in each for one in ids_of_text(part)), END]
    return [*ids, BEGIN, ASSISTANT]


def prompt_of(members: dict[str, Any], *, knows_former: bool = True) -> list[int]:
    """Returns the token ids of a request's prompt, as far as the engine is not to truncate it.

    Unless it `knows_former`, the former name of a message's reasoning is not read: vLLM's /tokenize
    does not.
    """
    if "messages" in members:
        system = members.get("system")  # Anthropic's
        turns = [{"role": "system", "content": system}] if system else []
        for message in members["messages"]:
            former = message.get("reasoning_content") if knows_former else None
            turns.append(message | {"reasoning": former} if former else message)
        return ids_of_messages(turns)[-(members.get("truncate_prompt_tokens") or 0) :]
    if "input" in members:  # of responses: a text or messages
        question = members["input"]
        turns = [{"role": "user", "content": question}] if isinstance(question, str) else question
        system = members.get("instructions")
        return ids_of_messages([{"role": "system", "content": system}, *turns] if system else turns)
    prompt = members.get("prompt", "")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return list(prompt)
    return ids_of_text(prompt if isinstance(prompt, str) else "".join(prompt))
