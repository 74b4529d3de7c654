"""The one exception of the benchmark kit."""

from __future__ import annotations


class BenchError(Exception):
    """A run that cannot go on; its text is all a user needs to see."""
