"""The parts that all suites share: the plan, figures of an HTTP load, rounds of paired runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from generator import Generator, Option, Result
from report import Case, Figure
from servers import Contender, Pair, Server, running_pair

BLOCK = 16  # tokens
HIT = 0.5  # leading share of a prompt that is indexed, or live
CONNECTIONS = (1, 16)

CPU = Figure("cpu_us", "CPU us/request")
P50 = Figure("p50_us", "p50 us")
P99 = Figure("p99_us", "p99 us")
RPS = Figure("rps", "requests/s")


@dataclass(frozen=True)
class Plan:
    """The size of a comparison: `rounds` pairs of runs of `seconds` each, on `pairs` blocks."""

    rounds: int
    seconds: float
    warm: float  # unmeasured seconds before each run
    pairs: int
    samples: int  # of the latency suite, each round
    live: int  # requests of the slot-memory suite


FULL = Plan(rounds=5, seconds=1.5, warm=0.4, pairs=1_000_000, samples=1000, live=20_000)
QUICK = Plan(rounds=1, seconds=0.25, warm=0.1, pairs=100_000, samples=30, live=2_000)


class Runs:
    """Runs cases on pairs of servers that it starts; a face's suites derive from this."""

    def __init__(
        self,
        generator: Generator,
        contenders: tuple[Contender, Contender],
        logs: Path,
        plan: Plan,
    ) -> None:
        self._generator = generator
        self._contenders = contenders
        self._logs = logs
        self._plan = plan

    def _load(self, pair: Pair, case: Case, request: dict[str, Option]) -> None:
        """Runs all rounds of an HTTP load."""
        timing = {"secs": self._plan.seconds, "warm": self._plan.warm}
        options: dict[str, Option] = {**request, **timing}
        self._rounds(case, pair, lambda server: self._generator.run("http", server, **options))

    def _rounds(self, case: Case, pair: Pair, run: Callable[[Server], Result]) -> None:
        """Runs all rounds of a case on one pair of servers, in the order A, B, A, B..."""
        log(f"{case.suite.name}: {case.name}")
        for _ in range(self._plan.rounds):
            for server, results in zip(pair, case.runs, strict=True):
                results.append(run(server))

    def _fresh_rounds(self, case: Case, mode: str, options: dict[str, Option]) -> None:
        """Runs each round on a fresh pair, since the growth of memory can be measured only once."""
        log(f"{case.suite.name}: {case.name}")
        for _ in range(self._plan.rounds):
            with running_pair(self._contenders, self._logs) as pair:
                for server, results in zip(pair, case.runs, strict=True):
                    results.append(self._generator.run(mode, server, **options))


def log(text: str) -> None:
    """Prints progress to standard error; standard output has the report alone."""
    print(text, file=sys.stderr, flush=True)
