"""Traces in Mooncake's form: one JSON object a line, prompts as chains of 512-token blocks.

    {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [block, ...]}

An id stands for a block and all that is before it, so equal ids are equal prefixes. The last id of
a prompt may stand for a block that is not full; such blocks are cached by nobody.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from kvd_core.base.hashing import local_hashes, sequence_hashes

BLOCK_SIZE = 512  # tokens


@dataclass(frozen=True, slots=True)
class Request:
    name: str
    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]  # the full ones, by id


def read(path: Path, limit: int | None = None, speed: float = 1.0) -> list[Request]:
    """Returns the first requests of a trace by arrival, which come `speed` times as fast."""
    with path.open() as lines:
        rows = [json.loads(line) for line in islice(lines, limit)]
    requests = [
        Request(
            f"r{number}",
            row["timestamp"] / 1000 / speed,
            row["input_length"],
            row["output_length"],
            tuple(row["hash_ids"][: row["input_length"] // BLOCK_SIZE]),
        )
        for number, row in enumerate(rows)
    ]
    return sorted(requests, key=lambda request: request.arrival_s)


def tokens_of(block: int) -> list[int]:
    """Returns made-up tokens for a block; small ones, which are short on the wire."""
    digits = [block >> shift & 127 for shift in (28, 21, 14, 7, 0)]
    return digits + [0] * (BLOCK_SIZE - len(digits))


class Prompts:
    """The hashes of prompts, each block's computed once."""

    def __init__(self) -> None:
        self._local: dict[int, int] = {}

    def local_hashes(self, blocks: tuple[int, ...]) -> list[int]:
        for block in blocks:
            if block not in self._local:
                self._local[block] = local_hashes(tokens_of(block), BLOCK_SIZE)[0]
        return [self._local[block] for block in blocks]

    def both(self, blocks: tuple[int, ...]) -> tuple[list[int], list[int]]:
        """Returns local and sequence hashes."""
        local = self.local_hashes(blocks)
        return local, list(sequence_hashes(array("Q", local)))


def reusable_share(requests: list[Request]) -> float:
    """Returns the share of prompt tokens that one cache without bounds would have had."""
    seen: set[int] = set()
    hits = 0
    for request in requests:
        # The last token is always computed: its output is wanted.
        usable = (request.input_tokens - 1) // BLOCK_SIZE
        for block in request.blocks[:usable]:
            if block not in seen:
                break
            hits += BLOCK_SIZE
        seen.update(request.blocks)
    return hits / sum(request.input_tokens for request in requests)
