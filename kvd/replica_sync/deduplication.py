"""Keeps requests known through replica sync from being sent again through the shared state.

    ZMQ event ──> Deduplicator.apply ──> a face, while the journal of the shared state is paused

With both replica sync and shared state on, the faster of them books a request. The slower finds it
booked already, or finds that it has ended.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from kvd.model import PartitionKey
from kvd.wire.lifecycle import Lifecycle, Outcome, Step
from kvd_core.ledger.journal import Journal

# Ends of requests that are remembered, and for how long: their bookings may arrive later, by the
# slower of the two ways.
MAX_ENDED = 65_536
ENDED_S = 60.0

# Most outdated ends forgotten with each new one: more than one adds, so they do not stay.
OUTDATED_AT_ONCE = 16


class Deduplicator:
    """Remembers requests known from replica sync alone, and ended ones that it must not book."""

    def __init__(self, journal: Journal, clock: Callable[[], float]) -> None:
        self.requests: set[tuple[PartitionKey, str]] = set()
        # When each ended, oldest first.
        self._ended: OrderedDict[tuple[PartitionKey, str], float] = OrderedDict()
        self._journal = journal
        self._clock = clock
        self._is_recording = True  # but for what replicas send

    def pause(self) -> None:
        """Has the journal record nothing until `resume`: what is restored was sent before."""
        self._is_recording = False
        self._journal.pause()

    def resume(self) -> None:
        self._is_recording = True
        self._journal.resume()

    def note_end(self, key: PartitionKey, request_id: str) -> None:
        """Notes the end of a request, read from the stream or requested by a client here."""
        now = self._clock()
        self._ended.pop((key, request_id), None)
        self._ended[key, request_id] = now
        for _ in range(OUTDATED_AT_ONCE):
            oldest = next(iter(self._ended.values()))
            if len(self._ended) <= MAX_ENDED and oldest >= now - ENDED_S:
                return
            self._ended.popitem(last=False)

    def apply(
        self,
        event: Lifecycle,
        apply: Callable[[Lifecycle], Outcome],
        ease: Callable[[PartitionKey], None],
    ) -> Outcome:
        """Lets a face apply an event while the journal is paused.

        Waiting selections are woken by `ease` afterwards: their bookings must be recorded.
        """
        name = event.partition, event.request_id
        if event.step is Step.ADD and self._ended.pop(name, -ENDED_S) > self._clock() - ENDED_S:
            return Outcome.ENDED
        self._journal.pause()
        try:
            outcome = apply(event)
        finally:
            if self._is_recording:
                self._journal.resume()
        if outcome is Outcome.APPLIED:
            if event.step is Step.ADD:
                self.requests.add(name)
            elif event.step is Step.FREE:
                self.requests.discard(name)
            ease(event.partition)
        return outcome
