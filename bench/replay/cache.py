"""The prefix cache of a simulated engine, as vLLM keeps it, and the events it publishes.

    blocks     [ pinned by running requests | idle, least recently used first ]   named, by id
               [ anonymous: being prefilled, not full, or output              ]
    capacity   named + anonymous <= capacity

1. Who runs pins the whole prefix of its prompt, so a pinned block has no idle ancestor.
2. Pins are taken off a prompt from its end, so an idle block comes before its ancestors: what is
   evicted first is always a leaf.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from bench.replay.trace import BLOCK_SIZE, tokens_of

Event = list[Any]


@dataclass(slots=True)
class Lease:
    """The blocks of a running request."""

    pinned: list[int]  # by id
    anonymous: int


@dataclass(eq=False)
class Cache:
    """Blocks by id; `publish` is handed every batch of events as msgpack."""

    capacity: int  # blocks
    publish: Callable[[bytes], None]
    pins: dict[int, int] = field(default_factory=dict)  # of all named blocks
    idle: OrderedDict[int, None] = field(default_factory=OrderedDict)
    anonymous: int = 0

    @property
    def in_use(self) -> int:
        """Returns how many blocks running requests have."""
        return len(self.pins) - len(self.idle) + self.anonymous

    def held(self, blocks: Sequence[int]) -> int:
        """Returns how many leading blocks are cached."""
        for depth, block in enumerate(blocks):
            if block not in self.pins:
                return depth
        return len(blocks)

    def lease(self, cached: Sequence[int], others: int, now: float) -> Lease | None:
        """Pins blocks that are cached and makes room for others; None without enough room."""
        idle = sum(block in self.idle for block in cached)
        free = self.capacity - len(self.pins) - self.anonymous
        if free + len(self.idle) - idle < others:
            return None
        for block in cached:
            self.pins[block] += 1
            self.idle.pop(block, None)
        self._evict(others - free, now)
        self.anonymous += others
        return Lease(list(cached), others)

    def store(self, lease: Lease, blocks: Sequence[int], now: float) -> None:
        """Names the blocks of a prompt that has been prefilled."""
        new = blocks[len(lease.pinned) :]
        # The last block may have been computed again for its last token.
        fresh = [block for block in new if block not in self.pins]
        if fresh:
            first = blocks.index(fresh[0])
            self._tell([stored(fresh, blocks[first - 1] if first else None)], now)
        for block in new:
            self.pins[block] = self.pins.get(block, 0) + 1
            self.idle.pop(block, None)
        lease.pinned += new
        lease.anonymous -= len(new)
        self.anonymous -= len(new)

    def release(self, lease: Lease) -> None:
        """Takes back what a request had; what is named stays cached."""
        for block in reversed(lease.pinned):
            self.pins[block] -= 1
            if self.pins[block] == 0:
                self.idle[block] = None
        self.anonymous -= lease.anonymous

    def _evict(self, count: int, now: float) -> None:
        victims = [self.idle.popitem(last=False)[0] for _ in range(count)]
        for block in victims:
            del self.pins[block]
        if victims:
            self._tell([removed(block) for block in victims], now)

    def _tell(self, events: list[Event], now: float) -> None:
        self.publish(msgpack.packb([now, events, 0]))


def stored(blocks: Sequence[int], parent: int | None) -> Event:
    """Returns the event of a run of consecutive blocks in vLLM's positional form."""
    tokens = [token for block in blocks for token in tokens_of(block)]
    above = None if parent is None else _name(parent)
    return [
        "BlockStored",
        [_name(block) for block in blocks],
        above,
        tokens,
        BLOCK_SIZE,
        None,
        "GPU",
    ]


def removed(block: int) -> Event:
    return ["BlockRemoved", [_name(block)], "GPU"]


def _name(block: int) -> int:
    return block + 1  # an engine's hash is hardly ever 0
