"""Measures the memory of a registered rank, by RSS.

    python bench/registrations.py [--workers 64 512]

Each rank has 16 blocks and a connected engine. Each number of ranks gets a fresh daemon.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from generator import Generator, Option, build
from servers import Contender, Server, running

HERE = Path(__file__).resolve().parent
BLOCKS = 16  # of a rank
REST_S = 5.0


def resident_kb(server: Server) -> float:
    pages = int(Path(f"/proc/{server.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[64, 512])
    logs = HERE / "build"
    generator = Generator(build(logs))
    kvd = Contender("kvd", (sys.executable, "-m", "kvd", "indexer"), HERE.parent)
    print("| ranks | RSS before, MiB | KiB a rank |\n|---|---|---|")
    for workers in parser.parse_args().workers:
        data: dict[str, Option] = {"workers": workers, "pairs": workers * BLOCKS, "depth": BLOCKS}
        with running(kvd, logs) as server:
            before = resident_kb(server)
            with generator.hold(server, **data, prefix=0, event_blocks=BLOCKS):
                time.sleep(REST_S)
                grown = resident_kb(server) - before
            print(f"| {workers} | {before / 1024:.1f} | {grown / workers:.1f} |", flush=True)


if __name__ == "__main__":
    main()
