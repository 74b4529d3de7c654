"""Reads traces in Mooncake's form: one JSON object a line, prompts as chains of 512-token blocks.

    {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [block, ...]}

The last id of a prompt may stand for a block that is not full; no engine caches such a block.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any

from kvd.replay.recording import RecordedRequest, Recording, ReplayError, from_zero, rows
from kvd_core.selector.selector import MAX_ISL_TOKENS

BLOCK_SIZE = 512  # tokens of a block of Mooncake's traces
SPREAD_S = 3.0  # time after a timestamp of Mooncake's traces within which its requests came

U64_MAX = 2**64 - 1
_MIX = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio; odd, so that ids stay different


def read(path: Path, limit: int | None) -> Recording:
    """Returns the first requests of a trace; raises ReplayError."""
    try:
        requests = [_request(number, row) for number, row in enumerate(islice(rows(path), limit))]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ReplayError(
            f"{path}: neither a trace in Mooncake's form nor a decision log ({error!r})"
        ) from None
    requests.sort(key=lambda request: request.arrival_s)
    return Recording(from_zero(requests), BLOCK_SIZE, SPREAD_S)


def _request(number: int, row: Mapping[str, Any]) -> RecordedRequest:
    tokens = _length(row, "input_length")
    full = tuple(mixed(block) for block in row["hash_ids"][: tokens // BLOCK_SIZE])
    hashes = array("Q", full).tobytes()
    at = row["timestamp"] / 1000
    if not isfinite(at):
        raise ValueError(f"timestamp: {at}")
    return RecordedRequest(f"r{number}", at, tokens, _length(row, "output_length"), full, hashes)


def _length(row: Mapping[str, Any], name: str) -> int:
    value = row[name]
    if not isinstance(value, int) or not 0 <= value <= MAX_ISL_TOKENS:
        raise ValueError(f"{name}: {value}")
    return value


def mixed(number: int) -> int:
    """Returns an id with evenly spread bits, as hashes have; a different one for each number."""
    return (number + 1) * _MIX & U64_MAX
