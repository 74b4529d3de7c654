"""Reads the head of a request from its connection, as far as it has come, or piece by piece."""

from __future__ import annotations

import trio

from kvd.http.errors import Refusal
from kvd.http.head import HEAD_END, Head, HeadParser
from kvd.http.transport import ConnectionPhase, Transport


async def read_head(transport: Transport) -> Head | None:
    """Returns the next head, None if the client left in the middle of it; raises Refusal."""
    data = transport.buffer
    end = data.find(HEAD_END) + len(HEAD_END)
    if not len(HEAD_END) <= end <= transport.shared.limits.head_bytes or data[0] in b"\r\n":
        return await _read_in_pieces(transport, data)
    transport.buffer = data[end:]
    parser = HeadParser()
    parser.feed(data[:end])
    return parser.finish(transport.shared.limits)


async def _read_in_pieces(transport: Transport, piece: bytes) -> Head | None:
    """Reads a head that has not come whole; refuses it at its first wrong byte."""
    transport.buffer = b""
    parser = HeadParser()
    try:
        with transport.within(ConnectionPhase.HEAD, transport.shared.limits.head_s):
            return await _read_pieces(transport, parser, piece)
    except trio.TooSlowError:
        raise parser.silenced(Refusal(408, "the request head took too long")) from None


async def _read_pieces(transport: Transport, parser: HeadParser, piece: bytes) -> Head | None:
    limits = transport.shared.limits
    data = b""
    while piece:
        parsed = len(data)
        data = data + piece if data else piece.lstrip(b"\r\n")  # RFC 9112 §2.2: empty lines
        end = data.find(HEAD_END, max(0, parsed - len(HEAD_END) + 1))
        end = len(data) if end < 0 else end + len(HEAD_END)
        parser.feed(data[parsed : min(end, limits.head_bytes)])
        if end > limits.head_bytes:
            text = f"the request head is longer than {limits.head_bytes} bytes"
            raise parser.silenced(Refusal(431, text))
        if data.endswith(HEAD_END, 0, end):
            transport.buffer = data[end:]
            return parser.finish(limits)
        await trio.lowlevel.checkpoint()  # with TLS a byte can be a record
        piece = await transport.receive()
    transport.shared.stats.client_gone += bool(data)
    return None
