"""Runs the listeners of registered ranks as supervised tasks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import trio

from kvd.net.listener import run_listener
from kvd.net.probing import Prober
from kvd.net.replay import Replayer, ReplayOptions
from kvd.net.supervisor import Supervisor
from kvd.telemetry.logs import get_logger
from kvd.telemetry.stretches import EVENTS
from kvd.wire.event_stream import StreamHealth

if TYPE_CHECKING:
    from collections.abc import Hashable

    from kvd.net.link import LinkOptions, LinkResources
    from kvd.wire.event_stream import EventStream

# Pause between two checks of the health of streams; shorter changes are not logged.
HEALTH_EVERY_S = 1.0
# Pause between two checks whether a listener is connected, while the daemon starts.
CONNECTED_EVERY_S = 0.02
# Listeners examined between two checkpoints: 0.2 ms, 0.8 where each has changed and is logged.
HEALTH_SLICE = 16

log = get_logger(__name__)


class ListenerTasks:
    """Starts and stops one task per registered rank (the registry's `Listeners`).

    Listeners connect once `begin` is set, or at once without it. Their tasks start one in every
    other pass of the loop, since thousands may be registered together, and each takes 0.4 ms until
    it is connected. They apply messages once `ready` is set.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        resources: LinkResources,
        ready: trio.Event,
        options: LinkOptions,
        replays: ReplayOptions | None = None,
        health_every_s: float = HEALTH_EVERY_S,
        begin: trio.Event | None = None,
    ) -> None:
        self._begin = begin
        self._waiting: dict[Hashable, EventStream] = {}  # for the start of their tasks, in order
        self._starter = trio.lowlevel.ParkingLot()  # where the task that starts them rests
        self._tasks: Supervisor[Hashable] = Supervisor(nursery)
        self._resources = resources
        self._ready = ready
        self._options = options
        self._replayer = Replayer(resources, options, replays or ReplayOptions())
        self._health: dict[EventStream, StreamHealth] = {}  # as last logged
        self._prober = Prober(nursery, resources.dialer, options.connect_timeout_s)
        nursery.start_soon(self._start_waiting)
        nursery.start_soon(self._watch_health, health_every_s)

    def set_replay_options(self, replays: ReplayOptions) -> None:
        """Applies other limits to replays from now on."""
        self._replayer.set_options(replays)

    def start(self, key: Hashable, listener: EventStream) -> None:
        """Has the listener's task start soon; KeyError while `key` has one."""
        if key in self._tasks or key in self._waiting:
            raise KeyError(key)
        self._waiting[key] = listener
        self._health[listener] = StreamHealth.RECOVERING
        self._starter.unpark()

    async def stop(self, key: Hashable) -> bool:
        """Returns True when the listener's task has ended; False, and at once, without one."""
        if (listener := self._waiting.pop(key, None)) is not None:
            self._forget(listener)
            await trio.lowlevel.checkpoint()  # hundreds may be stopped in a row
            return True
        return await self._tasks.stop(key)

    async def entered(self) -> None:
        """Returns once all present listeners have begun to connect; call after `begin` is set."""
        while self._waiting:
            await trio.lowlevel.checkpoint()
        for _ in range(2):  # the first step of the last one's task may come behind this one's next
            await trio.lowlevel.checkpoint()

    async def connected(self) -> None:
        """Returns once all present listeners have been connected; call after `begin` is set."""
        for listener in list(self._health):
            while listener in self._health and not listener.connected:  # noqa: ASYNC110 - at start
                await trio.sleep(CONNECTED_EVERY_S)

    async def _start_waiting(self) -> None:
        if self._begin is not None:
            await self._begin.wait()
        while True:
            if self._waiting:
                self._start_next()
                await trio.lowlevel.checkpoint()
                await trio.lowlevel.checkpoint()
            else:
                await self._starter.park()

    def _start_next(self) -> None:
        """Starts the task that was to start first.

        A function of its own, since a local variable of the resting `_start_waiting` would keep
        the last listener alive, and with it an index.
        """
        key = next(iter(self._waiting))
        self._tasks.start(key, partial(self._run, self._waiting.pop(key)))

    async def _run(self, listener: EventStream) -> None:
        try:
            listening = run_listener(
                listener, self._resources, self._ready, self._options, self._replayer
            )
            await EVENTS.steps_of(listening)
        finally:
            self._forget(listener)

    def _forget(self, listener: EventStream) -> None:
        del self._health[listener]
        self._prober.forget(listener)

    async def _watch_health(self, every_s: float) -> None:
        """Logs every lasting change of a stream's health, and engines that are quiet."""
        while True:
            await trio.sleep(every_s)
            await self._check_health()

    async def _check_health(self) -> None:
        """Checks all listeners once.

        A function of its own, since a local variable of the sleeping `_watch_health` would keep
        the last listener alive, and with it an index.
        """
        for at, listener in enumerate(list(self._health), 1):
            if at % HEALTH_SLICE == 0:
                await trio.lowlevel.checkpoint()
            if listener in self._health:
                self._log_health(listener)
                self._check_quiet(listener)
        await self._prober.start(trio.current_time())

    def _check_quiet(self, listener: EventStream) -> None:
        now = trio.current_time()
        self._prober.note_state(listener, now)
        quiet = listener.check_quiet(now)
        if quiet is not None:
            log.warning(
                "engine_quiet",
                listener=listener.name,
                quiet=quiet,
                endpoint=listener.endpoint,
                for_s=listener.link.stale_after_s,
                error=listener.link.last_error,
            )

    def _log_health(self, listener: EventStream) -> None:
        before, now = self._health[listener], listener.health(trio.current_time())
        if before is now:
            return
        self._health[listener] = now
        fields = {"listener": listener.name, "health": now, "was": before, "loss": listener.loss}
        if now in (StreamHealth.EXACT, StreamHealth.RECOVERING):
            log.info("stream_health", **fields)
        else:
            log.warning("stream_health", **fields)
