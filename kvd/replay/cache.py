"""The prefix cache of a simulated engine, as vLLM keeps it, and the events it publishes.

    blocks     [ pinned by running requests | idle, least recently used first ]   named, by id
               [ anonymous: being prefilled, not full, or output              ]
    capacity   named + anonymous <= capacity

1. A running request pins the whole prefix of its prompt, so a pinned block has no idle ancestor.
2. A prompt is unpinned from its end, so an idle block comes before its ancestors: the block that is
   evicted first is always a leaf.

All calls are O(blocks of a prompt).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Stored(NamedTuple):
    """Consecutive blocks are cached from now on; the first follows `parent`."""

    blocks: Sequence[int]  # by id
    parent: int | None


class Removed(NamedTuple):
    """Blocks that a cache has dropped."""

    blocks: Sequence[int]  # by id


Event = Stored | Removed


@dataclass(slots=True)
class CacheLease:
    """The blocks of a running request."""

    pinned: list[int]  # by id
    anonymous: int


@dataclass(eq=False, slots=True)
class Cache:
    """Blocks by id; `publish` is called with every change and its simulated second."""

    capacity: int  # blocks
    publish: Callable[[Event, float], None]
    pins: dict[int, int] = field(default_factory=dict)  # how many, of each named block
    idle: OrderedDict[int, None] = field(default_factory=OrderedDict)
    anonymous: int = 0

    @property
    def in_use(self) -> int:
        """Returns how many blocks running requests hold."""
        return len(self.pins) - len(self.idle) + self.anonymous

    def held(self, blocks: Sequence[int]) -> int:
        """Returns how many leading blocks are cached."""
        pins = self.pins
        for depth, block in enumerate(blocks):
            if block not in pins:
                return depth
        return len(blocks)

    def lease(self, cached: Sequence[int], others: int, now: float) -> CacheLease | None:
        """Pins cached blocks and makes room for others; returns None without enough room."""
        pins, idle = self.pins, self.idle
        free = self.capacity - len(pins) - self.anonymous
        if free < others:
            wanted = sum(block in idle for block in cached)
            if free + len(idle) - wanted < others:
                return None
        for block in cached:
            pins[block] += 1
            idle.pop(block, None)
        if free < others:
            self._evict(others - free, now)
        self.anonymous += others
        return CacheLease(list(cached), others)

    def store(self, lease: CacheLease, blocks: Sequence[int], now: float) -> None:
        """Names the blocks of a prompt that has been prefilled."""
        pins, idle = self.pins, self.idle
        known = len(lease.pinned)
        new = blocks[known:]
        # The last block may have been computed again for its last token.
        while known < len(blocks) and blocks[known] in pins:
            known += 1
        if known < len(blocks):
            self.publish(Stored(blocks[known:], blocks[known - 1] if known else None), now)
        for block in new:
            pins[block] = pins.get(block, 0) + 1
            idle.pop(block, None)
        lease.pinned += new
        lease.anonymous -= len(new)
        self.anonymous -= len(new)

    def release(self, lease: CacheLease) -> None:
        """Frees the blocks of a request; named blocks stay cached."""
        pins, idle = self.pins, self.idle
        for block in reversed(lease.pinned):
            left = pins[block] - 1
            pins[block] = left
            if not left:
                idle[block] = None
        self.anonymous -= lease.anonymous

    def _evict(self, count: int, now: float) -> None:
        victims = [self.idle.popitem(last=False)[0] for _ in range(count)]
        for block in victims:
            del self.pins[block]
        self.publish(Removed(victims), now)
