"""The slot tracker's suites: like suites.py, for `kvd slot-tracker` and `dynamo.slot_tracker`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from generator import Option
from report import Case, Figure, Suite
from runs import BLOCK, CONNECTIONS, CPU, HIT, P50, P99, RPS, Runs, log
from sameness import LoadStats, check_slots_equal
from servers import Pair, running_pair

LIFE = Suite(
    "slots",
    "/add, /prefill_complete, /free in turn, 512 hashes: the mean of the three",
    (CPU, P50, P99, RPS),
)
PROJECTION = Suite(
    "projection", "/potential_loads: 512 hashes in, every rank's load out", (CPU, P50, P99, RPS)
)
LOADS = Suite("loads", "GET /loads: every rank's load out", (CPU, P50, P99, RPS))
MEMORY = Suite(
    "slot-memory",
    "Memory: RSS growth by live requests of 512 hashes, 448 of them their own",
    (Figure("rss_kib_per_request", "KiB/request"), Figure("rss_after_mib", "whole RSS, MiB")),
)

PROMPT = 512  # hashes
SHARED = 64  # leading hashes of a prompt that all prompts share: the system prompt
LIVE = 4  # requests of each worker that stay live during a load; half of them in decode

WORKERS = {LIFE: (8, 64, 512), PROJECTION: (8, 64, 512), LOADS: (512,)}
CPU_LIMITS = {LIFE: 0.8, PROJECTION: 0.6, LOADS: 0.6}
REQUEST: dict[Suite, dict[str, Option]] = {
    LIFE: {"kind": "life"},
    PROJECTION: {"kind": "potential_loads"},
    LOADS: {"kind": "get", "path": "/loads"},
}

MEMORY_WORKERS = 8
MEMORY_PER_REQUEST = 1.0

SAMPLES = 8  # prompts that both servers answer before anything is timed


class SlotSuites(Runs):
    """Runs the slot tracker's suites; returns the results as cases."""

    def run(self, names: list[str]) -> list[Case]:
        """Runs the named suites, in table order."""
        cases = []
        for suite in (LIFE, PROJECTION, LOADS):
            if suite.name in names:
                cases += [case for workers in WORKERS[suite] for case in self._at(suite, workers)]
        if MEMORY.name in names:
            cases.append(self._memory())
        return cases

    def _at(self, suite: Suite, workers: int) -> list[Case]:
        """Runs a suite on a fresh pair, so that live requests do not get old enough to expire."""
        cases = []
        with self._admitted_pair(suite, workers) as pair:
            for connections in CONNECTIONS:
                name = f"{workers} workers, c{connections}"
                case = Case(suite, name, {CPU.key: CPU_LIMITS[suite]})
                request = {**_prompts(workers, LIVE * workers), **REQUEST[suite]}
                self._load(pair, case, {**request, "conns": connections})
                cases.append(case)
        return cases

    @contextmanager
    def _admitted_pair(self, suite: Suite, workers: int) -> Iterator[Pair]:
        """Yields both servers with the same live requests; checks answers before and after."""
        log(f"{suite.name}: admitting {LIVE * workers} requests")
        prompts = _prompts(workers, LIVE * workers)
        with running_pair(self._contenders, self._logs) as pair:
            for server in pair:
                self._generator.run("admit", server, **prompts)
            self._check_same(pair, workers, prompts)
            yield pair
            self._check_same(pair, workers, prompts)

    def _check_same(self, pair: Pair, workers: int, prompts: dict[str, Option]) -> None:
        questions = self._generator.bodies(**prompts, **REQUEST[PROJECTION], count=SAMPLES)
        lives = self._generator.bodies(**prompts, **REQUEST[LIFE], count=SAMPLES)
        blocks = SHARED + LIVE * (PROMPT - SHARED)
        tokens = (LIVE - LIVE // 2) * (PROMPT - SHARED) * BLOCK
        matched = int(PROMPT * HIT)
        check_slots_equal(
            pair, questions, lives, LoadStats(workers, blocks, tokens, PROMPT - matched)
        )

    def _memory(self) -> Case:
        live = self._plan.live
        name = f"{live:,} live requests, {MEMORY_WORKERS} workers"
        case = Case(MEMORY, name, {"rss_kib_per_request": MEMORY_PER_REQUEST})
        self._fresh_rounds(case, "admit", _prompts(MEMORY_WORKERS, live))
        return case


def _prompts(workers: int, live: int) -> dict[str, Option]:
    """Returns the options from which the generator draws requests."""
    return {
        "workers": workers,
        "live": live,
        "tokens": PROMPT * BLOCK,
        "prefix": SHARED,
        "hit": HIT,
        "block_size": BLOCK,
    }
