"""Times the choice of a rank, without HTTP: python bench/selector.py [--rounds N]

Prints Markdown. Each figure is the lowest over short rounds of CPU microseconds a call, seen from
Python: other work on the machine can only raise it. Prompts have 2,048 tokens in 128 blocks. All
ranks cache the first 32 of these, and one rank in eight caches all, some of them on lower tiers.
Every rank has 4 live requests.
"""

from __future__ import annotations

import argparse
import random
import sys
from array import array
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from timing import Call, lowest_us, round_us

from kvd.platform.memory import keep_freed_memory
from kvd_core.base.hashing import local_hashes, sequence_hashes
from kvd_core.index.prefix_index import IngestStats, PrefixIndex
from kvd_core.json.scan import BodyScanner
from kvd_core.ledger.ledger import Ledger
from kvd_core.selector.selector import Candidate, Pool
from kvd_core.selector.settings import Settings

CANDIDATES = (8, 64, 512)
BLOCK_SIZE, TOKENS = 16, 2048
SHARED = 32  # blocks that every rank caches, and that every live request begins with
HOST, DISK = 96, 112  # where the blocks of the lower tiers begin
REQUESTS = 4  # live requests of each rank
PROMPTS = 8  # different prompts, each cached by one rank in eight
CALLS = 200  # in a round


class Fleet:
    """A pool of ranks with warm caches and running requests, and prompts to ask about."""

    def __init__(self, candidates: int) -> None:
        self.rng = random.Random(1)
        self.index = PrefixIndex(BLOCK_SIZE, IngestStats())
        self.ledger = Ledger()
        head = self._tokens(SHARED * BLOCK_SIZE)
        self.prompts = [head + self._tokens(TOKENS - len(head)) for _ in range(PROMPTS)]
        self.locals = [local_hashes(prompt, BLOCK_SIZE) for prompt in self.prompts]
        self.packed = [(packed(hashes), packed(sequence_hashes(hashes))) for hashes in self.locals]
        ranks = [self._rank(i) for i in range(candidates)]
        self.pool = Pool(self.index, self.ledger, BLOCK_SIZE, ranks)

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(128_000) for _ in range(count)]

    def _rank(self, number: int) -> Candidate:
        worker = self.index.add_worker(number)
        hashes = self.locals[number % PROMPTS]
        worker.store(0, hashes[:HOST], hashes[:HOST])
        worker.store(0, hashes[HOST:DISK], hashes[HOST:DISK], parent=hashes[HOST - 1], tier=1)
        worker.store(0, hashes[DISK:], hashes[DISK:], parent=hashes[DISK - 1], tier=2)
        rank = self.ledger.add_rank(number, 0)
        for request in range(REQUESTS):
            tail = [self.rng.getrandbits(64) for _ in range(len(hashes) - SHARED)]
            booked = packed(sequence_hashes(hashes[:SHARED] + tail))
            self.ledger.add(f"{number}-{request}", rank, booked, self.rng.randrange(TOKENS), 0.0)
        return Candidate(number, 0, worker, rank, 8192, 20_000)


def packed(hashes: list[int]) -> bytes:
    return array("Q", hashes).tobytes()


def measured(call: Call, rounds: int) -> float:
    """Returns the CPU microseconds a call in the fastest of `rounds` rounds of CALLS calls."""
    round_us(call, CALLS)
    return lowest_us(call, CALLS, rounds)


def row(candidates: int, rounds: int) -> str:
    fleet = Fleet(candidates)
    pool, packed_prompts = fleet.pool, fleet.packed
    settings = Settings(queue_threshold=2.0)
    warm = settings.replace(temperature=0.5)
    scanner = BodyScanner(arrays={"token_ids": "u32"})
    scanner.scan(f'{{"token_ids":{fleet.prompts[0]}}}'.encode())
    draws = [fleet.rng.getrandbits(64) for _ in range(256)]

    def whole(i: int) -> bytes:
        pool.match(*packed_prompts[i % PROMPTS], TOKENS)
        return pool.render_choice(pool.choose(settings, None, draws[i % 256]), settings)

    calls: list[Call] = [
        whole,
        lambda i: pool.match(*packed_prompts[i % PROMPTS], TOKENS),
        lambda i: pool.match_tokens(scanner, 0),
        lambda i: pool.choose(settings, None, draws[i % 256]),
        lambda i: pool.choose(warm, None, draws[i % 256]),
        lambda i: pool.render_choice(0, settings),
        lambda i: pool.render_overlaps(),
    ]
    figures = [f"{measured(call, rounds):.3f}" for call in calls]
    return f"| {candidates} | {' | '.join(figures)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=50)
    rounds = parser.parse_args().rounds
    keep_freed_memory()  # as the daemon does
    print(f"CPU us a call, lowest of {rounds} rounds of {CALLS} calls\n")
    print("| candidates | match + choose + render | match | match, token ids | choose ", end="")
    print("| choose, temperature | render_choice | render_overlaps |")
    print("|---|---|---|---|---|---|---|---|")
    for candidates in CANDIDATES:
        print(row(candidates, rounds), flush=True)


if __name__ == "__main__":
    main()
