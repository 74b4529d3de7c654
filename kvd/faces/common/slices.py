"""Writes long answers piece by piece, so that other tasks run in between."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator

import trio

from kvd.index.dumps import SLICE_BYTES
from kvd.telemetry.stretches import REQUESTS, Cause


async def sliced(pieces: Iterable[bytes], cause: Cause = REQUESTS) -> AsyncIterator[bytes]:
    """Joins pieces into slices; lets other tasks run after each empty piece.

    The server lets them run after each slice that it has sent. The time that a piece takes is
    counted under `cause`.
    """
    for joined in _joined(cause.each(pieces)):
        if joined:
            yield joined
        else:
            await trio.lowlevel.checkpoint()


async def whole(pieces: Iterable[bytes], cause: Cause = REQUESTS) -> bytes:
    """Joins all pieces of an answer of bounded length; other tasks run meanwhile."""
    slices = []
    for joined in _joined(cause.each(pieces)):
        slices.append(joined)
        await trio.lowlevel.checkpoint()
    return b"".join(slices)


def _joined(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Joins pieces into slices; yields b"" after an empty piece, where others may run."""
    waiting: list[bytes] = []
    size = 0
    for piece in pieces:
        waiting.append(piece)
        size += len(piece)
        if size >= SLICE_BYTES:
            yield b"".join(waiting)
            waiting, size = [], 0
        elif not piece:
            yield b""
    yield b"".join(waiting)
