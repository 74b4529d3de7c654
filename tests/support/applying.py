"""Applies batches to streams without a listener."""

from __future__ import annotations

from typing import Protocol

from kvd_core.index.prefix_index import UNFINISHED


class Applying(Protocol):
    def apply(self, payload: bytes) -> int: ...
    def advance(self) -> int: ...


def apply_whole(stream: Applying, payload: bytes) -> int:
    """Applies a batch, in as many slices as it takes; returns the bits of `BatchSink.apply`."""
    shown = stream.apply(payload)
    while shown == UNFINISHED:
        shown = stream.advance()
    return shown
