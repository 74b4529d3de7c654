"""Engines, their network and replicas in virtual time, led by a test instead of by chance."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import trio

from kvd.model import RankKey
from tests.simulation.agenda import Agenda
from tests.simulation.engine import Engine
from tests.simulation.network import Network, Port
from tests.simulation.replica import PeerAccess, Replica, simulated
from tests.support.agreement import check_agreement


class Fleet:
    """Engines that keep all their batches, and whose replay servers answer."""

    def __init__(self, keys: Sequence[RankKey], seed: int = 0) -> None:
        chance = random.Random(seed)
        self.agenda = Agenda()
        self.network = Network(self.agenda, chance)
        self.peers = PeerAccess(chance)
        self.peers.failures = 0.0
        self.engines = {key: Engine(key, chance, kind=True) for key in keys}
        self.ports = {key: self.network.add(engine) for key, engine in self.engines.items()}
        self._nursery: trio.Nursery

    @asynccontextmanager
    async def living(self) -> AsyncIterator[None]:
        with simulated(self.peers):
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self.agenda.run)
                yield
                self._nursery.cancel_scope.cancel()

    async def start(self, name: str, *keys: RankKey, peers: Sequence[str] = ()) -> Replica:
        """Starts a replica at which `keys` are registered from the beginning."""
        replica = Replica(name, self.network, self.engines.values(), kind=True)
        at_start = [self.engines[key] for key in keys]
        await self._nursery.start(replica.run, [f"http://{peer}:1" for peer in peers], at_start)
        self.peers.replicas[replica.url] = replica
        return replica

    def speak(self, key: RankKey, batches: int = 1, heard: bool = True) -> None:
        """Has an engine publish batches; they are lost unless `heard`."""
        for _ in range(batches):
            seq, payload = self.engines[key].act()
            if heard:
                self.network.publish(self.ports[key], seq, payload)

    def port(self, key: RankKey) -> Port:
        return self.ports[key]


def check_replica(replica: Replica) -> None:
    """Checks that registry, state and tasks agree, and that only listeners have sockets.

    No call may be under way at the replica.
    """
    check_agreement(replica.state, replica.registry, replica.tasks)
    running = replica.tasks._tasks
    assert len(replica.wire.connections) <= len(running)
    assert len(replica.wire.monitors) <= len(running)
