"""Accepts connections for ever, even through a shortage of descriptors."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

import trio

from kvd.http.limits import HttpStats
from kvd.telemetry.logs import RateLimit, get_logger

log = get_logger(__name__)

# Out of descriptors or memory: connections wait in the backlog until others have ended.
SHORTAGES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS))
# Pause of accepting when descriptors or memory run short, as in trio's own accept loop.
PAUSE_SECONDS = 0.1
# Pause of accepting while another connection ends to make room: its task takes a few passes.
ROOM_PAUSE_SECONDS = 0.005
SHORTAGE_LOG_SECONDS = 10.0  # pause between two log lines about such a shortage
ACCEPTS_PER_TURN = 16  # connections before other tasks run: 3 ms with their first requests

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
    listener: socket.socket,
    stats: HttpStats,
    admit: Callable[[socket.socket], None],
    make_room: Callable[[], bool],
) -> None:
    """Hands every connection of a non-blocking listener to `admit`, as a non-blocking socket.

    While there is no descriptor or memory for another one, `make_room` is called to end one; it
    returns whether it has found one.
    """
    lines = RateLimit(SHORTAGE_LOG_SECONDS)
    while True:
        await trio.lowlevel.wait_readable(listener)
        accepted = 0
        try:
            while accepted < ACCEPTS_PER_TURN:
                sock, _address = listener.accept()
                accepted += 1
                sock.setblocking(False)
                admit(sock)
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno not in SHORTAGES | _PASSING:
                raise
            # Behind a connection that got in, the kernel tells of a shortage even if nobody waits.
            if error.errno in SHORTAGES and not accepted:
                stats.accept_pauses += 1
                if lines.admit(error.errno, trio.current_time()) is not None:
                    log.warning("accept_paused", error=error)
                await trio.sleep(ROOM_PAUSE_SECONDS if make_room() else PAUSE_SECONDS)
