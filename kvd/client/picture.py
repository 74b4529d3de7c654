"""Answers of `picture` and `branches`, which `kvd top` and the page at /ui show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Curve = tuple[float | None, ...]  # samples, the oldest first; None where nothing was known


@dataclass(frozen=True, slots=True)
class Process:
    """The daemon that answers."""

    version: str
    process: str


@dataclass(frozen=True, slots=True)
class FaceShown:
    """A face of the daemon: its addresses, and the number of its requests."""

    name: str
    addresses: tuple[str, ...]
    requests: int


@dataclass(frozen=True, slots=True)
class TrafficStats:
    """Sums since the start, and the requests that are live and queued now."""

    requests: int
    events: int
    questions: int
    matched: int
    prompt_tokens: int
    cached_tokens: int
    live: int
    queued: int


@dataclass(frozen=True, slots=True)
class History:
    """Curves with a sample every `interval_s` seconds."""

    interval_s: float
    requests_per_s: Curve
    events_per_s: Curve
    live: Curve
    queued: Curve
    matched_share: Curve
    cached_share: Curve


@dataclass(frozen=True, slots=True)
class Decision:
    """A recent choice."""

    model_name: str
    tenant_id: str
    worker_id: str
    dp_rank: int
    age_s: float
    request: str
    candidates: int
    cost: float
    cached_tokens: int
    prefill_tokens: int
    queued_tokens: int
    expected_output_tokens: int | None


@dataclass(frozen=True, slots=True)
class Doubtful:
    """A stream that is not exact, of a `worker` or a `publisher`."""

    of: str
    model_name: str
    tenant_id: str
    worker_id: str
    dp_rank: int
    stream: str
    status: str
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Streams:
    """Event streams, counted by state."""

    counts: Mapping[str, int]
    doubtful: tuple[Doubtful, ...]


@dataclass(frozen=True, slots=True)
class ModelShown:
    """The indexed blocks of a model and tenant, by tier."""

    model_name: str
    tenant_id: str
    block_size: int
    blocks: int
    chains: int
    held: Mapping[str, int]
    questions: int
    matched: int
    never_matches: bool


@dataclass(frozen=True, slots=True)
class RankLoad:
    """The load of a rank."""

    prefill_tokens: int
    decode_blocks: int
    requests: int


@dataclass(frozen=True, slots=True)
class RankShown:
    """A rank, with all that the daemon's faces know about it."""

    model_name: str
    tenant_id: str
    worker_id: str
    dp_rank: int
    stream: str | None = None
    status: str | None = None
    why: str | None = None
    lifecycle: str | None = None
    reasons: tuple[str, ...] | None = None
    total_blocks: int | None = None
    load: RankLoad | None = None
    blocks: Mapping[str, int] | None = None
    requests: Curve | None = None
    cached_share: Curve | None = None


@dataclass(frozen=True, slots=True)
class Picture:
    """The daemon at a glance; `more_...` says whether a list was cut."""

    kvd: Process
    faces: tuple[FaceShown, ...]
    totals: TrafficStats
    history: History
    decisions: tuple[Decision, ...]
    streams: Streams
    models: tuple[ModelShown, ...]
    more_models: bool
    ranks: tuple[RankShown, ...]
    more_ranks: bool


@dataclass(frozen=True, slots=True)
class HeldBy:
    """A holder of a branch's blocks on one tier."""

    worker_id: str | None
    dp_rank: int | None
    blocks: int


@dataclass(frozen=True, slots=True)
class TierShown:
    """The holders of a branch on a tier: their number, and some of them."""

    count: int
    holders: tuple[HeldBy, ...]


@dataclass(frozen=True, slots=True)
class Branch:
    """A chain of blocks, or a part of it if not `whole`, and the number of its `children`."""

    name: str
    blocks: int
    children: int
    whole: bool
    tiers: Mapping[str, TierShown]


@dataclass(frozen=True, slots=True)
class Branches:
    """A page of branches; with `more`, a call with `after` the last one returns the next page."""

    model_name: str
    tenant_id: str
    block_size: int
    branches: tuple[Branch, ...]
    more: bool
