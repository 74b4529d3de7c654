"""A subscription through libzmq: a SUB socket, and the monitor of its connections.

libzmq connects again by itself after a plain loss, but never after a protocol error: a frame
beyond the limit, broken framing, a peer of the wrong type (libzmq issue 4196). The monitor's events
distinguish the two: after DISCONNECTED, CONNECT_RETRIED follows within a millisecond or never (seen
with libzmq 4.3.5 on twelve kinds of misbehaving publishers). Where it does not follow, the link can
no longer be used.

libzmq reports a connection to the monitor before it hands over that connection's first message. So
a `hear` after a message was received reports every connection that the message may have come over.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, closing
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import trio
import zmq

from kvd.net.link import nothing, report_lost
from kvd.net.turns import MAX_TAKEN_IN, ROUND_NS
from kvd.net.zsocket import ZSocket
from kvd.platform.sockets import KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES
from kvd.wire.endpoints import is_ipv6
from kvd_core.zmq.drain import Inbox, InboxSpace, fill, fill_frames

if TYPE_CHECKING:
    from kvd.net.link import Linked, LinkOptions, Runs
    from kvd.net.streamlog import StreamLog
    from kvd.net.zsocket import Context

# Bound of the receive queue of a socket that requests replays; engines keep 10,000 batches.
ANSWER_MESSAGES = 100_000

# Longest wait for a closed connection to end, which takes 0.3 ms on an idle machine.
GONE_S = 0.1
GONE_EVERY_S = 0.0005  # pause between two checks whether that connection has ended

MONITOR_FRAMES = 2  # frames of a monitor message: the event with a value, and an address
MONITOR_EVENT = struct.Struct("=Hi")  # first frame of libzmq's monitor messages: event, value
HANDSHAKE_FAULTS = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "handshake failed",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "protocol error in the handshake",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "authentication failed in the handshake",
}
NO_CURVE_THERE = "the other end does not speak CURVE"
MONITORED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

NO_CURVE: Mapping[int, int | bytes] = MappingProxyType({})


class ForeignFd(NamedTuple):
    """A descriptor that libzmq will close; its inode tells it from a later one of that number."""

    number: int
    inode: int

    @classmethod
    def of(cls, number: int) -> ForeignFd | None:
        """Returns None if it is closed already."""
        try:
            return cls(number, os.fstat(number).st_ino)
        except OSError:
            return None

    def is_open(self) -> bool:
        return self == self.of(self.number)


class ZmqLink:
    """A connecting SUB socket and its monitor.

    A monitor event that nothing reads would block libzmq's only I/O thread for good, and with it
    all listeners. So the monitor's reader, whose queue is unbounded as events are few, exists
    before the first event, and monitoring ends before the reader does.
    """

    def __init__(self, linked: Linked, log: StreamLog, options: LinkOptions) -> None:
        self._linked = linked
        self._log = log
        self._options = options
        self._fault = ""
        self._given_up = ""
        self._patience = trio.CancelScope()  # ends when libzmq has not retried in time
        self._give_up_at = math.inf
        self._connection: ForeignFd | None = None
        self._idle = trio.CancelScope()  # around the wait for messages
        self._opened = AsyncExitStack()  # all that `aclose` undoes

    async def open(
        self,
        context: Context,
        address: str,
        topics: tuple[bytes, ...] = (b"",),
        curve: Mapping[int, int | bytes] = NO_CURVE,
    ) -> None:
        """Connects to `address`, which the owner's endpoint resolves to now.

        Subscribes to messages whose first frame begins with one of `topics`. Raises zmq.ZMQError.
        """
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._gone)
            first, *more = topics
            subscribed = {zmq.SUBSCRIBE: first, **socket_options(address, self._options), **curve}
            self.sub = stack.enter_context(closing(ZSocket(context, zmq.SUB, subscribed)))
            for topic in more:
                self.sub.socket.set(zmq.SUBSCRIBE, topic)
            # A secret name: a client that registered it as an endpoint would take our events.
            monitoring = f"inproc://monitor-{os.urandom(16).hex()}"
            pair = ZSocket(context, zmq.PAIR, {zmq.RCVHWM: 0})
            self._monitor = stack.enter_context(closing(pair))
            self._monitor_inbox = Inbox(InboxSpace())
            self.sub.socket.monitor(monitoring, MONITORED)
            stack.callback(self.sub.socket.monitor, None, 0)
            self._monitor.socket.connect(monitoring)
            self.sub.socket.connect(address)
            stack.callback(self._unsubscribe, topics)
            self._opened = stack.pop_all()

    async def aclose(self) -> None:
        await self._opened.aclose()

    def start(self, runs: Runs) -> None:
        """Begins to report connection changes to the owner."""
        runs.start(self._watch)

    async def _watch(self) -> str:
        """Reports connection changes to the owner; returns why the link can no longer be used.

        It returns once libzmq has stopped connecting, or the link has been given up.
        """
        while not self._given_up:
            self.hear()
            with trio.CancelScope(deadline=self._give_up_at) as self._patience:
                await self._monitor.wait_readable()
            # Check once more, since this loop may have been late, and not libzmq.
            if self._patience.cancelled_caught and not self.hear():
                break
        return f"{self._given_up or self._fault or 'protocol error'}: {self._linked.endpoint}"

    async def wait(self, serve: Callable[[], bool] = nothing) -> None:
        """Calls `serve` when messages come, until it returns False or a connection was made."""
        with trio.CancelScope() as self._idle:
            while True:
                await self.sub.wait_readable()
                if not serve():
                    break

    def fill(
        self, inbox: Inbox, refuse: Callable[[str], object], max_messages: int, budget_ns: int
    ) -> bool:
        """Takes event messages; returns whether there may be more."""
        return fill(inbox, self.sub.socket.underlying, refuse, max_messages, budget_ns)

    def fill_frames(self, inbox: Inbox, most: int, max_messages: int, budget_ns: int) -> bool:
        """Takes messages of any shape; returns whether there may be more."""
        return fill_frames(inbox, self.sub.socket.underlying, most, max_messages, budget_ns)

    def give_up(self, why: str) -> None:
        """Makes the link unusable, for that reason."""
        self._given_up = why
        self._patience.cancel()

    def hear(self) -> bool:
        """Reports connection changes up to now to the owner; returns whether there were any."""
        heard, inbox = False, self._monitor_inbox
        # Called in every turn of a listener: finding nothing takes 1 us here, and 6 with pyzmq.
        socket = self._monitor.socket.underlying
        while fill_frames(inbox, socket, MONITOR_FRAMES, MAX_TAKEN_IN, ROUND_NS):
            pass  # until it is empty: only then does its descriptor signal the next event
        while (frames := inbox.take_frames()) is not None:
            self._handle_event(*MONITOR_EVENT.unpack(frames[0]))
            heard = True
        return heard

    def _handle_event(self, event: int, value: int) -> None:
        linked = self._linked
        if event == zmq.EVENT_CONNECTED:
            self._connection = ForeignFd.of(value)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._fault = ""
            linked.joined()
            self._idle.cancel()
            self._log.info("stream_joined", endpoint=linked.endpoint)
        elif event == zmq.EVENT_DISCONNECTED:
            self._wait_until(trio.current_time() + self._options.give_up_s)
            report_lost(linked, self._log, self._fault or "connection lost")
        elif event == zmq.EVENT_CONNECT_RETRIED:
            self._wait_until(math.inf)
        elif value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH and self._linked.server_key:
            self._fault = NO_CURVE_THERE
        else:
            self._fault = HANDSHAKE_FAULTS[zmq.Event(event)]

    def _unsubscribe(self, topics: tuple[bytes, ...]) -> None:
        """Unsubscribes before the connection ends.

        An engine whose connection just breaks counts the subscriber for a while, since libzmq
        takes two exchanges between its threads to forget it. Batches that the engine publishes
        because of that count, for a listener that is just coming back, would be lost.
        """
        for topic in topics:
            self.sub.socket.set(zmq.UNSUBSCRIBE, topic)

    async def _gone(self) -> None:
        """Waits until the connection of the closed socket has ended, for GONE_S at most.

        libzmq unsubscribes and disconnects in threads of its own, milliseconds later on a busy
        machine, and callers rely on the connection being gone when the listener's task has ended.
        """
        connection = self._connection
        with trio.CancelScope(shield=True, deadline=trio.current_time() + GONE_S):
            while connection is not None and connection.is_open():  # noqa: ASYNC110 - no event
                await trio.sleep(GONE_EVERY_S)

    def _wait_until(self, moment: float) -> None:
        self._give_up_at = self._patience.deadline = moment


def socket_options(endpoint: str, options: LinkOptions) -> dict[int, int | bytes]:
    return {
        # Only for hosts written as IPv6 addresses: with it libzmq prefers a host name's IPv6
        # address, while engines bind to IPv4 unless configured otherwise.
        zmq.IPV6: int(is_ipv6(endpoint)),
        zmq.RCVHWM: 0,
        zmq.MAXMSGSIZE: options.max_message_bytes,
        zmq.HEARTBEAT_IVL: _ms(options.heartbeat_s),
        zmq.HEARTBEAT_TIMEOUT: _ms(options.heartbeat_timeout_s),
        zmq.CONNECT_TIMEOUT: _ms(options.connect_timeout_s),
        zmq.HANDSHAKE_IVL: _ms(options.handshake_timeout_s),
        zmq.RECONNECT_IVL: _ms(options.reconnect_s),
        zmq.RECONNECT_IVL_MAX: _ms(options.reconnect_max_s),
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: KEEPALIVE_IDLE_S,
        zmq.TCP_KEEPALIVE_INTVL: KEEPALIVE_INTERVAL_S,
        zmq.TCP_KEEPALIVE_CNT: KEEPALIVE_PROBES,
    }


def asking_options(endpoint: str, options: LinkOptions) -> dict[int, int | bytes]:
    """Returns the options of a socket that requests a replay, reads the answer and is closed.

    Its bounded queue holds up a server that answers faster than it is read. It needs no
    heartbeats, since the replay has a deadline of its own.
    """
    return {
        **socket_options(endpoint, options),
        zmq.RCVHWM: ANSWER_MESSAGES,
        zmq.HEARTBEAT_IVL: 0,
    }


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
