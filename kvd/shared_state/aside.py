"""Requests of which replica sync tells: others hear of them by that way, and are not told again.

    ZMQ event ──> Aside.apply ──> a face, while the journal of the shared state is paused

Where both ways are on, a request is booked by whichever is faster, and the other finds it booked.
"""

from __future__ import annotations

from collections.abc import Callable

from kvd.model import PartitionKey
from kvd.wire.lifecycle import Lifecycle, Outcome, Step
from kvd_core.ledger.journal import Journal

# Records that wait for the server: those of 20 s at 100 bookings a second of 1,000 blocks.
MAX_WAITING_BYTES = 16 * 1024 * 1024


class Aside:
    """What has come by replica sync alone."""

    def __init__(self, journal: Journal) -> None:
        self.requests: set[tuple[PartitionKey, str]] = set()
        self._journal = journal

    def apply(self, event: Lifecycle, apply: Callable[[Lifecycle], Outcome]) -> Outcome:
        """Has a face apply an event without anybody being told of it."""
        self._journal.pause()
        try:
            outcome = apply(event)
        finally:
            self._journal.resume()
        if outcome is Outcome.APPLIED:
            name = event.partition, event.request_id
            if event.step is Step.ADD:
                self.requests.add(name)
            elif event.step is Step.FREE:
                self.requests.discard(name)
        return outcome
