"""Plays scenarios to a running server: python -m tests.conformance --base URL [FILE ...]

Without files it plays all of a face. Prints one line a scenario and the totals;
the exit code is 1 if any failed.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections import Counter
from pathlib import Path

from tests.conformance.failure import Failure
from tests.conformance.runner import Scenario, load_all, play
from tests.conformance.steps import Target
from tests.support.http_client import Client

FOLDER = Path(__file__).parent
FACES = ("indexer", "slot_tracker", "selection", "conductor")


def main() -> int:
    arguments = parse()
    target = Target(
        arguments.base.rstrip("/"),
        shlex.split(arguments.spawn_command) if arguments.spawn_command else None,
        dict(pair.split("=", 1) for pair in arguments.rename),
    )
    given = arguments.files or FOLDER.glob(f"{arguments.face}/*.json")
    outcomes: Counter[str] = Counter()
    with Client() as client:
        for scenario in load_all(given):
            outcomes[report(scenario, target, client, arguments)] += 1
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())))
    return 1 if outcomes["failed"] else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.conformance", description=__doc__)
    parser.add_argument("--base", metavar="URL", required=True, help="the server under test")
    parser.add_argument(
        "--face", choices=FACES, default="indexer", help="whose scenarios, if no file is named"
    )
    parser.add_argument(
        "--spawn-command",
        metavar="COMMAND",
        help="starts another server of its kind when --port N and more flags are appended; "
        "without it, scenarios that need one are skipped",
    )
    parser.add_argument(
        "--peer",
        action="store_true",
        help="the server is Dynamo 1.6.1: play all, and expect the differences that are known",
    )
    parser.add_argument(
        "--rename",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="a JSON member's name at this server, e.g. tenant_id=routing_group",
    )
    parser.add_argument("--verbose", action="store_true", help="show requests and batches")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    return parser.parse_args()


def report(
    scenario: Scenario, target: Target, client: Client, arguments: argparse.Namespace
) -> str:
    """Plays one scenario, prints its line and returns its outcome."""
    start = time.monotonic()
    outcome, detail = "passed", ""
    if scenario.spawns and target.spawn_command is None:
        outcome, detail = "skipped", "needs --spawn-command"
    else:
        log = print if arguments.verbose else lambda line: None
        try:
            play(scenario, target, client, log)
        except Failure as failure:
            known = arguments.peer and scenario.peer_differs
            outcome, detail = ("different as known" if known else "failed"), str(failure)
    seconds = time.monotonic() - start
    print(f"{outcome:8} {scenario.name} ({seconds:.2f} s) {detail}".rstrip(), flush=True)
    return outcome


if __name__ == "__main__":
    sys.exit(main())
