"""Ends of requests that come before their beginnings.

A request may be booked through one replica and ended through another. Each sends its own steps
in order, but nothing orders those of two: a replica that has stalled, or hears one of them later
than the other, may read the end first.

    B reads      C: free r1        A: add r1
    here         noted    ──────>  not booked (ENDED)
                 C: completed r2   A: add r2
                 noted    ──────>  booked without tokens to prefill

1. Only what replicas send is noted, and only their ADDs are judged by it: what clients book here is
   booked.
2. A note meets an ADD of the same request, worker and rank, once.
3. It meets none by the replica that sent the end: its steps come in order, so that ADD is
   a later one.
4. A note is as old as EARLY_STEPS_S at most; beyond MAX_EARLY_STEPS the oldest goes.

An id that another replica uses again on the same rank, within that age of an end that met nothing
(both had ended it, or its ADD was lost), is missed here until it ends.

Costs: O(1), about 1 µs a step; some 400 bytes a note. No clock: moments come in as arguments.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvd.wire.lifecycle import Lifecycle, Step

# Time by which the ADD may come behind its end: a replica that is not heard for 15 s is cut off,
# and then reads what has queued, which takes seconds. What was cut off never comes.
EARLY_STEPS_S = 60.0
# Ends of unknown requests that are remembered: as many events as queue for a stalled replica.
MAX_EARLY_STEPS = 100_000
# Outdated notes dropped with each step: more than a step may leave behind.
OUTDATED_AT_ONCE = 16


@dataclass(slots=True)
class _Note:
    router_id: int  # who sent the end
    freed: bool  # or only its prefill has been completed
    at: float


class EarlySteps:
    """Keeps steps of requests whose booking has not come yet."""

    def __init__(self) -> None:
        self._notes: OrderedDict[object, _Note] = OrderedDict()  # oldest first
        self.forgotten = 0  # at MAX_EARLY_STEPS

    def __len__(self) -> int:
        return len(self._notes)

    def note(self, event: Lifecycle, now: float) -> None:
        """Notes the end of a request that is unknown, or of its prefill."""
        self._outdate(now)
        key = _key(event)
        known = self._notes.pop(key, None)
        freed = event.step is Step.FREE or (known is not None and known.freed)
        self._notes[key] = _Note(event.router_id, freed, now)
        if len(self._notes) > MAX_EARLY_STEPS:
            self._notes.popitem(last=False)
            self.forgotten += 1

    def meet(self, event: Lifecycle, now: float) -> Step | None:
        """Returns the step that has come before an ADD, if one has, and forgets it."""
        self._outdate(now)
        key = _key(event)
        known = self._notes.get(key)
        if known is None or known.router_id == event.router_id or now - known.at > EARLY_STEPS_S:
            return None
        del self._notes[key]
        return Step.FREE if known.freed else Step.PREFILL_COMPLETE

    def _outdate(self, now: float) -> None:
        for _ in range(OUTDATED_AT_ONCE):
            oldest = next(iter(self._notes.values()), None)
            if oldest is None or now - oldest.at <= EARLY_STEPS_S:
                return
            self._notes.popitem(last=False)


def _key(event: Lifecycle) -> object:
    return event.partition, event.request_id, event.worker_id, event.dp_rank
