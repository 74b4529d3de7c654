"""Reads the event stream of one (worker, rank) for as long as the worker is registered.

One task per listener, three nested stretches of time:

    run            the registration    socket after socket, with a growing pause between two
      _session     one SUB socket      until libzmq has given it up; what had arrived still counts
        watch      its connections     libzmq makes them, again and again, and tells its monitor
        _receive   its messages        in turns, so that neither a burst nor a worker starves others
          _settle  the one held back   what is missing before it is replayed; later ones wait in the
                                       socket meanwhile
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import trio
import zmq

from kvd.logs import get_logger
from kvd.net.link import Link, LinkOptions
from kvd.net.streamlog import StreamLog
from kvd.wire.cursor import Verdict
from kvd.wire.replay import ReplayEnd
from kvd_core.drain import drain

if TYPE_CHECKING:
    from kvd.net.replay import Replayer
    from kvd.net.turns import Turns
    from kvd.net.zsocket import Context
    from kvd.wire.listener import Listener

MAX_TURN_MESSAGES = 64  # per turn of the loop: small ones take 0.1 ms, a turn itself 8 us

log = get_logger(__name__)


async def run_listener(
    listener: Listener,
    context: Context,
    ready: trio.Event,
    options: LinkOptions,
    replayer: Replayer,
    turns: Turns,
) -> None:
    """Keeps `listener` connected and fed, until cancelled.

    Connects at once and takes messages once `ready` is set; until then libzmq queues them.
    Failures of the connection end up in the listener's status. So does what its stream raises:
    that is a bug, but a batch that met it once would end the daemon again after every restart,
    as soon as it is replayed.
    """
    await _Reader(listener, context, ready, options, replayer, turns).run()


class _Reader:
    """The task of one listener."""

    __slots__ = ("_context", "_flaw_said", "_listener", "_log", "_options", "_ready", "_replayer",
                 "_spare_until", "_turns")  # fmt: skip

    def __init__(
        self,
        listener: Listener,
        context: Context,
        ready: trio.Event,
        options: LinkOptions,
        replayer: Replayer,
        turns: Turns,
    ) -> None:
        self._listener = listener
        self._context = context
        self._ready = ready
        self._options = options
        self._replayer = replayer
        self._turns = turns
        self._spare_until = 0.0  # monotonic seconds; no replays before
        self._flaw_said = listener.last_flaw  # before a pause
        self._log = StreamLog(log, listener.name)

    async def run(self) -> None:
        shortest, longest = self._options.reconnect_s, self._options.reconnect_max_s
        pause_s = shortest
        while True:
            started = trio.current_time()
            why = await self._survive_session()
            now = trio.current_time()
            self._listener.failed(why, now)
            if now - started > 2 * longest:
                pause_s = shortest  # not one of a row of failures
            self._log.warning("listener failed", error=why, retry_s=pause_s)
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest)

    async def _survive_session(self) -> str:
        """Returns why the session ended; a bug costs the batch it happened on and the socket."""
        why = "internal error"
        try:
            why = await self._session()
        except* Exception:
            self._listener.crashed()
            self._log.exception("listener crashed")
        return why

    async def _session(self) -> str:
        """Reads over one socket for as long as that is of use; returns why it is not any more."""
        listener = self._listener
        with contextlib.ExitStack() as stack:
            try:
                link = Link(stack, self._context, listener, self._log, self._options)
            except zmq.ZMQError as error:
                why = zmq.strerror(error.errno or 0)
                return f"failed to connect ZMQ SUB socket to {listener.endpoint}: {why}"
            listener.connecting()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._receive, link)
                why = await link.watch()
                nursery.cancel_scope.cancel()
            await self._receive_rest(link)
            return why

    async def _receive(self, link: Link) -> None:
        """Feeds the listener from the socket, for ever.

        Receiving fails only if the context ended before its listeners did: a bug, so it may raise.
        """
        await self._ready.wait()
        self._listener.receiving()
        while True:
            more = await self._drain(link)
            if self._listener.held is not None:
                await self._settle(link)
                await trio.lowlevel.checkpoint()
            elif more:
                await trio.lowlevel.checkpoint()
            else:
                await link.sub.wait_readable()

    async def _receive_rest(self, link: Link) -> None:
        """Takes what had arrived before the socket became useless, up to the first gap.

        What comes from there on shows as missing on the next socket, where it can be replayed.
        """
        while self._ready.is_set() and self._listener.held is None:
            if not await self._drain(link):
                break
            await trio.lowlevel.checkpoint()

    async def _drain(self, link: Link) -> bool:
        """Takes waiting messages for one turn; returns whether there may be more."""
        listener = self._listener
        budget_ns = await self._turns.begin()
        if not listener.connected:
            link.hear()
        refused = listener.refused
        socket = link.sub.socket.underlying
        more = drain(socket, listener.take, listener.refuse, MAX_TURN_MESSAGES, budget_ns)
        self._turns.end()
        if listener.refused != refused:
            self._log.warning("messages refused", **listener.bad_frames)
        self._say_flaw()
        return more

    def _say_flaw(self) -> None:
        """Logs the last batch that was not understood, live or replayed, unless it has been."""
        flaw = self._listener.last_flaw
        if flaw is not None and flaw is not self._flaw_said:
            self._flaw_said = flaw
            seq, reason = flaw
            self._log.warning("batch not understood", batch=seq, reason=reason)

    async def _settle(self, link: Link) -> None:
        """Applies or drops the batch held back; fetches first what is missing before it."""
        listener = self._listener
        link.hear()  # only now is known whether it may be another engine's
        last = listener.cursor.last
        verdict = listener.judge()
        if verdict is Verdict.STALE:
            return
        if verdict is Verdict.RESTART:
            self._log.warning("engine restarted", last_seq=last)
        end = await self._replay()
        lost = listener.settle()
        self._say_flaw()
        if lost:
            self._log.warning("batches lost", missing=lost, lost=listener.lost, replay=end)

    async def _replay(self) -> ReplayEnd | None:
        """Fetches what is missing before the held batch; None if nothing can be asked."""
        listener = self._listener
        if listener.replay_endpoint is None or not listener.wanted():
            return None
        if trio.current_time() < self._spare_until:
            listener.spared_replays += 1
            return None
        last, replayed = listener.cursor.last, listener.replayed
        end = await self._replayer.fetch(listener)
        if end is ReplayEnd.OTHER_ENGINE:
            self._log.warning("engine restarted", last_seq=last)
            end = await self._replayer.fetch(listener)
        count = listener.replayed - replayed
        if count:
            self._log.info("batches replayed", count=count, ended=end)
        elif end not in (ReplayEnd.REACHED, ReplayEnd.MARKER):
            self._spare_until = trio.current_time() + self._replayer.options.spare_s
        return end
