"""Recorded requests, whatever the form of their file.

The id of a block stands for the block and everything before it, so equal ids are equal prefixes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple


class ReplayError(Exception):
    """A replay cannot be made as it was asked for; the text says why."""


class RecordedRequest(NamedTuple):
    """A request of a trace: when it came, its lengths and its blocks."""

    name: str
    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]  # ids of the full blocks
    hashes: bytes  # the ids as native u64s


class Recorded(NamedTuple):
    """The outcome of a request as recorded; None is unknown."""

    cached_tokens: int
    first_token_s: float | None  # seconds after the arrival
    end_s: float | None  # seconds after the arrival


@dataclass(frozen=True, slots=True)
class Recording:
    """The content of a file."""

    requests: Sequence[RecordedRequest]  # by arrival, the first at 0
    block_size: int  # tokens
    spread_s: float  # a request arrived at most so long after its recorded arrival
    engines: int | None = None  # candidates of the largest choice, where choices are recorded
    recorded: Sequence[Recorded] = ()  # one for each request, or empty
    left_out: int = 0  # requests of other models and tenants
    damaged: int = 0  # lines that cannot be read


class Windows(StrEnum):
    """Selects the requests that count, by their recorded arrival; all are replayed."""

    ALL = "all"
    ODD = "odd"  # the first, the third...
    EVEN = "even"


def lines_of(path: Path) -> Iterator[str]:
    """Yields the lines of a file that are not blank; raises ReplayError."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            yield from (line for line in lines if line.strip())
    except OSError as error:
        raise ReplayError(f"{path}: {error.strerror or error}") from None


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a file's lines; raises ReplayError."""
    for number, line in enumerate(lines_of(path), 1):
        yield _row(path, number, line)


def _row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        return row_of(line)
    except ValueError as error:
        raise ReplayError(f"{path}, line {number}: {error}") from None


def row_of(line: str) -> dict[str, Any]:
    """Returns the object of a line; raises ValueError."""
    try:
        row = json.loads(line)
    except RecursionError:
        raise ValueError("arrays or objects are nested too deeply") from None
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    return row


def from_zero(requests: Sequence[RecordedRequest]) -> list[RecordedRequest]:
    """Returns requests with arrivals shifted so that the first one is at 0."""
    begin = requests[0].arrival_s if requests else 0.0
    return [request._replace(arrival_s=request.arrival_s - begin) for request in requests]


def reusable_share(requests: Sequence[RecordedRequest], block_size: int) -> float:
    """Returns the share of prompt tokens that a single unbounded cache would have had."""
    seen: set[int] = set()
    hits = 0
    for request in requests:
        # The last token is always computed, as its output is needed.
        usable = (request.input_tokens - 1) // block_size
        for block in request.blocks[:usable]:
            if block not in seen:
                break
            hits += block_size
        seen.update(request.blocks)
    return hits / max(1, sum(request.input_tokens for request in requests))
