"""Measures how long a request takes on one connection: by a server that only answers, and by kvd.

    python bench/floor.py [--rounds N]

No server answers sooner on this machine than the first two, of which one sleeps until a request
comes and the other polls for it; nor does kvd sooner than `GET /loads` without workers, asleep or
awake. Prints medians.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median

from generator import Generator, build
from machine import describe
from servers import Contender, running

HERE = Path(__file__).resolve().parent
LOGS = HERE / "build"
FIGURES = ("cpu_us", "p50_us", "p99_us")


def contenders(kvbench: Path) -> list[Contender]:
    tracker = (sys.executable, "-m", "kvd", "slot-tracker")
    return [
        Contender("nothing, asleep", (str(kvbench), "echo", "--awake", "0"), HERE),
        Contender("nothing, awake", (str(kvbench), "echo", "--awake", "1"), HERE),
        Contender("kvd, asleep", ("env", "KVD_HTTP_BUSY_WAIT_US=0", *tracker), HERE.parent),
        Contender("kvd, awake", ("env", "KVD_HTTP_BUSY_WAIT_US=50", *tracker), HERE.parent),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    kvbench = build(LOGS)
    generator = Generator(kvbench)
    print(describe(), "| server | CPU us | p50 us | p99 us |\n|---|---|---|---|", sep="\n\n")
    for contender in contenders(kvbench):
        with running(contender, LOGS) as server:
            asked = [
                generator.run("http", server, kind="get", path="/loads") for _ in range(rounds)
            ]
        medians = [f"{median(result[figure] for result in asked):.1f}" for figure in FIGURES]
        print(f"| {contender.name} |", " | ".join(medians), "|", flush=True)


if __name__ == "__main__":
    main()
