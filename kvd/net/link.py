"""A subscription's link to a publisher: what its owner calls, and what it reports.

    ZmtpLink   without security, over TCP or a Unix socket: kvd speaks ZMTP itself
    ZmqLink    CURVE, or inside the process: libzmq speaks

Who reads a link does not know which of the two it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import trio

if TYPE_CHECKING:
    from kvd.net.streamlog import StreamLog
    from kvd_core.zmq.drain import Inbox


class Linked(Protocol):
    """An owner of a connection, which is notified of its changes; times are monotonic seconds."""

    @property
    def endpoint(self) -> str: ...

    @property
    def server_key(self) -> str | None:
        """The key of CURVE that the other end must have; None speaks without it."""

    @property
    def connected(self) -> bool: ...

    def connecting(self) -> None:
        """There is a new link."""

    def joined(self) -> None:
        """The other end answers."""

    def lost_connection(self, why: str, now: float) -> None:
        """The connection broke, or broke off early; the link tries again."""

    def failed(self, why: str, now: float) -> None:
        """The link can no longer be used; another one follows."""

    def crashed(self) -> None:
        """A message met a bug."""


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """Options of a subscriber's connection."""

    heartbeat_s: float = 5.0  # like the peer; a frozen worker is noticed after the timeout
    heartbeat_timeout_s: float = 15.0
    connect_timeout_s: float = 5.0  # else a vanished host holds one attempt for two minutes
    handshake_timeout_s: float = 10.0
    reconnect_s: float = 0.1  # the first pause before another attempt; it doubles up to the longest
    reconnect_max_s: float = 5.0
    give_up_s: float = 1.0  # libzmq announces a retry in 1 ms; missing it costs a new socket
    # Bounds of the queue of what is not yet applied.
    queue_messages: int = 1_000_000  # of one block each: five seconds of applying
    queue_bytes: int = 256 * 1024 * 1024  # these at 270 bytes
    max_message_bytes: int = 16 * 1024 * 1024  # 150,000 blocks; one of 64 MiB took the loop 3 s


def tell_lost(linked: Linked, log: StreamLog, why: str) -> None:
    """Reports to the owner that a connection ended or broke off early; logs it, if it was made."""
    why = f"{why}: {linked.endpoint}"
    if linked.connected:
        log.warning("stream_lost", error=why)
    linked.lost_connection(why, trio.current_time())


def nothing() -> bool:
    """Leaves what comes to the task that waits."""
    return False


class Link(Protocol):
    """A link to a publisher, which connects again and again until it can no longer be used."""

    async def watch(self) -> str:
        """Reports to the owner what happens; returns why the link can no longer be used."""

    async def wait(self, serve: Callable[[], bool] = nothing) -> None:
        """Returns when there may be a message, or the connection is another one.

        If messages are all that has come, `serve` may take them, outside of any task, and return
        True: then the wait goes on. It may not raise. To be called only after a `fill` that has
        found no more, which holds for that True as well.
        """

    def fill(
        self, inbox: Inbox, refuse: Callable[[str], object], max_messages: int, budget_ns: int
    ) -> bool:
        """Takes event messages, as `kvd_core.zmq.drain.fill`; returns whether there may be more."""

    def fill_frames(self, inbox: Inbox, most: int, max_messages: int, budget_ns: int) -> bool:
        """Takes messages of any shape, as `kvd_core.zmq.drain.fill_frames`."""

    def hear(self) -> bool:
        """Reports to the owner what has happened up to now; returns whether anything has.

        After a `fill` this knows of every connection that its messages may have come over.
        """

    async def aclose(self) -> None:
        """Unsubscribes and hangs up; returns when the other end can know it."""

    def give_up(self, why: str) -> None:
        """Ends `watch`, with that reason."""
