"""Keeps one subscription alive for ever, over one link after another.

Two nested loops run in the task that calls `LinkSessions.run`:

    run            the subscription: one link after another, with a growing pause between two
      _session     one link, until the publisher breaks the protocol or the reader gives up; the
                   messages that had arrived by then are still read
        receive    its messages, taken by the reader
        Runs       what the link has to await, as to connect again whenever it is disconnected
        moved      the lookup of its host name, if any, repeated while the connection stays lost
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NoReturn, Protocol

import trio
import zmq

from kvd.net.dialing import Unreachable, is_named
from kvd.net.link import Runs
from kvd.net.streams import has_streams
from kvd.net.zmq_link import ZmqLink
from kvd.net.zmtp_link import ZmtpLink

if TYPE_CHECKING:
    from kvd.net.link import Link, Linked, LinkOptions, LinkResources
    from kvd.net.streamlog import StreamLog


class LinkReader(Protocol):
    """Takes the messages of a link."""

    async def receive(self, link: Link) -> str:
        """Takes messages for ever, or until the link can no longer be used; returns why not."""

    async def receive_rest(self, link: Link) -> None:
        """Takes what had arrived before the link became useless."""


class LinkSessions:
    """Makes the links of one subscription, one at a time."""

    __slots__ = (
        "_attempts",
        "_context",
        "_dialer",
        "_linked",
        "_log",
        "_options",
        "_reader",
        "_topics",
    )

    def __init__(
        self,
        linked: Linked,
        reader: LinkReader,
        resources: LinkResources,
        options: LinkOptions,
        log: StreamLog,
        topics: tuple[bytes, ...] = (b"",),
    ) -> None:
        self._attempts = 0
        self._context = resources.context
        self._dialer = resources.dialer
        self._linked = linked
        self._reader = reader
        self._options = options
        self._log = log
        self._topics = topics

    async def run(self) -> NoReturn:
        """Keeps the publisher connected and its messages read, until cancelled."""
        shortest, longest = self._options.reconnect_s, self._options.reconnect_max_s
        pause_s = shortest
        while True:
            started, why = trio.current_time(), "internal error"
            try:
                why = await self._session()
            except* Exception:  # a bug costs the message that it hit, and the link
                self._linked.crashed()
                self._log.exception("stream_crashed")
            now = trio.current_time()
            self._linked.failed(why, now)
            if now - started > 2 * longest:
                pause_s = shortest  # the link has lasted: this is no series of failures
            self._log.warning("stream_failed", error=why, retry_s=pause_s)
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest)

    async def _session(self) -> str:
        """Reads over one link while it can be used; returns why it no longer can."""
        linked = self._linked
        try:
            address = await self._dialer.endpoint(linked.endpoint, self._attempts)
            self._attempts += 1
            link = await self._link(address)
        except Unreachable as error:
            return f"failed to connect ZMQ SUB socket to {linked.endpoint}: {error}"
        except (OSError, zmq.ZMQError) as error:
            why = zmq.strerror(error.errno or 0)
            return f"failed to connect ZMQ SUB socket to {linked.endpoint}: {why}"
        self._dialer.watch(link, address)
        try:
            linked.connecting()
            async with trio.open_nursery() as nursery:
                runs = Runs(nursery)
                try:
                    link.start(runs)
                    if is_named(linked.endpoint):
                        runs.start(partial(self._moved, address))
                    runs.end(await self._reader.receive(link))
                finally:
                    runs.close()
            await self._reader.receive_rest(link)
            return runs.why
        finally:
            self._dialer.leave(link)
            await link.aclose()

    async def _link(self, address: str) -> Link:
        linked, options, topics = self._linked, self._options, self._topics
        curve = self._dialer.curve(linked.server_key)
        if curve or not has_streams(address):
            link = ZmqLink(linked, self._log, options)
            await link.open(self._context, address, topics, curve)
            return link
        return ZmtpLink(linked, address, self._log, options, topics)

    async def _moved(self, address: str) -> str:
        linked = self._linked
        return await self._dialer.moved(linked.endpoint, address, lambda: linked.connected)
