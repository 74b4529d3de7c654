"""Replay servers of engines on real ROUTER sockets, some of which misbehave."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import closing
from functools import partial

import trio
import zmq

from kvd.net.zsocket import ZSocket

END_SEQ = b"\xff" * 8
Frames = list[bytes]
Reply = Callable[[Frames], None]
Answer = Callable[["ReplayServer", int, Reply], Awaitable[None]]


class ReplayServer:
    """Calls `answer` for every request, with the first number that is asked for."""

    def __init__(self, context: zmq.Context, answer: Answer, buffer: range = range(0)) -> None:
        # Unbounded: by default a ROUTER drops messages beyond 1,000, if they are not read in time.
        self.router = ZSocket(context, zmq.ROUTER, {zmq.SNDHWM: 0})
        self.router.socket.bind("tcp://127.0.0.1:0")
        self.endpoint = self.router.socket.last_endpoint.decode()
        self.answer = answer
        self.buffer = {seq: b"%d" % seq for seq in buffer}
        self.requests: list[int] = []  # the first number of each
        self.askers: list[bytes] = []

    async def run(self) -> None:
        """Serves until cancelled."""
        with closing(self.router):
            while True:
                asker, empty, start = await self.router.receive()
                assert empty == b"" and len(start) == 8
                self.requests.append(int.from_bytes(start))
                self.askers.append(asker)
                await self.answer(self, self.requests[-1], partial(self.reply, asker))

    def reply(self, asker: bytes, frames: Frames) -> None:
        self.router.socket.send_multipart([asker, b"", *frames])

    def kept(self, start: int) -> list[tuple[int, bytes]]:
        return sorted((seq, batch) for seq, batch in self.buffer.items() if seq >= start)


def batch(seq: int) -> Frames:
    return [seq.to_bytes(8), b"%d" % seq]


def answering(*answer: Frames) -> Answer:
    """Returns an `Answer` that sends these messages to every request."""

    async def send(server: ReplayServer, start: int, reply: Reply) -> None:
        for frames in answer:
            reply(frames)

    return send


def with_numbers(*seqs: int) -> Answer:
    """Sends these batches whatever was asked for, and no end of the replay."""
    return answering(*map(batch, seqs))


async def three_frames(server: ReplayServer, start: int, reply: Reply) -> None:
    """The answer of vLLM until 0.25 and SGLang until 0.5.21."""
    for seq, payload in server.kept(start):
        reply([seq.to_bytes(8), payload])
    reply([END_SEQ, b""])


async def four_frames(server: ReplayServer, start: int, reply: Reply) -> None:
    """The answer of their later releases."""
    for seq, payload in server.kept(start):
        reply([b"kv-events", seq.to_bytes(8), payload])
    reply([b"", END_SEQ, b""])


async def without_end(server: ReplayServer, start: int, reply: Reply) -> None:
    for seq, payload in server.kept(start):
        reply([seq.to_bytes(8), payload])


async def slow(server: ReplayServer, start: int, reply: Reply) -> None:
    for seq, payload in server.kept(start):
        await trio.sleep(0.03)
        reply([seq.to_bytes(8), payload])


async def dripping(server: ReplayServer, start: int, reply: Reply) -> None:
    """Sends a batch again and again: is never silent for long, and never of use."""
    while True:
        reply(batch(0))
        await trio.sleep(0.02)


async def endless(server: ReplayServer, start: int, reply: Reply) -> None:
    while True:
        reply(batch(0))
        await trio.lowlevel.checkpoint()


async def silent(server: ReplayServer, start: int, reply: Reply) -> None:
    pass


async def one_and_silence(server: ReplayServer, start: int, reply: Reply) -> None:
    reply(batch(start))
