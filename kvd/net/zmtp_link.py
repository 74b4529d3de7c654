"""A subscription for which kvd speaks ZMTP itself: without security, over TCP or a Unix socket.

    _connect ── connect ── handshake ── joined; ends        pause ── _connect
                                          │                   ^
    owner  ── wait ── fill (kvd_core.zmq.subscriber) ── hear ─┤ an end that `fill` has found
    kvd.net.heartbeats ── PING after silence ── no answer ────┘

There is one connection at a time, and only reading its messages reveals its end. So all messages
of a connection are read before its end is reported, and the next one is made only then.

A fleet has thousands of links, nearly all of them at rest. So what a resting link keeps is small,
and it has no task: a task and its coroutines take 1.5 KB, a cancel scope 0.7.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import trio

from kvd.net.arrivals import arrivals
from kvd.net.heartbeats import heartbeats
from kvd.net.link import nothing, report_lost
from kvd.net.streams import stream_socket, tune
from kvd_core.zmq.subscriber import LOST, NO_HANDSHAKE, Subscriber

if TYPE_CHECKING:
    from kvd.net.arrivals import Serve
    from kvd.net.link import Linked, LinkOptions, Runs
    from kvd.net.streamlog import StreamLog
    from kvd.net.turns import Turns
    from kvd_core.zmq.drain import Inbox


class ZmtpLink:
    """A subscription to `topics`."""

    __slots__ = (
        "_address",
        "_arrivals",
        "_asked_at",
        "_check",
        "_given_up",
        "_heartbeats",
        "_linked",
        "_log",
        "_options",
        "_patience",
        "_reads",
        "_runs",
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
        self._heartbeats = heartbeats()
        self._linked = linked
        self._address = address
        self._log = log
        self._options = options
        self._topics = topics
        self._subscriber: Subscriber | None = None  # the connection, once its handshake is done
        self._check = 0  # number of the connection's check for silence
        self._reads = 0  # of the connection, at the last check
        self._asked_at = 0.0  # when it was pinged for its present silence; 0: it was not
        self._given_up = ""
        self._patience = trio.CancelScope()  # around the wait that `_connect` is in
        self._unjoined: trio.lowlevel.Task | None = None  # waits while there is no connection

    def start(self, runs: Runs) -> None:
        """Begins to connect; a connection that is lost is made again in `runs`."""
        self._runs = runs
        runs.start(self._connect)

    async def _connect(self, fault: str = "") -> str:
        """Connects and informs the owner; pauses before, if a connection has ended with `fault`.

        Returns "" once there is a connection, or why the link can no longer be used.
        """
        options, endpoint = self._options, self._linked.endpoint
        pause_s = options.reconnect_s
        while not self._given_up and fault in ("", LOST, NO_HANDSHAKE):
            if fault:
                with self._within(pause_s):
                    await trio.sleep_forever()
                await self._arrivals.take_turn()
                pause_s = min(2 * pause_s, options.reconnect_max_s)
            try:
                subscriber = await self._dial()
            except OSError as error:
                why = os.strerror(error.errno or errno.EINVAL)
                return f"failed to connect ZMQ SUB socket to {endpoint}: {why}"
            fault = LOST
            if subscriber is not None and not (fault := await self._shake(subscriber)):
                self._arrivals.handshakes.begin_now()
                self._join(subscriber)
                self._arrivals.handshakes.end()
                if not self._given_up:  # as it may be in the pass of the loop that ends `_shake`
                    return ""
        return f"{self._given_up or fault}: {endpoint}"

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
        """Makes the link unusable, for that reason."""
        self._given_up = why
        if self._subscriber is None:
            self._patience.cancel()
        else:
            self._runs.start(self._connect)  # which says so

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
            self._leave()

    def _within(self, seconds: float) -> trio.CancelScope:
        """Returns a cancel scope that ends after `seconds`, or when the link is given up."""
        self._patience = trio.CancelScope(deadline=trio.current_time() + seconds)
        if self._given_up:
            self._patience.cancel()
        return self._patience

    async def _dial(self) -> Subscriber | None:
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
                fault = await _handshake(subscriber, self._arrivals.handshakes)
            if not fault:
                undone.pop_all()
            elif not self._given_up:
                report_lost(self._linked, self._log, fault)
        return fault

    def _join(self, subscriber: Subscriber) -> None:
        """Reports the connection as made."""
        self._subscriber = subscriber
        if subscriber.answers_pings:
            self._reads, self._asked_at = subscriber.reads, 0.0
            when = trio.current_time() + self._options.heartbeat_s
            self._check = self._heartbeats.add(self._check_silence, when)
        self._linked.joined()
        if self._unjoined is not None:
            unjoined, self._unjoined = self._unjoined, None
            trio.lowlevel.reschedule(unjoined)
        self._log.info("stream_joined", endpoint=self._linked.endpoint)

    def _check_silence(self, now: float) -> float:
        """Pings an engine that is silent, and ends the connection if there is no answer in time.

        Returns when to check again.
        """
        try:
            return now + self._outlast_silence(now)
        except Exception as error:  # a bug, which costs this link alone
            self._runs.start(partial(_fail, error))
            return math.inf

    def _outlast_silence(self, now: float) -> float:
        """Does that; returns the time until the next check in seconds."""
        subscriber = self._subscriber
        assert subscriber is not None
        every_s, timeout_s = self._options.heartbeat_s, self._options.heartbeat_timeout_s
        if subscriber.reads != self._reads:
            self._reads, self._asked_at = subscriber.reads, 0.0
        elif not self._asked_at:
            subscriber.ping()
            self._asked_at = now
            return min(every_s, timeout_s)
        elif (left_s := self._asked_at + timeout_s - now) > 0:
            return min(every_s, left_s)
        elif not subscriber.has_unread:  # else an answer has come: this process was late
            self._end(LOST)
            return math.inf
        return every_s

    def _end(self, why: str) -> None:
        self._leave()
        report_lost(self._linked, self._log, why)
        self._runs.start(partial(self._connect, why))

    def _leave(self) -> None:
        subscriber, self._subscriber = self._subscriber, None
        assert subscriber is not None
        self._heartbeats.remove(self._check)
        self._arrivals.end(subscriber.fd)
        subscriber.close()


async def _fail(error: Exception) -> str:
    raise error


async def _handshake(subscriber: Subscriber, turns: Turns) -> str:
    """Does the handshake, in turns; returns why it failed, "" if it succeeded."""
    while True:
        await turns.begin()
        subscriber.shake()
        turns.end()
        if subscriber.fault is not None:
            return subscriber.fault
        if subscriber.has_unsent:
            await trio.lowlevel.wait_writable(subscriber.fd)
        elif subscriber.joined:
            return ""
        else:
            await trio.lowlevel.wait_readable(subscriber.fd)
