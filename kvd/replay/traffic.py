"""Recorded requests, and what is made of them before they are replayed.

    Mooncake's form, one JSON object a line          kvd's decision log (kvd/selection/decisions.py)
      timestamp, input_length, output_length,          bookings with their prompts' block hashes,
      hash_ids of blocks of 512 tokens                 ends of prefills and of requests
                └────────────────> Recording <───────────────┘
                                       │ spread, speed-up, output scale, unique prompts
                                       v
                                   list[Request], by arrival

An id stands for a block and all that is before it, so equal ids are equal prefixes. The last id of
a prompt in Mooncake's form may stand for a block that is not full; such blocks are cached by
nobody.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

MOONCAKE_BLOCK_SIZE = 512  # tokens
# Mooncake's timestamps are those of intervals of 3 s, in which their requests came.
MOONCAKE_SPREAD_S = 3.0

U64 = 2**64 - 1
_MIX = 0x9E3779B97F4A7C15  # 2^64 by the golden ratio, odd: ids stay different


class ReplayError(Exception):
    """Nothing can be replayed as it was asked for; the text says why."""


class Request(NamedTuple):
    name: str
    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]  # the full ones, by id
    hashes: bytes  # the ids as native u64s


class Recorded(NamedTuple):
    """What became of a request when it was recorded; None is unknown."""

    cached_tokens: int
    first_token_s: float | None  # seconds after the arrival, as is the next
    end_s: float | None


@dataclass(frozen=True, slots=True)
class Recording:
    """What a file holds."""

    requests: Sequence[Request]  # by arrival, the first at 0
    block_size: int  # tokens
    spread_s: float  # how exact arrivals are
    engines: int | None = None  # candidates of the largest choice, where choices are recorded
    recorded: Sequence[Recorded] = ()  # of each request, or nothing
    left_out: int = 0  # requests of other models and tenants


class Windows(StrEnum):
    """Whose requests count, by when they were recorded; all are replayed."""

    ALL = "all"
    ODD = "odd"  # the first, the third...
    EVEN = "even"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests of a file, and what is made of them."""

    path: Path
    limit: int | None = None  # requests
    model: str | None = None  # of a decision log: the most frequent one
    windows: Windows = Windows.ALL
    window_s: float = 300.0  # as recorded
    spread_s: float | None = None  # as the recording says
    speed_up: float = 1.0
    output_scale: float = 1.0
    unique_prompts: bool = False  # no prompt shares anything with another

    def requests(self, seed: int) -> list[Request]:
        """Returns the requests of one round; rounds differ in arrivals that are not exact."""
        held = _spread(self.recording(), self.spread_s, Random(seed))
        return [self._changed(number, request) for number, request in enumerate(held)]

    def counts(self, request: Request) -> bool:
        """Says whether a request is of the windows that count."""
        if self.windows is Windows.ALL:
            return True
        number = int(request.arrival_s * self.speed_up // self.window_s)
        return number % 2 == (self.windows is Windows.EVEN)

    def recording(self) -> Recording:
        return read(self.path, self.limit, self.model)

    def _changed(self, number: int, request: Request) -> Request:
        request = request._replace(
            arrival_s=request.arrival_s / self.speed_up,
            output_tokens=max(1, round(request.output_tokens * self.output_scale)),
        )
        if not self.unique_prompts:
            return request
        own = (mixed(number << 24 | depth) for depth in range(len(request.blocks)))
        return replaced(request, own)


def mixed(number: int) -> int:
    """Returns an id with evenly spread bits, as hashes have; others for other numbers."""
    return (number + 1) * _MIX & U64


def replaced(request: Request, blocks: Iterable[int]) -> Request:
    """Returns a request with other blocks."""
    held = tuple(blocks)
    return request._replace(blocks=held, hashes=array("Q", held).tobytes())


@lru_cache(maxsize=4)  # rounds and policies replay the same
def read(path: Path, limit: int | None = None, model: str | None = None) -> Recording:
    """Returns what a file holds, in either form; raises ReplayError."""
    from kvd.replay import decision_log  # which uses this module

    rows = islice(_rows(path), None)
    first = next(rows, None)
    if first is None:
        raise ReplayError(f"{path}: the file is empty")
    if decision_log.is_line(first):
        return decision_log.read(path, limit, model)
    if model is not None:
        raise ReplayError(f"{path}: only decision logs name models")
    return _mooncake(path, islice(_rows(path), limit))


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a file's lines; raises ReplayError."""
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _row(path, number, line)
    except (OSError, UnicodeDecodeError) as error:
        raise ReplayError(f"{path}: {error}") from None


def _row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ReplayError(f"{path}, line {number}: {error}") from None
    if not isinstance(row, dict):
        raise ReplayError(f"{path}, line {number}: not a JSON object")
    return row


def _mooncake(path: Path, rows: Iterable[Mapping[str, Any]]) -> Recording:
    try:
        requests = [
            _request(
                number,
                row["timestamp"] / 1000,
                row["input_length"],
                row["output_length"],
                (mixed(block) for block in row["hash_ids"]),
                MOONCAKE_BLOCK_SIZE,
            )
            for number, row in enumerate(rows)
        ]
    except (KeyError, TypeError) as error:
        raise ReplayError(
            f"{path}: neither a trace in Mooncake's form nor a decision log ({error!r})"
        ) from None
    requests.sort(key=lambda request: request.arrival_s)
    return Recording(from_zero(requests), MOONCAKE_BLOCK_SIZE, MOONCAKE_SPREAD_S)


def _request(
    number: int,
    arrival_s: float,
    input_tokens: int,
    output_tokens: int,
    blocks: Iterable[int],
    block_size: int,
) -> Request:
    full = tuple(islice(blocks, input_tokens // block_size))
    hashes = array("Q", full).tobytes()
    return Request(f"r{number}", arrival_s, input_tokens, output_tokens, full, hashes)


def from_zero(requests: Sequence[Request]) -> list[Request]:
    """Returns requests as many seconds earlier as make the first arrive at 0."""
    begin = requests[0].arrival_s if requests else 0.0
    return [request._replace(arrival_s=request.arrival_s - begin) for request in requests]


def _spread(recording: Recording, given_s: float | None, random: Random) -> Iterator[Request]:
    """Yields requests by arrival, each moved by chance towards the next other arrival.

    So equal arrivals come in any order, and nobody overtakes who came before.
    """
    spread_s = recording.spread_s if given_s is None else given_s
    requests = recording.requests
    if not spread_s:
        yield from requests
        return
    following = math.inf
    moved = []
    for at in range(len(requests) - 1, -1, -1):
        arrival_s = requests[at].arrival_s
        if at + 1 < len(requests) and requests[at + 1].arrival_s > arrival_s:
            following = requests[at + 1].arrival_s
        end_s = min(following, arrival_s + spread_s)
        moved.append(requests[at]._replace(arrival_s=random.uniform(arrival_s, end_s)))
    yield from sorted(moved, key=lambda request: request.arrival_s)


def reusable_share(requests: Sequence[Request], block_size: int) -> float:
    """Returns the share of prompt tokens that one cache without bounds would have had."""
    seen: set[int] = set()
    hits = 0
    for request in requests:
        # The last token is always computed: its output is wanted.
        usable = (request.input_tokens - 1) // block_size
        for block in request.blocks[:usable]:
            if block not in seen:
                break
            hits += block_size
        seen.update(request.blocks)
    return hits / sum(request.input_tokens for request in requests)
