"""Reads the body of a request whole, within the route's limit and the listener's budget.

of announced length     the bytes of the connection as they are
chunked                 the same bytes, decoded by httptools (RFC 9112 §7.1)
"""

from __future__ import annotations

from io import BytesIO

import httptools
import trio

from kvd.http.errors import Refusal
from kvd.http.head import CHUNKED, HEAD_END, Head
from kvd.http.limits import LONG_BODY_LIMIT
from kvd.http.render import CONTINUE
from kvd.http.transport import RECEIVE_BYTES, ConnectionPhase, Transport

# Reads of one body in a row before other tasks run: 1 MiB, about 0.2 ms.
YIELD_READS = 16
# Bytes beyond LONG_BODY_LIMIT for which a body may take a second more: 8 Mbit/s.
BYTES_PER_SECOND = 1024 * 1024
# Bytes of a chunked body received at once: empty lines cost 0.6 µs each, 2 ms a read at worst.
CHUNKED_RECEIVE_BYTES = 8 * 1024
# Longest run of framing in a chunked body: only attacks have longer lines and trailers.
MAX_LINE_BYTES = 4096
# Bytes of framing allowed in a chunked body, beside as many as the route allows for the body.
OVERHEAD_FLOOR_BYTES = 16 * 1024

# First input of the body's own parser: trailers must not reach the request's head.
_CHUNKED_HEAD = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
_SPLIT_END = len(HEAD_END) - 1  # bytes of HEAD_END that may have come in an earlier piece


async def read_body(transport: Transport, head: Head, limit: int) -> bytes:
    """Returns the body announced by `head`, of at most `limit` bytes.

    Raises:
        Refusal: the body is too long, too slow or malformed, too many arrive at once, or there is
            no memory for it.
        OSError: the client left in the middle.
    """
    if head.length > limit:
        raise Refusal(413, f"the body is longer than {limit} bytes")
    buffer = transport.buffer
    if head.length != CHUNKED and head.length <= len(buffer):
        transport.buffer = buffer[head.length :]
        return buffer[: head.length]
    if head.expects_continue:
        await transport.send(CONTINUE)
    body: ChunkedBody | CountedBody
    body = ChunkedBody(limit) if head.length == CHUNKED else CountedBody(head.length)
    came = len(transport.buffer)
    while transport.buffer and (wanted := body.wanted):
        piece, transport.buffer = transport.buffer[:wanted], transport.buffer[wanted:]
        body.feed(piece)
        if transport.buffer:
            await trio.lowlevel.checkpoint()
    if body.wanted:
        seconds = transport.shared.limits.body_s + _more_s(head.length)
        await _receive_rest(transport, body, came, seconds)
    transport.buffer = body.rest + transport.buffer
    return body.data.getvalue()


def _more_s(length: int) -> float:
    """Returns how many more seconds than usual a body may take, for its length."""
    return max(0, length - LONG_BODY_LIMIT) / BYTES_PER_SECOND


async def _receive_rest(
    transport: Transport, body: ChunkedBody | CountedBody, came: int, seconds: float
) -> None:
    source = _Source(transport)
    try:
        source.count(came)
        with transport.within(ConnectionPhase.BODY, seconds):
            while wanted := body.wanted:
                body.feed(await source.receive(min(wanted, RECEIVE_BYTES)))
                if body.yields or source.reads % YIELD_READS == 0:
                    await trio.lowlevel.checkpoint()
    except trio.TooSlowError:
        raise Refusal(408, "the request body took too long") from None
    except MemoryError:
        transport.shared.stats.bodies_refused += 1
        raise Refusal(503, "not enough memory for the body") from None
    finally:
        source.release()


class _Source:
    """Receives the rest of one body, counted against the budget of all bodies of the listener."""

    def __init__(self, transport: Transport) -> None:
        self.reads = 0
        self._transport = transport
        self._received = 0

    async def receive(self, size: int) -> bytes:
        piece = await self._transport.receive(size)
        self.reads += 1
        if not piece:
            raise ConnectionResetError("the client left inside a body")
        self.count(len(piece))
        return piece

    def count(self, size: int) -> None:
        """Counts received bytes; raises Refusal if that makes too many."""
        shared = self._transport.shared
        self._received += size
        shared.body_bytes += size
        if shared.body_bytes > shared.limits.bodies_bytes:
            shared.stats.bodies_refused += 1
            raise Refusal(503, "too many large bodies at once")

    def release(self) -> None:
        self._transport.shared.body_bytes -= self._received


class CountedBody:
    """A body whose length is announced."""

    rest = b""  # bytes after it, which belong to the next request
    yields = False  # whether other tasks are to run after each read

    def __init__(self, length: int) -> None:
        self.data = BytesIO()  # its buffer becomes the result without a copy
        self._missing = length

    @property
    def wanted(self) -> int:
        """Returns how many bytes to feed next, at most; 0 at the end of the body."""
        return self._missing

    def feed(self, piece: bytes) -> None:
        """Takes the next bytes; none of them may be beyond the body."""
        self._missing -= self.data.write(piece)


class ChunkedBody:
    """A chunked body of at most `limit` bytes. Extensions and trailers are dropped.

    httptools does not bound what it skips, so this class does, by comparing what it feeds with what
    comes out. It bounds each line, and all framing together, so that one-byte chunks with long
    extensions cannot keep the parser busy for ever.

    Nor does httptools say where a message ends; it goes on to parse the next one. But a message
    ends with an empty line, so the parser is fed up to one empty line at a time.
    """

    yields = True

    def __init__(self, limit: int) -> None:
        self.rest = b""  # bytes after the body, which belong to the next request
        self._limit = limit
        self._decoded = _Decoded(limit)
        self._overhead = OVERHEAD_FLOOR_BYTES + limit  # bytes of framing still allowed
        self._last = b""  # the last bytes fed; an empty line may begin in them
        self._parser = httptools.HttpRequestParser(self._decoded)
        self._parser.feed_data(_CHUNKED_HEAD)

    @property
    def wanted(self) -> int:
        """Returns how many bytes to receive next; 0 at the end of the body."""
        return 0 if self._decoded.complete else CHUNKED_RECEIVE_BYTES

    @property
    def data(self) -> BytesIO:
        """The body as far as it has been decoded."""
        return self._decoded.data

    def feed(self, data: bytes) -> None:
        """Takes the next bytes from the connection.

        Raises:
            Refusal: 400 for bytes that are not chunked coding, 413 for a body over the limit.
        """
        decoded = self._decoded
        before = decoded.size
        taken = self._feed_lines(data)
        self._overhead -= taken - (decoded.size - before)
        if decoded.size > self._limit:
            raise Refusal(413, f"the body is longer than {self._limit} bytes")
        if decoded.line > MAX_LINE_BYTES:
            raise Refusal(400, "malformed chunk: line too long")
        if self._overhead < 0:
            raise Refusal(400, "malformed chunks: more framing than body")
        self.rest = data[taken:]

    def _feed_lines(self, data: bytes) -> int:
        """Parses up to the end of the body or of `data`; returns how many bytes that were."""
        text = self._last + data
        begin = at = len(self._last)
        while at < len(text) and not self._decoded.complete:
            end = text.find(HEAD_END, max(0, at - _SPLIT_END))
            end = len(text) if end < 0 else end + len(HEAD_END)
            self._decoded.line += end - at
            self._parse(text[at:end])
            at = end
        self._last = text[-_SPLIT_END:]
        return at - begin

    def _parse(self, piece: bytes) -> None:
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserError as error:
            raise Refusal(400, f"malformed chunk: {error}") from None


class _Decoded:
    """Collects what a parser decodes; it has no reference back to the parser, to avoid a cycle.

    A body in a cycle would stay in memory until the garbage collector runs, which it rarely does.
    """

    __slots__ = ("_limit", "complete", "data", "line", "size")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.data = BytesIO()
        self.size = 0
        self.line = 0  # bytes fed since it was last known that a line had ended
        self.complete = False

    # Called by llhttp while it is fed.

    def on_body(self, piece: bytes) -> None:
        self.line = 0
        self.size += len(piece)
        if self.size <= self._limit:
            self.data.write(piece)

    def on_message_complete(self) -> None:
        self.line = 0
        self.complete = True
