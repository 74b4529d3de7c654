"""`kvd replay`: how other policies would have routed recorded traffic."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kvd.config import parsers
from kvd.config.errors import StartError
from kvd.replay import policies
from kvd.replay.engine import Speed
from kvd.replay.policies import Chooser
from kvd.replay.recording import ReplayError, Windows

MAX_ENGINES = 4096  # engines of a replay: each costs 0.1 µs a request, and memory for its blocks
Usage = Callable[[parsers.Parse], Any]

# Parsers of the options' values.
COUNT = parsers.within(1, 2**31 - 1)
SECONDS = parsers.real("seconds", 0.0, 1e9)
MILLISECONDS = parsers.real("milliseconds", 0.0, 1e6)
FACTOR = parsers.real("a factor", 1e-3, 1e3)

DESCRIPTION = (
    "Replays recorded requests against simulated engines with prefix caches, under one or more "
    "routing policies, and prints in Markdown how much each finds cached and how long requests "
    "take. Time is simulated; no daemon, engine or network is needed. Trust the order of the "
    "policies and their ratios, not the absolute figures, unless the engine options are those of "
    "your engines. TRACE is a trace in Mooncake's form or kvd's own decision log "
    "(decision_log in the settings)."
)
EPILOG = (
    "Example: kvd replay trace.jsonl --policy dynamo --policy kvd --policy kvd,queued=1 "
    "--engines 16 --speed-up 2 --rounds 3 --plot policies.svg"
)


def add_options(
    parser: argparse.ArgumentParser,
    usage: Usage = lambda parse: parse,
    policy: Callable[[str], Any] | None = None,
) -> None:
    """Adds the options of the command; `usage` wraps parsers of values, `policy` parses one."""
    parser.add_argument(
        "trace", type=usage(parsers.parse_path), metavar="TRACE", help="file of recorded requests"
    )
    parser.add_argument(
        "--policy",
        action="append",
        type=policy or usage(_policy),
        metavar="NAME[,WEIGHT=VALUE...]",
        help=f"policy to replay under: {', '.join(policies.NAMES)}; WEIGHT=VALUE replaces one "
        "of its weights; repeat it for further policies, which are compared with the first "
        f"(default {' and '.join(map(str, policies.DEFAULT))})",
    )
    add_traffic_options(parser.add_argument_group("recorded requests"), usage)
    add_fleet_options(parser.add_argument_group("engines"), usage)
    add_router_options(parser.add_argument_group("routers"), usage)
    add_round_options(parser.add_argument_group("rounds and output"), usage)


def add_traffic_options(group: argparse._ArgumentGroup, usage: Usage) -> None:
    number = partial(_add_number, group, usage)
    group.add_argument("--requests", type=usage(COUNT), metavar="N", help="only the first requests")
    group.add_argument(
        "--model",
        metavar="NAME",
        help="model whose requests of a decision log are replayed (default: the most frequent)",
    )
    number("--speed-up", FACTOR, 1.0, "FACTOR", "how much faster requests come")
    group.add_argument(
        "--spread",
        type=usage(SECONDS),
        metavar="SECONDS",
        help="time within which arrivals are spread at random, in their order (default "
        "3 for Mooncake's form, whose timestamps are of intervals of 3 s, else 0)",
    )
    group.add_argument(
        "--windows",
        type=Windows,
        choices=list(Windows),
        default=Windows.ALL,
        help="windows of the recording whose requests count; all are replayed (default all)",
    )
    number("--window", parsers.real("seconds", 1.0, 1e9), 300.0, "SECONDS", "length of a window")
    number("--output-scale", FACTOR, 1.0, "FACTOR", "factor applied to output lengths")
    group.add_argument(
        "--unique-prompts", action="store_true", help="no prompt shares a prefix with another"
    )


def add_fleet_options(group: argparse._ArgumentGroup, usage: Usage) -> None:
    speed = Speed()
    number = partial(_add_number, group, usage)
    group.add_argument(
        "--engines",
        type=usage(parsers.within(1, MAX_ENGINES)),
        metavar="N",
        help="number of engines (default: those of the decision log, else 8)",
    )
    number("--capacity", COUNT, 2000, "BLOCKS", "KV blocks of an engine")
    number("--block-size", COUNT, 512, "TOKENS", "tokens of these blocks")
    rate = parsers.real("a rate", 1.0, 1e9)
    help = "prompt tokens computed in a second"
    number("--prefill-rate", rate, speed.prefill_tokens_per_s, "TOKENS", help)
    help = "maximum number of prompt tokens computed in one step"
    number("--chunk-tokens", COUNT, speed.chunk_tokens, "TOKENS", help)
    number("--step-ms", MILLISECONDS, speed.step_s * 1000, "MS", "time of a decoding step")
    help = "time that each request adds to a step"
    number("--request-ms", MILLISECONDS, speed.step_s_per_request * 1000, "MS", help)
    help = "time that each 512 tokens of KV cache add to a step"
    number("--context-ms", MILLISECONDS, speed.step_s_per_token * 512_000, "MS", help)
    number("--max-batch", COUNT, speed.max_batch, "N", "maximum number of requests decoded at once")
    group.add_argument(
        "--speeds",
        type=usage(_factors),
        default=(1.0,),
        metavar="FACTOR,...",
        help="speed factors of the engines, repeated as often as needed (default 1)",
    )
    group.add_argument(
        "--joins",
        type=usage(SECONDS),
        metavar="SECONDS",
        help="time at which the last engine joins with an empty cache (default: from the start)",
    )


def add_router_options(group: argparse._ArgumentGroup, usage: Usage) -> None:
    number = partial(_add_number, group, usage)
    group.add_argument(
        "--event-delay-ms",
        type=usage(_span),
        metavar="MS[-MS]",
        default=(0.0, 0.0),
        help="time until KV events are heard, drawn from this range (default 0)",
    )
    number("--routers", COUNT, 1, "N", "routers at work")
    group.add_argument(
        "--no-sync",
        dest="synced",
        action="store_false",
        help="routers do not hear of each other's requests",
    )


def add_round_options(group: argparse._ArgumentGroup, usage: Usage) -> None:
    number = partial(_add_number, group, usage)
    help = "replays of each policy, all policies with the same arrivals"
    number("--rounds", COUNT, 3, "N", help)
    number("--seed", COUNT, 1, "N", "seed of the first round")
    group.add_argument(
        "--jobs",
        type=usage(COUNT),
        metavar="N",
        help="maximum number of concurrent replays (default: one per processor)",
    )
    file = usage(parsers.parse_path)
    group.add_argument("--plot", type=file, metavar="FILE", help="picture to write, as SVG")
    group.add_argument("--json", type=file, metavar="FILE", help="figures to write, as JSON")


def _add_number(
    group: argparse._ArgumentGroup,
    usage: Usage,
    flag: str,
    read: parsers.Parse,
    default: float,
    metavar: str,
    help: str,
) -> None:
    """Adds an option whose help shows its default."""
    help = f"{help} (default {default:g})"
    group.add_argument(flag, type=usage(read), default=default, metavar=metavar, help=help)


def _policy(text: str) -> Chooser:
    try:
        return policies.parse(text)
    except ReplayError as error:
        raise ValueError(str(error)) from None


def _factors(text: str) -> tuple[float, ...]:
    return tuple(map(FACTOR, text.split(",")))


def _span(text: str) -> tuple[float, float]:
    low, _, high = text.partition("-")
    least, most = MILLISECONDS(low), MILLISECONDS(high or low)
    if least > most:
        raise ValueError("expected the shorter time first")
    return least, most


def run(given: Mapping[str, Any]) -> tuple[str, int]:
    """Replays as the command line says, and returns the report; raises StartError."""
    from kvd.cli.replay_report import case, report  # here, because no other command needs it

    try:
        return "\n".join(report(given["options"], case)) + "\n", 0
    except ReplayError as error:
        raise StartError(str(error)) from None
    except OSError as error:
        name = "" if error.filename is None else f"{error.filename}: "
        raise StartError(f"{name}{error.strerror or error}") from None
