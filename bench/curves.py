"""Measures how costs grow with blocks, ranks, tenants and live requests, in the core alone.

    python bench/curves.py [CURVE ...] [--most N] --json FILE
    python bench/curves.py --from FILE --pictures FOLDER        # needs matplotlib

Each point is measured in processes of its own. CPU microseconds are the lowest of some rounds, seen
from Python; memory is the growth of RSS, per block, or in total for requests. Questions have 128
blocks (2,048 tokens), as hashes that have been scanned already; each is about another prompt.
Engines send messages of one event of 8 blocks: stores go through new prompts of 128 blocks, one
after the other, and evictions take the last blocks of one cached prompt after the other.

    blocks    8 ranks; each prompt has 256 blocks
    ranks     1,000,000 blocks in all; there is one prompt of which all ranks hold the first half
    tenants   1,000,000 blocks in all; each tenant has an index and 8 ranks
    requests  64 ranks; live prompts of 512 blocks, of which all share the first 64
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgpack
from machine import OtherLoad, commit, describe, resident
from timing import lowest_us, round_us

from kvd.platform.memory import keep_freed_memory
from kvd_core.base.hashing import sequence_hashes
from kvd_core.index.prefix_index import Budget, IngestStats, PrefixIndex, Stream, Worker
from kvd_core.json.scan import BodyScanner
from kvd_core.ledger.ledger import ADDED, Ledger
from kvd_core.selector.selector import Candidate, Pool
from kvd_core.selector.settings import Settings

BLOCK_SIZE = 16
CHAIN = 256  # blocks of a cached prompt
ASKED = 128  # blocks of a question
EVENT = 8  # blocks of an event
PASSES = 3  # over all points, as another guest of the machine may slow one down for seconds
RANKS = 8  # on curves over something else
BLOCKS = 1_000_000  # on curves over something else
PROMPTS = 8_192  # asked about one after the other: too many for the processor's caches
MESSAGES = 2_000  # of stores, and of evictions, in a round
ROUNDS = 5
LIVE, SHARED = 512, 64  # blocks of a live prompt; how many of these all prompts share
LEDGER_RANKS = 64
CYCLES = 2_000  # bookings in a round

Figures = dict[str, float]


def hashes_of(chain: int, blocks: int = CHAIN) -> range:
    """Returns the names of a chain's blocks, which are also their local hashes."""
    return range((chain + 1) << 20, ((chain + 1) << 20) + blocks)


def question(hashes: Iterable[int]) -> BodyScanner:
    scanner = BodyScanner({"block_hashes": "hash64"})
    scanner.scan(json.dumps({"block_hashes": list(hashes)}).encode())
    return scanner


class Holdings:
    """The indexes of all tenants, with chains that are spread evenly over their ranks."""

    def __init__(self, tenants: int, ranks: int, blocks: int) -> None:
        before = resident()
        budget = Budget()
        self.indexes = [
            PrefixIndex(BLOCK_SIZE, IngestStats(), budget=budget) for _ in range(tenants)
        ]
        self.workers = [
            [index.add_worker(number) for number in range(ranks)] for index in self.indexes
        ]
        self.chains = -(-blocks // CHAIN)
        self._random = random.Random(1)
        for chain in range(self.chains):
            hashes = hashes_of(chain)
            self._home(chain).store(0, hashes, hashes)
        self.bytes = resident() - before
        self._old = self._random.sample(range(self.chains), min(self.chains, MESSAGES * ROUNDS))
        self._new = self.chains

    def _home(self, chain: int) -> Worker:
        workers = self.workers[chain % len(self.workers)]
        return workers[chain // len(self.workers) % len(workers)]

    def query_us(self) -> float:
        asked = [self._random.randrange(self.chains) for _ in range(PROMPTS)]
        questions = [question(hashes_of(chain, ASKED)) for chain in asked]
        indexes = [self.indexes[chain % len(self.indexes)] for chain in asked]
        return lowest_us(lambda n: indexes[n].query_hashes(questions[n], 0), PROMPTS, ROUNDS)

    def ingest_us(self) -> tuple[float, float]:
        """Returns CPU microseconds of a stored block and of an evicted one."""
        streams: dict[Worker, Stream] = {}
        for worker in (worker for workers in self.workers for worker in workers):
            worker.register(0)
            streams[worker] = worker.stream(0)
        stores: list[float] = []
        evictions: list[float] = []
        fresh, stale = self._stores(), self._evictions()
        for _ in range(ROUNDS):
            for messages, figures in ((fresh, stores), (stale, evictions)):
                batches = [
                    (streams[worker].apply, each) for worker, each in islice(messages, MESSAGES)
                ]
                if batches:
                    figures.append(round_us(partial(_apply, batches), len(batches)))
        return min(stores) / EVENT, min(evictions) / EVENT

    def _stores(self) -> Iterator[tuple[Worker, bytes]]:
        while True:
            self._new += 1
            parent = None
            for at in range(0, ASKED, EVENT):
                names = list(hashes_of(self._new)[at : at + EVENT])
                tokens = [self._random.randrange(128_000) for _ in range(EVENT * BLOCK_SIZE)]
                yield (
                    self._home(self._new),
                    message(["BlockStored", names, parent, tokens, BLOCK_SIZE, None, "GPU"]),
                )
                parent = names[-1]

    def _evictions(self) -> Iterator[tuple[Worker, bytes]]:
        for end in range(CHAIN, ASKED, -EVENT):
            for chain in self._old:
                gone = list(reversed(hashes_of(chain)[end - EVENT : end]))
                yield self._home(chain), message(["BlockRemoved", gone, "GPU"])


def _apply(batches: Sequence[tuple[Callable[[bytes], int], bytes]], number: int) -> None:
    apply, payload = batches[number]
    apply(payload)


def message(event: list[object]) -> bytes:
    packed: bytes = msgpack.packb([0.5, [event], 0])
    return packed


class Requests:
    """A ledger with live requests that are spread evenly over its ranks."""

    def __init__(self, ranks: int, requests: int, blocks: int) -> None:
        self._random = random.Random(1)
        self._blocks = blocks
        self._shared = self._random.randbytes(8 * SHARED)
        before = resident()
        self.ledger = Ledger()
        self.ranks = [self.ledger.add_rank(number, 0) for number in range(ranks)]
        for number in range(requests):
            rank = self.ranks[number % ranks]
            self.ledger.add(f"live-{number}", rank, self.prompt(), 512, 0.0)
        self.bytes = resident() - before

    def prompt(self) -> bytes:
        return self._shared + self._random.randbytes(8 * (self._blocks - SHARED))

    def figures(self) -> Figures:
        prompts = [self.prompt() for _ in range(CYCLES)]
        ledger, ranks = self.ledger, self.ranks

        def book(number: int) -> None:
            done = ledger.add(f"new-{number}", ranks[number % len(ranks)], prompts[number], 512, 1)
            assert done == ADDED

        def cycle(number: int) -> None:
            book(number)
            ledger.prefill_complete(f"new-{number}")
            ledger.free(f"new-{number}")

        return {
            "cycle_us": lowest_us(cycle, CYCLES, ROUNDS),
            "project_us": lowest_us(
                lambda number: ledger.project(prompts[number], 512), 500, ROUNDS
            ),
        }


def of_blocks(blocks: int) -> Figures:
    holdings = Holdings(1, RANKS, blocks)
    bytes = holdings.bytes / blocks
    query = holdings.query_us()
    store, evict = holdings.ingest_us()
    return {"query_us": query, "store_us": store, "evict_us": evict, "bytes": bytes}


def of_tenants(tenants: int) -> Figures:
    holdings = Holdings(tenants, RANKS, BLOCKS)
    query = holdings.query_us()
    store, evict = holdings.ingest_us()
    each = holdings.bytes / BLOCKS
    return {"query_us": query, "store_us": store, "evict_us": evict, "bytes": each}


def of_ranks(ranks: int) -> Figures:
    holdings = Holdings(1, ranks, BLOCKS)
    each = holdings.bytes / BLOCKS
    (index,), (workers,) = holdings.indexes, holdings.workers
    held_by_all = hashes_of(1 << 30, ASKED)
    for worker in workers:
        worker.store(0, held_by_all[: ASKED // 2], held_by_all[: ASKED // 2])
    asked = question(held_by_all)
    requests = Requests(ranks, 4 * ranks, ASKED)
    candidates = [
        Candidate(number, 0, worker, rank, 8192, 20_000)
        for number, (worker, rank) in enumerate(zip(workers, requests.ranks, strict=True))
    ]
    pool, settings = Pool(index, requests.ledger, BLOCK_SIZE, candidates), Settings()
    locals = array("Q", held_by_all).tobytes()
    sequences = array("Q", sequence_hashes(list(held_by_all))).tobytes()

    def select(number: int) -> None:
        pool.match(locals, sequences, ASKED * BLOCK_SIZE)
        pool.render_choice(pool.choose(settings, None, number), settings)

    store, evict = holdings.ingest_us()
    return {
        "one_us": holdings.query_us(),
        "all_us": lowest_us(lambda _: index.query_hashes(asked, 0), 200, ROUNDS),
        "select_us": lowest_us(select, 200, ROUNDS),
        **requests.figures(),
        "store_us": store,
        "evict_us": evict,
        "bytes": each,
    }


def of_requests(requests: int) -> Figures:
    live = Requests(LEDGER_RANKS, requests, LIVE)
    return {**live.figures(), "bytes": live.bytes}


CURVES: dict[str, tuple[Callable[[int], Figures], Sequence[int]]] = {
    "blocks": (
        of_blocks,
        (10**4, 3 * 10**4, 10**5, 3 * 10**5, 10**6, 3 * 10**6, 10**7, 3 * 10**7, 5 * 10**7),
    ),
    "ranks": (of_ranks, (1, 4, 16, 64, 256, 1024, 4096)),
    "tenants": (of_tenants, (1, 3, 10, 30, 100, 300, 1000)),
    "requests": (of_requests, (1, 10, 100, 1000, 10_000, 30_000, 100_000)),
}


def apart(measure: Callable[[int], Figures], at: int) -> Figures:
    """Returns the figures of a point, measured in a process of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, json.dumps(measure(at)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as result:
        text = result.read()
    if os.waitpid(child, 0)[1]:
        raise SystemExit("the process that measures has died")
    figures: Figures = json.loads(text)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("curves", nargs="*", metavar="CURVE", help=f"of {', '.join(CURVES)}")
    parser.add_argument("--most", type=int, help="leave out points beyond this one")
    parser.add_argument("--json", type=Path, help="write figures to this file")
    parser.add_argument("--from", type=Path, dest="source", help="measure nothing, read this file")
    parser.add_argument("--pictures", type=Path, help="draw into this folder")
    options = parser.parse_args()
    if unknown := set(options.curves) - set(CURVES):
        parser.error(f"no such curve: {', '.join(sorted(unknown))}")
    if options.source:
        results = json.loads(options.source.read_text())
    else:
        results = measured(options.curves or list(CURVES), options.most)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.pictures:
        import curve_pictures  # needs matplotlib, which measuring does not

        curve_pictures.draw(results, options.pictures)


def measured(curves: Sequence[str], most: int | None) -> dict[str, object]:
    keep_freed_memory()  # as the daemon does
    load = OtherLoad()
    points: dict[str, dict[int, Figures]] = {}
    for curve in list(curves) * PASSES:
        measure, all_points = CURVES[curve]
        lowest = points.setdefault(curve, {})
        for at in (at for at in all_points if most is None or at <= most):
            figures = apart(measure, at)
            before = lowest.get(at, figures)
            lowest[at] = {name: min(value, before[name]) for name, value in figures.items()}
            line = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
            print(f"{curve} {at:,}: {line}", flush=True)
    return {
        "commit": commit(Path(__file__).parent),
        "machine": describe(),
        "date": time.strftime("%Y-%m-%d"),
        "other_cores": round(load.cores(), 2),
        "curves": {
            curve: [{"at": at, **figures} for at, figures in lowest.items()]
            for curve, lowest in points.items()
        },
    }


if __name__ == "__main__":
    main()
