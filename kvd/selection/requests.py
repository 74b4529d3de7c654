"""Requests of the selection service: which ranks may serve them, their settings, their replies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import trio

from kvd.errors import KvdError
from kvd.model import PartitionKey
from kvd.selection.phases import Phase
from kvd.selection.queue import Waiting
from kvd.selection.worker_record import WorkerRecord
from kvd.slots.live_requests import Receipt
from kvd_core.selector.selector import Pool, Prompt
from kvd_core.selector.settings import Settings

PromptLookup = Callable[[Pool], None]  # has a pool match the request's prompt


@dataclass(frozen=True, slots=True)
class Constraints:
    """The workers that may serve a request."""

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
class SelectRequest:
    """One selection, without its prompt."""

    key: PartitionKey
    settings: Settings  # of the whole request, before `in_phase`
    phase: Phase | None = None
    selection_id: str | None = None
    reservation_id: str | None = None  # if given, the selection is booked under it
    constraints: Constraints | None = None
    preferred: Mapping[str, float] | None = None  # preference for each taint (Candidates.factors)
    affinity: tuple[int, int | None] | None = None  # worker and dp rank to use if they can serve
    strict_priority: int = 0
    priority_jump: float = 0.0
    expected_output_tokens: int | None = None
    lora_name: str | None = None
    explain: bool = False
    advisory: bool = False  # the client only asks and sends no request: the selection never waits
    session_id: str | None = None
    expected_ttft: bool = False  # the answer states the expected time to the first token
    slo_ttft_s: float | None = None  # ranks that are expected to keep this limit are preferred
    retry: Retry | None = None  # if given, a repeated request gets its first answer again

    @property
    def phases(self) -> tuple[Phase | None, ...]:
        """The phases for which a rank is chosen each."""
        return (Phase.PREFILL, Phase.DECODE) if self.phase is Phase.BOTH else (self.phase,)

    def constraints_in(self, phase: Phase | None) -> Constraints | None:
        """Returns the constraints of one phase; for BOTH, a pinned worker applies to the decode."""
        if phase is Phase.PREFILL and self.phase is Phase.BOTH and self.constraints is not None:
            return replace(self.constraints, pinned=None)
        return self.constraints


class Ranks(NamedTuple):
    """The ranks of a pool, as one phase of a request sees them."""

    pool: Pool
    eligible: bytes | None  # a byte for each rank: whether it may serve; None: all may
    factors: bytes | None  # a double for each rank: the factor of its cost; None: 1


@dataclass(frozen=True, slots=True)
class Choice:
    """A candidate, and how it was weighed."""

    position: int  # in the pool of `ranks`
    ranks: Ranks
    settings: Settings
    phase: Phase | None
    best: int  # blocks of the prompt cached by the eligible rank that caches most


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A selection that waits; `done` is set when its answer or its failure is there."""

    request: SelectRequest
    prompt: Prompt
    block_size: int  # tokens per block with which the prompt was hashed
    done: trio.Event = field(default_factory=trio.Event)
    answer: bytes | KvdError | None = None
    waiting: Waiting[QueuedRequest] | None = None
    receipt: Receipt[Any] | None = None  # of the booking that came with the answer
    again: PromptLookup | None = None  # hashes its tokens by any block size; None: it came hashed
    drains_queue: bool = False  # its task continues with the queue (`Scheduler.drain_queue`)

    def resolve(self, answer: SelectReply | KvdError) -> None:
        if isinstance(answer, SelectReply):
            self.answer, self.receipt = answer.answer, answer.receipt
        else:
            self.answer = answer
        self.done.set()


@dataclass(frozen=True, slots=True)
class Retry:
    """Identifies a request and its retries."""

    name: tuple[str | None, str]  # the reservation id as given, the Idempotency-Key
    content: bytes  # a digest of the whole request


@dataclass(frozen=True, slots=True)
class SelectReply:
    """An answer, and the receipt of its booking if there is one."""

    answer: bytes
    receipt: Receipt[Any] | None = None
