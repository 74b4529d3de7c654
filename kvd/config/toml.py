"""Reads TOML, so that every mistake in it raises ValueError."""

from __future__ import annotations

import tomllib
from typing import Any


def parse(data: bytes) -> dict[str, Any]:
    """Returns what a document says; raises ValueError with one line that says what is wrong."""
    try:
        return tomllib.loads(data.decode())
    except RecursionError:
        raise ValueError("arrays or tables are nested too deeply") from None
