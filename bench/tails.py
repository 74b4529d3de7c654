"""Measures latencies of queries beside other work, and how long kvd's loop is held, by which cause.

    python bench/tails.py [CASE ...] [--seconds 5] [--rounds 3] [--peer-python PEER/bin/python]

One connection sends one question after the other, a /query of 512 tokens unless a case says
otherwise. Meanwhile, by case:

    events-N         engines publish 100,000 or 500,000 blocks/s over N streams: 64 blocks an event,
                     and as many are removed again
    dump             dumps are written
    cold             the first dump is written, which loads Quart
    scrape           /metrics is written, of 512 streams
    snapshot         snapshots are written
    recovery         the daemon recovers from another one
    fill             1,000,000 blocks are stored in an empty index
    pool             a worker comes and goes beside 512 of 8 ranks; the question is /select
    registration     workers of 4,096 ranks come and go; the question is /potential_loads
    listeners        a worker of 512 ranks with events comes and goes
    fleet            512 workers of a fleet file come and go
    unregistration   511 of 512 workers leave
    selections       1,000 selections wait; the question is /overlap_scores

Each case has a fresh daemon. Those about the index begin with 1,000,000 blocks, or half of that
over 512 streams; a recovery is of 4,000,000. Cases that the peer has as well are measured on both,
one after the other. A stretch is the time from one check of the sockets to the next
(docs/operations.md, How busy the loop is).

Each case is run `--rounds` times. A long step of kvd's comes again in every round, a moment in
which the machine stood still does not. So a row has the longest stretch of the round that had the
shortest one ("in every round": no less than this is kvd's), and the longest ones of the worst
round. The other figures are medians. The last line says how long work that is always the same takes
on this machine, for four times as long as a case: stretches of one round that are longer by as much
need not be kvd's.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Event, Thread

import machine
from errors import BenchError, run
from generator import Generator, Hold, Option, Result, build
from servers import Contender, Server, free_ports, running, running_on
from stretches import Reading, Stretch

HERE = Path(__file__).resolve().parent

STREAMS = (8, 64, 512)
RATES = (100_000, 500_000)  # blocks/s
EVENT_BLOCKS = 64
DEPTH = 1024  # blocks of a chain
PAIRS = {8: 1_000_000, 64: 1_000_000, 512: 524_288}
RECOVERED = 4_000_000  # blocks; to recover them takes more than a second
WINDOW = 20_000  # blocks on their way while an index is filled
TIMEOUT = 60.0  # seconds
WARM_S = 0.2  # before measuring

# Seconds of queries beside what happens once, and before them; it takes longer than both.
ONCE: dict[str, Option] = {"secs": 0.3, "warm": 0.05}

WAITING = 1_000  # selections
BATCH = 100_000  # tokens that make a worker busy
POOL, POOL_RANKS = 512, 8  # workers that can be selected, and ranks of each
WIDE, WIDE_WORKERS = 4096, 15  # ranks of a worker, its bound; a ledger has room for 16 of these
LISTENERS = 512  # ranks with events that come and go
STAY_S = 0.3  # that they stay, or are away: longer than it takes them to connect
MODEL = {"model_name": "bench"}

Beside = Callable[[], None]  # does a piece of work; called beside the queries, again and again


@dataclass(frozen=True)
class Round:
    """What one round of a case has found."""

    figures: Result
    over_1_ms: int = 0  # stretches
    over_5_ms: int = 0
    longest: list[Stretch] = field(default_factory=list)  # of each cause; empty for the peer

    @property
    def longest_own(self) -> Stretch:
        """The stretch with the most CPU time."""
        return max(self.longest, key=lambda stretch: stretch.own_ms)


@dataclass(frozen=True)
class Bench:
    """The contender, and what every case needs to measure it."""

    generator: Generator
    contender: Contender
    logs: Path
    seconds: float
    # By row of the case that is being measured.
    rounds: dict[str, list[Round]] = field(default_factory=lambda: defaultdict(list))

    def load(self, streams: int) -> dict[str, Option]:
        asked: dict[str, Option] = {"kind": "query", "tokens": 512, "hit": 0.5, "conns": 1}
        return {**asked, "secs": self.seconds, "warm": WARM_S, **data(streams)}

    @contextmanager
    def filled(self, streams: int, *flags: str) -> Iterator[tuple[Server, Hold]]:
        """Yields a server that has indexed the blocks of `streams` engines."""
        contender = replace(self.contender, command=(*self.contender.command, *flags))
        with ExitStack() as stack:
            server = stack.enter_context(running(contender, self.logs))
            options: dict[str, Option] = {"event_blocks": EVENT_BLOCKS, "window": WINDOW}
            hold = self.generator.hold(server, **data(streams), **options)
            yield server, stack.enter_context(hold)

    def measure(self, case: str, server: Server, asked: dict[str, Option], beside: Beside) -> None:
        """Runs queries while a thread calls `beside` again and again; keeps what it finds."""
        before = self._reading(server)
        with repeated(beside):
            figures = self.generator.run("http", server, **asked)
        after = self._reading(server)
        found = Round(figures)
        if before is not None and after is not None:
            over = after.over(before, 0.001), after.over(before, 0.005)
            found = Round(figures, *over, after.longest(before))
        self.rounds[case].append(found)

    def _reading(self, server: Server) -> Reading | None:
        return Reading.of(server) if self.contender.name == "kvd" else None

    def print_rows(self) -> None:
        """Prints a row for each that the rounds of a case have found, and forgets them."""
        for case, rounds in self.rounds.items():
            cells = [f"{self.contender.name}: {case}"]
            for key in ("p50_us", "p99_us", "p999_us", "max_us"):
                cells.append(f"{statistics.median(each.figures[key] for each in rounds):,.0f}")
            if rounds[0].longest:
                cells.append(f"{statistics.median(each.over_1_ms for each in rounds):,.0f}")
                cells.append(f"{statistics.median(each.over_5_ms for each in rounds):,.0f}")
                ranked = sorted(rounds, key=lambda each: each.longest_own.own_ms)
                longest = ", ".join(map(str, ranked[-1].longest[:4]))
                cells += [str(ranked[0].longest_own), longest]
            else:
                cells += [""] * 4
            print(f"| {' | '.join(cells)} |", flush=True)
        self.rounds.clear()


def data(streams: int) -> dict[str, Option]:
    return {"pairs": PAIRS[streams], "workers": streams, "depth": DEPTH, "block_size": 16}


@contextmanager
def repeated(beside: Beside) -> Iterator[None]:
    """Calls a function again and again in a thread; raises BenchError if it has failed."""
    ended, failures = Event(), []

    def repeat() -> None:
        try:
            while not ended.is_set():
                beside()
        except Exception as error:
            failures.append(error)  # raised below

    thread = Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if failures:
        raise BenchError(f"beside the queries: {failures[0]!r}")


def ask(port: int, method: str, path: str, members: object = None) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    body = None if members is None else json.dumps(members)
    connection.request(method, path, body, {"content-type": "application/json"})
    answer = connection.getresponse()
    found = answer.read()
    connection.close()
    if answer.status not in (200, 201):
        raise BenchError(f"{method} {path}: {answer.status} {found[:300]!r}")
    return found


def nothing() -> None:
    time.sleep(0.01)


def events(bench: Bench, streams: int) -> None:
    with bench.filled(streams) as (server, hold):
        asked = bench.load(streams)
        bench.measure(f"{streams} streams, no events", server, asked, nothing)
        hold.ask(f"churn {max(RATES)} 0.5 {EVENT_BLOCKS}")  # from now on as much is removed
        for rate in RATES:
            order = f"churn {rate} {bench.seconds / 2:g} {EVENT_BLOCKS}"
            reached: list[float] = []

            def churn(order: str = order, reached: list[float] = reached) -> None:
                reached.append(hold.ask(order)["blocks_per_s"])

            case = f"{streams} streams, {rate:,} blocks/s"
            bench.measure(case, server, asked, churn)
            if min(reached) < 0.95 * rate:
                print(f"  (only {min(reached):,.0f} blocks/s were published)", file=sys.stderr)


def dump(bench: Bench) -> None:
    with bench.filled(8) as (server, _):
        bench.measure("dumps", server, bench.load(8), asking(server, "/dump"))


def cold(bench: Bench) -> None:
    with bench.filled(8) as (server, _):
        paths = iter(["/dump"])

        def once() -> None:
            path = next(paths, None)
            if path is None:
                nothing()
            else:
                ask(server.port, "GET", path)

        bench.measure("the first dump, which loads Quart", server, bench.load(8), once)


def scrape(bench: Bench) -> None:
    with bench.filled(512) as (server, _):
        asked = bench.load(512)
        bench.measure("scrapes, 512 streams", server, asked, asking(server, "/metrics"))


def asking(server: Server, path: str) -> Beside:
    def get() -> None:
        ask(server.port, "GET", path)

    return get


def snapshot(bench: Bench) -> None:
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--state-dir={folder}", "--snapshot-s=0.01"
        with bench.filled(8, *flags) as (server, _):
            bench.measure("snapshots", server, bench.load(8), nothing)


def recovery(bench: Bench) -> None:
    wide = {**data(8), "pairs": RECOVERED}
    options: dict[str, Option] = {"event_blocks": EVENT_BLOCKS, "window": WINDOW}
    with ExitStack() as stack:
        donor = stack.enter_context(running(bench.contender, bench.logs))
        stack.enter_context(bench.generator.hold(donor, **wide, **options))
        engine = json.loads(ask(donor.port, "GET", "/workers"))[0]["listeners"]["0"]["endpoint"]
        # It has a worker of its own, so that queries for the model work at once.
        own = "--model-name=bench", "--block-size=16", f"--workers=9={engine}"
        peers = "--peers", f"http://{donor.address}"
        contender = replace(bench.contender, command=(*bench.contender.command, *own, *peers))
        server = stack.enter_context(running(contender, bench.logs))

        def recovers() -> None:
            until(lambda: b'{outcome="recovered"} 1' in ask(server.port, "GET", "/metrics"))

        # The queries end before it does; the stretches are those of all of it.
        asked = {**bench.load(8), **ONCE}
        bench.measure(f"recovery of {RECOVERED:,} blocks", server, asked, recovers)


def fill(bench: Bench) -> None:
    # It has a worker of its own, so that queries for the model work at once.
    own = "--model-name=bench", "--block-size=16", "--workers=9999=tcp://127.0.0.1:1"
    contender = replace(bench.contender, command=(*bench.contender.command, *own))
    with ExitStack() as stack:
        server = stack.enter_context(running(contender, bench.logs))
        options: dict[str, Option] = {"event_blocks": EVENT_BLOCKS, "window": WINDOW}
        left = [data(8)]

        def publish() -> None:
            if left:
                stack.enter_context(bench.generator.hold(server, **left.pop(), **options))
            else:
                nothing()

        case = f"{PAIRS[8]:,} blocks are stored in an empty index"
        bench.measure(case, server, bench.load(8), publish)


def unregistration(bench: Bench) -> None:
    with bench.filled(512) as (server, _):
        leaving = iter(range(1, 512))  # one stays, or queries for the model would fail

        def leave() -> None:
            worker = next(leaving, None)
            if worker is None:
                print("  (all had left before the queries ended)", file=sys.stderr)
                nothing()
            else:
                ask(server.port, "POST", "/unregister", {"instance_id": worker, **MODEL})

        asked = {**bench.load(512), **ONCE}
        bench.measure("512 workers are unregistered, one by one", server, asked, leave)


def selections(bench: Bench) -> None:
    (port,) = free_ports(1)
    faces = "--indexer-bind=off", "--slot-tracker-bind=off", "--conductor-bind=off"
    flags = *faces, f"--selection-bind=127.0.0.1:{port}", "--router-queue-threshold=1"
    patience = "--router-queue-s=600", "--http-handler-s=600"
    command = (*bench.contender.command[:-1], "serve", *flags, *patience)
    with ExitStack() as stack:
        select = replace(bench.contender, command=command)
        server = stack.enter_context(running_on(select, port, bench.logs))
        for worker in range(1, 9):
            make_busy(server, worker)
        for number in range(WAITING):
            stack.enter_context(waiting(server, number))
        until(lambda: json.loads(ask(server.port, "GET", "/loads"))[0]["pending_count"] == WAITING)
        body = json.dumps({**MODEL, "token_ids": [7] * 512})
        asked: dict[str, Option] = {"kind": "raw", "path": "/overlap_scores", "body": body}
        asked |= {"conns": 1, "secs": bench.seconds, "warm": WARM_S}

        def move() -> None:
            reserve(server, "moving", 1, 1)
            ask(server.port, "DELETE", "/reservations/moving")

        bench.measure(f"{WAITING:,} selections wait, loads change", server, asked, move)
        busy = iter(range(1, 9))

        def free() -> None:
            time.sleep(2 * WARM_S)  # until the queries are being measured
            worker = next(busy, None)
            if worker is not None:
                ask(server.port, "DELETE", f"/reservations/busy-{worker}")

        bench.measure(f"{WAITING:,} selections are served", server, asked, free)


def pool(bench: Bench) -> None:
    (port,) = free_ports(1)
    faces = "--indexer-bind=off", "--slot-tracker-bind=off", "--conductor-bind=off"
    command = (*bench.contender.command[:-1], "serve", *faces, f"--selection-bind=127.0.0.1:{port}")
    with running_on(replace(bench.contender, command=command), port, bench.logs) as server:
        records = [wide_record(worker) for worker in range(1, POOL + 1)]
        for record in records:
            ask(port, "POST", "/workers", record | {"data_parallel_size": POOL_RANKS})
        body = json.dumps({"model_name": "wide", "token_ids": [7] * 512})
        asked: dict[str, Option] = {"kind": "raw", "path": "/select", "body": body}
        asked |= {"conns": 1, "secs": bench.seconds, "warm": WARM_S}

        def come_and_go() -> None:
            record = wide_record(POOL + 1) | {"data_parallel_size": POOL_RANKS}
            ask(port, "POST", "/workers", record)
            time.sleep(STAY_S)
            ask(port, "DELETE", f"/workers/{POOL + 1}")
            time.sleep(STAY_S)

        case = f"a worker comes and goes beside {POOL} of {POOL_RANKS} ranks"
        bench.measure(case, server, asked, come_and_go)


def registration(bench: Bench) -> None:
    tracker, selection = free_ports(2)
    faces = "--indexer-bind=off", "--conductor-bind=off", f"--selection-bind=127.0.0.1:{selection}"
    flags = *faces, f"--slot-tracker-bind=127.0.0.1:{tracker}"
    slots = replace(bench.contender, command=(*bench.contender.command[:-1], "serve", *flags))
    with running_on(slots, tracker, bench.logs) as server:
        asked: dict[str, Option] = {"kind": "raw", "path": "/potential_loads"}
        body = json.dumps({**MODEL, "sequence_hashes": [7] * 32, "isl_tokens": 512})
        asked |= {"body": body, "conns": 1, "secs": bench.seconds, "warm": WARM_S}
        ask(tracker, "POST", "/register", wide("bench", 1) | {"dp_size": 8})

        def come_and_go() -> None:
            for worker in range(WIDE_WORKERS, 0, -1):  # each before those that are there
                ask(tracker, "POST", "/register", wide("wide", worker))
                ask(selection, "POST", "/workers", wide_record(worker))
            ask(selection, "GET", "/workers")
            for worker in range(1, WIDE_WORKERS + 1):
                where = {"model_name": "wide", "worker_id": worker}
                ask(tracker, "POST", "/unregister", where)
                ask(selection, "DELETE", f"/workers/{worker}")

        case = f"workers with {WIDE:,} ranks come and go"
        bench.measure(case, server, asked, come_and_go)


def listeners(bench: Bench) -> None:
    """Each rank subscribes to one of the eight engines whose blocks are asked for."""
    with indexing(bench, "--selection-bind=127.0.0.1:{selection}") as (server, selection, engines):

        def come_and_go() -> None:
            record = wide_record(1) | {"data_parallel_size": LISTENERS, "without_kv_events": False}
            places = {str(rank): engines[rank % len(engines)] for rank in range(LISTENERS)}
            ask(selection, "POST", "/workers", record | {"kv_events_endpoints": places})
            time.sleep(STAY_S)
            ask(selection, "DELETE", "/workers/1")
            time.sleep(STAY_S)

        case = f"a worker with {LISTENERS} listeners comes and goes"
        bench.measure(case, server, bench.load(8), come_and_go)


def fleet(bench: Bench) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "fleet.toml")
        path.touch()
        flags = "--selection-bind=off", f"--fleet-file={path}"
        with indexing(bench, *flags) as (server, _, engines):

            def come_and_go() -> None:
                for count in (LISTENERS, 0):
                    new = path.with_suffix(".new")
                    new.write_text("".join(fleet_row(each, engines) for each in range(count)))
                    new.rename(path)
                    os.kill(server.pid, signal.SIGHUP)
                    time.sleep(2 * STAY_S)

            case = f"{LISTENERS} workers of a fleet file come and go"
            bench.measure(case, server, bench.load(8), come_and_go)


@contextmanager
def indexing(bench: Bench, *flags: str) -> Iterator[tuple[Server, int, list[str]]]:
    """Yields an indexer with the blocks of eight engines, a port for `flags`, and the engines."""
    port, selection = free_ports(2)
    faces = [f"--indexer-bind=127.0.0.1:{port}", "--slot-tracker-bind=off", "--conductor-bind=off"]
    faces += [flag.format(selection=selection) for flag in flags]
    command = (*bench.contender.command[:-1], "serve", *faces)
    with running_on(replace(bench.contender, command=command), port, bench.logs) as server:
        options: dict[str, Option] = {"event_blocks": EVENT_BLOCKS, "window": WINDOW}
        with bench.generator.hold(server, **data(8), **options):
            rows = json.loads(ask(port, "GET", "/workers"))
            yield server, selection, [row["listeners"]["0"]["endpoint"] for row in rows]


def fleet_row(worker: int, engines: list[str]) -> str:
    where = f'model_name = "wide"\nblock_size = 16\nendpoint = "{engines[worker % len(engines)]}"'
    return f"[[indexer]]\ninstance_id = {worker}\n{where}\n\n"


def wide(model: str, worker: int) -> dict[str, object]:
    place = {"model_name": model, "worker_id": worker, "block_size": 16}
    return place | {"dp_start": 0, "dp_size": WIDE}


def wide_record(worker: int) -> dict[str, object]:
    place = {"model_name": "wide", "worker_id": worker, "endpoint": "http://127.0.0.1:1"}
    return place | {"block_size": 16, "data_parallel_size": WIDE, "without_kv_events": True}


def make_busy(server: Server, worker: int) -> None:
    record = MODEL | {
        "worker_id": worker,
        "endpoint": "http://127.0.0.1:1",
        "block_size": 16,
        "max_num_batched_tokens": BATCH,
        "kv_events_endpoints": {"0": f"tcp://127.0.0.1:{worker}"},
    }
    ask(server.port, "POST", "/workers", record)
    reserve(server, f"busy-{worker}", worker, BATCH + 1)


def reserve(server: Server, name: str, worker: int, tokens: int) -> None:
    prompt = {"sequence_hashes": [worker], "isl_tokens": tokens, **MODEL}
    place = {"worker_id": worker, "effective_prefill_tokens": tokens}
    ask(server.port, "POST", "/reservations", {"reservation_id": name, **place, **prompt})


def waiting(server: Server, number: int) -> socket.socket:
    """Asks for a reservation; returns the connection, on which the answer is still to come."""
    hashes = [number * 100 + each for each in range(8)]
    members = {"block_hashes": hashes, "sequence_hashes": hashes, "isl_tokens": 128}
    body = json.dumps({**MODEL, **members, "reservation_id": f"waiting-{number}"})
    head = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    client = socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT)
    client.sendall(f"POST /select_and_reserve HTTP/1.1\r\n{head}\r\n\r\n{body}".encode())
    return client


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        if time.monotonic() > deadline:
            raise BenchError("what was waited for has not come")
        time.sleep(0.05)


EVENTS = {f"events-{streams}": partial(events, streams=streams) for streams in STREAMS}
CASES: dict[str, Callable[[Bench], None]] = EVENTS | {
    "dump": dump,
    "cold": cold,
    "scrape": scrape,
    "snapshot": snapshot,
    "recovery": recovery,
    "fill": fill,
    "pool": pool,
    "registration": registration,
    "listeners": listeners,
    "fleet": fleet,
    "unregistration": unregistration,
    "selections": selections,
}
OF_PEER = [*EVENTS, "dump"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=1, help="of each case")
    parser.add_argument("--peer-python", metavar="PY", help="interpreter that has dynamo")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if unknown := set(options.cases) - CASES.keys():
        parser.error(f"unknown case {', '.join(sorted(unknown))}")
    logs = HERE / "build"
    generator = Generator(build(logs))
    kvd = Contender("kvd", (sys.executable, "-m", "kvd", "indexer"), HERE.parent)
    benches = [Bench(generator, kvd, logs, options.seconds)]
    if options.peer_python:
        peer = Contender("peer", (options.peer_python, "-m", "dynamo.indexer"), logs)
        benches.append(replace(benches[0], contender=peer))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("tails.py: terminated"))
    print(machine.describe(), machine.commit(HERE), sep="; ", end="; ")
    print(f"load average {os.getloadavg()[0]:.1f} before\n")
    print("| case | p50 µs | p99 µs | p99.9 µs | longest µs | stretches > 1 ms | > 5 ms |", end="")
    print(" in every round, ms | longest stretches, ms |\n|---|---|---|---|---|---|---|---|---|")
    other = machine.OtherLoad()
    for name in options.cases or CASES:
        for bench in benches[: 1 + (name in OF_PEER)]:
            for _ in range(options.rounds):
                CASES[name](bench)
            bench.print_rows()
    print(f"\nOther processes used {other.cores():.2f} cores.")
    work = machine.fixed_work(4 * options.seconds)
    p50, p99 = (work[len(work) * at // 100] for at in (50, 99))
    late = sum(each - p50 > 5 for each in work)
    print(
        f"Of {len(work):,} times the same work beside a busy process, {late} took over 5 ms of CPU "
        f"more than the {p50:.1f} at p50 (p99 {p99:.1f}, longest {work[-1]:.1f})."
    )


if __name__ == "__main__":
    run(main)
