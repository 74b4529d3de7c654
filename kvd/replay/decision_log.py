"""Reads kvd's decision log as recorded requests.

A request arrives when it was booked. The length of its output is the one that its engine reported,
else the one that its client expected, else the time between the end of its prefill and its end at
ASSUMED_INTERVAL_S a token, else one token.
"""

from __future__ import annotations

from array import array
from base64 import b64decode
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvd.replay.recording import (
    Recorded,
    RecordedRequest,
    Recording,
    ReplayError,
    from_zero,
    lines_of,
    row_of,
)
from kvd.selection.decisions import CHOICE, END, PREFILL_COMPLETE
from kvd.selection.phases import PREFILL_SUFFIX
from kvd.telemetry.rotating import files_of

ASSUMED_INTERVAL_S = 0.03  # assumed between output tokens, where only their whole time is known

Row = Mapping[str, Any]


@dataclass(slots=True)
class _Life:
    """The lines of one booking."""

    choice: Row
    prefilled_at: float | None = None
    end: Row | None = None

    def output_tokens(self) -> int:
        known = None if self.end is None else self.end.get("output_tokens")
        known = known or self.choice.get("expected_output_tokens")
        if known:
            return int(known)
        if self.end is None or self.prefilled_at is None:
            return 1
        decoded_s = float(self.end["at"]) - self.prefilled_at
        return max(1, round(decoded_s / ASSUMED_INTERVAL_S))

    def recorded(self) -> Recorded:
        at = self.choice["at"]
        first = None if self.prefilled_at is None else self.prefilled_at - at
        end = None if self.end is None or self.end.get("dropped") else self.end["at"] - at
        return Recorded(self.choice["cached_tokens"], first, end)

    def request(self, number: int) -> RecordedRequest:
        choice = self.choice
        packed = b64decode(choice["hashes"], validate=True)
        blocks = array("Q", packed)[: choice["prompt_tokens"] // choice["hashed_tokens"]]
        return RecordedRequest(
            f"r{number}",
            float(choice["at"]),
            choice["prompt_tokens"],
            self.output_tokens(),
            tuple(blocks),
            blocks.tobytes(),
        )


@dataclass(slots=True)
class _Lives:
    """Bookings in the order of their choices; an id may come again after its end."""

    all: list[_Life] = field(default_factory=list)
    live: dict[str, _Life] = field(default_factory=dict)

    def take(self, row: Row) -> None:
        name, event = row["request"], row["event"]
        if event == CHOICE:
            # Else it is the prefill part of a request that another worker answers.
            if not name.endswith(PREFILL_SUFFIX):
                self.live[name] = life = _Life(row)
                self.all.append(life)
        elif event == PREFILL_COMPLETE and name in self.live:
            self.live[name].prefilled_at = self.live[name].prefilled_at or row["at"]
        elif event == END and name in self.live:
            self.live.pop(name).end = row


def is_log(path: Path) -> bool:
    """Returns whether a file is a decision log, by its first line that can be read."""
    # The newest file of a log may still be empty.
    row = next(filter(None, _lines(files_of(path)[::-1])), None)
    return row is not None and "event" in row and "at" in row


def read(path: Path, limit: int | None, model: str | None) -> Recording:
    """Returns the requests of a log and of the files before it; raises ReplayError."""
    lives = _Lives()
    damaged = 0
    try:
        for row in _lines(files_of(path)):
            if row is None:
                damaged += 1
            else:
                lives.take(row)
        of_model = _of_one_model(path, lives.all, model)
        held = sorted(of_model, key=lambda life: life.choice["at"])[:limit]
        requests = [life.request(number) for number, life in enumerate(held)]
        sizes = {life.choice["hashed_tokens"] for life in held}
        if len(sizes) != 1:
            raise ReplayError(f"{path}: the block size of the workers has changed, {sizes}")
        return Recording(
            from_zero(requests),
            sizes.pop(),
            0.0,
            max(life.choice["candidates"] for life in held),
            [life.recorded() for life in held],
            len(lives.all) - len(of_model),
            damaged,
        )
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise ReplayError(f"{path}: a line of the decision log is damaged ({error!r})") from None


def _lines(files: Iterable[Path]) -> Iterator[Row | None]:
    """Yields the lines of all files, None for a line that a full disk or a killed kvd has cut."""
    for file in files:
        for line in lines_of(file):
            try:
                yield row_of(line)
            except ValueError:
                yield None


def _of_one_model(path: Path, lives: Iterable[_Life], model: str | None) -> list[_Life]:
    """Returns the requests of the named model, else the most frequent one, and its main tenant."""
    keys = Counter((life.choice["model"], life.choice["tenant"]) for life in lives)
    wanted = [(count, key) for key, count in keys.items() if model in (None, key[0])]
    if not wanted:
        raise ReplayError(
            f"{path}: no request of model {model!r}" if model else f"{path}: no choice"
        )
    _, chosen = max(wanted)
    return [life for life in lives if (life.choice["model"], life.choice["tenant"]) == chosen]
