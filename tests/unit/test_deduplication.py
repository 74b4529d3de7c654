"""What is remembered of requests that two ways of telling replicas of them may name."""

from __future__ import annotations

from kvd.model import PartitionKey
from kvd.replica_sync.deduplication import ENDED_S, OUTDATED_AT_ONCE, Deduplicator
from kvd_core.ledger.journal import Journal


def test_outdated_ends_are_forgotten_a_few_at_a_time() -> None:
    """All of them at once, at the first end after a quiet minute, would hold up the loop."""
    now, many = 0.0, 1000
    deduplicator = Deduplicator(Journal(0), lambda: now)
    for number in range(many):
        deduplicator.note_end(PartitionKey("m", "default"), f"r{number}")
    now = ENDED_S + 1
    for number in range(many):
        deduplicator.note_end(PartitionKey("m", "default"), f"later{number}")
        left = max(0, many - (number + 1) * OUTDATED_AT_ONCE)
        assert len(deduplicator._ended) == left + number + 1
