"""Stream sockets, TCP or Unix, for addresses that a `Dialer` has resolved."""

from __future__ import annotations

import errno
import os
import socket

import trio

from kvd.platform.sockets import probe_host
from kvd.wire.endpoints import host_and_port

IPC = "ipc://"
SUN_PATH_BYTES = 108  # longest path of a Unix socket for the kernel, with its terminating zero

SocketAddress = str | tuple[str, int]


def has_streams(endpoint: str) -> bool:
    """Returns whether a stream socket can reach the endpoint: it is outside of this process."""
    return not endpoint.startswith("inproc://")


def stream_socket(endpoint: str) -> tuple[trio.socket.SocketType, SocketAddress]:
    """Returns a new socket for a resolved endpoint and the address to connect it to.

    Raises OSError.
    """
    tcp = host_and_port(endpoint)
    if tcp is None:
        path = endpoint.removeprefix(IPC)
        if len(os.fsencode(path)) >= SUN_PATH_BYTES:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        return trio.socket.socket(socket.AF_UNIX), "\0" + path[1:] if path[0] == "@" else path
    return trio.socket.socket(socket.AF_INET6 if ":" in tcp[0] else socket.AF_INET), tcp


def tune(sock: trio.socket.SocketType) -> None:
    """Makes the kernel detect hosts that are gone, and send small messages without delay."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    probe_host(sock)  # some workers' ZMTP is too old for heartbeats
