"""Streams the response of a hot route whose body is an iterator."""

from __future__ import annotations

from collections.abc import AsyncIterator

import trio

from kvd.http.head import Head
from kvd.http.transport import Transport
from kvd.http.types import Response
from kvd.http.writer import ResponseWriter
from kvd.logs import get_logger

log = get_logger(__name__)


async def stream(
    transport: Transport, head: Head, response: Response, pieces: AsyncIterator[bytes]
) -> bool:
    """Sends `pieces` as they come, no faster than the client reads; returns persistence.

    The iterator has `handler_seconds` for each piece. When it fails or the client leaves, the
    connection is broken off, so that the client cannot take what it got for the whole.

    Raises:
        OSError: the response broke off.
    """
    writer = ResponseWriter(transport, head)
    writer.start(response.status, response.content_type, response.headers, None)
    try:
        if head.method != "HEAD":
            while (piece := await _next(transport, pieces)) is not None:
                await writer.write(piece)
                await trio.lowlevel.checkpoint()  # a fast reader never makes a send wait
        await writer.end()
    finally:
        await _close(pieces)
    return writer.persists


async def _next(transport: Transport, pieces: AsyncIterator[bytes]) -> bytes | None:
    transport.rest()
    stats, limits = transport.shared.stats, transport.shared.limits
    with trio.move_on_after(limits.handler_seconds):
        try:
            return await anext(pieces, None)
        except Exception as error:
            stats.handler_bugs += 1
            log.exception("stream_failed")
            raise ConnectionAbortedError("the response broke off") from error
    stats.handler_timeouts += 1
    raise ConnectionAbortedError("the response took too long")


async def _close(pieces: AsyncIterator[bytes]) -> None:
    close = getattr(pieces, "aclose", None)  # generators have one, iterators need not
    if close is not None:
        await close()
