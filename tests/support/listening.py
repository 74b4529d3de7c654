"""A listener under test."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import trio
import zmq

from kvd.net.link import LinkOptions, LinkResources
from kvd.net.listener import run_listener
from kvd.net.replay import Replayer, ReplayOptions
from kvd.wire.event_stream import EventStream
from tests.support.batch_sinks import NoStream
from tests.support.zmtp_fakes import NOT_MY_FAULT_S

# Short enough for tests; but heartbeats must outlast the pauses of a process on a busy machine.
HASTY = LinkOptions(
    heartbeat_s=0.2,
    heartbeat_timeout_s=2.0,
    handshake_timeout_s=2.0,
    reconnect_s=0.01,
    reconnect_max_s=0.05,
    give_up_s=0.3,
    max_message_bytes=1024 * 1024,
)

# For a server that is not silent, as a busy machine may be for a while.
PATIENT_REPLAYS = ReplayOptions(idle_s=NOT_MY_FAULT_S, total_s=NOT_MY_FAULT_S, spare_s=0.0)
# For one that is silent in the end.
HASTY_REPLAYS = dataclasses.replace(PATIENT_REPLAYS, idle_s=0.25)


class Applied(NoStream):
    """A stream that keeps its batches, and None where it was cleared."""

    def __init__(self) -> None:
        self.batches: list[bytes | None] = []
        self.on_batch: Callable[[bytes], object] = self.batches.append

    def apply(self, payload: bytes) -> int:
        self.on_batch(payload)
        return 0

    def clear(self) -> None:
        self.batches.append(None)


class Listening:
    """A listener, what it applied, its gate and its task."""

    def __init__(self, endpoint: str, replay_endpoint: str | None = None) -> None:
        self.stream = Applied()
        self.applied = self.stream.batches
        self.listener = EventStream("1:0", endpoint, self.stream, replay_endpoint)
        self.ready = trio.Event()
        self.scope = trio.CancelScope()
        self.ended = trio.Event()

    def is_(self, status: str) -> Callable[[], bool]:
        return lambda: self.listener.status == status

    async def run(
        self, context: zmq.Context, options: LinkOptions, replayer: Replayer | None = None
    ) -> None:
        resources = LinkResources(context)
        replayer = replayer or Replayer(resources, options, PATIENT_REPLAYS)
        with self.scope:
            await run_listener(self.listener, resources, self.ready, options, replayer)
        self.ended.set()

    async def stop(self) -> None:
        self.scope.cancel()
        with trio.fail_after(NOT_MY_FAULT_S):
            await self.ended.wait()
