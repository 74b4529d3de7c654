"""A process on the replica plane: its ledger of requests, its publisher, its list of replicas."""

from __future__ import annotations

import dataclasses
import secrets
from collections import Counter
from collections.abc import Iterable

import trio
import zmq

from kvd.model import PartitionKey
from kvd.net.link import LinkOptions, LinkResources
from kvd.net.publisher import open_publisher
from kvd.net.replication import ABSENT_EVERY_S, Apply, Replication
from kvd.replica_sync.replicas import Replicas
from kvd.wire.lifecycle import BOUNDS, TOPIC, Lifecycle, Outcome, Step, encode
from kvd.wire.replica import ReplicaStats
from tests.support.listening import HASTY
from tests.support.zmtp_fakes import until

PARTITION = PartitionKey("m", "default")
BLOCK = 16
HASTY_REPLICA = dataclasses.replace(HASTY, max_message_bytes=BOUNDS.payload_bytes)
OTHER_ROUTER = 5  # router_id of a replica that the test plays itself


def event(step: Step, request: str, worker: int = 7, hashes: bytes = b"") -> Lifecycle:
    tokens = len(hashes)
    return Lifecycle(PARTITION, BLOCK, request, worker, 0, step, hashes, tokens)


def add(request: str, worker: int = 7, hashes: bytes = b"\1" * 8) -> Lifecycle:
    return event(Step.ADD, request, worker, hashes)


class Ledger:
    """The plainest form of a slot tracker: worker and prefill tokens of each live request."""

    def __init__(self) -> None:
        self.live: dict[str, tuple[int, int]] = {}
        self.seen: list[Lifecycle] = []
        self.outcomes: Counter[Outcome] = Counter()

    def apply(self, event: Lifecycle) -> Outcome:
        self.seen.append(dataclasses.replace(event, router_id=0))  # equal, from any replica
        outcome = self._apply(event)
        self.outcomes[outcome] += 1
        return outcome

    def _apply(self, event: Lifecycle) -> Outcome:
        if event.partition != PARTITION:
            return Outcome.UNKNOWN_MODEL
        live = self.live.get(event.request_id)
        if event.step is Step.ADD:
            if live is not None:
                return Outcome.DUPLICATE
            self.live[event.request_id] = event.worker_id, event.prefill_tokens
            return Outcome.APPLIED
        if live is None:
            return Outcome.UNKNOWN_REQUEST
        if live[0] != event.worker_id:
            return Outcome.OTHER_WORKER
        if event.step is Step.FREE:
            del self.live[event.request_id]
        else:
            self.live[event.request_id] = event.worker_id, 0
        return Outcome.APPLIED


class Process:
    """One process; its tasks end with the nursery that `start` was given."""

    def __init__(self, ledger: Ledger, plane: Replication, endpoint: str) -> None:
        self.ledger = ledger
        self.plane = plane
        self.endpoint = endpoint
        self.stats = plane.stats
        self.replicas = Replicas(plane, plane.stats)

    def do(self, event: Lifecycle) -> None:
        """Applies an event of its own, and publishes it if it changed the ledger."""
        if self.ledger.apply(event) is Outcome.APPLIED:
            self.plane.publish(event)

    async def hears(self, speaker: Process) -> None:
        """Registers another process, and waits until its events arrive."""
        self.replicas.register(speaker.endpoint)
        received = self.stats.received

        def heard() -> bool:
            speaker.plane.publish(event(Step.FREE, "hello"))
            return self.stats.received > received

        await until(heard)
        speaker.plane.publish(event(Step.FREE, "ready"))
        await until(lambda: self.ledger.seen[-1].request_id == "ready")


def new_router_id() -> int:
    return secrets.randbelow(2**64 - 1) + 1


async def start(
    nursery: trio.Nursery,
    context: zmq.Context,
    options: LinkOptions = HASTY_REPLICA,
    apply: Apply | None = None,
    absent_every_s: float = ABSENT_EVERY_S,
) -> Process:
    """Starts a process that applies the events of replicas to its ledger, or by `apply`."""
    publisher = await open_publisher(context, "127.0.0.1", 0, options)
    ledger = Ledger()
    apply = apply or ledger.apply
    stats = ReplicaStats()
    resources = LinkResources(context)
    plane = Replication(
        nursery, resources, publisher, apply, stats, new_router_id(), options, absent_every_s
    )
    return Process(ledger, plane, publisher.endpoints[0])


def frames(events: Iterable[Lifecycle], router_id: int = OTHER_ROUTER) -> list[list[bytes]]:
    return [[TOPIC, encode(event, router_id)] for event in events]
