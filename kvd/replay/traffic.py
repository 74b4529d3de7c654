"""Selects the recorded requests that are replayed, and arranges them.

trace in Mooncake's form ─┐
                          ├─> Recording ── spread, speed-up, output scale, unique prompts ─┐
kvd's decision log ───────┘                                                                │
                                        list[RecordedRequest], by arrival  <───────────────┘
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random

from kvd.replay import decision_log, mooncake
from kvd.replay.mooncake import mixed
from kvd.replay.recording import RecordedRequest, Recording, ReplayError, Windows, lines_of


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests of a file, and how they are changed for a replay."""

    path: Path
    limit: int | None = None  # requests
    model: str | None = None  # in a decision log; None: the most frequent one
    windows: Windows = Windows.ALL
    window_s: float = 300.0  # in recorded time
    spread_s: float | None = None  # None: that of the recording
    speed_up: float = 1.0
    output_scale: float = 1.0
    unique_prompts: bool = False  # no prompt shares anything with another

    def requests(self, seed: int) -> list[RecordedRequest]:
        """Returns the requests of one round; rounds differ where arrivals are not exact."""
        held = _spread(self.recording(), self.spread_s, Random(seed))
        return [self._changed(number, request) for number, request in enumerate(held)]

    def counts(self, request: RecordedRequest) -> bool:
        """Returns whether a request is in the windows that count."""
        if self.windows is Windows.ALL:
            return True
        number = int(request.arrival_s * self.speed_up // self.window_s)
        return number % 2 == (self.windows is Windows.EVEN)

    def recording(self) -> Recording:
        return read(self.path, self.limit, self.model)

    def _changed(self, number: int, request: RecordedRequest) -> RecordedRequest:
        request = request._replace(
            arrival_s=request.arrival_s / self.speed_up,
            output_tokens=max(1, round(request.output_tokens * self.output_scale)),
        )
        if not self.unique_prompts:
            return request
        own = array("Q", (mixed(number << 24 | depth) for depth in range(len(request.blocks))))
        return request._replace(blocks=tuple(own), hashes=own.tobytes())


@lru_cache(maxsize=4)  # all rounds and policies replay the same file
def read(path: Path, limit: int | None = None, model: str | None = None) -> Recording:
    """Returns the content of a file, in either form; raises ReplayError."""
    if decision_log.is_log(path):
        return decision_log.read(path, limit, model)
    if next(lines_of(path), None) is None:
        raise ReplayError(f"{path}: the file is empty")
    if model is not None:
        raise ReplayError(f"{path}: --model needs a decision log: Mooncake's traces name no models")
    return mooncake.read(path, limit)


def _spread(
    recording: Recording, given_s: float | None, random: Random
) -> Iterator[RecordedRequest]:
    """Yields requests by arrival, each moved at random towards the next later arrival.

    So requests with equal arrivals come in any order, and none overtakes an earlier one.
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
