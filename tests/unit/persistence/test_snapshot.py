"""Snapshots of the index: other tasks run meanwhile; what is read from a damaged one."""

from __future__ import annotations

from pathlib import Path
from random import Random

import msgpack
import pytest

from kvd.index.partitions import State
from kvd.index.publishers import Publishers
from kvd.index.registry import Registry
from kvd.model import PartitionKey, RankKey
from kvd.persistence.clocks import ClockReading
from kvd.persistence.directory import StateDirectory
from kvd.persistence.frames import Content, Damaged, Header
from kvd.persistence.snapshot import _contents, read, write
from tests.support.applying import apply_whole
from tests.support.budget import scaled
from tests.support.idle_listeners import IdleListeners

KEY = PartitionKey("m", "default")
BLOCKS = 20_000
NAMES_A_SLICE = 4096 // 3  # names that a slice of a dump examines, see kvd_core/dump/dump.hpp


def test_others_run_while_names_are_looked_through() -> None:
    """Two ranks have different names for the same blocks, as vLLM's engines do."""
    state = State()
    for rank in (0, 1):
        hashes = list(range(1 + rank * BLOCKS, 1 + (rank + 1) * BLOCKS))
        stream = state.add_rank(RankKey(KEY, 1, rank), 1)
        apply_whole(stream, msgpack.packb([0.0, [_stored(hashes, list(range(BLOCKS)))], rank]))
    written = [len(content) for _, content in _contents(state, Registry(state, IdleListeners()))]
    assert sum(written) > 2 * BLOCKS * 16
    assert written.count(0) > BLOCKS // NAMES_A_SLICE


def filled(random: Random) -> State:
    """Returns a state with a few ranks that share some of their prompts."""
    state = State()
    for rank in range(random.randrange(1, 4)):
        stream = state.add_rank(RankKey(KEY, 1, rank), 1)
        for number in range(random.randrange(1, 6)):
            prompt = [random.randrange(2) for _ in range(random.randrange(1, 40))]
            first = (rank * 100 + number) * 1000 + 1
            hashes = list(range(first, first + len(prompt)))
            apply_whole(stream, msgpack.packb([0.0, [_stored(hashes, prompt)], rank]))
    return state


def _stored(hashes: list[int], tokens: list[int]) -> list[object]:
    return ["BlockStored", hashes, None, tokens, 1, None]


def spoilt(data: bytes, random: Random) -> bytes:
    """Returns a file's bytes as a crash, a disk or a stranger may have changed them."""
    changed = bytearray(data)
    at = random.randrange(len(data))
    match random.randrange(5):
        case 0:
            return data[:at]  # torn
        case 1:
            changed[at] ^= 1 << random.randrange(8)
        case 2:
            changed[at : at + random.randrange(1, 5000)] = b""
        case 3:
            changed[at:at] = random.randbytes(random.randrange(1, 200))
        case 4:
            changed[at:] = bytes(len(data) - at)  # its last pages were never written
    return bytes(changed)


@pytest.mark.parametrize("seed", range(scaled(12)))
async def test_a_snapshot_is_read_whole_or_not_at_all(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    state = filled(random)
    listened = Registry(state, IdleListeners()), Publishers(state, IdleListeners())
    directory = StateDirectory(tmp_path)
    header = Header(Content.INDEX, "p", ClockReading.now(0.0))
    await write(directory, header, state, *listened)
    directory.close()
    path = tmp_path / Content.INDEX
    data = path.read_bytes()
    whole = await read(path)
    assert whole.blocks
    for _ in range(20):
        path.write_bytes(spoilt(data, random))
        if path.read_bytes() != data:
            with pytest.raises(Damaged):
                await read(path)
