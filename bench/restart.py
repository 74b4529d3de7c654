"""Measures how soon a stopped or killed kvd is back, and the cost of keeping its state.

    python bench/restart.py [--blocks 1000000] [--peer-python /path/to/venv/bin/python]

Restart: 16 engines with replay servers hold the blocks, in batches of 64 blocks of 16 tokens. A kvd
with a state directory receives all batches, is ended by SIGTERM or SIGKILL, and started again;
meanwhile each engine publishes one more batch. The times from exec until the first correct answer
to /query and until all streams are `exact` are measured. The same is measured for a kvd without
state, which replays everything, and with --peer-python for Dynamo's indexer, which recovers from a
kvd with the same blocks.

Cost: the life of a request (/add of 2,048 tokens in blocks of 16, /prefill_complete, /free) on two
slot trackers, with a state directory and without, in turns over one connection each: CPU over all
threads of the process, and wall time p50 and p99. Also /query of 512 tokens on the full index while
snapshots are written one after the other, and while none is written.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

from daemons import LIVES, MODEL, ROUNDS, Client, asks, is_there, lives, p50_p99, started, until
from errors import BenchError
from machine import cpu_s
from replay_engines import BATCH_BLOCKS, BLOCK_SIZE, ENGINES, Engines, tokens_of
from servers import free_ports

QUESTIONS = 20_000


def is_found(port: int) -> bool:
    """Returns whether a prompt of the last engine is found in full."""
    question = MODEL | {"token_ids": tokens_of(ENGINES - 1, 0)}
    scores: dict[str, dict[str, int]] = asks(port, "/query", question)["scores"]
    return scores.get(str(ENGINES), {}).get("0") == BATCH_BLOCKS * BLOCK_SIZE


def is_connected(port: int) -> bool:
    """Returns whether all listeners are connected; lets their subscriptions arrive meanwhile."""
    rows = asks(port, "/workers")
    time.sleep(0.2)
    return all(row["status"] == "active" for row in rows)


def is_exact(port: int) -> bool:
    rows = asks(port, "/workers")
    return len(rows) == ENGINES and all(row["stream"] == "exact" for row in rows)


def kvd_command(port: int, engines: Engines, *flags: str) -> list[str]:
    command = [sys.executable, "-m", "kvd", "indexer", "--port", str(port), "--block-size", "16"]
    return [*command, "--model-name", "m", "--workers", engines.workers(), *flags]


def back(
    command: list[str], port: int, log: Path, engines: Engines, *, publishes_more: bool = True
) -> tuple[float, float]:
    """Returns seconds from exec to the first correct answer, and until all streams are exact."""
    if publishes_more:
        engines.publish_one_more()
        until(lambda: engines.is_done, "published")
    began = time.monotonic()
    with started(command, log):
        until(lambda: is_found(port), "answering")
        found = time.monotonic() - began
        if not publishes_more:
            before = engines.subscribers
            until(lambda: is_there(port) and engines.subscribers >= before, "there")
            engines.publish_one_more()
        until(lambda: is_exact(port), "exact")
        return found, time.monotonic() - began


def restarts(blocks: int, peer: str | None, folder: Path) -> None:
    engines = Engines(blocks)
    port, other = free_ports(2)
    log = folder / "restart.log"
    state = f"--state-dir={folder / 'state'}"
    try:
        for name, number in (("SIGTERM", signal.SIGTERM), ("SIGKILL", signal.SIGKILL)):
            command = kvd_command(port, engines, state, "--snapshot-s=2")
            with started(command, log) as process:
                until(lambda: is_there(port), "healthy")
                until(lambda: engines.subscribers >= ENGINES, "subscribed")
                engines.publish_all()
                until(lambda: engines.is_done and is_exact(port), "exact")
                time.sleep(4)  # a snapshot has all of it
                process.send_signal(number)
                process.wait()
            found, exact = back(command, port, log, engines)
            print(f"kvd after {name:8}  first answer {found:5.2f} s   exact {exact:5.2f} s")
        size = (folder / "state" / "index").stat().st_size
        print(f"snapshot {size / 1e6:.1f} MB of {blocks} blocks")
        cold(engines, port, log)
        if peer is not None:
            peers(engines, peer, port, other, log)
    finally:
        engines.close()


def cold(engines: Engines, port: int, log: Path) -> None:
    """Measures a kvd without state, which replays all batches of each engine."""
    began = time.monotonic()
    with started(kvd_command(port, engines), log):
        until(lambda: is_there(port), "healthy")
        until(lambda: is_connected(port), "connected")
        engines.publish_one_more()
        until(lambda: is_found(port), "answering")
        found = time.monotonic() - began
        until(lambda: is_exact(port), "exact")
        exact = time.monotonic() - began
    print(f"kvd without state     first answer {found:5.2f} s   exact {exact:5.2f} s")


def peers(engines: Engines, peer: str, port: int, other: int, log: Path) -> None:
    """Measures Dynamo's indexer, which takes the dump of a kvd that engines have filled."""
    command = [peer, "-m", "dynamo.indexer", "--block-size", "16", "--model-name", "m"]
    with started(kvd_command(port, engines), log):
        until(lambda: is_there(port), "healthy")
        until(lambda: is_connected(port), "connected")
        engines.publish_one_more()
        until(lambda: is_exact(port), "exact")
        began = time.monotonic()
        recover = [*command, "--port", str(other), "--peers", f"http://127.0.0.1:{port}"]
        with started(recover, log):
            until(lambda: is_found(other), "answering")
            print(f"Dynamo from a peer    first answer {time.monotonic() - began:5.2f} s")


def bookings(folder: Path) -> None:
    """Measures what the journal costs a request."""
    ports = free_ports(2)
    flags: tuple[list[str], ...] = ([], [f"--state-dir={folder / 'slots'}"])
    with ExitStack() as stack:
        pids, clients = [], []
        for port, own in zip(ports, flags, strict=True):
            command = [sys.executable, "-m", "kvd", "slot-tracker", "--port", str(port), *own]
            pids.append(stack.enter_context(started(command, folder / "slots.log")).pid)
            until(partial(is_there, port), "healthy")
            client = Client(port)
            stack.callback(client.close)
            worker = {"worker_id": 1, "block_size": 16, "dp_start": 0, "dp_size": 1}
            client.ask("POST", "/register", {**MODEL, **worker})
            clients.append(client)
        took: list[list[float]] = [[], []]
        cpu: list[list[float]] = [[], []]
        for turn in range(ROUNDS):
            for which in (0, 1):
                before = cpu_s(pids[which])
                took[which] += lives(clients[which], turn * LIVES)
                cpu[which].append((cpu_s(pids[which]) - before) / LIVES * 1e6)
        for which, name in enumerate(("without", "with")):
            p50, p99 = p50_p99(took[which])
            print(
                f"life of a request {name:7} state: {median(cpu[which]):6.1f} us CPU, "
                f"p50 {p50 * 1e6:6.0f} us, p99 {p99 * 1e6:6.0f} us"
            )
        text = sum(path.stat().st_size for path in (folder / "slots").glob("journal.*"))
        print(f"journal {text / (ROUNDS * LIVES):.0f} bytes a request of 128 blocks")


def questions(blocks: int, folder: Path) -> None:
    """Measures what snapshots cost questions."""
    engines = Engines(blocks)
    (port,) = free_ports(1)
    try:
        for name, pause in (("none", "0"), ("snapshots", "0.01")):
            state = folder / f"questions-{name}"
            flags = f"--state-dir={state}", f"--snapshot-s={pause}"
            with started(kvd_command(port, engines, *flags), folder / "questions.log"):
                until(lambda: is_there(port), "healthy")
                until(lambda: is_connected(port), "connected")
                engines.publish_one_more()
                until(lambda: is_exact(port), "exact")
                # Asked by a process that does nothing else: the engines run in this one.
                asking = [sys.executable, __file__, "--ask", str(port)]
                took = json.loads(subprocess.run(asking, capture_output=True, check=True).stdout)
                p50, p99 = p50_p99(took)
                print(
                    f"/query beside {name:9}: p50 {p50 * 1e6:5.0f} us, p99 {p99 * 1e6:5.0f} us, "
                    f"longest {max(took) * 1e6:5.0f} us"
                )
    finally:
        engines.close()


def ask_again_and_again(port: int) -> None:
    """Prints the seconds of each of QUESTIONS questions."""
    client = Client(port)
    took = []
    question = MODEL | {"token_ids": tokens_of(3, 0)[:512]}
    for _ in range(QUESTIONS):
        began = time.perf_counter()
        client.ask("POST", "/query", question)
        took.append(time.perf_counter() - began)
    client.close()
    print(json.dumps(took))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--peer-python", help="Python with ai-dynamo, to be measured beside")
    parser.add_argument("--ask", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ask is not None:
        ask_again_and_again(options.ask)
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            restarts(options.blocks, options.peer_python, Path(folder))
            bookings(Path(folder))
            questions(options.blocks, Path(folder))
        except BenchError as error:
            log = Path(folder) / "restart.log"
            sys.exit(f"{error}\n{log.read_text()[-2000:] if log.exists() else ''}")


if __name__ == "__main__":
    main()
