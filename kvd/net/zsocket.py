"""Lets a trio task wait for a pyzmq socket.

libzmq signals through a descriptor that is edge-triggered: it becomes readable once when messages
arrive, and any other call on the socket, a send above all, may consume that signal (20 of 20 waits
after a send hung when this was tried). Hence the rule: a task waits only right after a receive has
found nothing. One task owns a socket.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import trio
import zmq

if TYPE_CHECKING:
    Context = zmq.Context[zmq.Socket[bytes]]

# ZMQ sockets of the process: libzmq's maximum. Its default of 1,023 allows about 340 listeners.
MAX_SOCKETS = 65_535


def make_context() -> Context:
    """Returns the process's context; the caller ends it with `destroy(linger=0)`."""
    context = zmq.Context(io_threads=1)  # one thread served 64 workers at 0.5 M messages/s
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


class ZSocket:
    """A pyzmq socket to receive from; unsent messages never delay its close.

    libzmq 4.3.5 aborts the process when a connection whose receive queue was full ends for lack of
    heartbeats, or is made anew (its issues 3937 and 4767). So no socket has both a bounded receive
    queue and heartbeats.
    """

    __slots__ = ("_fd", "socket")

    def __init__(self, context: Context, kind: int, options: Mapping[int, int | bytes]) -> None:
        assert not (options.get(zmq.RCVHWM, 1000) and options.get(zmq.HEARTBEAT_IVL))
        self.socket = context.socket(kind)
        self._fd = self.socket.FD
        self.socket.linger = 0
        for option, value in options.items():
            self.socket.set(option, value)

    def close(self) -> None:
        """Closes the socket, once; a task that waits for it gets ClosedResourceError."""
        if self.socket.closed:
            return
        trio.lowlevel.notify_closing(self._fd)
        self.socket.close(linger=0)

    def receive_nowait(self) -> list[bytes] | None:
        """Returns the frames of the next message, None when there is none."""
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    async def receive(self) -> list[bytes]:
        """Waits for the next message and returns its frames."""
        await trio.lowlevel.checkpoint()
        while (frames := self.receive_nowait()) is None:
            await self.wait_readable()
        return frames

    async def wait_readable(self) -> None:
        """Waits for messages; call it only after a receive that has found none."""
        await trio.lowlevel.wait_readable(self._fd)
