"""Listeners for a registry whose ranks send nothing."""

from __future__ import annotations

from collections.abc import Hashable

import trio

from kvd.wire.event_stream import EventStream


class IdleListeners:
    """Notes started listeners and reads nothing; as with sockets, `stop` takes a checkpoint."""

    def __init__(self) -> None:
        self.running: dict[Hashable, EventStream] = {}
        self.starts = 0

    def start(self, key: Hashable, listener: EventStream) -> None:
        if key in self.running:
            raise KeyError(key)
        self.running[key] = listener
        self.starts += 1

    async def stop(self, key: Hashable) -> bool:
        await trio.lowlevel.checkpoint()
        return self.running.pop(key, None) is not None
