"""The indexer's suites: the load for both servers, its order, and the targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from generator import Hold, Option, Result
from recovery import dump_under_load, replica
from report import Case, Figure, Suite
from runs import BLOCK, CONNECTIONS, CPU, HIT, P50, P99, RPS, Runs, log
from sameness import check_equal
from servers import Pair, Server, running_pair

QUERY = Suite("query", "/query: token ids in, scores out", (CPU, P50, P99, RPS))
HASH = Suite("hash", "/query_by_hash: local block hashes in, scores out", (CPU, P50, P99, RPS))
TIERED = Suite(
    "tiered",
    "/query_tiered_by_hash, beside the other's /query_by_hash: Dynamo 1.6.1 has no such route",
    (CPU, P50, P99, RPS),
)
INGEST = Suite(
    "ingest",
    "Ingest: engine events until queryable, 8 workers",
    (Figure("cpu_us_per_block", "CPU us/block"), Figure("blocks_per_s", "blocks/s")),
)
MEMORY = Suite(
    "memory",
    "Memory: RSS growth by the index, queues empty",
    (Figure("rss_bytes_per_pair", "bytes/pair"), Figure("rss_after_mib", "whole RSS, MiB")),
)
BURST = Suite(
    "burst",
    "RSS after bursts: one-block messages as fast as they can be sent",
    (Figure("rss_after_mib", "whole RSS, MiB"), Figure("rss_bytes_per_pair", "bytes/pair")),
)
REGISTRATIONS = Suite(
    "registrations",
    "RSS growth by connected workers of 16 blocks each",
    (Figure("rss_kib_per_worker", "KiB/worker"), Figure("rss_after_mib", "whole RSS, MiB")),
)
LATENCY = Suite("latency", "From event to queryable, one block", (P50, P99))
# By case: the blocks/s that are published in between, and the blocks of an event.
FRESH = {"idle server": "", "100,000 blocks/s": "100000 64"}
FRESH_LIMITS = {"idle server": {P50.key: 0.7, P99.key: 0.7}}
DUMP = Suite(
    "recovery",
    "GET /dump, again and again, while 2,048-token queries run",
    (
        Figure("dump_s", "seconds"),
        Figure("dump_mib", "MiB"),
        Figure("extra_mib", "extra memory, MiB"),
        P50,
        P99,
    ),
)
REPLICA = Suite(
    "recovery",
    "A second replica, from its start until it answers",
    (Figure("stands_s", "seconds"), Figure("peak_mib", "its peak RSS, MiB")),
)

# Limits on the CPU ratio, by prompt length in tokens.
QUERY_CPU = {512: 0.35, 2048: 0.35, 8192: 0.25, 32768: 0.25, 131072: 0.25}
HASH_CPU = {512: 0.5, 8192: 0.5, 131072: 0.5}
P99_AT_MANY = 1.0  # limit on the p99 ratio with more than one connection

# (blocks an event, events a batch) -> limit on the ratio of CPU per block
INGEST_CPU = {(1, 1): 1.1, (8, 1): 0.7, (64, 1): 0.6, (1, 16): None}

# No limit on p99: the peer dumps in one thread and answers from others.
DUMP_LIMITS = {"dump_s": 0.3, "extra_mib": 0.05}
REPLICA_LIMITS = {"stands_s": 0.6, "peak_mib": 0.5}

MEMORY_PER_PAIR = 0.75
MEMORY_SHAPES: dict[str, dict[str, Option]] = {
    "1 worker": {"workers": 1},
    "8 workers": {"workers": 8},
    "8 workers, replicated": {"workers": 8, "replicated": 1},
    "64 workers": {"workers": 64},
}
# Seconds after a burst that a server has to free the memory of the socket queues that it filled.
BURST_REST = 10
BURST_SHAPES: dict[str, dict[str, Option]] = {
    "1 worker": {"workers": 1},
    "8 workers": {"workers": 8},
    "64 workers": {"workers": 64},
}
# Limits on the ratio of the whole RSS, by shape.
MEMORY_RSS = {"64 workers": 0.6}
BURST_RSS = {"1 worker": 1.0, "8 workers": 1.0, "64 workers": 0.6}
REGISTERED = (64, 512)  # workers
REGISTERED_BLOCKS = 16  # of each
# Seconds after which a server has freed what it needed to register.
REGISTERED_REST = 5
# Blocks on their way while memory is measured: with more, socket queues would be measured as well.
MEMORY_WINDOW = 20_000


class IndexerSuites(Runs):
    """Runs the indexer's suites; returns the results as cases."""

    def run(self, names: list[str]) -> list[Case]:
        """Runs the named suites, in table order."""
        cases: list[Case] = []
        if {QUERY.name, HASH.name, TIERED.name, LATENCY.name} & set(names):
            cases += self._filled_suites(names)
        if INGEST.name in names:
            cases += self._ingest()
        if MEMORY.name in names:
            cases += self._memory()
        if BURST.name in names:
            cases += self._burst()
        if REGISTRATIONS.name in names:
            cases += self._registrations()
        if DUMP.name in names:
            cases += self._recovery()
        return cases

    def _filled_suites(self, names: list[str]) -> list[Case]:
        """Runs the suites that share one filled pair of servers."""
        cases: list[Case] = []
        with self._filled_pair() as (pair, holds):
            if QUERY.name in names:
                cases += self._prompts(pair, QUERY, "query", QUERY_CPU, _token_case)
            if HASH.name in names:
                cases += self._prompts(pair, HASH, "query_by_hash", HASH_CPU, _hash_case)
            if TIERED.name in names:
                cases += self._tiered(pair)
            if LATENCY.name in names:
                cases += [self._latency(holds, name, beside) for name, beside in FRESH.items()]
        return cases

    @contextmanager
    def _filled_pair(self) -> Iterator[tuple[Pair, list[Hold]]]:
        log(f"filling both servers with {self._plan.pairs:,} pairs")
        with ExitStack() as stack:
            pair = stack.enter_context(running_pair(self._contenders, self._logs))
            data = {**self._prompt_data(), "event_blocks": 64, "window": MEMORY_WINDOW}
            holds = [stack.enter_context(self._generator.hold(one, **data)) for one in pair]
            yield pair, holds

    def _prompt_data(self) -> dict[str, Option]:
        """Returns options for chains that are long enough for half of the longest prompt."""
        return {"pairs": self._plan.pairs, "depth": 8192, "block_size": BLOCK}

    def _prompts(
        self,
        pair: Pair,
        suite: Suite,
        kind: str,
        cpu_limits: dict[int, float],
        case_name: Callable[[int], str],
    ) -> list[Case]:
        cases = []
        for tokens, cpu_limit in cpu_limits.items():
            prompt: dict[str, Option] = {"kind": kind, "tokens": tokens, "hit": HIT}
            self._check_same(pair, f"/{kind}", prompt, tokens)
            for connections in CONNECTIONS:
                limits = {CPU.key: cpu_limit}
                if connections > 1:
                    limits[P99.key] = P99_AT_MANY
                case = Case(suite, f"{case_name(tokens)}, c{connections}", limits)
                self._load(pair, case, {**self._prompt_data(), **prompt, "conns": connections})
                cases.append(case)
        return cases

    def _tiered(self, pair: Pair) -> list[Case]:
        cases = []
        for tokens, cpu_limit in HASH_CPU.items():
            for connections in CONNECTIONS:
                case = Case(TIERED, f"{_hash_case(tokens)}, c{connections}", {CPU.key: cpu_limit})
                load = {**self._prompt_data(), "tokens": tokens, "hit": HIT, "conns": connections}
                kinds = dict(zip(pair, ("query_tiered_by_hash", "query_by_hash"), strict=True))
                self._rounds(case, pair, partial(self._ask_each, kinds, load))
                cases.append(case)
        return cases

    def _ask_each(
        self, kinds: dict[Server, str], load: dict[str, Option], server: Server
    ) -> Result:
        timing = {"secs": self._plan.seconds, "warm": self._plan.warm}
        return self._generator.run("http", server, **load, **timing, kind=kinds[server])

    def _check_same(self, pair: Pair, path: str, prompt: dict[str, Option], tokens: int) -> None:
        bodies = self._generator.bodies(**self._prompt_data(), **prompt, count=8)
        check_equal(pair, path, bodies, matched=int(tokens * HIT))

    def _latency(self, holds: list[Hold], name: str, beside: str) -> Case:
        case = Case(LATENCY, name, FRESH_LIMITS.get(name, {}))
        log(f"{LATENCY.name}: {case.name}")
        for hold in holds:
            hold.ask("fresh 10")  # the first ones find cold caches and sleeping threads
        for _ in range(self._plan.rounds):
            for hold, results in zip(holds, case.runs, strict=True):
                results.append(hold.ask(f"fresh {self._plan.samples} {beside}"))
        return case

    def _ingest(self) -> list[Case]:
        cases = []
        for (blocks, events), limit in INGEST_CPU.items():
            name = f"{blocks} blocks/event, {events} events/batch"
            case = Case(INGEST, name, {"cpu_us_per_block": limit} if limit else {})
            shape = {"event_blocks": blocks, "batch_events": events}
            self._fresh_rounds(case, "ingest", {**self._fill(), **shape})
            cases.append(case)
        return cases

    def _memory(self) -> list[Case]:
        cases = []
        for name, shape in MEMORY_SHAPES.items():
            limits = {"rss_bytes_per_pair": MEMORY_PER_PAIR}
            if name in MEMORY_RSS:
                limits["rss_after_mib"] = MEMORY_RSS[name]
            case = Case(MEMORY, name, limits)
            self._fresh_rounds(case, "ingest", {**self._fill(), **shape, "window": MEMORY_WINDOW})
            cases.append(case)
        return cases

    def _burst(self) -> list[Case]:
        cases = []
        for name, shape in BURST_SHAPES.items():
            limits = {"rss_after_mib": BURST_RSS[name]}
            case = Case(BURST, f"{self._plan.pairs:,} messages, {name}", limits)
            blast = {"event_blocks": 1, "batch_events": 1, "rest": BURST_REST}
            self._fresh_rounds(case, "ingest", {**self._fill(), **shape, **blast})
            cases.append(case)
        return cases

    def _registrations(self) -> list[Case]:
        blocks = REGISTERED_BLOCKS
        held: dict[str, Option] = {"depth": blocks, "event_blocks": blocks, "prefix": 0}
        cases = []
        for workers in REGISTERED:
            case = Case(REGISTRATIONS, f"{workers} workers")
            shape = {"workers": workers, "pairs": workers * blocks, "rest": REGISTERED_REST}
            self._fresh_rounds(case, "ingest", {**self._fill(), **held, **shape})
            cases.append(case)
        return cases

    def _fill(self) -> dict[str, Option]:
        return {"pairs": self._plan.pairs, "block_size": BLOCK}

    def _recovery(self) -> list[Case]:
        """Measures dumps and replicas on fresh pairs.

        The measured dumps come first: a later dump would reuse memory that an earlier one has
        grown, and seem to need none.
        """
        dump = Case(DUMP, f"{self._plan.pairs:,} pairs", DUMP_LIMITS)
        own = Case(REPLICA, "of its own kind", REPLICA_LIMITS)
        other = Case(REPLICA, "of the other kind")  # no limits: half of the work is the donor's
        prompt: dict[str, Option] = {"kind": "query", "tokens": 2048, "hit": HIT}
        for _ in range(self._plan.rounds):
            with self._filled_pair() as (pair, _):
                log(f"{DUMP.name}: dumps")
                data = {**self._prompt_data(), **prompt}
                load = {**data, "secs": self._plan.seconds, "warm": self._plan.warm}
                for server, results in zip(pair, dump.runs, strict=True):
                    results.append(dump_under_load(self._generator, server, load))
                log(f"{DUMP.name}: replicas")
                (body,) = self._generator.bodies(**data, count=1)
                for case, donors in ((own, pair), (other, pair[::-1])):
                    for one, donor, results in zip(
                        self._contenders, donors, case.runs, strict=True
                    ):
                        results.append(replica(one, donor, self._logs, body))
        return [dump, own, other]


def _token_case(tokens: int) -> str:
    return f"{tokens:,} tokens"


def _hash_case(tokens: int) -> str:
    return f"{tokens // BLOCK:,} hashes"
