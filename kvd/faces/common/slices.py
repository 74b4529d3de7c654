"""Writes long answers piece by piece, so that other tasks run in between."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

import trio

from kvd.index.dumps import SLICE_BYTES
from kvd.telemetry.stretches import REQUESTS, Cause


async def sliced(pieces: Iterable[bytes], cause: Cause = REQUESTS) -> AsyncIterator[bytes]:
    """Joins pieces into slices; lets other tasks run after each slice and each empty piece.

    The time that a piece takes is counted under `cause`.
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
    """Joins all pieces of an answer of bounded length; other tasks run meanwhile."""
    return b"".join([piece async for piece in sliced(pieces, cause)])
