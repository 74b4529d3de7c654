"""Received messages of one engine that are not applied yet, and connection changes among them.

    Link.fill ── take_in ──> Inbox (kvd_core.zmq.drain)  ── hand_over ──> EventStream.take
    Link.hear ─────────────> positions among its messages ──────────> EventStream.pass_over

An engine drops, without any report, what it publishes while kvd does not read. So the link is
emptied in every turn, even while nothing can be applied, into an inbox. That is bounded for each
stream and for all streams together. Beyond these bounds messages are dropped, but for the newest,
and show as a gap.

Batches that come over a new connection may be another engine's, while batches received before the
change still wait here. So each connection change has a position among the messages, and the stream
is notified when that position is reached (`EventStream.subscribe`). A link reports a connection
before it hands over that connection's first message. So messages taken before the report belong to
an earlier connection; those taken by the very `fill` before the report may belong to either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.net.turns import MAX_TAKEN_IN, MAX_TURN_MESSAGES
from kvd.wire.event_stream import Change
from kvd_core.zmq.drain import Inbox

if TYPE_CHECKING:
    from kvd.net.link import Link, LinkOptions
    from kvd.wire.event_stream import EventStream
    from kvd_core.zmq.drain import InboxSpace

# Messages that may wait in all streams together, unless a setting says otherwise: it takes half a
# minute to apply them.
MAX_QUEUED_MESSAGES = 10_000_000
# Bytes that may wait in all streams together, unless a setting says otherwise.
MAX_QUEUED_BYTES = 1024 * 1024 * 1024


class Backlog:
    """The waiting messages of one listener, and the connection changes among them."""

    __slots__ = ("_changes", "_inbox", "_listener", "_lost", "_taking_in", "idle")

    def __init__(self, listener: EventStream, space: InboxSpace, options: LinkOptions) -> None:
        self._listener = listener
        self._inbox = Inbox(space, options.queue_messages, options.queue_bytes)
        # Each comes before the message of its number. They are few; a deque would take 0.7 KB.
        self._changes: list[tuple[int, Change]] = []
        self._taking_in = False
        self._lost = False  # a connection was lost, and libzmq may still hold messages of it
        self.idle = False  # the listener waits for nothing but messages
        listener.subscribe(self._queue_change)

    def take_in(self, link: Link, budget_ns: int) -> bool:
        """Moves messages from the link to the inbox, for about `budget_ns`.

        Returns whether there may be more.
        """
        inbox, listener = self._inbox, self._listener
        was_lost = self._lost
        self._taking_in = True
        inbox.begin()
        dropped = inbox.dropped
        more = link.fill(inbox, listener.refuse, MAX_TAKEN_IN, budget_ns)
        link.hear()
        self._taking_in = False
        listener.stats.dropped += inbox.dropped - dropped
        if inbox.has_hole:
            self._put(inbox.pushed, Change.MISSED)
        if was_lost and self._lost and not more:
            self._lost = False
            self._put(inbox.pushed, Change.LOST)
        return more

    def hand_over(self, budget_ns: int) -> bool:
        """Passes messages and changes to the listener, for one turn; returns whether more wait."""
        inbox, changes = self._inbox, self._changes
        most = MAX_TURN_MESSAGES
        if changes:
            self._pass_changes()
            if changes:
                most = min(most, changes[0][0] - inbox.popped)
        listener = self._listener
        more = inbox.drain(listener.take, most, budget_ns, listener.identity.speaker, listener.meet)
        return more or bool(changes)

    @property
    def has_loss(self) -> bool:
        """Returns whether messages of a connection that is known to be lost may still wait."""
        return self._lost or any(Change.LOST in change for _, change in self._changes)

    def end(self) -> None:
        """Drops the waiting messages; they show as missing when the listener goes on."""
        missed = Change.MISSED if self._inbox.messages else Change(0)
        self._inbox.clear()
        for _, change in self._changes:
            self._listener.pass_over(change)
        self._changes.clear()
        self._listener.pass_over(missed)
        self._listener.unsubscribe()

    def _queue_change(self, change: Change) -> None:
        """Puts a change of the connection at its position among the messages.

        libzmq may still hold messages of a lost connection. So the loss gets its position once
        libzmq holds none, or with the report of the next connection.
        """
        if change is Change.LOST:
            self._lost = True
            return
        if self._lost:
            self._lost = False
            change |= Change.LOST
        self._put(self._inbox.first if self._taking_in else self._inbox.pushed, change)

    def _put(self, number: int, change: Change) -> None:
        changes = self._changes
        if changes and changes[-1][0] == number:
            _, earlier = changes.pop()
            if Change.LOST in change and Change.JOINED not in change:
                earlier &= ~Change.JOINED
            change |= earlier
        changes.append((number, change))
        if number == self._inbox.pushed:
            self._inbox.seal()
        if self.idle:
            self._pass_changes()

    def _pass_changes(self) -> None:
        changes = self._changes
        while changes and changes[0][0] == self._inbox.popped:
            self._listener.pass_over(changes.pop(0)[1])
