"""Measures what the chronicle adds to the cost of stores and evictions, in the core alone.

    python bench/chronicle.py [--rounds N]

Prints Markdown: the median over the rounds of CPU nanoseconds a block, for an index without a
chronicle and one with it, in turns in one process. Eight workers hold prompts of 128 blocks.
Prompts are evicted from their ends: either one after the other, or all of a worker's together, a
block of each in turn, so that none of them is in the processor's caches.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvd.platform.memory import keep_freed_memory
from kvd_core.index.chronicle import Chronicle
from kvd_core.index.prefix_index import IngestStats, PrefixIndex, Worker

WORKERS, PROMPTS, BLOCKS = 8, 250, 128  # workers, prompts of a worker, blocks of a prompt
CAPACITY = 65_536  # changes: the default of `index_chronicle`
RUN = 32  # blocks of a long event


def hashes(count: int) -> array[int]:
    return array("Q", (random.getrandbits(64) for _ in range(count)))


LOCALS = [[hashes(BLOCKS) for _ in range(PROMPTS)] for _ in range(WORKERS)]
NAMES = [[hashes(BLOCKS) for _ in range(PROMPTS)] for _ in range(WORKERS)]


def store(worker: Worker, locals: list[array[int]], names: list[array[int]], run: int) -> None:
    """Stores all prompts of a worker, one after the other, by events of `run` blocks."""
    for content, named in zip(locals, names, strict=True):
        parent = None
        for at in range(0, BLOCKS, run):
            worker.store(0, named[at : at + run], content[at : at + run], parent)
            parent = named[at + run - 1]


def each_by_itself(names: list[array[int]]) -> array[int]:
    return array("Q", (name for prompt in names for name in reversed(prompt)))


def all_in_turn(names: list[array[int]]) -> array[int]:
    return array("Q", (prompt[at] for at in reversed(range(BLOCKS)) for prompt in names))


def ns_a_block(step: Callable[[int], None]) -> float:
    """Runs a step for each worker; returns its CPU time per block."""
    started = time.process_time_ns()
    for number in range(WORKERS):
        step(number)
    return (time.process_time_ns() - started) / (WORKERS * PROMPTS * BLOCKS)


class Index:
    """An index with or without a chronicle, and the times of its steps."""

    def __init__(self, chronicle: Chronicle | None = None) -> None:
        index = PrefixIndex(16, IngestStats(), chronicle=chronicle)
        self.workers = [index.add_worker(number) for number in range(WORKERS)]
        for worker in self.workers:
            worker.register(0)
        self.figures: dict[str, list[float]] = {}

    def measure(self, run: int, order: Callable[[list[array[int]]], array[int]], kind: str) -> None:
        """Stores all prompts by events of `run` blocks, and evicts them in the given order."""
        going = [order(names) for names in NAMES]
        workers = self.workers
        stored = ns_a_block(lambda each: store(workers[each], LOCALS[each], NAMES[each], run))
        evicted = ns_a_block(lambda each: workers[each].drop(0, going[each]))
        blocks = "1 block" if run == 1 else f"{run} blocks"
        self.figures.setdefault(f"stored by events of {blocks}", []).append(stored)
        self.figures.setdefault(f"evicted, {kind}", []).append(evicted)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    keep_freed_memory()  # as the daemon does
    without, with_one = Index(), Index(Chronicle(CAPACITY))
    for _ in range(rounds):
        for run, order, kind in (
            (1, each_by_itself, "a prompt by itself"),
            (RUN, all_in_turn, "all prompts in turn"),
        ):
            for index in (without, with_one):
                index.measure(run, order, kind)
    print(f"CPU ns a block, median of {rounds} rounds of {WORKERS * PROMPTS * BLOCKS} blocks\n")
    print("| | without a chronicle | with one |\n|---|---|---|")
    for name, figures in without.figures.items():
        print(f"| {name} | {median(figures):.0f} | {median(with_one.figures[name]):.0f} |")


if __name__ == "__main__":
    main()
