"""The state of a replica that kvd listens to, and counts of replicas' messages."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvd.wire.fields import Refused
from kvd.wire.lifecycle import Outcome

DROPPED = [outcome for outcome in Outcome if outcome is not Outcome.APPLIED]


@dataclass(slots=True, eq=False)
class ReplicaStats:
    """Counts of events on the replica plane, as plain numbers that only grow.

    `received` is the sum of `own`, `applied`, what was refused and what was dropped.
    """

    published: int = 0
    oversized: int = 0  # not published, as no replica would read a message that long
    overflows: int = 0  # times that a replica's queue was full, see `PubSocket.send`
    received: int = 0
    missed: int = 0  # dropped, as the inbox had no room
    own: int = 0  # received, but published by this very process
    applied: int = 0
    refused: dict[str, int] = field(default_factory=lambda: dict.fromkeys(Refused, 0))
    dropped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DROPPED, 0))
    joins: int = 0  # connections on which a replica answered
    losses: int = 0  # of these, how many broke
    failures: int = 0  # sockets that could not be connected or had to be given up
    crashes: int = 0  # bugs; each cost an event and the connection

    def count(self, outcome: Outcome) -> None:
        if outcome is Outcome.APPLIED:
            self.applied += 1
        else:
            self.dropped[outcome] += 1


class Replica:
    """Another process, known by its publishing address; the listening task sets its state."""

    __slots__ = ("_stats", "connected", "endpoint", "last_error", "received", "server_key")

    def __init__(self, endpoint: str, stats: ReplicaStats, server_key: str | None = None) -> None:
        self.endpoint = endpoint
        self.server_key = server_key  # its CURVE key; None connects without CURVE
        self.connected = False
        self.last_error: str | None = None
        self.received = 0  # messages
        self._stats = stats

    def connecting(self) -> None:
        self.connected = False

    def joined(self) -> None:
        self._stats.joins += 1
        self.connected = True
        self.last_error = None

    def lost_connection(self, why: str, now: float) -> None:
        self._stats.losses += self.connected
        self.connected = False
        self.last_error = why

    def failed(self, why: str, now: float) -> None:
        self.lost_connection(why, now)
        self._stats.failures += 1

    def crashed(self) -> None:
        self._stats.crashes += 1
