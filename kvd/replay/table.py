"""Figures of replays as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isnan

from kvd.replay.figures import ROWS, Figures, means, ratios

# Ratios of replays that differ from 1 by less are noise: the order of requests alone moves means
# that much.
EQUAL_WITHIN = 0.02

Rounds = Mapping[str, Sequence[Figures]]  # by policy; all have their rounds in the same order


def table(rounds: Rounds) -> list[str]:
    """Returns the lines of a table of means, one row a policy; times are in seconds."""
    lines = head(["policy", *(row.title for row in ROWS)])
    for policy, figures in rounds.items():
        mean = asdict(means(figures))
        cells = [_cell(mean[row.name], row.form) for row in ROWS]
        lines.append(line([policy, *cells]))
    return lines


def comparison(rounds: Rounds, base: str) -> list[str]:
    """Returns the lines of a table of ratios to one policy, with their ranges over the rounds."""
    lines = head([f"by {base}", *(row.title for row in ROWS)])
    for policy, figures in rounds.items():
        if policy != base:
            found = [asdict(each) for each in ratios(figures, rounds[base])]
            cells = [span([each[row.name] for each in found]) for row in ROWS]
            lines.append(line([policy, *cells]))
    return lines


def span(values: Sequence[float]) -> str:
    """Returns the mean of ratios with their range, marked = where its distance from 1 is noise."""
    mean = sum(values) / len(values)
    if isnan(mean):
        return "–"
    equal = "= " if abs(mean - 1) < EQUAL_WITHIN else ""
    if len(values) == 1:
        return f"{equal}{mean:.2f}"
    return f"{equal}{mean:.2f} ({min(values):.2f}–{max(values):.2f})"


def _cell(value: float, form: str) -> str:
    return "–" if isnan(value) else f"{value:{form}}"


def head(titles: Sequence[str]) -> list[str]:
    """Returns the two lines that begin a table."""
    return [line(titles), f"|{'---|' * len(titles)}"]


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
