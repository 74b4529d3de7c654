"""Logs when no query about a model and tenant has ever matched, although blocks are held."""

from __future__ import annotations

from collections.abc import Iterator

from kvd.index.partitions import State
from kvd.telemetry.logs import get_logger

CHECK_SLICE = 256  # partitions examined between two checkpoints: 0.1 ms

log = get_logger(__name__)


class UnmatchedLog:
    """Writes one line for each partition whose queries never match."""

    def __init__(self, state: State) -> None:
        self._state = state

    def check(self) -> Iterator[None]:
        """Logs partitions that have not been logged before; yields where other tasks may run."""
        for number, partition in enumerate(list(self._state.partitions.values()), 1):
            if partition.is_unmatched and not partition.unmatched_logged:
                partition.unmatched_logged = True
                model_name, tenant_id = partition.key
                log.warning(
                    "queries_never_match",
                    model=model_name,
                    tenant=tenant_id,
                    questions=partition.index.questions,
                    block_size=partition.block_size,
                )
            if number % CHECK_SLICE == 0:
                yield
