"""A subscription through libzmq: a SUB socket, and the state of its connections as it reports it.

libzmq connects again by itself after a plain loss, but never after a protocol error: a frame
beyond the limit, broken framing, a peer of the wrong type (libzmq issue 4196). Its events tell the
two apart: after DISCONNECTED, CONNECT_RETRIED follows within a millisecond or never (seen with
libzmq 4.3.5 on twelve kinds of misbehaving publishers). Without it the link cannot be used any
more.

libzmq reports a connection to the monitor before it hands over that connection's first message. So
a caller that holds a message and then calls `hear` knows of every connection it may have come over.
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

from kvd.net.link import nothing, tell_lost
from kvd.net.streams import KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES
from kvd.net.turns import MAX_TAKEN_IN, ROUND_NS
from kvd.net.zsocket import ZSocket
from kvd.wire.endpoints import is_ipv6
from kvd_core.zmq.drain import Inbox, InboxSpace, fill, fill_frames

if TYPE_CHECKING:
    from kvd.net.link import Linked, LinkOptions
    from kvd.net.streamlog import StreamLog
    from kvd.net.zsocket import Context

# Messages in the queue of a socket that asks for a replay; engines keep 10,000 batches.
ANSWER_MESSAGES = 100_000

# Time to wait for the end of a connection, which takes 0.3 ms on an idle machine.
GONE_S = 0.1
GONE_EVERY_S = 0.0005  # pause between two checks whether that connection has ended

MONITOR_FRAMES = 2  # of its messages: the event with a value, and an address
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
    """A descriptor that libzmq closes; a later one of the same number has another inode."""

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

    An event for a monitor without a reader would block libzmq's only I/O thread for good, and all
    listeners with it. So there is a reader before the first event, without a limit (events are
    few), and monitoring ends before the reader does.
    """

    def __init__(self, linked: Linked, log: StreamLog, options: LinkOptions) -> None:
        self._linked = linked
        self._log = log
        self._options = options
        self._fault = ""
        self._given_up = ""
        self._patience = trio.CancelScope()  # ends when libzmq has done nothing more for too long
        self._give_up_at = math.inf
        self._connection: ForeignFd | None = None
        self._idle = trio.CancelScope()  # while nothing comes
        self._opened = AsyncExitStack()  # what is closed again

    async def open(
        self,
        context: Context,
        address: str,
        topics: tuple[bytes, ...] = (b"",),
        curve: Mapping[int, int | bytes] = NO_CURVE,
    ) -> None:
        """Connects to `address`, to which the owner's endpoint leads now.

        Only messages whose first frame begins with one of `topics` come. Raises zmq.ZMQError.
        """
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._gone)
            first, *more = topics
            subscribed = {zmq.SUBSCRIBE: first, **socket_options(address, self._options), **curve}
            self.sub = stack.enter_context(closing(ZSocket(context, zmq.SUB, subscribed)))
            for topic in more:
                self.sub.socket.set(zmq.SUBSCRIBE, topic)
            # A secret name: who registers it as an endpoint would replace us at the monitor.
            monitoring = f"inproc://monitor-{os.urandom(16).hex()}"
            pair = ZSocket(context, zmq.PAIR, {zmq.RCVHWM: 0})
            self._monitor = stack.enter_context(closing(pair))
            self._news = Inbox(InboxSpace())
            self.sub.socket.monitor(monitoring, MONITORED)
            stack.callback(self.sub.socket.monitor, None, 0)
            self._monitor.socket.connect(monitoring)
            self.sub.socket.connect(address)
            stack.callback(self._unsubscribe, topics)
            self._opened = stack.pop_all()

    async def aclose(self) -> None:
        await self._opened.aclose()

    async def watch(self) -> str:
        """Reports to the owner what libzmq does; returns why the socket cannot be used any more.

        That is when libzmq will do nothing more, or the link has been given up.
        """
        while not self._given_up:
            self.hear()
            with trio.CancelScope(deadline=self._give_up_at) as self._patience:
                await self._monitor.wait_readable()
            # Check once more: it may have been this loop, not libzmq, that was late.
            if self._patience.cancelled_caught and not self.hear():
                break
        return f"{self._given_up or self._fault or 'protocol error'}: {self._linked.endpoint}"

    async def wait(self, serve: Callable[[], bool] = nothing) -> None:
        """Has `serve` take what comes, until it cannot, or the other end has joined."""
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
        """Ends `watch`, with that reason."""
        self._given_up = why
        self._patience.cancel()

    def hear(self) -> bool:
        """Reports to the owner what libzmq has done up to now; returns whether it did anything."""
        heard, news = False, self._news
        # In every turn of a listener: that there is nothing costs 1 us, where pyzmq takes 6.
        socket = self._monitor.socket.underlying
        while fill_frames(news, socket, MONITOR_FRAMES, MAX_TAKEN_IN, ROUND_NS):
            pass  # to its end: only then does its descriptor report the next one
        while (frames := news.take_frames()) is not None:
            self._tell(*MONITOR_EVENT.unpack(frames[0]))
            heard = True
        return heard

    def _tell(self, event: int, value: int) -> None:
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
            tell_lost(linked, self._log, self._fault or "connection lost")
        elif event == zmq.EVENT_CONNECT_RETRIED:
            self._wait_until(math.inf)
        elif value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH and self._linked.server_key:
            self._fault = NO_CURVE_THERE
        else:
            self._fault = HANDSHAKE_FAULTS[zmq.Event(event)]

    def _unsubscribe(self, topics: tuple[bytes, ...]) -> None:
        """Unsubscribes before the connection ends.

        An engine that only loses a connection counts the subscriber for a while: it
        takes libzmq two exchanges between its threads to forget one. What the engine sends on the
        strength of that count, to a listener that is just coming back, would reach nobody.
        """
        for topic in topics:
            self.sub.socket.set(zmq.UNSUBSCRIBE, topic)

    async def _gone(self) -> None:
        """Returns when the connection of the closed socket has ended, or does not within GONE_S.

        libzmq sends the last words and hangs up in threads of its own, milliseconds later on a
        busy machine. A caller that is notified of a listener's end may build on it at once.
        """
        connection = self._connection
        with trio.CancelScope(shield=True, deadline=trio.current_time() + GONE_S):
            while connection is not None and connection.is_open():  # noqa: ASYNC110 - nobody tells
                await trio.sleep(GONE_EVERY_S)

    def _wait_until(self, moment: float) -> None:
        self._give_up_at = self._patience.deadline = moment


def socket_options(endpoint: str, options: LinkOptions) -> dict[int, int | bytes]:
    return {
        # With IPv6 on, libzmq takes a host name's IPv6 address if there is one, and engines bind
        # to IPv4 unless configured otherwise: so only for hosts written as IPv6 addresses.
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
    """Returns those of a socket that is read to the end of an answer, and closed.

    What it has not read yet holds up who answers, and not answering has a deadline of its own.
    """
    return {
        **socket_options(endpoint, options),
        zmq.RCVHWM: ANSWER_MESSAGES,
        zmq.HEARTBEAT_IVL: 0,
    }


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
