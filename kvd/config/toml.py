"""Reads TOML, so that every mistake in it raises ValueError."""

from __future__ import annotations

import tomllib
from typing import Any


def parse(data: bytes) -> dict[str, Any]:
    """Returns the content of a document; raises ValueError with one line that explains."""
    try:
        return tomllib.loads(data.decode())
    except RecursionError:
        raise ValueError("arrays or tables are nested too deeply") from None
