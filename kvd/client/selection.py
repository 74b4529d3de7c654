"""The selection service's calls: docs/faces/selection.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from kvd.client.calls import Call, How, asked
from kvd.client.common import EveryFace, PotentialLoad, WithReplicas, partition_members
from kvd.client.decisions import (
    BusyThreshold,
    BusyThresholds,
    Freed,
    Loads,
    ModeShown,
    OverlapScores,
    PolicyShown,
    Ready,
    Regret,
    Reservation,
    Reserved,
    RouterModes,
    RouterPolicies,
    Selection,
    WorkerRecord,
)
from kvd.client.indexer import DumpedPartition
from kvd.client.selecting import (
    AdvisoryWish,
    Booking,
    Description,
    PlacedDescription,
    Prompt,
    SelectionWish,
)

PREFILL_COMPLETE = "POST /reservations/{reservation_id}/prefill_complete"
OUTPUT_BLOCK = "POST /reservations/{reservation_id}/output_block"
REPORT = "POST /reservations/{reservation_id}/report"


class SelectionService(EveryFace[How], WithReplicas[How]):
    """Names the worker that should serve a prompt, and books it.

    Unknown workers and reservations are Refused with 404, contradictions with 400 or 422, and
    selections that no worker can serve with 503.
    """

    @asked("GET /ready", repeatable=True, statuses=(200, 503))
    def ready(self) -> Call[Ready]:
        """Returns whether workers can be selected."""
        return Call()

    # ---- workers

    @asked("GET /workers", repeatable=True)
    def workers(
        self, *, model_name: str | None = None, tenant_id: str | None = None
    ) -> Call[tuple[WorkerRecord, ...]]:
        """Lists workers."""
        return Call(query=partition_members(model_name, tenant_id))

    @asked("POST /workers", repeatable=True)
    def put_worker(
        self, worker_id: int, **described: Unpack[PlacedDescription]
    ) -> Call[WorkerRecord]:
        """Adds a worker, or replaces the one with this id."""
        return Call({"worker_id": worker_id, **described})

    @asked("PUT /workers", repeatable=True)
    def set_workers(
        self,
        workers: Sequence[Mapping[str, Any]],
        *,
        model_name: str | None = None,
        tenant_id: str | None = None,
    ) -> Call[tuple[WorkerRecord, ...]]:
        """Sets all workers of a model and tenant: each has `put_worker`'s members."""
        return Call({"workers": workers, **partition_members(model_name, tenant_id)})

    @asked("PATCH /workers/{worker_id}", repeatable=True)
    def change_worker(self, worker_id: int, **described: Unpack[Description]) -> Call[WorkerRecord]:
        """Changes the members of a worker that are given."""
        return Call(described, worker_id)

    @asked("DELETE /workers/{worker_id}")
    def remove_worker(self, worker_id: int) -> Call[WorkerRecord]:
        """Removes a worker with its bookings."""
        return Call(segment=worker_id)

    # ---- choices

    @asked("POST /select", repeatable=True, waits=True)
    def select(self, **wish: Unpack[AdvisoryWish]) -> Call[Selection]:
        """Returns the rank that should serve a prompt; waits while all are busy."""
        return Call(wish)

    @asked("POST /select_and_reserve", waits=True)
    def select_and_reserve(
        self, *, idempotency_key: str | None = None, **wish: Unpack[SelectionWish]
    ) -> Call[Selection]:
        """Chooses a rank and books the prompt there; waits while all are busy.

        With an `idempotency_key` the call is repeated if its answer is lost, and then finds the
        booking. The client's `reserve` does that, and frees the reservation, too.
        """
        return Call(wish, key=idempotency_key)

    @asked("POST /potential_loads", repeatable=True)
    def potential_loads(self, **prompt: Unpack[Prompt]) -> Call[tuple[PotentialLoad, ...]]:
        """Returns the load that each rank would have with one more prompt."""
        return Call(prompt)

    @asked("POST /overlap_scores", repeatable=True)
    def overlap_scores(self, **prompt: Unpack[Prompt]) -> Call[OverlapScores]:
        """Returns how many blocks of a prompt each rank caches."""
        return Call(prompt)

    @asked("GET /loads", repeatable=True)
    def loads(
        self, *, model_name: str | None = None, tenant_id: str | None = None
    ) -> Call[tuple[Loads, ...]]:
        """Returns the load of each rank and the queued selections."""
        return Call(query=partition_members(model_name, tenant_id))

    # ---- reservations

    @asked("POST /reservations")
    def book(
        self, worker_id: int, *, idempotency_key: str | None = None, **booking: Unpack[Booking]
    ) -> Call[Reserved]:
        """Books a prompt on a rank that `select` has named; Refused with 409 if the id is live.

        With an `idempotency_key` the call is repeated when its answer is lost.
        """
        return Call({"worker_id": worker_id, **booking}, key=idempotency_key)

    @asked("GET /reservations/{reservation_id}", repeatable=True)
    def reservation(self, reservation_id: str) -> Call[Reservation]:
        """Shows a booking."""
        return Call(segment=reservation_id)

    @asked(PREFILL_COMPLETE, repeatable=True)
    def prefill_complete(self, reservation_id: str) -> Call[None]:
        """Reports that a reservation's prompt is processed: at the first token of the answer."""
        return Call(segment=reservation_id)

    @asked(OUTPUT_BLOCK)
    def output_block(
        self, reservation_id: str, *, decay_fraction: float | None = None
    ) -> Call[None]:
        """Reports that a reservation's answer has filled another block.

        With a `decay_fraction` (0 to 1), blocks that no other request shares weigh that much from
        then on.
        """
        return Call({"decay_fraction": decay_fraction}, reservation_id)

    @asked(REPORT)
    def report(
        self,
        reservation_id: str,
        *,
        prompt_tokens: int | None = None,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
        ttft_ms: float | None = None,
    ) -> Call[None]:
        """Reports the outcome of a reservation before it is freed, as far as known.

        `cached_tokens` needs `prompt_tokens` beside it; `ttft_ms` is the time to the first token
        in milliseconds.
        """
        given = {
            "prompt_tokens": prompt_tokens,
            "cached_tokens": cached_tokens,
            "output_tokens": output_tokens,
            "ttft_ms": ttft_ms,
        }
        return Call(given, reservation_id)

    @asked("DELETE /reservations/{reservation_id}", repeatable=True, ends=True)
    def free(self, reservation_id: str) -> Call[None]:
        """Ends a reservation."""
        return Call(segment=reservation_id)

    @asked("DELETE /reservations", repeatable=True)
    def free_by_prefix(self, prefix: str, spared: str | None = None) -> Call[Freed]:
        """Ends all reservations whose ids begin with `prefix`, as those of a caller that is gone.

        Those whose ids begin with `spared` stay. Repeated, it counts only what the last attempt has
        ended.
        """
        return Call(query={"prefix": prefix, "spared": spared})

    @asked("GET /regret", repeatable=True)
    def regret(self) -> Call[Regret]:
        """Compares the expected outcomes of choices with the reported ones."""
        return Call()

    # ---- tuning

    @asked("GET /busy_threshold", repeatable=True)
    def busy_thresholds(self) -> Call[BusyThresholds]:
        """Lists busy thresholds."""
        return Call()

    @asked("POST /busy_threshold", repeatable=True)
    def set_busy_threshold(
        self,
        model_name: str,
        *,
        tenant_id: str | None = None,
        active_decode_blocks_threshold: float | str | None = None,
        active_prefill_tokens_threshold: int | str | None = None,
        active_prefill_tokens_threshold_frac: float | str | None = None,
    ) -> Call[BusyThreshold]:
        """Sets the given thresholds of a model; `"off"` disables a threshold."""
        return Call(
            {
                **partition_members(model_name, tenant_id),
                "active_decode_blocks_threshold": active_decode_blocks_threshold,
                "active_prefill_tokens_threshold": active_prefill_tokens_threshold,
                "active_prefill_tokens_threshold_frac": active_prefill_tokens_threshold_frac,
            }
        )

    @asked("DELETE /busy_threshold", repeatable=True)
    def revert_busy_threshold(
        self, model_name: str, *, tenant_id: str | None = None
    ) -> Call[BusyThreshold]:
        """Reverts a model's thresholds to the defaults."""
        return Call(query=partition_members(model_name, tenant_id))

    @asked("GET /router_mode", repeatable=True)
    def router_modes(self) -> Call[RouterModes]:
        """Lists router modes."""
        return Call()

    @asked("POST /router_mode", repeatable=True)
    def set_router_mode(
        self, model_name: str, router_mode: str | None = None, *, tenant_id: str | None = None
    ) -> Call[ModeShown]:
        """Sets a model's router mode; without a mode, returns the present one."""
        return Call({"router_mode": router_mode, **partition_members(model_name, tenant_id)})

    @asked("DELETE /router_mode", repeatable=True)
    def revert_router_mode(
        self, model_name: str, *, tenant_id: str | None = None
    ) -> Call[ModeShown]:
        """Reverts a model's router mode to the default."""
        return Call(query=partition_members(model_name, tenant_id))

    @asked("GET /policy", repeatable=True)
    def router_policies(self) -> Call[RouterPolicies]:
        """Lists router policies, and the weights of each."""
        return Call()

    @asked("POST /policy", repeatable=True)
    def set_router_policy(
        self,
        model_name: str,
        router_policy: str | Mapping[str, Any] | None = None,
        *,
        tenant_id: str | None = None,
    ) -> Call[PolicyShown]:
        """Sets a model's router policy, by name or as `{"policy", "weights"}`.

        Without a policy it returns the present one.
        """
        return Call({"router_policy": router_policy, **partition_members(model_name, tenant_id)})

    @asked("DELETE /policy", repeatable=True)
    def revert_router_policy(
        self, model_name: str, *, tenant_id: str | None = None
    ) -> Call[PolicyShown]:
        """Reverts a model's router policy to the default."""
        return Call(query=partition_members(model_name, tenant_id))

    @asked("GET /dump", repeatable=True)
    def dump(self) -> Call[Mapping[str, DumpedPartition]]:
        """Exports the index, as the indexer does."""
        return Call()
