"""The worker records of the selection service, and why a record cannot be scheduled.

    POST, PUT, PATCH ──> WorkerRecord ──> reasons() ──> schedulable, or incomplete with reasons
                                                            │
                                                            v
                                        Candidates (kvd.selection): listeners, ledger ranks, pool

A record is an operator's or controller's description of a worker; nothing in it is derived. Worker
ids are unique in the whole service: registering a known id under another model or tenant moves the
worker there. This module does no I/O and has no state beside the records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvd.errors import BadRequest
from kvd.model import DEFAULT_TENANT, PartitionKey
from kvd.wire.endpoints import Addresses, check_endpoint, check_replay_endpoint
from kvd.wire.urls import masked

DEFAULT_MODEL = "default"
MAX_DP_SIZE = 4096  # ranks of one worker, as in the slot tracker
U32_MAX = 2**32 - 1

# Endpoints of a worker checked between two checkpoints: 0.7 ms, 2 if each has another host.
ENDPOINTS_AT_ONCE = 256

# Members of Dynamo's records that are always shown, as they were given.
SHOWN_AS_GIVEN = (
    "block_size",
    "data_parallel_start_rank",
    "data_parallel_size",
    "max_num_batched_tokens",
    "total_kv_blocks",
    "stable_routing_id",
    "is_eagle",
    "role",
    "taints",
    "topology_domains",
    "kv_transfer_domain",
    "kv_transfer_enforcement",
    "kv_transfer_preferred_weight",
)


# Members that only kvd's records have; they are shown if they were given.
OURS = ("curve_server_key", "without_kv_events", "prefill_tokens_per_s", "decode_step_ms")


class WorkerLifecycle(StrEnum):
    """The lifecycle of a worker: whether it may be selected."""

    INCOMPLETE = "incomplete"  # something is missing or contradicts the others
    SCHEDULABLE = "schedulable"
    UNSCHEDULABLE = "unschedulable"  # all its engines have gone; the answer to DELETE says it, too


class Role(StrEnum):
    """The part of a request that a worker serves in a disaggregated deployment."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker as it was described; None stands for a member that was not given."""

    worker_id: int
    model_name: str = DEFAULT_MODEL
    tenant_id: str = DEFAULT_TENANT
    endpoint: str | None = None  # where it serves requests; opaque to kvd
    kv_events_endpoint: str | None = None  # for a worker with one rank
    kv_events_endpoints: Mapping[int, str] = field(default_factory=dict)  # by dp rank
    replay_endpoint: str | None = None  # shared by all its ranks
    block_size: int | None = None  # tokens
    data_parallel_start_rank: int | None = None
    data_parallel_size: int | None = None
    max_num_batched_tokens: int | None = None
    total_kv_blocks: int | None = None
    stable_routing_id: str | None = None
    is_eagle: bool | None = None
    prefill_tokens_per_s: float | None = None  # on an idle rank; None: learned from requests
    decode_step_ms: float | None = None  # time of a step without a prefill; None: learned
    without_kv_events: bool | None = None  # it publishes no events: its cached blocks are predicted
    role: Role | None = None
    taints: tuple[str, ...] = ()
    topology_domains: Mapping[str, str] = field(default_factory=dict)
    kv_transfer_domain: str | None = None
    kv_transfer_enforcement: str | None = None
    kv_transfer_preferred_weight: float | None = None
    router_hint_worker_type: str | None = None
    router_hint_source_control_endpoints: Mapping[int, str] = field(default_factory=dict)
    curve_server_key: str | None = None  # shared by all its ranks, if they speak CURVE

    @property
    def key(self) -> PartitionKey:
        """The model and tenant it serves."""
        return PartitionKey(self.model_name, self.tenant_id)

    @property
    def ranks(self) -> range:
        """Its data-parallel ranks; rank 0 alone if the record does not mention them."""
        start = self.data_parallel_start_rank or 0
        size = 1 if self.data_parallel_size is None else self.data_parallel_size
        return range(start, start + size)

    def events_endpoint(self, dp_rank: int) -> str | None:
        """Returns the endpoint at which a rank publishes its KV events."""
        named = self.kv_events_endpoints.get(dp_rank)
        if named is None and len(self.ranks) == 1:
            return self.kv_events_endpoint
        return named

    def addresses(self, dp_rank: int) -> Addresses | None:
        """Returns the addresses of a rank's KV events, None if none were given."""
        endpoint = None if self.without_kv_events else self.events_endpoint(dp_rank)
        if endpoint is None:
            return None
        return Addresses(endpoint, self.replay_endpoint, self.curve_server_key)

    def reasons(self, *, uses_events: bool) -> Iterator[str | None]:
        """Yields why the worker cannot be scheduled as it is, and None where others may run."""
        if not self.endpoint:
            yield "endpoint is required"
        if not self.block_size:
            yield "block_size must be greater than 0"
        elif self.block_size > U32_MAX:
            yield "block_size must be below 2^32"
        if not self.ranks:
            yield "data_parallel_size must be greater than 0"
        elif len(self.ranks) > MAX_DP_SIZE or self.ranks[-1] > U32_MAX:
            yield f"data_parallel_size must be at most {MAX_DP_SIZE}, and each dp_rank below 2^32"
        elif uses_events and not self.without_kv_events:
            yield from self._events_reasons()

    def _events_reasons(self) -> Iterator[str | None]:
        for number, dp_rank in enumerate(self.ranks, 1):
            if number % ENDPOINTS_AT_ONCE == 0:
                yield None
            endpoint = self.events_endpoint(dp_rank)
            if not endpoint:
                yield f"kv_events endpoint is required for dp_rank {dp_rank}"
                continue
            try:
                check_endpoint(endpoint)
            except BadRequest as error:
                yield str(error)
        if self.replay_endpoint:
            try:
                check_replay_endpoint(self.replay_endpoint)
            except BadRequest as error:
                yield str(error)

    def clashes(self, other: WorkerRecord) -> Iterator[str]:
        """Yields why the worker cannot be scheduled beside another of its model."""
        if self.block_size and other.block_size != self.block_size:
            yield f"block_size {self.block_size} differs from {other.block_size} of its model"
        if bool(other.is_eagle) != bool(self.is_eagle):
            yield "is_eagle differs from that of its model"

    def shown(self, lifecycle: WorkerLifecycle, reasons: list[str]) -> dict[str, Any]:
        """Returns the record in the form that clients read."""
        row: dict[str, Any] = {
            "worker_id": self.worker_id,
            "model_name": self.model_name,
            "tenant_id": self.tenant_id,
            "lifecycle": lifecycle,
            "endpoint": _shown(self.endpoint),
            "kv_events_endpoint": _shown(self.kv_events_endpoint),
        }
        if self.kv_events_endpoints:
            endpoints = sorted(self.kv_events_endpoints.items())
            row["kv_events_endpoints"] = {str(rank): _shown(text) for rank, text in endpoints}
        row["replay_endpoint"] = _shown(self.replay_endpoint)
        row |= {name: getattr(self, name) for name in SHOWN_AS_GIVEN}
        if self.router_hint_worker_type is not None:
            row["router_hint_worker_type"] = self.router_hint_worker_type
        if self.router_hint_source_control_endpoints:
            hints = sorted(self.router_hint_source_control_endpoints.items())
            row["router_hint_source_control_endpoints"] = {
                str(rank): _shown(text) for rank, text in hints
            }
        for name in OURS:
            if (value := getattr(self, name)) is not None:
                row[name] = value
        if reasons:
            row["not_schedulable_reasons"] = reasons
        return row


def _shown(endpoint: str | None) -> str | None:
    """Returns an address with any user and password masked."""
    return endpoint and masked(endpoint)
