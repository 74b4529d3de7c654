"""The replicas whose events are applied here, and the metrics about them.

    register ──> Replica ──> Links.start        (net: a supervised task)
    deregister ──> forgotten ──> Links.stop, awaited

A process without a port for replica sync takes no part in it: it has no links, and no replica can
be registered.

Each event of a replica is applied on one face only, since all faces weigh on the same ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

from kvd.errors import Conflict, NotFound, Unavailable
from kvd.telemetry.metrics import Family, by_label, counter, gauge
from kvd.wire.curve import check_server_key
from kvd.wire.egress import EgressPolicy
from kvd.wire.endpoints import check_endpoint
from kvd.wire.lifecycle import Face, Lifecycle, Outcome
from kvd.wire.replica import Replica, ReplicaStats

# Registered replicas: a fleet has two or three. Each takes a task with three ZMQ sockets.
MAX_REPLICAS = 1024

Apply = Callable[[Lifecycle, float], Outcome]  # an event, the time in seconds

# Outcomes of a step about a rank that is not registered with the face.
ELSEWHERE = frozenset(
    {Outcome.UNKNOWN_MODEL, Outcome.BLOCK_SIZE, Outcome.UNKNOWN_WORKER, Outcome.UNKNOWN_RANK}
)


def apply_once(event: Lifecycle, now: float, faces: Mapping[Face, Apply]) -> Outcome:
    """Applies a replica's step on the first face that has the rank, and returns the outcome.

    The face through which it came there is tried first, if that is known, then the others in their
    order. If no face has the rank, the outcome is that of the last face that has the model.
    """
    last = Outcome.UNKNOWN_MODEL
    for face in sorted(faces, key=lambda face: face is not event.face):
        outcome = faces[face](event, now)
        if outcome not in ELSEWHERE:
            return outcome
        if outcome is not Outcome.UNKNOWN_MODEL:
            last = outcome
    return last


class RegisteredReplica(NamedTuple):
    """A replica as it is registered."""

    endpoint: str
    server_key: str | None  # its public CURVE key; None without CURVE


class Links(Protocol):
    """Starts and stops listeners to replicas; `kvd.net` provides it."""

    def start(self, replica: Replica) -> None:
        """Starts to listen to a replica, whether it is up or not."""

    async def stop(self, replica: Replica) -> None:
        """Ends the listener to the replica, and waits for that."""


class Replicas:
    """The registered replicas; `links` is None if replica sync is off."""

    def __init__(
        self, links: Links | None, stats: ReplicaStats, outgoing: EgressPolicy | None = None
    ) -> None:
        """Without `outgoing` the default rules about addresses hold."""
        self._outgoing = outgoing or EgressPolicy()
        self._links = links
        self.stats = stats
        self._replicas: dict[str, Replica] = {}
        self.refused = 0  # registrations beyond MAX_REPLICAS
        self.changes = 0  # how often a replica has come or gone

    @property
    def are_on(self) -> bool:
        """Whether there is a port for replicas, and a face that accounts."""
        return self._links is not None

    def all(self) -> Iterable[Replica]:
        return self._replicas.values()

    def find(self, endpoint: str) -> Replica | None:
        return self._replicas.get(endpoint)

    def endpoints(self) -> list[str]:
        return sorted(self._replicas)

    def register(self, endpoint: str, server_key: str | None = None) -> bool:
        """Listens to a replica; returns whether it is new.

        Raises Conflict if replica sync is off or the replica is known with another key, BadRequest
        on a faulty address or key, Unavailable at the bound.
        """
        links = self._enabled()
        self._outgoing.check_bound_endpoint(endpoint)
        check_server_key(server_key)
        known = self._replicas.get(endpoint)
        if known is not None:
            if known.server_key != server_key:
                raise Conflict(f"{endpoint} is already registered with another key")
            return False
        if len(self._replicas) >= MAX_REPLICAS:
            self.refused += 1
            raise Unavailable(f"the limit of {MAX_REPLICAS} replicas is reached")
        replica = self._replicas[endpoint] = Replica(endpoint, self.stats, server_key)
        self.changes += 1
        links.start(replica)
        return True

    async def deregister(self, endpoint: str) -> None:
        """Removes a replica; returns when no more of its events can be applied.

        Raises NotFound, or as `register` does.
        """
        links = self._enabled()
        check_endpoint(endpoint)
        replica = self._replicas.pop(endpoint, None)
        if replica is None:
            raise NotFound("peer not found")
        self.changes += 1
        await links.stop(replica)

    def _enabled(self) -> Links:
        if self._links is None:
            raise Conflict("replica sync is disabled")
        return self._links

    def families(self) -> Iterator[Family]:
        """Yields the families of /metrics; addresses are not used as labels."""
        connected = sum(replica.connected for replica in self._replicas.values())
        yield gauge("kvd_replica_peers", "Number of registered replicas", len(self._replicas))
        yield gauge(
            "kvd_replica_peers_connected",
            "Number of registered replicas that are connected",
            connected,
        )
        help = "Number of replicas refused at the limit"
        yield counter("kvd_replica_peers_refused_total", help, self.refused)
        for name, help in COUNTERS.items():
            yield counter(f"kvd_replica_{name}_total", help, getattr(self.stats, name))
        help = "Number of messages of replicas refused as malformed events, by reason"
        yield by_label("kvd_replica_refused_total", "counter", help, "reason", self.stats.refused)
        help = "Number of events of replicas that contradicted this process's state, by reason"
        yield by_label("kvd_replica_dropped_total", "counter", help, "reason", self.stats.dropped)


# The counters of ReplicaStats, with the help of their metrics.
COUNTERS = {
    "published": "Number of events published to replicas",
    "oversized": "Number of events withheld because they exceeded the length that replicas read",
    "overflows": "Number of times that a replica's queue was full and events were dropped",
    "received": "Number of messages received from replicas",
    "missed": "Number of messages of replicas dropped because the queue was full",
    "own": "Number of received messages that this process had published itself",
    "applied": "Number of events of replicas applied",
    "joins": "Number of connections on which a replica answered",
    "losses": "Number of established connections to replicas that broke",
    "failures": "Number of sockets to replicas that could not be connected or had to be closed",
    "crashes": "Number of bugs that cost an event and its connection",
}
