"""Ranks and publishers that leave while the index is written or restored, and come again.

Their blocks are gone, so their streams must not go on at the position that was kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest

from kvd.index.partitions import State
from kvd.index.publishers import Described, Narrowing, Publishers
from kvd.index.registry import KeptPosition, Registry
from kvd.index.restore import plan, restore
from kvd.model import PartitionKey, RankKey
from kvd.persistence import snapshot
from kvd.persistence.clocks import ClockReading
from kvd.persistence.directory import StateDirectory
from kvd.persistence.frames import Content, Header, frame
from kvd.persistence.holdings import Restoring
from kvd.persistence.snapshot import Snapshot, _contents
from tests.support.idle_listeners import IdleListeners

KEY = PartitionKey("m", "default")
RANKS = [RankKey(KEY, 1, 0), RankKey(KEY, 1, 1)]
ENDPOINT = "tcp://127.0.0.1:1"
BLOCKS = 3
PUBLISHER = Described(ENDPOINT, None, "vLLM", "m", "", "default", "a", 1, 0, "")


class Process:
    """The state of a daemon with its registries."""

    def __init__(self) -> None:
        self.state = State()
        self.registry = Registry(self.state, IdleListeners())
        self.publishers = Publishers(self.state, IdleListeners())

    def register(self, key: RankKey) -> None:
        self.registry.register(key, ENDPOINT, 1, None)

    async def unregister(self, dp_rank: int | None) -> None:
        await self.registry.unregister(1, *KEY, dp_rank)

    def filled(self) -> Process:
        for key in RANKS:
            self.register(key)
            listener = self.registry.find_listener(key)
            assert listener is not None
            listener.take(0, stored(key.dp_rank))
        return self

    def expected(self, key: RankKey) -> int:
        """Returns the number from which a stream goes on."""
        listener = self.registry.find_listener(key)
        assert listener is not None
        return listener.cursor.expected

    async def save(self, folder: Path) -> Snapshot:
        directory = StateDirectory(folder)
        header = Header(Content.INDEX, "p", ClockReading.now(0.0))
        await snapshot.write(directory, header, self.state, self.registry, self.publishers)
        directory.close()
        return await snapshot.read(folder / Content.INDEX)

    def restore(self, kept: Snapshot) -> Iterator[int]:
        planned = [each for each in plan(self.state, kept.entries) if each]
        yield from restore(self.state, planned)


def stored(first: int) -> bytes:
    hashes = [first * BLOCKS + each for each in range(1, 1 + BLOCKS)]
    event = ["BlockStored", hashes, None, list(range(first, first + BLOCKS)), 1, None]
    return msgpack.packb([0.0, [event]])


@pytest.mark.parametrize("leaves", [0, None])
async def test_a_rank_leaves_during_a_restore(tmp_path: Path, leaves: int | None) -> None:
    kept = await Process().filled().save(tmp_path)
    process = Process()
    process.state.begin_recovery()
    for key in RANKS:
        process.register(key)
    for _ in process.restore(kept):
        pass
    await process.unregister(leaves)
    for key in RANKS[: 1 if leaves == 0 else 2]:
        process.register(key)
    process.registry.take_over(kept.positions)
    process.state.end_recovery()
    assert [process.expected(key) for key in RANKS] == [0, 1 if leaves == 0 else 0]


async def test_a_restored_rank_leaves_before_it_is_registered(tmp_path: Path) -> None:
    kept = await Process().filled().save(tmp_path)
    process = Process()
    process.state.begin_recovery()
    for _ in process.restore(kept):
        pass
    process.registry.take_over(kept.positions)
    process.state.end_recovery()
    await process.unregister(0)
    for key in RANKS:
        process.register(key)
    assert [process.expected(key) for key in RANKS] == [0, 1]
