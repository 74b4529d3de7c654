"""Reads the event stream of one (worker, rank) for as long as the worker is registered.

Each listener is one task, which uses one link after another (`kvd.net.sessions`). While a link
works:

    receive          takes messages in turns, so that no burst and no worker starves the others
      _serve         while the task rests: applies messages as they come, without waking it
      _finish        applies a long batch slice by slice, each slice in a turn of its own
      _resolve_held  fetches what is missing before the held batch, then applies that
      _keep          meanwhile, takes later messages off the link into the backlog

At every moment exactly one task empties the link (`kvd.net.backlog` says why).
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import trio

from kvd.net.backlog import Backlog
from kvd.net.sessions import LinkSessions
from kvd.net.streamlog import StreamLog
from kvd.telemetry.logs import get_logger
from kvd.telemetry.stretches import EVENTS
from kvd.wire.cursor import Verdict
from kvd.wire.replay import ReplayEnd

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvd.net.link import Link, LinkOptions, LinkResources
    from kvd.net.replay import Replayer
    from kvd.net.turns import Turns
    from kvd.wire.event_stream import EventStream

log = get_logger(__name__)

# Shortest pause between two replay requests to an idle engine, whatever the settings say.
ASK_AGAIN_S = 1.0


async def run_listener(
    listener: EventStream,
    resources: LinkResources,
    ready: trio.Event,
    options: LinkOptions,
    replayer: Replayer,
) -> None:
    """Keeps `listener` connected and applies its messages, until cancelled.

    Connects at once, and applies messages once `ready` is set; until then they wait in the
    backlog, within the bounds of the options and of the space for all.
    A failed connection shows in the listener's status. So does an exception of its stream: it is
    a bug, but raising it would end the daemon, and after every restart the replay of the same
    batch would end it again.
    """
    lines = StreamLog(log, "listener", listener.name)
    backlog = Backlog(listener, resources.space, options)
    reader = _Reader(listener, backlog, ready, replayer, resources.turns, lines)
    try:
        await LinkSessions(listener, reader, resources, options, lines).run()
    finally:
        backlog.end()


class _Reader:
    """Applies the messages of one listener."""

    __slots__ = (
        "_asked_at",
        "_asked_losses",
        "_backlog",
        "_bug",
        "_flaw_logged",
        "_listener",
        "_log",
        "_ready",
        "_replayer",
        "_restarts_logged",
        "_spare_until",
        "_spared_restarts",
        "_turns",
    )

    def __init__(
        self,
        listener: EventStream,
        backlog: Backlog,
        ready: trio.Event,
        replayer: Replayer,
        turns: Turns,
        log: StreamLog,
    ) -> None:
        self._bug: Exception | None = None  # raised in `_serve`, outside of the task
        self._listener = listener
        self._backlog = backlog
        self._ready = ready
        self._replayer = replayer
        self._turns = turns
        # Monotonic seconds: no missing batches are requested before. An unanswered question has
        # held no batch up, so it spares no gap its replay.
        self._spare_until = 0.0
        # When the engine was last asked in vain, and how many connections had been lost until then.
        self._asked_at, self._asked_losses = -math.inf, 0
        self._spared_restarts = 0  # of the stream when a replay last brought nothing
        self._restarts_logged = listener.stats.restarts
        self._flaw_logged = listener.batches.last_flaw  # one from before a pause is logged already
        self._log = log

    async def receive(self, link: Link) -> NoReturn:
        """Applies the messages of the link, for ever.

        Receiving fails only if the context ended before its listeners did: a bug, so it may raise.
        """
        # Usually there is nothing to wait for, and hundreds of listeners may start together.
        if not self._ready.is_set():
            await self._meanwhile(link, self._ready.wait)
        self._listener.receiving()
        if self._listener.unfinished is not None:  # the last session has left a batch unfinished
            await self._meanwhile(link, self._finish)
        more = await self._take_some(link)
        while True:
            if self._listener.unfinished is not None:
                await self._meanwhile(link, self._finish)
            if self._listener.catch_up.held is not None:
                await self._meanwhile(link, self._resolve_held)
                await trio.lowlevel.checkpoint()
            elif more:
                await trio.lowlevel.checkpoint()
            elif self._listener.catch_up.asks:
                await self._ask(link)
            else:
                await self._rest(link)
                if more := self._has_work:  # which has to be done before more messages are taken
                    continue
            more = await self._take_some(link)

    async def _rest(self, link: Link) -> None:
        """Waits for messages alone, and has `_serve` apply them; returns when the task is needed.

        Raises the bug that `_serve` met, if any.
        """
        self._backlog.idle = True
        try:
            await link.wait(partial(self._serve, link))
        finally:
            self._backlog.idle = False
        if self._bug is not None:
            bug, self._bug = self._bug, None
            raise bug

    @property
    def _has_work(self) -> bool:
        """Returns whether there is work that has to await: a batch to finish, a replay."""
        listener = self._listener
        catch_up = listener.catch_up
        return listener.unfinished is not None or catch_up.held is not None or catch_up.asks

    async def receive_rest(self, link: Link) -> None:
        """Takes the messages that had arrived before the link became unusable.

        Applies them up to a batch that has to be held back; the rest waits for the next link.
        """
        while await self._take_in(link):
            await trio.lowlevel.checkpoint()
        while self._ready.is_set() and self._listener.catch_up.held is None:
            await self._finish()
            if not await self._take_some(link):
                break
            await trio.lowlevel.checkpoint()

    async def _meanwhile(self, link: Link, job: Callable[[], Awaitable[object]]) -> None:
        """Does a job that takes no messages; meanwhile new ones go to the backlog."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep, link)
            await job()
            nursery.cancel_scope.cancel()

    async def _keep(self, link: Link) -> NoReturn:
        while True:
            if await self._take_in(link):
                await trio.lowlevel.checkpoint()
            else:
                await link.wait()

    async def _take_in(self, link: Link) -> bool:
        """Moves messages from link to backlog, for one turn; returns whether more may wait."""
        budget_ns = await self._turns.begin()
        with EVENTS:  # `_keep` runs in a task of its own, whose time is counted here
            more = self._fill(link, budget_ns)
        self._turns.end()
        return more

    def _fill(self, link: Link, budget_ns: int) -> bool:
        listener = self._listener
        refused, dropped = listener.stats.refused, listener.stats.dropped
        more = self._backlog.take_in(link, budget_ns)
        if listener.stats.refused != refused:
            self._log.warning("messages_refused", **listener.stats.bad_frames)
        if listener.stats.dropped != dropped:
            self._log.warning("messages_dropped", dropped=listener.stats.dropped)
        return more

    def _serve(self, link: Link) -> bool:
        """Applies messages in a turn without waking the task; returns False if it has work left."""
        try:
            with EVENTS:
                more = self._take(link, self._turns.begin_now())
        except Exception as error:  # a bug: the task raises it
            self._bug = error
            return False
        return not (more or self._has_work)

    async def _take_some(self, link: Link) -> bool:
        """Applies messages for one turn; returns whether there may be more."""
        return self._take(link, await self._turns.begin())

    def _take(self, link: Link, budget_ns: int) -> bool:
        budget_ns //= 2
        coming = self._fill(link, budget_ns)
        waiting = self._backlog.hand_over(budget_ns)
        self._turns.end()
        self._log_restart()
        self._log_flaw()
        return coming or waiting

    async def _finish(self) -> None:
        """Applies the rest of a long batch, and lets other tasks run between its slices."""
        listener = self._listener
        if listener.unfinished is None:
            return
        while listener.unfinished is not None:
            await trio.lowlevel.checkpoint()
            await self._turns.begin()
            listener.batches.advance()
            self._turns.end()
        self._log_flaw()

    def _log_restart(self) -> None:
        """Logs that the engine was restarted, once for each restart."""
        listener = self._listener
        if listener.stats.restarts != self._restarts_logged:
            self._restarts_logged = listener.stats.restarts
            listener.restarted_at = trio.current_time()
            self._log.warning("engine_restarted", last_seq=listener.batches.passed)

    def _log_flaw(self) -> None:
        """Logs the last batch that was not understood, live or replayed, once."""
        flaw = self._listener.batches.last_flaw
        if flaw is not None and flaw is not self._flaw_logged:
            self._flaw_logged = flaw
            seq, reason = flaw
            self._log.warning("batch_not_understood", batch=seq, reason=reason)

    async def _resolve_held(self) -> None:
        """Applies or drops the held batch; first fetches the batches missing before it."""
        listener = self._listener
        is_lost = self._backlog.has_loss and listener.replay_endpoint is not None
        if listener.catch_up.judge(is_lost) is Verdict.STALE:
            return
        self._log_restart()
        end = await self._replay()
        await self._finish()  # a replay that ran out of time may leave a batch unfinished
        lost = listener.catch_up.apply_held()
        await self._finish()
        self._log_flaw()
        if lost:
            self._log.warning("batches_lost", missing=lost, lost=listener.stats.lost, replay=end)

    async def _ask(self, link: Link) -> None:
        """Finds out whether a reconnected engine is the same; waits while it is spared requests."""
        if trio.current_time() < self._ask_from:
            with trio.move_on_at(self._ask_from):
                await link.wait()  # another connection may lead to an engine that answers
        else:
            await self._meanwhile(link, self._put_question)

    async def _put_question(self) -> None:
        listener = self._listener
        losses = listener.stats.losses
        listener.catch_up.ask()
        await self._replay()
        await self._finish()
        if listener.catch_up.asks:  # the engine has not answered
            self._note_asked(losses)
        self._log_flaw()

    def _note_asked(self, losses: int) -> None:
        """Notes that the engine was asked in vain, when so many connections had been lost."""
        self._asked_at, self._asked_losses = trio.current_time(), losses

    @property
    def _ask_from(self) -> float:
        """Returns when the engine may be asked again: soon, over another connection."""
        is_same_link = self._asked_losses == self._listener.stats.losses
        spare_s = self._replayer.options.spare_s if is_same_link else 0.0
        return self._asked_at + max(spare_s, ASK_AGAIN_S)

    @property
    def _is_spared(self) -> bool:
        """Returns whether a replay has just brought nothing, and no other engine came since."""
        is_same = self._spared_restarts == self._listener.stats.restarts
        return is_same and trio.current_time() < self._spare_until

    async def _replay(self) -> ReplayEnd | None:
        """Fetches the batches that `catch_up` wants; None if no replay was requested."""
        listener = self._listener
        if listener.replay_endpoint is None or not listener.catch_up.wanted():
            return None
        asks = listener.catch_up.held is None
        if not asks and self._is_spared:
            listener.stats.spared_replays += 1
            return None
        replayed, losses = listener.stats.replayed, listener.stats.losses
        end = await self._replayer.fetch(listener)
        self._log_restart()
        # The new engine is asked for all its batches. That answer shows yet another engine only if
        # the connection was lost meanwhile.
        while end is ReplayEnd.OTHER_ENGINE:
            end = await self._replayer.fetch(listener)
            self._log_restart()
        count = listener.stats.replayed - replayed
        if count:
            self._log.info("batches_replayed", count=count, ended=end)
        elif not asks and end not in (ReplayEnd.REACHED, ReplayEnd.MARKER):
            self._spare_until = trio.current_time() + self._replayer.options.spare_s
            self._spared_restarts = listener.stats.restarts
            self._note_asked(losses)
        return end
