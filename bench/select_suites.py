"""The selection service's suites: like suites.py, for `kvd select-service` and its peer."""

from __future__ import annotations

from generator import Option
from report import Case, Suite
from runs import BLOCK, CONNECTIONS, CPU, HIT, P50, P99, RPS, Runs, log
from sameness import check_reservations_equal, check_selections_equal
from servers import Pair, running_pair

FIGURES = (CPU, P50, P99, RPS)
HASHES = Suite("select", "/select: 2,048 tokens as both hash arrays in, a rank out", FIGURES)
TOKENS = Suite("select", "/select: 8,192 token ids in, a rank out", FIGURES)
RESERVE = Suite(
    "select",
    "/select_and_reserve (2,048 tokens as hashes), /prefill_complete, DELETE in turn: the mean",
    FIGURES,
)

WORKERS = (8, 64, 512)
CPU_LIMITS = {HASHES: 0.6, TOKENS: 0.3, RESERVE: 0.7}
REQUEST: dict[Suite, dict[str, Option]] = {
    HASHES: {"kind": "select", "tokens": 2048},
    TOKENS: {"kind": "select_tokens", "tokens": 8192},
    RESERVE: {"kind": "reserve", "tokens": 2048},
}

DEPTH = 512  # blocks of a chain: more than half of the longest prompt
SHARED = 32  # leading blocks of a chain that all workers hold, so that every rank matches some
EVENT_BLOCKS = 64
WINDOW = 20_000  # blocks on their way: few enough not to fill the sockets' queues
SAMPLES = 8  # prompts that both servers answer before anything is timed


class SelectSuites(Runs):
    """Runs the selection service's suites; returns the results as cases."""

    def run(self, names: list[str]) -> list[Case]:
        """Returns the cases of all worker counts, by suite."""
        if HASHES.name not in names:
            return []
        cases = [case for workers in WORKERS for case in self._at(workers)]
        return [case for suite in REQUEST for case in cases if case.suite is suite]

    def _at(self, workers: int) -> list[Case]:
        """Runs all suites on one filled pair of servers."""
        log(f"{HASHES.name}: filling both servers, {workers} workers")
        data = self._data(workers)
        fill: dict[str, Option] = {"event_blocks": EVENT_BLOCKS, "window": WINDOW}
        cases = []
        with running_pair(self._contenders, self._logs) as pair:
            first, second = (
                self._generator.hold(one, **data, **fill, face="select") for one in pair
            )
            with first, second:
                for suite, request in REQUEST.items():
                    self._check_same(pair, suite, {**data, **request})
                    for connections in CONNECTIONS:
                        name = f"{workers} workers, c{connections}"
                        case = Case(suite, name, {CPU.key: CPU_LIMITS[suite]})
                        self._load(pair, case, {**data, **request, "conns": connections})
                        cases.append(case)
        return cases

    def _data(self, workers: int) -> dict[str, Option]:
        return {
            "workers": workers,
            "pairs": self._plan.pairs,
            "depth": DEPTH,
            "prefix": SHARED,
            "block_size": BLOCK,
            "hit": HIT,
        }

    def _check_same(self, pair: Pair, suite: Suite, request: dict[str, Option]) -> None:
        bodies = self._generator.bodies(**request, count=SAMPLES)
        check = check_reservations_equal if suite is RESERVE else check_selections_equal
        check(pair, bodies, int(int(request["tokens"]) * HIT))
