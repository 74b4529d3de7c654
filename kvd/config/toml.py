"""Reads TOML, so that every mistake in it raises ValueError."""

from __future__ import annotations

import re
import tomllib
from typing import Any

# The place that a message of tomllib names, else it says "at end of document"; the key that is set
# in that line; and the beginning of a value without quotes that was meant as a text.
_POSITION = re.compile(r"\(at line (\d+), column (\d+)\)")
_KEY = re.compile(r"\s*([A-Za-z0-9_-]+)\s*=")
_BARE_WORD = re.compile(r"\s*(?!(?:true|false|inf|nan)\b)[A-Za-z/]")


def parse(data: bytes) -> dict[str, Any]:
    """Returns the content of a document; raises ValueError with one line that explains."""
    try:
        text = data.decode("utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"the file is not UTF-8 in line {line}") from None
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("arrays or tables are nested too deeply") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(_explained(str(error), text)) from None


def _explained(message: str, text: str) -> str:
    """Returns a message of tomllib with the key whose value it is about, but not the value."""
    named = _POSITION.search(message)
    line = text.split("\n")[int(named[1]) - 1 if named else -1]
    key = _KEY.match(line)
    if key is None or (named and int(named[2]) <= key.end()):  # in an array that was not closed
        return message
    hint = "; a text needs quotes" if _BARE_WORD.match(line, key.end()) else ""
    return f"{key[1]}: {message}{hint}"
