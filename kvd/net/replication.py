"""Sends lifecycle events of requests to other replicas, and receives theirs.

    publish ──> Publisher, one PUB socket ──> every replica that subscribes
    Replica, each a task: link ──> decode ──> apply

Messages that come faster than they can be applied wait in a bounded inbox; beyond its bounds they
are dropped.

There is no history and no acknowledgement: a replica that joins late, or was cut off, has missed
the events sent meanwhile. Such errors end with their requests: where the booking was missed, its
end has no effect; where the end was missed, the booking expires. Nor are two replicas ordered
against each other: an end that is read before its booking is noted until the booking comes
(`kvd.wire.early_ends`).

The publisher cannot bound the frames of an incomplete message from a subscriber: libzmq keeps them
all. So replicas are processes that an operator names, on a network of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import TYPE_CHECKING

import trio

from kvd.net.link import LinkOptions
from kvd.net.sessions import LinkSessions
from kvd.net.streamlog import StreamLog
from kvd.net.supervisor import Supervisor
from kvd.net.turns import MAX_TAKEN_IN, MAX_TURN_MESSAGES
from kvd.telemetry.logs import get_logger
from kvd.wire import affinity
from kvd.wire.affinity import Bound
from kvd.wire.fields import Refused
from kvd.wire.lifecycle import BOUNDS, TOPIC, Lifecycle, Outcome, decode, encode
from kvd.wire.replica import Replica, ReplicaStats
from kvd_core.zmq.drain import Inbox

if TYPE_CHECKING:
    from kvd.net.link import Link, LinkResources
    from kvd.net.publisher import PubSocket
    from kvd.net.turns import Turns

# Most frames of a replica's message. A message with more may have millions, so it is not read on;
# its link is replaced.
MAX_FRAMES = 64

REPLICA_LINK = LinkOptions(queue_messages=100_000, max_message_bytes=BOUNDS.payload_bytes)

ABSENT_EVERY_S = 30.0  # pause between two log lines about a replica that is not connected

log = get_logger(__name__)

Apply = Callable[[Lifecycle], Outcome]
Bind = Callable[[Bound], Outcome]


class Replication:
    """The replica plane of one process: its publisher, and a task per replica it listens to.

    `apply` is called with every event of another replica, and `bind` with every session binding.
    They must not publish these again. An exception from them is a bug, which costs the event and
    the connection. Without `bind` there is no subscription to sessions.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        resources: LinkResources,
        publisher: PubSocket,
        apply: Apply,
        stats: ReplicaStats,
        router_id: int,
        options: LinkOptions = REPLICA_LINK,
        absent_every_s: float = ABSENT_EVERY_S,
        bind: Bind | None = None,
    ) -> None:
        self.router_id = router_id
        self.stats = stats
        self._resources = resources
        self._publisher = publisher
        self._apply = apply
        self._bind = bind
        self._options = options
        self._tasks: Supervisor[Replica] = Supervisor(nursery)
        nursery.start_soon(publisher.run)
        nursery.start_soon(self._log_absent, absent_every_s)

    def publish(self, event: Lifecycle) -> None:
        """Sends to all replicas; never waits."""
        self._send(TOPIC, encode(event, self.router_id))

    def publish_binding(self, bound: Bound) -> None:
        """Sends a session's binding to all replicas; never waits."""
        self._send(affinity.TOPIC, affinity.encode(bound))

    def _send(self, topic: bytes, payload: bytes) -> None:
        stats = self.stats
        if len(payload) > BOUNDS.payload_bytes:
            stats.oversized += 1
            return
        stats.published += 1
        if not self._publisher.send([topic, payload]):
            stats.overflows += 1

    def start(self, replica: Replica) -> None:
        """Starts to listen to a replica, reachable or not; KeyError if that was started before."""
        lines = StreamLog(log, "replica", replica.endpoint)
        shared = self._resources
        inbox = Inbox(shared.space, self._options.queue_messages, self._options.queue_bytes)
        reader = _Reader(self, replica, inbox, self._apply, self._bind, shared.turns, lines)
        topics = (TOPIC,) if self._bind is None else (TOPIC, affinity.TOPIC)
        sessions = LinkSessions(replica, reader, shared, self._options, lines, topics)
        self._tasks.start(replica, sessions.run)

    async def stop(self, replica: Replica) -> None:
        """Stops listening to a replica; returns when its task has ended."""
        await self._tasks.stop(replica)

    async def _log_absent(self, every_s: float) -> None:
        """Logs replicas that are not connected; nothing else reports one that never was."""
        replicas = self._tasks.keys()
        while True:
            await trio.sleep(every_s)
            for replica in replicas:
                if not replica.connected:
                    error = replica.last_error or "no connection yet"
                    log.warning("replica_unreachable", replica=replica.endpoint, error=error)


class _Reader:
    """Takes the events of one replica."""

    __slots__ = (
        "_apply",
        "_bind",
        "_inbox",
        "_log",
        "_replica",
        "_router_id",
        "_stats",
        "_turns",
    )

    def __init__(
        self,
        plane: Replication,
        replica: Replica,
        inbox: Inbox,
        apply: Apply,
        bind: Bind | None,
        turns: Turns,
        log: StreamLog,
    ) -> None:
        self._inbox = inbox
        self._router_id = plane.router_id
        self._stats = plane.stats
        self._replica = replica
        self._apply = apply
        self._bind = bind
        self._turns = turns
        self._log = log

    async def receive(self, link: Link) -> str:
        """Takes messages until one has more than MAX_FRAMES frames."""
        while not self._inbox.cut:
            if await self._drain(link):
                await trio.lowlevel.checkpoint()
            elif not self._inbox.cut:
                await link.wait()
        return f"a message has more than {MAX_FRAMES} frames: {self._replica.endpoint}"

    async def receive_rest(self, link: Link) -> None:
        while await self._drain(link):
            await trio.lowlevel.checkpoint()
        self._inbox.cut = False

    async def _drain(self, link: Link) -> bool:
        """Takes waiting messages for one turn; returns whether there may be more."""
        budget_ns = await self._turns.begin()
        deadline_ns = perf_counter_ns() + budget_ns
        coming = self._take_in(link, budget_ns // 2)
        waiting = self._take_some(deadline_ns)
        self._turns.end()
        return coming or waiting

    def _take_in(self, link: Link, budget_ns: int) -> bool:
        """Moves messages from the link to the inbox, for about `budget_ns`.

        Returns whether there may be more.
        """
        inbox, dropped = self._inbox, self._inbox.dropped
        more = link.fill_frames(inbox, MAX_FRAMES, MAX_TAKEN_IN, budget_ns)
        link.hear()
        self._stats.missed += inbox.dropped - dropped
        return more

    def _take_some(self, deadline_ns: int) -> bool:
        for _ in range(MAX_TURN_MESSAGES):
            frames = self._inbox.take_frames()
            if frames is None:
                return False
            self._take(frames)
            if perf_counter_ns() > deadline_ns:
                break
        return True

    def _take(self, frames: list[bytes]) -> None:
        stats = self._stats
        stats.received += 1
        self._replica.received += 1
        if self._bind is not None and frames[0] == affinity.TOPIC:
            self._take_binding(frames, self._bind)
            return
        decoded = decode(frames)
        if isinstance(decoded, Refused):
            self._refuse(decoded)
            return
        if decoded.router_id == self._router_id:
            stats.own += 1
        else:
            stats.count(self._apply(decoded))

    def _take_binding(self, frames: list[bytes], bind: Bind) -> None:
        bound = affinity.decode(frames)
        if isinstance(bound, Refused):
            self._refuse(bound)
        elif bound.version.writer_id == self._router_id:
            self._stats.own += 1
        else:
            self._stats.count(bind(bound))

    def _refuse(self, reason: Refused) -> None:
        self._stats.refused[reason] += 1
        self._log.warning("replica_message_refused", reason=reason)
