"""Times the ledger's calls, without HTTP: python bench/ledger.py [--rounds N]

Prints Markdown. Each figure is the median over the rounds of CPU microseconds a call, seen from
Python. Prompts have 512 blocks, of which the first 64 are the same for all; every rank has 4 live
requests.
"""

from __future__ import annotations

import argparse
import random
import sys
from array import array
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from timing import Call, round_us

from kvd.platform.memory import keep_freed_memory
from kvd_core.ledger.ledger import ADDED, Ledger

RANKS = (8, 64, 512, 4096)
REQUESTS = 4  # live requests of each rank
BLOCKS, SHARED = 512, 64  # blocks of a prompt; how many of these all prompts share
CALLS = 2000  # in a round


class Prompts:
    def __init__(self) -> None:
        self.rng = random.Random(1)
        self.shared = self._hashes(SHARED)

    def _hashes(self, count: int) -> bytes:
        return array("Q", (self.rng.getrandbits(64) for _ in range(count))).tobytes()

    def draw(self, blocks: int = BLOCKS) -> bytes:
        return (self.shared + self._hashes(max(blocks - SHARED, 0)))[: 8 * blocks]


def filled(ranks: int, prompts: Prompts) -> tuple[Ledger, list[bytes]]:
    ledger, live = Ledger(), []
    for worker in range(ranks):
        rank = ledger.add_rank(worker, 0)
        for number in range(REQUESTS):
            live.append(prompts.draw())
            ledger.add(f"live-{worker}-{number}", rank, live[-1], 512, 0.0)
    return ledger, live


def lifecycle(ledger: Ledger, ranks: int, prompts: Prompts) -> Call:
    fresh = [prompts.draw() for _ in range(256)]
    ids = [f"6f9619ff-8b86-d011-b42d-00c04fc9{i:04x}" for i in range(256)]

    def call(i: int) -> None:
        at = i % 256
        assert ledger.add(ids[at], i * 7919 % ranks, fresh[at], 512, 1.0) == ADDED
        assert ledger.free(ids[at])

    return call


def measured(call: Call, rounds: int) -> float:
    """Returns the median over rounds of CALLS calls of the CPU microseconds a call."""
    round_us(call, CALLS // 10)
    return median(round_us(call, CALLS) for _ in range(rounds))


def row(ranks: int, rounds: int) -> str:
    prompts = Prompts()
    ledger, live = filled(ranks, prompts)
    novel = prompts.draw()
    one = prompts.draw(1)
    calls: list[Call] = [
        lifecycle(ledger, ranks, prompts),
        lambda i: ledger.project(live[i * 7919 % len(live)], 512),
        lambda _: ledger.project(novel, 512),
        lambda _: ledger.project(one, 16),
        lambda _: ledger.render_loads(b'"model_name":"m","tenant_id":"default",'),
    ]
    figures = [f"{measured(call, rounds):.3f}" for call in calls]
    each = ledger.stats()["bytes"] / (ranks * REQUESTS)
    return f"| {ranks} | {' | '.join(figures)} | {each:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    keep_freed_memory()  # as the daemon does
    print(f"CPU us a call, median of {rounds} rounds of {CALLS} calls\n")
    print(
        "| ranks | add + free | project, live prompt | project, novel tail | project, 1 block ",
        end="",
    )
    print("| render_loads | bytes a request |")
    print("|---|---|---|---|---|---|---|")
    for ranks in RANKS:
        print(row(ranks, rounds), flush=True)


if __name__ == "__main__":
    main()
