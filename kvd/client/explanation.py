"""Answers that explain a choice; docs/explain.md describes them.

Explanation ── choices ──> ChoiceExplained ── candidates ──> CandidateExplained
    └── timeline: what happened to the prompt's blocks
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvd.client.reading import member
from kvd.client.selecting import Prompt


class Question(Prompt, total=False):
    """A prompt with all that its choice depends on, or the `request_id` of a live booking."""

    request_id: str | None
    session_id: str | None
    session_context: Mapping[str, object] | None
    affinity_target: Mapping[str, int] | None
    pinned_worker: Mapping[str, int] | None
    allowed_worker_ids: Sequence[int] | None
    routing_constraints: Mapping[str, object] | None
    phase: str | None
    router_policy: str | Mapping[str, object] | None
    slo_ttft_ms: float | None


@dataclass(frozen=True, slots=True)
class Costed:
    """A rank and its chance to be chosen; `behind` is its cost above that of the cheapest rank."""

    worker_id: str
    dp_rank: int
    chance: float
    cost: float | None
    behind: float | None


@dataclass(frozen=True, slots=True)
class Ended:
    """Why a match ended: the block before which it ended, and what happened to that block."""

    why: str
    at_block: int
    age_s: float | None
    tier: str | None
    elsewhere_blocks: int | None


@dataclass(frozen=True, slots=True)
class TierMatched:
    """The blocks of a prompt that a rank holds on one tier, and why the match ends there."""

    tier: str
    why: str
    age_s: float | None
    first: int = field(metadata=member("from"))
    end: int = field(metadata=member("to"))


@dataclass(frozen=True, slots=True)
class Term:
    """A term of a cost: its weight, and what it adds to the cost with that weight."""

    name: str
    weight: float
    cost: float


@dataclass(frozen=True, slots=True)
class CandidateExplained:
    """A rank compared with the prompt; where no worker can be chosen, only what the rank caches."""

    worker_id: str
    dp_rank: int
    blocks: int
    predicted_blocks: int
    tiers: tuple[TierMatched, ...]
    ended: Ended
    chance: float | None = None
    shut_out: str | None = None
    exceeded: tuple[str, ...] = ()
    cost: float | None = None
    preference: float | None = None
    terms: tuple[Term, ...] = ()
    facts: Mapping[str, float] | None = None
    stream: str | None = None
    expected_ttft_s: float | None = None


@dataclass(frozen=True, slots=True)
class ChoiceExplained:
    """The choice that would be made for one phase; `refusal` says why there is none."""

    phase: str | None
    by: str | None
    router_mode: str | None
    router_policy: str | None
    temperature: float
    unit: str | None
    refusal: str | None
    chosen: Costed | None
    runner_up: Costed | None
    candidates: tuple[CandidateExplained, ...]
    more_candidates: int


@dataclass(frozen=True, slots=True)
class Happened:
    """A change to blocks of the prompt on a rank; consecutive changes of one kind are merged."""

    worker_id: str
    dp_rank: int
    age_s: float
    kind: str
    tiers: tuple[str, ...]
    changes: int
    first: int = field(metadata=member("from"))
    end: int = field(metadata=member("to"))


@dataclass(frozen=True, slots=True)
class Booked:
    """The live request whose choice is explained."""

    worker_id: str
    dp_rank: int
    request_id: str
    age_s: float
    blocks: int
    prefill_tokens: int
    active_prefill_tokens: int


@dataclass(frozen=True, slots=True)
class Chronicle:
    """The daemon's memory of block changes: its size, and how far back it reaches."""

    changes: int
    overwritten: int
    capacity: int
    reach_s: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """An explanation of where a prompt goes, and why."""

    model_name: str
    tenant_id: str
    block_size: int
    blocks: int
    request: Booked | None
    choices: tuple[ChoiceExplained, ...]
    timeline: tuple[Happened, ...]
    timeline_left_out: int
    chronicle: Chronicle
