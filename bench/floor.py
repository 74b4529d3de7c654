"""Measures how soon a server can answer, and notice an event: one that does nothing else, and kvd.

    python bench/floor.py [--rounds N]

No server answers sooner on this machine than one that only answers; nor does kvd sooner than
`GET /loads` without workers. No server shows an event sooner than one that only counts messages;
kvd shows one of a single block, among 8,192 blocks of 8 workers. Each sleeps until something comes,
or polls for it. Prints medians.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median

import machine
from errors import run
from generator import Generator, Result, build
from servers import Contender, running

HERE = Path(__file__).resolve().parent
LOGS = HERE / "build"
QUANTILES = ("p50_us", "p99_us")
EVENTS = 1000  # of a round
AWAKE = {"asleep": 0, "awake": 1}
BUSY_WAIT_US = 50  # while kvd is to be awake


def kvd(face: str, state: str) -> Contender:
    awake = f"KVD_HTTP_BUSY_WAIT_US={BUSY_WAIT_US * AWAKE[state]}"
    command = ("env", awake, sys.executable, "-m", "kvd", face)
    return Contender(f"kvd, {state}", command, HERE.parent)


def echo(kvbench: Path, state: str) -> Contender:
    command = (str(kvbench), "echo", "--awake", str(AWAKE[state]))
    return Contender(f"nothing, {state}", command, HERE)


def answers(generator: Generator, contender: Contender, rounds: int) -> list[Result]:
    with running(contender, LOGS) as server:
        return [generator.run("http", server, kind="get", path="/loads") for _ in range(rounds)]


def notices_of_kvd(generator: Generator, state: str, rounds: int) -> list[Result]:
    with running(kvd("indexer", state), LOGS) as server, generator.hold(server, pairs=8192) as hold:
        return [hold.ask(f"fresh {EVENTS}") for _ in range(rounds)]


def row(name: str, figures: tuple[str, ...], results: list[Result]) -> None:
    medians = [f"{median(result[figure] for result in results):.1f}" for figure in figures]
    print(f"| {name} |", " | ".join(medians), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    kvbench = build(LOGS)
    generator = Generator(kvbench)
    print(machine.describe(), machine.commit(HERE), sep="; ", end="\n\n")
    print("| answers | CPU us | p50 us | p99 us |\n|---|---|---|---|")
    for contender in [
        *(echo(kvbench, state) for state in AWAKE),
        *(kvd("slot-tracker", state) for state in AWAKE),
    ]:
        row(contender.name, ("cpu_us", *QUANTILES), answers(generator, contender, rounds))
    print("\n| shows an event | p50 us | p99 us |\n|---|---|---|")
    for state, awake in AWAKE.items():
        noticed = [generator.alone("notice", samples=EVENTS, awake=awake) for _ in range(rounds)]
        row(f"nothing, {state}", QUANTILES, noticed)
    for state in AWAKE:
        row(f"kvd, {state}", QUANTILES, notices_of_kvd(generator, state, rounds))


if __name__ == "__main__":
    run(main)
