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
