"""A reservation in its caller's hands, between its booking and its end."""

from __future__ import annotations

from uuid import uuid4

from kvd.client.calls import Asker, Call, Face, How, asked
from kvd.client.decisions import Selection
from kvd.client.selection import OUTPUT_BLOCK, PREFILL_COMPLETE, REPORT


class Choice(Face[How]):
    """The rank that was chosen for a request, with the reservation there.

    `selection` is the whole answer. After the end of the `with` block, `freed` says whether the
    daemon has freed the reservation; if not, it lasts until it expires.
    """

    def __init__(self, asker: Asker, reservation_id: str, selection: Selection) -> None:
        super().__init__(asker)
        self.reservation_id = reservation_id
        self.selection = selection
        self.freed = False

    @property
    def worker(self) -> int:
        """The id of the worker that should serve the request."""
        return self.selection.worker_id

    @property
    def dp_rank(self) -> int:
        """The data-parallel rank of that worker."""
        return self.selection.dp_rank

    @property
    def endpoint(self) -> str:
        """The address that the worker was registered with, for requests."""
        return self.selection.endpoint

    @asked(PREFILL_COMPLETE, repeatable=True)
    def prefill_complete(self) -> Call[None]:
        """Reports that the prompt is processed: at the first token of the answer."""
        return Call(segment=self.reservation_id)

    @asked(OUTPUT_BLOCK)
    def output_block(self, *, decay_fraction: float | None = None) -> Call[None]:
        """Reports that the answer has filled another block; see `SelectionService.output_block`."""
        return Call({"decay_fraction": decay_fraction}, self.reservation_id)

    @asked(REPORT)
    def report(
        self,
        *,
        prompt_tokens: int | None = None,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
        ttft_ms: float | None = None,
    ) -> Call[None]:
        """Reports the outcome of the request, as far as known; see `SelectionService.report`."""
        given = {
            "prompt_tokens": prompt_tokens,
            "cached_tokens": cached_tokens,
            "output_tokens": output_tokens,
            "ttft_ms": ttft_ms,
        }
        return Call(given, self.reservation_id)


def new_reservation_id() -> str:
    """Returns a unique id, so that a booking found under it was made by this call."""
    return uuid4().hex
