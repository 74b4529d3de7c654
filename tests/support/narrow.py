"""Connections whose reader takes little when it stops reading.

Left to itself, the kernel lets the receive buffer of a connection over loopback grow to many
megabytes, as far as the machine's settings go: what is meant to fill it would depend on them.
"""

from __future__ import annotations

import socket

import trio

NARROW_BYTES = 64 * 1024  # the kernel doubles it for its own needs


async def narrow_stream(host: str, port: int) -> trio.SocketStream:
    """Connects with a receive buffer that does not grow."""
    sock = trio.socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, NARROW_BYTES)
    await sock.connect((host, port))
    return trio.SocketStream(sock)
