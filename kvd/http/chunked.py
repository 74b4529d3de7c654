"""Decodes a chunked body (RFC 9112 §7.1) from pieces of any size. No I/O.

    size[;extension]CRLF data CRLF ... 0[;extension]CRLF [trailer CRLF]* CRLF

Extensions and trailers are dropped. Two bounds: the decoded body, and everything around it, so
that one-byte chunks with long extensions cannot keep the decoder busy for ever.
"""

from __future__ import annotations

from enum import Enum

from kvd.http.errors import Refusal

# Longest size line or trailer of a chunked body; only attacks have longer ones.
MAX_LINE_BYTES = 4096
MAX_SIZE_DIGITS = 16  # digits of a chunk's size: a 64-bit length
# Framing allowed to the shortest chunked body; longer ones may have as much framing as their limit.
OVERHEAD_FLOOR_BYTES = 16 * 1024

_HEX_DIGITS = frozenset(b"0123456789abcdefABCDEF")


class _Expects(Enum):
    SIZE = 1
    DATA = 2
    DATA_END = 3
    TRAILER = 4
    NOTHING = 5


class Dechunker:
    """Collects one chunked body of at most `limit` bytes."""

    __slots__ = ("_body", "_expects", "_limit", "_missing", "_overhead", "_pending")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._body = bytearray()
        self._pending = b""  # fed, not yet understood
        self._expects = _Expects.SIZE
        self._missing = 0  # bytes of the current chunk still to come
        self._overhead = OVERHEAD_FLOOR_BYTES + limit  # bytes of framing still allowed

    @property
    def done(self) -> bool:
        """True once the whole body has been seen."""
        return self._expects is _Expects.NOTHING

    def feed(self, data: bytes) -> None:
        """Takes the next bytes from the connection.

        Raises:
            Refusal: 400 for bytes that are not chunked coding, 413 for a body over the limit.
        """
        data = self._pending + data if self._pending else data
        at = 0
        while self._expects is not _Expects.NOTHING:
            if self._expects is _Expects.DATA:
                taken = self._take_data(data, at)
            else:
                taken = self._take_line(data, at)
            if not taken:
                break
            at += taken
        self._pending = data[at:]

    def take(self) -> tuple[bytes, bytes]:
        """Returns the body, and the bytes after it, which belong to the next request."""
        return bytes(self._body), self._pending

    def _take_data(self, data: bytes, at: int) -> int:
        piece = data[at : at + self._missing]
        self._body += piece
        self._missing -= len(piece)
        if not self._missing:
            self._expects = _Expects.DATA_END
        return len(piece)

    def _take_line(self, data: bytes, at: int) -> int:
        end = data.find(b"\r\n", at)
        length = (len(data) if end < 0 else end) - at
        if length > MAX_LINE_BYTES:
            raise Refusal(400, "malformed chunk: line too long")
        if end < 0:
            return 0
        self._overhead -= length + 2
        if self._overhead < 0:
            raise Refusal(400, "malformed chunks: more framing than body")
        self._handle_line(data[at:end])
        return length + 2

    def _handle_line(self, line: bytes) -> None:
        if b"\n" in line or b"\r" in line:  # some proxies end a line there
            raise Refusal(400, "malformed chunk: bare CR or LF")
        if self._expects is _Expects.SIZE:
            self._start_chunk(line)
        elif self._expects is _Expects.TRAILER:
            if not line:
                self._expects = _Expects.NOTHING
        elif line:
            raise Refusal(400, "malformed chunk: longer than its size")
        else:
            self._expects = _Expects.SIZE

    def _start_chunk(self, line: bytes) -> None:
        digits = line.partition(b";")[0].rstrip(b" \t")
        if not 0 < len(digits) <= MAX_SIZE_DIGITS or not _HEX_DIGITS.issuperset(digits):
            raise Refusal(400, "malformed chunk size")
        self._missing = int(digits, 16)
        self._expects = _Expects.DATA if self._missing else _Expects.TRAILER
        if len(self._body) + self._missing > self._limit:
            raise Refusal(413, f"the body is longer than {self._limit} bytes")
