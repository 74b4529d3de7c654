"""Draws the results of curves.py: one picture for each curve, CPU on the left, memory on the right.

The background is white, so that labels can be read on dark pages, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

COLOURS = ("#0b5fa5", "#c2410c", "#15803d", "#7e22ce", "#be123c", "#52525b")
MARKERS = "osD^vP"
INCHES, DPI = (10.0, 4.2), 110


@dataclass(frozen=True)
class Picture:
    """How a curve is drawn; `cpu` has the label of each of its figures in microseconds."""

    title: str
    across: str
    cpu: dict[str, str]
    memory: str = "RSS, bytes a block"
    unit: int = 1  # bytes
    log: tuple[str, ...] = ()  # which of "cpu" and "memory" have a logarithmic scale


QUERY = "question of 128 blocks"
STORE, EVICT = "stored block, 8 a message", "evicted block, 8 a message"
CYCLE = "booking, prefill complete, free"
PROJECT = "projected loads of all ranks"

PICTURES = {
    "blocks": Picture(
        "Blocks, on 8 ranks",
        "blocks",
        {"query_us": QUERY, "store_us": STORE, "evict_us": EVICT},
    ),
    "ranks": Picture(
        "Ranks, with 1,000,000 blocks in all",
        "ranks",
        {
            "all_us": "question, all ranks hold half",
            "one_us": "question, one rank holds it",
            "select_us": "choice for 128 blocks",
            "project_us": PROJECT,
            "cycle_us": CYCLE,
            "store_us": STORE,
        },
        log=("cpu",),
    ),
    "tenants": Picture(
        "Tenants, with 1,000,000 blocks in all",
        "tenants of 8 ranks each",
        {"query_us": QUERY, "store_us": STORE, "evict_us": EVICT},
    ),
    "requests": Picture(
        "Live requests of 512 blocks, on 64 ranks",
        "live requests",
        {"cycle_us": CYCLE, "project_us": PROJECT},
        "RSS, MiB",
        1 << 20,
        log=("memory",),
    ),
}


def draw(results: dict[str, Any], folder: Path) -> None:
    """Writes a PNG for each curve in the results."""
    for name, points in results["curves"].items():
        picture = PICTURES[name]
        figure, (cpu, memory) = pyplot.subplots(1, 2, figsize=INCHES, width_ratios=(2, 1))
        at = [point["at"] for point in points]
        styles = zip(picture.cpu.items(), COLOURS, MARKERS, strict=False)
        for (key, label), colour, marker in styles:
            cpu.plot(at, [point[key] for point in points], color=colour, marker=marker, label=label)
        held = [point["bytes"] / picture.unit for point in points]
        memory.plot(at, held, color=COLOURS[-1], marker=MARKERS[0])
        cpu.set_ylabel("CPU, µs")
        memory.set_ylabel(picture.memory)
        for axes, which in ((cpu, "cpu"), (memory, "memory")):
            _finish(axes, picture.across, log=which in picture.log)
        cpu.legend(fontsize=8, framealpha=0.8)
        figure.suptitle(picture.title, fontsize=12)
        below = "{machine}; {commit}, {date}; other work: {other_cores} cores".format(**results)
        figure.text(0.995, 0.008, below, ha="right", fontsize=6.5, color=COLOURS[-1])
        figure.tight_layout(rect=(0, 0.02, 1, 1))
        figure.savefig(folder / f"curve-{name}.png", dpi=DPI, facecolor="white")
        pyplot.close(figure)


def _finish(axes: Axes, across: str, *, log: bool) -> None:
    axes.set_xscale("log")
    axes.set_xlabel(across)
    if log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.3 * axes.get_ylim()[1])
    axes.grid(visible=True, which="major", color="#d4d4d8", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_formatter("{x:,g}")
