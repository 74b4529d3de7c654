"""`kvd replay`: what other policies would have made of recorded traffic."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvd.config import parsers
from kvd.config.load import StartError
from kvd.replay import policies
from kvd.replay.engine import Speed
from kvd.replay.policies import Chooser
from kvd.replay.recording import ReplayError, Windows

DEFAULT_POLICIES = (Chooser("dynamo"), Chooser("kvd"))
MAX_ENGINES = 4096  # of a replay: each costs every request 0.1 µs, and memory for its blocks
Usage = Callable[[parsers.Parse], Any]

DESCRIPTION = (
    "Replays recorded requests against simulated engines with prefix caches, under one or more "
    "routing policies, and prints in Markdown how much each finds cached and how long requests "
    "take. Time is simulated; no daemon, engine or network is needed. Trust the order of the "
    "policies and their ratios, not the absolute figures, unless the engine options are those of "
    "your engines. TRACE is a trace in Mooncake's form or kvd's own decision log "
    "(decision_log in the settings)."
)
EPILOG = (
    "Example: kvd replay trace.jsonl --policy dynamo --policy kvd --policy kvd,hold_up=0.2 "
    "--engines 16 --speed-up 2 --rounds 3 --plot policies.svg"
)


def add_options(
    parser: argparse.ArgumentParser,
    usage: Usage = lambda parse: parse,
    policy: Callable[[str], Any] | None = None,
) -> None:
    """Adds the options of the command; `usage` wraps what reads a value, `policy` reads one."""
    count = usage(parsers.within(1, 2**31 - 1))
    parser.add_argument("trace", type=Path, metavar="TRACE", help="the recorded requests")
    parser.add_argument(
        "--policy",
        action="append",
        type=policy or usage(_policy),
        metavar="NAME[,WEIGHT=VALUE...]",
        help=f"policy to replay under, one of {', '.join(policies.NAMES)}, with other weights than "
        "its own if wanted; may be repeated, and the first is what others are compared with "
        f"(default {' and '.join(map(str, DEFAULT_POLICIES))})",
    )
    add_traffic_options(parser.add_argument_group("recorded requests"), usage)
    add_fleet_options(parser.add_argument_group("engines"), usage)
    group = parser.add_argument_group("routers")
    group.add_argument(
        "--event-delay-ms",
        type=usage(_span),
        metavar="MS[-MS]",
        default=(0.0, 0.0),
        help="time until KV events are heard, drawn from this range (default 0)",
    )
    group.add_argument(
        "--routers", type=count, default=1, metavar="N", help="routers at work (default 1)"
    )
    group.add_argument(
        "--no-sync",
        dest="synced",
        action="store_false",
        help="routers do not hear of each other's requests",
    )
    group = parser.add_argument_group("rounds and output")
    group.add_argument(
        "--rounds",
        type=count,
        default=3,
        metavar="N",
        help="replays of each policy, all policies with the same arrivals (default 3)",
    )
    group.add_argument(
        "--seed", type=count, default=1, metavar="N", help="seed of the first round (default 1)"
    )
    group.add_argument(
        "--jobs", type=count, metavar="N", help="replays at a time (default: one a processor)"
    )
    group.add_argument("--plot", type=Path, metavar="FILE", help="picture to write, as SVG")
    group.add_argument("--json", type=Path, metavar="FILE", help="figures to write, as JSON")


def add_traffic_options(group: argparse._ArgumentGroup, usage: Usage) -> None:
    count = usage(parsers.within(1, 2**31 - 1))
    seconds = usage(parsers.real("seconds", 0.0, 1e9))
    factor = usage(parsers.real("a factor", 1e-3, 1e3))
    group.add_argument("--requests", type=count, metavar="N", help="only the first requests")
    group.add_argument(
        "--model",
        metavar="NAME",
        help="model whose requests of a decision log are replayed (default: the most frequent)",
    )
    group.add_argument(
        "--speed-up",
        type=factor,
        default=1.0,
        metavar="FACTOR",
        help="how much faster requests come (default 1)",
    )
    group.add_argument(
        "--spread",
        type=seconds,
        metavar="SECONDS",
        help="time within which arrivals are moved by chance, never past the next one (default "
        "3 for Mooncake's form, whose timestamps are of intervals of 3 s, else 0)",
    )
    group.add_argument(
        "--windows",
        type=Windows,
        choices=list(Windows),
        default=Windows.ALL,
        help="windows of the recording whose requests count; all are replayed (default all)",
    )
    group.add_argument(
        "--window",
        type=usage(parsers.real("seconds", 1.0, 1e9)),
        default=300.0,
        metavar="SECONDS",
        help="length of a window (default 300)",
    )
    group.add_argument(
        "--output-scale",
        type=factor,
        default=1.0,
        metavar="FACTOR",
        help="what output lengths are multiplied with (default 1)",
    )
    group.add_argument(
        "--unique-prompts", action="store_true", help="no prompt shares a prefix with another"
    )


def add_fleet_options(group: argparse._ArgumentGroup, usage: Usage) -> None:
    speed = Speed()
    count = usage(parsers.within(1, 2**31 - 1))
    milliseconds = usage(parsers.real("milliseconds", 0.0, 1e6))
    group.add_argument(
        "--engines",
        type=usage(parsers.within(1, MAX_ENGINES)),
        metavar="N",
        help="number of engines (default: those of the decision log, else 8)",
    )
    group.add_argument(
        "--capacity",
        type=count,
        default=2000,
        metavar="BLOCKS",
        help="KV blocks of an engine (default 2000)",
    )
    group.add_argument(
        "--block-size",
        type=count,
        default=512,
        metavar="TOKENS",
        help="tokens of these blocks (default 512)",
    )
    group.add_argument(
        "--prefill-rate",
        type=usage(parsers.real("a rate", 1.0, 1e9)),
        default=speed.prefill_tokens_per_s,
        metavar="TOKENS",
        help=f"prompt tokens computed in a second (default {speed.prefill_tokens_per_s:g})",
    )
    group.add_argument(
        "--chunk-tokens",
        type=count,
        default=speed.chunk_tokens,
        metavar="TOKENS",
        help=f"prompt tokens of a step that decodes, too (default {speed.chunk_tokens})",
    )
    group.add_argument(
        "--step-ms",
        type=milliseconds,
        default=speed.step_s * 1000,
        metavar="MS",
        help=f"time of a decoding step (default {speed.step_s * 1000:g})",
    )
    group.add_argument(
        "--request-ms",
        type=milliseconds,
        default=speed.step_s_per_request * 1000,
        metavar="MS",
        help="further time for each request of a step (default "
        f"{speed.step_s_per_request * 1000:g})",
    )
    group.add_argument(
        "--context-ms",
        type=milliseconds,
        default=speed.step_s_per_token * 512_000,
        metavar="MS",
        help="further time for each 512 tokens of KV cache that a step reads (default "
        f"{speed.step_s_per_token * 512_000:g})",
    )
    group.add_argument(
        "--max-batch",
        type=count,
        default=speed.max_batch,
        metavar="N",
        help=f"requests decoded at a time (default {speed.max_batch})",
    )
    group.add_argument(
        "--speeds",
        type=usage(_factors),
        default=(1.0,),
        metavar="FACTOR,...",
        help="factors of the engines' speeds, in turns (default 1)",
    )
    group.add_argument(
        "--joins",
        type=usage(parsers.real("seconds", 0.0, 1e9)),
        metavar="SECONDS",
        help="time at which the last engine joins with an empty cache (default: it is there)",
    )


def _policy(text: str) -> Chooser:
    try:
        return policies.parse(text)
    except ReplayError as error:
        raise ValueError(str(error)) from None


def _factors(text: str) -> tuple[float, ...]:
    return tuple(map(parsers.real("a factor", 1e-3, 1e3), text.split(",")))


def _span(text: str) -> tuple[float, float]:
    low, _, high = text.partition("-")
    read = parsers.real("milliseconds", 0.0, 1e6)
    least, most = read(low), read(high or low)
    if least > most:
        raise ValueError("expected the shorter time first")
    return least, most


def run(given: Mapping[str, Any]) -> tuple[str, int]:
    """Returns the report on what the command line asks for; raises StartError."""
    from kvd.cli.replay_report import case, report  # here, as no other command needs to load it

    try:
        return "\n".join(report(given["options"], case)) + "\n", 0
    except (ReplayError, OSError) as error:
        raise StartError(str(error)) from None
