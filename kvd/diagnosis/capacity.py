"""Is there room for what engines cache?"""

from __future__ import annotations

from collections.abc import Iterator

from kvd.diagnosis.evidence import CapacityEvidence
from kvd.diagnosis.findings import Finding, found, minutes


def check_capacity(capacity: CapacityEvidence, watched_s: float) -> Iterator[Finding]:
    """Yields that blocks are refused, if some were lately."""
    if not capacity.refused_lately:
        return
    evidence = (
        f"{capacity.refused_lately} blocks refused in {minutes(watched_s)}, "
        f"{capacity.refused} in all; {capacity.blocks} blocks and "
        f"{capacity.pairs} pairs of a rank and a block are held"
    )
    if capacity.max_blocks:
        evidence += f", index_max_blocks is {capacity.max_blocks}"
        yield found("index_full", "index", evidence, "blocks", blocks=2 * capacity.max_blocks)
    else:
        yield found("index_full", "index", evidence, "hashes")
