"""Takes over the listening sockets of a service manager, which keeps them open while kvd restarts.

systemd binds the addresses of a socket unit and passes the descriptors on, from 3 upwards:

    LISTEN_PID=4711 LISTEN_FDS=3 LISTEN_FDNAMES=kvd.socket:kvd.socket:indexer

A socket belongs to the face that it is named after (FileDescriptorName=), else to the face that is
configured to listen on its very address. Connections that come while kvd does not run wait in its
backlog.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, MutableMapping

from kvd.wire.hosts import bracketed

FIRST = 3  # the first passed descriptor (sd_listen_fds(3))
VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
FAMILIES = (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)  # addresses that show who can connect


class PassedSockets:
    """Listening sockets with the names they were given; each is taken once."""

    def __init__(self, sockets: Iterable[tuple[str, socket.socket]] = ()) -> None:
        self._sockets = list(sockets)

    def named(self, name: str) -> list[socket.socket]:
        """Takes the sockets of this name."""
        return self._take([sock for given, sock in self._sockets if given == name])

    def bound_to(self, bind: str) -> list[socket.socket]:
        """Takes the sockets that listen on this address, whatever their name."""
        return self._take([sock for _, sock in self._sockets if address(sock) == bind])

    def take_all(self) -> list[tuple[str, socket.socket]]:
        """Takes all that are left, with their names."""
        sockets, self._sockets = self._sockets, []
        return sockets

    def _take(self, chosen: list[socket.socket]) -> list[socket.socket]:
        self._sockets = [each for each in self._sockets if each[1] not in chosen]
        return chosen

    def left(self) -> list[str]:
        """Returns the sockets that nobody has taken, as `name (address)`."""
        return [f"{name} ({address(sock)})" for name, sock in self._sockets]

    def close(self) -> None:
        """Closes the sockets that nobody has taken."""
        for _, sock in self._sockets:
            sock.close()


def receive(environ: MutableMapping[str, str]) -> PassedSockets:
    """Takes over the sockets that `environ` passes to this process, and removes its variables.

    Raises ValueError for a descriptor that is not a listening stream socket, and for two names of
    one address, whose faces would share the clients.
    """
    passed = {name: environ.pop(name, "") for name in VARIABLES}
    if passed["LISTEN_PID"] != str(os.getpid()) or not passed["LISTEN_FDS"].isdecimal():
        return PassedSockets()
    names = passed["LISTEN_FDNAMES"].split(":")
    count = int(passed["LISTEN_FDS"])
    names += ["unknown"] * (count - len(names))
    sockets = [
        (name, _adopt(descriptor, name))
        for descriptor, name in enumerate(names[:count], start=FIRST)
    ]
    known: dict[str, str] = {}
    for name, sock in sockets:
        where = address(sock)
        if (other := known.setdefault(where, name)) != name:
            raise ValueError(f"the service manager passes {where} as {other} and as {name}")
    return PassedSockets(sockets)


def _adopt(descriptor: int, name: str) -> socket.socket:
    try:
        sock = socket.socket(fileno=descriptor)
        listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ValueError(
            f"descriptor {descriptor} ({name}) of the service manager: {error.strerror}"
        ) from None
    if not listening or sock.type != socket.SOCK_STREAM or sock.family not in FAMILIES:
        raise ValueError(
            f"descriptor {descriptor} ({name}) of the service manager is not a listening stream "
            "socket of TCP or a Unix socket"
        )
    sock.set_inheritable(False)
    sock.setblocking(False)
    return sock


def address(sock: socket.socket) -> str:
    """Returns a socket's own address, in the form of a bind address.

    The name of a Unix socket without a file begins with an @.
    """
    name = sock.getsockname()
    if isinstance(name, bytes):
        return f"unix:@{os.fsdecode(name[1:])}"
    if isinstance(name, str):
        return f"unix:{name}"
    host, port = name[:2]
    return f"{bracketed(host)}:{port}"
