"""What the demo shows in the terminal: where kvd is, what to paste, what is happening."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO


@dataclass(frozen=True, slots=True)
class Totals:
    """The daemon's own totals since its start, and what it holds now."""

    events: int
    blocks: int
    queries: int


def parse_totals(metrics: str) -> Totals:
    """Returns the totals in a text of metrics, each the sum of one metric over all labels."""

    def total(name: str) -> int:
        samples = re.findall(rf"^{name}(?:{{.*}})? (\d+)$", metrics, re.MULTILINE)
        return sum(map(int, samples))

    return Totals(
        events=total("kvd_events_total"),
        blocks=total("kvd_index_blocks"),
        queries=total("kvd_questions_total"),
    )


@dataclass(slots=True)
class Traffic:
    """What the demo itself has counted: its turns and how good the daemon's answers were."""

    turns: int = 0
    right: int = 0  # turns whose answer was exactly what the engines hold
    prompt_tokens: int = 0
    cached_tokens: int = 0


def introduction(
    base_url: str, engines: Sequence[str], question: dict[str, object], answer: bytes
) -> str:
    """Returns the text shown once traffic flows; `answer` is the daemon's to `question`."""
    listed = "\n".join(f"  {engine}" for engine in engines)
    return f"""
kvd is up. KV indexer: {base_url}   (Ctrl-C stops it)

Two simulated engines publish KV events to it over ZMQ, in the formats of the real ones:
{listed}

Which of them has this prompt in its cache, and how much of it? Paste in another terminal:

curl -s {base_url}/query -H 'Content-Type: application/json' \\
  -d '{json.dumps(question, separators=(",", ":"))}'

The answer at this moment, counted in tokens:

{answer.decode()}

More to ask: {base_url}/workers  {base_url}/metrics  {base_url}/dump

Below: "cached" is the share of prompt tokens that an engine need not compute, because the demo's
router sends each prompt where kvd says; "exact" are answers equal to what the engines really hold.

"""


class LiveLine:
    """Keeps one line up to date on a terminal, or writes one now and then to anything else."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._tty = out.isatty()
        self.period_s = 0.5 if self._tty else 5.0

    def show(self, text: str) -> None:
        """Shows `text`; on a terminal the next line of any kind, a log's too, goes over it."""
        self._out.write(f"{text}\x1b[K\r" if self._tty else f"{text}\n")
        self._out.flush()


def live_text(before: Totals, now: Totals, seconds: float, traffic: Traffic) -> str:
    """Returns the live line for the `seconds` that lie between the two readings."""
    events = (now.events - before.events) / seconds
    queries = (now.queries - before.queries) / seconds
    cached = 100 * traffic.cached_tokens // max(traffic.prompt_tokens, 1)
    return (  # short enough for 80 columns, as a wrapped line cannot be written over
        f"{events:.0f} events/s, {now.blocks} blocks, {queries:.0f} queries/s, "
        f"{cached}% cached, {traffic.right}/{traffic.turns} answers exact"
    )
