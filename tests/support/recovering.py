"""An indexer without its daemon, which recovers from peers and lets peers recover from it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from kvd.faces.indexer import routes as indexer
from kvd.index.partitions import State
from kvd.index.peers import Peers
from kvd.index.registry import Registry
from kvd.index.restore import plan, restore
from kvd.model import PartitionKey, RankKey
from kvd.net.recovery import RecoveryLimits, RecoveryStats, recover
from tests.support.dumps import pieces, read, rows_of
from tests.support.idle_listeners import IdleListeners
from tests.support.serving import serving

PATIENT = RecoveryLimits(body_bytes=1_000_000)
PARTITION = PartitionKey("m", "t")


class Replica:
    """An indexer's state without its daemon."""

    def __init__(self) -> None:
        self.state = State()
        self.listeners = IdleListeners()
        self.registry = Registry(self.state, self.listeners)
        self.stats = RecoveryStats()

    def register(self, instance_id: int, block_size: int = 16, rank: int = 0) -> None:
        key = RankKey(PARTITION, instance_id, rank)
        self.registry.register(key, "tcp://127.0.0.1:1", block_size, None)

    async def unregister(self, instance_id: int, rank: int | None = None) -> None:
        await self.registry.unregister(instance_id, "m", "t", rank)

    async def recover(self, *urls: str, limits: RecoveryLimits = PATIENT) -> list[str]:
        """Recovers from these peers; returns how each attempt ended."""
        stats = RecoveryStats()
        await recover(self.state, urls, stats, limits)
        self.stats = stats
        return [attempt for attempt, count in stats.attempts.items() for _ in range(count)]

    def restoring(self, dump: bytes) -> Iterator[int]:
        planned = [item for item in plan(self.state, read(dump, False)) if item]
        return restore(self.state, planned)

    def dumped(self) -> dict[str, object]:
        return {
            str(partition.key): rows_of(json.loads(b"[" + b"".join(pieces(dump)) + b"]"))
            for partition, dump in self.state.dump()
        }

    def depths(self, *prompt: int) -> object:
        return self.state.partition("m", "t").index.match(prompt)[0]

    @asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        routes = indexer.routes(self.state, self.registry, Peers(), indexer.dumps_bound(8))
        async with serving(routes=routes) as running:
            host, port = running.address
            yield f"http://{host}:{port}"
