"""Measures kvd and Dynamo's services side by side in one run.

Both servers live at the same time and get load in turns; README.md explains the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

import machine
from errors import BenchError
from generator import Generator, build
from report import Case, as_json, markdown
from runs import FULL, QUICK, Plan
from select_suites import HASHES as SELECT
from select_suites import SelectSuites
from servers import Contender
from slot_suites import LIFE, LOADS, PROJECTION, SlotSuites
from slot_suites import MEMORY as SLOT_MEMORY
from suites import (
    BURST,
    DUMP,
    HASH,
    INGEST,
    LATENCY,
    MEMORY,
    QUERY,
    REGISTRATIONS,
    TIERED,
    IndexerSuites,
)

HERE = Path(__file__).resolve().parent
INDEXER_SUITES = (QUERY, HASH, TIERED, INGEST, MEMORY, BURST, REGISTRATIONS, LATENCY, DUMP)
SLOT_SUITES = (LIFE, PROJECTION, LOADS, SLOT_MEMORY)
SUITES = [suite.name for suite in (*INDEXER_SUITES, *SLOT_SUITES, SELECT)]

INDEXER = ("indexer", "dynamo.indexer")  # kvd's command, the peer's module
SLOT_TRACKER = ("slot-tracker", "dynamo.slot_tracker")
SELECTION = ("select-service", "dynamo.select_service")

ELSEWHERE = """
What is not a request's or event's own cost, scripts beside this one measure: tails.py (queries
beside other work), restart.py, shared_state.py and policies.py with the peer; gateway.py with other
proxies; curves.py, index_memory.py, cores.py, floor.py and others kvd alone. README.md lists all.
"""


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="compare.py", description=__doc__, epilog=ELSEWHERE)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)}")
    parser.add_argument(
        "--peer-python", metavar="PY", default="", help="interpreter that has dynamo"
    )
    parser.add_argument(
        "--kvd-python", metavar="PY", default=sys.executable, help="interpreter that has kvd"
    )
    parser.add_argument(
        "--kvd-dir", metavar="DIR", type=Path, default=HERE.parent, help="where kvd is started"
    )
    parser.add_argument(
        "--sanity",
        choices=("kvd", "peer"),
        help="this one against itself: how far from 1 ratios get by noise alone",
    )
    parser.add_argument("--quick", action="store_true", help="smoke run; its figures mean little")
    parser.add_argument("--rounds", type=int, metavar="N", help="paired runs of every case")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run to FILE")
    parser.add_argument(
        "--build-dir", type=Path, default=HERE / "build", help="for kvbench and server logs"
    )
    arguments = parser.parse_args(argv)
    _check(parser, arguments)
    return arguments


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    for name in arguments.suites:
        if name not in SUITES:
            parser.error(f"unknown suite {name}")
    if arguments.sanity != "kvd" and not arguments.peer_python:
        parser.error("--peer-python is needed")
    if arguments.rounds is not None and arguments.rounds < 1:
        parser.error("--rounds must be at least 1")


def _contenders(
    arguments: argparse.Namespace, face: tuple[str, str]
) -> tuple[Contender, Contender]:
    command, module = face
    kvd = Contender("kvd", (arguments.kvd_python, "-m", "kvd", command), arguments.kvd_dir)
    peer = Contender("peer", (arguments.peer_python, "-m", module), arguments.build_dir)
    if not arguments.sanity:
        return kvd, peer
    one = kvd if arguments.sanity == "kvd" else peer
    return replace(one, name=f"{one.name}-a"), replace(one, name=f"{one.name}-b")


def _plan(arguments: argparse.Namespace) -> Plan:
    plan = QUICK if arguments.quick else FULL
    return replace(plan, rounds=arguments.rounds) if arguments.rounds else plan


def _facts(arguments: argparse.Namespace, plan: Plan) -> dict[str, str]:
    facts = {"machine": machine.describe(), "date": time.strftime("%Y-%m-%d %H:%M %Z")}
    if arguments.sanity != "peer":
        installed = machine.version(arguments.kvd_python, "kvd", arguments.kvd_dir)
        facts["kvd"] = f"{installed}, commit {machine.commit(arguments.kvd_dir) or 'unknown'}"
    if arguments.sanity != "kvd":
        where = arguments.build_dir
        facts["peer"] = f"ai-dynamo {machine.version(arguments.peer_python, 'ai-dynamo', where)}"
    facts["plan"] = f"{plan.rounds} rounds, {plan.seconds} s a load run, {plan.pairs:,} pairs"
    if arguments.quick:
        facts["plan"] += " (smoke run: do not quote)"
    return facts


def _measure(arguments: argparse.Namespace, facts: dict[str, str], plan: Plan) -> list[Case]:
    generator, logs = Generator(build(arguments.build_dir)), arguments.build_dir
    names = arguments.suites or SUITES
    indexer = IndexerSuites(generator, _contenders(arguments, INDEXER), logs, plan)
    slots = SlotSuites(generator, _contenders(arguments, SLOT_TRACKER), logs, plan)
    selection = SelectSuites(generator, _contenders(arguments, SELECTION), logs, plan)
    load_before, other = os.getloadavg()[0], machine.OtherLoad()
    started = time.monotonic()
    cases = indexer.run(names) + slots.run(names) + selection.run(names)
    facts["noise"] = (
        f"other processes used {other.cores():.2f} cores on average, "
        f"load average {load_before:.1f} before, {os.getloadavg()[0]:.1f} after"
    )
    facts["took"] = f"{time.monotonic() - started:.0f} s"
    # Targets compare kvd with the peer; a server against itself has none.
    return [replace(case, limits={}) for case in cases] if arguments.sanity else cases


def _report(arguments: argparse.Namespace, facts: dict[str, str], cases: list[Case]) -> None:
    first, second = _contenders(arguments, INDEXER)
    names = (first.name, second.name)
    print(markdown(names, facts, cases))
    if arguments.json:
        arguments.json.write_text(json.dumps(as_json(names, facts, cases), indent=1) + "\n")


def _stop(_signal: int, _frame: FrameType | None) -> None:
    """Leaves by an exception, so that every server is stopped on the way out."""
    raise SystemExit("compare.py: terminated")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the suites and prints the report; returns 0 even if targets are missed."""
    arguments = _arguments(argv)
    arguments.build_dir = arguments.build_dir.resolve()
    arguments.build_dir.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, _stop)
    plan = _plan(arguments)
    try:
        facts = _facts(arguments, plan)
        cases = _measure(arguments, facts, plan)
    except BenchError as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("compare.py: interrupted", file=sys.stderr)
        return 130
    _report(arguments, facts, cases)
    return 0


if __name__ == "__main__":
    sys.exit(main())
