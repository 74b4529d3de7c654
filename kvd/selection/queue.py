"""Holds selections that wait because every rank that may serve them is busy.

    constraints (allowed ranks)     waiting, best first
    none                           [s7 s3 s9]      a heap by (strict priority, score, arrival)
    {worker 1}                     [s4]
    {worker 2, worker 5}           [s8 s6]

1. Selections with the same constraints wait in one queue. Its first selection decides: if that
   cannot be served, no selection behind it can.
2. A queue that cannot move blocks no other queue. (In Dynamo, requests with constraints share one
   queue, and its head holds up requests behind it whose workers are idle.)
3. A queue without waiting selections does not exist.
4. A queue falls asleep when its first selection cannot be served, and remembers the ranks that the
   selection waits for. It wakes when one of these changes or another selection becomes the first.
   Asking it earlier would bring the same result.

Costs: push and remove O(log n); wake 0.1 us a queue; release O(log n) for each queue that is
awake and each selection that is released. Removed selections stay in the heap, marked, until they
reach its top or make up half of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")

ANYONE = -1  # all bits: a change of any rank


class QueuePolicy(StrEnum):
    """The order among selections of the same strict priority."""

    FCFS = "fcfs"  # in order of arrival; a priority jump moves the arrival back by its seconds
    WSPT = "wspt"  # the shortest uncached prompt first, weighted by the priority jump


@dataclass(frozen=True, slots=True)
class Urgency:
    """What decides the position of a request in its queue, beside its time of arrival."""

    strict_priority: int = 0  # higher priorities go first under every policy
    priority_jump: float = 0.0  # seconds under FCFS, a weight under WSPT; below 0 counts as 0
    uncached_tokens: int = 0  # of the prompt, on the worker that caches most of it

    def score(self, policy: QueuePolicy, arrival: float) -> float:
        """Returns the score among selections of equal strict priority; higher goes first."""
        jump = max(0.0, self.priority_jump)
        if policy is QueuePolicy.FCFS:
            return jump - arrival
        return (1.0 + jump) / max(1, self.uncached_tokens)


@dataclass(slots=True, eq=False)
class Waiting(Generic[T]):
    """One waiting selection; `entry` is the value that the caller has pushed."""

    constraints: Hashable
    entry: T
    urgency: Urgency
    arrival: float
    number: int  # decides between selections of the same score
    sort_key: tuple[int, float, int]  # the smallest is served first
    queued: bool = True

    def __lt__(self, other: Waiting[T]) -> bool:
        return self.sort_key < other.sort_key


@dataclass(slots=True)
class _ConstraintQueue(Generic[T]):
    """The selections that wait with the same constraints."""

    heap: list[Waiting[T]] = field(default_factory=list)
    live: int = 0
    awaits: int = ANYONE  # bits of the ranks that its first selection waits for

    def first(self) -> Waiting[T]:
        while not self.heap[0].queued:
            heapq.heappop(self.heap)
        return self.heap[0]

    def forget(self, waiting: Waiting[T]) -> None:
        waiting.queued = False
        self.live -= 1
        if len(self.heap) > 2 * self.live:
            self.heap = [one for one in self.heap if one.queued]
            heapq.heapify(self.heap)


class SelectionQueue(Generic[T]):
    """The waiting selections of one model and tenant."""

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        self._queues: dict[Hashable, _ConstraintQueue[T]] = {}
        self._awake: set[Hashable] = set()  # queues whose first selection is to be tried
        self._arrivals = count()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[T]:
        """Yields all waiting selections, in no order."""
        for queue in self._queues.values():
            yield from (waiting.entry for waiting in queue.heap if waiting.queued)

    def waits(self, constraints: Hashable) -> bool:
        """Returns whether others with these constraints wait already."""
        return constraints in self._queues

    def reorder(self, policy: QueuePolicy) -> None:
        """Orders all selections by another policy, including those that wait already. O(n)."""
        self.policy = policy
        for queue in self._queues.values():
            for waiting in queue.heap:
                waiting.sort_key = self._sort_key(waiting.urgency, waiting.arrival, waiting.number)
            heapq.heapify(queue.heap)
        self.wake()

    def _sort_key(self, urgency: Urgency, arrival: float, number: int) -> tuple[int, float, int]:
        return -urgency.strict_priority, -urgency.score(self.policy, arrival), number

    def push(self, constraints: Hashable, entry: T, urgency: Urgency, now: float) -> Waiting[T]:
        """Adds a selection; one without constraints has `constraints` None."""
        number = next(self._arrivals)
        sort_key = self._sort_key(urgency, now, number)
        waiting = Waiting(constraints, entry, urgency, now, number, sort_key)
        into = self._queues.setdefault(constraints, _ConstraintQueue())
        heapq.heappush(into.heap, waiting)
        into.live += 1
        if into.first() is waiting:
            self._awake.add(constraints)
        self._length += 1
        return waiting

    def remove(self, waiting: Waiting[T]) -> bool:
        """Takes a selection out of its queue; returns False if it was out already."""
        if not waiting.queued:
            return False
        queue = self._queues[waiting.constraints]
        if queue.first() is waiting:
            self._awake.add(waiting.constraints)
        queue.forget(waiting)
        if not queue.live:
            del self._queues[waiting.constraints]
            self._awake.discard(waiting.constraints)
        self._length -= 1
        return True

    def wake(self, changed: int = ANYONE) -> None:
        """Wakes the queues that wait for any of the `changed` ranks, given as bits."""
        self._awake.update(name for name, queue in self._queues.items() if queue.awaits & changed)

    def release(self, serve: Callable[[T], int]) -> Iterator[T]:
        """Takes selections out of the queues that are awake, best first, and yields them.

        `serve` answers a selection and returns 0, or returns the bits of the ranks that must change
        before it can. Each selection is booked before the next one is tried, which so meets its
        load. A queue whose first selection was not served is not tried again: a booking makes no
        rank idle.
        """
        heads = [self._queues[name].first() for name in self._awake]
        heapq.heapify(heads)
        while heads:
            best = heapq.heappop(heads)
            queue = self._queues[best.constraints]
            if awaits := serve(best.entry):
                queue.awaits = awaits
                self._awake.discard(best.constraints)
                continue
            self.remove(best)
            if queue.live:
                heapq.heappush(heads, queue.first())
            yield best.entry
