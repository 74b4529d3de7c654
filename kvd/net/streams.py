"""Stream sockets to addresses that a `Dialer` has found: TCP, or Unix sockets."""

from __future__ import annotations

import errno
import os
import socket

import trio

from kvd.wire.endpoints import host_and_port

IPC = "ipc://"
SUN_PATH_BYTES = 108  # of a Unix socket's address for the kernel, its end included

# Silence after which TCP probes find dead hosts of workers whose ZMTP is too old for heartbeats.
KEEPALIVE_IDLE_S = 30
KEEPALIVE_INTERVAL_S = 10
KEEPALIVE_PROBES = 3

SocketAddress = str | tuple[str, int]


def has_streams(endpoint: str) -> bool:
    """Returns whether it is an endpoint outside of this process."""
    return not endpoint.startswith("inproc://")


def stream_socket(endpoint: str) -> tuple[trio.socket.SocketType, SocketAddress]:
    """Returns a new socket for a dialled endpoint, and what it can connect to; raises OSError."""
    tcp = host_and_port(endpoint)
    if tcp is None:
        path = endpoint.removeprefix(IPC)
        if len(os.fsencode(path)) >= SUN_PATH_BYTES:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        return trio.socket.socket(socket.AF_UNIX), "\0" + path[1:] if path[0] == "@" else path
    return trio.socket.socket(socket.AF_INET6 if ":" in tcp[0] else socket.AF_INET), tcp


def tune(sock: trio.socket.SocketType) -> None:
    """Has the kernel find hosts that are gone, and send what is small at once."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
