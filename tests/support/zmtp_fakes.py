"""Publishers to listen to: real ones, one in another process, and raw TCP that misbehaves."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import trio
import zmq

NOT_MY_FAULT_S = 60  # a condition that takes longer, even on a busy machine, never comes true


async def until(condition: Callable[[], object]) -> None:
    """Waits for a condition that other tasks, threads or processes make true."""
    with trio.fail_after(NOT_MY_FAULT_S):
        while not condition():  # noqa: ASYNC110 - nothing here could set an event
            await trio.sleep(0.005)


@contextlib.contextmanager
def reserved_endpoint() -> Iterator[str]:
    """Yields an address where nobody listens, and which a publisher may bind in the block."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{holder.getsockname()[1]}"


class Publisher:
    """An engine's side: numbered batches on an XPUB socket, which receives subscriptions."""

    def __init__(
        self, context: zmq.Context, endpoint: str = "tcp://127.0.0.1:0", send_queue: int = 0
    ) -> None:
        self.socket = context.socket(zmq.XPUB)
        self.socket.linger = 0
        self.socket.sndhwm = send_queue
        self.socket.xpub_verboser = True  # reports every subscriber, not only the first
        self.socket.ipv6 = "[" in endpoint
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError:
            self.socket.close()
            raise
        self.endpoint = self.socket.last_endpoint.decode()
        self.seq = 0

    async def subscribed(self) -> None:
        await self.subscribed_to(b"")

    async def subscribed_to(self, topic: bytes) -> None:
        """Waits for the next subscription to a topic, and skips the ends of others."""
        await until(lambda: self.socket.poll(0) and self.socket.recv() == b"\1" + topic)

    def send(self, *payloads: bytes) -> None:
        for payload in payloads:
            self.send_frames(b"kv-events", self.seq.to_bytes(8), payload)
            self.seq += 1

    def send_frames(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def close(self) -> None:
        self.socket.close(linger=0)


CHILD = """
import sys, zmq
socket = zmq.Context().socket(zmq.XPUB)
socket.bind("tcp://127.0.0.1:0")
print(socket.last_endpoint.decode(), flush=True)
while True:
    socket.recv()
"""


class ChildPublisher:
    """A publisher in another process, which can be frozen."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.endpoint = self.process.stdout.readline().decode().strip()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\3\0" + b"NULL".ljust(20, b"\0") + bytes(32)


def ready(socket_type: bytes = b"PUB") -> bytes:
    body = b"\5READY\x0bSocket-Type" + struct.pack(">I", len(socket_type)) + socket_type
    return b"\4" + bytes([len(body)]) + body


def message(*frames: bytes) -> bytes:
    *others, last = frames
    return b"".join(b"\3" + struct.pack(">Q", len(frame)) + frame for frame in others) + (
        large_frame(len(last)) + last
    )


def large_frame(size: int) -> bytes:
    return b"\2" + struct.pack(">Q", size)


async def read_exactly(stream: trio.SocketStream, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = await stream.receive_some(size - len(data))
        if not part:
            raise trio.BrokenResourceError
        data += part
    return data


async def shake_hands(
    stream: trio.SocketStream, socket_type: bytes = b"PUB", version: bytes = b"\3\0"
) -> None:
    """Does the handshake of ZMTP 3.0 and waits for the other end's part of it."""
    await stream.send_all(GREETING.replace(b"\3\0", version) + ready(socket_type))
    await read_exactly(stream, len(GREETING))
    _, size = await read_exactly(stream, 2)
    await read_exactly(stream, size)


@dataclass
class Fake:
    endpoint: str
    connections: int = 0


async def serve_fake(
    talk: Callable[[trio.SocketStream], Awaitable[None]],
    *,
    task_status: trio.TaskStatus[Fake],
) -> None:
    """Calls `talk` for every connection and counts them; the other end may leave at any time."""

    async def handle(stream: trio.SocketStream) -> None:
        fake.connections += 1
        with stream.socket, contextlib.suppress(trio.BrokenResourceError):
            await talk(stream)

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    fake = Fake(f"tcp://127.0.0.1:{port}")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, handle, listeners)
        task_status.started(fake)
