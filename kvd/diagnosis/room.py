"""Is there room for what engines cache?"""

from __future__ import annotations

from collections.abc import Iterator

from kvd.diagnosis.evidence import RoomEvidence
from kvd.diagnosis.findings import Finding, found, minutes


def check_room(room: RoomEvidence, watched_s: float) -> Iterator[Finding]:
    """Yields that blocks are refused, if some were lately."""
    if not room.refused_lately:
        return
    evidence = (
        f"{room.refused_lately} blocks refused in {minutes(watched_s)}, {room.refused} in all; "
        f"{room.blocks} blocks and {room.pairs} pairs of a rank and a block are held"
    )
    if room.max_blocks:
        evidence += f", index_max_blocks is {room.max_blocks}"
        yield found("index_full", "index", evidence, "blocks", blocks=2 * room.max_blocks)
    else:
        yield found("index_full", "index", evidence, "hashes")
