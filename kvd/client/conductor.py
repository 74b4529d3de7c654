"""The conductor's calls and answers, in its JSON dialect: docs/faces/conductor.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvd.client.calls import Call, How, asked
from kvd.client.common import EveryFace
from kvd.client.reading import OTHERS, member


@dataclass(frozen=True, slots=True)
class Holding:
    """The number of leading tokens of a prompt that an instance can reuse.

    `longest_matched` is that of its best rank. `ranks` has the tokens that each rank holds itself,
    `media` those on media other than the three named ones.
    """

    longest_matched: int
    gpu: int = field(metadata=member("GPU"))
    cpu: int = field(metadata=member("CPU"))
    disk: int = field(metadata=member("DISK"))
    ranks: Mapping[int, int] = field(metadata=member("DP"))
    media: Mapping[str, int] = field(metadata=OTHERS)


@dataclass(frozen=True, slots=True)
class Registered:
    """A publisher that the conductor has subscribed to."""

    status: str
    instance_id: str


@dataclass(frozen=True, slots=True)
class Unregistered:
    """Publishers that were dropped, as `instance|tenant|rank`."""

    status: str
    removed_instances: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Service:
    """A publisher: its registration, its stream, and the outcomes of its events."""

    endpoint: str = field(metadata=member("Endpoint"))
    replay_endpoint: str = field(metadata=member("ReplayEndpoint"))
    type: str = field(metadata=member("Type"))
    model_name: str = field(metadata=member("ModelName"))
    lora_name: str = field(metadata=member("LoraName"))
    tenant_id: str = field(metadata=member("TenantID"))
    instance_id: str = field(metadata=member("InstanceID"))
    block_size: int = field(metadata=member("BlockSize"))
    dp_rank: int = field(metadata=member("DPRank"))
    additional_salt: str = field(metadata=member("AdditionalSalt"))
    serves_all: bool
    status: str
    stream: str
    last_seq: int | None
    gaps: int
    events: int
    event_id_gaps: int
    stale: int
    restarts: int
    mismatch: Mapping[str, int]
    orphans: int
    unlocated: int
    conflicts: int
    bad_events: int
    bad: Mapping[str, int]
    ignored: Mapping[str, int]
    last_error: str | None
    blocks: int
    waiting: int
    asked: int
    matched: int
    hash_profile: Any = None
    cache_group: Any = None
    loss: str | None = None
    warning: str | None = None


@dataclass(frozen=True, slots=True)
class Services:
    """All publishers."""

    count: int
    services: tuple[Service, ...]


@dataclass(frozen=True, slots=True)
class ModelContext:
    """A context that separates blocks of an instance: model, adapter, salt."""

    model_name: str
    lora_name: str
    block_size: int
    tenant_id: str
    additional_salt: str
    instance_id: str


@dataclass(frozen=True, slots=True)
class GlobalView:
    """All contexts that separate blocks, including those of other faces' workers."""

    context_count: int
    model_contexts: tuple[ModelContext, ...]


Holdings = Mapping[str, Mapping[str, Holding]]  # by tenant and instance


class Conductor(EveryFace[How]):
    """Answers how much of a prompt each instance can reuse, on which medium.

    Contradictions are Refused with 400 or 409.
    """

    @asked("POST /query", repeatable=True)
    def query(
        self,
        model: str,
        token_ids: Sequence[int],
        *,
        block_size: int,
        tenant_id: str | None = None,
        instance_id: str | None = None,
        lora_name: str | None = None,
        lora_id: int | None = None,
        cache_salt: str | None = None,
    ) -> Call[Holdings]:
        """Returns how much of a prompt each instance holds, by its token ids."""
        return Call(
            {
                "model": model,
                "block_size": block_size,
                "token_ids": token_ids,
                "tenant_id": tenant_id,
                "instance_id": instance_id,
                "lora_name": lora_name,
                "lora_id": lora_id,
                "cache_salt": cache_salt,
            }
        )

    @asked("POST /query_by_hash", repeatable=True)
    def query_by_hash(
        self,
        model: str,
        seq_hashes: Sequence[int],
        *,
        block_size: int,
        tenant_id: str | None = None,
        instance_id: str | None = None,
        lora_name: str | None = None,
        lora_id: int | None = None,
        cache_salt: str | None = None,
    ) -> Call[Holdings]:
        """Returns how much of a prompt each instance holds, by `sequence_hashes`."""
        return Call(
            {
                "model": model,
                "block_size": block_size,
                "seq_hashes": seq_hashes,
                "tenant_id": tenant_id,
                "instance_id": instance_id,
                "lora_name": lora_name,
                "lora_id": lora_id,
                "cache_salt": cache_salt,
            }
        )

    @asked("POST /register", repeatable=True)
    def register(
        self,
        modelname: str,
        instance_id: str,
        endpoint: str,
        *,
        type: str,
        block_size: int,
        dp_rank: int = 0,
        tenant_id: str | None = None,
        lora_name: str | None = None,
        additionalsalt: str | None = None,
        replay_endpoint: str | None = None,
        curve_server_key: str | None = None,
        hash_profile: Any = None,
        cache_group: Any = None,
    ) -> Call[Registered]:
        """Subscribes to a publisher: a store with type `Mooncake`, any other an engine."""
        return Call(
            {
                "modelname": modelname,
                "instance_id": instance_id,
                "endpoint": endpoint,
                "type": type,
                "block_size": block_size,
                "dp_rank": dp_rank,
                "tenant_id": tenant_id,
                "lora_name": lora_name,
                "additionalsalt": additionalsalt,
                "replay_endpoint": replay_endpoint,
                "curve_server_key": curve_server_key,
                "hash_profile": hash_profile,
                "cache_group": cache_group,
            }
        )

    @asked("POST /unregister")
    def unregister(
        self,
        instance_id: str,
        *,
        tenant_id: str | None = None,
        dp_rank: int | None = None,
        type: str | None = None,
        modelname: str | None = None,
        block_size: int | None = None,
        lora_name: str | None = None,
        additionalsalt: str | None = None,
        endpoint: str | None = None,
    ) -> Call[Unregistered]:
        """Drops an instance's publishers and their blocks; further arguments restrict which."""
        return Call(
            {
                "instance_id": instance_id,
                "tenant_id": tenant_id,
                "dp_rank": dp_rank,
                "type": type,
                "modelname": modelname,
                "block_size": block_size,
                "lora_name": lora_name,
                "additionalsalt": additionalsalt,
                "endpoint": endpoint,
            }
        )

    @asked("GET /services", repeatable=True)
    def services(self) -> Call[Services]:
        """Lists publishers, their events and streams."""
        return Call()

    @asked("GET /global_view", repeatable=True)
    def global_view(self) -> Call[GlobalView]:
        """Lists the contexts that separate blocks."""
        return Call()
