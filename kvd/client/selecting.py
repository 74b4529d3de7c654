"""Descriptions of prompts, selections and workers: members of the selection service's bodies.

All are keyword arguments of calls; an argument that is None counts as not given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class Prompt(TypedDict, total=False):
    """A prompt: `token_ids`, or all of `block_hashes`, `sequence_hashes` and `isl_tokens`.

    `model_name` and `tenant_id` default to `default`. `router_config_override` has settings for
    this request, such as `{"router_temperature": 0.5}`.
    """

    model_name: str | None
    tenant_id: str | None
    token_ids: Sequence[int] | None
    block_hashes: Sequence[int] | None
    sequence_hashes: Sequence[int] | None
    isl_tokens: int | None
    lora_name: str | None
    cache_salt: str | None
    is_eagle: bool | None
    router_config_override: Mapping[str, Any] | None


class Wish(Prompt, total=False):
    """A prompt with conditions for its choice; docs/faces/selection.md explains each member."""

    expected_output_tokens: int | None
    strict_priority: int | None
    priority_jump: float | None
    session_id: str | None
    session_context: Mapping[str, Any] | None
    affinity_target: Mapping[str, int] | None
    pinned_worker: Mapping[str, int] | None
    allowed_worker_ids: Sequence[int] | None
    routing_constraints: Mapping[str, Any] | None
    phase: str | None
    router_policy: str | Mapping[str, Any] | None
    slo_ttft_ms: float | None
    expected_ttft: bool | None
    explain: bool | None
    nvext: Mapping[str, Any] | None


class SelectionWish(Wish, total=False):
    """A wish with ids that the caller chooses."""

    selection_id: str | None
    reservation_id: str | None


class AdvisoryWish(SelectionWish, total=False):
    """A wish; with `advisory`, no request will follow, so the selection never waits."""

    advisory: bool | None


class Booking(Prompt, total=False):
    """A prompt for a rank that was selected before; it is booked under one of the two ids."""

    selection_id: str | None
    reservation_id: str | None
    dp_rank: int | None
    effective_prefill_tokens: int | None
    expected_output_tokens: int | None
    phase: str | None


class Description(TypedDict, total=False):
    """A worker: docs/faces/selection.md says which members make it schedulable."""

    endpoint: str | None
    block_size: int | None
    kv_events_endpoint: str | None
    kv_events_endpoints: Mapping[int, str] | None
    replay_endpoint: str | None
    curve_server_key: str | None
    without_kv_events: bool | None
    data_parallel_start_rank: int | None
    data_parallel_size: int | None
    max_num_batched_tokens: int | None
    total_kv_blocks: int | None
    prefill_tokens_per_s: float | None
    decode_step_ms: float | None
    role: str | None
    taints: Sequence[str] | None
    is_eagle: bool | None
    stable_routing_id: str | None
    topology_domains: Mapping[str, str] | None
    kv_transfer_domain: str | None
    kv_transfer_enforcement: str | None
    kv_transfer_preferred_weight: float | None
    router_hint_worker_type: str | None
    router_hint_source_control_endpoints: Mapping[int, str] | None


class PlacedDescription(Description, total=False):
    """A worker of a model and tenant, which both default to `default`."""

    model_name: str | None
    tenant_id: str | None
