"""Tells systemd how the daemon is doing."""

from __future__ import annotations

import contextlib
import socket

READY = b"READY=1"
STOPPING = b"STOPPING=1"
WATCHDOG = b"WATCHDOG=1"


def notify(message: bytes, address: str) -> None:
    """Sends one message to the socket that $NOTIFY_SOCKET names; `@` means the abstract one.

    Never waits and never fails: a manager that does not listen is no reason to stop serving, and
    one that misses a watchdog message says so by itself.
    """
    path = "\0" + address[1:] if address.startswith("@") else address
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        sock.sendto(message, socket.MSG_DONTWAIT, path)
