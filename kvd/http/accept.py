"""Accepts connections for ever, also through a shortage of descriptors."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable

import trio

from kvd.http.limits import HttpStats

log = logging.getLogger(__name__)

# Out of descriptors or memory: connections wait in the backlog until others have closed.
SHORTAGES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS))
PAUSE_SECONDS = 0.1  # as trio's own accept loop does
ACCEPTS_PER_TURN = 64  # of a burst, before other tasks run: about 2 ms

# accept(2): errors of the connection about to be accepted, not of the listener.
_PASSING = frozenset(
    (
        errno.ECONNABORTED,
        errno.ENETDOWN,
        errno.EPROTO,
        errno.ENOPROTOOPT,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.EOPNOTSUPP,
        errno.ENETUNREACH,
    )
)


async def accept_connections(
    listener: socket.socket, stats: HttpStats, admit: Callable[[socket.socket], None]
) -> None:
    """Hands every connection of a non-blocking listener to `admit`, as a non-blocking socket."""
    while True:
        await trio.lowlevel.wait_readable(listener)
        try:
            for _ in range(ACCEPTS_PER_TURN):
                sock, _address = listener.accept()
                sock.setblocking(False)
                admit(sock)
        except BlockingIOError:
            pass
        except OSError as error:
            await _sit_out(error, stats)


async def _sit_out(error: OSError, stats: HttpStats) -> None:
    if error.errno in SHORTAGES:
        stats.accept_pauses += 1
        log.warning("accept paused error=%s", error)
        await trio.sleep(PAUSE_SECONDS)
    elif error.errno not in _PASSING:
        raise error
