"""TCP sockets: opens those that listen, and has the kernel find hosts that are gone."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Any, Protocol

# Silence before the kernel probes whether a host is still there; all probes unanswered, the
# connection ends.
KEEPALIVE_IDLE_S = 30
KEEPALIVE_INTERVAL_S = 10
KEEPALIVE_PROBES = 3


class HasOptions(Protocol):
    """A socket, of Python's or of trio's."""

    def setsockopt(self, level: int, option: int, value: int, /) -> None: ...


def probe_host(sock: HasOptions) -> None:
    """Has a TCP connection end within a minute if its other host is gone without a word."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


def distinct(found: Iterable[tuple[int, int, int, str, Any]]) -> list[tuple[int, Any]]:
    """Returns the families and addresses that getaddrinfo has found, each once, in order."""
    return sorted({(family, address) for family, *_, address in found})


def listening_tcp(
    family: int, address: Any, backlog: int, *, shared: bool = False
) -> socket.socket:
    """Returns a non-blocking TCP socket that listens on an address; raises OSError.

    At most `backlog` connections wait to be accepted. Several `shared` sockets may have one
    address: each gets a part of its connections.
    """
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # [::] beside 0.0.0.0
        sock.bind(address)
        sock.listen(backlog)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock
