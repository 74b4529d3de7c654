"""Long answers, written piece by piece so that others run between."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

import trio

from kvd.index.dumps import SLICE_BYTES
from kvd.telemetry.stretches import REQUESTS, Cause


async def sliced(pieces: Iterable[bytes], cause: Cause = REQUESTS) -> AsyncIterator[bytes]:
    """Joins pieces to slices and lets others run between them, and at every empty piece.

    The loop's time for a piece counts as of `cause`.
    """
    waiting: list[bytes] = []
    size = 0
    for piece in cause.each(pieces):
        waiting.append(piece)
        size += len(piece)
        if size >= SLICE_BYTES:
            yield b"".join(waiting)
            waiting, size = [], 0
        elif piece:
            continue
        await trio.lowlevel.checkpoint()
    yield b"".join(waiting)


async def whole(pieces: Iterable[bytes], cause: Cause = REQUESTS) -> bytes:
    """Joins all pieces of an answer whose length is bounded; others run meanwhile."""
    return b"".join([piece async for piece in sliced(pieces, cause)])
