"""A listener under test."""

from __future__ import annotations

from collections.abc import Callable

import trio
import zmq

from kvd.net.listener import LinkOptions, run_listener
from kvd.wire.listener import Listener

# Short enough for tests; a heartbeat must still outlast what a busy machine does to a process.
HASTY = LinkOptions(
    heartbeat_s=0.1,
    heartbeat_timeout_s=0.5,
    handshake_timeout_s=0.5,
    reconnect_s=0.01,
    reconnect_max_s=0.05,
    give_up_s=0.3,
    max_message_bytes=1024 * 1024,
)


class Listening:
    """A listener, what it applied, its gate and its task."""

    def __init__(self, endpoint: str) -> None:
        self.applied: list[bytes] = []
        self.apply: Callable[[bytes], None] = self.applied.append
        self.listener = Listener("1:0", endpoint, lambda payload: self.apply(payload))
        self.ready = trio.Event()
        self.scope = trio.CancelScope()
        self.ended = trio.Event()

    def is_(self, status: str) -> Callable[[], bool]:
        return lambda: self.listener.status == status

    async def run(self, context: zmq.Context, options: LinkOptions) -> None:
        with self.scope:
            await run_listener(self.listener, context, self.ready, options)
        self.ended.set()

    async def stop(self) -> None:
        self.scope.cancel()
        with trio.fail_after(1):
            await self.ended.wait()
