"""A proxy on loopback that loses or holds back answers, between a client and a daemon."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from tests.support.ports import find_free_port

RECEIVE_BYTES = 65_536


class Dropping:
    """Passes bytes on, but may drop or hold the answers to requests that begin with `marked`."""

    def __init__(self, port: int, upstream: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.marked = b""
        self.to_drop = 0  # answers to marked requests that are still to be lost
        self.dropped = 0
        self.holds = False
        self.held = trio.Event()  # set once an answer is held back, for ever
        self._upstream = upstream
        self._scope = trio.CancelScope()

    def drop(self, marked: bytes, answers: int) -> None:
        self.marked, self.to_drop = marked, answers

    def hold(self, marked: bytes) -> None:
        self.marked, self.holds = marked, True

    def die(self) -> None:
        """Closes every connection and accepts no more."""
        self._scope.cancel()

    async def serve(self, port: int, task_status: trio.TaskStatus[None]) -> None:
        with self._scope:
            await trio.serve_tcp(self._pass_on, port, host="127.0.0.1", task_status=task_status)

    async def _pass_on(self, client: trio.SocketStream) -> None:
        async with client, await trio.open_tcp_stream("127.0.0.1", self._upstream) as daemon:
            asked = bytearray()

            async def send() -> None:
                async for piece in client:
                    asked.extend(piece)
                    await daemon.send_all(piece)
                nursery.cancel_scope.cancel()

            async def receive() -> None:
                async for piece in daemon:
                    is_marked = bool(self.marked) and asked.startswith(self.marked)
                    if is_marked and self.holds:
                        self.held.set()
                        await trio.sleep_forever()
                    if is_marked and self.to_drop:
                        self.to_drop -= 1
                        self.dropped += 1
                        break
                    asked.clear()
                    await client.send_all(piece)
                nursery.cancel_scope.cancel()

            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(send)
                    nursery.start_soon(receive)
            except* (trio.BrokenResourceError, trio.ClosedResourceError):
                pass  # either side has gone


@asynccontextmanager
async def dropping(upstream: int) -> AsyncIterator[Dropping]:
    """Runs a proxy in front of a daemon's port."""
    port = find_free_port()
    proxy = Dropping(port, upstream)
    async with trio.open_nursery() as nursery:
        await nursery.start(proxy.serve, port)
        yield proxy
        proxy.die()
