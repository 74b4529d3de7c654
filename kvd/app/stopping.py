"""The stop of the daemon: the first signal drains, the second ends the process at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from kvd.platform import sdnotify
from kvd.platform.signals import Signals
from kvd.telemetry.logs import get_logger

EXIT_SECOND_SIGNAL = 130

log = get_logger(__name__)


class Stop:
    """The end of the process, from the moment that a signal asks for it."""

    def __init__(self) -> None:
        self._requested = trio.Event()
        self._interruptible = trio.CancelScope()

    @property
    def is_requested(self) -> bool:
        return self._requested.is_set()

    async def wait(self) -> None:
        """Returns after the first signal."""
        await self._requested.wait()

    async def watch(self, ends: Signals) -> None:
        """Begins to stop at the first signal, and does not return."""
        number = await ends.wait()
        log.info("stopping", signal=number.name)
        sdnotify.notify(sdnotify.STOPPING)
        self._requested.set()
        self._interruptible.cancel()
        await ends.wait()
        os._exit(EXIT_SECOND_SIGNAL)  # an operator who asks twice does not want to wait

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Cancels the block, a part of the start, at the first signal."""
        with trio.CancelScope() as self._interruptible:
            if self.is_requested:
                self._interruptible.cancel()
            yield
