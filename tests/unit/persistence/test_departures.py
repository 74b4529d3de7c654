"""Ranks and publishers that leave while the index is written or restored, and come again.

Their blocks are gone, so their streams must not go on at the position that was kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest

from kvd.index.partitions import State
from kvd.index.publishers import Described, Narrowing, Publishers
from kvd.index.registry import Registry
from kvd.index.restore import plan, restore
from kvd.model import PartitionKey, RankKey
from kvd.persistence import holdings, snapshot
from kvd.persistence.clocks import ClockReading
from kvd.persistence.directory import StateDirectory
from kvd.persistence.frames import Content, Frame, Header
from kvd.persistence.holdings import HoldingsReader, Restoring
from kvd.persistence.snapshot import Snapshot
from kvd_core.dump.recovery import DumpReader
from tests.support.idle_listeners import IdleListeners

KEY = PartitionKey("m", "default")
RANKS = [RankKey(KEY, 1, 0), RankKey(KEY, 1, 1)]
ENDPOINT = "tcp://127.0.0.1:1"
BLOCKS = 3
PUBLISHER = Described(ENDPOINT, None, "vLLM", "m", "", "default", "a", 1, 0, "")


class Process:
    """The state of a daemon with its registries."""

    def __init__(self, max_blocks: int = 0) -> None:
        self.state = State(max_blocks=max_blocks)
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
    await process.registry.take_over(kept.positions)
    process.state.end_recovery()
    assert [process.expected(key) for key in RANKS] == [0, 1 if leaves == 0 else 0]


async def test_a_restored_rank_leaves_before_it_is_registered(tmp_path: Path) -> None:
    kept = await Process().filled().save(tmp_path)
    process = Process()
    process.state.begin_recovery()
    for _ in process.restore(kept):
        pass
    await process.registry.take_over(kept.positions)
    process.state.end_recovery()
    await process.unregister(0)
    for key in RANKS:
        process.register(key)
    assert [process.expected(key) for key in RANKS] == [0, 1]


async def test_a_rank_leaves_while_the_index_is_written() -> None:
    process = Process().filled()
    kept = Snapshot(Header(Content.INDEX, "p", ClockReading.now(0.0)))
    reader = DumpReader(True, max_blocks=100, max_events=100, max_entries=1, max_ranks=2)
    held = HoldingsReader(0, 0)
    has_left = False
    for kind, content in snapshot._contents(process.state, process.registry):
        snapshot._take(kept, reader, held, Frame(kind, content, 0))
        if not has_left:
            has_left = True
            await process.unregister(0)
            process.register(RANKS[0])
    kept.entries = reader.finish()
    after = Process()
    for _ in after.restore(kept):
        pass
    await after.registry.take_over(kept.positions)
    for key in RANKS:
        after.register(key)
    assert [after.expected(key) for key in RANKS] == [0, 1]


async def test_a_publisher_leaves_while_the_index_is_written() -> None:
    process, after = Process(), Process()
    for each in (process, after):
        each.publishers.register(PUBLISHER)
        each.publishers.register(replace(PUBLISHER, instance_id="b"))
    for publisher in process.publishers:
        publisher.listener.take(0, stored(0))
    held = HoldingsReader(100, 2)
    has_left = False
    for kind, content in holdings.contents(process.state, process.publishers):
        held.take(kind, content)
        if not has_left:
            has_left = True
            await process.publishers.unregister(Narrowing("default", "a"))
            process.publishers.register(PUBLISHER)
    await Restoring(after.state, after.publishers, held.finish()).run(lambda blocks: None)
    there = {each.described.instance_id: each for each in after.publishers}
    assert [there[name].listener.cursor.expected for name in "ab"] == [0, 1]
    assert [there[name].source.stats()["blocks"] for name in "ab"] == [0, BLOCKS]


@pytest.mark.parametrize(
    ("max_blocks", "loss"),
    [
        (0, "not known to be the same engine"),  # until its replay proves it
        (BLOCKS - 1, "the index had no room for its snapshot"),
    ],
)
async def test_a_publisher_lacks_what_found_no_room(max_blocks: int, loss: str) -> None:
    process, after = Process(), Process(max_blocks)
    for each in (process, after):
        each.publishers.register(replace(PUBLISHER, replay_endpoint=ENDPOINT))
    (publisher,) = process.publishers
    publisher.listener.take(0, stored(0))
    held = HoldingsReader(100, 2)
    for kind, content in holdings.contents(process.state, process.publishers):
        held.take(kind, content)
    await Restoring(after.state, after.publishers, held.finish()).run(lambda blocks: None)
    (publisher,) = after.publishers
    assert publisher.listener.cursor.expected == 1
    assert publisher.listener.batches.loss == loss
