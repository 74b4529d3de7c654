"""Fetches the batches that a stream is missing from its engine's replay server.

Each request has a DEALER socket of its own, which ends with it, so that a late answer to an
earlier request cannot be taken for the answer to a later one. Whatever a server does, a replay
lasts `total_s` at most, and all that it brings goes through `CatchUp.take`.
"""

from __future__ import annotations

from collections import deque
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio
import zmq

from kvd.net.dialing import Unreachable
from kvd.net.link import LinkOptions, LinkResources
from kvd.net.zmq_link import asking_options
from kvd.net.zsocket import ZSocket
from kvd.wire.replay import ReplayEnd, read_answer, request

if TYPE_CHECKING:
    from kvd.net.turns import Turns
    from kvd.wire.event_stream import EventStream


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Limits of a replay."""

    idle_s: float = 2.0  # without a useful batch; vLLM's server answers within 0.1 s when idle
    total_s: float = 30.0  # with the wait for a free place; 10,000 batches take about 0.3 s
    spare_s: float = 10.0  # pause after a replay without a batch; else every gap waits for `idle_s`
    max_messages: int = 1_000_000  # of one answer; engines keep 10,000 batches by default
    max_bytes: int = 1 << 30  # of one answer: 10,000 batches of 100 KB each
    at_once: int = 64  # replays of all listeners; each takes three descriptors and a turn a pass


class Replayer:
    """Runs the replays of all listeners, a bounded number at a time."""

    def __init__(self, resources: LinkResources, link: LinkOptions, options: ReplayOptions) -> None:
        """An answer is read in pieces, each for as long as a round of the turns takes."""
        self._context = resources.context
        self._dialer = resources.dialer
        self._link = link
        self.options = options
        self._turns = resources.turns
        self._limiter = trio.CapacityLimiter(options.at_once)

    def set_options(self, options: ReplayOptions) -> None:
        """Applies other limits to replays that begin from now on."""
        self.options = options
        self._limiter.total_tokens = options.at_once

    async def fetch(self, listener: EventStream) -> ReplayEnd:
        """Feeds `listener` the batches that it wants replayed; returns why the replay ended."""
        end = ReplayEnd.LATE
        with trio.move_on_after(self.options.total_s) as patience:
            async with self._limiter:
                room = _Allowance(self.options)
                end = await self._ask(listener, room)
                while listener.catch_up.wants_more(end):
                    end = await self._ask(listener, room)
        return listener.catch_up.end(ReplayEnd.LATE if patience.cancelled_caught else end)

    async def _ask(self, listener: EventStream, room: _Allowance) -> ReplayEnd:
        try:
            endpoint = await self._dialer.endpoint(listener.replay_endpoint or "")
            options = asking_options(endpoint, self._link)
            options |= self._dialer.curve(listener.server_key)
            dealer = ZSocket(self._context, zmq.DEALER, options)
        except (Unreachable, zmq.ZMQError):
            return ReplayEnd.FAILED
        with closing(dealer):
            listener.catch_up.begin()
            try:
                dealer.socket.connect(endpoint)
                dealer.socket.send_multipart(request(listener.catch_up.wanted().start), zmq.NOBLOCK)
            except zmq.ZMQError:
                return ReplayEnd.FAILED
            return await _Answer(
                dealer, listener, self.options, self._link, room, self._turns
            ).read()


class _Allowance:
    """The messages and bytes that all answers of one replay may still bring."""

    def __init__(self, options: ReplayOptions) -> None:
        self._messages = options.max_messages
        self._bytes = options.max_bytes

    def take(self, frames: list[bytes]) -> None:
        self._messages -= 1
        self._bytes -= _size(frames)

    @property
    def is_used_up(self) -> bool:
        return self._messages <= 0 or self._bytes <= 0


class _Answer:
    """Reads the answer to one request.

    Messages are taken off the socket as they come, and wait here while earlier ones are applied:
    libzmq bounds their number alone, and a batch may have megabytes. As many bytes wait as a stream
    may queue; then the connection is closed, and the rest is requested again.
    """

    def __init__(
        self,
        dealer: ZSocket,
        listener: EventStream,
        options: ReplayOptions,
        link: LinkOptions,
        room: _Allowance,
        turns: Turns,
    ) -> None:
        self._dealer = dealer
        self._listener = listener
        self._idle_s = options.idle_s
        self._link = link
        self._room = room
        self._turns = turns
        self._waiting: deque[list[bytes]] = deque()
        self._waiting_bytes = 0
        self._cut: ReplayEnd | None = None  # why no more messages are taken off the socket

    async def read(self) -> ReplayEnd:
        while True:
            # The patience does not run here: a server is not silent while kvd applies its batch.
            while self._listener.unfinished is not None:
                await trio.lowlevel.checkpoint()
                self._receive()
                self._listener.batches.advance()
            replayed = self._listener.stats.replayed
            with trio.move_on_after(self._idle_s) as patience:
                while self._listener.stats.replayed == replayed:
                    end = await self._read_some()
                    if end is not None:
                        return end
            if patience.cancelled_caught and self._listener.stats.replayed == replayed:
                return ReplayEnd.SILENT

    async def _read_some(self) -> ReplayEnd | None:
        """Takes messages that have come, for one turn; waits for more when there are none left.

        Stops after a batch that is not wholly applied yet.
        """
        more = self._receive()
        until_ns = self._turns.clock_ns() + self._turns.round_ns
        while self._waiting:
            end = self._take(self._next())
            if end is not None:
                return end
            if self._listener.unfinished is not None:
                return None
            if self._turns.clock_ns() >= until_ns:
                more = True
                break
        if more:
            await trio.lowlevel.checkpoint()
        elif self._cut is not None:
            return self._cut
        else:
            await self._dealer.wait_readable()
        return None

    def _receive(self) -> bool:
        """Takes messages off the socket, for one turn; returns whether there may be more."""
        until_ns = self._turns.clock_ns() + self._turns.round_ns
        while self._cut is None and (frames := self._dealer.receive_nowait()) is not None:
            self._waiting.append(frames)
            self._waiting_bytes += _size(frames)
            self._room.take(frames)
            if self._room.is_used_up:
                self._cut = ReplayEnd.TOO_MUCH
            elif 0 < self._link.queue_bytes < self._waiting_bytes:
                self._cut = ReplayEnd.HOLE
            elif self._turns.clock_ns() >= until_ns:
                return True
        if self._cut is not None:
            self._dealer.close()
        return False

    def _next(self) -> list[bytes]:
        frames = self._waiting.popleft()
        self._waiting_bytes -= _size(frames)
        return frames

    def _take(self, frames: list[bytes]) -> ReplayEnd | None:
        answer = read_answer(frames)
        if answer is None:
            self._listener.stats.strays += 1
        elif answer.is_end:
            return ReplayEnd.MARKER
        else:
            return self._listener.catch_up.take(*answer)
        return None


def _size(frames: list[bytes]) -> int:
    return sum(map(len, frames))
