"""Runs the listeners of registered ranks as supervised tasks over one ZMQ context."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import trio

from kvd.net.listener import LinkOptions, run_listener
from kvd.net.supervisor import Supervisor

if TYPE_CHECKING:
    from kvd.model import RankKey
    from kvd.net.zsocket import Context
    from kvd.wire.listener import Listener


class ListenerTasks:
    """Starts and stops one task per registered rank (the registry's `Listeners`).

    Listeners connect at once, and take messages when `ready` is set.
    """

    def __init__(
        self, nursery: trio.Nursery, context: Context, ready: trio.Event, options: LinkOptions
    ) -> None:
        self._tasks: Supervisor[RankKey] = Supervisor(nursery)
        self._context = context
        self._ready = ready
        self._options = options

    def start(self, key: RankKey, listener: Listener) -> None:
        """Starts the listener's task; KeyError while `key` has one."""
        run = partial(run_listener, listener, self._context, self._ready, self._options)
        self._tasks.start(key, run)

    async def stop(self, key: RankKey) -> None:
        """Returns when the listener's task has ended; at once when there is none."""
        await self._tasks.stop(key)
