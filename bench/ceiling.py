"""Measures the memory that a limit of blocks allows: offers an index ten times its budget.

    python bench/ceiling.py [--blocks 1000000]

Each fill runs in a process of its own and prints by how many bytes the process has grown, per block
of the limit (`index_max_blocks`).
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from machine import resident

from kvd.platform.memory import keep_freed_memory
from kvd_core.conductor.conductor import Conductor
from kvd_core.index.prefix_index import Budget, IngestStats, PrefixIndex

PROMPT = 512  # blocks of a prompt, unless a fill says otherwise
TIMES = 10  # blocks offered for each block of the limit


def fill(
    blocks: int, prompt: int = PROMPT, ranks: int = 1, *, tiers: int = 1, own_names: bool = False
) -> tuple[PrefixIndex, Budget]:
    """Offers TIMES as many blocks as the limit allows."""
    budget = Budget(blocks)
    index = PrefixIndex(16, IngestStats(), budget=budget)
    workers = [index.add_worker(number) for number in range(ranks)]
    numbers = random.Random(1)
    for first in range(1, TIMES * blocks // ranks, prompt):
        contents = [numbers.getrandbits(64) for _ in range(prompt)]
        for number, worker in enumerate(workers):
            begin = first + (number << 48) * own_names
            for tier in range(tiers):
                worker.store(0, range(begin, begin + prompt), contents, None, tier)
    return index, budget


def with_sequences(blocks: int) -> tuple[PrefixIndex, Budget]:
    index, budget = fill(blocks)
    while not Conductor(index).sequence(1_000_000):
        pass
    return index, budget


FILLS: dict[str, Callable[[int], tuple[PrefixIndex, Budget]]] = {
    "1 rank, prompts of 512 blocks": fill,
    "1 rank, prompts of 8 blocks": lambda blocks: fill(blocks, 8),
    "8 ranks that hold the same": lambda blocks: fill(blocks, ranks=8),
    "8 ranks, each with its own names": lambda blocks: fill(blocks, ranks=8, own_names=True),
    "1 rank, on device and host": lambda blocks: fill(blocks, tiers=2),
    "1 rank, with sequence hashes": with_sequences,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    limit = parser.parse_args().blocks
    print("| fill | blocks | (rank, block) pairs | refused | bytes a block of the limit |")
    print("|---|---|---|---|---|")
    for name, make in FILLS.items():
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            keep_freed_memory()
            before = resident()
            _index, budget = make(limit)
            grown = (resident() - before) / limit
            print(
                f"| {name} | {budget.blocks:,} | {budget.pairs:,} | {budget.refused:,} "
                f"| {grown:.0f} |",
                flush=True,
            )
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
