"""Writes long answers piece by piece, so that other tasks run in between."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Protocol

import trio

from kvd.index.dumps import SLICE_BYTES, TEXT_BYTES
from kvd.telemetry.stretches import REQUESTS, Cause

# Longest answer that is written whole before it is sent. Of a longer one no more is kept, while its
# client may read slowly.
WHOLE_BYTES = 256 * 1024


async def sliced(pieces: Iterable[bytes], cause: Cause = REQUESTS) -> AsyncGenerator[bytes, None]:
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


async def written(
    pieces: Iterable[bytes], cause: Cause = REQUESTS
) -> bytes | AsyncGenerator[bytes, None]:
    """Joins pieces to an answer; beyond WHOLE_BYTES, returns it sliced. Other tasks run meanwhile.

    So a short answer has its length in the head, and a long one is never in memory as a whole.
    """
    rest = iter(pieces)
    slices, size = [], 0
    for joined in _joined(cause.each(rest)):
        slices.append(joined)
        size += len(joined)
        if size > WHOLE_BYTES:
            return sliced(_chained(slices, rest), cause)
        await trio.lowlevel.checkpoint()
    return b"".join(slices)


class PiecedRows(Protocol):
    """Rows of an array that are kept until they are rendered."""

    def read(self, enough: int) -> bytes:
        """Returns the next rows with a comma before each, some `enough` bytes; b"" at the end."""


def arrayed(parts: Iterable[PiecedRows]) -> Iterator[bytes]:
    """Yields a JSON array of the rows of all parts, in pieces."""
    rest = False
    for rows in parts:
        while piece := rows.read(TEXT_BYTES):
            yield piece if rest else b"[" + piece[1:]
            rest = True
    yield b"]" if rest else b"[]"


def _chained(slices: list[bytes], rest: Iterator[bytes]) -> Iterator[bytes]:
    """Yields the slices, one by one and without keeping them, and then the rest."""
    slices.reverse()
    while slices:
        yield slices.pop()
    yield from rest


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
