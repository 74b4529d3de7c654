"""Books requests that an earlier or another process has booked, in their present state.

    Booked ──> Booking ── later steps ──> Booking ──> `rebook`, `add_outputs` ──> a face's ledger

Journals and replicas describe a request by its booking and the steps after it. Output blocks come
apart: those that fade make the prompt's blocks fade, too, but not those that another request has,
so the others should be booked before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvd.model import PartitionKey
from kvd.slots.live_requests import LiveRequests
from kvd.wire.lifecycle import Lifecycle, Outcome, Step
from kvd_core.ledger.journal import OUTPUT, PREFILLED, Booked, Stepped
from kvd_core.ledger.ledger import Ledger


@dataclass(slots=True)
class Booking:
    """A live request: its booking, and the effect of the steps since."""

    booked: Booked
    prefill_complete: bool
    output_blocks: int
    decayed_blocks: int
    fraction: float

    @classmethod
    def of(cls, booked: Booked) -> Booking:
        outputs = booked.output_blocks, booked.decayed_blocks, booked.fraction
        return cls(booked, booked.prefill_complete, *outputs)

    def take(self, step: Stepped) -> None:
        """Applies a step that does not end the request."""
        if step.kind == PREFILLED:
            self.prefill_complete = True
        elif step.kind == OUTPUT:
            self.output_blocks += 1
            if step.fraction is not None:
                self.decayed_blocks, self.fraction = self.output_blocks, step.fraction


def rebook(
    face: LiveRequests[Any],
    key: PartitionKey,
    block_size: int,
    booking: Booking,
    admitted_at: float,
) -> Outcome:
    """Books a request with its age, but without its output blocks; nobody is notified.

    Changes nothing unless the outcome is APPLIED.
    """
    booked = booking.booked
    outcome = face.rebook(
        Lifecycle(
            key,
            block_size,
            booked.request_id,
            booked.worker_id,
            booked.dp_rank,
            Step.ADD,
            booked.hashes,
            booked.tokens,
            booked.expected_output_tokens,
        ),
        admitted_at,
        booked.key,
    )
    if outcome is Outcome.APPLIED and booking.prefill_complete:
        face.ledger_of(key).prefill_complete(booked.request_id)
    return outcome


def add_outputs(ledger: Ledger, booking: Booking, have: int) -> None:
    """Adds the output blocks that a booked request, which has `have` of them, still lacks."""
    name, all_of_it = booking.booked.request_id, booking.output_blocks
    decayed = min(booking.decayed_blocks, all_of_it)
    if decayed > have:
        ledger.output_block(name, booking.fraction, decayed - have)
        have = decayed
    if all_of_it > have:
        ledger.output_block(name, None, all_of_it - have)
