"""What the demo shows in the terminal: where kvd is, what to paste, what is happening."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

Shown = tuple[dict[str, object], str]  # a request's body, and the answer to it


@dataclass(frozen=True, slots=True)
class Addresses:
    """Base URLs of the daemon's gateway and of its KV indexer."""

    gateway: str
    indexer: str


@dataclass(frozen=True, slots=True)
class EventStats:
    """The daemon's total of events since its start, and the blocks it holds now."""

    events: int
    blocks: int


def parse_event_stats(metrics: str) -> EventStats:
    """Returns the totals in a text of metrics, each the sum of one metric over all labels."""

    def total(name: str) -> int:
        samples = re.findall(rf"^{name}(?:{{.*}})? (\d+)$", metrics, re.MULTILINE)
        return sum(map(int, samples))

    return EventStats(
        events=total("kvd_events_total"),
        blocks=total("kvd_index_blocks"),
    )


@dataclass(slots=True)
class Traffic:
    """The demo's own counts: its turns, and how well the daemon predicted cached tokens."""

    turns: int = 0
    right: int = 0  # turns for which kvd expected as many cached tokens as the engine had
    prompt_tokens: int = 0
    cached_tokens: int = 0


def introduction(addresses: Addresses, engines: Sequence[str], chat: Shown, query: Shown) -> str:
    """Returns the text shown once traffic flows: what to paste, and what was answered to it."""
    listed = "\n".join(f"  {engine}" for engine in engines)
    return f"""
kvd is up. Gateway: {addresses.gateway}   KV indexer: {addresses.indexer}   (Ctrl-C stops it)

Two simulated engines with OpenAI's API, which publish KV events as the real ones do:
{listed}

The gateway sends a request where its prompt is cached. Paste in another terminal:

{_curl("-i ", addresses.gateway + "/v1/chat/completions", chat[0])}

What it answered a moment ago; the first lines are headers, and say who served it and why:

{chat[1]}

The KV indexer tells a router of your own which engine has a prompt, and how much of it:

{_curl("", addresses.indexer + "/query", query[0])}

Its answer at this moment, counted in tokens:

{query[1]}

More to ask: {addresses.gateway}/status  {addresses.indexer}/metrics  {addresses.indexer}/dump

Below: "cached" is the share of prompt tokens that an engine need not compute, because it has them;
"exact" are answers of which kvd had expected just the cached tokens that the engine then reported.

"""


def _curl(flags: str, url: str, body: dict[str, object]) -> str:
    text = json.dumps(body, separators=(",", ":"))
    return f"curl -s {flags}{url} -H 'Content-Type: application/json' \\\n  -d '{text}'"


class LiveLine:
    """Keeps one line up to date on a terminal; elsewhere writes a new line now and then."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._tty = out.isatty()
        self.period_s = 0.5 if self._tty else 5.0

    def show(self, text: str) -> None:
        """Shows `text`; on a terminal the next line of any kind, also of a log, overwrites it."""
        self._out.write(f"{text}\x1b[K\r" if self._tty else f"{text}\n")
        self._out.flush()


def live_text(before: EventStats, now: EventStats, seconds: float, traffic: Traffic) -> str:
    """Returns the live line for the `seconds` that lie between the two readings."""
    events = (now.events - before.events) / seconds
    cached = 100 * traffic.cached_tokens // max(traffic.prompt_tokens, 1)
    return (  # short enough for 80 columns, as a wrapped line cannot be overwritten
        f"{events:.0f} events/s, {now.blocks} blocks, "
        f"{cached}% cached, {traffic.right}/{traffic.turns} answers exact"
    )
