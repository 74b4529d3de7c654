"""Freed memory goes back to the system."""

from __future__ import annotations

import ctypes
import gc
import os

import msgpack
import pytest

from kvd.platform.memory import (
    COLLECT_PASSES,
    WORTH_TRIMMING_BYTES,
    FrequentCollector,
    Heaps,
    glibc,
)
from kvd_core.conductor.conductor import Conductor
from kvd_core.index.prefix_index import IngestStats, PrefixIndex, Stream
from kvd_core.prompts.conversations import Strands
from tests.support.applying import apply_whole

PIECE = 1000  # bytes
RUN = 1000  # blocks
FAR = 1 << 32


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def used() -> int:
    """Returns the bytes in use of the C library's heap."""
    libc = glibc()
    assert libc is not None
    found = libc.mallinfo2()
    return int(found.uordblks + found.hblkhd)


def trims(heaps: Heaps) -> float:
    (count,) = (f for f in heaps.metrics() if f.name == "kvd_heap_trims_total")
    return next(iter(count.samples))[2]


def test_what_stays_free_in_a_heap_is_given_back_once() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    heaps = Heaps()
    heaps.check()
    heaps.check()  # trims memory that was free before
    before = resident(), trims(heaps)
    pieces = [libc.malloc(PIECE) for _ in range(8 * WORTH_TRIMMING_BYTES // PIECE)]
    for piece in pieces:
        ctypes.memset(piece, 1, PIECE)
    last = pieces.pop()  # keeps the end of the heap in use, so that it cannot shrink by itself
    filled = resident()
    heaps.check()
    for piece in pieces:
        libc.free(piece)
    heaps.check()
    assert trims(heaps) == before[1]  # it may be used again at once
    heaps.check()
    assert trims(heaps) == before[1] + 1
    assert resident() - before[0] < (filled - before[0]) / 4
    heaps.check()
    heaps.check()
    assert trims(heaps) == before[1] + 1
    libc.free(last)


def test_an_index_that_is_emptied_gives_its_memory_back() -> None:
    index = PrefixIndex(1, IngestStats())
    worker = index.add_worker(1)
    empty = resident()
    runs = [range(first, first + RUN) for first in range(0, 500 * RUN, RUN)]
    for run in runs:
        worker.store(0, run, run)
    full = resident()
    for run in runs:
        worker.drop(0, run)
    while index.sweep(1000):
        pass
    assert resident() - empty < (full - empty) / 2  # short lists of hashes are in the heap


@pytest.mark.parametrize("keeps_sequences", [False, True])
def test_no_store_of_salted_blocks_takes_memory_for_those_before_it(keeps_sequences: bool) -> None:
    """A hash table of their salts would now and then take an array for all of them, and fill it."""
    index = PrefixIndex(1, IngestStats())
    conductor = Conductor(index)
    if keeps_sequences:
        conductor.match_hashes([0])
    stream = index.add_worker(1).stream(0)
    most = 0
    for first in range(0, 200 * RUN, RUN):
        names = list(range(first, first + RUN))
        stored = {"type": "BlockStored", "block_hashes": names, "token_ids": names}
        batch = msgpack.packb([0, [{**stored, "block_size": 1, "cache_salt": "s"}]])
        before = used()
        apply_whole(stream, batch)
        most = max(most, used() - before)
    assert index.stats()["exceptions"] == 200 * RUN
    assert most < 256 * RUN


@pytest.mark.parametrize("renames", [False, True])
def test_no_second_copy_or_name_takes_memory_for_those_before_it(renames: bool) -> None:
    index = PrefixIndex(1, IngestStats())
    worker = index.add_worker(1)
    most = 0
    for first in range(0, 200 * RUN, RUN):
        blocks = range(first, first + RUN)
        worker.store(0, blocks, blocks)
        before = used()
        if renames:
            worker.store(0, range(FAR + first, FAR + first + RUN), blocks)
        else:  # one of them is new, so the others are second copies
            longer = [*blocks, FAR + first]
            worker.store(0, longer, longer)
        most = max(most, used() - before)
    assert index.stats()["exceptions"] == 200 * RUN
    assert most < 256 * RUN


def test_no_waiting_block_takes_memory_for_those_before_it() -> None:
    index = PrefixIndex(1, IngestStats())
    worker = index.add_worker(1)
    most = 0
    for first in range(0, 60 * RUN, RUN // 10):
        before = used()
        for block in range(first, first + RUN // 10):
            worker.store(0, [block], [block], FAR + block)
        most = max(most, used() - before)
    assert index.stats()["parked_now"] == 60 * RUN
    assert most < 128 * RUN


def test_no_block_that_a_publisher_knows_by_hash_takes_memory_for_those_before_it() -> None:
    index = PrefixIndex(1, IngestStats())
    conductor = Conductor(index)
    source = conductor.add_source("a", "", "", 0, True)
    most = 0
    for first in range(0, 100 * RUN, RUN):
        hashes = list(range(first + 1, first + RUN + 1))
        before = used()
        assert source.store_named(0, None, "CPU", hashes, 0) == "placed"
        most = max(most, used() - before)
    assert index.stats()["parked_now"] == 100 * RUN
    assert most < 256 * RUN


def test_no_conversation_takes_memory_for_those_before_it() -> None:
    strands = Strands(1 << 24)
    most = 0
    for first in range(0, 60 * RUN, RUN // 10):
        conversations = [b"[%d]" % number for number in range(first, first + RUN // 10)]
        before = used()
        for each in conversations:
            assert strands.strand_of(b"", each) is not None
        most = max(most, used() - before)
    assert len(strands) == 60 * RUN
    assert most < 128 * RUN


@pytest.mark.parametrize("blocks", [16, 512, 8192])
def test_a_batch_leaves_no_memory_with_its_stream(blocks: int) -> None:
    stored = ["BlockStored", list(range(blocks)), None, list(range(16 * blocks)), 16]
    batch = msgpack.packb([0, [stored, ["AllBlocksCleared"]]])
    index = PrefixIndex(16, IngestStats())
    worker = index.add_worker(1)
    streams = [worker.stream(0) for _ in range(50)]

    def apply(stream: Stream) -> None:
        apply_whole(stream, batch)
        while index.sweep(1000):
            pass

    apply(streams.pop())  # all batches after it use the same memory, in the index as well
    before = used()
    for stream in streams:
        apply(stream)
    assert used() - before < len(streams) * 512


def test_young_objects_are_collected_after_some_passes() -> None:
    collected: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            collected.append(info["generation"])

    collector = FrequentCollector()
    gc.disable()
    gc.callbacks.append(note)
    try:
        for _ in range(2 * COLLECT_PASSES):
            collector.after_io_wait(0.0)
    finally:
        gc.callbacks.remove(note)
        gc.enable()
    assert collected == [1, 1]
