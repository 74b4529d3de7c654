"""Measures the memory of a block in the index, by the ranks and tiers that hold it.

    python bench/index_memory.py

Prints bytes by `PrefixIndex.stats()`, of 250 chains of 1,024 blocks.
"""

from __future__ import annotations

import random

from kvd_core.index.prefix_index import IngestStats, PrefixIndex

CHAINS = [[random.getrandbits(64) for _ in range(1024)] for _ in range(250)]
BLOCKS = 250 * 1024


def fill(index: PrefixIndex, worker: int, prefix: int = 0, tiers: int = 1) -> None:
    """Lets rank 0 of a worker store all chains on the first tiers, under names by the prefix."""
    added = index.add_worker(worker)
    for number, chain in enumerate(CHAINS):
        first = (prefix << 48) + (number << 16) + 1
        for tier in range(tiers):
            added.store(0, range(first, first + len(chain)), chain, None, tier)


def show(title: str, index: PrefixIndex, pairs: int) -> None:
    """Prints the bytes of an index beyond those of an empty one."""
    extra = index.stats()["bytes"] - PrefixIndex(16, IngestStats()).stats()["bytes"]
    print(f"{title}: {extra / pairs:.1f} a (rank, block), {extra / BLOCKS:.1f} a block")


def main() -> None:
    one, same, own, two = (PrefixIndex(16, IngestStats()) for _ in range(4))
    fill(one, 1)
    fill(two, 1, tiers=2)
    for worker in range(8):
        fill(same, worker)
        fill(own, worker, prefix=worker)
    show("1 rank", one, BLOCKS)
    show("8 ranks, same names", same, 8 * BLOCKS)
    show("8 ranks, own names", own, 8 * BLOCKS)
    show("1 rank, device and host", two, 2 * BLOCKS)


if __name__ == "__main__":
    main()
