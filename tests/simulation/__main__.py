"""Runs seeds: `python -m tests.simulation --seeds 0-999`; `--trace` prints each step of one."""

from __future__ import annotations

import argparse
import collections
import logging
import sys
import time
import traceback

from kvd.telemetry import logs
from tests.simulation.world import Failed, World, run_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", default="0-99", help="one seed, or the first and the last")
    parser.add_argument("--trace", action="store_true", help="say all that happens, kvd's log too")
    given = parser.parse_args()
    first, _, last = given.seeds.partition("-")
    logging.disable(logging.NOTSET if given.trace else logging.CRITICAL)
    logs.setup("info")
    totals: collections.Counter[str] = collections.Counter()
    print(f"seeds {given.seeds}", flush=True)
    started = time.monotonic()
    for seed in range(int(first), int(last or first) + 1):
        _run(seed, given.trace, totals)
    seconds = time.monotonic() - started
    print(*(f"{name}={count}" for name, count in sorted(totals.items())), f"seconds={seconds:.1f}")
    return 1 if totals["failed"] else 0


def _run(seed: int, trace: bool, totals: collections.Counter[str]) -> None:
    totals["seeds"] += 1
    try:
        count(run_seed(seed, print if trace else lambda text: None), totals)
    except Failed as failed:
        totals["failed"] += 1
        print(failed, flush=True)
        if trace:
            traceback.print_exception(failed.__cause__, file=sys.stdout)


def count(world: World, totals: collections.Counter[str]) -> None:
    """Adds up how often each event happened, to show what a run has covered."""
    totals["compared"] += world.oracle.compared
    totals["compared_restored"] += world.oracle.restored
    totals["replays_behind_wrap"] += world.network.wrapped
    totals.update(world.peers.counts)
    totals["engine_processes"] += sum(len(engine.processes) for engine in world.engines)
    totals["replica_starts"] += world.starts
    for why, times in world.oracle.excused.items():
        totals[f"excused[{why}]"] += times
    for replica in world.replicas.values():
        totals["recovered"] += replica.recovery.attempts["recovered"]
        stats = replica.registry.left_stats
        for registration in replica.registry.registrations():
            stats.add(registration.listener.stats)
        for name in ("messages", "gaps", "replayed", "lost", "restarts", "strays", "failures"):
            totals[name] += getattr(stats, name)
        for end, times in stats.replays.items():
            totals[f"replays[{end}]"] += times


if __name__ == "__main__":
    sys.exit(main())
