"""Reads the body of a request whole, within the route's limit and the listener's budget."""

from __future__ import annotations

from io import BytesIO

import trio

from kvd.http.chunked import Dechunker
from kvd.http.errors import Refusal
from kvd.http.head import CHUNKED, Head
from kvd.http.render import CONTINUE
from kvd.http.transport import RECEIVE_BYTES, Phase, Transport

# Reads of one body in a row before other tasks run: 1 MiB, about 0.2 ms.
YIELD_READS = 16
# Bytes of a chunked body received at once: one-byte chunks cost 0.6 µs each, 2 ms a read at worst.
CHUNKED_RECEIVE_BYTES = 16 * 1024


async def read_body(transport: Transport, head: Head, limit: int) -> bytes:
    """Returns the body announced by `head`, of at most `limit` bytes.

    Raises:
        Refusal: the body is too long, too slow or malformed, or too many arrive at once.
        OSError: the client left in the middle.
    """
    if head.length > limit:
        raise Refusal(413, f"the body is longer than {limit} bytes")
    buffer = transport.buffer
    if head.length != CHUNKED and head.length <= len(buffer):
        transport.buffer = buffer[head.length :]
        return buffer[: head.length]
    transport.buffer = b""
    if head.expects_continue:
        await transport.send(CONTINUE)
    transport.arm(Phase.BODY, transport.shared.limits.body_seconds)
    source = _Source(transport)
    try:
        if head.length == CHUNKED:
            return await _read_chunked(source, buffer, limit)
        return await _read_counted(source, buffer, head.length)
    finally:
        source.release()


class _Source:
    """The rest of one body, counted against what all bodies of the listener may occupy."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._received = 0

    async def receive(self, size: int) -> bytes:
        transport = self.transport
        piece = await transport.receive(size)
        if not piece:
            if transport.expired:
                raise Refusal(408, "the request body took too long")
            raise ConnectionResetError("the client left inside a body")
        shared = transport.shared
        self._received += len(piece)
        shared.body_bytes += len(piece)
        if shared.body_bytes > shared.limits.bodies_bytes:
            shared.stats.bodies_refused += 1
            raise Refusal(503, "too many large bodies at once")
        return piece

    def release(self) -> None:
        self.transport.shared.body_bytes -= self._received


async def _read_counted(source: _Source, first: bytes, length: int) -> bytes:
    body = BytesIO()  # its buffer becomes the result without a copy, and needs no part list
    body.write(first)
    missing = length - len(first)
    reads = 0
    while missing:
        missing -= body.write(await source.receive(min(missing, RECEIVE_BYTES)))
        reads += 1
        if reads % YIELD_READS == 0:
            await trio.lowlevel.checkpoint()
    return body.getvalue()


async def _read_chunked(source: _Source, first: bytes, limit: int) -> bytes:
    chunks = Dechunker(limit)
    chunks.feed(first)
    while not chunks.done:
        chunks.feed(await source.receive(CHUNKED_RECEIVE_BYTES))
        await trio.lowlevel.checkpoint()
    body, source.transport.buffer = chunks.take()
    return body
