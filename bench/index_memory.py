"""Measures the memory of a block in the index, by the ranks and tiers that hold it.

    python bench/index_memory.py [TRACE ...] [--hours 1]

The first populations are 250 chains of 1,024 blocks. Next comes, for each trace in Mooncake's form,
what simulated engines hold after they have served it (kvd/replay/): a block of a trace is 32 blocks
of 16 tokens, one event stores a prompt, and the least recently used blocks are evicted. The last
one is churn: the first trace again and again, each time with new contents, until its engines have
stored and evicted as many blocks as busy engines do in `--hours`.

Each population is in a process of its own. It prints three kinds of bytes per pair of a rank and a
block: those of `PrefixIndex.stats()`, the growth of what the C library's heaps have in use (large
memory is mapped outside of them), and the growth of RSS.
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import product
from math import ceil
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from machine import resident

from kvd.platform.memory import glibc, keep_freed_memory
from kvd.replay import mooncake
from kvd.replay.cache import Event, Stored
from kvd.replay.policies import parse
from kvd.replay.recording import RecordedRequest
from kvd.replay.routers import CoreRouter
from kvd.replay.simulation import SimulatedFleet, replay
from kvd_core.index.prefix_index import IngestStats, PrefixIndex

BLOCK_SIZE = 16
FINER = mooncake.BLOCK_SIZE // BLOCK_SIZE  # blocks in a block of a trace
PARTS = [random.getrandbits(64) for _ in range(FINER)]
CHAINS = [[random.getrandbits(64) for _ in range(1024)] for _ in range(250)]
RANKS = (1, 8, 64)
CAPACITIES = (500, 4000)  # of an engine, in blocks of a trace: 256,000 and 2 million tokens
CHURNING = (8, 4000)  # ranks, and blocks of a trace that each caches
BUSY = 2_500 * 3_600  # blocks that a busy engine stores and evicts in an hour
LOOKS = 8  # readings of the memory during churn
HEAD = "(rank, block) pairs | blocks | bytes a pair: stats | heap | RSS |"

EngineEvent = tuple[int, Event]  # an engine and one of its events


class Population:
    """An index that takes events of its ranks, and the growth of the process meanwhile."""

    def __init__(self, ranks: int, *, own_names: bool = False) -> None:
        self.index = PrefixIndex(BLOCK_SIZE, IngestStats())
        self.workers = [self.index.add_worker(number) for number in range(ranks)]
        self._salts = [mooncake.mixed(number) if own_names else 0 for number in range(ranks)]
        self._at_first = self._bytes()

    def hear(self, rank: int, event: Event) -> int:
        """Applies an event; returns the number of its blocks."""
        salt = self._salts[rank]
        if isinstance(event, Stored):
            contents = finer(event.blocks, PARTS)
            names = [content ^ salt for content in contents]
            parent = None if event.parent is None else finer([event.parent], PARTS)[-1] ^ salt
            self.workers[rank].store(0, names, contents, parent)
        else:  # the end of a prompt goes first
            names = [content ^ salt for content in finer(event.blocks, PARTS[::-1])]
            self.workers[rank].drop(0, names)
        return len(names)

    def cells(self) -> str:
        """Returns pairs, blocks, and the three kinds of bytes a pair."""
        stats = self.index.stats()
        pairs = sum(stats["held"].values())
        grown = (now - first for now, first in zip(self._bytes(), self._at_first, strict=True))
        each = " | ".join(f"{bytes / pairs:.1f}" for bytes in grown)
        return f"{pairs:,} | {stats['blocks']:,} | {each} |"

    def _bytes(self) -> tuple[int, int, int]:
        libc = glibc()
        heap = libc.mallinfo2() if libc is not None else None
        in_use = heap.uordblks + heap.hblkhd if heap is not None else 0
        return self.index.stats()["bytes"], in_use, resident()


def finer(blocks: Sequence[int], parts: Sequence[int]) -> list[int]:
    """Returns the hashes of the smaller blocks in blocks of a trace, one for each part."""
    return [(block + part) & mooncake.U64_MAX for block in blocks for part in parts]


def synthetic(ranks: int, *, own_names: bool = False, tiers: int = 1) -> Iterator[str]:
    population = Population(ranks)
    for number, worker in enumerate(population.workers):
        for chain_number, chain in enumerate(CHAINS):
            first = ((number * own_names) << 48) + (chain_number << 16) + 1
            for tier in range(tiers):
                worker.store(0, range(first, first + len(chain)), chain, None, tier)
    yield population.cells()


class Listener:
    """Routes as kvd does, and writes the events of engines to a file."""

    def __init__(self, fleet: SimulatedFleet, to: IO[bytes]) -> None:
        self._router = CoreRouter(fleet, parse("kvd").settings(), 1)
        self._output = to
        self.route = self._router.route
        self.prefill_complete = self._router.prefill_complete
        self.finished = self._router.finished

    def hear(self, engine: int, event: Event, now: float) -> None:
        self._router.hear(engine, event, now)
        pickle.dump((engine, event), self._output)


def simulate(trace: Path, laps: int, ranks: int, capacity: int, to: IO[bytes]) -> Iterator[str]:
    """Writes the events of `ranks` engines that serve a trace `laps` times; yields nothing."""
    recorded = mooncake.read(trace, None).requests
    fleet = SimulatedFleet(ranks, capacity, mooncake.BLOCK_SIZE)
    replay(list(again(recorded, laps)), fleet, Listener(fleet, to))
    to.flush()
    yield from ()


def again(requests: Sequence[RecordedRequest], laps: int) -> Iterator[RecordedRequest]:
    """Yields the requests `laps` times, each time with other contents."""
    for lap in range(laps):
        later_s = lap * requests[-1].arrival_s
        other = mooncake.mixed(lap << 32)
        for request in requests:
            blocks = tuple((block + other) & mooncake.U64_MAX for block in request.blocks)
            yield request._replace(
                name=f"{request.name}-{lap}",
                arrival_s=request.arrival_s + later_s,
                blocks=blocks,
                hashes=array("Q", blocks).tobytes(),
            )


def engine_events(events: IO[bytes]) -> Iterator[EngineEvent]:
    events.seek(0)
    while True:
        try:
            event: EngineEvent = pickle.load(events)
        except EOFError:
            return
        yield event


def real(events: IO[bytes], ranks: int, *, own_names: bool, looks: int = 1) -> Iterator[str]:
    """Yields the cells of `looks` readings of the memory, the last one at the end."""
    # Python's own memory for the longest event is taken now, so that it does not count.
    longest = max(engine_events(events), key=lambda pair: len(pair[1].blocks))
    Population(ranks).hear(*longest)
    population = Population(ranks, own_names=own_names)
    done, looked, end = 0, 0, os.fstat(events.fileno()).st_size
    for rank, event in engine_events(events):
        done += population.hear(rank, event)
        if events.tell() * looks // end > looked:
            looked += 1
            yield f"{population.cells()} {done:,} |"


def apart(title: str, cells: Iterator[str]) -> None:
    """Prints rows that are measured in a process of its own."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        for row in cells:
            print(f"| {title} | {row}", flush=True)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        raise SystemExit(f"{title}: the process that measures has died")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("traces", type=Path, nargs="*", metavar="TRACE")
    parser.add_argument("--hours", type=float, default=1.0, help="of churn")
    options = parser.parse_args()
    keep_freed_memory()  # as the daemon does
    print(f"| population | {HEAD}\n|---|---|---|---|---|---|")
    apart("1 rank", synthetic(1))
    apart("8 ranks, same names", synthetic(8))
    apart("8 ranks, own names", synthetic(8, own_names=True))
    apart("1 rank, device and host", synthetic(1, tiers=2))
    if not options.traces:
        return
    print(f"\n| trace, ranks, blocks of each, names | {HEAD} stored and evicted |")
    print("|---|---|---|---|---|---|---|")
    for trace, ranks, capacity in product(options.traces, RANKS, CAPACITIES):
        with TemporaryFile() as events:
            title = f"{trace.stem}, {ranks}, {capacity * FINER:,}"
            apart(title, simulate(trace, 1, ranks, capacity, events))
            apart(f"{title}, same", real(events, ranks, own_names=False))
            if ranks > 1:
                apart(f"{title}, own", real(events, ranks, own_names=True))
    trace, ranks, capacity = options.traces[0], *CHURNING
    with TemporaryFile() as events:
        title = f"{trace.stem}, {ranks}, {capacity * FINER:,}"
        apart(title, simulate(trace, 1, ranks, capacity, events))
        lap = sum(FINER * len(event.blocks) for _, event in engine_events(events))
        events.truncate(events.seek(0))
        laps = ceil(options.hours * BUSY * ranks / lap)
        apart(title, simulate(trace, laps, ranks, capacity, events))
        print(f"\n| {laps} times in a row | {HEAD} stored and evicted |")
        print("|---|---|---|---|---|---|---|")
        apart(f"{title}, own", real(events, ranks, own_names=True, looks=LOOKS))


if __name__ == "__main__":
    main()
