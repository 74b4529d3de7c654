"""Replays as the options of `kvd replay` say, and makes the report; no other command loads it."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

from kvd.replay import plot, table
from kvd.replay.engine import Speed
from kvd.replay.figures import Figures, measure_recorded
from kvd.replay.policies import DEFAULT, Chooser
from kvd.replay.progress import ProgressBar
from kvd.replay.recording import Recording, Windows, reusable_share
from kvd.replay.routers import Routing
from kvd.replay.runs import Case, Replay, run_all
from kvd.replay.simulation import SimulatedFleet
from kvd.replay.traffic import Traffic

DEFAULT_ENGINES = 8  # engines of a replay: about right for Mooncake's traces
RECORDED = "as recorded"

# Makes the replay of one policy, or of something else that a caller compares with policies.
MakeCase = Callable[[Traffic, SimulatedFleet, Any, int, argparse.Namespace], Replay]


def report(given: argparse.Namespace, case: MakeCase) -> list[str]:
    """Replays as the options say and returns the lines to print; raises ReplayError, OSError."""
    traffic = Traffic(
        given.trace,
        given.requests,
        given.model,
        given.windows,
        given.window,
        given.spread,
        given.speed_up,
        given.output_scale,
        given.unique_prompts,
    )
    recording = traffic.recording()
    for path in filter(None, (given.plot, given.json)):
        path.open("ab").close()  # before a replay, which may take minutes
    fleet = fleet_of(given, recording)
    chosen: Sequence[Chooser] = given.policy or DEFAULT
    seeds = range(given.seed, given.seed + given.rounds)
    cases = [case(traffic, fleet, each, seed, given) for each in chosen for seed in seeds]
    with closing(ProgressBar(len(cases) * len(recording.requests))) as bar:
        found = run_all(cases, given.jobs or len(os.sched_getaffinity(0)), bar.advance)
    rounds: dict[str, Sequence[Figures]] = {
        str(policy): found[at * given.rounds : (at + 1) * given.rounds]
        for at, policy in enumerate(chosen)
    }
    base = str(chosen[0])
    lines = [
        *facts(traffic, recording, fleet, given),
        "",
        *table.table(_with_recorded(rounds, recording, traffic)),
    ]
    if len(chosen) > 1:
        lines += ["", *table.comparison(rounds, base)]
    if given.plot is not None:
        given.plot.write_text(plot.plot(rounds, f"{given.trace.name}, {fleet.engines} engines"))
    if given.json is not None:
        held = {policy: [asdict(each) for each in figures] for policy, figures in rounds.items()}
        given.json.write_text(json.dumps(held, indent=1) + "\n")
    return lines


def _with_recorded(
    rounds: dict[str, Sequence[Figures]], recording: Recording, traffic: Traffic
) -> dict[str, Sequence[Figures]]:
    """Puts the recorded figures before the rounds, if all counted requests have them."""
    if not recording.recorded or traffic.windows is not Windows.ALL:
        return rounds
    return {RECORDED: [measure_recorded(recording.requests, recording.recorded)], **rounds}


def fleet_of(given: argparse.Namespace, recording: Recording) -> SimulatedFleet:
    speed = Speed(
        given.prefill_rate,
        given.chunk_tokens,
        given.step_ms / 1000,
        given.request_ms / 1000,
        given.context_ms / 512_000,
        given.max_batch,
    )
    engines = given.engines or recording.engines or DEFAULT_ENGINES
    capacity = given.capacity * given.block_size // recording.block_size
    return SimulatedFleet(engines, capacity, recording.block_size, speed, given.speeds)


def case(
    traffic: Traffic, fleet: SimulatedFleet, policy: Chooser, seed: int, given: argparse.Namespace
) -> Case:
    """Returns one replay under one of kvd's policies."""
    low, high = given.event_delay_ms
    delay_s = low / 1000, high / 1000
    routing = Routing(policy, given.routers, given.synced, delay_s, given.joins)
    return Case(traffic, fleet, routing, seed)


def facts(
    traffic: Traffic, recording: Recording, fleet: SimulatedFleet, given: argparse.Namespace
) -> list[str]:
    """Returns the facts of the replay, as a list in Markdown."""
    requests = traffic.requests(given.seed)
    counted = [request for request in requests if traffic.counts(request)]
    tokens = sum(request.input_tokens for request in counted) / max(1, len(counted))
    shared = reusable_share(requests, recording.block_size)
    speed = fleet.speed
    found = {
        "requests": f"{len(requests):,} in {requests[-1].arrival_s:,.0f} s, {len(counted):,} of "
        f"them counted, {tokens:,.0f} prompt tokens each; one cache without bounds would have had "
        f"{shared:.1%}",
        "engines": f"{fleet.engines} with {fleet.capacity:,} blocks of {fleet.block_size} tokens; "
        f"prefill {speed.prefill_tokens_per_s:,.0f} tokens/s in chunks of {speed.chunk_tokens:,}; "
        f"a step {speed.step_s * 1000:g} ms, {speed.step_s_per_request * 1000:g} ms a request, "
        f"{speed.step_s_per_token * 512_000:g} ms for 512 tokens of its context",
        "rounds": f"{given.rounds}, from seed {given.seed} on; figures are their means, and ratios "
        "below the first table those of the same round, with their range; = is a difference below "
        f"{table.EQUAL_WITHIN:.0%}",
    }
    if recording.left_out:
        found["left out"] = f"{recording.left_out:,} requests of other models or tenants"
    if recording.damaged:
        found["damaged"] = f"{recording.damaged:,} lines, which are left out"
    return [f"- {name}: {fact}" for name, fact in found.items()]
