"""Notifies systemd of the daemon's state."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

import trio

READY = b"READY=1"
STOPPING = b"STOPPING=1"
WATCHDOG = b"WATCHDOG=1"
EXTENSION = b"EXTEND_TIMEOUT_USEC="
# The settings of a reload are in force: for the parent of several processes; systemd ignores it.
RELOADED = b"X_KVD_RELOADED=1"

# Time that each watchdog message asks systemd for while the daemon starts.
START_EXTENSION_US = 60_000_000


# Pause between two tries of a message to systemd that must not be missed.
RETRY_S = 0.05


def send(message: bytes, address: str) -> bool:
    """Sends one message to the socket named by $NOTIFY_SOCKET; `@` begins an abstract address.

    Never waits and never fails: a service manager that does not listen is no reason to stop
    serving, and one that misses a watchdog message acts by itself. Returns False if its queue was
    full.
    """
    path = "\0" + address[1:] if address.startswith("@") else address
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        try:
            sock.sendto(message, socket.MSG_DONTWAIT, path)
        except BlockingIOError:
            return False
        except OSError:
            pass  # nobody is there
    return True


def notify(message: bytes) -> bool:
    """Sends one message to the service manager, if there is one; returns what `send` does."""
    address = os.environ.get("NOTIFY_SOCKET")
    return not address or send(message, address)


async def notify_ready() -> None:
    """Notifies systemd that a start or reload is over; else systemd would take it for failed."""
    while not notify(READY):  # noqa: ASYNC110 - no event in this process says when systemd reads
        await trio.sleep(RETRY_S)


def notify_reloading() -> None:
    """Notifies systemd that a reload begins; READY ends it."""
    notify(b"RELOADING=1\nMONOTONIC_USEC=%d" % (time.monotonic_ns() // 1000))


def watchdog_s() -> float | None:
    """Returns how often, in seconds, systemd demands a message; None if it does not watch."""
    limit_us = os.environ.get("WATCHDOG_USEC", "")
    return int(limit_us) / 1e6 or None if limit_us.isdecimal() else None


async def feed_watchdog(starting: Callable[[], bool]) -> None:
    """Notifies systemd that this loop runs, twice as often as systemd demands.

    While the daemon is `starting`, each message also asks for more time.
    """
    limit_s = watchdog_s()
    if limit_s is None:
        return
    extension = b"\n%b%d" % (EXTENSION, START_EXTENSION_US)
    while True:
        notify(WATCHDOG + (extension if starting() else b""))
        await trio.sleep(limit_s / 2)
