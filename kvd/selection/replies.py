"""Renders the answers of selections: the chosen rank, and what the request asks for beside it."""

from __future__ import annotations

from typing import Any

from kvd.selection.candidates import Candidates, members_json
from kvd.selection.chooser import RankChooser
from kvd.selection.options import RouterOptions
from kvd.selection.policies import Policy
from kvd.selection.requests import Choice, SelectRequest
from kvd.selection.serving import opening
from kvd.selection.stats import SLO_OUTCOMES, SelectionStats
from kvd_core.selector.selector import Explained


class Replies:
    """The answers of all selections, in JSON."""

    def __init__(self, chooser: RankChooser, options: RouterOptions, stats: SelectionStats) -> None:
        self._chooser = chooser
        self._options = options
        self._stats = stats

    def answer(
        self,
        candidates: Candidates,
        request: SelectRequest,
        chosen: Choice,
        reservation_id: str | None,
        more: bytes = b"",
    ) -> bytes:
        """Returns the answer of a choice, with the rendered members `more`."""
        pool, eligible, factors = chosen.ranks
        members = candidates.render_rank(chosen.position) + more
        if request.explain:
            rows = pool.explain(chosen.settings, eligible, factors)
            explained = [self._explained(candidates, request, chosen, row) for row in rows]
            policy = str(Policy.of(request.settings))
            members += members_json({"router_policy": policy, "candidates": explained})
        if request.advisory:
            load = _load(candidates, chosen, self._options.prefill_busy)
            members += members_json({"worker_load": load})
        phase = None if chosen.phase is None else chosen.phase.value
        begin = opening(request.selection_id, reservation_id, phase)
        return pool.render_answer(begin, members, chosen.position, chosen.settings)

    def timed(self, candidates: Candidates, request: SelectRequest, chosen: Choice) -> bytes:
        """Returns the members about the time to the first token, if the request asks for them.

        `chosen` is the rank that computes the prompt.
        """
        if not request.expected_ttft and request.slo_ttft_s is None:
            return b""
        row = chosen.ranks.pool.explained(chosen.position, chosen.settings)
        expected_s = self._chooser.expected_ttft_s(candidates, row, chosen.phase)
        members: dict[str, Any] = {"expected_ttft_s": expected_s}
        if request.slo_ttft_s is not None:
            is_met = None if expected_s is None else expected_s <= request.slo_ttft_s
            self._stats.slo[SLO_OUTCOMES[is_met]] += 1
            members["slo_met"] = is_met
        return members_json(members)

    def _explained(
        self, candidates: Candidates, request: SelectRequest, chosen: Choice, row: Explained
    ) -> dict[str, Any]:
        """Returns a rank's cost and its terms, whether it has the session, its stream's health."""
        bound = self._chooser.session_target(request)
        has = bound is not None and row.worker_id == bound[0] and bound[1] in (None, row.dp_rank)
        expected_s = self._chooser.expected_ttft_s(candidates, row, chosen.phase)
        return row._asdict() | {
            "has_session": has,
            "expected_ttft_s": expected_s,
            "stream": self._chooser.stream(candidates.key, row.worker_id, row.dp_rank),
        }


def _load(candidates: Candidates, chosen: Choice, busy: float | None) -> dict[str, int | None]:
    """Returns the load of a chosen rank and the capacity of its worker; None is unknown.

    With `busy`, a number of batches, it also says whether the rank prefills more than that.
    """
    row = chosen.ranks.pool.explained(chosen.position, chosen.settings)
    record = candidates.workers[row.worker_id]
    tokens, capacity = row.active_prefill_tokens, record.max_num_batched_tokens
    load = {
        "active_prefill_tokens": tokens,
        "prefill_token_capacity": capacity,
        "total_kv_blocks": record.total_kv_blocks,
    }
    if busy is not None:
        load["prefill_busy"] = bool(capacity) and tokens > busy * (capacity or 0)
    return load
