"""Figures of replays as a picture: SVG, written without a library.

One panel a figure, one bar a policy: the mean of all rounds, with their range as a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from math import isnan

from kvd.replay.figures import ROWS, FigureRow, Figures, means
from kvd.replay.table import Rounds

COLUMNS, PANEL_WIDTH, VALUE_WIDTH, MARGIN = 3, 300, 52, 16  # panels a line; pixels
BAR_HEIGHT, BAR_GAP, TITLE_HEIGHT = 16, 6, 30  # pixels
COLOURS = ("#7a7f87", "#2563eb", "#d97706", "#059669", "#9333ea", "#db2777", "#0891b2", "#65a30d")
# Readable on a light page and on a dark one.
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #1f2328 }
  .title { font-weight: 600 }
  .range { stroke: #1f2328; stroke-width: 1.5 }
  .grid { stroke: #8c959f; stroke-opacity: 0.4 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .range { stroke: #e6edf3 }
  }
"""


def plot(rounds: Rounds, title: str) -> str:
    """Returns an SVG document."""
    height = TITLE_HEIGHT + len(rounds) * (BAR_HEIGHT + BAR_GAP) + MARGIN
    shown = [row for row in ROWS if not all(isnan(value) for value in _values(rounds, row))]
    panels = [
        _panel(
            rounds,
            row,
            MARGIN + number % COLUMNS * (PANEL_WIDTH + MARGIN),
            2 * TITLE_HEIGHT + number // COLUMNS * height,
        )
        for number, row in enumerate(shown)
    ]
    lines = -(-len(shown) // COLUMNS)
    return document(
        MARGIN + COLUMNS * (PANEL_WIDTH + MARGIN),
        2 * TITLE_HEIGHT + lines * height,
        [text(MARGIN, 24, title, "title"), *panels],
    )


def document(width: float, height: float, parts: Sequence[str]) -> str:
    """Returns an SVG document of these parts."""
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}">\n<style>{STYLE}</style>\n{body}\n</svg>\n'
    )


def _values(rounds: Rounds, row: FigureRow) -> list[float]:
    return [asdict(means(figures))[row.name] for figures in rounds.values()]


def _panel(rounds: Rounds, row: FigureRow, x: float, y: float) -> str:
    better = "more is better" if row.more_is_better else "less is better"
    parts = [text(x, y, f"{row.title} ({better})", "title")]
    names = 12 + 7 * max(map(len, rounds))
    width = PANEL_WIDTH - names - VALUE_WIDTH
    every = [_named(each, row) for figures in rounds.values() for each in figures]
    top = max((value for value in every if not isnan(value)), default=0.0)
    for number, (policy, figures) in enumerate(rounds.items()):
        at = y + 10 + number * (BAR_HEIGHT + BAR_GAP)
        middle = at + BAR_HEIGHT / 2
        parts.append(text(x, middle + 4, policy))
        mean = _named(means(figures), row)
        if isnan(mean) or top <= 0:
            continue
        least, most = (pick(_named(each, row) for each in figures) for pick in (min, max))
        left, scale = x + names, width / top
        colour = COLOURS[number % len(COLOURS)]
        parts += [
            f'<rect x="{left:.1f}" y="{at:.1f}" width="{mean * scale:.1f}" '
            f'height="{BAR_HEIGHT}" fill="{colour}"/>',
            f'<line class="range" x1="{left + least * scale:.1f}" x2="{left + most * scale:.1f}" '
            f'y1="{middle:.1f}" y2="{middle:.1f}"/>',
            text(left + most * scale + 4, middle + 4, f"{mean:{row.form}}"),
        ]
    return "\n".join(parts)


def _named(figures: Figures, row: FigureRow) -> float:
    value: float = asdict(figures)[row.name]
    return value


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Returns a text whose first letter stands at a point."""
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{named}>{escape(words)}</text>'
