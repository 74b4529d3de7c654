"""A subscription for which kvd speaks ZMTP itself: without security, over TCP or a Unix socket.

    watch  ── connect ── handshake ── joined; PING after silence ── lost ── pause ──┐
       ^                                                                            │
       └────────────────────────────────────────────────────────────────────────────┘
    owner  ── wait ── fill (kvd_core.zmq.subscriber) ── hear: reports an end that `fill` has found

There is one connection at a time, and only reading its messages reveals its end. So all messages
of a connection are read before its end is reported, and the next one is made only then.

A fleet has thousands of links, nearly all of them at rest. So what a resting link keeps is small: a
coroutine that waits takes some 250 bytes, a cancel scope 700.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import TYPE_CHECKING

import trio

from kvd.net.arrivals import arrivals
from kvd.net.link import nothing, report_lost
from kvd.net.streams import stream_socket, tune
from kvd_core.zmq.subscriber import LOST, NO_HANDSHAKE, Subscriber

if TYPE_CHECKING:
    from kvd.net.arrivals import Serve
    from kvd.net.link import Linked, LinkOptions
    from kvd.net.streamlog import StreamLog
    from kvd_core.zmq.drain import Inbox


class ZmtpLink:
    """A subscription to `topics`."""

    __slots__ = (
        "_address",
        "_arrivals",
        "_given_up",
        "_linked",
        "_log",
        "_options",
        "_patience",
        "_subscriber",
        "_topics",
        "_unjoined",
    )

    def __init__(
        self,
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
        self._subscriber: Subscriber | None = None  # the connection, once its handshake is done
        self._given_up = ""
        self._patience = trio.CancelScope()  # around the wait that `watch` is in
        self._unjoined: trio.lowlevel.Task | None = None  # waits while there is no connection

    async def watch(self) -> str:
        """Keeps connected and informs the owner; returns why the link can no longer be used."""
        options, endpoint = self._options, self._linked.endpoint
        pause_s = options.reconnect_s
        while not self._given_up:
            fault = LOST
            try:
                subscriber = await self._connect()
            except OSError as error:
                why = os.strerror(error.errno or errno.EINVAL)
                return f"failed to connect ZMQ SUB socket to {endpoint}: {why}"
            if subscriber is not None and not (fault := await self._shake(subscriber)):
                pause_s = options.reconnect_s
                self._join(subscriber)
                await self._outlast_silence(subscriber)
                fault = subscriber.fault or LOST
            if fault not in (LOST, NO_HANDSHAKE):
                return f"{self._given_up or fault}: {endpoint}"
            with self._within(pause_s):
                await trio.sleep_forever()
            await self._arrivals.take_turn()
            pause_s = min(2 * pause_s, options.reconnect_max_s)
        return f"{self._given_up}: {endpoint}"

    def wait(self, serve: Serve = nothing) -> Coroutine[object, object, None]:
        """Calls `serve` when messages come, until it returns False or the connection changes."""
        if self._subscriber is not None:
            return self._arrivals.wait(self._subscriber.fd, serve)
        return self._wait_joined()

    async def _wait_joined(self) -> None:
        self._unjoined = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._wait_no_more)

    def _wait_no_more(self, _: object) -> trio.lowlevel.Abort:
        self._unjoined = None
        return trio.lowlevel.Abort.SUCCEEDED

    def give_up(self, why: str) -> None:
        """Ends `watch`, with that reason."""
        self._given_up = why
        self._patience.cancel()

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
        """Reports to the owner if the connection has ended; returns whether it has."""
        subscriber = self._subscriber
        if subscriber is None or subscriber.fault is None:
            return False
        self._end(subscriber.fault)
        return True

    async def aclose(self) -> None:
        """Unsubscribes, so that the engine no longer counts this subscriber, and disconnects."""
        if self._subscriber is not None:
            self._subscriber.unsubscribe()
            self._subscriber.close()

    def _within(self, seconds: float) -> trio.CancelScope:
        """Returns a cancel scope that ends after `seconds`, or when the link is given up.

        There is only one at a time, as each costs a rank 0.7 KB.
        """
        self._patience = trio.CancelScope(deadline=trio.current_time() + seconds)
        if self._given_up:
            self._patience.cancel()
        return self._patience

    async def _connect(self) -> Subscriber | None:
        """Connects; returns None if the engine is away, raises OSError if it cannot be tried."""
        options = self._options
        sock, address = stream_socket(self._address)
        with sock:
            tune(sock)
            try:
                with self._within(options.connect_timeout_s) as patience:
                    await sock.connect(address)
            except OSError:
                return None  # the engine is away; if that lasts, `kvd.net.probing` finds out why
            if patience.cancelled_caught:
                return None
            subscriber = Subscriber(sock.fileno(), options.max_message_bytes, self._topics)
            sock.detach()
            return subscriber

    async def _shake(self, subscriber: Subscriber) -> str:
        """Does the handshake; returns why it failed, "" if it succeeded."""
        fault = NO_HANDSHAKE
        with ExitStack() as undone:
            undone.callback(subscriber.close)
            with self._within(self._options.handshake_timeout_s):
                fault = await _handshake(subscriber)
            if not fault:
                undone.pop_all()
            elif not self._given_up:
                report_lost(self._linked, self._log, fault)
        return fault

    def _join(self, subscriber: Subscriber) -> None:
        """Reports the connection as made."""
        self._subscriber = subscriber
        self._linked.joined()
        if self._unjoined is not None:
            unjoined, self._unjoined = self._unjoined, None
            trio.lowlevel.reschedule(unjoined)
        self._log.info("stream_joined", endpoint=self._linked.endpoint)

    async def _outlast_silence(self, subscriber: Subscriber) -> None:
        """Returns when the connection has ended or the link was given up.

        Pings an engine that is silent, and ends the connection if there is no answer in time.
        """
        every_s, timeout_s = self._options.heartbeat_s, self._options.heartbeat_timeout_s
        reads, asked_at = -1, 0.0
        while self._subscriber is subscriber and not self._given_up:
            pause_s = every_s
            if not subscriber.answers_pings:
                pause_s = math.inf
            elif subscriber.reads != reads:
                reads, asked_at = subscriber.reads, 0.0
            elif not asked_at:
                subscriber.ping()
                asked_at = trio.current_time()
                pause_s = min(every_s, timeout_s)
            elif (left_s := asked_at + timeout_s - trio.current_time()) > 0:
                pause_s = min(every_s, left_s)
            elif not subscriber.has_unread:  # else an answer has come: this loop was late
                self._end(LOST)
                return
            with self._within(pause_s):
                await trio.sleep_forever()

    def _end(self, why: str) -> None:
        subscriber, self._subscriber = self._subscriber, None
        assert subscriber is not None
        self._arrivals.end(subscriber.fd)
        subscriber.close()
        self._patience.cancel()
        report_lost(self._linked, self._log, why)


async def _handshake(subscriber: Subscriber) -> str:
    """Does the handshake; returns why it failed, "" if it succeeded."""
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
