"""The one exception of the benchmark kit."""

from __future__ import annotations


class BenchError(Exception):
    """A run cannot go on; the text is all that a user needs to see."""
