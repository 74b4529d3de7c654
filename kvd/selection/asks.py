"""What is asked of the selection service: who may serve, how to choose, where it waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from kvd.catalog import WorkerRecord
from kvd.errors import KvdError
from kvd.model import PartitionKey
from kvd.scheduling.queue import Waiting
from kvd_core.selector import Pool, Prompt
from kvd_core.selector_settings import Settings

Look = Callable[[Pool], None]  # puts a prompt before a pool


@dataclass(frozen=True, slots=True)
class Constraints:
    """Who may serve a request; also the lane it waits in."""

    allowed: frozenset[int] | None = None
    pinned: tuple[int, int] | None = None  # worker, dp rank
    taints: frozenset[str] = frozenset()

    def admits(self, record: WorkerRecord, dp_rank: int) -> bool:
        return (
            (self.allowed is None or record.worker_id in self.allowed)
            and self.pinned in (None, (record.worker_id, dp_rank))
            and self.taints.issubset(record.taints)
        )


@dataclass(frozen=True, slots=True)
class Ask:
    """One selection, beside its prompt."""

    key: PartitionKey
    settings: Settings
    selection_id: str | None = None
    reservation_id: str | None = None  # set: the selection is booked under it
    constraints: Constraints | None = None
    affinity: tuple[int, int | None] | None = None  # worker, dp rank, if they can be chosen
    strict_priority: int = 0
    priority_jump: float = 0.0
    expected_output_tokens: int | None = None
    lora_name: str | None = None
    explain: bool = False


@dataclass(slots=True, eq=False)
class Held:
    """A selection that waits; `done` is set with its answer, or its failure."""

    ask: Ask
    prompt: Prompt
    done: trio.Event = field(default_factory=trio.Event)
    answer: bytes | KvdError | None = None
    waiting: Waiting[Held] | None = None

    def settle(self, answer: bytes | KvdError) -> None:
        self.answer = answer
        self.done.set()
