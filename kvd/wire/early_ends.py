"""Ends of requests that arrive before their bookings.

A request may be booked through one replica and ended through another. Each replica sends its own
steps in order, but nothing orders the steps of two replicas. So a replica that has stalled, or is
slower to hear one of them than the other, may read the end first.

    B reads      C: free r1        A: add r1
    here         noted    ──────>  not booked (ENDED)
                 C: completed r2   A: add r2
                 noted    ──────>  booked without tokens to prefill

1. Only steps from replicas are noted, and notes apply only to ADDs from replicas: a booking by a
   client of this process is always made.
2. A note applies to one ADD of the same request, worker and rank.
3. It does not apply to an ADD from the replica that sent the end: that replica's steps come in
   order, so such an ADD is a later request.
4. A note expires after EARLY_STEPS_S; beyond MAX_EARLY_STEPS the oldest is dropped.

The price: an end that met no booking (two replicas had ended the request, or its ADD was lost)
leaves a note. If another replica reuses the id on the same rank before the note expires, that
request is not booked here.

Costs: O(1), about 1 µs a step; some 400 bytes a note. No clock: moments come in as arguments.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvd.wire.lifecycle import Lifecycle, Step

# Longest time for which an ADD may be later than its end: a replica that is silent for 15 s is cut
# off, and reading what was queued by then takes seconds. Later messages of it never come.
EARLY_STEPS_S = 60.0
# Most ends of unknown requests that are remembered: as many events as queue for a stalled replica.
MAX_EARLY_STEPS = 100_000
# Most outdated notes dropped with each step: more than a step can add.
OUTDATED_AT_ONCE = 16


@dataclass(slots=True)
class _Note:
    router_id: int  # the replica that sent the end
    freed: bool  # False: only its prefill was completed
    noted_at: float


class EarlySteps:
    """Keeps steps of requests whose booking has not come yet."""

    def __init__(self) -> None:
        self._notes: OrderedDict[object, _Note] = OrderedDict()  # oldest first
        self.forgotten = 0  # at MAX_EARLY_STEPS

    def __len__(self) -> int:
        return len(self._notes)

    def note(self, event: Lifecycle, now: float) -> None:
        """Notes the end of an unknown request, or of its prefill."""
        self._outdate(now)
        key = _key(event)
        known = self._notes.pop(key, None)
        freed = event.step is Step.FREE or (known is not None and known.freed)
        self._notes[key] = _Note(event.router_id, freed, now)
        if len(self._notes) > MAX_EARLY_STEPS:
            self._notes.popitem(last=False)
            self.forgotten += 1

    def meet(self, event: Lifecycle, now: float) -> Step | None:
        """Returns and forgets the step that came before this ADD, if one did."""
        self._outdate(now)
        key = _key(event)
        known = self._notes.get(key)
        if (
            known is None
            or known.router_id == event.router_id
            or now - known.noted_at > EARLY_STEPS_S
        ):
            return None
        del self._notes[key]
        return Step.FREE if known.freed else Step.PREFILL_COMPLETE

    def _outdate(self, now: float) -> None:
        for _ in range(OUTDATED_AT_ONCE):
            oldest = next(iter(self._notes.values()), None)
            if oldest is None or now - oldest.noted_at <= EARLY_STEPS_S:
                return
            self._notes.popitem(last=False)


def _key(event: Lifecycle) -> object:
    return event.partition, event.request_id, event.worker_id, event.dp_rank
