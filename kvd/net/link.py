"""The interface of a subscription's link to a publisher, and of the owner that it reports to.

    ZmtpLink   without security, over TCP or a Unix socket: kvd speaks ZMTP itself
    ZmqLink    with CURVE, or inside the process: libzmq speaks it

A reader uses both kinds of link in the same way.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import trio

from kvd.net.dialing import Dialer
from kvd.net.turns import Turns
from kvd_core.zmq.drain import Inbox, InboxSpace

if TYPE_CHECKING:
    from kvd.net.streamlog import StreamLog
    from kvd.net.zsocket import Context


class Linked(Protocol):
    """The owner of a link, notified of its changes; times are monotonic seconds."""

    @property
    def endpoint(self) -> str: ...

    @property
    def server_key(self) -> str | None:
        """The CURVE key that the publisher must have; None connects without CURVE."""

    @property
    def connected(self) -> bool: ...

    def connecting(self) -> None:
        """A new link has been made; it is not connected yet."""

    def joined(self) -> None:
        """The publisher has answered: the link is connected."""

    def lost_connection(self, why: str, now: float) -> None:
        """The connection, or its handshake, broke off; the link connects again."""

    def failed(self, why: str, now: float) -> None:
        """The link can no longer be used; a new one will replace it."""

    def crashed(self) -> None:
        """Handling a message raised: a bug."""


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """Options of a subscriber's connection."""

    heartbeat_s: float = 5.0  # as Dynamo; a frozen worker is noticed after the timeout
    heartbeat_timeout_s: float = 15.0
    connect_timeout_s: float = 5.0  # without it a vanished host holds an attempt for two minutes
    handshake_timeout_s: float = 10.0
    reconnect_s: float = 0.1  # first pause before another attempt; doubles up to reconnect_max_s
    reconnect_max_s: float = 5.0
    give_up_s: float = 1.0  # libzmq announces a retry in 1 ms; missing it costs a new socket
    # Bounds of the inbox of messages that are not yet applied.
    queue_messages: int = 1_000_000  # of one block each, this many take five seconds to apply
    queue_bytes: int = 256 * 1024 * 1024  # for these messages at 270 bytes each
    max_message_bytes: int = 16 * 1024 * 1024  # 150,000 blocks; 64 MiB held up the loop for 3 s


@dataclass(frozen=True, slots=True)
class LinkResources:
    """What the links of all listeners share, or those of all replicas."""

    context: Context
    dialer: Dialer = field(default_factory=Dialer)
    space: InboxSpace = field(default_factory=InboxSpace)  # for messages that are not yet applied
    turns: Turns = field(default_factory=Turns)


def report_lost(linked: Linked, log: StreamLog, why: str) -> None:
    """Reports to the owner that a connection or its handshake broke off; logs lost connections."""
    why = f"{why}: {linked.endpoint}"
    if linked.connected:
        log.warning("stream_lost", error=why)
    linked.lost_connection(why, trio.current_time())


def nothing() -> bool:
    """Serves no message outside of a task, so that the waiting task wakes up for each."""
    return False


class Runs:
    """Functions that run at once in a nursery, until one of them says why that has to end."""

    __slots__ = ("_closed", "_nursery", "why")

    def __init__(self, nursery: trio.Nursery) -> None:
        self._closed = False
        self._nursery = nursery
        self.why = ""

    def start(self, run: Callable[[], Awaitable[str]]) -> None:
        """Runs a function that returns the reason, or "" if the others go on; not after `close`."""
        if not self._closed:
            self._nursery.start_soon(self._run, run)

    def close(self) -> None:
        """Starts none any more: the nursery, which may be cancelled from outside, is ending."""
        self._closed = True

    def end(self, why: str) -> None:
        """Cancels all functions; the first reason counts."""
        self.why = self.why or why
        self._nursery.cancel_scope.cancel()

    async def _run(self, run: Callable[[], Awaitable[str]]) -> None:
        if why := await run():
            self.end(why)


class Link(Protocol):
    """A link to a publisher, which connects again and again until it can no longer be used."""

    def start(self, runs: Runs) -> None:
        """Begins to connect; called once.

        What has to be awaited, now and later, to keep the link connected and its owner informed
        runs in `runs`. It returns why the link has become unusable, or "" if it has not.
        """

    async def wait(self, serve: Callable[[], bool] = nothing) -> None:
        """Returns when a message may have come, or a new connection was made.

        Where only messages have come, `serve` is called first, outside of any task. It may take
        them all and return True, and then the wait goes on; it must not raise. Call this only
        after a `fill` that found no more messages; `serve` may return True only after one, too.
        """

    def fill(
        self, inbox: Inbox, refuse: Callable[[str], object], max_messages: int, budget_ns: int
    ) -> bool:
        """Takes event messages, like `kvd_core.zmq.drain.fill`; returns whether more may wait."""

    def fill_frames(self, inbox: Inbox, most: int, max_messages: int, budget_ns: int) -> bool:
        """Takes messages of any shape, like `kvd_core.zmq.drain.fill_frames`."""

    def hear(self) -> bool:
        """Reports connection changes up to now to the owner; returns whether there were any.

        Called after a `fill`, this has reported every connection that the messages of that `fill`
        may have come over.
        """

    async def aclose(self) -> None:
        """Unsubscribes and disconnects; returns once the publisher can have noticed it."""

    def give_up(self, why: str) -> None:
        """Makes the link unusable, for that reason."""
