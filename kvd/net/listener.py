"""Reads the event stream of one (worker, rank) for as long as the worker is registered.

One task per listener, three nested stretches of time:

    run            the registration    socket after socket, with a growing pause between two
      _session     one SUB socket      until libzmq has given it up; what had arrived still counts
        _watch     its connections     libzmq makes them, again and again, and tells its monitor
        _receive   its messages        in turns, so that neither a burst nor a worker starves others

libzmq connects again by itself after a plain loss, but never after a protocol error: a frame
beyond the limit, broken framing, a peer of the wrong type (libzmq issue 4196). Its events tell the
two apart: after DISCONNECTED, CONNECT_RETRIED follows within a millisecond or never (seen with
libzmq 4.3.5 on twelve kinds of misbehaving publishers). Without it the socket is replaced.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio
import zmq

from kvd.logs import RateLimit, get_logger
from kvd.net.zsocket import ZSocket
from kvd.wire.endpoints import is_ipv6
from kvd_core.drain import drain

if TYPE_CHECKING:
    from kvd.net.zsocket import Context
    from kvd.wire.listener import Listener

MAX_BATCH_MESSAGES = 64  # per turn of the loop: small ones take 0.1 ms, a turn itself 8 us
MAX_BATCH_NS = 2_000_000  # 2 ms per turn: what one busy worker may add to a query's latency
LOG_EVERY_S = 30.0  # per listener and kind of line; what is held back shows in the counters

KEEPALIVE_IDLE_S = 30  # finds dead hosts of workers whose ZMTP is too old for heartbeats
KEEPALIVE_INTERVAL_S = 10
KEEPALIVE_PROBES = 3

MONITOR_EVENT = struct.Struct("=Hi")  # first frame of libzmq's monitor messages: event, value
HANDSHAKE_FAULTS = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "handshake failed",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "protocol error in the handshake",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "authentication failed in the handshake",
}
MONITORED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """How a listener treats its connection."""

    heartbeat_s: float = 5.0  # like the peer; a frozen worker is noticed after the timeout
    heartbeat_timeout_s: float = 15.0
    connect_timeout_s: float = 5.0  # else a vanished host holds one attempt for two minutes
    handshake_timeout_s: float = 10.0
    reconnect_s: float = 0.1  # the first pause before another attempt; it doubles up to the longest
    reconnect_max_s: float = 5.0
    give_up_s: float = 1.0  # libzmq announces a retry in 1 ms; missing it costs a new socket
    queue_messages: int = 100_000  # libzmq's 1,000 lost 93,500 of a burst of 100,001, this none
    max_message_bytes: int = 64 * 1024 * 1024  # without, one declared frame takes any memory


async def run_listener(
    listener: Listener, context: Context, ready: trio.Event, options: LinkOptions
) -> None:
    """Keeps `listener` connected and fed, until cancelled.

    Connects at once and takes messages once `ready` is set; until then libzmq queues them.
    Failures of the connection end up in the listener's status. What its `apply` raises is a bug
    and comes out of here in an ExceptionGroup.
    """
    await _Reader(listener, context, ready, options).run()


class _Reader:
    """The task of one listener."""

    __slots__ = ("_context", "_limit", "_listener", "_options", "_ready")

    def __init__(
        self, listener: Listener, context: Context, ready: trio.Event, options: LinkOptions
    ) -> None:
        self._listener = listener
        self._context = context
        self._ready = ready
        self._options = options
        self._limit = RateLimit(LOG_EVERY_S)

    async def run(self) -> None:
        shortest, longest = self._options.reconnect_s, self._options.reconnect_max_s
        pause_s = shortest
        while True:
            started = trio.current_time()
            why = await self._session()
            now = trio.current_time()
            self._listener.failed(why, now)
            if now - started > 2 * longest:
                pause_s = shortest  # not one of a row of failures
            self._log(log.warning, "listener failed", error=why, retry_s=pause_s)
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest)

    async def _session(self) -> str:
        """Reads over one socket for as long as that is of use; returns why it is not any more."""
        listener = self._listener
        with contextlib.ExitStack() as stack:
            try:
                sub, monitor = self._connect(stack)
            except zmq.ZMQError as error:
                why = zmq.strerror(error.errno or 0)
                return f"failed to connect ZMQ SUB socket to {listener.endpoint}: {why}"
            listener.connecting()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._receive, sub)
                why = await self._watch(monitor)
                nursery.cancel_scope.cancel()
            await self._receive_rest(sub)
            return why

    def _connect(self, stack: contextlib.ExitStack) -> tuple[ZSocket, ZSocket]:
        """Returns a connecting SUB socket and its monitor, both to be closed by `stack`.

        An event for a monitor without a reader would block libzmq's only I/O thread for good, and
        all listeners with it. So there is a reader before the first event, without a limit (events
        are few), and monitoring ends before the reader does.
        """
        options = _socket_options(self._listener.endpoint, self._options)
        sub = stack.enter_context(contextlib.closing(ZSocket(self._context, zmq.SUB, options)))
        # A secret name: who registers it as an endpoint would take our place at the monitor.
        address = f"inproc://monitor-{secrets.token_hex(16)}"
        pair = ZSocket(self._context, zmq.PAIR, {zmq.RCVHWM: 0})
        monitor = stack.enter_context(contextlib.closing(pair))
        sub.socket.monitor(address, MONITORED)
        stack.callback(sub.socket.monitor, None, 0)
        monitor.socket.connect(address)
        sub.socket.connect(self._listener.endpoint)
        return sub, monitor

    async def _watch(self, monitor: ZSocket) -> str:
        """Tells the listener what libzmq does; returns why libzmq will do nothing more."""
        listener = self._listener
        fault = ""
        deadline = math.inf
        while True:
            frames = None
            with trio.move_on_at(deadline):
                frames = await monitor.receive()
            # Look once more: it may have been this loop, not libzmq, that was late.
            if frames is None and (frames := monitor.receive_nowait()) is None:
                return f"{fault or 'protocol error'}: {listener.endpoint}"
            event, _ = MONITOR_EVENT.unpack(frames[0])
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                fault = ""
                listener.joined()
                self._log(log.info, "worker joined", endpoint=listener.endpoint)
            elif event == zmq.EVENT_DISCONNECTED:
                deadline = trio.current_time() + self._options.give_up_s
                self._lost(f"{fault or 'connection lost'}: {listener.endpoint}")
            elif event == zmq.EVENT_CONNECT_RETRIED:
                deadline = math.inf
            else:
                fault = HANDSHAKE_FAULTS[event]

    def _lost(self, why: str) -> None:
        if self._listener.connected:
            self._log(log.warning, "worker lost", error=why)
        self._listener.lost(why, trio.current_time())

    async def _receive(self, sub: ZSocket) -> None:
        """Feeds the listener from the socket, for ever.

        Receiving fails only if the context ended before its listeners did: a bug, so it may raise.
        """
        await self._ready.wait()
        self._listener.receiving()
        while True:
            if self._drain(sub):
                await trio.lowlevel.checkpoint()
            else:
                await sub.wait_readable()

    async def _receive_rest(self, sub: ZSocket) -> None:
        """Takes what had arrived before the socket became useless."""
        while self._ready.is_set() and self._drain(sub):
            await trio.lowlevel.checkpoint()

    def _drain(self, sub: ZSocket) -> bool:
        """Takes waiting messages for one turn; returns whether there may be more."""
        listener = self._listener
        gaps, refused = listener.gaps, listener.refused
        more = drain(
            sub.socket.underlying, listener.take, listener.refuse, MAX_BATCH_MESSAGES, MAX_BATCH_NS
        )
        if listener.gaps != gaps:
            self._log(log.warning, "messages missing", gaps=listener.gaps, missing=listener.missing)
        if listener.refused != refused:
            self._log(log.warning, "messages refused", **listener.bad_frames)
        return more

    def _log(self, write: Callable[..., None], event: str, **fields: object) -> None:
        held = self._limit.admit(event, trio.current_time())
        if held is not None:
            write(event, listener=self._listener.name, **fields, held=held)


def _socket_options(endpoint: str, options: LinkOptions) -> dict[int, int | bytes]:
    return {
        zmq.SUBSCRIBE: b"",
        # With IPv6 on, libzmq takes a host name's IPv6 address if there is one, and engines bind
        # to IPv4 unless told otherwise: so only for hosts written as IPv6 addresses.
        zmq.IPV6: int(is_ipv6(endpoint)),
        zmq.RCVHWM: options.queue_messages,
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


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
