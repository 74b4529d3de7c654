"""Compares routing policies over many fleets and workloads.

    python bench/protocol.py TRACE... [--policy NAME]... [--windows even] [--pictures FOLDER]

    fleets        4, 8, 16, 32 engines x 500, 2,000, 8,000 blocks of 512 tokens x load 1 and 1.5;
                  load 1 on 8 engines is the trace as recorded, and arrivals come faster in
                  proportion on larger fleets
    workloads     8 engines with 2,000 blocks at load 1, and one difference: bound by decoding
                  (outputs are five times as long and prefill is six times as fast; a request adds
                  0.5 ms to a step, and 512 tokens of its context 0.02 ms), nothing shared, late
                  events, two routers, engines of two speeds, an engine that joins empty

Arrivals of one timestamp are spread over the 3 s that it stands for. Every policy gets the same
arrivals in the same round. Tune on `--windows odd`, report on even ones: all requests are replayed,
but only those in the windows count. Prints Markdown with ratios to the first policy: first the mean
over all cells and the worst cell, then every cell.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import exp, log
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvd.replay import policies, table
from kvd.replay.engine import Speed
from kvd.replay.figures import ROWS, FigureRow, Figures, ratios
from kvd.replay.plot import COLOURS, document, text
from kvd.replay.policies import Chooser
from kvd.replay.progress import ProgressBar
from kvd.replay.recording import ReplayError, Windows
from kvd.replay.routers import Routing
from kvd.replay.runs import Case, run_all
from kvd.replay.simulation import SimulatedFleet
from kvd.replay.traffic import Traffic

ENGINES = 4, 8, 16, 32
CAPACITIES = 500, 2000, 8000  # blocks
LOADS = 1.0, 1.5
RECORDED_ENGINES = 8  # engines that can about serve the traces as recorded
DEFAULT_POLICIES = "dynamo", "kvd", "lmetric", "ramjet", "ramjet-tuned"
JOINS_S = 300.0
# Figures in which a cell counts as lost if a policy is worse there than the first policy.
LOST_ROWS = "ttft_mean", "whole"


@dataclass(frozen=True)
class Cell:
    """One fleet under one workload."""

    name: str
    traffic: Traffic
    fleet: SimulatedFleet
    routing: Routing

    def case(self, policy: Chooser, seed: int) -> Case:
        return Case(self.traffic, self.fleet, replace(self.routing, policy=policy), seed)


Cells = Mapping[str, Mapping[str, Sequence[Figures]]]  # rounds by policy, by cell


def fleets(traffic: Traffic, base: Chooser) -> list[Cell]:
    """Returns the cells of all fleets."""
    return [
        Cell(
            f"{engines} x {capacity:,}, load {load:g}",
            replace(traffic, speed_up=load * engines / RECORDED_ENGINES),
            SimulatedFleet(engines, capacity),
            Routing(base),
        )
        for engines, capacity, load in product(ENGINES, CAPACITIES, LOADS)
    ]


def workloads(traffic: Traffic, base: Chooser) -> list[Cell]:
    """Returns the cells of the workloads, each of which differs in one thing."""
    fleet, routing = SimulatedFleet(), Routing(base)
    # Prompts cost little and outputs are long, so that decoding limits the engines.
    slow = Speed(
        prefill_tokens_per_s=60_000.0, step_s_per_request=0.0005, step_s_per_token=0.00002 / 512
    )
    decoding = replace(traffic, output_scale=5.0), SimulatedFleet(speed=slow)
    return [
        Cell("decode-bound", *decoding, routing),
        Cell("nothing shared", replace(traffic, unique_prompts=True), fleet, routing),
        Cell("events 10-200 ms late", traffic, fleet, replace(routing, delay_s=(0.01, 0.2))),
        Cell("two routers, synced", traffic, fleet, replace(routing, routers=2)),
        Cell("two routers, not synced", traffic, fleet, replace(routing, routers=2, synced=False)),
        Cell(
            "half the engines at half speed", traffic, SimulatedFleet(factors=(1.0, 0.5)), routing
        ),
        Cell("an engine joins empty", traffic, fleet, replace(routing, joins_s=JOINS_S)),
    ]


def replayed(
    cells: Sequence[Cell], chosen: Sequence[Chooser], given: argparse.Namespace
) -> dict[str, dict[str, list[Figures]]]:
    """Replays every cell under every policy."""
    seeds = range(given.seed, given.seed + given.rounds)
    cases = [cell.case(policy, seed) for cell in cells for policy in chosen for seed in seeds]
    total = sum(len(case.traffic.recording().requests) for case in cases)
    with closing(ProgressBar(total)) as bar:
        found = iter(run_all(cases, given.jobs, bar.advance))
    return {
        cell.name: {str(policy): [next(found) for _ in seeds] for policy in chosen}
        for cell in cells
    }


def summary(cells: Cells, base: str) -> list[str]:
    """Returns a table with the geometric mean of each policy's ratios, and the worst cell's."""
    lines = table.head([f"by {base}", *(row.title.removesuffix(", s") for row in ROWS)])
    for policy in next(iter(cells.values())):
        if policy != base:
            found = [_means(rounds[policy], rounds[base]) for rounds in cells.values()]
            texts = [_mean_and_worst([each[row.name] for each in found], row) for row in ROWS]
            lines.append(table.line([policy, *texts]))
    return lines


def every_cell(cells: Cells, base: str) -> list[str]:
    """Returns a table with the ratios of every policy in every cell."""
    lines = table.head(["cell", f"by {base}", *(row.title.removesuffix(", s") for row in ROWS)])
    for name, rounds in cells.items():
        for policy in rounds:
            if policy != base:
                found = [asdict(each) for each in ratios(rounds[policy], rounds[base])]
                texts = [table.span([each[row.name] for each in found]) for row in ROWS]
                lines.append(table.line([name, policy, *texts]))
    return lines


def lost(cells: Cells, base: str, policy: str) -> list[str]:
    """Returns the cells and figures in which a policy is worse than `base` by more than noise."""
    found = []
    for name, rounds in cells.items():
        means = _means(rounds[policy], rounds[base])
        found += [
            f"{name}: {row.title.removesuffix(', s')} {means[row.name]:.2f}"
            for row in ROWS
            if row.name in LOST_ROWS and means[row.name] > 1 + table.EQUAL_WITHIN
        ]
    return found


def _means(rounds: Sequence[Figures], base: Sequence[Figures]) -> dict[str, float]:
    """Returns the mean ratio of each figure."""
    found = [asdict(each) for each in ratios(rounds, base)]
    return {row.name: fmean(each[row.name] for each in found) for row in ROWS}


def _mean_and_worst(values: Sequence[float], row: FigureRow) -> str:
    known = [value for value in values if value == value and value > 0]
    if not known:
        return "–"
    worst = (min if row.more_is_better else max)(known)
    return f"{exp(fmean(map(log, known))):.2f} ({worst:.2f})"


# ---- the picture


PLOTTED = "cached", "ttft_mean", "ttft_p50", "ttft_p99", "token_interval", "whole"
WIDTH, LINE, LEFT, TOP = 900, 26, 150, 60
LOWEST, HIGHEST = 0.1, 2.5  # ratios at the edges; ratios beyond them are drawn at the edge


def picture(cells: Cells, base: str, title: str) -> str:
    """Returns an SVG document: a dot for each cell, by its ratio to the first policy."""
    chosen = [policy for policy in next(iter(cells.values())) if policy != base]
    rows = [row for row in ROWS if row.name in PLOTTED]
    height = TOP + (len(rows) * (len(chosen) + 1)) * LINE
    parts = [text(16, 24, title, "title")]
    for mark in (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0):
        x = _across(mark)
        parts.append(
            f'<line class="{"range" if mark == 1 else "grid"}" x1="{x:.1f}" '
            f'x2="{x:.1f}" y1="{TOP - 14}" y2="{height - LINE / 2}"/>'
        )
        parts.append(text(x - 8, TOP - 18, f"{mark:g}"))
    y = TOP
    for row in rows:
        better = "more is better" if row.more_is_better else "less is better"
        parts.append(text(16, y + 6, f"{row.title.removesuffix(', s')} ({better})", "title"))
        y += LINE
        for number, policy in enumerate(chosen, 1):
            parts.append(text(24, y + 4, policy))
            for rounds in cells.values():
                ratio = _means(rounds[policy], rounds[base])[row.name]
                if ratio == ratio:
                    parts.append(
                        f'<circle cx="{_across(ratio):.1f}" cy="{y:.1f}" r="4" '
                        f'fill="{COLOURS[number % len(COLOURS)]}" fill-opacity="0.55"/>'
                    )
            y += LINE
    return document(WIDTH, height, parts)


def _across(ratio: float) -> float:
    bounded = min(HIGHEST, max(LOWEST, ratio))
    return LEFT + (WIDTH - LEFT - 20) * log(bounded / LOWEST) / log(HIGHEST / LOWEST)


# ---- the command


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="in Mooncake's form")
    parser.add_argument("--policy", action="append", metavar="NAME", help="as of kvd replay")
    parser.add_argument("--windows", type=Windows, choices=list(Windows), default=Windows.EVEN)
    parser.add_argument("--window", type=float, default=300.0, metavar="SECONDS")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="for TRACE-fleets.svg")
    parser.add_argument("--json", type=Path, metavar="FILE", help="for every figure")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    given = _arguments(argv)
    chosen = [policies.parse(name) for name in given.policy or DEFAULT_POLICIES]
    base = str(chosen[0])
    held = {}
    for path in given.traces:
        traffic = Traffic(path, windows=given.windows, window_s=given.window)
        for kind, cells in (
            ("fleets", fleets(traffic, chosen[0])),
            ("workloads", workloads(traffic, chosen[0])),
        ):
            found = replayed(cells, chosen, given)
            held[f"{path.stem} {kind}"] = found
            print(f"### {path.stem}, {kind}\n")
            print(*summary(found, base), "", *every_cell(found, base), "", sep="\n")
            for policy in map(str, chosen[1:]):
                worse = "; ".join(lost(found, base, policy)) or "none"
                print(f"Worse than {base}, {policy}: {worse}.\n", flush=True)
            if given.pictures is not None and kind == "fleets":
                name = path.stem.removesuffix("_trace")
                title = f"{name} trace: each dot a fleet, by its ratio to {base}"
                (given.pictures / f"{name}-fleets.svg").write_text(picture(found, base, title))
    if given.json is not None:
        given.json.write_text(json.dumps(held, indent=1, default=asdict) + "\n")


if __name__ == "__main__":
    try:
        main()
    except ReplayError as error:
        sys.exit(str(error))
