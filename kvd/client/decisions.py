"""Answers of the selection service: docs/faces/selection.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvd.client.common import Listener, PotentialLoad
from kvd.client.indexer import Overlap


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of a rank, learned or `given`; it is used from a `confidence` of 0.5 on."""

    prefill_tokens_per_s: float
    base_ttft_s: float
    confidence: float
    observations: int
    given: bool
    output_token_s: float | None = None
    output_token_s_per_request: float | None = None
    decode_confidence: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker as it was described, and whether it may be selected (`lifecycle`)."""

    worker_id: int
    model_name: str
    tenant_id: str
    lifecycle: str
    endpoint: str | None
    kv_events_endpoint: str | None
    replay_endpoint: str | None
    block_size: int | None
    data_parallel_start_rank: int | None
    data_parallel_size: int | None
    max_num_batched_tokens: int | None
    total_kv_blocks: int | None
    stable_routing_id: str | None
    is_eagle: bool | None
    role: str | None
    taints: tuple[str, ...] | None
    topology_domains: Mapping[str, str] | None
    kv_transfer_domain: str | None
    kv_transfer_enforcement: str | None
    kv_transfer_preferred_weight: float | None
    kv_events_endpoints: Mapping[int, str] | None = None
    router_hint_worker_type: str | None = None
    router_hint_source_control_endpoints: Mapping[int, str] | None = None
    curve_server_key: str | None = None
    without_kv_events: bool | None = None
    prefill_tokens_per_s: float | None = None
    decode_step_ms: float | None = None
    speeds: Mapping[int, Speed] | None = None
    not_schedulable_reasons: tuple[str, ...] | None = None
    disconnected_dp_ranks: Mapping[int, str] | None = None
    listeners: Mapping[int, Listener] | None = None
    questions: int | None = None
    matched: int | None = None
    warning: str | None = None


@dataclass(frozen=True, slots=True)
class Lifecycles:
    """Workers, counted by whether they may be selected."""

    schedulable: int
    unschedulable: int
    incomplete: int


@dataclass(frozen=True, slots=True)
class RecoveryShown:
    """The state of recovery from peers: `off`, `running`, `done` or `empty`."""

    state: str
    peers: int
    blocks: int


@dataclass(frozen=True, slots=True)
class SharedState:
    """The server of shared state, and the replicas that use it."""

    server: str
    connected: bool
    replicas: int
    behind: int
    fault: str | None


@dataclass(frozen=True, slots=True)
class Ready:
    """Readiness for selections, with the reasons; `workers` only for clients with a token."""

    ready: bool
    schedulable_workers: int
    not_ready_reasons: tuple[str, ...]
    lifecycles: Lifecycles
    min_initial_workers: int
    recovery: RecoveryShown
    workers: tuple[WorkerRecord, ...] | None = None
    shared_state: SharedState | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A rank that could have been chosen, with every term of its cost."""

    worker_id: int
    dp_rank: int
    device_blocks: int
    host_blocks: int
    disk_blocks: int
    live_blocks: int
    active_prefill_tokens: int
    active_decode_blocks: int
    active_requests: int
    decoding_requests: int
    cached_tokens: int
    effective_prefill_tokens: int
    potential_decode_blocks: int
    raw_prefill_blocks: float
    credit_blocks: float
    prefill_cost: float
    decode_cost: float
    counted_tokens: float
    uncached_cost: float
    hold_up_cost: float
    crowding_cost: float
    queued_cost: float
    request_cost: float
    block_cost: float
    product_cost: float
    cost: float
    keeps_sessions: bool
    eligible: bool
    overloaded: bool
    busy: bool
    preference: float
    heard: bool
    reachable: bool
    has_session: bool
    expected_ttft_s: float | None
    stream: str | None


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """The present load of the chosen worker, for an advisory selection."""

    active_prefill_tokens: int
    prefill_token_capacity: int | None
    total_kv_blocks: int | None
    prefill_busy: bool | None = None


@dataclass(frozen=True, slots=True)
class Chosen:
    """The rank that was chosen, the prompt's blocks that it caches, and its work for the prompt.

    `effective_prefill_tokens` are the tokens that it has to compute. Members that may be None are
    set if the request asked for them.
    """

    model_name: str
    tenant_id: str
    worker_id: int
    dp_rank: int
    endpoint: str
    block_size: int
    overlap: Overlap
    effective_prefill_tokens: int
    potential_decode_blocks: int
    selection_id: str | None = None
    reservation_id: str | None = None
    phase: str | None = None
    router_policy: str | None = None
    candidates: tuple[Candidate, ...] | None = None
    worker_load: WorkerLoad | None = None
    expected_ttft_s: float | None = None
    slo_met: bool | None = None
    decode_busy: bool | None = None


@dataclass(frozen=True, slots=True)
class Selection(Chosen):
    """A choice; with phase `both`, that for the decode phase, and `prefill` has that for prefill.

    `fallback` says why there is no `prefill` although the request asked for both phases.
    """

    prefill: Chosen | None = None
    fallback: str | None = None


@dataclass(frozen=True, slots=True)
class Reserved:
    """A booking that was made on a rank selected before."""

    reservation_id: str
    model_name: str
    tenant_id: str
    worker_id: int
    dp_rank: int
    endpoint: str | None


@dataclass(frozen=True, slots=True)
class Freed:
    """The number of bookings that were ended."""

    freed: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """A live booking: its blocks, tokens to prefill, and age in seconds."""

    reservation_id: str
    model_name: str
    tenant_id: str
    worker_id: int
    dp_rank: int
    blocks: int
    effective_prefill_tokens: int
    active_prefill_tokens: int
    prefill_complete: bool
    output_blocks: int
    expected_output_tokens: int | None
    age_s: float


@dataclass(frozen=True, slots=True)
class Loads:
    """The loads of a model and tenant's ranks, and the queued selections."""

    model_name: str
    tenant_id: str
    loads: tuple[PotentialLoad, ...]
    pending_count: int
    pending_isl_tokens: int


@dataclass(frozen=True, slots=True)
class RankOverlap:
    """Blocks of a prompt that a rank caches; `..._extension_blocks` continue the tier above."""

    worker_id: int
    dp_rank: int
    device_blocks: int
    host_pinned_blocks: int
    disk_blocks: int
    host_pinned_extension_blocks: int
    disk_extension_blocks: int
    shared_beyond_device_blocks: None


@dataclass(frozen=True, slots=True)
class SharedCache:
    """A cache that workers share; kvd reports none here."""

    enabled: bool
    total_hit_blocks: int
    ranges: tuple[int, ...]
    error: None


@dataclass(frozen=True, slots=True)
class OverlapScores:
    """The number of blocks of a prompt that each rank caches."""

    block_size: int
    num_blocks: int
    workers: tuple[RankOverlap, ...]
    shared_cache: SharedCache


@dataclass(frozen=True, slots=True)
class ModelRegret:
    """The expected outcomes of a model's choices, compared with the reported ones."""

    model_name: str
    tenant_id: str
    reports: int
    expected_cached_tokens: int
    cached_tokens: int
    missing_tokens: int
    surplus_tokens: int
    timed: int
    expected_ttft_s: float | None
    ttft_s: float | None
    ttft_error_p50: float | None
    ttft_error_p90: float | None


@dataclass(frozen=True, slots=True)
class RankRegret:
    """The expected outcomes of a rank's choices, compared with the reported ones."""

    model_name: str
    tenant_id: str
    worker_id: int
    dp_rank: int
    reports: int
    expected_cached_tokens: int
    cached_tokens: int
    missing_tokens: int
    surplus_tokens: int
    timed: int
    expected_ttft_s: float | None
    ttft_s: float | None
    ttft_error_p50: float | None
    ttft_error_p90: float | None


@dataclass(frozen=True, slots=True)
class Regret:
    """The expected outcomes of all choices since the start, compared with the reported ones."""

    models: tuple[ModelRegret, ...]
    ranks: tuple[RankRegret, ...]


@dataclass(frozen=True, slots=True)
class BusyThreshold:
    """The load above which ranks of a model, or of one tenant, get no work; None is off."""

    model: str
    active_decode_blocks_threshold: float | None
    active_prefill_tokens_threshold: int | None
    active_prefill_tokens_threshold_frac: float | None
    tenant_id: str | None = None


@dataclass(frozen=True, slots=True)
class BusyThresholds:
    """The thresholds that calls have set."""

    thresholds: tuple[BusyThreshold, ...]


@dataclass(frozen=True, slots=True)
class ModeShown:
    """The router mode of a model, or of one tenant."""

    model: str
    router_mode: str
    tenant_id: str | None = None


@dataclass(frozen=True, slots=True)
class RouterModes:
    """The default mode, and the modes that calls have set."""

    router_mode: str
    router_modes: tuple[ModeShown, ...]


@dataclass(frozen=True, slots=True)
class PolicyShown:
    """The router policy of a model, or of one tenant, and its weights; None is off."""

    model: str
    router_policy: str
    weights: Mapping[str, float | None]
    tenant_id: str | None = None


@dataclass(frozen=True, slots=True)
class RouterPolicies:
    """The default policy, the policies that calls have set, and the weights of every preset."""

    router_policy: str
    weights: Mapping[str, float | None]
    router_policies: tuple[PolicyShown, ...]
    presets: Mapping[str, Mapping[str, float | None]]
