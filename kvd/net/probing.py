"""Finds out why an engine cannot be reached: links retry without reporting why they failed.

not connected for AFTER_S ──> one plain connection to the same address, closed at once
                                └─ errno, or no answer in time ──> EventStream.not_reached
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import trio

from kvd.net.dialing import Unreachable
from kvd.net.streams import has_streams, stream_socket
from kvd.wire.stream_link import ListenerStatus

if TYPE_CHECKING:
    from kvd.net.dialing import Dialer
    from kvd.wire.event_stream import EventStream

# Time without a connection before an engine is probed; a restarted engine is back sooner.
AFTER_S = 1.0
AGAIN_S = 10.0  # pause between two probes of one engine
# Probes under way at once; a host that does not answer keeps its probe until the timeout.
PROBES_AT_ONCE = 64
PROBES_A_PASS = 4  # probes that begin in one pass of the loop: some 0.2 ms each


class Prober:
    """Probes engines that are not connected, each in its turn."""

    def __init__(self, nursery: trio.Nursery, dialer: Dialer, timeout_s: float) -> None:
        """A connection that is not made within `timeout_s` counts as timed out."""
        self._nursery = nursery
        self._dialer = dialer
        self._timeout_s = timeout_s
        self._due: dict[EventStream, float] = {}  # when to probe each engine, monotonic seconds
        self._under_way = 0

    def note_state(self, listener: EventStream, now: float) -> None:
        """Notes a listener's present state: whether it has to be probed."""
        # A failed listener has its reason already: its name or address is unusable.
        if listener.connected or listener.status is ListenerStatus.FAILED:
            self.forget(listener)
        else:
            self._due.setdefault(listener, now + AFTER_S)

    def forget(self, listener: EventStream) -> None:
        self._due.pop(listener, None)

    async def start(self, now: float) -> None:
        """Starts the probes that are due, a few per pass; engines just probed come last."""
        due = [listener for listener, moment in self._due.items() if moment <= now]
        for number, listener in enumerate(due[: PROBES_AT_ONCE - self._under_way]):
            if number and number % PROBES_A_PASS == 0:
                await trio.lowlevel.checkpoint()
            if listener not in self._due:  # it has connected meanwhile, or was deregistered
                continue
            del self._due[listener]
            self._due[listener] = now + AGAIN_S
            self._under_way += 1
            self._nursery.start_soon(self._probe, listener)

    async def _probe(self, listener: EventStream) -> None:
        try:
            why = await self._met(listener.endpoint)
        finally:
            self._under_way -= 1
        if why and listener in self._due:
            listener.not_reached(f"cannot connect: {why}: {listener.endpoint}")

    async def _met(self, endpoint: str) -> str:
        """Returns why an attempt to connect fails, "" if it succeeds."""
        try:
            address = await self._dialer.endpoint(endpoint)
        except Unreachable as error:
            return str(error)
        with trio.move_on_after(self._timeout_s):
            try:
                await _connect(address)
            except OSError as error:
                return os.strerror(error.errno or errno.EIO)
            return ""
        return f"timed out after {self._timeout_s:g} s"


async def _connect(endpoint: str) -> None:
    if has_streams(endpoint):
        sock, address = stream_socket(endpoint)
        with sock:
            await sock.connect(address)
