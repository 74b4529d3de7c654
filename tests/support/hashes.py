"""Hashes of blocks in the form that compiled code takes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable


def packed(hashes: Iterable[int]) -> bytes:
    """Returns the hashes as 8 bytes each, in the machine's order."""
    return array("Q", hashes).tobytes()
