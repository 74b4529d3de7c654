"""The slot tracker's calls and answers: docs/faces/slot_tracker.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvd.client.calls import Call, How, asked
from kvd.client.common import EveryFace, PotentialLoad, WithReplicas, partition_members


@dataclass(frozen=True, slots=True)
class TrackedWorker:
    """A worker with ranks `dp_start` to `dp_start` + `dp_size` - 1."""

    worker_id: int
    model_name: str
    tenant_id: str
    block_size: int
    dp_start: int
    dp_size: int


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a rank: tokens being prefilled, distinct blocks of its live requests."""

    model_name: str
    tenant_id: str
    worker_id: int
    dp_rank: int
    active_prefill_tokens: int
    active_decode_blocks: int


@dataclass(frozen=True, slots=True)
class TrackedRequest:
    """A live request: its blocks, tokens to prefill, and age in seconds."""

    request_id: str
    model_name: str
    tenant_id: str
    worker_id: int
    dp_rank: int
    blocks: int
    new_isl_tokens: int
    active_prefill_tokens: int
    prefill_complete: bool
    output_blocks: int
    age_s: float


class SlotTracker(EveryFace[How], WithReplicas[How]):
    """Counts the requests that routers add and free, per rank.

    A prompt is a list of sequence hashes, one for each whole block (`sequence_hashes`). An unknown
    model, tenant, worker or request is Refused with 404.
    """

    @asked("POST /register")
    def register(
        self,
        model_name: str,
        worker_id: int,
        *,
        block_size: int,
        dp_start: int = 0,
        dp_size: int = 1,
        tenant_id: str | None = None,
    ) -> Call[None]:
        """Adds a worker with ranks from `dp_start` on; Refused with 409 if it exists."""
        return Call(
            {
                "model_name": model_name,
                "worker_id": worker_id,
                "block_size": block_size,
                "dp_start": dp_start,
                "dp_size": dp_size,
                "tenant_id": tenant_id,
            }
        )

    @asked("POST /unregister", repeatable=True, ends=True)
    def unregister(
        self, model_name: str, worker_id: int, *, tenant_id: str | None = None
    ) -> Call[None]:
        """Removes a worker with its requests."""
        return Call({"model_name": model_name, "worker_id": worker_id, "tenant_id": tenant_id})

    @asked("GET /workers", repeatable=True)
    def workers(
        self, *, model_name: str | None = None, tenant_id: str | None = None
    ) -> Call[tuple[TrackedWorker, ...]]:
        """Lists workers."""
        return Call(query=partition_members(model_name, tenant_id))

    @asked("POST /add")
    def add(
        self,
        model_name: str,
        request_id: str,
        *,
        worker_id: int,
        dp_rank: int,
        sequence_hashes: Sequence[int],
        new_isl_tokens: int = 0,
        tenant_id: str | None = None,
        idempotency_key: str | None = None,
    ) -> Call[None]:
        """Books a request on a rank, with `new_isl_tokens` to prefill.

        With an `idempotency_key` the call is repeated if its answer is lost. Hashes may be
        signed or unsigned. Refused with 409 if the id is live.
        """
        return Call(
            {
                "model_name": model_name,
                "request_id": request_id,
                "worker_id": worker_id,
                "dp_rank": dp_rank,
                "sequence_hashes": signed(sequence_hashes),
                "new_isl_tokens": new_isl_tokens,
                "tenant_id": tenant_id,
            },
            key=idempotency_key,
        )

    @asked("POST /prefill_complete", repeatable=True)
    def prefill_complete(
        self, model_name: str, request_id: str, *, tenant_id: str | None = None
    ) -> Call[None]:
        """Reports that a request's prompt is processed."""
        return Call(step(model_name, request_id, tenant_id))

    @asked("POST /free", repeatable=True)
    def free(self, model_name: str, request_id: str, *, tenant_id: str | None = None) -> Call[None]:
        """Reports that a request has ended, known or not."""
        return Call(step(model_name, request_id, tenant_id))

    @asked("GET /loads", repeatable=True)
    def loads(
        self, *, model_name: str | None = None, tenant_id: str | None = None
    ) -> Call[tuple[Load, ...]]:
        """Returns the load of each rank."""
        return Call(query=partition_members(model_name, tenant_id))

    @asked("POST /potential_loads", repeatable=True)
    def potential_loads(
        self,
        model_name: str,
        sequence_hashes: Sequence[int],
        *,
        new_isl_tokens: int = 0,
        tenant_id: str | None = None,
    ) -> Call[tuple[PotentialLoad, ...]]:
        """Returns the load that each rank would have with one more prompt."""
        return Call(
            {
                "model_name": model_name,
                "sequence_hashes": sequence_hashes,
                "new_isl_tokens": new_isl_tokens,
                "tenant_id": tenant_id,
            }
        )

    @asked("GET /requests/{request_id}", repeatable=True)
    def request(
        self, model_name: str, request_id: str, *, tenant_id: str | None = None
    ) -> Call[TrackedRequest]:
        """Shows a live request."""
        return Call(segment=request_id, query=partition_members(model_name, tenant_id))


def step(model_name: str, request_id: str, tenant_id: str | None) -> dict[str, str | None]:
    """Returns the body of a step of a request's life."""
    return {"model_name": model_name, "request_id": request_id, "tenant_id": tenant_id}


def signed(hashes: Sequence[int]) -> list[int]:
    """Returns hashes as signed numbers of the same bits; /add takes only these."""
    return [each - 2**64 if each >= 2**63 else each for each in hashes]
