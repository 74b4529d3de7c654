"""The gateway's relay, connected to an engine that sends exactly the bytes that a test wants."""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio

from kvd.gateway.exchanges import Exchanges, RelayLimits

SO_ATTACH_FILTER = 26  # of Linux; the socket module lacks it
RETURN = 0x06  # an instruction of a packet filter: keeps so many bytes of each

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


def cut_off(stream: trio.SocketStream) -> None:
    """Drops all that comes for a stream, so that it is silent as if its host had lost its power."""
    drop = ctypes.create_string_buffer(struct.pack("HBBI", RETURN, 0, 0, 0))
    program = struct.pack("HP", 1, ctypes.addressof(drop))
    stream.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


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
