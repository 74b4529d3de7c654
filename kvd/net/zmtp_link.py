"""A subscription that kvd speaks itself: ZMTP without security, over TCP or a Unix socket.

    watch  ── connect ── handshake ── joined; PING after silence ── lost ── pause ──┐
       ^                                                                            │
       └────────────────────────────────────────────────────────────────────────────┘
    owner  ── wait ── fill (kvd_core.zmq.subscriber) ── hear: tells of an end that it has met

There is one connection at a time, and what becomes of it is seen where its messages are: all that
came over it is read before its end is told, and the next one is made afterwards.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import trio

from kvd.net.arrivals import arrivals
from kvd.net.link import nothing, tell_lost
from kvd.net.streams import stream_socket, tune
from kvd_core.zmq.subscriber import LOST, NO_HANDSHAKE, Subscriber

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from kvd.net.arrivals import Serve
    from kvd.net.link import Linked, LinkOptions
    from kvd.net.streamlog import StreamLog
    from kvd.net.streams import SocketAddress
    from kvd_core.zmq.drain import Inbox


class ZmtpLink:
    """A subscription to `topics`, closed by the stack it is given."""

    __slots__ = (
        "_address",
        "_arrivals",
        "_connection",
        "_given_up",
        "_idle",
        "_linked",
        "_log",
        "_options",
        "_subscriber",
        "_topics",
        "_watching",
    )

    def __init__(
        self,
        stack: AsyncExitStack,
        linked: Linked,
        address: str,
        log: StreamLog,
        options: LinkOptions,
        topics: tuple[bytes, ...] = (b"",),
    ) -> None:
        self._arrivals = arrivals()
        self._linked = linked
        self._address = address
        self._log = log
        self._options = options
        self._topics = topics
        self._subscriber: Subscriber | None = None  # whose handshake is done
        self._given_up = ""
        self._watching = trio.CancelScope()
        self._connection = trio.CancelScope()  # while there is one
        self._idle = trio.CancelScope()  # while the owner waits
        stack.callback(self._close)

    async def watch(self) -> str:
        """Keeps connected, and tells who is linked; returns why the link is of no more use."""
        why = ""
        with self._watching:
            why = await self._keep_connected()
        return why or f"{self._given_up}: {self._linked.endpoint}"

    async def wait(self, serve: Serve = nothing) -> None:
        """Has `serve` take what comes, until it cannot, or the connection is another one."""
        with trio.CancelScope() as self._idle:
            if self._subscriber is None:
                await trio.sleep_forever()
            else:
                await self._arrivals.wait(self._subscriber.fd, serve)

    def give_up(self, why: str) -> None:
        """Ends `watch`, with that reason."""
        self._given_up = why
        self._watching.cancel()

    def fill(
        self, inbox: Inbox, refuse: Callable[[str], object], max_messages: int, budget_ns: int
    ) -> bool:
        """Takes event messages that have come; returns whether there may be more."""
        if self._subscriber is None:
            return False
        return self._subscriber.fill(inbox, refuse, max_messages, budget_ns)

    def fill_frames(self, inbox: Inbox, most: int, max_messages: int, budget_ns: int) -> bool:
        """Takes messages of any shape that have come; returns whether there may be more."""
        if self._subscriber is None:
            return False
        return self._subscriber.fill_frames(inbox, most, max_messages, budget_ns)

    def hear(self) -> bool:
        """Tells who is linked that the connection has ended, if it has; returns whether it has."""
        subscriber = self._subscriber
        if subscriber is None or subscriber.fault is None:
            return False
        self._end(subscriber.fault)
        return True

    def _close(self) -> None:
        """Unsubscribes, so that the other end counts this subscriber no more, and hangs up."""
        if self._subscriber is not None:
            self._subscriber.unsubscribe()
            self._subscriber.close()

    async def _keep_connected(self) -> str:
        options, endpoint = self._options, self._linked.endpoint
        pause_s = options.reconnect_s
        while True:
            try:
                sock, address = stream_socket(self._address)
            except OSError as error:
                why = os.strerror(error.errno or errno.EINVAL)
                return f"failed to connect ZMQ SUB socket to {endpoint}: {why}"
            fault = LOST
            if (subscriber := await self._connect(sock, address)) is not None:
                fault = await self._shake(subscriber)
                if not fault:
                    pause_s = options.reconnect_s
                    fault = await self._stay(subscriber)
            if fault not in (LOST, NO_HANDSHAKE):
                return f"{fault}: {endpoint}"
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, options.reconnect_max_s)

    async def _connect(
        self, sock: trio.socket.SocketType, address: SocketAddress
    ) -> Subscriber | None:
        options = self._options
        with sock:
            tune(sock)
            try:
                with trio.fail_after(options.connect_timeout_s):
                    await sock.connect(address)
            except (OSError, trio.TooSlowError):
                return None  # the engine is away: `kvd.net.probing` says why, if that lasts
            return Subscriber(sock.detach(), options.max_message_bytes, self._topics)

    async def _shake(self, subscriber: Subscriber) -> str:
        """Does the handshake; returns why it has failed, "" if it has not."""
        fault = NO_HANDSHAKE
        with ExitStack() as undone:
            undone.callback(subscriber.close)
            with trio.move_on_after(self._options.handshake_timeout_s):
                fault = await _handshake(subscriber)
            if fault:
                tell_lost(self._linked, self._log, fault)
            else:
                undone.pop_all()
        return fault

    async def _stay(self, subscriber: Subscriber) -> str:
        """Returns why the connection has ended, once it has."""
        linked = self._linked
        self._subscriber = subscriber
        linked.joined()
        self._idle.cancel()
        self._log.info("stream_joined", endpoint=linked.endpoint)
        with trio.CancelScope() as self._connection:
            await self._outlast_silence(subscriber)
            self._end(LOST)
        return subscriber.fault or LOST

    async def _outlast_silence(self, subscriber: Subscriber) -> None:
        """Asks an end that says nothing whether it lives; returns when it has not answered."""
        every_s, timeout_s = self._options.heartbeat_s, self._options.heartbeat_timeout_s
        if not subscriber.answers_pings:
            await trio.sleep_forever()
        reads, asked_at = -1, 0.0
        while True:
            if subscriber.reads != reads:
                reads, asked_at = subscriber.reads, 0.0
                await trio.sleep(every_s)
            elif not asked_at:
                subscriber.ping()
                asked_at = trio.current_time()
                await trio.sleep(min(every_s, timeout_s))
            elif (left_s := asked_at + timeout_s - trio.current_time()) > 0:
                await trio.sleep(min(every_s, left_s))
            elif subscriber.has_unread:  # it was this loop that was late
                await trio.sleep(every_s)
            else:
                return

    def _end(self, why: str) -> None:
        subscriber, self._subscriber = self._subscriber, None
        assert subscriber is not None
        self._idle.cancel()
        subscriber.close()
        self._connection.cancel()
        tell_lost(self._linked, self._log, why)


async def _handshake(subscriber: Subscriber) -> str:
    """Returns why it has failed, "" if it has not."""
    while True:
        subscriber.shake()
        if subscriber.fault is not None:
            return subscriber.fault
        if subscriber.has_unsent:
            await trio.lowlevel.wait_writable(subscriber.fd)
        elif subscriber.joined:
            return ""
        else:
            await trio.lowlevel.wait_readable(subscriber.fd)
