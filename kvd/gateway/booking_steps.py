"""Sends a kvd the further steps of bookings: many requests in a row over one connection.

    put ──> waiting ──> a row of requests, sent at once ──> as many answers, counted but not read
                 ^                  │ no answer in time, or the connection broke
                 └─── in front ─────┘

No task waits for a step, and each client's request has two or three: an exchange for each would
cost more than the choice. After a fault all that was not answered is sent again: ending a booking
twice does no harm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from itertools import islice

import httptools
import trio

from kvd.net.dialing import reason_of

# Steps that wait for a kvd, about 200 bytes each; those beyond are dropped.
MAX_STEPS = 65_536
# Steps sent before their answers are awaited: both fit into the sockets' buffers.
MAX_ROW = 64
RECEIVE_BYTES = 64 * 1024  # bytes of answers that are received at once

Connect = Callable[[], Awaitable[trio.SocketStream]]


class StepsFailed(Exception):
    """A kvd has not answered a row of steps."""


class BookingSteps:
    """The steps for one kvd, in order."""

    def __init__(self, connect: Connect, deadline_s: float) -> None:
        """`connect` raises OSError. A row fails if it is not answered within `deadline_s`."""
        self.dropped = 0
        self._connect = connect
        self._deadline_s = deadline_s
        self._waiting: deque[bytes] = deque()
        self._some = trio.Event()
        self._stream: trio.SocketStream | None = None
        self._is_outdated = False  # the stream leads to a former address

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, request: bytes) -> None:
        """Queues a request, head and body; drops it if MAX_STEPS wait already."""
        if len(self._waiting) >= MAX_STEPS:
            self.dropped += 1
            return
        self._waiting.append(request)
        self._some.set()

    async def send(self) -> None:
        """Waits for a step, and sends steps until none waits.

        Raises StepsFailed; steps that have not been answered stay queued.
        """
        if not self._waiting:
            self._some = trio.Event()
            await self._some.wait()
        while self._waiting:
            is_new, first = self._stream is None, self._waiting[0]
            try:
                with trio.fail_after(self._deadline_s):
                    await self._send_row()
            except (OSError, trio.BrokenResourceError, httptools.HttpParserError) as error:
                self.close()
                if is_new and self._waiting and self._waiting[0] is first:
                    raise StepsFailed(f"the connection failed: {reason_of(error)}") from None
            except trio.TooSlowError:
                self.close()
                raise StepsFailed("the kvd did not answer in time") from None

    async def _send_row(self) -> None:
        if self._is_outdated:
            self.close()
        if self._stream is None:
            self._stream = await self._connect()
        row = list(islice(self._waiting, MAX_ROW))
        await self._stream.send_all(b"".join(row))
        answers = _Answers()
        try:
            while answers.complete < len(row):
                data = await self._stream.receive_some(RECEIVE_BYTES)
                if not data:
                    raise OSError("the connection was closed")
                answers.parser.feed_data(data)
        finally:
            for _ in row[: answers.complete]:
                self._waiting.popleft()
        if not answers.persist:
            self.close()

    def reconnect(self) -> None:
        """Has the next row open another connection, as the kvd has another address now."""
        self._is_outdated = True

    def close(self) -> None:
        """Closes the connection; the next row opens another one."""
        stream, self._stream, self._is_outdated = self._stream, None, False
        if stream is not None:
            stream.socket.close()


class _Answers:
    """Counts answers. The `on_` methods are called by httptools."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.complete = 0
        self.persist = True

    def on_message_complete(self) -> None:
        self.complete += 1
        self.persist = self.parser.should_keep_alive()
