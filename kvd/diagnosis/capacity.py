"""Is there room for what engines cache, and can files be written?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvd.diagnosis.evidence import CapacityEvidence
from kvd.diagnosis.findings import Finding, counted, found, minutes


def check_capacity(capacity: CapacityEvidence, watched_s: float) -> Iterator[Finding]:
    """Yields a finding if the index has refused blocks lately."""
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


def check_files(unwritten: Mapping[str, int], watched_s: float) -> Iterator[Finding]:
    """Yields a finding for each content whose writes have failed lately."""
    for name, failed in unwritten.items():
        evidence = f"{counted(failed, 'write')} failed in {minutes(watched_s)}"
        yield found("files_not_written", name, evidence)
