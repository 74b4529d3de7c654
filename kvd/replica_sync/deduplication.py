"""Keeps requests known through replica sync from being sent again through the shared state.

    ZMQ event ──> Deduplicator.apply ──> a face, while the journal of the shared state is paused

Where both ways are on, a request is booked by whichever is faster, and the other finds it booked,
or finds that it has ended.
"""

from __future__ import annotations

from collections.abc import Callable

from kvd.model import PartitionKey
from kvd.wire.lifecycle import Lifecycle, Outcome, Step
from kvd_core.ledger.journal import Journal

# Ends that are remembered, and how long: a booking may come by the slower way after them.
MAX_ENDED = 65_536
ENDED_S = 60.0


class Deduplicator:
    """Remembers requests known by replica sync alone, and those it must not bring any more."""

    def __init__(self, journal: Journal, clock: Callable[[], float]) -> None:
        self.requests: set[tuple[PartitionKey, str]] = set()
        self._ended: dict[tuple[PartitionKey, str], float] = {}  # the oldest first
        self._journal = journal
        self._clock = clock

    def note_end(self, key: PartitionKey, request_id: str) -> None:
        """Notes the end of a request, read in the stream or asked for by a client here."""
        now = self._clock()
        self._ended.pop((key, request_id), None)
        self._ended[key, request_id] = now
        while True:
            name, at = next(iter(self._ended.items()))
            if len(self._ended) <= MAX_ENDED and at >= now - ENDED_S:
                return
            del self._ended[name]

    def apply(self, event: Lifecycle, apply: Callable[[Lifecycle], Outcome]) -> Outcome:
        """Has a face apply an event with the journal paused."""
        name = event.partition, event.request_id
        if event.step is Step.ADD and self._ended.pop(name, -ENDED_S) > self._clock() - ENDED_S:
            return Outcome.ENDED
        self._journal.pause()
        try:
            outcome = apply(event)
        finally:
            self._journal.resume()
        if outcome is Outcome.APPLIED:
            if event.step is Step.ADD:
                self.requests.add(name)
            elif event.step is Step.FREE:
                self.requests.discard(name)
        return outcome
