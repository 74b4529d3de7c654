"""A small trace in Mooncake's form."""

from __future__ import annotations

import json
from pathlib import Path

from kvd.replay.mooncake import BLOCK_SIZE


def conversations(folder: Path) -> Path:
    """Writes eight conversations side by side; each turn adds two blocks to the one before."""
    path = folder / "trace.jsonl"
    lines = []
    for turn in range(6):
        for conversation in range(8):
            own = [1 + conversation * 100 + number for number in range(2 * turn + 2)]
            request = {
                "timestamp": turn * 3000 + conversation * 250,
                "input_length": (1 + len(own)) * BLOCK_SIZE + 7,
                "output_length": 5 + conversation,
                "hash_ids": [0, *own, 5000 + turn * 100 + conversation],  # the last is partial
            }
            lines.append(json.dumps(request) + "\n")
    path.write_text("".join(lines))
    return path
