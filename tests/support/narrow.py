"""Connections with a small receive buffer, which is soon full when their client stops reading.

By default the kernel lets the receive buffer of a loopback connection grow to many megabytes. How
much a test must send to fill it would depend on the machine's settings.
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
