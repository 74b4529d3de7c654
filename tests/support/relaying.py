"""The gateway's relay, connected to an engine that sends exactly the bytes that a test wants."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio

from kvd.gateway.exchanges import Exchanges, RelayLimits

Script = Callable[[trio.SocketStream], Awaitable[None]]


class ScriptedEngine:
    """Serves each connection by the next of its scripts, and counts connections."""

    def __init__(self, scripts: list[Script]) -> None:
        self.scripts = scripts
        self.connections = 0

    async def serve(self, stream: trio.SocketStream) -> None:
        script = self.scripts[self.connections]
        self.connections += 1
        async with stream:
            await script(stream)


@asynccontextmanager
async def relaying(
    *scripts: Script, limits: RelayLimits | None = None
) -> AsyncIterator[tuple[Exchanges, int, ScriptedEngine]]:
    """Yields exchanges, the number of an engine that plays the scripts, and that engine."""
    engine = ScriptedEngine(list(scripts))
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, engine.serve, listeners)
        exchanges = Exchanges(limits or RelayLimits())
        nursery.start_soon(exchanges.run)
        port = listeners[0].socket.getsockname()[1]
        yield exchanges, exchanges.relay.add_engine("127.0.0.1", port), engine
        nursery.cancel_scope.cancel()
