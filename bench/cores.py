"""Models how many questions/s several cores could answer, in four designs, from measured costs.

    python bench/cores.py [--blocks-per-s 100000]

    helper     one process; threads beside the loop scan JSON and hash tokens
    readers    one process; threads answer whole questions from one index under a lock
    processes  one a core, on one port; each has an index of its own and listens to all engines
    shards     half of the processes are fronts that scan, hash and merge; each of the others
               listens to a part of the engines, and answers all fronts

Scanning, hashing, matching and rendering are measured here. The other costs of a question, and
those of passing it on, are constants below. Prints thousands of questions/s, as if no process ever
waited for another: an upper bound.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from timing import lowest_us

from kvd_core.base.hashing import local_hashes
from kvd_core.index.prefix_index import IngestStats, PrefixIndex
from kvd_core.json.scan import BodyScanner

BLOCK_SIZE, RANKS, SHARED = 16, 8, 256  # SHARED: leading blocks that all ranks cache
CORES = (1, 2, 4, 8, 16)
CALLS, ROUNDS = 50, 15  # calls in a round
# CPU us on the Xeon of docs/performance.md, 2026-11-29. As `python bench/ways.py kvd --blocks-per-s
# 100000 0` prints them: of HTTP and the kernel for a question by its tokens, and of a block that is
# stored and evicted. As `python bench/ways.py prototypes --blocks-per-s 0` does: means of 512 and
# 2,048 tokens, since those of longer prompts are lost in the noise of their large sums.
OTHER_US = {512: 11.8, 8_192: 27.9, 131_072: 228.0}
BLOCK_US = 1.26
HAND_OVER_US = 2.9  # of handing a question to another thread and back
LOCK_US = 0.4  # of the lock of an index that several threads read
ASK_SHARD_US = 8.4  # of a front, for each shard that it asks
SHARD_US = 5.0  # of a shard, beside matching and rendering


class Terms(NamedTuple):
    """CPU us of a question."""

    prepare: float  # scanning and hashing
    match: float  # and rendering
    other: float  # HTTP and the kernel


def measured(tokens: int) -> tuple[float, float]:
    """Measures `prepare` and `match` of a prompt whose first half one rank caches."""
    numbers = random.Random(1)
    prompt = [numbers.randrange(100, 120_100) for _ in range(tokens)]
    hashes = local_hashes(prompt, BLOCK_SIZE)
    index = PrefixIndex(BLOCK_SIZE, IngestStats())
    for rank in range(RANKS):
        worker = index.add_worker(rank)
        worker.register(0)
        held = hashes[: len(hashes) // 2 if rank == 0 else min(SHARED, len(hashes) // 2)]
        worker.store(0, held, held)
    by_tokens = BodyScanner({"token_ids": "u32"})
    by_hash = BodyScanner({"block_hashes": "hash64"})
    by_hash.scan(json.dumps({"block_hashes": hashes}).encode())
    body = json.dumps({"model_name": "m", "token_ids": prompt}, separators=(",", ":")).encode()
    scan = lowest_us(lambda _: by_tokens.scan(body), CALLS, ROUNDS)
    query = lowest_us(lambda _: index.query_tokens(by_tokens, 0), CALLS, ROUNDS)
    match = lowest_us(lambda _: index.query_hashes(by_hash, 0), CALLS, ROUNDS)
    return scan + query - match, match


def helper(cost: Terms, cores: int, ingest: float) -> float:
    """Returns questions/us; `ingest` is the share of a core that one process spends on events."""
    if cores == 1:
        return processes(cost, 1, ingest)
    loop = cost.other + cost.match + HAND_OVER_US
    together = (cores - ingest) / (loop + cost.prepare)
    return max(0.0, min((1 - ingest) / loop, together))


def readers(cost: Terms, cores: int, ingest: float) -> float:
    """Events take the lock alone, so that nothing is matched meanwhile."""
    if cores == 1:
        return processes(cost, 1, ingest)
    together = (cores - ingest) / (sum(cost) + LOCK_US)
    return max(0.0, min(together, cores * (1 - ingest) / cost.match))


def processes(cost: Terms, cores: int, ingest: float) -> float:
    return max(0.0, cores * (1 - ingest) / sum(cost))


def shards(cost: Terms, cores: int, ingest: float) -> float:
    fronts = max(1, cores // 2)
    parts = cores - fronts
    if not parts:
        return processes(cost, 1, ingest)
    front = cost.other + cost.prepare + parts * ASK_SHARD_US
    return max(0.0, min(fronts / front, (1 - ingest / parts) / (SHARD_US + cost.match)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--blocks-per-s", type=int, nargs="+", default=[100_000, 500_000])
    rates = parser.parse_args().blocks_per_s
    print("| tokens | blocks/s | way | " + " | ".join(map(str, CORES)) + " cores |")
    print("|---|---|---|" + "---|" * len(CORES))
    for tokens in OTHER_US:
        cost = Terms(*measured(tokens), OTHER_US[tokens])
        for rate in rates:
            for way in (helper, readers, processes, shards):
                figures = [1000 * way(cost, cores, rate * BLOCK_US / 1e6) for cores in CORES]
                cells = " | ".join(f"{figure:,.1f}" for figure in figures)
                print(f"| {tokens:,} | {rate:,} | {way.__name__} | {cells} |")
        parts = ", ".join(f"{name} {us:.1f}" for name, us in cost._asdict().items())
        print(f"  {tokens:,} tokens, us: {parts}", file=sys.stderr)


if __name__ == "__main__":
    main()
