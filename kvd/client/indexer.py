"""The indexer's calls and answers: docs/faces/indexer.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvd.client.calls import Call, How, asked
from kvd.client.common import EveryFace, Listener, partition_members

InstanceId = int | str  # a number, or the instance's name on the conductor


@dataclass(frozen=True, slots=True)
class Overlap:
    """The number of leading tokens of a prompt that a worker caches.

    `dp` has the tokens on the device by rank, and `gpu` those of the best rank. `cpu` and `disk`
    continue the match with the lower tiers. `longest_matched` is the largest of all.
    """

    longest_matched: int
    gpu: int
    dp: Mapping[int, int]
    cpu: int
    disk: int


@dataclass(frozen=True, slots=True)
class Scores:
    """How much of a prompt each instance and rank caches, in tokens.

    `scores` has the leading tokens on the device, by instance and rank. `frequencies` has the
    number of ranks that hold each block. `streams`, if it was requested, has the health of each
    rank's stream.
    """

    scores: Mapping[InstanceId, Mapping[int, int]]
    frequencies: tuple[int, ...]
    instances: Mapping[InstanceId, Overlap]
    streams: Mapping[InstanceId, Mapping[int, str]] | None = None


@dataclass(frozen=True, slots=True)
class Rank:
    """A data-parallel rank of a worker."""

    worker_id: int
    dp_rank: int


@dataclass(frozen=True, slots=True)
class DeviceScores:
    """Leading blocks on the device, by rank."""

    scores: tuple[tuple[Rank, int], ...]
    frequencies: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TierHits:
    """Blocks by which a tier continues the match of the tiers above it, by rank."""

    hits: tuple[tuple[Rank, int], ...]


@dataclass(frozen=True, slots=True)
class Tiers:
    """Blocks by tier; `lower_tier` pairs `host_pinned`, `disk` and `external` with their hits."""

    device: DeviceScores
    lower_tier: tuple[tuple[str, TierHits], ...]


@dataclass(frozen=True, slots=True)
class TieredScores:
    """The number of blocks of a prompt that each rank caches on each tier."""

    block_size: int
    tiered: Tiers


@dataclass(frozen=True, slots=True)
class Instance:
    """A registered engine with its ranks; `status` and `stream` are those of its worst rank."""

    instance_id: InstanceId
    source: str
    status: str
    stream: str
    model_name: str
    tenant_id: str
    block_size: int
    questions: int
    matched: int
    endpoints: Mapping[int, str]
    listeners: Mapping[int, Listener]
    warning: str | None = None


@dataclass(frozen=True, slots=True)
class DumpedBlock:
    """A block: its name on its rank, and its local hash."""

    block_hash: int
    tokens_hash: int
    mm_extra_info: None


@dataclass(frozen=True, slots=True)
class DumpedRun:
    """Consecutive blocks; `parent_hash` names the block before them, None at a prompt's start."""

    parent_hash: int | None
    start_position: None
    blocks: tuple[DumpedBlock, ...]


@dataclass(frozen=True, slots=True)
class DumpedData:
    """The content of an event in a dump."""

    stored: DumpedRun


@dataclass(frozen=True, slots=True)
class DumpedEvent:
    """An event of a rank, numbered from 0 for each model, tenant and tier."""

    event_id: int
    data: DumpedData
    dp_rank: int


@dataclass(frozen=True, slots=True)
class DumpedRow:
    """Blocks of a rank on a tier: `device`, `host_pinned`, `disk` or `external`."""

    worker_id: InstanceId
    storage_tier: str
    event: DumpedEvent
    residency_domain: str | None = None


@dataclass(frozen=True, slots=True)
class DumpedPartition:
    """All indexed blocks of a model and tenant."""

    model_name: str
    tenant_id: str
    block_size: int
    events: tuple[DumpedRow, ...]


class Indexer(EveryFace[How]):
    """Answers how much of a prompt each worker caches.

    An unknown model or tenant is Refused with 404.
    """

    @asked("POST /query", repeatable=True)
    def query(
        self,
        model_name: str,
        token_ids: Sequence[int],
        *,
        tenant_id: str | None = None,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        streams: bool | None = None,
    ) -> Call[Scores]:
        """Returns how much of a prompt each rank caches, by its token ids."""
        return Call(
            {
                "model_name": model_name,
                "token_ids": token_ids,
                "tenant_id": tenant_id,
                "lora_name": lora_name,
                "cache_salt": cache_salt,
                "streams": streams,
            }
        )

    @asked("POST /query_by_hash", repeatable=True)
    def query_by_hash(
        self,
        model_name: str,
        block_hashes: Sequence[int],
        *,
        tenant_id: str | None = None,
        streams: bool | None = None,
    ) -> Call[Scores]:
        """Returns the same as `query`, by the prompt's local hashes (`local_hashes`).

        The hashes cover adapter and salt.
        """
        return Call(
            {
                "model_name": model_name,
                "block_hashes": block_hashes,
                "tenant_id": tenant_id,
                "streams": streams,
            }
        )

    @asked("POST /query_tiered_by_hash", repeatable=True)
    def query_tiered_by_hash(
        self, model_name: str, block_hashes: Sequence[int], *, tenant_id: str | None = None
    ) -> Call[TieredScores]:
        """Returns how many blocks of a prompt each rank caches on each tier, by local hashes."""
        return Call(
            {"model_name": model_name, "block_hashes": block_hashes, "tenant_id": tenant_id}
        )

    @asked("POST /register")
    def register(
        self,
        model_name: str,
        instance_id: int,
        endpoint: str,
        *,
        block_size: int,
        dp_rank: int = 0,
        tenant_id: str | None = None,
        replay_endpoint: str | None = None,
        curve_server_key: str | None = None,
    ) -> Call[None]:
        """Subscribes to a rank of an engine, whose PUB socket is at `endpoint`.

        `replay_endpoint` is where missed batches can be fetched. Refused with 409 if the rank is
        registered.
        """
        return Call(
            {
                "model_name": model_name,
                "instance_id": instance_id,
                "endpoint": endpoint,
                "block_size": block_size,
                "dp_rank": dp_rank,
                "tenant_id": tenant_id,
                "replay_endpoint": replay_endpoint,
                "curve_server_key": curve_server_key,
            }
        )

    @asked("POST /unregister", repeatable=True, ends=True)
    def unregister(
        self,
        model_name: str,
        instance_id: int,
        *,
        tenant_id: str | None = None,
        dp_rank: int | None = None,
    ) -> Call[None]:
        """Drops one rank of an engine, or all, with their blocks; for one tenant, or all."""
        return Call(
            {
                "model_name": model_name,
                "instance_id": instance_id,
                "tenant_id": tenant_id,
                "dp_rank": dp_rank,
            }
        )

    @asked("GET /workers", repeatable=True)
    def workers(
        self, *, model_name: str | None = None, tenant_id: str | None = None
    ) -> Call[tuple[Instance, ...]]:
        """Lists registered engines."""
        return Call(query=partition_members(model_name, tenant_id))

    @asked("GET /dump", repeatable=True)
    def dump(self) -> Call[Mapping[str, DumpedPartition]]:
        """Exports the index, by `model:tenant`; a large index exceeds `max_answer_bytes`."""
        return Call()

    @asked("POST /register_peer", repeatable=True)
    def register_peer(self, url: str) -> Call[None]:
        """Adds another indexer to the list of peers, which has no further effect."""
        return Call({"url": url})

    @asked("POST /deregister_peer", repeatable=True, ends=True)
    def deregister_peer(self, url: str) -> Call[None]:
        """Removes an indexer from the list of peers."""
        return Call({"url": url})

    @asked("GET /peers", repeatable=True)
    def peers(self) -> Call[tuple[str, ...]]:
        """Lists the URLs of peers."""
        return Call()

    @asked("POST /test/pause_listener")
    def pause_listener(
        self,
        instance_id: int,
        *,
        dp_rank: int = 0,
        model_name: str | None = None,
        tenant_id: str | None = None,
    ) -> Call[None]:
        """Pauses a listener, whose stream then loses batches; only where the daemon allows it."""
        return Call(listener(instance_id, dp_rank, model_name, tenant_id))

    @asked("POST /test/resume_listener")
    def resume_listener(
        self,
        instance_id: int,
        *,
        dp_rank: int = 0,
        model_name: str | None = None,
        tenant_id: str | None = None,
    ) -> Call[None]:
        """Ends the pause of a listener."""
        return Call(listener(instance_id, dp_rank, model_name, tenant_id))


def listener(
    instance_id: int, dp_rank: int, model_name: str | None, tenant_id: str | None
) -> dict[str, int | str | None]:
    """Returns the body that names the stream of a rank."""
    return {
        "instance_id": instance_id,
        "dp_rank": dp_rank,
        **partition_members(model_name, tenant_id),
    }
