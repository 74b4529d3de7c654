"""Turns runs into tables: medians, ratios, targets, Markdown and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import nan
from statistics import median

from generator import Result

Runs = tuple[list[Result], list[Result]]  # of the first and the second server, round by round


@dataclass(frozen=True)
class Figure:
    """A column: the key of the number in a result that it shows, and its title."""

    key: str
    title: str


@dataclass(frozen=True)
class Suite:
    """A table: its name on the command line, its heading, its columns."""

    name: str
    title: str
    figures: tuple[Figure, ...]


@dataclass(frozen=True)
class Case:
    """A row: paired runs of both servers, and limits on the ratio first / second by key."""

    suite: Suite
    name: str
    limits: Mapping[str, float] = field(default_factory=dict)
    runs: Runs = field(default_factory=lambda: ([], []))

    def medians(self, key: str) -> tuple[float, float]:
        """Returns the median of each server's runs."""
        first, second = (median(run[key] for run in side) for side in self.runs)
        return first, second

    def ratios(self, key: str) -> list[float]:
        """Returns first / second for each round, smallest first.

        The two runs of a round are seconds apart, so whatever slows the machine for longer cancels
        out. A round where a figure is zero (shorter than the clock tick) has no ratio.
        """
        pairs = zip(*self.runs, strict=True)
        return sorted(a[key] / b[key] for a, b in pairs if a[key] > 0 and b[key] > 0)

    def ratio(self, key: str) -> float:
        """Returns the median ratio; NaN without any."""
        ratios = self.ratios(key)
        return median(ratios) if ratios else nan

    def misses(self) -> list[str]:
        """Returns the keys whose limit is not met; without a ratio it is not met either."""
        return [key for key, limit in self.limits.items() if not self.ratio(key) <= limit]


def _number(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _cell(case: Case, key: str) -> str:
    ratios = case.ratios(key)
    cell = " / ".join(map(_number, case.medians(key)))
    if ratios:
        cell += f", x{median(ratios):.2f}"
    if len(ratios) > 1:
        cell += f" ({ratios[0]:.2f}-{ratios[-1]:.2f})"
    return cell


def _titles(case: Case, keys: Iterable[str]) -> str:
    titles = {figure.key: figure.title for figure in case.suite.figures}
    return ", ".join(titles[key] for key in keys)


def _target(case: Case) -> str:
    return ", ".join(f"{_titles(case, [key])} <= x{x:.2f}" for key, x in case.limits.items())


def _verdict(case: Case) -> str:
    if not case.limits:
        return "-"
    misses = case.misses()
    return f"miss ({_titles(case, misses)})" if misses else "pass"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _table(suite: Suite, cases: Sequence[Case]) -> list[str]:
    titles = ["case", *(figure.title for figure in suite.figures), "target", "result"]
    lines = [f"### {suite.title}", "", _row(titles), _row("---" for _ in titles)]
    for case in cases:
        cells = [_cell(case, figure.key) for figure in suite.figures]
        lines.append(_row([case.name, *cells, _target(case) or "-", _verdict(case)]))
    return [*lines, ""]


def _summary(cases: Sequence[Case]) -> list[str]:
    held = [case for case in cases if case.limits]
    missed = [case for case in held if case.misses()]
    if not held:
        return []
    lines = [f"Targets: {len(held) - len(missed)} of {len(held)} rows pass."]
    return lines + [f"- missed: {case.suite.name}, {case.name}" for case in missed]


def markdown(names: tuple[str, str], facts: Mapping[str, str], cases: Sequence[Case]) -> str:
    """Returns the whole report; `facts` tell where and how it was measured."""
    lines = [f"## {names[0]} / {names[1]}", ""]
    lines += [f"- {name}: {fact}" for name, fact in facts.items()]
    lines += [
        f"- cells: {names[0]} / {names[1]} (medians), xMEDIAN (MIN-MAX) of the rounds' ratios",
        "",
    ]
    for suite, rows in groupby(cases, key=lambda case: case.suite):
        lines += _table(suite, list(rows))
    return "\n".join([*lines, *_summary(cases)])


def as_json(
    names: tuple[str, str], facts: Mapping[str, str], cases: Sequence[Case]
) -> dict[str, object]:
    """Returns the report with every single run, for later comparison."""
    rows = [
        {
            "suite": case.suite.name,
            "case": case.name,
            "limits": dict(case.limits),
            "misses": case.misses(),
            "runs": dict(zip(names, case.runs, strict=True)),
        }
        for case in cases
    ]
    return {"servers": list(names), "facts": dict(facts), "cases": rows}
